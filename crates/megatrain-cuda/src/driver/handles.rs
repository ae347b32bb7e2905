//! What the driver hands out, each owned by one value and given back when that goes.
//!
//! Copies are queued and run later. What keeps them sound: pageable host memory is done with when the call returns (the
//! driver stages it); registered host memory is kept by its [`Registration`], which waits for the device before it lets
//! go; and freeing device memory waits for the device. Who may read or write which host bytes meanwhile is what callers of
//! the two copies promise.
use std::ffi::{CStr, CString, c_void};
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdeviceptr, CUevent, CUfunction, CUmodule, CUstream};
use megatrain_core::device::DeviceMemory;
use megatrain_core::host::HostSpan;

use super::{Bound, Context};
use crate::error::{CudaError, NOT_READY, check};

/// `CU_STREAM_NON_BLOCKING`: not ordered with the legacy default stream; only events order it.
const NON_BLOCKING: u32 = 1;
/// `CU_MEMHOSTREGISTER_PORTABLE`: registered for every context.
const PORTABLE: u32 = 1;
/// `CU_EVENT_BLOCKING_SYNC`: a waiting thread sleeps.
const BLOCKING_SYNC: u32 = 1;

/// A stream, ours or PyTorch's, by its handle.
#[derive(Clone, Copy)]
pub(crate) struct StreamHandle(pub(crate) u64);

impl StreamHandle {
    fn raw(self) -> CUstream {
        self.0 as usize as CUstream
    }
}

/// A stream of ours.
pub(crate) struct OwnedStream {
    context: Arc<Context>,
    handle: StreamHandle,
}

impl OwnedStream {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let _bound = context.bind()?;
        let mut stream = std::ptr::null_mut();
        // SAFETY: the pointer is to a live handle and the context is current.
        let code = unsafe { (context.api.cuStreamCreate)(&raw mut stream, NON_BLOCKING) };
        check("cuStreamCreate", code)?;
        Ok(Self { context: Arc::clone(context), handle: StreamHandle(stream as usize as u64) })
    }

    pub(crate) fn handle(&self) -> StreamHandle {
        self.handle
    }
}

impl Drop for OwnedStream {
    fn drop(&mut self) {
        if let Ok(_bound) = self.context.bind() {
            // SAFETY: the stream is ours and nobody else has kept its handle; queued work still completes.
            let _ = unsafe { (self.context.api.cuStreamDestroy_v2)(self.handle.raw()) };
        }
    }
}

/// What is queued on a stream.
impl Context {
    /// # Safety
    /// As for [`megatrain_core::device::Device::copy_to_device`].
    pub(crate) unsafe fn copy_to_device(
        &self,
        stream: StreamHandle,
        src: &HostSpan,
        dst: &DeviceMemory,
    ) -> Result<(), CudaError> {
        let _bound = self.bind()?;
        // SAFETY: the span's bytes are mapped while it lives, and for as long as a queued copy reads them (module doc);
        // the caller has compared the lengths, and promises that nobody writes them meanwhile.
        let code = unsafe {
            (self.api.cuMemcpyHtoDAsync_v2)(dst.address, src.address().cast::<c_void>(), src.len(), stream.raw())
        };
        check("cuMemcpyHtoDAsync_v2", code)
    }

    /// # Safety
    /// As for [`megatrain_core::device::Device::copy_to_host`].
    pub(crate) unsafe fn copy_to_host(
        &self,
        stream: StreamHandle,
        src: &DeviceMemory,
        dst: &HostSpan,
    ) -> Result<(), CudaError> {
        let _bound = self.bind()?;
        // SAFETY: as above, with the bytes written instead of read, so that nobody reads them either.
        let code = unsafe {
            (self.api.cuMemcpyDtoHAsync_v2)(dst.address().cast::<c_void>(), src.address, dst.len(), stream.raw())
        };
        check("cuMemcpyDtoHAsync_v2", code)
    }

    pub(crate) fn copy_on_device(
        &self,
        stream: StreamHandle,
        src: &DeviceMemory,
        dst: &DeviceMemory,
    ) -> Result<(), CudaError> {
        let _bound = self.bind()?;
        // SAFETY: both addresses are of device memory, where a wrong one is the device's error; freeing either waits.
        let code = unsafe { (self.api.cuMemcpyDtoDAsync_v2)(dst.address, src.address, dst.len as usize, stream.raw()) };
        check("cuMemcpyDtoDAsync_v2", code)
    }

    pub(crate) fn fill(&self, stream: StreamHandle, address: CUdeviceptr, len: u64, byte: u8) -> Result<(), CudaError> {
        let _bound = self.bind()?;
        // SAFETY: the address is of device memory, where a wrong one is the device's error; freeing it waits.
        let code = unsafe { (self.api.cuMemsetD8Async)(address, byte, len as usize, stream.raw()) };
        check("cuMemsetD8Async", code)
    }

    pub(crate) fn wait(&self, stream: StreamHandle, event: &RawEvent) -> Result<(), CudaError> {
        let _bound = self.bind()?;
        // SAFETY: the event lives; the driver takes its state at this call, so it may be recorded anew afterwards.
        let code = unsafe { (self.api.cuStreamWaitEvent)(stream.raw(), event.handle, 0) };
        check("cuStreamWaitEvent", code)
    }

    pub(crate) fn synchronize_stream(&self, stream: StreamHandle) -> Result<(), CudaError> {
        let _bound = self.bind()?;
        // SAFETY: the stream lives.
        check("cuStreamSynchronize", unsafe { (self.api.cuStreamSynchronize)(stream.raw()) })
    }
}

/// An event. It keeps time: every step reports how long each lane was busy.
pub(crate) struct RawEvent {
    context: Arc<Context>,
    handle: CUevent,
}

// SAFETY: the driver's calls on events may be made from any thread; recording is serialised by ownership (device.rs).
unsafe impl Send for RawEvent {}
// SAFETY: as above.
unsafe impl Sync for RawEvent {}

impl RawEvent {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let _bound = context.bind()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the pointer is to a live handle and the context is current.
        let code = unsafe { (context.api.cuEventCreate)(&raw mut handle, BLOCKING_SYNC) };
        check("cuEventCreate", code)?;
        Ok(Self { context: Arc::clone(context), handle })
    }

    pub(crate) fn record(&self, stream: StreamHandle) -> Result<(), CudaError> {
        let _bound = self.context.bind()?;
        // SAFETY: event and stream live and belong to the current context.
        check("cuEventRecord", unsafe { (self.context.api.cuEventRecord)(self.handle, stream.raw()) })
    }

    /// Whether it has passed. Only "not ready" is "not yet": any other code is an error.
    pub(crate) fn query(&self) -> Result<bool, CudaError> {
        let _bound = self.context.bind()?;
        // SAFETY: the event lives.
        match unsafe { (self.context.api.cuEventQuery)(self.handle) } {
            NOT_READY => Ok(false),
            code => check("cuEventQuery", code).map(|()| true),
        }
    }

    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        let _bound = self.context.bind()?;
        // SAFETY: the event lives.
        check("cuEventSynchronize", unsafe { (self.context.api.cuEventSynchronize)(self.handle) })
    }

    /// Milliseconds from `self` to `later`; both have passed.
    pub(crate) fn elapsed_ms(&self, later: &Self) -> Result<f32, CudaError> {
        let _bound = self.context.bind()?;
        let mut ms = 0.0;
        // SAFETY: the pointer is to a live float, both events live.
        let code = unsafe { (self.context.api.cuEventElapsedTime)(&raw mut ms, self.handle, later.handle) };
        check("cuEventElapsedTime", code)?;
        Ok(ms)
    }
}

impl Drop for RawEvent {
    fn drop(&mut self) {
        if let Ok(_bound) = self.context.bind() {
            // SAFETY: the handle is ours; the driver keeps what pending work still needs of it.
            let _ = unsafe { (self.context.api.cuEventDestroy_v2)(self.handle) };
        }
    }
}

/// Device memory.
pub(crate) struct Region {
    context: Arc<Context>,
    base: CUdeviceptr,
}

impl Region {
    pub(crate) fn new(context: &Arc<Context>, bytes: u64) -> Result<Self, CudaError> {
        let _bound = context.bind()?;
        let mut base = 0;
        // SAFETY: the pointer is to a live address and the context is current.
        let code = unsafe { (context.api.cuMemAlloc_v2)(&raw mut base, bytes as usize) };
        check("cuMemAlloc_v2", code)?;
        Ok(Self { context: Arc::clone(context), base })
    }

    pub(crate) fn address(&self) -> CUdeviceptr {
        self.base
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if let Ok(_bound) = self.context.bind() {
            // SAFETY: the address is that of the allocation, freed once; the driver waits for work that uses it.
            let _ = unsafe { (self.context.api.cuMemFree_v2)(self.base) };
        }
    }
}

/// Host memory registered with the driver. Keeps the memory mapped, and outlives every copy queued from or to it.
pub(crate) struct Registration {
    context: Arc<Context>,
    span: HostSpan,
}

impl Registration {
    pub(crate) fn new(context: &Arc<Context>, span: &HostSpan) -> Result<Self, CudaError> {
        let _bound = context.bind()?;
        // SAFETY: the span is mapped, and stays so because the registration keeps a clone of it.
        let code = unsafe { (context.api.cuMemHostRegister_v2)(span.address().cast::<c_void>(), span.len(), PORTABLE) };
        check("cuMemHostRegister_v2", code)?;
        Ok(Self { context: Arc::clone(context), span: span.clone() })
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // Copies may still be queued; a failure to wait means that the context is lost, and with it the copies.
        let _ = self.context.synchronize();
        if let Ok(_bound) = self.context.bind() {
            // SAFETY: the base address of a registration, unregistered once, with no copy in flight.
            let _ = unsafe { (self.context.api.cuMemHostUnregister)(self.span.address().cast::<c_void>()) };
        }
    }
}

/// A module of kernels, assembled by the driver for its GPU.
pub(crate) struct Module {
    context: Arc<Context>,
    handle: CUmodule,
}

// SAFETY: modules are used from any thread with the context current.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// Assembles PTX text. The error's second half is the assembler's log.
    pub(crate) fn assemble(context: &Arc<Context>, ptx: &str) -> Result<Self, (CudaError, String)> {
        use sys::CUjit_option::{CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
        let text = CString::new(ptx).expect("PTX text has no NUL inside");
        let mut log = vec![0u8; 4096];
        let mut options = [CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        let mut values = [log.as_mut_ptr().cast::<c_void>(), (log.len() - 1) as *mut c_void];
        let mut handle = std::ptr::null_mut();
        let _bound = context.bind().map_err(|e| (e, String::new()))?;
        // SAFETY: the text ends with NUL; the two options and values say where a log of 4095 bytes may be written.
        let code = unsafe {
            (context.api.cuModuleLoadDataEx)(
                &raw mut handle,
                text.as_ptr().cast(),
                2,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        check("cuModuleLoadDataEx", code).map_err(|error| {
            let words = CStr::from_bytes_until_nul(&log).map(|w| w.to_string_lossy().trim().to_owned());
            (error, words.unwrap_or_default())
        })?;
        Ok(Self { context: Arc::clone(context), handle })
    }

    /// The kernel `name`, which takes `num_args` arguments.
    pub(crate) fn function(self: &Arc<Self>, name: &CStr, num_args: usize) -> Result<Function, CudaError> {
        let _bound = self.context.bind()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the pointer is to a live handle, the module lives, the name ends with NUL.
        let code = unsafe { (self.context.api.cuModuleGetFunction)(&raw mut handle, self.handle, name.as_ptr()) };
        check("cuModuleGetFunction", code)?;
        Ok(Function { module: Arc::clone(self), handle, num_args })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if let Ok(_bound) = self.context.bind() {
            // SAFETY: the module is ours, and its functions keep it alive.
            let _ = unsafe { (self.context.api.cuModuleUnload)(self.handle) };
        }
    }
}

/// A kernel.
pub(crate) struct Function {
    module: Arc<Module>,
    handle: CUfunction,
    num_args: usize,
}

// SAFETY: functions are launched from any thread with the context current.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// A kernel's argument.
#[derive(Clone, Copy)]
pub(crate) enum Arg {
    U64(u64),
    U32(u32),
    F32(f32),
}

impl Function {
    /// Queues the kernel over `blocks` blocks of `threads` threads.
    pub(crate) fn launch(
        &self,
        stream: StreamHandle,
        blocks: u32,
        threads: u32,
        args: &[Arg],
    ) -> Result<(), CudaError> {
        assert_eq!(args.len(), self.num_args, "a kernel's argument list");
        let context = &self.module.context;
        let _bound: Bound<'_> = context.bind()?;
        // Each argument fills the low bytes of eight, so that the driver may read up to eight at each address.
        let mut cells: Vec<u64> = args
            .iter()
            .map(|arg| match *arg {
                Arg::U64(value) => value,
                Arg::U32(value) => u64::from(value),
                Arg::F32(value) => u64::from(value.to_bits()),
            })
            .collect();
        let mut addresses: Vec<*mut c_void> = cells.iter_mut().map(|cell| (&raw mut *cell).cast::<c_void>()).collect();
        // SAFETY: there are as many addresses as the kernel has parameters, none of them wider than eight bytes, and the
        // driver copies them before it returns. What the kernel does with device addresses can only fault on the device.
        let code = unsafe {
            (context.api.cuLaunchKernel)(
                self.handle,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                stream.raw(),
                addresses.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        check("cuLaunchKernel", code)
    }
}
