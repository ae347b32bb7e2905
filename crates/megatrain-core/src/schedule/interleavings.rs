//! The engine's lanes under loom: real schedules, followed by the real bookkeeping of `progress.rs` on one thread per lane
//! under one lock, as `stream/workers.rs` does it, in every order that these threads may run in, up to a bound of preemptions.
//! Each slot, gradient buffer, slab and host image is a cell that no lock protects: loom reports two accesses that the
//! schedule's dependencies do not order, and each reader checks whose content it finds. Run by `make test-loom`.
//!
//! The schedules are small, since the number of orders grows exponentially. Of them `schedule::check` refuses exactly those
//! that loom finds a race in, which is what one may conclude from for large ones.
#![expect(unsafe_code, reason = "cells whose accesses loom checks")]
use std::collections::BTreeSet;

use loom::cell::UnsafeCell;
use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
use loom::thread;

use super::inputs::UnitInputs;
use super::progress::{Id, Progress};
use super::{Kind, Lane, Op, Pass, Schedule, ScheduleInputs, Shape};
use crate::plan::{self, Activation, Groups, Place, Staged, UnitPlan, UnitRequest, UnitRole};

/// Lanes with a thread of their own; the test's thread computes and decides.
const OF_UPDATES: &[Lane] = &[Lane::Upload, Lane::Download, Lane::Host];
/// The same where layer inputs wait on disk and nothing is updated: loom has no more threads.
const OF_INPUTS: &[Lane] = &[Lane::Upload, Lane::Download, Lane::StateRead, Lane::StateWrite];

/// Whose weights or gradient a buffer holds, and how often the unit had been updated when they were made; or whose input, of
/// which micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Content {
    unit: u32,
    micro_batch: u32,
    updates: u64,
    /// Whether it was read from disk again.
    again: bool,
}

struct Cell(UnsafeCell<Content>);

// SAFETY: this is what the tests prove; a race is a panic of loom's.
unsafe impl Sync for Cell {}

impl Cell {
    fn several(count: u32) -> Vec<Self> {
        (0..count)
            .map(|unit| Self(UnsafeCell::new(Content { unit, micro_batch: 0, updates: 0, again: false })))
            .collect()
    }

    fn get(&self) -> Content {
        // SAFETY: loom checks that nobody writes the cell.
        self.0.with(|content| unsafe { *content })
    }

    fn set(&self, new: Content) {
        // SAFETY: loom checks that nobody else has the cell.
        self.0.with_mut(|content| unsafe { *content = new });
    }
}

/// What a thread waits for.
#[derive(Clone)]
enum Want {
    /// An operation of its lane to be ready.
    Work(Lane),
    /// This operation to be ready.
    Ready(Id),
    /// The events of these operations.
    Events(Vec<Id>),
}

struct State {
    progress: Progress<Id>,
    /// Operations whose events have passed.
    passed: BTreeSet<Id>,
    /// What the lanes' threads and then the test's own wait for.
    wants: Vec<Option<Want>>,
}

impl State {
    fn has(&self, want: &Want) -> bool {
        match want {
            Want::Work(lane) => self.progress.is_ready(*lane),
            Want::Ready(id) => self.progress.op_is_ready(*id),
            Want::Events(ids) => ids.iter().all(|id| self.passed.contains(id)),
        }
    }
}

struct Engine {
    state: Mutex<State>,
    /// One per thread, where the engine has one for all: waking only who can go on leaves loom fewer orders to try.
    changed: Vec<Condvar>,
    /// The lanes that have a thread; the test's thread is the one after these.
    lanes: &'static [Lane],
    images: Vec<Cell>,
    slots: Vec<Cell>,
    grads: Vec<Cell>,
    slabs: Vec<Cell>,
    stages: Vec<Cell>,
    input_buffers: Vec<Cell>,
    /// Places on disk, by layer and micro-batch of a group.
    places: Vec<Cell>,
}

impl Engine {
    fn new(inputs: &ScheduleInputs, lanes: &'static [Lane]) -> Self {
        let units = inputs.head() + 1;
        let places = units * inputs.groups.large();
        Self {
            state: Mutex::new(State {
                progress: Progress::default(),
                passed: BTreeSet::new(),
                wants: vec![None; lanes.len() + 1],
            }),
            changed: (0..=lanes.len()).map(|_| Condvar::new()).collect(),
            lanes,
            images: Cell::several(units),
            slots: Cell::several(inputs.slots),
            grads: Cell::several(units),
            slabs: Cell::several(units),
            stages: Cell::several(inputs.stage_buffers),
            input_buffers: Cell::several(inputs.input_buffers),
            places: Cell::several(places),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Wakes whoever waits for what is there now.
    fn notify(&self, state: &mut State) {
        for (thread, changed) in self.changed.iter().enumerate() {
            if state.wants[thread].as_ref().is_some_and(|want| state.has(want)) {
                state.wants[thread] = None;
                changed.notify_one();
            }
        }
    }

    fn wait<'a>(&'a self, mut state: MutexGuard<'a, State>, thread: usize, want: &Want) -> MutexGuard<'a, State> {
        while !state.has(want) {
            state.wants[thread] = Some(want.clone());
            state = self.changed[thread].wait(state).unwrap();
        }
        state
    }

    /// Runs a taken operation: on the device, it is issued and then waits for the events that its dependencies name.
    fn run<'a>(&'a self, mut state: MutexGuard<'a, State>, thread: usize, id: Id) -> MutexGuard<'a, State> {
        let op = state.progress.op(id);
        if op.lane.on_device() {
            let awaited = state.progress.awaited(id).into_iter().map(|awaited| awaited.token).collect();
            state.progress.issued(id, id);
            self.notify(&mut state);
            state = self.wait(state, thread, &Want::Events(awaited));
        }
        if touches(op.kind) {
            drop(state);
            self.touch(&op, id.pass);
            state = self.lock();
        }
        state.passed.insert(id);
        state.progress.complete(id);
        self.notify(&mut state);
        state
    }

    /// Reads and writes what the operation does, in a training pass that follows `updates` others.
    fn touch(&self, op: &Op, updates: u64) {
        let own = Content { unit: op.unit, micro_batch: 0, updates, again: false };
        let input = Content { micro_batch: op.micro_batch, ..own };
        let stage = || &self.stages[op.stage.unwrap() as usize];
        let buffer = || &self.input_buffers[op.input_buffer.unwrap() as usize];
        // (Groups of one micro-batch.)
        let place = || &self.places[op.unit as usize];
        let image = &self.images[op.unit as usize];
        let slot = || &self.slots[op.slot.unwrap() as usize];
        let grad = || &self.grads[op.grad.unwrap() as usize];
        let slab = || &self.slabs[op.slab.unwrap() as usize];
        match op.kind {
            Kind::Load => slot().set(image.get()),
            Kind::Forward if op.stage.is_some() => stage().set(input),
            Kind::OffloadActivation => buffer().set(stage().get()),
            Kind::WriteInput => place().set(buffer().get()),
            Kind::ReadInput => buffer().set(Content { again: true, ..place().get() }),
            Kind::FetchActivation => stage().set(buffer().get()),
            Kind::Backward if op.stage.is_some() => {
                let input = Content { again: true, ..input };
                assert_eq!(stage().get(), input, "the input that a backward reads is not its own");
            }
            Kind::Forward => assert_eq!(slot().get(), own, "what a forward reads is not its own"),
            Kind::Backward => {
                assert_eq!(slot().get(), own, "what a backward reads is not its own");
                grad().set(own);
            }
            Kind::OffloadGrad => slab().set(grad().get()),
            Kind::Update => {
                assert_eq!(slab().get(), own, "what an update reads is not its own");
                image.set(Content { updates: updates + 1, ..own });
            }
            _ => {}
        }
    }

    /// A lane's thread, until it has run `count` operations.
    fn work(&self, thread: usize, count: usize) {
        let mut state = self.lock();
        for _ in 0..count {
            let id = loop {
                state = self.wait(state, thread, &Want::Work(self.lanes[thread]));
                if let Some(id) = state.progress.take(self.lanes[thread]) {
                    break id;
                }
            };
            state = self.run(state, thread, id);
        }
    }

    /// Begins a pass, computes it and decides.
    fn drive(&self, schedule: &std::sync::Arc<Schedule>) {
        let mut state = self.lock();
        let pass = state.progress.begin(std::sync::Arc::clone(schedule));
        self.notify(&mut state);
        let caller = self.lanes.len();
        for op in schedule.ops.iter().filter(|op| !self.lanes.contains(&op.lane)) {
            let id = Id { pass, op: op.id };
            state = self.wait(state, caller, &Want::Ready(id));
            state.progress.take_op(id);
            state = self.run(state, caller, id);
        }
    }
}

const fn touches(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::Load
            | Kind::Forward
            | Kind::Backward
            | Kind::OffloadGrad
            | Kind::Update
            | Kind::OffloadActivation
            | Kind::FetchActivation
            | Kind::WriteInput
            | Kind::ReadInput
    )
}

/// Layers that train, between an embedding and a head that are frozen and stay on the device.
fn inputs(layers: u32, immediate: bool) -> ScheduleInputs {
    let frozen = UnitInputs {
        trains: false,
        on_device: true,
        own_place: true,
        parts: 1,
        device_update_parts: 0,
        disk_parts: 0,
        weights_on_disk: false,
        own_grad: None,
        own_slab: None,
        sums_apart: false,
        staged: Staged::none(),
        weights_of: None,
        routed_by: None,
        routes: false,
    };
    let layer = UnitInputs { trains: true, on_device: false, own_place: false, ..frozen };
    let layer = |index| UnitInputs { own_slab: (!immediate).then_some(index), ..layer };
    ScheduleInputs {
        units: [vec![frozen], (0..layers).map(layer).collect(), vec![frozen]].concat(),
        slots: 1,
        shared_grads: vec![0],
        shared_slabs: if immediate { vec![0] } else { Vec::new() },
        stage_buffers: 0,
        state_buffers: 0,
        disk_buffers: 0,
        weight_buffers: 0,
        input_buffers: 0,
        groups: Groups::equal(1),
        micro_batches: 1,
        immediate,
        tied: false,
        accumulate: false,
        early: false,
    }
}

/// Layers that are frozen and stay on the device, and whose inputs wait on disk: one micro-batch after the other, through one
/// buffer on the device and one on the host.
fn inputs_on_disk(layers: u32, micro_batches: u32) -> ScheduleInputs {
    let mut inputs = inputs(layers, false);
    let tensors = vec![crate::layout::TensorSpec::trainable("weight", [1])];
    let mut sizes = UnitRequest::new("layer", UnitRole::Layer, tensors);
    sizes.input_bytes = 1;
    let choice = UnitPlan {
        name: "layer".to_owned(),
        state: plan::State::Device,
        activation: Activation::Recompute,
        large_activation: None,
        input: Place::Disk,
        update: Place::Device,
        weights_on_disk: false,
    };
    let frozen = inputs.units[0];
    for unit in 1..=layers as usize {
        inputs.units[unit] = UnitInputs { staged: Staged::new(&sizes, &choice, Groups::equal(1)), ..frozen };
    }
    (inputs.stage_buffers, inputs.input_buffers, inputs.micro_batches) = (1, 1, micro_batches);
    inputs
}

/// Runs passes in every order of the threads with at most so many preemptions.
fn every_order(
    schedules: &[std::sync::Arc<Schedule>],
    inputs: &ScheduleInputs,
    lanes: &'static [Lane],
    preemptions: usize,
) {
    let (schedules, inputs) = (schedules.to_vec(), inputs.clone());
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 10_000;
    builder.check(move || {
        let engine = Arc::new(Engine::new(&inputs, lanes));
        let start = |(thread, &lane): (usize, &Lane)| {
            let count = schedules.iter().flat_map(|s| &s.ops).filter(|op| op.lane == lane).count();
            let engine = Arc::clone(&engine);
            thread::spawn(move || engine.work(thread, count))
        };
        let threads: Vec<_> = lanes.iter().enumerate().map(start).collect();
        schedules.iter().for_each(|schedule| engine.drive(schedule));
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// The first training steps.
fn steps(inputs: &ScheduleInputs, count: usize) -> Vec<std::sync::Arc<Schedule>> {
    let shape = Shape::new(Pass::Train, inputs.micro_batches);
    let mut schedules: Vec<std::sync::Arc<Schedule>> = Vec::new();
    for _ in 0..count {
        let previous = schedules.last().map(AsRef::as_ref);
        let schedule = Schedule::new(inputs, shape, previous, &[]).unwrap();
        super::check(inputs, &schedule, previous).unwrap();
        schedules.push(std::sync::Arc::new(schedule));
    }
    schedules
}

/// Whether a model ends in an access that nothing orders, or in one that finds what is not its own. In a process of its own,
/// which ends at once: unwinding would drop what threads hold that loom has stopped half-way, and it refuses that.
fn ends_in_a_race(model: impl FnOnce()) -> bool {
    const RACE: i32 = 3;
    // SAFETY: the child uses this thread alone and ends in `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        std::panic::set_hook(Box::new(|panic| {
            let text = panic.to_string();
            if ["Causality violation", "is not its own"].iter().any(|words| text.contains(words)) {
                // SAFETY: ends this process, whatever state it is in.
                unsafe { libc::_exit(RACE) }
            }
        }));
        let over = std::panic::catch_unwind(std::panic::AssertUnwindSafe(model)).is_ok();
        // SAFETY: as above.
        unsafe { libc::_exit(i32::from(!over)) }
    }
    let mut status = 0;
    // SAFETY: `child` is this process's, and `status` a live integer.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status), "status {status}");
    match libc::WEXITSTATUS(status) {
        RACE => true,
        0 => false,
        code => panic!("the model ended otherwise: {code}"),
    }
}

/// Whether other dependencies lead from one operation to another, of (pass, position).
fn ordered(schedules: &[std::sync::Arc<Schedule>], from: (usize, u32), to: (usize, u32)) -> bool {
    let mut stack = vec![to];
    let mut seen = BTreeSet::new();
    while let Some((pass, op)) = stack.pop() {
        if (pass, op) == from {
            return true;
        }
        if seen.insert((pass, op)) {
            // Before the first pass nothing is under way.
            let deps = schedules[pass].ops[op as usize].deps.iter();
            stack.extend(deps.filter_map(|dep| Some((pass.checked_sub(usize::from(dep.prior))?, dep.op))));
        }
    }
    false
}

#[test]
fn in_every_order_of_the_lanes_each_operation_finds_what_is_its_own() {
    let cases =
        [(1, true, 2, 2), (1, false, 2, 2), (2, true, 1, 2), (2, false, 1, 2), (2, true, 2, 1), (2, false, 2, 1)];
    for (layers, immediate, passes, preemptions) in cases {
        let inputs = inputs(layers, immediate);
        every_order(&steps(&inputs, passes), &inputs, OF_UPDATES, preemptions);
    }
}

#[test]
fn in_every_order_of_the_lanes_each_backward_finds_its_input_that_waited_on_disk() {
    for (layers, micro_batches, passes, preemptions) in [(1, 1, 1, 2), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1)] {
        let inputs = inputs_on_disk(layers, micro_batches);
        every_order(&steps(&inputs, passes), &inputs, OF_INPUTS, preemptions);
    }
}

#[test]
fn a_dependency_left_out_is_a_race_unless_others_imply_it() {
    let of_updates = [(2, true, 1), (2, false, 1), (1, true, 2), (1, false, 2)];
    let of_updates = of_updates.map(|(layers, immediate, passes)| (inputs(layers, immediate), OF_UPDATES, passes));
    let of_inputs = [(2, 1, 1), (1, 1, 2)];
    let of_inputs = of_inputs.map(|(layers, count, passes)| (inputs_on_disk(layers, count), OF_INPUTS, passes));
    for (inputs, lanes, passes) in of_updates.into_iter().chain(of_inputs) {
        let right = steps(&inputs, passes);
        let mut caught = 0;
        for (pass, schedule) in right.iter().enumerate() {
            let deps = schedule.ops.iter().flat_map(|op| (0..op.deps.len()).map(move |dep| (op, dep)));
            for (op, dep) in deps.filter(|(op, _)| touches(op.kind)) {
                let mut without = Schedule::clone(schedule);
                let left_out = without.ops[op.id as usize].deps.remove(dep);
                let from = pass - usize::from(left_out.prior);
                let earlier = &right[from].ops[left_out.op as usize];
                // The test's thread computes in order, whatever depends on what.
                if !touches(earlier.kind) || (op.lane, earlier.lane) == (Lane::Compute, Lane::Compute) {
                    continue;
                }
                let mut wrong = right.clone();
                wrong[pass] = std::sync::Arc::new(without);
                let implied = ordered(&wrong, (from, earlier.id), (pass, op.id));
                let race = ends_in_a_race(|| every_order(&wrong, &inputs, lanes, 1));
                assert_eq!(race, !implied, "pass {pass}: {op:?} without {earlier:?}");
                let previous = pass.checked_sub(1).map(|pass| wrong[pass].as_ref());
                let refused = super::check(&inputs, &wrong[pass], previous).is_err();
                assert_eq!(race, refused, "pass {pass}: {op:?} without {earlier:?}");
                caught += usize::from(race);
            }
        }
        assert!(caught > 3, "{caught} races");
    }
}
