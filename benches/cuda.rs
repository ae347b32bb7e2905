//! What the card does for us outside PyTorch: copies each way and both at once, AdamW, the sums of the gradient norm.
//!
//! ```text
//! cargo bench -p megatrain-cuda --bench cuda        # without a card it says so and passes
//! ```
#![expect(unsafe_code, reason = "queues copies of host memory")]
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use megatrain_core::adamw::AdamwScalars;
use megatrain_core::device::{Device, DeviceAdamw, DeviceMemory, Stream};
use megatrain_core::host::HostSpan;
use megatrain_core::layout::{Dtype, NORM_BLOCK, StateFormat};
use megatrain_core::{Error, Result};
use megatrain_cuda::CudaDevice;

/// Bytes of a copy: a large layer's weights.
const COPY: usize = 256 << 20;
/// Elements of an update.
const NUMEL: u64 = 128 << 20;

fn wait(device: &dyn Device, stream: Stream) -> Result<()> {
    device.synchronize(&device.record(stream)?)
}

/// Queues a copy to the device; the benchmark leaves the span alone until an event after it has passed.
fn send(device: &dyn Device, stream: Stream, span: &HostSpan, memory: &DeviceMemory) -> Result<()> {
    // SAFETY: callers keep what is promised above.
    unsafe { device.copy_to_device(stream, span, memory) }
}

/// Queues a copy to the host; likewise.
fn receive(device: &dyn Device, stream: Stream, memory: &DeviceMemory, span: &HostSpan) -> Result<()> {
    // SAFETY: callers keep what is promised above.
    unsafe { device.copy_to_host(stream, memory, span) }
}

fn copies(c: &mut Criterion, device: &dyn Device) -> Result<()> {
    let host = [HostSpan::map(COPY)?, HostSpan::map(COPY)?];
    let pins = host.each_ref().map(|span| {
        span.fill(1);
        device.pin(span)
    });
    let there = [device.allocate(COPY as u64)?, device.allocate(COPY as u64)?];
    let up = || send(device, Stream::Upload, &host[0], &there[0]);
    let down = || receive(device, Stream::Download, &there[1], &host[1]);
    let mut group = c.benchmark_group("copy 256 MiB");
    group.sample_size(20);
    group.throughput(Throughput::Bytes(COPY as u64));
    group.bench_function("to the device", |b| b.iter(|| up().and_then(|()| wait(device, Stream::Upload))));
    group.bench_function("to the host", |b| b.iter(|| down().and_then(|()| wait(device, Stream::Download))));
    group.throughput(Throughput::Bytes(2 * COPY as u64));
    group.bench_function("both ways at once", |b| {
        b.iter(|| {
            up()?;
            down()?;
            wait(device, Stream::Upload)?;
            wait(device, Stream::Download)
        });
    });
    group.finish();
    pins.into_iter().collect::<Result<Vec<_>>>().map(drop)
}

fn adamw(c: &mut Criterion, device: &dyn Device) -> Result<()> {
    let plane = |size: u64| device.allocate(NUMEL * size);
    let (weights, residual, grad) = (plane(2)?, plane(2)?, plane(2)?);
    let (exp_avg, exp_avg_sq) = (plane(4)?, plane(4)?);
    let update = DeviceAdamw {
        weights: &weights,
        residual: Some(&residual),
        exp_avg: &exp_avg,
        exp_avg_sq: &exp_avg_sq,
        state: StateFormat::default(),
        first: 0,
        grad: &grad,
        grad_dtype: Dtype::Bf16,
        numel: NUMEL,
        scalars: AdamwScalars::new(1e-3, (0.9, 0.999), 1e-8, 0.1, 10, 1.0)?,
    };
    device.fill(Stream::Update, &grad, 0x3c)?;
    let mut group = c.benchmark_group("AdamW of 2^27 parameters over split planes");
    group.sample_size(20);
    group.throughput(Throughput::Elements(NUMEL));
    group.bench_function("bf16 gradients", |b| {
        b.iter(|| device.adamw(Stream::Update, &update).and_then(|()| wait(device, Stream::Update)));
    });
    group.finish();
    Ok(())
}

fn norm(c: &mut Criterion, device: &dyn Device) -> Result<()> {
    let blocks = NUMEL / NORM_BLOCK;
    let table: Vec<u8> = (0..blocks).flat_map(|i| [i * NORM_BLOCK, NORM_BLOCK]).flat_map(u64::to_ne_bytes).collect();
    let span = HostSpan::map(table.len())?;
    span.copy_from(&table);
    let (there, out): (DeviceMemory, DeviceMemory) =
        (device.allocate(table.len() as u64)?, device.allocate(blocks * 8)?);
    send(device, Stream::Download, &span, &there)?;
    let grad = device.allocate(NUMEL * 2)?;
    let mut group = c.benchmark_group("sum of squares of 2^27 gradients");
    group.sample_size(20);
    group.throughput(Throughput::Bytes(NUMEL * 2));
    group.bench_function("bf16", |b| {
        b.iter(|| {
            device.sum_squares(Stream::Download, &grad, Dtype::Bf16, &there, blocks, &out)?;
            wait(device, Stream::Download)
        });
    });
    group.finish();
    Ok(())
}

fn all(c: &mut Criterion) {
    let device = match CudaDevice::new(0) {
        Ok(device) => device,
        Err(Error::NoDevice { reason }) => return println!("not run: {reason}"),
        Err(error) => panic!("{error}"),
    };
    for bench in [copies, adamw, norm] {
        bench(c, &device).expect("the card does what is asked");
    }
}

criterion_group!(benches, all);
criterion_main!(benches);
