//! The CUDA device of `megatrain-core`.
//!
//! [`CudaDevice`] implements the core's [`Device`](megatrain_core::device::Device) over the driver API. Nothing is linked:
//! the driver is loaded when it is first asked for, so that this builds without a toolkit and runs (and says why there is
//! no device: [`status`]) without a driver.
//!
//! | word | meaning here |
//! |---|---|
//! | context | the device's primary one, which PyTorch computes in too |
//! | compute stream | PyTorch's, passed by handle; the upload, download and update streams are ours |
//! | event | a point in a stream; the only thing that orders one stream after another |
//! | pin | host memory of the core, registered with the driver |
//!
//! Errors carry the driver's code and our description of it ([`CudaError`]). An error met while something is given back (a
//! stream destroyed, memory freed) is dropped: what lost the context surfaces at the next real call anyway.
#![warn(missing_docs)]

#[expect(unsafe_code, reason = "the contract of queued copies is passed on")]
mod device;
#[expect(unsafe_code, reason = "the driver's C functions, each block with its argument")]
mod driver;
mod error;
mod kernels;
mod status;

pub use device::CudaDevice;
pub use error::CudaError;
pub use status::{DeviceStatus, Status, status};
