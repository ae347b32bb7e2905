//! The simulated device: it conforms, it is inconvenient, and it fails when asked to.
#![expect(unsafe_code, reason = "queues copies of host memory")]
use std::collections::BTreeMap;

use megatrain_core::Result;
use megatrain_core::device::conformance::conformance;
use megatrain_core::device::sim::{Faults, SimDevice};
use megatrain_core::device::{Device, DeviceMemory, Stream};
use megatrain_core::host::HostSpan;

#[test]
fn the_simulated_device_conforms_under_every_seed() {
    conformance(&SimDevice::new(None, Faults::default())).unwrap();
    for seed in 0..8 {
        conformance(&SimDevice::new(Some(seed), Faults::default())).unwrap();
        let delay_ms = BTreeMap::from([("download".to_owned(), 5.0), ("upload".to_owned(), 1.0)]);
        conformance(&SimDevice::new(Some(seed), Faults { delay_ms, ..Faults::default() })).unwrap();
    }
}

/// Queues a copy to the device; the test leaves the span alone until an event after it has passed.
fn send(device: &SimDevice, stream: Stream, span: &HostSpan, memory: &DeviceMemory) -> Result<()> {
    // SAFETY: callers keep what is promised above.
    unsafe { device.copy_to_device(stream, span, memory) }
}

/// Queues a copy to the host; likewise.
fn receive(device: &SimDevice, stream: Stream, memory: &DeviceMemory, span: &HostSpan) -> Result<()> {
    // SAFETY: callers keep what is promised above.
    unsafe { device.copy_to_host(stream, memory, span) }
}

/// Load, compute and offload over one buffer; with `waits` left out, some seeds must show wrong bytes.
fn run(seed: u64, load_before_compute: bool, compute_before_reload: bool) -> bool {
    let device = SimDevice::new(Some(seed), Faults::default());
    let (slot, result) = (device.allocate(64).unwrap(), device.allocate(64 * 8).unwrap());
    let mut computed = None;
    for i in 0..8u8 {
        if let Some(event) = computed.as_ref().filter(|_| compute_before_reload) {
            device.wait(Stream::Upload, event).unwrap();
        }
        let source = HostSpan::map(64).unwrap();
        source.fill(i + 1);
        send(&device, Stream::Upload, &source, &slot).unwrap();
        if load_before_compute {
            device.wait(Stream::Compute, &device.record(Stream::Upload).unwrap()).unwrap();
        }
        device.copy_on_device(Stream::Compute, &slot, &result.slice(u64::from(i) * 64, 64)).unwrap();
        computed = Some(device.record(Stream::Compute).unwrap());
    }
    let out = HostSpan::map(64 * 8).unwrap();
    device.wait(Stream::Download, computed.as_ref().unwrap()).unwrap();
    receive(&device, Stream::Download, &result, &out).unwrap();
    device.synchronize(&device.record(Stream::Download).unwrap()).unwrap();
    let bytes = out.elements::<u8>(0, 64 * 8);
    (0..8usize).all(|i| bytes[i * 64..(i + 1) * 64].iter().all(|&b| usize::from(b) == i + 1))
}

#[test]
fn a_forgotten_wait_shows_and_a_right_order_never_looks_wrong() {
    let right = |load, reload| (0..200).filter(|&seed| run(seed, load, reload)).count();
    assert_eq!(right(true, true), 200);
    assert!(right(false, true) < 5, "a forgotten load-before-compute wait hides");
    assert!(right(true, false) < 5, "a forgotten compute-before-reload wait hides");
}

#[test]
fn work_runs_only_when_something_waits() {
    let device = SimDevice::new(None, Faults::default());
    let (memory, out) = (device.allocate(16).unwrap(), HostSpan::map(16).unwrap());
    device.fill(Stream::Compute, &memory, 7).unwrap();
    receive(&device, Stream::Compute, &memory, &out).unwrap();
    let event = device.record(Stream::Compute).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert!(out.elements::<u8>(0, 16).iter().all(|&b| b == 0));
    device.synchronize(&event).unwrap();
    assert!(out.elements::<u8>(0, 16).iter().all(|&b| b == 7));
}

#[test]
fn faults_are_read_from_json_and_unknown_ones_are_refused() {
    let faults = r#"{"pin_limit_bytes": 4096, "fail": [{"call": "fill", "nth": 2}], "memory_bytes": 10000}"#;
    let device = SimDevice::from_json(Some(1), Some(faults)).unwrap();
    let span = HostSpan::map(8192).unwrap();
    assert!(device.pin(&span).err().unwrap().to_string().contains("limit 4096"));
    let pin = device.pin(&span.slice(0, 4096)).unwrap();
    let memory = device.allocate(8192).unwrap();
    assert!(device.allocate(8192).unwrap_err().to_string().contains("8192 of 10000 in use"));
    device.fill(Stream::Upload, &memory, 1).unwrap();
    assert!(device.fill(Stream::Upload, &memory, 1).unwrap_err().to_string().contains("call 2 of fill"));
    device.fill(Stream::Upload, &memory, 1).unwrap();
    // A copy must be inside one registration, or outside all of them.
    let straddling = receive(&device, Stream::Download, &memory.slice(0, 4096), &span.slice(2048, 4096));
    assert!(straddling.unwrap_err().to_string().contains("straddle"));
    drop(pin);
    receive(&device, Stream::Download, &memory.slice(0, 4096), &span.slice(2048, 4096)).unwrap();
    let error = SimDevice::from_json(None, Some(r#"{"fial": []}"#)).err().unwrap().to_string();
    assert!(error.contains("fial"), "{error}");
}

#[test]
fn the_virtual_clock_counts_bytes_and_delays() {
    let delay_ms = BTreeMap::from([("upload".to_owned(), 3.0)]);
    let device = SimDevice::new(None, Faults { delay_ms, ..Faults::default() });
    let (memory, span) = (device.allocate(1 << 20).unwrap(), HostSpan::map(1 << 20).unwrap());
    let before = device.record(Stream::Upload).unwrap();
    send(&device, Stream::Upload, &span, &memory).unwrap();
    let after = device.record(Stream::Upload).unwrap();
    device.synchronize(&after).unwrap();
    let ms = device.elapsed_ms(&before, &after).unwrap().unwrap();
    assert!((3.1..3.2).contains(&ms), "{ms}");
}
