//! Flat memory that Python sees as a uint8 array.
use std::sync::Arc;

use megatrain_core::device::{DeviceMemory, Pin};
use megatrain_core::host::HostSpan;
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;

use crate::dlpack::{self, Lent};

/// Memory as a flat uint8 array.
#[pyclass(frozen, module = "megatrain._core")]
pub(crate) struct Buffer {
    lent: Lent,
}

impl Buffer {
    /// Memory of a device; `cuda` is its number, `None` for the simulated one.
    pub(crate) fn on_device(memory: DeviceMemory, cuda: Option<u32>) -> Self {
        Self { lent: Lent { owner: memory.owner, address: memory.address, len: memory.len, cuda } }
    }

    /// Host memory that is registered with a device for as long as anyone holds it.
    pub(crate) fn on_host(span: HostSpan, pin: Pin) -> Self {
        let (address, len) = (span.address() as usize as u64, span.len() as u64);
        // The pin goes first: registered memory must not be unmapped.
        Self { lent: Lent { owner: Arc::new((pin, span)), address, len, cuda: None } }
    }
}

#[pymethods]
impl Buffer {
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if self.lent.cuda.is_none()
            && let Some(stream) = stream
        {
            return Err(PyBufferError::new_err(format!(
                "host memory has no stream, {} was given",
                stream.repr()?.to_string_lossy()
            )));
        }
        dlpack::export(py, &self.lent, max_version, dl_device, copy)
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        self.lent.device()
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(usize::try_from(self.lent.len)?)
    }
}
