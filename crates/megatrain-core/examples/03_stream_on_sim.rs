//! Trains a toy for three steps on the simulated device: begin, next, compute, finish, apply.
//!
//! ```text
//! cargo run --release -p megatrain-core --example 03_stream_on_sim
//! ```
//!
//! The model is y = w · x, unit after unit; what matters is who calls what when, and that two runs whose queued work
//! interleaves differently end on the same bits.
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use megatrain_core::device::sim::{Faults, SimDevice, SimMemory};
use megatrain_core::device::{DeviceMemory, Stream};
use megatrain_core::layout::{Dtype, Precision, TensorSpec};
use megatrain_core::plan::{Budget, Region, Request, Requests, UnitRequest, UnitRole, plan};
use megatrain_core::schedule::Pass;
use megatrain_core::store::Plane;
use megatrain_core::stream::{Begin, ComputeOp, Engine, Group, Options, Phase, PlaneName};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const LIMIT: Duration = Duration::from_secs(10);

fn request() -> Request {
    let unit = |name: String, role| {
        let tensors = vec![TensorSpec::trainable(format!("{name}.weight"), [1000])];
        UnitRequest { input_bytes: 4, flops: 0.0, ..UnitRequest::new(name, role, tensors) }
    };
    let mut units = vec![unit("embed".into(), UnitRole::Embed)];
    units.extend((0..6).map(|i| unit(format!("layers.{i}"), UnitRole::Layer)));
    units.push(unit("head".into(), UnitRole::Head));
    let budget = Budget { device: 1 << 30, host: 1 << 30, disk: 0 };
    Request {
        requests: Requests { slots: Some(2), ..Requests::default() },
        ..Request::new(units, Precision::Fp32, 3, budget)
    }
}

fn first(memory: &SimMemory, at: &DeviceMemory) -> f32 {
    f32::from_ne_bytes(memory.bytes(&at.slice(0, 4)).try_into().expect("four bytes"))
}

/// Queues one operation's work on the compute stream, as a GPU library would.
fn compute(device: &SimDevice, engine: &Engine, op: &ComputeOp) {
    let bytes = engine.layouts()[op.unit as usize].elements * 4;
    let weights = engine.region(Region::Weights).slice(op.weights, bytes);
    let grad = op.grad.map(|offset| engine.region(Region::Grads).slice(offset, bytes));
    let op = op.clone();
    device.launch(Stream::Compute, move |memory| {
        let weight = first(memory, &weights);
        if let (Some(grad), Phase::Loss | Phase::Backward | Phase::EmbedBackward) = (grad, op.phase) {
            // Sums over micro-batches are the caller's: start on the first, add on the others.
            let so_far = if op.first { 0.0 } else { first(memory, &grad) };
            let sum = so_far + weight - 0.1 * op.micro_batch as f32;
            for value in memory.bytes_mut(&grad).chunks_exact_mut(4) {
                value.copy_from_slice(&sum.to_ne_bytes());
            }
        }
    });
}

fn ready<T>(poll: Poll<T>) -> Result<T> {
    match poll {
        Poll::Ready(value) => Ok(value),
        Poll::Pending => Err(format!("nothing happened for {LIMIT:?}").into()),
    }
}

fn train(seed: u64) -> Result<Vec<u8>> {
    let device = SimDevice::new(Some(seed), Faults::default()).queueing_compute();
    let request = request();
    let engine = Engine::new(Arc::new(device.clone()), &request, &plan(&request)?, &Options::default())?;
    let initial: Vec<u8> = (0..1000).flat_map(|i| (i as f32 * 1e-3).to_ne_bytes()).collect();
    for unit in 0..request.units.len() {
        engine.write(unit, 0, PlaneName::State(Plane::Master), 0, Dtype::F32, &initial)?;
    }
    let group = Group { lr: 1e-2, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01, idle: false };
    for step in 0..3 {
        let begin = Begin::new(Pass::Train, 3);
        ready(engine.begin(&begin, LIMIT)?)?;
        while let Some(op) = ready(engine.next(LIMIT)?)? {
            compute(&device, &engine, &op);
            engine.finish(op.id)?;
        }
        // Returns as soon as the norm is known; the updates run while the next step computes.
        let outcome = ready(engine.apply(&[group], Some(1.0), LIMIT)?)?;
        println!("seed {seed}, step {step}: norm {:.4}, clipped by {:.4}", outcome.grad_norm, outcome.clip);
    }
    let mut master = vec![0; initial.len()];
    engine.read(3, 0, PlaneName::State(Plane::Master), 0, &mut master)?;
    Ok(master)
}

fn main() -> Result<()> {
    let (one, other) = (train(1)?, train(2)?);
    if one != other {
        return Err("two orders gave different bits".into());
    }
    println!("both orders end on the same bits");
    Ok(())
}
