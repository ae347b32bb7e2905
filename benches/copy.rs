//! What the engine itself costs: copies through the simulated device, whole steps that compute nothing, schedules.
//!
//! ```text
//! cargo bench -p megatrain-core --bench copy
//! ```
#![expect(unsafe_code, reason = "queues copies of host memory")]
use std::hint::black_box;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use megatrain_core::device::sim::{Faults, SimDevice};
use megatrain_core::device::{Device, DeviceMemory, Stream};
use megatrain_core::host::HostSpan;
use megatrain_core::layout::{Precision, TensorSpec};
use megatrain_core::plan::{Budget, Request, Requests, UnitRequest, UnitRole, plan};
use megatrain_core::schedule::{Pass, Schedule, ScheduleInputs, Shape, check};
use megatrain_core::stream::{Begin, Engine, Group, Options};

const LIMIT: Duration = Duration::from_secs(60);

fn request(layers: usize, micro_batches: u32, parameters: u64) -> Request {
    let unit = |name: String, role| {
        let tensors = vec![TensorSpec::trainable(format!("{name}.weight"), [parameters])];
        UnitRequest { input_bytes: 4, flops: 1e9, ..UnitRequest::new(name, role, tensors) }
    };
    let mut units = vec![unit("embed".into(), UnitRole::Embed)];
    units.extend((0..layers).map(|i| unit(format!("layers.{i}"), UnitRole::Layer)));
    units.push(unit("head".into(), UnitRole::Head));
    let budget = Budget { device: 1 << 40, host: 1 << 40, disk: 0 };
    Request {
        requests: Requests { slots: Some(3), keep: Some(0), ..Requests::default() },
        ..Request::new(units, Precision::Bf16, micro_batches, budget)
    }
}

/// Queues a copy to the device; the benchmark leaves the span alone until an event after it has passed.
fn send(device: &SimDevice, stream: Stream, span: &HostSpan, memory: &DeviceMemory) -> megatrain_core::Result<()> {
    // SAFETY: callers keep what is promised above.
    unsafe { device.copy_to_device(stream, span, memory) }
}

/// Queues a copy to the host; likewise.
fn receive(device: &SimDevice, stream: Stream, memory: &DeviceMemory, span: &HostSpan) -> megatrain_core::Result<()> {
    // SAFETY: callers keep what is promised above.
    unsafe { device.copy_to_host(stream, memory, span) }
}

fn copies(c: &mut Criterion) {
    let mut group = c.benchmark_group("copy to device and back");
    for mib in [1u64, 16] {
        let device = SimDevice::new(None, Faults::default());
        let bytes = mib << 20;
        let memory = device.allocate(bytes).expect("memory");
        let span = HostSpan::map(usize::try_from(bytes).expect("small")).expect("memory");
        group.throughput(Throughput::Bytes(2 * bytes));
        group.bench_function(BenchmarkId::from_parameter(format!("{mib} MiB")), |b| {
            b.iter(|| {
                send(&device, Stream::Upload, &span, &memory).expect("copy");
                receive(&device, Stream::Upload, &memory, &span).expect("copy");
                let event = device.record(Stream::Upload).expect("event");
                device.synchronize(&event).expect("wait");
            });
        });
    }
    group.finish();
}

fn ready<T>(poll: Poll<T>) -> T {
    match poll {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("the engine hangs"),
    }
}

/// Steps of a model so small that only the engine's own work is left, an operation each.
fn steps(c: &mut Criterion) {
    let mut group = c.benchmark_group("step without arithmetic");
    for (layers, micro_batches) in [(32, 1), (32, 8)] {
        let request = request(layers, micro_batches, 256);
        let options = Options { threads: Some(1), huge_pages: false, ..Options::default() };
        let device = Arc::new(SimDevice::new(None, Faults::default()));
        let plan = plan(&request).expect("a small model fits");
        let engine = Engine::new(device, &request, &plan, &options).expect("an engine");
        let adamw = [Group { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0, idle: false }];
        let begin = Begin::new(Pass::Train, micro_batches);
        let step = || {
            ready(engine.begin(&begin, LIMIT).expect("begin"));
            while let Some(op) = ready(engine.next(LIMIT).expect("next")) {
                engine.finish(op.id).expect("finish");
            }
            ready(engine.apply(&adamw, Some(1.0), LIMIT).expect("apply"))
        };
        group.throughput(Throughput::Elements(u64::from(micro_batches) * 2 * (layers as u64 + 1)));
        group.bench_function(format!("{layers} layers, {micro_batches} micro-batches"), |b| b.iter(step));
    }
    group.finish();
}

fn schedules(c: &mut Criterion) {
    let mut group = c.benchmark_group("schedule of 80 layers, 64 micro-batches");
    let request = request(80, 64, 256);
    let facts = ScheduleInputs::new(&request, &plan(&request).expect("fits")).expect("facts");
    let shape = Shape::new(Pass::Train, 64);
    let first = Schedule::new(&facts, shape, None, &[]).expect("a schedule");
    let steady = Schedule::new(&facts, shape, Some(&first), &[]).expect("a schedule");
    group.sample_size(10);
    group.bench_function("make", |b| {
        b.iter(|| black_box(Schedule::new(&facts, shape, Some(&first), &[]).expect("one")))
    });
    group.bench_function("check", |b| b.iter(|| check(&facts, &steady, Some(&first)).expect("right")));
    group.finish();
}

criterion_group!(benches, copies, steps, schedules);
criterion_main!(benches);
