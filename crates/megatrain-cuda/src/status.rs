//! Whether there is a usable GPU, for `doctor` and for tests; never fails.
use megatrain_core::Result;

use crate::driver::{self, Api};

/// The result.
#[derive(Clone, Debug, Default)]
pub struct Status {
    /// Why there is no usable device, in a sentence with the remedy; `None` when there is one.
    pub reason: Option<String>,
    /// The CUDA version that the driver supports, such as `12.8`.
    pub driver: Option<String>,
    /// The visible devices.
    pub devices: Vec<DeviceStatus>,
}

/// One visible device.
#[derive(Clone, Debug)]
pub struct DeviceStatus {
    /// Its name.
    pub name: String,
    /// Its memory in bytes.
    pub total_bytes: u64,
    /// Its compute capability.
    pub capability: (u32, u32),
}

/// Looks for the driver and its devices. Starts the driver, but no context: no device memory is used.
#[must_use]
pub fn status() -> Status {
    let api = match driver::api() {
        Ok(api) => api,
        Err(reason) => return Status { reason: Some(reason.to_owned()), ..Status::default() },
    };
    let driver = api.version().ok().map(|v| format!("{}.{}", v / 1000, v % 1000 / 10));
    match devices(api) {
        Ok(devices) if devices.is_empty() => {
            let reason = "the CUDA driver sees no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES".to_owned();
            Status { reason: Some(reason), driver, devices }
        }
        Ok(devices) => Status { reason: None, driver, devices },
        Err(error) => Status { reason: Some(error.to_string()), driver, devices: Vec::new() },
    }
}

fn devices(api: &Api) -> Result<Vec<DeviceStatus>> {
    (0..api.device_count()?)
        .map(|ordinal| {
            let device = api.device(ordinal)?;
            Ok(DeviceStatus {
                name: api.name(device)?,
                total_bytes: api.total_bytes(device)?,
                capability: api.capability(device)?,
            })
        })
        .collect()
}
