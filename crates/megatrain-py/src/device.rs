//! The devices, as Python names them.
use std::sync::Arc;

use megatrain_core::device::{Device as CoreDevice, DeviceFacts, sim};
use megatrain_core::host::HostSpan;
use megatrain_cuda::CudaDevice;
use pyo3::prelude::*;

use crate::buffer::Buffer;
use crate::error::{detached, interruptible};

/// Where layers are computed.
#[pyclass(frozen, module = "megatrain._core")]
pub(crate) struct Device {
    device: Arc<dyn CoreDevice>,
    /// The CUDA device's number.
    cuda: Option<u32>,
}

impl Device {
    pub(crate) fn core(&self) -> &Arc<dyn CoreDevice> {
        &self.device
    }

    /// The CUDA device's number.
    pub(crate) fn cuda_ordinal(&self) -> Option<u32> {
        self.cuda
    }

    fn facts(&self, py: Python<'_>) -> PyResult<DeviceFacts> {
        detached(py, || self.device.facts())
    }
}

#[pymethods]
impl Device {
    #[staticmethod]
    #[pyo3(signature = (seed = None, faults = None))]
    fn cpu(py: Python<'_>, seed: Option<u64>, faults: Option<&str>) -> PyResult<Self> {
        let device = detached(py, || sim::SimDevice::from_json(seed, faults))?;
        Ok(Self { device: Arc::new(device), cuda: None })
    }

    #[staticmethod]
    #[pyo3(name = "cuda", signature = (ordinal = 0))]
    fn open_cuda(py: Python<'_>, ordinal: u32) -> PyResult<Self> {
        let device = interruptible(py, "megatrain-cuda", move || CudaDevice::new(ordinal))?;
        Ok(Self { device: Arc::new(device), cuda: Some(ordinal) })
    }

    #[getter]
    fn kind(&self) -> &'static str {
        if self.cuda.is_some() { "cuda" } else { "cpu" }
    }

    #[getter]
    fn ordinal(&self) -> Option<u32> {
        self.cuda
    }

    #[getter]
    fn name(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.facts(py)?.name)
    }

    #[getter]
    fn total_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.facts(py)?.total_bytes)
    }

    #[getter]
    fn free_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.facts(py)?.free_bytes)
    }

    #[getter]
    fn capability(&self, py: Python<'_>) -> PyResult<(u32, u32)> {
        Ok(self.facts(py)?.capability)
    }

    fn allocate(&self, py: Python<'_>, bytes: u64) -> PyResult<Buffer> {
        let memory = detached(py, || self.device.allocate(bytes))?;
        Ok(Buffer::on_device(memory, self.cuda))
    }

    fn allocate_host(&self, py: Python<'_>, bytes: usize) -> PyResult<Buffer> {
        let (span, pin) = detached(py, || {
            let span = HostSpan::map(bytes)?;
            let pin = self.device.pin(&span)?;
            Ok((span, pin))
        })?;
        Ok(Buffer::on_host(span, pin))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let DeviceFacts { kind, name, total_bytes, .. } = self.facts(py)?;
        Ok(format!("Device({kind}: {name}, {:.1} GiB)", total_bytes as f64 / f64::from(1 << 30)))
    }
}
