//! The driver's codes with descriptions of our own: asking the driver for its descriptions would need a driver.
use megatrain_core::Error;

/// A driver call that did not return 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaError {
    /// The driver call.
    pub call: &'static str,
    /// What it returned.
    pub code: i32,
}

/// `CUDA_ERROR_OUT_OF_MEMORY`
pub(crate) const OUT_OF_MEMORY: i32 = 2;
/// `CUDA_ERROR_NOT_INITIALIZED`
pub(crate) const NOT_INITIALIZED: i32 = 3;
/// `CUDA_ERROR_STUB_LIBRARY`
pub(crate) const STUB_LIBRARY: i32 = 34;
/// `CUDA_ERROR_NO_DEVICE`
pub(crate) const NO_DEVICE: i32 = 100;
/// `CUDA_ERROR_NOT_READY`
pub(crate) const NOT_READY: i32 = 600;

impl CudaError {
    /// What the code means and, where there is something to do, what.
    #[must_use]
    pub fn meaning(self) -> &'static str {
        match self.code {
            1 => "invalid value",
            OUT_OF_MEMORY => "out of memory",
            NOT_INITIALIZED => {
                "the driver is not initialised (in a fork of the process that opened the device it never is; use spawn)"
            }
            4 => "the driver is shutting down",
            STUB_LIBRARY => "the library is a toolkit's stub, not a driver",
            46 => "the device is held exclusively or is busy; see nvidia-smi -q -d COMPUTE",
            NO_DEVICE => "no GPU is visible; check nvidia-smi and CUDA_VISIBLE_DEVICES",
            101 => "no device of that number",
            200 => "the kernel image is not valid for this driver",
            201 => "invalid or destroyed context",
            209 => "no kernel image for this GPU",
            214 => "uncorrectable memory error (ECC) on the GPU; it needs a reset",
            218 => "the driver could not assemble the kernels (PTX)",
            222 => "the driver is older than the kernels' PTX version; update the NVIDIA driver",
            304 => "the operating system refused (limits, or memory that cannot be registered)",
            400 => "invalid handle",
            500 => "not found",
            NOT_READY => "not ready",
            700 => "illegal address in a kernel; the context is lost",
            701 => "too many resources for a launch",
            702 => "a kernel ran too long for the display's watchdog",
            712 => "the host memory is already registered",
            713 => "the host memory is not registered",
            716 => "misaligned address in a kernel; the context is lost",
            719 => "a kernel failed; the context is lost",
            800 => "not permitted",
            801 => "not supported on this system",
            802 => "the system is not ready (on NVSwitch machines: is the fabric manager running?)",
            803 => "the driver's kernel module and library differ in version; reboot or reinstall the NVIDIA driver",
            804 => {
                "the forward-compatibility libraries do not support this GPU; remove cuda-compat from the loader path"
            }
            999 => "unknown error of the driver; see dmesg",
            _ => "see the CUDA driver API's list of results",
        }
    }
}

impl std::fmt::Display for CudaError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} answered {}: {}", self.call, self.code, self.meaning())
    }
}

impl std::error::Error for CudaError {}

impl From<CudaError> for Error {
    fn from(error: CudaError) -> Self {
        Self::Device { call: error.call, code: error.code, detail: error.meaning().to_owned() }
    }
}

/// 0 is success; everything else an error that names its call.
pub(crate) fn check(call: &'static str, code: i32) -> Result<(), CudaError> {
    if code == 0 { Ok(()) } else { Err(CudaError { call, code }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_its_call_its_code_and_what_to_do_without_a_driver() {
        let error = CudaError { call: "cuInit", code: 803 };
        assert!(error.to_string().starts_with("cuInit answered 803: "));
        assert!(error.to_string().contains("reboot"));
        let unknown = Error::from(CudaError { call: "cuInit", code: 12345 });
        assert!(unknown.to_string().contains("12345"), "{unknown}");
    }

    #[test]
    fn only_zero_is_success() {
        assert!(check("cuInit", 0).is_ok());
        assert_eq!(check("cuInit", -1), Err(CudaError { call: "cuInit", code: -1 }));
    }
}
