//! What this machine has and how fast it is.
use pyo3::prelude::*;
use serde_json::json;

use crate::error::detached;

/// JSON `{available, reason, driver, devices: [...]}`; never raises, with or without a driver.
#[pyfunction]
pub(crate) fn cuda_status(py: Python<'_>) -> PyResult<String> {
    let status = detached(py, || Ok(megatrain_cuda::status()))?;
    let devices: Vec<_> = status
        .devices
        .iter()
        .map(|d| json!({"name": d.name, "total_bytes": d.total_bytes, "capability": [d.capability.0, d.capability.1]}))
        .collect();
    let answer = json!({
        "available": status.reason.is_none(),
        "reason": status.reason,
        "driver": status.driver,
        "devices": devices,
    });
    Ok(answer.to_string())
}
