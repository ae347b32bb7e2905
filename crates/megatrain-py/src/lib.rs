//! `megatrain._core`: the Python face of the core. What everything does is told in `python/megatrain/_core.pyi`.
use pyo3::prelude::*;

mod buffer;
mod device;
#[expect(unsafe_code, reason = "DLPack's C structs and capsules")]
mod dlpack;
mod error;
mod kernels;
mod probe;

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    error::register(module)?;
    module.add_class::<device::Device>()?;
    module.add_class::<buffer::Buffer>()?;
    module.add_function(wrap_pyfunction!(kernels::adamw, module)?)?;
    module.add_function(wrap_pyfunction!(kernels::split, module)?)?;
    module.add_function(wrap_pyfunction!(kernels::isa, module)?)?;
    module.add_function(wrap_pyfunction!(probe::cuda_status, module)?)?;
    Ok(())
}
