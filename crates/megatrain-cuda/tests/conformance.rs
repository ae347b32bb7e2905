//! The core's suite for devices, on a real card. Where there is none, it says why and passes.
use megatrain_core::Error;
use megatrain_core::device::conformance::conformance;
use megatrain_cuda::CudaDevice;

#[test]
fn the_cuda_device_passes_the_suite_that_every_device_passes() {
    match CudaDevice::new(0) {
        Ok(device) => conformance(&device).unwrap(),
        Err(Error::NoDevice { reason }) => println!("not run: {reason}"),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_device_that_does_not_exist_is_refused_with_its_number_or_the_missing_driver() {
    match CudaDevice::new(4096) {
        Err(Error::NoDevice { reason }) => assert!(reason.contains("4096") || reason.contains("driver"), "{reason}"),
        Err(error) => panic!("{error}"),
        Ok(device) => panic!("device {} was opened", device.ordinal()),
    }
}
