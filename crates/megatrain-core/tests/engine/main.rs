//! The engine on the adversarial device: whatever the plan, seed and delays, bit-equal to one operation at a time.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use megatrain_core::device::sim::{Faults, SimDevice};
use megatrain_core::device::{Device, Stream};
use megatrain_core::error::{Error, Tier};
use megatrain_core::layout::{Dtype, Master, Moments, Precision, StateFormat};
use megatrain_core::plan::{Activation, Count, Place, Plan, Region, Request, State, UpdateMode, plan};
use megatrain_core::schedule::Pass;
use megatrain_core::store::Plane;
use megatrain_core::stream::{Begin, Engine, Group, Options, Phase, PlaneName};
use proptest::prelude::*;

#[path = "../support/mod.rs"]
mod support;
use support::{FOREVER, GROUPS, Toy, any_request, ready, request, route};

mod equality;
mod passes;
mod state;
mod statistics;

fn options() -> Options {
    Options { threads: Some(1), huge_pages: false, ..Options::default() }
}

struct Run {
    toy: Toy,
    engine: Engine,
    plan: Plan,
}

fn start(request: &Request, device: SimDevice, options: &Options) -> Run {
    let plan = plan(request).unwrap();
    let engine = support::engine(&device, request, &plan, options).unwrap();
    let toy = Toy::new(device, request.clone());
    toy.fill(&engine).unwrap();
    Run { toy, engine, plan }
}

/// Trains `steps` steps and returns every bit of the state after each.
fn train(request: &Request, device: SimDevice, options: &Options, steps: u64, clip: Option<f64>) -> Vec<Vec<Vec<u8>>> {
    let run = start(request, device, options);
    let after = |step| {
        run.toy.step(&run.engine, step, clip).unwrap();
        run.toy.state(&run.engine).unwrap()
    };
    (0..steps).map(after).collect()
}

/// Trains without reading anything in between, so that updates run during the next step.
fn train_through(
    request: &Request,
    device: SimDevice,
    options: &Options,
    steps: u64,
    clip: Option<f64>,
) -> Vec<Vec<u8>> {
    let run = start(request, device, options);
    for step in 0..steps {
        run.toy.step(&run.engine, step, clip).unwrap();
    }
    run.toy.state(&run.engine).unwrap()
}

fn queueing(seed: u64) -> SimDevice {
    SimDevice::new(Some(seed), Faults::default()).queueing_compute()
}

fn delayed(seed: u64, streams: &[&str]) -> SimDevice {
    let delay_ms: BTreeMap<String, f64> = streams.iter().map(|s| ((*s).to_owned(), 5.0)).collect();
    SimDevice::new(Some(seed), Faults { delay_ms, ..Faults::default() }).queueing_compute()
}

fn synchronous() -> Options {
    Options { synchronous: true, ..options() }
}

/// The plan does not show: every request here differs in placement and order only.
fn placements(base: &Request) -> Vec<(String, Request)> {
    let mut all = Vec::new();
    let mut add = |name: &str, change: &dyn Fn(&mut Request)| {
        let mut request = base.clone();
        change(&mut request);
        all.push((name.to_owned(), request));
    };
    add("smallest", &|_| {});
    add("three slots", &|r| r.requests.slots = Some(3));
    add("all slots", &|r| r.requests.slots = Some(99));
    add("groups of one", &|r| r.requests.group = Some(1));
    add("groups of two", &|r| (r.requests.group, r.requests.slots) = (Some(2), Some(3)));
    add("a large group of two", &|r| {
        (r.requests.group, r.requests.large_group, r.requests.keep) = (Some(1), Some(2.min(r.micro_batches)), Some(3));
        (r.requests.large_keep, r.requests.slots) = (Some(1), Some(3));
    });
    add("a large group whose inputs wait on the host", &|r| {
        (r.requests.group, r.requests.large_group, r.requests.keep) = (Some(1), Some(2.min(r.micro_batches)), Some(4));
        (r.requests.large_keep, r.requests.inputs) = (Some(0), Some(Place::Host));
    });
    add("a large group whose activations are offloaded", &|r| {
        (r.requests.group, r.requests.large_group, r.requests.keep) = (Some(1), Some(3.min(r.micro_batches)), Some(3));
        (r.requests.large_keep, r.requests.activation) = (Some(1), Some(Activation::Offload));
    });
    add("inputs on the host", &|r| r.requests.inputs = Some(Place::Host));
    add("inputs on the host in groups", &|r| {
        (r.requests.inputs, r.requests.group, r.requests.stage_buffers) = (Some(Place::Host), Some(2), Some(2));
    });
    add("offloaded", &|r| (r.requests.keep, r.requests.activation) = (Some(2), Some(Activation::Offload)));
    add("some offloaded, some recomputed", &|r| (r.requests.keep, r.requests.offload) = (Some(1), Some(2)));
    add("some offloaded in a large group", &|r| {
        (r.requests.group, r.requests.large_group, r.requests.keep) = (Some(1), Some(2.min(r.micro_batches)), Some(3));
        (r.requests.large_keep, r.requests.offload) = (Some(1), Some(2));
    });
    for units in [1, 2, 4, 7] {
        add(&format!("state of {units} units on the device"), &|r| {
            r.requests.state_on_device = Some(Count::Units(units));
        });
    }
    let device_updates = |r: &mut Request, layers: u32, parts: u32| {
        (r.requests.updates_on_device, r.requests.parts) = (Some(Count::Units(layers)), Some(parts));
    };
    add("two layers updated on the device", &|r| device_updates(r, 2, 1));
    add("all layers updated on the device in parts", &|r| device_updates(r, 5, 2));
    add("device updates beside state on the device", &|r| {
        device_updates(r, 2, 2);
        (r.requests.state_on_device, r.requests.slots) = (Some(Count::Units(4)), Some(3));
    });
    add("device updates in groups of one", &|r| {
        device_updates(r, 3, 2);
        (r.requests.inputs, r.requests.group) = (Some(Place::Host), Some(1));
    });
    let inputs_on_disk = |r: &mut Request, layers| (r.requests.inputs_on_disk, r.budget.disk) = (Some(layers), 1 << 30);
    for layers in [1, 3, 5] {
        add(&format!("inputs of {layers} layers on disk"), &|r| inputs_on_disk(r, layers));
    }
    add("inputs on disk and on the host in groups", &|r| {
        inputs_on_disk(r, 2);
        (r.requests.group, r.requests.stage_buffers) = (Some(1), Some(2));
    });
    add("inputs on disk, with a large group that keeps less", &|r| {
        inputs_on_disk(r, 3);
        (r.requests.group, r.requests.large_group, r.requests.keep) = (Some(1), Some(2.min(r.micro_batches)), Some(2));
        (r.requests.large_keep, r.requests.slots) = (Some(1), Some(3));
    });
    add("offloaded to disk", &|r| {
        inputs_on_disk(r, 3);
        (r.requests.keep, r.requests.activation) = (Some(2), Some(Activation::Offload));
    });
    add("inputs, state and weights on disk in groups", &|r| {
        inputs_on_disk(r, 5);
        (r.requests.state_on_disk, r.requests.weights_on_disk) = (Some(7), Some(4));
        (r.requests.group, r.requests.parts) = (Some(2), Some(2));
    });
    add("inputs on disk beside state on the device", &|r| {
        inputs_on_disk(r, 4);
        r.requests.state_on_device = Some(Count::Units(4));
    });
    let on_disk = |r: &mut Request, units| (r.requests.state_on_disk, r.budget.disk) = (Some(units), 1 << 30);
    for units in [1, 3, 5, 6, 7] {
        add(&format!("state of {units} units on disk"), &|r| on_disk(r, units));
    }
    add("state on disk in parts, with slots to spare", &|r| {
        on_disk(r, 7);
        (r.requests.parts, r.requests.slots) = (Some(2), Some(99));
    });
    add("state on disk, inputs on the host in groups", &|r| {
        on_disk(r, 4);
        (r.requests.inputs, r.requests.group) = (Some(Place::Host), Some(1));
    });
    add("state on disk, activations offloaded", &|r| {
        on_disk(r, 7);
        (r.requests.keep, r.requests.activation) = (Some(2), Some(Activation::Offload));
    });
    for (units, weights) in [(1, 1), (4, 2), (7, 7)] {
        add(&format!("state of {units} units on disk, with the weights of {weights}"), &|r| {
            on_disk(r, units);
            r.requests.weights_on_disk = Some(weights);
        });
    }
    add("weights on disk in parts, with slots to spare", &|r| {
        on_disk(r, 7);
        (r.requests.weights_on_disk, r.requests.parts, r.requests.slots) = (Some(7), Some(3), Some(99));
    });
    add("weights on disk, inputs on the host in groups", &|r| {
        on_disk(r, 7);
        (r.requests.weights_on_disk, r.requests.inputs, r.requests.group) = (Some(6), Some(Place::Host), Some(1));
    });
    add("weights on disk beside state on the device", &|r| {
        on_disk(r, 3);
        (r.requests.weights_on_disk, r.requests.state_on_device) = (Some(2), Some(Count::Units(2)));
    });
    add("state on disk, on the host and on the device", &|r| {
        on_disk(r, 2);
        r.requests.state_on_device = Some(Count::Units(3));
    });
    if base.update == UpdateMode::Immediate {
        add("state on disk through one slab", &|r| {
            on_disk(r, 7);
            (r.requests.slabs, r.requests.parts) = (Some(1), Some(3));
        });
        add("one slab", &|r| r.requests.slabs = Some(1));
        add("device updates through one slab", &|r| {
            device_updates(r, 3, 2);
            r.requests.slabs = Some(1);
        });
        add("device updates that wait in slabs", &|r| {
            device_updates(r, 3, 2);
            r.requests.slabs = Some(5);
        });
    }
    all
}

fn precisions(base: &Request) -> [(&'static str, Request); 3] {
    let of = |precision, grad_precision| Request { precision, grad_precision, ..base.clone() };
    [
        ("fp32", of(Precision::Fp32, Precision::Fp32)),
        ("bf16", of(Precision::Bf16, Precision::Bf16)),
        ("bf16 with fp32 gradients", of(Precision::Bf16, Precision::Fp32)),
    ]
}
