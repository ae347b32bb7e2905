//! The suite that every device passes: what the engine relies on, and nothing about speed.
//!
//! It runs on a device without special permissions, uses a few MiB, and frees everything. Each rule that is
//! broken is an error with a description, so that the suite can run where there is no test harness.
use std::time::{Duration, Instant};

use super::{AdamwScalars, Device, DeviceAdamw, DeviceMemory, Stream};
use crate::adamw::kernels::{self, Isa, Values, Weights};
use crate::error::{Error, Result};
use crate::host::HostSpan;
use crate::layout::{Dtype, StateFormat};
use crate::random::SplitMix;

/// Sizes chosen to miss every round number.
const SIZES: [usize; 7] = [1, 2, 511, 512, 4097, 65_537, 1_000_003];

mod compact;

type Rule = fn(&dyn Device) -> Result<()>;

/// Runs every rule.
///
/// # Errors
/// [`Error`] naming the rule that the device breaks, or the error of a call that should have succeeded.
pub fn conformance(device: &dyn Device) -> Result<()> {
    let rules: [(&str, Rule); 12] = [
        ("memory is zeroed, aligned, and exactly as long as asked", allocation),
        ("what is copied comes back, at any size and place", round_trips),
        ("work on a stream runs in order", order_on_a_stream),
        ("events order work across streams", order_across_streams),
        ("an event that has been waited for has passed, and passes without waiting too", events),
        ("filling fills exactly the range", filling),
        ("sums of squares are exact to f64 and depend on the block alone", sums),
        ("sums of squares of what is not finite are not finite", sums_not_finite),
        ("AdamW is bit-equal to the host's", adamw),
        ("AdamW over smaller states is bit-equal to the host's", compact::adamw),
        ("host memory can be registered, used and registered again", pinning),
        ("a wrong call is an error, and the next right one works", errors),
    ];
    for (rule, run) in rules {
        run(device).map_err(|e| match e {
            Error::DeviceRule { detail, .. } => Error::DeviceRule { rule, detail },
            call => Error::DeviceRule { rule, detail: call.to_string() },
        })?;
    }
    Ok(())
}

fn require(holds: bool, what: impl FnOnce() -> String) -> Result<()> {
    // Whoever runs the rule names it.
    if holds { Ok(()) } else { Err(Error::DeviceRule { rule: "", detail: what() }) }
}

/// Bytes that differ from place to place and from one `salt` to another.
fn pattern(len: usize, salt: u64) -> Vec<u8> {
    let mut random = SplitMix(salt);
    (0..len).map(|_| (random.draw() >> 56) as u8).collect()
}

fn span_of(bytes: &[u8]) -> Result<HostSpan> {
    let span = HostSpan::map(bytes.len())?;
    span.copy_from(bytes);
    Ok(span)
}

fn bytes_of(span: &HostSpan) -> Vec<u8> {
    let mut out = vec![0; span.len()];
    span.copy_to(&mut out);
    out
}

fn finish(device: &dyn Device, stream: Stream) -> Result<()> {
    device.synchronize(&device.record(stream)?)
}

/// Queues a copy to the device.
fn send(device: &dyn Device, stream: Stream, span: &HostSpan, memory: &DeviceMemory) -> Result<()> {
    // SAFETY: no rule of this suite writes a span once it has been queued to be read.
    unsafe { device.copy_to_device(stream, span, memory) }
}

/// Queues a copy to the host.
fn receive(device: &dyn Device, stream: Stream, memory: &DeviceMemory, span: &HostSpan) -> Result<()> {
    // SAFETY: every rule of this suite waits for an event after the copy before it reads the span.
    unsafe { device.copy_to_host(stream, memory, span) }
}

/// Copies `bytes` to fresh device memory.
fn upload(device: &dyn Device, bytes: &[u8]) -> Result<DeviceMemory> {
    let memory = device.allocate(bytes.len() as u64)?;
    send(device, Stream::Upload, &span_of(bytes)?, &memory)?;
    finish(device, Stream::Upload)?;
    Ok(memory)
}

fn download(device: &dyn Device, memory: &DeviceMemory) -> Result<Vec<u8>> {
    let span = HostSpan::map(usize::try_from(memory.len).unwrap_or(usize::MAX))?;
    receive(device, Stream::Download, memory, &span)?;
    finish(device, Stream::Download)?;
    Ok(bytes_of(&span))
}

fn allocation(device: &dyn Device) -> Result<()> {
    let facts = device.facts()?;
    require(!facts.name.is_empty() && facts.free_bytes <= facts.total_bytes, || format!("facts are {facts:?}"))?;
    for size in SIZES {
        let memory = device.allocate(size as u64)?;
        require(memory.len == size as u64, || format!("{size} bytes were asked for, {} came", memory.len))?;
        require(memory.address.is_multiple_of(512), || format!("{size} bytes begin at {:#x}", memory.address))?;
        require(download(device, &memory)?.iter().all(|&b| b == 0), || format!("{size} bytes are not zero"))?;
    }
    Ok(())
}

fn round_trips(device: &dyn Device) -> Result<()> {
    for size in SIZES {
        let bytes = pattern(size, 1);
        let memory = upload(device, &bytes)?;
        require(download(device, &memory)? == bytes, || format!("{size} bytes came back changed"))?;
        let (skip, len) = (size / 3, size - size / 3 - size / 5);
        let part = memory.slice(skip as u64, len as u64);
        require(download(device, &part)? == bytes[skip..skip + len], || format!("a part of {size} bytes is another"))?;
        let copy = device.allocate(len as u64)?;
        device.copy_on_device(Stream::Compute, &part, &copy)?;
        finish(device, Stream::Compute)?;
        require(download(device, &copy)? == bytes[skip..skip + len], || format!("a copy of {len} bytes is another"))?;
    }
    Ok(())
}

fn order_on_a_stream(device: &dyn Device) -> Result<()> {
    let len = 300_001;
    let memory = device.allocate(len as u64)?;
    for stream in Stream::ALL {
        let spans: Vec<HostSpan> = (0..8).map(|i| span_of(&pattern(len, i))).collect::<Result<_>>()?;
        let seen: Vec<HostSpan> = (0..8).map(|_| HostSpan::map(len)).collect::<Result<_>>()?;
        for (from, to) in spans.iter().zip(&seen) {
            send(device, stream, from, &memory)?;
            receive(device, stream, &memory, to)?;
        }
        finish(device, stream)?;
        for (i, (from, to)) in spans.iter().zip(&seen).enumerate() {
            require(bytes_of(from) == bytes_of(to), || format!("copy {i} on {} saw another's bytes", stream.name()))?;
        }
    }
    Ok(())
}

/// The engine's own pattern: load, compute, offload, over two buffers that are used again and again.
fn order_across_streams(device: &dyn Device) -> Result<()> {
    let (len, rounds) = (200_003usize, 24usize);
    let slots = [device.allocate(len as u64)?, device.allocate(len as u64)?];
    let result = device.allocate(len as u64)?;
    let sources: Vec<HostSpan> = (0..rounds).map(|i| span_of(&pattern(len, i as u64))).collect::<Result<_>>()?;
    let received: Vec<HostSpan> = (0..rounds).map(|_| HostSpan::map(len)).collect::<Result<_>>()?;
    let (mut computed, mut saved) = (Vec::new(), Vec::new());
    for i in 0..rounds {
        if i >= 2 {
            device.wait(Stream::Upload, &computed[i - 2])?;
        }
        send(device, Stream::Upload, &sources[i], &slots[i % 2])?;
        device.wait(Stream::Compute, &device.record(Stream::Upload)?)?;
        if i >= 1 {
            device.wait(Stream::Compute, &saved[i - 1])?;
        }
        device.copy_on_device(Stream::Compute, &slots[i % 2], &result)?;
        let done = device.record(Stream::Compute)?;
        device.wait(Stream::Download, &done)?;
        computed.push(done);
        receive(device, Stream::Download, &result, &received[i])?;
        saved.push(device.record(Stream::Download)?);
    }
    for (i, event) in saved.iter().enumerate() {
        device.synchronize(event)?;
        require(bytes_of(&received[i]) == bytes_of(&sources[i]), || format!("round {i} copied another round's bytes"))?;
    }
    Ok(())
}

fn events(device: &dyn Device) -> Result<()> {
    device.set_compute_stream(0)?;
    let memory = device.allocate(1 << 20)?;
    for stream in Stream::ALL {
        let before = device.record(stream)?;
        device.fill(stream, &memory, 1)?;
        let event = device.record(stream)?;
        device.synchronize(&event)?;
        require(device.query(&event)? && device.query(&before)?, || {
            "an event is waited for and has not passed".into()
        })?;
        let elapsed = device.elapsed_ms(&before, &event)?;
        require(elapsed.is_none_or(|ms| ms >= 0.0), || format!("time runs backwards: {elapsed:?} ms"))?;
        device.fill(stream, &memory, 2)?;
        let event = device.record(stream)?;
        let began = Instant::now();
        while !device.query(&event)? {
            require(began.elapsed() < Duration::from_secs(30), || "an event that is asked for never passes".into())?;
        }
    }
    Ok(())
}

fn filling(device: &dyn Device) -> Result<()> {
    for size in SIZES {
        let bytes = pattern(size, 2);
        let memory = upload(device, &bytes)?;
        let (skip, len) = (size / 4, size / 2);
        device.fill(Stream::Compute, &memory.slice(skip as u64, len as u64), 0xff)?;
        finish(device, Stream::Compute)?;
        let mut expected = bytes;
        expected[skip..skip + len].fill(0xff);
        require(download(device, &memory)? == expected, || format!("{len} bytes at {skip} of {size}"))?;
    }
    Ok(())
}

/// Values between -4 and 4 whose squares differ in size.
fn values(len: usize, salt: u64) -> Vec<f32> {
    pattern(len * 2, salt).as_chunks::<2>().0.iter().map(|b| f32::from(i16::from_le_bytes(*b)) / 8192.0).collect()
}

fn as_bytes(values: &[f32], dtype: Dtype) -> Vec<u8> {
    if dtype == Dtype::Bf16 {
        let mut narrow = vec![0u16; values.len()];
        kernels::f32_to_bf16(values, &mut narrow);
        return narrow.iter().flat_map(|v| v.to_ne_bytes()).collect();
    }
    values.iter().flat_map(|v| v.to_ne_bytes()).collect()
}

fn sums_of(device: &dyn Device, values: &[f32], dtype: Dtype, blocks: &[(u64, u64)]) -> Result<Vec<f64>> {
    let src = upload(device, &as_bytes(values, dtype))?;
    let table: Vec<u8> = blocks.iter().flat_map(|&(first, len)| [first, len]).flat_map(u64::to_ne_bytes).collect();
    let (table, out) = (upload(device, &table)?, device.allocate(blocks.len() as u64 * 8)?);
    device.sum_squares(Stream::Download, &src, dtype, &table, blocks.len() as u64, &out)?;
    finish(device, Stream::Download)?;
    Ok(download(device, &out)?.as_chunks::<8>().0.iter().map(|b| f64::from_ne_bytes(*b)).collect())
}

fn sums(device: &dyn Device) -> Result<()> {
    // The same hundred values at both ends, and lengths around every power of two that a kernel might care about.
    let mut all = values(70_000, 3);
    all.copy_within(0..100, 69_900);
    let blocks = [(0, 100), (69_900, 100), (0, 65_536), (1, 1), (128, 31), (7, 33), (3, 4_097), (0, 70_000)];
    for dtype in [Dtype::Bf16, Dtype::F32] {
        let found = sums_of(device, &all, dtype, &blocks)?;
        let mut exact = all.clone();
        if dtype == Dtype::Bf16 {
            let mut narrow = vec![0u16; exact.len()];
            kernels::f32_to_bf16(&all, &mut narrow);
            kernels::bf16_to_f32(&narrow, &mut exact);
        }
        for (&(first, len), found) in blocks.iter().zip(&found) {
            let block = &exact[usize::try_from(first).unwrap_or(0)..][..usize::try_from(len).unwrap_or(0)];
            let expected: f64 = block.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
            let close = (found - expected).abs() <= 1e-12 * expected.abs();
            require(close, || format!("{len} {dtype:?} from {first} on: {found}, not {expected}"))?;
        }
        require(found[0].to_bits() == found[1].to_bits(), || format!("the same {dtype:?} elsewhere sum to another"))?;
        require(sums_of(device, &all, dtype, &blocks)? == found, || format!("{dtype:?} sums change from run to run"))?;
    }
    Ok(())
}

fn sums_not_finite(device: &dyn Device) -> Result<()> {
    for dtype in [Dtype::Bf16, Dtype::F32] {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut all = values(1_000, 4);
            all[777] = bad;
            let found = sums_of(device, &all, dtype, &[(0, 1_000), (0, 777), (777, 1)])?;
            let right = !found[0].is_finite() && found[1].is_finite() && !found[2].is_finite();
            require(right, || format!("{bad} among {dtype:?} sums to {found:?}"))?;
        }
    }
    Ok(())
}

struct Planes {
    weights: Vec<f32>,
    exp_avg: Vec<f32>,
    exp_avg_sq: Vec<f32>,
    grad: Vec<f32>,
}

fn adamw(device: &dyn Device) -> Result<()> {
    for len in [1usize, 31, 127, 1_000, 4_099] {
        let mut planes = Planes {
            weights: values(len, 5),
            exp_avg: values(len, 6),
            exp_avg_sq: values(len, 7).iter().map(|v| v.abs()).collect(),
            grad: values(len, 8),
        };
        for i in (0..len).step_by(5) {
            // A cold row whose moments are about to turn subnormal, which every body stores as zero.
            (planes.grad[i], planes.exp_avg[i], planes.exp_avg_sq[i]) = (0.0, 1.2e-38, 1.18e-38);
        }
        for step in [1, 1_000] {
            let scalars = AdamwScalars::new(1e-3, (0.9, 0.999), 1e-8, 0.1, step, 0.37)?;
            for split in [true, false] {
                for grad_dtype in [Dtype::Bf16, Dtype::F32] {
                    adamw_case(device, &planes, &scalars, split, grad_dtype)?;
                }
            }
        }
    }
    Ok(())
}

fn adamw_case(
    device: &dyn Device,
    planes: &Planes,
    scalars: &AdamwScalars,
    split: bool,
    grad_dtype: Dtype,
) -> Result<()> {
    let len = planes.weights.len();
    let (mut hi, mut lo) = (vec![0u16; len], vec![0u16; len]);
    kernels::split_master(&planes.weights, &mut hi, &mut lo);
    let halves = |half: &[u16]| half.iter().flat_map(|v| v.to_ne_bytes()).collect::<Vec<u8>>();
    let weights = upload(device, &if split { halves(&hi) } else { as_bytes(&planes.weights, Dtype::F32) })?;
    let residual = if split { Some(upload(device, &halves(&lo))?) } else { None };
    let exp_avg = upload(device, &as_bytes(&planes.exp_avg, Dtype::F32))?;
    let exp_avg_sq = upload(device, &as_bytes(&planes.exp_avg_sq, Dtype::F32))?;
    let grad = upload(device, &as_bytes(&planes.grad, grad_dtype))?;
    let update = DeviceAdamw {
        weights: &weights,
        residual: residual.as_ref(),
        exp_avg: &exp_avg,
        exp_avg_sq: &exp_avg_sq,
        state: StateFormat::default(),
        first: 0,
        grad: &grad,
        grad_dtype,
        numel: len as u64,
        scalars: *scalars,
    };
    device.adamw(Stream::Update, &update)?;
    finish(device, Stream::Update)?;

    let (mut full, mut m, mut v) = (planes.weights.clone(), planes.exp_avg.clone(), planes.exp_avg_sq.clone());
    let mut narrow = vec![0u16; len];
    kernels::f32_to_bf16(&planes.grad, &mut narrow);
    let values = if grad_dtype == Dtype::Bf16 { Values::Bf16(&narrow) } else { Values::F32(&planes.grad) };
    let host = if split { Weights::Split { hi: &mut hi, lo: &mut lo } } else { Weights::Full(&mut full) };
    kernels::adamw(Isa::Scalar, host, &mut m, &mut v, values, scalars);

    let what = |plane: &str| format!("{plane} of {len} elements, split {split}, {grad_dtype:?} gradient");
    let expected = if split { halves(&hi) } else { as_bytes(&full, Dtype::F32) };
    require(download(device, &weights)? == expected, || what("weights"))?;
    if let Some(residual) = &residual {
        require(download(device, residual)? == halves(&lo), || what("residual"))?;
    }
    require(download(device, &exp_avg)? == as_bytes(&m, Dtype::F32), || what("exp_avg"))?;
    require(download(device, &exp_avg_sq)? == as_bytes(&v, Dtype::F32), || what("exp_avg_sq"))
}

fn pinning(device: &dyn Device) -> Result<()> {
    let bytes = pattern(3 * 4096, 9);
    let span = span_of(&bytes)?;
    let pin = device.pin(&span)?;
    require(device.pin(&span).is_err(), || "the same memory is registered twice".into())?;
    let memory = device.allocate(5_000)?;
    let part = span.slice(4_001, 5_000);
    send(device, Stream::Upload, &part, &memory)?;
    finish(device, Stream::Upload)?;
    require(download(device, &memory)? == bytes[4_001..9_001], || "a copy from registered memory".into())?;
    let back = span.slice(0, 5_000);
    receive(device, Stream::Download, &memory, &back)?;
    finish(device, Stream::Download)?;
    require(bytes_of(&back) == bytes[4_001..9_001], || "a copy into registered memory".into())?;
    drop(pin);
    drop(device.pin(&span)?);
    Ok(())
}

fn errors(device: &dyn Device) -> Result<()> {
    let (memory, span) = (device.allocate(1_000)?, HostSpan::map(999)?);
    require(send(device, Stream::Upload, &span, &memory).is_err(), || "999 bytes into 1000".into())?;
    require(receive(device, Stream::Download, &memory, &span).is_err(), || "1000 bytes into 999".into())?;
    let other = memory.slice(0, 10);
    require(device.copy_on_device(Stream::Compute, &memory, &other).is_err(), || "1000 bytes into 10".into())?;
    let (table, out) = (device.allocate(16)?, device.allocate(8)?);
    let integers = device.sum_squares(Stream::Download, &memory, Dtype::I32, &table, 1, &out);
    require(integers.is_err(), || "integers have no gradient norm".into())?;
    round_trips(device)
}
