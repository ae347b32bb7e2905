//! The engine on the adversarial device: whatever the plan, seed and delays, bit-equal to one operation at a time.
use std::sync::Arc;

use megatrain_core::device::sim::{Faults, SimDevice};
use megatrain_core::plan::{Request, plan};
use megatrain_core::stream::{Engine, Options};

mod support;
use support::{Toy, request};

fn options() -> Options {
    Options { threads: Some(1), huge_pages: false, ..Options::default() }
}

/// Trains `steps` steps and returns every bit of the state.
fn train(request: &Request, seed: Option<u64>, faults: Faults, options: &Options, steps: u64) -> Vec<Vec<u8>> {
    let device = SimDevice::new(seed, faults).queueing_compute();
    let plan = plan(request).unwrap();
    let engine = Engine::new(Arc::new(device.clone()), request, &plan, options).unwrap();
    let toy = Toy::new(device, request.clone());
    toy.fill(&engine).unwrap();
    for step in 0..steps {
        toy.step(&engine, step, Some(0.5)).unwrap();
    }
    toy.state(&engine).unwrap()
}

#[test]
fn a_streamed_step_equals_the_synchronous_one() {
    let request = request(5, 3);
    let synchronous = Options { synchronous: true, ..options() };
    let reference = train(&request, None, Faults::default(), &synchronous, 4);
    for seed in 0..10 {
        let streamed = train(&request, Some(seed), Faults::default(), &options(), 4);
        assert!(streamed == reference, "seed {seed} differs");
    }
}
