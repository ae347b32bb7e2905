//! Schedules driven by lanes under loom: whatever order the lanes run in, up to a bound of preemptions, no two operations use a
//! slot, a slab or another buffer at a time when one of them writes it. Run by `make test-loom`.
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::{Condvar, Mutex};

use super::hazards::{Access, Resource, accesses};
use super::inputs::UnitInputs;
use super::progress::{Id, Progress};
use super::{Kind, Lane, Pass, Schedule, ScheduleInputs, Shape};

/// Two layers that share a slot, a gradient buffer and a slab, between an embedding and a head that are frozen.
fn inputs() -> ScheduleInputs {
    let end = UnitInputs {
        trains: false,
        on_device: true,
        own_place: true,
        parts: 1,
        device_update_parts: 0,
        own_grad: None,
        own_slab: None,
        sums_apart: false,
        staged: false,
    };
    let layer = UnitInputs { trains: true, on_device: false, own_place: false, ..end };
    ScheduleInputs {
        units: vec![end, layer, layer, end],
        slots: 1,
        shared_grads: vec![0],
        shared_slabs: vec![0],
        stage_buffers: 0,
        state_buffers: 0,
        group: 1,
        micro_batches: 1,
        immediate: true,
        tied: false,
        accumulate: false,
        early: false,
    }
}

struct State {
    progress: Progress<()>,
    /// Passes to begin once the one before has its clip decision.
    next: VecDeque<Arc<Schedule>>,
    /// Operations that are not over, those of later passes included.
    left: usize,
}

struct Lanes {
    inputs: ScheduleInputs,
    state: Mutex<State>,
    changed: Condvar,
    /// What each operation uses without holding the lock: loom reports two uses that nothing orders.
    memory: HashMap<Resource, UnsafeCell<()>>,
}

// SAFETY: this is what the test proves; a race is a panic of loom's.
unsafe impl Sync for Lanes {}
// SAFETY: the cells hold nothing.
unsafe impl Send for Lanes {}

impl Lanes {
    fn new(inputs: ScheduleInputs, passes: &[Arc<Schedule>]) -> Self {
        let used = passes.iter().flat_map(|pass| pass.ops.iter().flat_map(|op| accesses(&inputs, pass.shape, op)));
        let memory = used.map(|(resource, _)| (resource, UnsafeCell::new(()))).collect();
        let mut progress = Progress::default();
        progress.begin(Arc::clone(&passes[0]));
        let left = passes.iter().map(|pass| pass.ops.len()).sum();
        let state = State { progress, next: passes[1..].iter().cloned().collect(), left };
        Self { inputs, state: Mutex::new(state), changed: Condvar::new(), memory }
    }

    /// Runs the operations of some lanes until all are over.
    fn run(&self, lanes: &[Lane]) {
        let mut state = self.state.lock().unwrap();
        while state.left > 0 {
            let Some(id) = lanes.iter().find_map(|&lane| state.progress.take(lane)) else {
                state = self.changed.wait(state).unwrap();
                continue;
            };
            let (op, shape) = (state.progress.op(id), state.progress.schedule(id.pass).shape);
            drop(state);
            for (resource, access) in accesses(&self.inputs, shape, &op) {
                let cell = &self.memory[&resource];
                match access {
                    Access::Read(..) => cell.with(|_| ()),
                    Access::Write(..) | Access::Add(..) => cell.with_mut(|_| ()),
                }
            }
            state = self.state.lock().unwrap();
            state.complete(id, op.kind);
            self.changed.notify_all();
        }
    }
}

impl State {
    fn complete(&mut self, id: Id, kind: Kind) {
        self.progress.complete(id);
        self.left -= 1;
        if kind == Kind::ClipDecision
            && let Some(next) = self.next.pop_front()
        {
            self.progress.begin(next);
        }
    }
}

/// Every order of the lanes, the caller's own included.
fn every_order(inputs: &ScheduleInputs, passes: &[Arc<Schedule>]) {
    let (inputs, passes) = (inputs.clone(), passes.to_vec());
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(1);
    builder.max_branches = 100_000;
    builder.check(move || {
        let lanes = loom::sync::Arc::new(Lanes::new(inputs.clone(), &passes));
        let others = [Lane::Upload, Lane::Download, Lane::Host].map(|lane| {
            let lanes = loom::sync::Arc::clone(&lanes);
            loom::thread::spawn(move || lanes.run(&[lane]))
        });
        lanes.run(&[Lane::Compute, Lane::Caller]);
        others.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

fn training() -> (ScheduleInputs, Schedule) {
    let inputs = inputs();
    let schedule = Schedule::new(&inputs, Shape::new(Pass::Train, 1), None, &[]).unwrap();
    (inputs, schedule)
}

#[test]
fn no_order_of_the_lanes_mixes_what_a_slot_or_a_slab_holds() {
    let (inputs, first) = training();
    let resident = first.leaves(&inputs);
    let second = Schedule::new(&inputs, Shape::new(Pass::Eval, 1), Some(&first), &resident).unwrap();
    every_order(&inputs, &[Arc::new(first), Arc::new(second)]);
}

/// Removes what the first operation of a kind for a unit waits for on a lane: loom must then find a race.
fn without(kind: Kind, nth: usize, lane: Lane) {
    let (inputs, mut schedule) = training();
    let index = schedule.ops.iter().enumerate().filter(|(_, op)| op.kind == kind).nth(nth).unwrap().0;
    let on_lane: Vec<u32> = schedule.ops.iter().filter(|op| op.lane == lane).map(|op| op.id).collect();
    let before = schedule.ops[index].deps.len();
    schedule.ops[index].deps.retain(|dep| !on_lane.contains(&dep.op));
    assert!(schedule.ops[index].deps.len() < before, "{:?} waits for nothing there", schedule.ops[index]);
    every_order(&inputs, &[Arc::new(schedule)]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_slot_that_is_loaded_while_it_is_computed_from_is_found() {
    without(Kind::Load, 1, Lane::Compute);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_slab_that_is_overwritten_before_its_update_is_found() {
    without(Kind::OffloadGrad, 1, Lane::Host);
}
