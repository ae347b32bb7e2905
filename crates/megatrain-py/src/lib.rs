//! `megatrain._core`: the Python face of the core. Its documentation is in `python/megatrain/_core.pyi`.
use pyo3::prelude::*;

mod buffer;
mod device;
#[expect(unsafe_code, reason = "DLPack's C structs and capsules")]
mod dlpack;
mod engine;
mod error;
mod kernels;
mod op;
mod plan;
#[expect(unsafe_code, reason = "times queued copies of host memory")]
mod probe;

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    error::register(module)?;
    module.add_class::<device::Device>()?;
    module.add_class::<buffer::Buffer>()?;
    module.add_class::<op::ComputeOp>()?;
    module.add_class::<op::Outcome>()?;
    module.add_class::<engine::Engine>()?;
    module.add_class::<engine::Kept>()?;
    module.add_function(wrap_pyfunction!(plan::make_plan, module)?)?;
    module.add_function(wrap_pyfunction!(plan::fits, module)?)?;
    module.add_function(wrap_pyfunction!(plan::simulate, module)?)?;
    module.add_function(wrap_pyfunction!(plan::forecast, module)?)?;
    module.add_function(wrap_pyfunction!(plan::schedule, module)?)?;
    module.add_function(wrap_pyfunction!(kernels::adamw, module)?)?;
    module.add_function(wrap_pyfunction!(kernels::split, module)?)?;
    module.add_function(wrap_pyfunction!(kernels::isa, module)?)?;
    module.add_function(wrap_pyfunction!(probe::run_conformance, module)?)?;
    module.add_function(wrap_pyfunction!(probe::cuda_status, module)?)?;
    module.add_function(wrap_pyfunction!(probe::mappings_made, module)?)?;
    module.add_function(wrap_pyfunction!(probe::probe_host, module)?)?;
    module.add_function(wrap_pyfunction!(probe::probe_device, module)?)?;
    module.add_function(wrap_pyfunction!(probe::probe_beside_link, module)?)?;
    module.add_function(wrap_pyfunction!(probe::probe_state_disk, module)?)?;
    Ok(())
}
