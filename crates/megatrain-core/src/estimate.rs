//! How long a step takes: the schedule of two steps run on a virtual clock, the second one measured.
//!
//! The same bookkeeping that drives the engine ([`crate::stream`]) decides what runs when; only the durations are
//! invented, from measured rates. The simulated device proves order, this predicts time.
use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::layout::{Role, UnitLayout};
use crate::plan::{Activation, Forecast, Groups, Placement, Plan, Rates, Request, Staged, UnitRole, UpdateMode};
use crate::schedule::progress::{Id, Progress};
use crate::schedule::{Kind, Lane, Op, Pass, Schedule, ScheduleInputs, Shape};

/// One operation on the virtual clock; seconds from the start of the measured step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Span {
    /// The lane.
    pub lane: Lane,
    /// What was done.
    pub kind: Kind,
    /// The unit's name.
    pub unit: String,
    /// The micro-batch.
    pub micro_batch: u32,
    /// Which of the two steps it belongs to: 1 is the measured one, whose updates may run during step 2.
    pub step: u64,
    /// Start.
    pub start_s: f64,
    /// End.
    pub end_s: f64,
}

/// A simulated step in steady state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Estimate {
    /// Seconds from one step's first computation to the next one's.
    pub step_s: f64,
    /// Seconds busy in a step, by lane.
    pub lanes: BTreeMap<String, f64>,
    /// The busiest lane.
    pub bound: String,
    /// Bytes read from disk in a step.
    pub disk_read: u64,
    /// Bytes written to disk in a step.
    pub disk_written: u64,
    /// Every operation.
    pub spans: Vec<Span>,
}

/// Simulates a step of the plan's micro-batches.
///
/// # Errors
/// As for [`Schedule::new`].
pub fn estimate(request: &Request, plan: &Plan, rates: &Rates) -> Result<Estimate> {
    simulate(request, request.layouts()?, plan, rates, plan.micro_batches, true)
}

/// As [`estimate`], of a plan whose micro-batches stand for `micro_batches`; its operations are listed only if they are wanted.
fn simulate(
    request: &Request,
    layouts: Arc<[UnitLayout]>,
    plan: &Plan,
    rates: &Rates,
    micro_batches: u32,
    with_spans: bool,
) -> Result<Estimate> {
    let placement = Placement::with_layouts(request, plan, layouts)?;
    let inputs = ScheduleInputs::from_placement(request, plan, &placement);
    let shape = Shape::new(Pass::Train, plan.micro_batches);
    let (first, steady) = Schedule::steady(&inputs, shape)?;
    let looked_up = inputs.early.then(|| looked_up(request, plan));
    let sums = f64::from(micro_batches - 1) / f64::from(plan.micro_batches);
    let mut durations = Durations { request, plan, placement: &placement, rates, looked_up, sums, contention: 1.0 };
    durations.contention = durations.contention(&steady);
    let seconds: Vec<f64> = steady.ops.iter().map(|op| durations.of(op)).collect();
    let moved = |lane: Lane| steady.ops.iter().filter(|op| op.lane == lane).map(|op| durations.disk_bytes(op)).sum();
    let (disk_read, disk_written) = (moved(Lane::StateRead), moved(Lane::StateWrite));
    Ok(Estimate { disk_read, disk_written, ..Clock::new(seconds).run(request, &first, &steady, with_spans) })
}

/// What [`crate::plan::plan`] prints: what the plan takes at the request's rates, which need not be those that it was made
/// with.
///
/// # Errors
/// As for [`Schedule::new`], and when the plan was made for another request.
pub fn forecast(request: &Request, plan: &Plan) -> Result<Forecast> {
    if plan.units.len() != request.units.len() {
        plan.matches(request)?;
    }
    let layouts = request.layouts()?;
    let request = &*captured(request, plan);
    let Estimate { step_s: expected_step_s, lanes: expected_lanes, .. } = expected(request, layouts.clone(), plan)?;
    let micro_batches = plan.micro_batches;
    let (request, plan) = condensed(request, plan);
    let Estimate { step_s, lanes, bound, disk_read, disk_written, .. } =
        simulate(&request, layouts, &plan, &request.rates, micro_batches, false)?;
    Ok(Forecast { step_s, expected_step_s, bound, lanes, expected_lanes, disk_read, disk_written })
}

/// What launching a captured layer takes of what launching its kernels one by one takes.
const CAPTURED_LAUNCHES: f64 = 0.1;

/// The request with the launches that are left where layers are captured.
fn captured<'a>(request: &'a Request, plan: &Plan) -> Cow<'a, Request> {
    let mut request = Cow::Borrowed(request);
    if plan.graphs {
        for (unit, choice) in request.to_mut().units.iter_mut().zip(&plan.units) {
            if unit.role == UnitRole::Layer && choice.can_be_captured(unit) {
                unit.launch_s *= CAPTURED_LAUNCHES;
            }
        }
    }
    request
}

/// By how much a step is expected to be longer than simulated where units with their state on the host are updated
/// on the device, and where activations or
/// inputs pass to the host: both ask for more locked memory and more operations of the link, which the simulation counts
/// by their bytes alone.
pub(crate) fn allowance(device_updates: bool, stages: bool) -> f64 {
    (if device_updates { 1.02 } else { 1.0 }) * (if stages { 1.01 } else { 1.0 })
}

/// Seconds to expect of a step. Plans are compared by this number.
pub(crate) fn expected_step_s(request: &Request, layouts: &Arc<[UnitLayout]>, plan: &Plan) -> Result<f64> {
    Ok(expected(request, Arc::clone(layouts), plan)?.step_s)
}

/// Seconds of a step on a GPU in which nothing is computed, whatever its size: the calling thread waits for the norm and
/// for the loss, and launches the updates and the first layer again. With the ramps of its kernels a fit to steps of a
/// model of 0.5B on an H200: 8,192 and 65,536 tokens in micro-batches of 2,048 to 32,768, twenty-five plans, all within 3 %.
const BETWEEN_STEPS_S: f64 = 2.0e-3;

/// A step simulated at the rates that a whole step sustains, its time with an allowance for what that leaves out.
fn expected(request: &Request, layouts: Arc<[UnitLayout]>, plan: &Plan) -> Result<Estimate> {
    let micro_batches = plan.micro_batches;
    let (request, plan) = condensed(request, plan);
    let allowance = allowance(plan.state_buffers > 0, plan.stage_bytes > 0);
    let rates = request.sustained_rates();
    let between = if rates.beside_matmuls { BETWEEN_STEPS_S } else { 0.0 };
    let found = simulate(&request, layouts, &plan, &rates, micro_batches, false)?;
    Ok(Estimate { step_s: found.step_s * allowance + between, ..found })
}

/// To add so many gradients to fp32 sums, which are read and written. A bound counts the floating-point operations alone.
pub(crate) fn adding_s(parameters: u64, rates: &Rates) -> f64 {
    if rates.beside_matmuls { 8.0 * parameters as f64 / (rates.hbm_gbs * 1e9) } else { 0.0 }
}

/// Most micro-batches of a group that are simulated one by one.
const SIMULATED_MICRO_BATCHES: u32 = 4;

/// The micro-batches that a forecast simulates: those of a large group, which pass through a unit one after the other,
/// are taken together as a few of the same total size. The sums of every lane stay as they are.
pub(crate) fn simulated_micro_batches(micro_batches: u32, groups: Groups) -> u32 {
    let group = groups.others();
    if group <= SIMULATED_MICRO_BATCHES || groups.large() != group || !micro_batches.is_multiple_of(group) {
        return micro_batches;
    }
    micro_batches / group * SIMULATED_MICRO_BATCHES
}

fn condensed<'a>(request: &'a Request, plan: &'a Plan) -> (Cow<'a, Request>, Cow<'a, Plan>) {
    let simulated = simulated_micro_batches(plan.micro_batches, plan.groups());
    if simulated == plan.micro_batches {
        return (Cow::Borrowed(request), Cow::Borrowed(plan));
    }
    let times = f64::from(plan.micro_batches) / f64::from(simulated);
    let mut request = request.clone();
    for unit in &mut request.units {
        for amount in [
            &mut unit.flops,
            &mut unit.attention_flops,
            &mut unit.spared_flops,
            &mut unit.moved_bytes,
            &mut unit.launch_s,
            &mut unit.ramp_s,
        ] {
            *amount *= times;
        }
        unit.kept_bytes = (unit.kept_bytes as f64 * times) as u64;
        unit.input_bytes = (unit.input_bytes as f64 * times) as u64;
    }
    request.micro_batches = simulated;
    let mut plan = plan.clone();
    (plan.micro_batches, plan.group, plan.large_group) = (simulated, SIMULATED_MICRO_BATCHES, 0);
    let staged = |unit: usize| Staged::new(&request.units[unit], &plan.units[unit], plan.groups()).largest();
    plan.stage_bytes = (1..plan.units.len() - 1).map(staged).max().unwrap_or(0);
    (Cow::Owned(request), Cow::Owned(plan))
}

struct Durations<'a> {
    request: &'a Request,
    plan: &'a Plan,
    placement: &'a Placement,
    rates: &'a Rates,
    /// The fraction of the embedding's rows that a step looks up, where the others are updated early.
    looked_up: Option<f64>,
    /// Gradients that are added to a sum, as a part of all that are formed: all but the first one.
    sums: f64,
    /// By how much the link slows the host's updates down.
    contention: f64,
}

/// At most a row a token.
fn looked_up(request: &Request, plan: &Plan) -> f64 {
    let tables = request.units[0].tensors.iter().filter(|t| t.role == Role::Trainable && t.shape.len() == 2);
    let Some(shape) = tables.map(|t| &t.shape).max_by_key(|shape| shape[0]) else { return 1.0 };
    let hidden = (shape[1] * request.precision.dtype().size()).max(1);
    let tokens = f64::from(plan.micro_batches) * request.units[1].input_bytes as f64 / hidden as f64;
    (tokens.floor() / shape[0].max(1) as f64).min(1.0)
}

impl Durations<'_> {
    fn of(&self, op: &Op) -> f64 {
        let unit = op.unit as usize;
        let (r, layout) = (self.rates, &self.placement.layouts[unit]);
        let upload = |bytes: u64| bytes as f64 / (r.h2d_gbs * 1e9);
        let download = |bytes: u64| bytes as f64 / (r.d2h_gbs * 1e9);
        let memory = |bytes: u64| bytes as f64 / (r.hbm_gbs * 1e9);
        let work = &self.request.units[unit];
        match op.kind {
            Kind::Load | Kind::FetchActivation => upload(self.link_bytes(op)),
            Kind::OffloadActivation => download(self.link_bytes(op)),
            // One part comes while another one returns.
            Kind::FetchState => upload(self.link_bytes(op)) * (2.0 / r.both_ways),
            Kind::WriteBackState => download(self.link_bytes(op)) * (2.0 / r.both_ways),
            Kind::OffloadGrad => {
                let norm = if op.early { 0.0 } else { memory(self.grad_bytes(op)) };
                norm + download(self.link_bytes(op))
            }
            Kind::Embed => memory(2 * self.request.units[unit + 1].input_bytes),
            Kind::EmbedBackward => memory(2 * self.request.units[unit + 1].input_bytes) + self.adding_s(unit),
            Kind::Forward => work.forward_s(r),
            Kind::Loss => work.forward_s(r) + work.backward_s(r) + self.adding_s(unit),
            Kind::Backward => {
                let in_large = self.plan.groups().has_in_large(op.micro_batch);
                let again = self.plan.units[unit].activation_in(in_large) == Activation::Recompute;
                work.backward_s(r) + if again { work.recompute_s(r) } else { 0.0 } + self.adding_s(unit)
            }
            Kind::AccumulateGrad => layout.num_trainable() as f64 / (2.0 * r.adamw_gparams * 1e9),
            Kind::ReadState | Kind::ReadWeights | Kind::ReadInput => {
                self.disk_bytes(op) as f64 / (r.state_read_gbs * 1e9)
            }
            Kind::WriteState | Kind::WriteInput => self.disk_bytes(op) as f64 / (r.state_write_gbs * 1e9),
            Kind::Update if op.lane == Lane::Update => {
                self.share(op) * memory((layout.update_bytes() * layout.num_trainable() as f64) as u64)
            }
            Kind::Update => {
                let rows = match (self.looked_up, op.early) {
                    (Some(touched), false) if unit == 0 => touched,
                    (Some(touched), true) => 1.0 - touched,
                    (_, early) => f64::from(u8::from(!early)),
                };
                let parameters = rows * self.share(op) * layout.num_trainable() as f64;
                self.contention * parameters / (r.adamw_gparams * 1e9)
            }
            // Steady state is that without a checkpoint.
            Kind::ClipDecision | Kind::WriteCheckpoint => 0.0,
        }
    }

    /// To add a micro-batch's gradients to their sums.
    fn adding_s(&self, unit: usize) -> f64 {
        self.sums * adding_s(self.placement.layouts[unit].num_trainable(), self.rates)
    }

    /// What an operation moves between host and disk.
    fn disk_bytes(&self, op: &Op) -> u64 {
        let unit = op.unit as usize;
        match op.kind {
            Kind::ReadWeights => self.placement.layouts[unit].image_bytes,
            Kind::ReadState | Kind::WriteState => self.placement.disk_bytes(unit, op.part as usize),
            Kind::ReadInput | Kind::WriteInput => self.placement.staged[unit].disk_bytes(op.micro_batch),
            _ => 0,
        }
    }

    /// The part of its unit that an update is about.
    fn share(&self, op: &Op) -> f64 {
        let unit = op.unit as usize;
        let elements = match (op.state_buffer, op.disk_buffer) {
            (Some(_), _) => &self.placement.device_update_parts[unit][op.part as usize],
            (_, Some(_)) => &self.placement.disk_parts[unit][op.part as usize],
            (None, None) => &self.placement.parts[unit][op.part as usize].elements,
        };
        (elements.end - elements.start) as f64 / self.placement.layouts[unit].elements as f64
    }

    fn grad_bytes(&self, op: &Op) -> u64 {
        let part = &self.placement.parts[op.unit as usize][op.part as usize];
        (part.elements.end - part.elements.start) * self.placement.grad_precision.dtype().size()
    }

    /// What an operation moves between host and device.
    fn link_bytes(&self, op: &Op) -> u64 {
        let unit = op.unit as usize;
        match op.kind {
            Kind::Load => {
                let image = &self.placement.parts[unit][op.part as usize].image;
                let share = self.request.units[unit].routed.map_or(1.0, |routed| routed.share);
                ((image.end - image.start) as f64 * share) as u64
            }
            Kind::FetchActivation | Kind::OffloadActivation => self.placement.staged[unit].bytes(op.micro_batch),
            Kind::OffloadGrad if op.slab.is_some() => self.grad_bytes(op),
            Kind::FetchState => self.placement.device_update_bytes(unit, op.part as usize).0,
            Kind::WriteBackState => self.placement.device_update_bytes(unit, op.part as usize).1,
            _ => 0,
        }
    }

    /// What crosses the link while the host updates: under immediate updates everything; just in time, what is sent
    /// for the forward during which they run, and the state of device updates.
    fn contention(&self, steady: &Schedule) -> f64 {
        let host = steady.ops.iter().filter(|op| op.kind == Kind::Update && op.lane == Lane::Host && !op.early);
        let updated: f64 =
            host.map(|op| self.share(op) * self.placement.layouts[op.unit as usize].elements as f64).sum();
        let immediate = self.request.update == UpdateMode::Immediate;
        let loss = steady.ops.iter().position(|op| op.kind == Kind::Loss).unwrap_or(0);
        let concurrent =
            steady.ops.iter().filter(|op| immediate || (op.id as usize) < loss || op.state_buffer.is_some());
        let bytes: f64 = concurrent.map(|op| self.link_bytes(op) as f64).sum();
        self.rates.contention(bytes, updated * self.request.state.update_bytes(self.request.precision))
    }
}

/// Seconds that order like numbers in a heap.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Seconds(f64);

impl Eq for Seconds {}

impl PartialOrd for Seconds {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Seconds {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

/// Steps simulated: one to start, one to measure, one during which the measured one's updates run.
const STEPS: u64 = 3;

struct Clock {
    seconds: Vec<f64>,
    now: f64,
    free: [f64; Lane::COUNT],
    progress: Progress<f64>,
    over: BinaryHeap<Reverse<(Seconds, Id)>>,
    ran: Vec<(Id, f64, f64)>,
    /// Steps about which the caller has decided.
    decided: u64,
}

impl Clock {
    fn new(seconds: Vec<f64>) -> Self {
        let progress = Progress::default();
        Self {
            seconds,
            now: 0.0,
            free: [0.0; Lane::COUNT],
            progress,
            over: BinaryHeap::new(),
            ran: Vec::new(),
            decided: 0,
        }
    }

    fn run(mut self, request: &Request, first: &Arc<Schedule>, steady: &Arc<Schedule>, with_spans: bool) -> Estimate {
        let mut begun = 0;
        loop {
            // The caller begins the next step once it has decided about this one.
            while begun < STEPS && self.may_begin(begun) {
                self.progress.begin(Arc::clone(if begun == 0 { first } else { steady }));
                begun += 1;
            }
            self.issue();
            let Some(Reverse((Seconds(time), id))) = self.over.pop() else { break };
            self.now = time;
            self.progress.complete(id);
            self.progress.retire();
        }
        self.summarise(request, steady, with_spans)
    }

    fn may_begin(&self, begun: u64) -> bool {
        self.decided == begun && self.progress.alive() < 2
    }

    fn issue(&mut self) {
        loop {
            let mut any = false;
            for lane in Lane::ALL {
                // The host works on one thing at a time; streams take work ahead of time.
                while lane.on_device() || self.free[lane as usize] <= self.now {
                    let Some(id) = self.progress.take(lane) else { break };
                    let awaited = self.progress.awaited_tokens(id).copied();
                    let start = awaited.fold(self.free[lane as usize].max(self.now), f64::max);
                    let end = start + self.seconds[id.op as usize];
                    self.free[lane as usize] = end;
                    self.ran.push((id, start, end));
                    self.decided += u64::from(lane == Lane::Caller);
                    self.progress.issued(id, end);
                    self.over.push(Reverse((Seconds(end), id)));
                    any = true;
                }
            }
            if !any {
                return;
            }
        }
    }

    fn summarise(&self, request: &Request, steady: &Schedule, with_spans: bool) -> Estimate {
        let first_computation = |step: u64| {
            let computes = |r: &&(Id, f64, f64)| r.0.pass == step && steady.ops[r.0.op as usize].lane == Lane::Compute;
            self.ran.iter().filter(computes).map(|r| r.1).fold(f64::INFINITY, f64::min)
        };
        let origin = first_computation(1);
        let mut busy: [Option<f64>; Lane::COUNT] = [None; Lane::COUNT];
        for op in steady.ops.iter().filter(|op| op.lane != Lane::Caller) {
            *busy[op.lane as usize].get_or_insert(0.0) += self.seconds[op.id as usize];
        }
        let seconds = |lane: Lane| Some((lane.name().to_owned(), busy[lane as usize]?));
        let lanes: BTreeMap<String, f64> = Lane::ALL.into_iter().filter_map(seconds).collect();
        let busiest = lanes.iter().max_by(|a, b| a.1.total_cmp(b.1));
        let (bound, busy) = busiest.map(|(name, &busy)| (name.clone(), busy)).unwrap_or_default();
        // Work that is put off costs nothing within the few steps that are simulated; for ever, it cannot be put off.
        let step_s = (first_computation(2) - origin).max(busy);
        let spans = if with_spans { self.spans(request, steady, origin) } else { Vec::new() };
        Estimate { step_s, lanes, bound, disk_read: 0, disk_written: 0, spans }
    }

    /// Everything from the measured step on, by seconds from `origin`.
    fn spans(&self, request: &Request, steady: &Schedule, origin: f64) -> Vec<Span> {
        let span = |&(id, start, end): &(Id, f64, f64)| {
            let op = &steady.ops[id.op as usize];
            let unit = request.units[op.unit as usize].name.clone();
            let (start_s, end_s) = (start - origin, end - origin);
            Span { lane: op.lane, kind: op.kind, unit, micro_batch: op.micro_batch, step: id.pass, start_s, end_s }
        };
        self.ran.iter().filter(|ran| ran.0.pass >= 1).map(span).collect()
    }
}
