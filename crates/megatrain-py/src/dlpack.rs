//! DLPack both ways: the engine's regions out to PyTorch, arrays of any library in for the calls that take them.
//!
//! **Out.** A region leaves as a flat uint8 tensor. Whoever consumes the capsule owns it from then on and ends it by the
//! deleter, on any thread, with or without the interpreter, perhaps after it has shut down: so what the deleter frees is
//! plain Rust (a box that holds an `Arc` of the memory) and nothing of Python's. Host memory leaves as kDLCPU even where
//! it is registered with the driver, since PyTorch refuses kDLCUDAHost and sees by the address that it is pinned.
//!
//! **In.** Only contiguous arrays in host memory, kDLCPU or (as a CUDA build of PyTorch calls its own pinned tensors)
//! kDLCUDAHost; anything else is refused with a sentence that says what was got.
use std::any::Any;
use std::ffi::{CStr, c_void};
use std::sync::Arc;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

mod array;

pub(crate) use array::{Array, Element};

const CPU: i32 = 1;
const CUDA: i32 = 2;
const CUDA_HOST: i32 = 3;
const LEGACY: &CStr = c"dltensor";
const LEGACY_USED: &CStr = c"used_dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";
const VERSIONED_USED: &CStr = c"used_dltensor_versioned";
/// The version that we write, and the highest major one that we read.
const VERSION: Version = Version { major: 1, minor: 0 };
const READ_ONLY: u64 = 1;

#[repr(C)]
#[derive(Clone, Copy)]
struct Version {
    major: u32,
    minor: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DlDevice {
    kind: i32,
    id: i32,
}

#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
struct DlDtype {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: DlDevice,
    ndim: i32,
    dtype: DlDtype,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct Managed {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

#[repr(C)]
struct ManagedVersioned {
    version: Version,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    tensor: DlTensor,
}

/// Memory that can be lent to other libraries.
#[derive(Clone)]
pub(crate) struct Lent {
    /// Keeps the memory alive.
    pub(crate) owner: Arc<dyn Any + Send + Sync>,
    /// First byte, on the device or the host.
    pub(crate) address: u64,
    /// Bytes.
    pub(crate) len: u64,
    /// The CUDA device's number; `None` for host memory.
    pub(crate) cuda: Option<u32>,
}

impl Lent {
    /// DLPack's device type and number.
    pub(crate) fn device(&self) -> (i32, i32) {
        match self.cuda {
            Some(ordinal) => (CUDA, i32::try_from(ordinal).unwrap_or(i32::MAX)),
            None => (CPU, 0),
        }
    }
}

/// What one consumer holds: the tensor it reads (first, so that both have one address), then what that points to.
#[repr(C)]
struct Export<M> {
    managed: M,
    shape: [i64; 1],
    strides: [i64; 1],
    owner: Arc<dyn Any + Send + Sync>,
}

impl<M> Export<M> {
    /// Boxes the export and gives its raw pointer; `fill` writes the tensor into the managed struct.
    fn into_raw(lent: &Lent, blank: M, fill: impl FnOnce(&mut M, DlTensor, *mut c_void)) -> *mut Self {
        let len = i64::try_from(lent.len).expect("fewer than 2^63 bytes");
        let boxed = Box::new(Self { managed: blank, shape: [len], strides: [1], owner: Arc::clone(&lent.owner) });
        let export = Box::into_raw(boxed);
        // SAFETY: the pointer comes from the box just now and nobody else has it.
        let inner = unsafe { &mut *export };
        let (kind, id) = lent.device();
        let tensor = DlTensor {
            data: lent.address as usize as *mut c_void,
            device: DlDevice { kind, id },
            ndim: 1,
            dtype: DlDtype { code: 1, bits: 8, lanes: 1 },
            shape: inner.shape.as_mut_ptr(),
            strides: inner.strides.as_mut_ptr(),
            byte_offset: 0,
        };
        fill(&mut inner.managed, tensor, export.cast());
        export
    }
}

unsafe extern "C" fn delete_legacy(managed: *mut Managed) {
    // SAFETY: the consumer passes the struct that we gave it, which lives until this call.
    let context = unsafe { (*managed).context };
    // SAFETY: the context is the box of `into_raw`, given back once, as the protocol demands.
    drop(unsafe { Box::from_raw(context.cast::<Export<Managed>>()) });
}

unsafe extern "C" fn delete_versioned(managed: *mut ManagedVersioned) {
    // SAFETY: the consumer passes the struct that we gave it, which lives until this call.
    let context = unsafe { (*managed).context };
    // SAFETY: the context is the box of `into_raw`, given back once, as the protocol demands.
    drop(unsafe { Box::from_raw(context.cast::<Export<ManagedVersioned>>()) });
}

/// Ends a capsule that nobody has consumed: a consumer would have renamed it.
unsafe extern "C" fn capsule_destructor(capsule: *mut ffi::PyObject) {
    // SAFETY: the interpreter passes the capsule that is going.
    if unsafe { ffi::PyCapsule_IsValid(capsule, LEGACY.as_ptr()) } == 1 {
        // SAFETY: valid under this name, so the pointer is the one that it was made with.
        let managed = unsafe { ffi::PyCapsule_GetPointer(capsule, LEGACY.as_ptr()) };
        // SAFETY: not consumed, so ours to end.
        unsafe { delete_legacy(managed.cast()) };
    }
    // SAFETY: as above.
    if unsafe { ffi::PyCapsule_IsValid(capsule, VERSIONED.as_ptr()) } == 1 {
        // SAFETY: as above.
        let managed = unsafe { ffi::PyCapsule_GetPointer(capsule, VERSIONED.as_ptr()) };
        // SAFETY: as above.
        unsafe { delete_versioned(managed.cast()) };
    }
}

fn new_capsule<'py>(py: Python<'py>, pointer: *mut c_void, name: &'static CStr) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: the pointer is not null, the name is static, and the destructor knows both kinds of struct.
    let capsule = unsafe { ffi::PyCapsule_New(pointer, name.as_ptr(), Some(capsule_destructor)) };
    // SAFETY: a new reference, or null with the error set.
    unsafe { Bound::from_owned_ptr_or_err(py, capsule) }
}

fn blank_tensor() -> DlTensor {
    DlTensor {
        data: std::ptr::null_mut(),
        device: DlDevice { kind: CPU, id: 0 },
        ndim: 0,
        dtype: DlDtype { code: 0, bits: 0, lanes: 0 },
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    }
}

/// `__dlpack__`, with the keywords of the array API standard. A stream is accepted and not waited for: the engine orders
/// its regions by its own events, op by op, and an export is made once a run, before the first op.
pub(crate) fn export<'py>(
    py: Python<'py>,
    lent: &Lent,
    max_version: Option<(u32, u32)>,
    dl_device: Option<(i32, i32)>,
    copy: Option<bool>,
) -> PyResult<Bound<'py, PyAny>> {
    let device = lent.device();
    if let Some(wanted) = dl_device
        && wanted != device
    {
        return Err(PyBufferError::new_err(format!(
            "this buffer is on device {device:?} and is not copied to {wanted:?}"
        )));
    }
    if copy == Some(true) {
        return Err(PyBufferError::new_err("a copy was asked for, but this buffer is only ever shared"));
    }
    if max_version.is_some_and(|(major, _)| major >= VERSION.major) {
        let tensor = blank_tensor();
        let blank =
            ManagedVersioned { version: VERSION, context: std::ptr::null_mut(), deleter: None, flags: 0, tensor };
        let export = Export::into_raw(lent, blank, |managed, tensor, context| {
            managed.tensor = tensor;
            managed.context = context;
            managed.deleter = Some(delete_versioned);
        });
        new_capsule(py, export.cast(), VERSIONED)
    } else {
        let blank = Managed { tensor: blank_tensor(), context: std::ptr::null_mut(), deleter: None };
        let export = Export::into_raw(lent, blank, |managed, tensor, context| {
            managed.tensor = tensor;
            managed.context = context;
            managed.deleter = Some(delete_legacy);
        });
        new_capsule(py, export.cast(), LEGACY)
    }
}
