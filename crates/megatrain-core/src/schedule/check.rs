//! Proves a schedule: finds the first rule that it breaks.
//!
//! Nothing is believed about how the schedule was built. Each operation must be one that the plan asks for, as often as it
//! asks for it, on the lane that its kind is executed on, with every buffer that it uses named and inside the plan's. Then
//! each operation's reads and writes are followed in program order, and every pair that touches one thing must be ordered by
//! a path of dependencies: such a path means that the first is over before the second begins, whether an event orders them
//! or the host.
//!
//! Whether a path exists is answered in near-constant time: computations form a chain (which is proved first), so that
//! the latest computation before an operation and the earliest one after it stand for all others, and only paths
//! without a computation are searched.
use std::collections::{BTreeMap, HashMap, HashSet};

use super::hazards::{Access, Resource, accesses, edge};
use super::{Edge, Kind, Lane, Op, Pass, Resident, Schedule, ScheduleInputs, Shape};
use crate::error::{Error, Result};

/// Checks `schedule` as the pass that follows `previous`, which is checked itself as far as this proof rests on it.
///
/// # Errors
/// [`Error::OpRule`] naming the operation and the rule that it breaks, [`Error::OpCount`] for an operation too few or too
/// many, [`Error::NotResident`], [`Error::PassSize`].
pub fn check(inputs: &ScheduleInputs, schedule: &Schedule, previous: Option<&Schedule>) -> Result<()> {
    for schedule in previous.into_iter().chain([schedule]) {
        check_shape(inputs, schedule)?;
    }
    let mut graph = Graph::new(schedule, previous)?;
    graph.check_edges()?;
    for schedule in previous.into_iter().chain([schedule]) {
        check_work(inputs, schedule)?;
        check_lanes(inputs, schedule)?;
    }
    graph.check_compute_chain()?;
    for schedule in previous.into_iter().chain([schedule]) {
        check_compute_order(inputs, schedule)?;
    }
    graph.check_hazards(inputs, schedule, previous)?;
    for schedule in previous.into_iter().chain([schedule]) {
        check_buffers(inputs, schedule)?;
    }
    Ok(())
}

fn broken(op: &Op, rule: &str) -> Error {
    let Op { id, unit, micro_batch, .. } = *op;
    Error::OpRule { op: id, kind: format!("{:?}", op.kind), unit, micro_batch, rule: rule.to_owned() }
}

/// Everything that indexes the plan is inside it.
fn check_shape(inputs: &ScheduleInputs, schedule: &Schedule) -> Result<()> {
    let Shape { pass, micro_batches, .. } = schedule.shape;
    let fits = match pass {
        Pass::Write => micro_batches == 0,
        Pass::Train | Pass::Eval => (1..=inputs.micro_batches).contains(&micro_batches),
    };
    if !fits {
        return Err(Error::PassSize { asked: micro_batches, most: inputs.micro_batches });
    }
    if let Some(op) = schedule.ops.iter().find(|op| op.unit > inputs.head()) {
        return Err(broken(op, "an operation is about a unit of the model"));
    }
    for held in &schedule.resident {
        let known = held.unit <= inputs.head() && {
            let own = inputs.unit(held.unit).own_place;
            held.slot.map_or(own, |slot| !own && slot < inputs.slots)
        };
        if !known {
            return Err(Error::NotResident { unit: held.unit });
        }
    }
    Ok(())
}

/// Both passes in one row: those of the previous pass first.
struct Graph<'a> {
    ops: Vec<&'a Op>,
    before: Vec<Vec<usize>>,
    /// Where this pass begins.
    start: usize,
    /// The latest computation that each operation follows or is.
    after_compute: Vec<Option<usize>>,
    /// The earliest computation that follows each operation or is it.
    before_compute: Vec<Option<usize>>,
}

impl<'a> Graph<'a> {
    fn new(schedule: &'a Schedule, previous: Option<&'a Schedule>) -> Result<Self> {
        let start = previous.map_or(0, |p| p.ops.len());
        let (mut ops, mut all_before): (Vec<&Op>, Vec<Vec<usize>>) = (Vec::new(), Vec::new());
        for (of_pass, offset) in previous.map(|p| (&p.ops, 0)).into_iter().chain([(&schedule.ops, start)]) {
            for (index, op) in of_pass.iter().enumerate() {
                if op.id as usize != index {
                    return Err(broken(op, "an operation's id is its position in the list"));
                }
                let mut before = Vec::new();
                for dep in &op.deps {
                    let (earlier, known) =
                        if dep.prior { (dep.op as usize, start) } else { (offset + dep.op as usize, offset + index) };
                    if dep.prior && offset != start {
                        // What the previous pass itself waited for is past.
                        continue;
                    }
                    if earlier >= known {
                        return Err(broken(op, "an operation depends only on earlier ones"));
                    }
                    before.push(earlier);
                }
                ops.push(op);
                all_before.push(before);
            }
        }
        Ok(Self { ops, before: all_before, start, after_compute: Vec::new(), before_compute: Vec::new() })
    }

    fn is_compute(&self, at: usize) -> bool {
        self.ops[at].lane == Lane::Compute
    }

    /// Whether `first` is over before `second` begins. Computations must have been proved to be a chain.
    fn ordered(&self, first: usize, second: usize) -> bool {
        if let (Some(reached), Some(passed)) = (self.before_compute[first], self.after_compute[second])
            && reached <= passed
        {
            return true;
        }
        // A path that leads through a computation, or begins or ends with one, would have been found.
        !self.is_compute(first) && !self.is_compute(second) && self.searched(first, second, |at| !self.is_compute(at))
    }

    /// Looks for a path from `second` back to `first` through operations that `through` lets pass.
    fn searched(&self, first: usize, second: usize, through: impl Fn(usize) -> bool) -> bool {
        let mut seen = HashSet::new();
        let mut stack = vec![second];
        while let Some(at) = stack.pop() {
            for &before in &self.before[at] {
                if before == first {
                    return true;
                }
                if before > first && through(before) && seen.insert(before) {
                    stack.push(before);
                }
            }
        }
        false
    }

    fn check_edges(&self) -> Result<()> {
        for op in &self.ops[self.start..] {
            for dep in &op.deps {
                let earlier = self.ops[if dep.prior { dep.op as usize } else { self.start + dep.op as usize }];
                if dep.edge == Edge::Issued && edge(earlier.lane, op.lane) == Edge::Complete {
                    return Err(broken(
                        op,
                        "an event orders only work on the device; the host must wait until it is over",
                    ));
                }
            }
        }
        Ok(())
    }

    /// The compute stream runs what the caller computes one after the other; what that says about others is noted.
    fn check_compute_chain(&mut self) -> Result<()> {
        let computes: Vec<usize> = (0..self.ops.len()).filter(|&at| self.is_compute(at)).collect();
        for pair in computes.windows(2) {
            if !self.searched(pair[0], pair[1], |_| true) {
                return Err(broken(self.ops[pair[1]], "each computation follows the one before it"));
            }
        }
        let mut after_compute: Vec<Option<usize>> = vec![None; self.ops.len()];
        for at in 0..self.ops.len() {
            let own = self.is_compute(at).then_some(at);
            after_compute[at] = self.before[at].iter().filter_map(|&before| after_compute[before]).chain(own).max();
        }
        let mut before_compute: Vec<Option<usize>> = vec![None; self.ops.len()];
        for at in (0..self.ops.len()).rev() {
            if self.is_compute(at) {
                before_compute[at] = Some(at);
            }
            let Some(reached) = before_compute[at] else { continue };
            for &before in &self.before[at] {
                before_compute[before] = Some(before_compute[before].map_or(reached, |known| known.min(reached)));
            }
        }
        (self.after_compute, self.before_compute) = (after_compute, before_compute);
        Ok(())
    }

    fn check_hazards(&self, inputs: &ScheduleInputs, schedule: &Schedule, previous: Option<&Schedule>) -> Result<()> {
        let mut contents = Contents::default();
        for held in previous.map_or(&[][..], |p| &p.resident) {
            for place in places(inputs, *held) {
                contents.put(place, Content::new(None, (held.unit, 0)));
            }
        }
        for (index, op) in self.ops[..self.start].iter().enumerate() {
            let shape = previous.map_or(schedule.shape, |p| p.shape);
            for (resource, access) in accesses(inputs, shape, op) {
                contents.follow(index, op, resource, access);
            }
        }
        for held in &schedule.resident {
            let there = |place| contents.of.get(&place).is_some_and(|c| c.holds == (held.unit, 0));
            if !places(inputs, *held).all(there) {
                return Err(Error::NotResident { unit: held.unit });
            }
        }
        // Weights that the pass does not know to be there must be loaded again, even where they happen to be; and gradients,
        // sums and decisions of the pass before are not those of this one.
        let known: HashSet<Resource> = schedule.resident.iter().flat_map(|&held| places(inputs, held)).collect();
        for (resource, content) in &mut contents.of {
            if must_be_written(inputs, *resource) && !known.contains(resource) {
                content.holds = STALE;
            }
        }
        for (index, op) in self.ops.iter().enumerate().skip(self.start) {
            for (resource, access) in accesses(inputs, schedule.shape, op) {
                self.check_access(inputs, &contents, index, resource, access)?;
                contents.follow(index, op, resource, access);
            }
        }
        Ok(())
    }

    fn check_access(
        &self,
        inputs: &ScheduleInputs,
        contents: &Contents,
        index: usize,
        resource: Resource,
        access: Access,
    ) -> Result<()> {
        let op = self.ops[index];
        let content = contents.of.get(&resource);
        match (access, content) {
            (Access::Read(unit, mb), Some(content)) => {
                if content.holds != (unit, mb) {
                    let holds = content.holds;
                    return Err(broken(op, &format!("{resource:?} holds {holds:?}, not what it reads")));
                }
                // The chain of computations, proved before, orders what an earlier link waited for.
                let proved = op.lane == Lane::Compute && content.last_compute.is_some();
                if !proved && content.writer.is_some_and(|writer| !self.ordered(writer, index)) {
                    return Err(broken(op, read_rule(resource)));
                }
            }
            (Access::Read(..), None) if must_be_written(inputs, resource) => {
                return Err(broken(op, read_rule(resource)));
            }
            (Access::Write(unit, _) | Access::Add(unit, _), Some(content)) => {
                let mut before = content.readers.iter().copied().chain(content.last_compute).chain(content.writer);
                if before.any(|before| before != index && !self.ordered(before, index)) {
                    return Err(broken(op, write_rule(resource)));
                }
                if matches!(access, Access::Add(..)) && content.holds.0 != unit {
                    return Err(broken(op, "a sum is added to, and not replaced, by later micro-batches"));
                }
            }
            (Access::Add(..), None) => {
                return Err(broken(op, "a sum is added to, and not replaced, by later micro-batches"));
            }
            _ => {}
        }
        Ok(())
    }
}

/// What a resource holds, who put it there in these two passes, and who has read it since.
struct Content {
    writer: Option<usize>,
    holds: (u32, u32),
    /// Readers that compute nothing.
    readers: Vec<usize>,
    /// The latest computation that has read it: it follows all before it.
    last_compute: Option<usize>,
}

impl Content {
    const fn new(writer: Option<usize>, holds: (u32, u32)) -> Self {
        Self { writer, holds, readers: Vec::new(), last_compute: None }
    }
}

/// In place of a unit whose weights on the device are no longer those on the host.
const STALE: (u32, u32) = (u32::MAX, 0);

#[derive(Default)]
struct Contents {
    of: HashMap<Resource, Content>,
    /// Places of weights that hold something.
    weights: Vec<Resource>,
}

impl Contents {
    fn put(&mut self, resource: Resource, content: Content) {
        let fresh = self.of.insert(resource, content).is_none();
        if fresh && matches!(resource, Resource::Slot(_) | Resource::Own(..)) {
            self.weights.push(resource);
        }
    }

    fn follow(&mut self, index: usize, op: &Op, resource: Resource, access: Access) {
        match access {
            Access::Read(unit, mb) => {
                // What the host holds was there before; whoever overwrites it must still wait for its readers.
                if !self.of.contains_key(&resource) {
                    self.put(resource, Content::new(None, (unit, mb)));
                }
                let content = self.of.get_mut(&resource).expect("put there above");
                if op.lane == Lane::Compute {
                    content.last_compute = Some(index);
                } else {
                    content.readers.push(index);
                }
            }
            Access::Write(unit, mb) | Access::Add(unit, mb) => {
                self.put(resource, Content::new(Some(index), (unit, mb)));
            }
        }
        // (What is updated early is still to be read by this pass, as it was.)
        if let (Access::Write(..), false, Resource::Image(unit, _)) = (access, op.early, resource) {
            for place in &self.weights {
                if let Some(content) = self.of.get_mut(place).filter(|content| content.holds == (unit, 0)) {
                    content.holds = STALE;
                }
            }
        }
    }
}

fn places(inputs: &ScheduleInputs, held: Resident) -> impl Iterator<Item = Resource> {
    let parts = if held.slot.is_some() { 1 } else { inputs.unit(held.unit).parts };
    (0..parts).map(move |part| held.slot.map_or(Resource::Own(held.unit, part), Resource::Slot))
}

/// Host planes and weights that live on the device are there from the start; all else must be written first.
fn must_be_written(inputs: &ScheduleInputs, resource: Resource) -> bool {
    match resource {
        Resource::Image(..) | Resource::Disk(..) | Resource::Count(_) => false,
        Resource::Own(unit, _) => !inputs.unit(unit).on_device,
        _ => true,
    }
}

fn read_rule(resource: Resource) -> &'static str {
    match resource {
        Resource::Image(..) => "weights are sent only after the update that changes them",
        Resource::Disk(..) => "state is read from disk only after it has been written there",
        Resource::DiskBuffer(_) => "state is read before it is updated, and updated before it is written",
        Resource::Own(..) | Resource::Slot(_) => "weights are loaded before they are used",
        Resource::Grad(_) => "a gradient is offloaded after backward has finished it",
        Resource::Slab(..) => "a gradient is used only after it has been offloaded",
        Resource::Stage(_) => "activations are in the staging buffer before they are used",
        Resource::StateBuffer(_) => "state is fetched before it is updated, and updated before it is written back",
        Resource::Area(..) => "activations are on the host before they are fetched",
        Resource::Sums(..) => "the norm is taken after all gradients have been offloaded",
        Resource::Store(_) => "an update follows the sum over passes",
        Resource::Loss => "nothing is updated before the loss is known to be finite",
        Resource::ClipDecision => "an update follows the clip decision",
        Resource::Count(_) => COUNTED,
        Resource::Files => APPENDED,
    }
}

fn write_rule(resource: Resource) -> &'static str {
    match resource {
        Resource::Image(..) => "weights are not changed while they are sent, nor before they have been written",
        Resource::Disk(..) => "state on disk is not overwritten before it has been read",
        Resource::DiskBuffer(_) => "a buffer is not used again before its state has been written to disk",
        Resource::Own(..) | Resource::Slot(_) => "weights on the device are not overwritten before their last use",
        Resource::Grad(_) => "a gradient buffer is not used again before it has been offloaded",
        Resource::Slab(..) => "a slab is not used again before its gradient has been consumed",
        Resource::Stage(_) => "a staging buffer is not used again before it has been emptied",
        Resource::StateBuffer(_) => "a state buffer is not used again before its state has been written back",
        Resource::Area(..) => "activations on the host are not overwritten before they have been fetched",
        Resource::Sums(..) => "norm sums are not overwritten before the clip decision",
        Resource::Store(_) => "the store is not overwritten before the update",
        Resource::Count(_) => COUNTED,
        Resource::Loss => "a loss is not replaced before all who wait for it have seen it",
        Resource::ClipDecision => "a clip decision holds until all updates have seen it",
        Resource::Files => APPENDED,
    }
}

/// For all parts of a unit this is one update; the last of them counts it.
const COUNTED: &str = "the parts of a unit are updated in order";
const APPENDED: &str = "units are appended to the files in order, one after the other";

/// What is not counted by micro-batch: a kind, a unit, a part of it, and whether it is early.
type Work = (Kind, u32, u32, bool);

/// Every part of a unit that trains is offloaded once and updated once, where its state lives or is fetched to, and what is
/// fetched is written back once; so are, before that, the embedding's rows that the step does not look up. What a pass has
/// no use for does not occur.
fn check_work(inputs: &ScheduleInputs, schedule: &Schedule) -> Result<()> {
    let train = schedule.shape.pass == Pass::Train;
    let mut expected: BTreeMap<Work, u64> = BTreeMap::new();
    for unit in 0..=inputs.head() {
        let of = inputs.unit(unit);
        let trains = train && of.trains;
        let early = trains && unit == 0 && inputs.early;
        let (parts, updates) = (of.parts, of.update_parts());
        let away = trains && of.device_update_parts > 0;
        let on_disk = trains && of.disk_parts > 0;
        for (kind, early, wanted, parts) in [
            (Kind::OffloadGrad, false, trains, parts),
            (Kind::OffloadGrad, true, early && inputs.tied, parts),
            (Kind::AccumulateGrad, false, trains && inputs.accumulate, parts),
            (Kind::FetchState, false, away, updates),
            (Kind::ReadState, false, on_disk, updates),
            (Kind::WriteState, false, on_disk, updates),
            (Kind::Update, false, trains, updates),
            (Kind::Update, true, early, parts),
            (Kind::WriteBackState, false, away, updates),
        ] {
            if wanted {
                expected.extend((0..parts).map(|part| ((kind, unit, part, early), 1)));
            }
        }
        if schedule.shape.writes {
            expected.insert((Kind::WriteCheckpoint, unit, 0, false), 1);
        }
    }
    if train {
        expected.insert((Kind::ClipDecision, 0, 0, false), 1);
    }
    for op in &schedule.ops {
        let of = inputs.unit(op.unit);
        let parts = match op.kind {
            Kind::FetchState | Kind::ReadState | Kind::Update | Kind::WriteBackState | Kind::WriteState
                if !op.early =>
            {
                of.update_parts()
            }
            Kind::OffloadGrad | Kind::Update => of.parts,
            Kind::Load if of.own_place => of.parts,
            _ => 1,
        };
        if op.part >= parts {
            return Err(broken(op, "a unit has the parts that the plan gave it"));
        }
    }
    let mut found: BTreeMap<Work, u64> = BTreeMap::new();
    let counted = |op: &&Op| !matches!(op.kind, Kind::Load) && !by_micro_batch(op.kind);
    for op in schedule.ops.iter().filter(counted) {
        *found.entry((op.kind, op.unit, op.part, op.early)).or_insert(0) += 1;
    }
    for work @ &(kind, unit, part, _) in expected.keys().chain(found.keys()) {
        let (found, expected) = (found.get(work).copied().unwrap_or(0), expected.get(work).copied().unwrap_or(0));
        if found != expected {
            let what = match kind {
                Kind::WriteCheckpoint => format!("WriteCheckpoint of unit {unit} (written {found} times)"),
                Kind::ClipDecision => "the clip decision".to_owned(),
                _ => format!("{kind:?} of unit {unit}, part {part},"),
            };
            return Err(Error::OpCount { what, found, expected });
        }
    }
    if let Some(op) = schedule.ops.iter().find(|op| !counted(op) && op.early) {
        return Err(broken(op, "only the embedding's gradient and update can be early"));
    }
    if let Some(op) = schedule.ops.iter().find(|op| op.micro_batch != 0 && !by_micro_batch(op.kind)) {
        return Err(broken(op, "what is not done by micro-batch names none"));
    }
    Ok(())
}

/// What happens once for each micro-batch.
const fn by_micro_batch(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::Embed
            | Kind::Forward
            | Kind::Loss
            | Kind::Backward
            | Kind::EmbedBackward
            | Kind::OffloadActivation
            | Kind::FetchActivation
    )
}

/// Every operation is on the lane whose stream or thread executes its kind: elsewhere, the events by which others wait for it
/// would be recorded on another stream than the one that it is queued on.
fn check_lanes(inputs: &ScheduleInputs, schedule: &Schedule) -> Result<()> {
    for op in &schedule.ops {
        let (lane, rule) = match op.kind {
            Kind::Embed | Kind::Forward | Kind::Loss | Kind::Backward | Kind::EmbedBackward => {
                (Lane::Compute, "the caller computes on the compute lane")
            }
            Kind::Load | Kind::FetchActivation | Kind::FetchState => {
                (Lane::Upload, "copies to the device are queued on the upload lane")
            }
            Kind::OffloadActivation | Kind::OffloadGrad => {
                (Lane::Download, "copies to the host are queued on the download lane")
            }
            Kind::AccumulateGrad => (Lane::Host, "gradients are accumulated by the host"),
            Kind::ClipDecision => (Lane::Caller, "the caller decides"),
            Kind::Update if inputs.unit(op.unit).updated_on_device() => {
                (Lane::Update, "a unit is updated where its state lives or is fetched to")
            }
            Kind::Update => (Lane::Host, "a unit is updated where its state lives or is fetched to"),
            Kind::WriteBackState => (Lane::Update, "state is written back on the update lane"),
            Kind::WriteCheckpoint => (Lane::Disk, "files are written on the lane of files"),
            Kind::ReadState => (Lane::StateRead, "state on disk is read on the lane that reads it"),
            Kind::WriteState => (Lane::StateWrite, "state on disk is written on the lane that writes it"),
        };
        if op.lane != lane {
            return Err(broken(op, rule));
        }
    }
    Ok(())
}

/// Each micro-batch is computed unit by unit, forward and then back, and those of a unit are computed in order; what is
/// staged is offloaded and fetched once for each.
fn check_compute_order(inputs: &ScheduleInputs, schedule: &Schedule) -> Result<()> {
    let (head, micro_batches) = (inputs.head(), schedule.shape.micro_batches);
    let train = schedule.shape.pass == Pass::Train;
    let mut next: HashMap<(Kind, u32), u32> = HashMap::new();
    for op in schedule.ops.iter().filter(|op| by_micro_batch(op.kind)) {
        let expected = next.entry((op.kind, op.unit)).or_insert(0);
        if op.micro_batch != *expected {
            return Err(broken(op, "micro-batches of a unit are computed in order"));
        }
        *expected += 1;
    }
    let mut times = |kind: Kind, unit: u32, expected: u32| {
        let found = next.remove(&(kind, unit)).unwrap_or(0);
        if found == expected {
            return Ok(());
        }
        let what = format!("{kind:?} of unit {unit}");
        Err(Error::OpCount { what, found: found.into(), expected: expected.into() })
    };
    let backward = if train { micro_batches } else { 0 };
    times(Kind::Embed, 0, micro_batches)?;
    times(Kind::Loss, head, micro_batches)?;
    times(Kind::EmbedBackward, 0, backward)?;
    for unit in 1..head {
        times(Kind::Forward, unit, micro_batches)?;
        times(Kind::Backward, unit, backward)?;
        let staged = if inputs.unit(unit).staged { backward } else { 0 };
        times(Kind::OffloadActivation, unit, staged)?;
        times(Kind::FetchActivation, unit, staged)?;
    }
    if let Some((&(kind, unit), &found)) = next.iter().min_by_key(|(key, _)| **key) {
        let what = format!("{kind:?} of unit {unit}");
        return Err(Error::OpCount { what, found: found.into(), expected: 0 });
    }
    // How many computations of each micro-batch there have been says which one is next.
    let last_turn = if train { 2 * head + 1 } else { head + 1 };
    let mut done: Vec<u32> = vec![0; micro_batches as usize];
    let mut finished = 0;
    for op in schedule.ops.iter().filter(|op| op.lane == Lane::Compute) {
        let turn = &mut done[op.micro_batch as usize];
        let expected = match *turn {
            0 => (Kind::Embed, 0),
            turn if turn < head => (Kind::Forward, turn),
            turn if turn == head => (Kind::Loss, head),
            turn if turn < 2 * head => (Kind::Backward, 2 * head - turn),
            _ => (Kind::EmbedBackward, 0),
        };
        if (op.kind, op.unit) != expected {
            return Err(broken(op, "a micro-batch passes through the units in order, forward and then back"));
        }
        // Room for activations is that of one group.
        if *turn == 0 && op.micro_batch / inputs.group * inputs.group > finished {
            return Err(broken(op, "a group of micro-batches begins when the one before it has ended"));
        }
        *turn += 1;
        finished += u32::from(*turn == last_turn);
    }
    Ok(())
}

/// Every buffer that an operation uses is named, is one that its unit may use, and is inside the plan's; none that it does not
/// use is named.
fn check_buffers(inputs: &ScheduleInputs, schedule: &Schedule) -> Result<()> {
    let train = schedule.shape.pass == Pass::Train;
    // Where forward left a micro-batch's activations, and where they were fetched to.
    let mut staged: HashMap<(Kind, u32, u32), Option<u32>> = HashMap::new();
    for op in &schedule.ops {
        let (kind, of) = (op.kind, inputs.unit(op.unit));
        let computes_layer = matches!(kind, Kind::Forward | Kind::Backward);
        let slot = (kind == Kind::Load || computes_layer) && !of.own_place;
        if !named(op.slot, slot, |slot| slot < inputs.slots) {
            return Err(broken(op, "a layer without a place of its own is loaded into a slot, and computed from one"));
        }
        if kind == Kind::Load && of.on_device {
            return Err(broken(op, "weights that live on the device are not loaded"));
        }
        let sums = match kind {
            Kind::Loss => train,
            Kind::Backward | Kind::EmbedBackward | Kind::OffloadGrad => true,
            Kind::Update => of.on_device,
            _ => false,
        };
        let grad = |grad| of.own_grad.map_or_else(|| inputs.shared_grads.contains(&grad), |own| own == grad);
        if !named(op.grad, sums && of.trains, grad) {
            return Err(broken(op, "a unit that trains has its gradient in a buffer that the plan gave it"));
        }
        let lands = match kind {
            Kind::OffloadGrad | Kind::AccumulateGrad | Kind::FetchState => !of.on_device,
            Kind::Update => !of.updated_on_device() && !inputs.accumulate,
            _ => false,
        };
        let slab = |slab| of.own_slab.map_or_else(|| inputs.shared_slabs.contains(&slab), |own| own == slab);
        if !named(op.slab, lands, slab) {
            return Err(broken(op, "a gradient whose unit's state lives on the host is offloaded to a slab"));
        }
        let moves = matches!(kind, Kind::OffloadActivation | Kind::FetchActivation);
        let stages = train && of.staged && (moves || computes_layer);
        if !named(op.stage, stages, |stage| stage < inputs.stage_buffers) {
            return Err(broken(op, "activations that go to the host pass through a staging buffer"));
        }
        match kind {
            Kind::Forward | Kind::FetchActivation => {
                staged.insert((kind, op.unit, op.micro_batch), op.stage);
            }
            Kind::OffloadActivation | Kind::Backward => {
                let from = if kind == Kind::Backward { Kind::FetchActivation } else { Kind::Forward };
                if stages && staged.get(&(from, op.unit, op.micro_batch)) != Some(&op.stage) {
                    return Err(broken(op, "activations are taken from the staging buffer that they were put into"));
                }
            }
            _ => {}
        }
        let away = matches!(kind, Kind::FetchState | Kind::Update | Kind::WriteBackState) && of.device_update_parts > 0;
        if !named(op.state_buffer, away, |buffer| buffer < inputs.state_buffers) {
            return Err(broken(op, "a device update passes through a state buffer"));
        }
        let spilled = matches!(kind, Kind::ReadState | Kind::Update | Kind::WriteState) && of.disk_parts > 0;
        if !named(op.disk_buffer, spilled, |buffer| buffer < inputs.disk_buffers) {
            return Err(broken(op, "state on disk passes through a buffer of the host's"));
        }
    }
    Ok(())
}

/// Whether a buffer is named where one is used, and is one that may be.
fn named(buffer: Option<u32>, used: bool, fits: impl FnOnce(u32) -> bool) -> bool {
    buffer.map_or(!used, |buffer| used && fits(buffer))
}
