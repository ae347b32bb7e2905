//! The driver calls that we use, found at run time.
//!
//! Of cudarc we take the search for the library, its handle types and constants. The calls themselves are looked up here,
//! all at once, because cudarc's own look-up panics on the first symbol that a driver lacks, and because its functions
//! return a Rust enum: a code that a newer driver has added would be undefined behaviour.
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::{self, CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUmodule, CUstream};

use megatrain_core::host::Process;

use crate::error::{CudaError, NO_DEVICE, NOT_INITIALIZED, STUB_LIBRARY, check};

mod handles;

pub(crate) use handles::{Arg, Function, Module, OwnedStream, RawEvent, Region, Registration, StreamHandle};

macro_rules! calls {
    ($($name:ident($($arg:ty),* $(,)?);)*) => {
        /// The calls, each under the driver's own name.
        #[allow(non_snake_case)]
        pub(crate) struct Api { $($name: unsafe extern "C" fn($($arg),*) -> c_int,)* }

        impl Api {
            fn find() -> Result<Self, String> {
                // SAFETY: is_culib_present has found a library that loads, so this does not panic; a driver's
                // initialisers are meant to be run by whoever loads it.
                let library = unsafe { sys::culib() };
                Ok(Self { $($name: {
                    // SAFETY: the signature is the one in the driver API's header for this versioned name.
                    let found = unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) };
                    *found.map_err(|_| missing(stringify!($name)))?
                },)* })
            }
        }
    };
}

calls! {
    cuInit(c_uint);
    cuDriverGetVersion(*mut c_int);
    cuDeviceGetCount(*mut c_int);
    cuDeviceGet(*mut CUdevice, c_int);
    cuDeviceGetName(*mut c_char, c_int, CUdevice);
    cuDeviceTotalMem_v2(*mut usize, CUdevice);
    cuDeviceGetAttribute(*mut c_int, sys::CUdevice_attribute, CUdevice);
    cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
    cuDevicePrimaryCtxRelease_v2(CUdevice);
    cuCtxGetCurrent(*mut CUcontext);
    cuCtxSetCurrent(CUcontext);
    cuCtxSynchronize();
    cuMemGetInfo_v2(*mut usize, *mut usize);
    cuMemAlloc_v2(*mut CUdeviceptr, usize);
    cuMemFree_v2(CUdeviceptr);
    cuMemsetD8Async(CUdeviceptr, u8, usize, CUstream);
    cuMemHostRegister_v2(*mut c_void, usize, c_uint);
    cuMemHostUnregister(*mut c_void);
    cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream);
    cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream);
    cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, usize, CUstream);
    cuStreamCreate(*mut CUstream, c_uint);
    cuStreamDestroy_v2(CUstream);
    cuStreamSynchronize(CUstream);
    cuStreamWaitEvent(CUstream, CUevent, c_uint);
    cuEventCreate(*mut CUevent, c_uint);
    cuEventDestroy_v2(CUevent);
    cuEventRecord(CUevent, CUstream);
    cuEventQuery(CUevent);
    cuEventSynchronize(CUevent);
    cuEventElapsedTime(*mut f32, CUevent, CUevent);
    cuModuleLoadDataEx(*mut CUmodule, *const c_void, c_uint, *mut sys::CUjit_option, *mut *mut c_void);
    cuModuleUnload(CUmodule);
    cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char);
    cuLaunchKernel(CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream,
        *mut *mut c_void, *mut *mut c_void);
}

fn missing(symbol: &str) -> String {
    format!(
        "the CUDA driver library lacks {symbol}: it is too old, or not a driver; install an NVIDIA driver of CUDA 11.4 \
         or later (470+)"
    )
}

/// The initialised driver, or a sentence saying why there is none and what to do.
pub(crate) fn api() -> Result<&'static Api, &'static str> {
    static API: OnceLock<Result<Api, String>> = OnceLock::new();
    API.get_or_init(|| {
        // SAFETY: loading a library runs its initialisers; a driver's are meant to be run by whoever loads it.
        if !unsafe { sys::is_culib_present() } {
            return Err(
                "no CUDA driver: neither libcuda.so nor libcuda.so.1 can be loaded; install the NVIDIA driver, \
                        or start the container with its GPUs (docker run --gpus all)"
                    .to_owned(),
            );
        }
        let api = Api::find()?;
        // SAFETY: the flags must be 0, and are.
        let code = unsafe { (api.cuInit)(0) };
        match check("cuInit", code) {
            Ok(()) => Ok(api),
            Err(CudaError { code: STUB_LIBRARY, .. }) => Err("the CUDA library that the loader finds first is a \
                 toolkit's stub, not a driver (cuInit answered 34): take the toolkit's stubs folder out of \
                 LD_LIBRARY_PATH, or install the NVIDIA driver"
                .to_owned()),
            Err(CudaError { code: NO_DEVICE, .. }) => Err("the CUDA driver is installed but sees no GPU (cuInit \
                 answered 100): check nvidia-smi and CUDA_VISIBLE_DEVICES"
                .to_owned()),
            Err(error) => Err(format!("the CUDA driver does not start: {error}")),
        }
    })
    .as_ref()
    .map_err(String::as_str)
}

impl Api {
    /// The CUDA version of the driver: 12080 is 12.8.
    pub(crate) fn version(&self) -> Result<i32, CudaError> {
        let mut version = 0;
        // SAFETY: the pointer is to a live int.
        let code = unsafe { (self.cuDriverGetVersion)(&raw mut version) };
        check("cuDriverGetVersion", code)?;
        Ok(version)
    }

    /// Visible devices.
    pub(crate) fn device_count(&self) -> Result<i32, CudaError> {
        let mut count = 0;
        // SAFETY: the pointer is to a live int.
        let code = unsafe { (self.cuDeviceGetCount)(&raw mut count) };
        check("cuDeviceGetCount", code)?;
        Ok(count)
    }

    pub(crate) fn device(&self, ordinal: i32) -> Result<CUdevice, CudaError> {
        let mut device = 0;
        // SAFETY: the pointer is to a live device handle; a wrong ordinal is an error code, not a fault.
        let code = unsafe { (self.cuDeviceGet)(&raw mut device, ordinal) };
        check("cuDeviceGet", code)?;
        Ok(device)
    }

    pub(crate) fn name(&self, device: CUdevice) -> Result<String, CudaError> {
        let mut bytes = [0u8; 256];
        // SAFETY: the driver writes at most 255 bytes and a NUL into the 256 that are passed.
        let code = unsafe { (self.cuDeviceGetName)(bytes.as_mut_ptr().cast(), 255, device) };
        check("cuDeviceGetName", code)?;
        let len = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len());
        Ok(String::from_utf8_lossy(&bytes[..len]).into_owned())
    }

    pub(crate) fn total_bytes(&self, device: CUdevice) -> Result<u64, CudaError> {
        let mut bytes = 0usize;
        // SAFETY: the pointer is to a live size.
        let code = unsafe { (self.cuDeviceTotalMem_v2)(&raw mut bytes, device) };
        check("cuDeviceTotalMem_v2", code)?;
        Ok(bytes as u64)
    }

    pub(crate) fn attribute(&self, device: CUdevice, which: sys::CUdevice_attribute) -> Result<i32, CudaError> {
        let mut value = 0;
        // SAFETY: the pointer is to a live int.
        let code = unsafe { (self.cuDeviceGetAttribute)(&raw mut value, which, device) };
        check("cuDeviceGetAttribute", code)?;
        Ok(value)
    }

    /// Compute capability, such as (9, 0).
    pub(crate) fn capability(&self, device: CUdevice) -> Result<(u32, u32), CudaError> {
        use sys::CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
        };
        Ok((self.attribute(device, MAJOR)?.unsigned_abs(), self.attribute(device, MINOR)?.unsigned_abs()))
    }
}

/// A device's primary context: the one that PyTorch computes in. Released when the last user goes.
pub(crate) struct Context {
    pub(crate) api: &'static Api,
    pub(crate) device: CUdevice,
    handle: CUcontext,
    /// The driver works in no other.
    process: Process,
}

// SAFETY: a context may be used from any thread that makes it current, several at once; the driver locks.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub(crate) fn retain(api: &'static Api, device: CUdevice) -> Result<Arc<Self>, CudaError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the pointer is to a live handle and the device came from cuDeviceGet.
        let code = unsafe { (api.cuDevicePrimaryCtxRetain)(&raw mut handle, device) };
        check("cuDevicePrimaryCtxRetain", code)?;
        Ok(Arc::new(Self { api, device, handle, process: Process::current() }))
    }

    /// Makes the context this thread's current one until the guard goes. PyTorch reads its current device off the
    /// current context, so whatever was current before comes back.
    pub(crate) fn bind(&self) -> Result<Bound<'_>, CudaError> {
        // Everything that is given back passes here too, so that a fork lets go of it without a call.
        if self.process.is_forked() {
            return Err(CudaError { call: "cuCtxSetCurrent", code: NOT_INITIALIZED });
        }
        let mut before = std::ptr::null_mut();
        // SAFETY: the pointer is to a live handle.
        let code = unsafe { (self.api.cuCtxGetCurrent)(&raw mut before) };
        check("cuCtxGetCurrent", code)?;
        if before == self.handle {
            return Ok(Bound { context: self, before: None });
        }
        // SAFETY: the context is retained for as long as self lives.
        let code = unsafe { (self.api.cuCtxSetCurrent)(self.handle) };
        check("cuCtxSetCurrent", code)?;
        Ok(Bound { context: self, before: (!before.is_null()).then_some(before) })
    }

    /// Waits for everything queued in the context, by anyone.
    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        let _bound = self.bind()?;
        // SAFETY: a context is current.
        check("cuCtxSynchronize", unsafe { (self.api.cuCtxSynchronize)() })
    }

    /// Free and total bytes of the device.
    pub(crate) fn memory(&self) -> Result<(u64, u64), CudaError> {
        let _bound = self.bind()?;
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: both pointers are to live sizes and a context is current.
        let code = unsafe { (self.api.cuMemGetInfo_v2)(&raw mut free, &raw mut total) };
        check("cuMemGetInfo_v2", code)?;
        Ok((free as u64, total as u64))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.process.is_forked() {
            return;
        }
        // A failure here belongs to whoever caused it (or to the process ending) and would only confuse a later call.
        // SAFETY: gives back the one reference that retain took.
        let _ = unsafe { (self.api.cuDevicePrimaryCtxRelease_v2)(self.device) };
    }
}

/// The context is current on this thread.
pub(crate) struct Bound<'a> {
    context: &'a Context,
    before: Option<CUcontext>,
}

impl Drop for Bound<'_> {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: it was this thread's current context a moment ago; its owner keeps it.
            let _ = unsafe { (self.context.api.cuCtxSetCurrent)(before) };
        }
    }
}
