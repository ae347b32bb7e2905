//! What this machine has and how fast it is.
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use megatrain_core::adamw::Isa;
use megatrain_core::device::{Stream, conformance};
use megatrain_core::host::HostSpan;
use megatrain_core::host::{Affinity, Pool};
use megatrain_core::layout::{Moments, StateFormat};
use megatrain_core::optimizer::Adamw;
use megatrain_core::optimizer::rates::sample;
use megatrain_core::store::arena::{Arena, ArenaOptions};
use megatrain_core::store::spill::rates::{self, StateRates};
use megatrain_core::{Error, Result};
use pyo3::prelude::*;
use serde_json::json;

use crate::device::Device;
use crate::error::{detached, interruptible};

/// Timed runs of each measurement; the fastest counts, since everything else that runs only adds.
const RUNS: usize = 3;
/// Bytes of one copy beside the optimizer.
const COPIED_BYTES: u64 = 64 << 20;
/// How long the optimizer and the link are measured beside each other, at least.
const BESIDE: Duration = Duration::from_millis(400);
/// Bytes an element of a split master with its moments and bf16 gradient.
const STATE_BYTES: u64 = 14;
/// The least that is measured: less would measure the clock.
const LEAST_BYTES: u64 = 1 << 20;

/// The most: sums of several stay far from overflowing.
const MOST_BYTES: u64 = 1 << 48;

/// How often this process has mapped host memory, the simulated device's included.
#[pyfunction]
pub(crate) fn mappings_made() -> u64 {
    megatrain_core::host::span::mappings_made()
}

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

/// Runs the suite that every device passes.
#[pyfunction(name = "conformance")]
pub(crate) fn run_conformance(py: Python<'_>, device: &Device) -> PyResult<()> {
    let device = Arc::clone(device.core());
    interruptible(py, "megatrain-conformance", move || conformance::conformance(device.as_ref()))
}

/// JSON rates of this host: `touch_gbs`, `copy_gbs`, and of the optimizer `adamw_params_per_s` over fp32 moments,
/// `adamw_bf16_params_per_s` and `adamw_8bit_params_per_s`.
#[pyfunction]
pub(crate) fn probe_host(py: Python<'_>, bytes: u64, threads: usize) -> PyResult<String> {
    interruptible(py, "megatrain-probe", move || {
        let bytes = enough(bytes)?;
        let pool = Pool::new(Some(threads), &Affinity::Free)?;
        let (touch_s, arena) = timed(|| Arena::new(bytes, ArenaOptions { huge_pages: true, pool: Some(&pool) }))?;
        let copy_s = fastest(|| copy(&pool, arena.span()))?;
        drop(arena);
        let numel = bytes / STATE_BYTES;
        let rates = json!({
            "touch_gbs": bytes as f64 / touch_s / 1e9,
            // Read and written: each byte of a half is counted once, as for a link.
            "copy_gbs": (bytes / 2) as f64 / copy_s / 1e9,
            "adamw_params_per_s": numel as f64 / adamw_s(&pool, numel, Moments::Fp32)?,
            "adamw_bf16_params_per_s": numel as f64 / adamw_s(&pool, numel, Moments::Bf16)?,
            "adamw_8bit_params_per_s": numel as f64 / adamw_s(&pool, numel, Moments::Bits8)?,
        });
        Ok(rates.to_string())
    })
}

/// JSON rates of the link: `h2d_gbs`, `d2h_gbs`, `bidirectional_gbs`, `pin_gbs`.
#[pyfunction]
pub(crate) fn probe_device(py: Python<'_>, device: &Device, bytes: u64) -> PyResult<String> {
    let device = Arc::clone(device.core());
    interruptible(py, "megatrain-probe", move || {
        let bytes = enough(bytes)?;
        let host = Arena::new(2 * bytes, ArenaOptions { huge_pages: true, pool: None })?;
        let half = usize::try_from(bytes).map_err(|_| Error::AddressSpace { bytes })?;
        let (up, down) = (host.span().slice(0, half), host.span().slice(half, half));
        let (pin_s, pins) = timed(|| Ok((device.pin(&up)?, device.pin(&down)?)))?;
        let (source, target) = (device.allocate(bytes)?, device.allocate(bytes)?);
        let wait = |streams: &[Stream]| -> Result<()> {
            streams.iter().try_for_each(|&stream| device.synchronize(&device.record(stream)?))
        };
        // SAFETY: nobody but the device touches the span, which is this function's own.
        let upload = || unsafe { device.copy_to_device(Stream::Upload, &up, &target) };
        // SAFETY: as above.
        let download = || unsafe { device.copy_to_host(Stream::Download, &source, &down) };
        let h2d_s = fastest(|| upload().and_then(|()| wait(&[Stream::Upload])))?;
        let d2h_s = fastest(|| download().and_then(|()| wait(&[Stream::Download])))?;
        let both_s = fastest(|| {
            upload()?;
            download()?;
            wait(&[Stream::Upload, Stream::Download])
        })?;
        drop(pins);
        let gbs = |bytes: u64, seconds: f64| bytes as f64 / seconds / 1e9;
        let rates = json!({
            "h2d_gbs": gbs(bytes, h2d_s),
            "d2h_gbs": gbs(bytes, d2h_s),
            "bidirectional_gbs": gbs(2 * bytes, both_s),
            "pin_gbs": gbs(2 * bytes, pin_s),
        });
        Ok(rates.to_string())
    })
}

/// JSON rates of the host's optimizer over fp32 moments while the link carries bytes both ways, and of the link then:
/// `adamw_beside_link_params_per_s` and `link_beside_adamw_gbs`, both ways together.
#[pyfunction]
pub(crate) fn probe_beside_link(py: Python<'_>, device: &Device, bytes: u64, threads: usize) -> PyResult<String> {
    let device = Arc::clone(device.core());
    interruptible(py, "megatrain-probe", move || {
        let numel = enough(bytes)? / STATE_BYTES;
        let pool = Pool::new(Some(threads), &Affinity::Free)?;
        let update = sample(&pool, numel, 0, StateFormat::default())?;
        let adamw = Adamw::new(Isa::select(None)?);
        let host = Arena::new(2 * COPIED_BYTES, ArenaOptions { huge_pages: true, pool: Some(&pool) })?;
        let half = host.span().len() / 2;
        let (up, down) = (host.span().slice(0, half), host.span().slice(half, half));
        let pins = (device.pin(&up)?, device.pin(&down)?);
        let (source, target) = (device.allocate(COPIED_BYTES)?, device.allocate(COPIED_BYTES)?);
        let copy = || -> Result<()> {
            // SAFETY: nobody but the device touches the spans, which are this function's own.
            unsafe { device.copy_to_device(Stream::Upload, &up, &target)? };
            // SAFETY: as above.
            unsafe { device.copy_to_host(Stream::Download, &source, &down)? };
            device.synchronize(&device.record(Stream::Upload)?)?;
            device.synchronize(&device.record(Stream::Download)?)
        };
        copy()?;
        let update_once = || adamw.update(&pool, std::slice::from_ref(&update));
        let (update_s, copied, seconds) = std::thread::scope(|scope| {
            let updates = scope.spawn(|| mean(update_once, BESIDE));
            let (start, mut copied) = (Instant::now(), 0);
            while !updates.is_finished() {
                copy()?;
                copied += 2 * COPIED_BYTES;
            }
            let seconds = start.elapsed().as_secs_f64().max(1e-9);
            Ok::<_, Error>((updates.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?, copied, seconds))
        })?;
        drop(pins);
        let rates = json!({
            "adamw_beside_link_params_per_s": numel as f64 / update_s,
            "link_beside_adamw_gbs": copied as f64 / seconds / 1e9,
        });
        Ok(rates.to_string())
    })
}

/// JSON rates of disks as places for optimizer state: `state_read_gbs`, `state_write_gbs`, and by what they were read and
/// written, `state_io`.
#[pyfunction]
pub(crate) fn probe_state_disk(py: Python<'_>, paths: Vec<PathBuf>, bytes: u64) -> PyResult<String> {
    interruptible(py, "megatrain-probe", move || {
        let StateRates { read, written, means } = rates::measure(paths, enough(bytes)?)?;
        Ok(json!({"state_read_gbs": read / 1e9, "state_write_gbs": written / 1e9, "state_io": means}).to_string())
    })
}

fn enough(bytes: u64) -> Result<u64> {
    if !(LEAST_BYTES..=MOST_BYTES).contains(&bytes) {
        let (least, most) = (LEAST_BYTES, Some(MOST_BYTES));
        return Err(Error::OutOfRange { setting: "bytes", value: bytes, least, most, why: "to measure anything" });
    }
    Ok(bytes & !8191)
}

fn timed<T>(work: impl FnOnce() -> Result<T>) -> Result<(f64, T)> {
    let start = Instant::now();
    let value = work()?;
    Ok((start.elapsed().as_secs_f64().max(1e-9), value))
}

/// Mean seconds of all runs, the first left out, in at least so long.
fn mean(mut work: impl FnMut() -> Result<()>, least: Duration) -> Result<f64> {
    work()?;
    let (start, mut runs) = (Instant::now(), 0);
    while runs < RUNS || start.elapsed() < least {
        work()?;
        runs += 1;
    }
    Ok(start.elapsed().as_secs_f64().max(1e-9) / runs as f64)
}

fn fastest(mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    (0..=RUNS)
        .map(|_| timed(&mut work).map(|(seconds, ())| seconds))
        .try_fold(f64::INFINITY, |least, s| Ok(least.min(s?)))
}

/// Copies the first half of the span onto the second, a part each thread.
fn copy(pool: &Pool, span: &HostSpan) -> Result<()> {
    let half = span.len() / 2;
    let part = half.div_ceil(pool.threads()).next_multiple_of(4096);
    pool.run(pool.threads(), &|index| {
        let start = (index * part).min(half);
        let len = part.min(half - start) as u64;
        let from = span.elements::<u8>(start as u64, len);
        span.elements_mut::<u8>((half + start) as u64, len).copy_from_slice(&from);
    })
}

/// Seconds of an update of `numel` elements of split masters with bf16 gradients.
fn adamw_s(pool: &Pool, numel: u64, moments: Moments) -> Result<f64> {
    let update = sample(pool, numel, 0, StateFormat { moments, ..StateFormat::default() })?;
    let adamw = Adamw::new(Isa::select(None)?);
    fastest(|| adamw.update(pool, std::slice::from_ref(&update)))
}
