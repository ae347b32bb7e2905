//! Arrays of other libraries, taken in.
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use super::{
    CPU, CUDA, CUDA_HOST, DlDevice, DlDtype, DlTensor, LEGACY, LEGACY_USED, Managed, ManagedVersioned, READ_ONLY,
    VERSION, VERSIONED, VERSIONED_USED,
};

/// Element types that arrays may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    Bf16,
    F16,
    F32,
    F64,
    I64,
    I32,
    I16,
    I8,
    U16,
    U8,
    Bool,
}

impl Element {
    fn from_dlpack(dtype: DlDtype) -> Option<Self> {
        let DlDtype { code, bits, lanes } = dtype;
        if lanes != 1 {
            return None;
        }
        Some(match (code, bits) {
            (4, 16) => Self::Bf16,
            (2, 16) => Self::F16,
            (2, 32) => Self::F32,
            (2, 64) => Self::F64,
            (0, 64) => Self::I64,
            (0, 32) => Self::I32,
            (0, 16) => Self::I16,
            (0, 8) => Self::I8,
            (1, 16) => Self::U16,
            (1, 8) => Self::U8,
            (6, 8) => Self::Bool,
            _ => return None,
        })
    }

    /// Bytes an element.
    pub(crate) const fn size(self) -> usize {
        match self {
            Self::F64 | Self::I64 => 8,
            Self::F32 | Self::I32 => 4,
            Self::Bf16 | Self::F16 | Self::I16 | Self::U16 => 2,
            Self::I8 | Self::U8 | Self::Bool => 1,
        }
    }

    /// Its name, as PyTorch and NumPy write it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bfloat16",
            Self::F16 => "float16",
            Self::F32 => "float32",
            Self::F64 => "float64",
            Self::I64 => "int64",
            Self::I32 => "int32",
            Self::I16 => "int16",
            Self::I8 => "int8",
            Self::U16 => "uint16",
            Self::U8 => "uint8",
            Self::Bool => "bool",
        }
    }
}

fn dtype_name(dtype: DlDtype) -> String {
    Element::from_dlpack(dtype).map_or_else(
        || format!("DLPack type (code {}, {} bits, {} lanes)", dtype.code, dtype.bits, dtype.lanes),
        |element| element.name().to_owned(),
    )
}

fn device_name(device: DlDevice) -> String {
    match device.kind {
        CUDA => format!("CUDA device {}", device.id),
        kind => format!("DLPack device type {kind}"),
    }
}

/// Ours to end: the producer's struct, in either layout.
enum Owned {
    Legacy(*mut Managed),
    Versioned(*mut ManagedVersioned),
}

impl Drop for Owned {
    fn drop(&mut self) {
        match *self {
            Self::Legacy(managed) => {
                // SAFETY: the struct is ours since its capsule was renamed, and lives until its deleter runs.
                if let Some(deleter) = unsafe { (*managed).deleter } {
                    // SAFETY: called once, with the struct that carries it.
                    unsafe { deleter(managed) };
                }
            }
            Self::Versioned(managed) => {
                // SAFETY: as above.
                if let Some(deleter) = unsafe { (*managed).deleter } {
                    // SAFETY: as above.
                    unsafe { deleter(managed) };
                }
            }
        }
    }
}

/// A contiguous array in host memory, kept alive by us.
pub(crate) struct Array {
    data: *mut u8,
    numel: usize,
    element: Element,
    #[expect(dead_code, reason = "held, not read: dropping it lets the producer free the memory")]
    owned: Owned,
}

// SAFETY: the memory is plain numbers, and DLPack lets the deleter run on any thread.
unsafe impl Send for Array {}
// SAFETY: shared access only reads.
unsafe impl Sync for Array {}

impl Array {
    /// Takes `object` (anything with `__dlpack__`, or a capsule) as `name`, to be read.
    pub(crate) fn read(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::import(name, object, false)
    }

    /// The same, to be written.
    pub(crate) fn write(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::import(name, object, true)
    }

    fn import(name: &str, object: &Bound<'_, PyAny>, write: bool) -> PyResult<Self> {
        let capsule = request_capsule(name, object)?;
        let (owned, read_only) = consume(name, &capsule)?;
        let tensor = match owned {
            // SAFETY: the struct lives as long as `owned`, and only its deleter changes it.
            Owned::Legacy(managed) => unsafe { &raw const (*managed).tensor },
            // SAFETY: as above.
            Owned::Versioned(managed) => unsafe { &raw const (*managed).tensor },
        };
        // SAFETY: as above; the reference ends before `owned` can be dropped.
        let tensor = unsafe { &*tensor };
        if write && read_only {
            return Err(PyValueError::new_err(format!("{name}: a read-only array was given, and it is to be written")));
        }
        if tensor.device.kind != CPU && tensor.device.kind != CUDA_HOST {
            let place = device_name(tensor.device);
            return Err(PyValueError::new_err(format!(
                "{name}: the array is on {place}; one in host memory is needed (tensor.cpu())"
            )));
        }
        let element = Element::from_dlpack(tensor.dtype).ok_or_else(|| {
            PyTypeError::new_err(format!("{name}: {} is not among the supported dtypes", dtype_name(tensor.dtype)))
        })?;
        let numel = contiguous_numel(name, tensor)?;
        let data = tensor.data.cast::<u8>().wrapping_add(usize::try_from(tensor.byte_offset)?);
        if numel > 0 && (tensor.data.is_null() || !data.addr().is_multiple_of(element.size())) {
            return Err(PyValueError::new_err(format!(
                "{name}: the data at {data:p} are not aligned to the {} bytes of {}",
                element.size(),
                element.name()
            )));
        }
        Ok(Self { data, numel, element, owned })
    }

    /// Elements.
    pub(crate) fn numel(&self) -> usize {
        self.numel
    }

    /// Their type.
    pub(crate) fn element(&self) -> Element {
        self.element
    }

    /// Refuses any dtype but those of `allowed`.
    pub(crate) fn expect(&self, name: &str, allowed: &[Element]) -> PyResult<()> {
        if allowed.contains(&self.element) {
            return Ok(());
        }
        let names: Vec<&str> = allowed.iter().map(|e| e.name()).collect();
        let (got, wanted) = (self.element.name(), names.join(" or "));
        Err(PyTypeError::new_err(format!("{name}: {wanted} is needed, {got} was given")))
    }

    /// The address range, to see whether two arrays overlap.
    pub(crate) fn range(&self) -> std::ops::Range<usize> {
        self.data.addr()..self.data.addr() + self.numel * self.element.size()
    }

    /// The elements' bytes, to read.
    pub(crate) fn bytes(&self) -> &[u8] {
        let len = self.numel * self.element.size();
        if len == 0 {
            return &[];
        }
        // SAFETY: as in `slice`, byte by byte.
        unsafe { std::slice::from_raw_parts(self.data, len) }
    }

    /// The elements' bytes, to write.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        let len = self.numel * self.element.size();
        if len == 0 {
            return &mut [];
        }
        // SAFETY: as in `slice_mut`, byte by byte.
        unsafe { std::slice::from_raw_parts_mut(self.data, len) }
    }

    /// The elements, to read.
    ///
    /// # Panics
    /// When `T` is not as wide as the array's elements.
    pub(crate) fn slice<T: Number>(&self) -> &[T] {
        assert_eq!(size_of::<T>(), self.element.size(), "an array read as another type");
        if self.numel == 0 {
            return &[];
        }
        // SAFETY: `import` has found that many contiguous, aligned elements at a non-null address, which `owned` keeps;
        // any bytes are a `T`. That the caller's other threads leave the array alone is the documented contract.
        unsafe { std::slice::from_raw_parts(self.data.cast::<T>(), self.numel) }
    }

    /// The elements, to write.
    ///
    /// # Panics
    /// When `T` is not as wide as the array's elements.
    pub(crate) fn slice_mut<T: Number>(&mut self) -> &mut [T] {
        assert_eq!(size_of::<T>(), self.element.size(), "an array written as another type");
        if self.numel == 0 {
            return &mut [];
        }
        // SAFETY: as in `slice`; callers have refused arguments that overlap, so this is the only slice of these bytes.
        unsafe { std::slice::from_raw_parts_mut(self.data.cast::<T>(), self.numel) }
    }
}

/// Numbers of which any bytes are a value.
pub(crate) trait Number: Copy {}
impl Number for u16 {}
impl Number for i64 {}
impl Number for f32 {}

/// Asks the array for a capsule, with and (for producers older than DLPack 1.0) without the version keyword.
fn request_capsule<'py>(name: &str, object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = object.py();
    if object.is_instance_of::<PyCapsule>() {
        return Ok(object.clone());
    }
    if !object.hasattr("__dlpack__")? {
        return Err(PyTypeError::new_err(format!(
            "{name}: an array with __dlpack__ (a tensor of PyTorch, an array of NumPy) is needed, {} was given",
            object.get_type().name()?
        )));
    }
    if let Ok(device) = object.call_method0("__dlpack_device__").and_then(|d| d.extract::<(i32, i32)>())
        && device.0 != CPU
        && device.0 != CUDA_HOST
    {
        // Before the producer is made to synchronise a stream for nothing.
        let place = device_name(DlDevice { kind: device.0, id: device.1 });
        return Err(PyValueError::new_err(format!(
            "{name}: the array is on {place}; one in host memory is needed (tensor.cpu())"
        )));
    }
    let keywords = PyDict::new(py);
    keywords.set_item("max_version", (VERSION.major, VERSION.minor))?;
    match object.call_method("__dlpack__", (), Some(&keywords)) {
        Err(error) if error.is_instance_of::<PyTypeError>(py) => object.call_method0("__dlpack__"),
        answer => answer,
    }
}

/// Takes over what the capsule holds, and says whether it may only be read.
fn consume(name: &str, capsule: &Bound<'_, PyAny>) -> PyResult<(Owned, bool)> {
    let raw = capsule.as_ptr();
    // SAFETY: a live object; any kind may be asked.
    if unsafe { ffi::PyCapsule_IsValid(raw, VERSIONED.as_ptr()) } == 1 {
        // SAFETY: valid under this name.
        let managed = unsafe { ffi::PyCapsule_GetPointer(raw, VERSIONED.as_ptr()) }.cast::<ManagedVersioned>();
        // SAFETY: every major version begins with the version.
        let version = unsafe { (*managed).version };
        if version.major != VERSION.major {
            return Err(PyBufferError::new_err(format!(
                "{name}: DLPack {}.{} was given, {}.x is understood",
                version.major, version.minor, VERSION.major
            )));
        }
        // SAFETY: major version 1 has flags here.
        let flags = unsafe { (*managed).flags };
        // SAFETY: a valid capsule and a static name; from here on the struct is ours.
        if unsafe { ffi::PyCapsule_SetName(raw, VERSIONED_USED.as_ptr()) } != 0 {
            return Err(PyErr::fetch(capsule.py()));
        }
        return Ok((Owned::Versioned(managed), flags & READ_ONLY != 0));
    }
    // SAFETY: as above.
    if unsafe { ffi::PyCapsule_IsValid(raw, LEGACY.as_ptr()) } == 1 {
        // SAFETY: valid under this name.
        let managed = unsafe { ffi::PyCapsule_GetPointer(raw, LEGACY.as_ptr()) }.cast::<Managed>();
        // SAFETY: as above.
        if unsafe { ffi::PyCapsule_SetName(raw, LEGACY_USED.as_ptr()) } != 0 {
            return Err(PyErr::fetch(capsule.py()));
        }
        return Ok((Owned::Legacy(managed), false));
    }
    Err(PyBufferError::new_err(format!("{name}: not a DLPack capsule, or one that was consumed before")))
}

/// The number of elements of a contiguous tensor.
fn contiguous_numel(name: &str, tensor: &DlTensor) -> PyResult<usize> {
    let ndim = usize::try_from(tensor.ndim)?;
    let extent = |pointer: *mut i64| -> &[i64] {
        if ndim == 0 || pointer.is_null() {
            return &[];
        }
        // SAFETY: DLPack says that shape and (unless null) strides have ndim entries, which live as long as the tensor.
        unsafe { std::slice::from_raw_parts(pointer, ndim) }
    };
    let (shape, strides) = (extent(tensor.shape), extent(tensor.strides));
    let numel = shape.iter().try_fold(1usize, |product, &size| product.checked_mul(usize::try_from(size).ok()?));
    let bytes = numel.and_then(|n| n.checked_mul(usize::from(tensor.dtype.bits).div_ceil(8)));
    let numel = numel.filter(|_| shape.len() == ndim && bytes.is_some_and(|b| isize::try_from(b).is_ok())).ok_or_else(
        || PyValueError::new_err(format!("{name}: the shape {shape:?} is not one of an array in memory")),
    )?;
    let mut expected = 1i64;
    for (&size, &stride) in shape.iter().zip(strides).rev() {
        if numel > 0 && size != 1 && stride != expected {
            return Err(PyValueError::new_err(format!(
                "{name}: a contiguous array is needed, one of shape {shape:?} with strides {strides:?} was given \
                 (tensor.contiguous())"
            )));
        }
        expected = expected.saturating_mul(size);
    }
    Ok(numel)
}
