//! State whose home is a disk: real files and simulated ones, what fails, and what the plan says of it.
use std::path::Path;

use megatrain_core::device::sim::{Faults, SimDevice};
use megatrain_core::disk::SimDisk;
use megatrain_core::error::Tier;
use megatrain_core::layout::Precision;
use megatrain_core::plan::{Plan, Request, UpdateMode, plan};
use megatrain_core::store::spill::{StateFiles, StateIo};
use megatrain_core::stream::{Engine, Options};

#[path = "../support/mod.rs"]
mod support;
use support::{FOREVER, Toy, request};

mod failures;
mod files;
mod inputs;
mod plans;
mod transfers;

fn queueing(seed: u64) -> SimDevice {
    SimDevice::new(Some(seed), Faults::default()).queueing_compute()
}

fn options(paths: &[&Path], io: StateIo) -> Options {
    let paths = paths.iter().map(|path| path.to_path_buf()).collect();
    Options { threads: Some(1), huge_pages: false, disk: Some(StateFiles { paths, io }), ..Options::default() }
}

/// The same with the weights of the first so many units there too.
fn with_weights(request: &Request, units: u32) -> Request {
    let mut request = request.clone();
    request.requests.weights_on_disk = Some(units);
    request
}

/// Layers whose state takes several blocks of a file.
fn spilled(update: UpdateMode, precision: Precision, units: u32) -> Request {
    let mut request = Request { update, precision, grad_precision: precision, ..request(3, 2) };
    for unit in &mut request.units {
        unit.tensors[0].shape = vec![70_001, 3];
    }
    request.requests.state_on_disk = Some(units);
    request.budget.disk = 1 << 30;
    request
}

fn sums(plan: &Plan) -> (u64, u64) {
    let on_disk = |tier| plan.items.iter().filter(|item| item.tier == tier).map(|item| item.bytes).sum();
    (on_disk(Tier::Host), on_disk(Tier::Disk))
}

/// A filled engine on a simulated disk.
struct Run {
    disk: SimDisk,
    toy: Toy,
    engine: Engine,
    plan: Plan,
}

impl Run {
    fn start(request: &Request) -> Self {
        let (disk, toy, plan) = (support::state_disk(), Toy::new(queueing(1), request.clone()), plan(request).unwrap());
        let options = Options { threads: Some(1), huge_pages: false, ..Options::default() };
        let engine = support::engine_on(&disk, &toy.device, request, &plan, &options).unwrap();
        toy.fill(&engine).unwrap();
        let run = Self { disk, toy, engine, plan };
        run.moved();
        run
    }

    /// Blocks read and written since this was called last, once all updates are over.
    fn moved(&self) -> [u64; 2] {
        while self.engine.drain(FOREVER).unwrap().is_pending() {}
        let calls = self.disk.calls();
        self.disk.arm(Vec::new());
        ["read", "write"].map(|kind| calls.iter().filter(|call| call.starts_with(kind)).count() as u64)
    }
}
