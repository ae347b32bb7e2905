//! `megatrain._core`: the Python face of the core. What everything does is told in `python/megatrain/_core.pyi`.
use pyo3::prelude::*;

mod error;
mod probe;

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    error::register(module)?;
    module.add_function(wrap_pyfunction!(probe::cuda_status, module)?)?;
    Ok(())
}
