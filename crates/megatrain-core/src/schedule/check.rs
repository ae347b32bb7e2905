//! Proves a schedule: finds the first rule that it breaks.
//!
//! Nothing of how the schedule was built is believed. Each operation's reads and writes are looked at in program order,
//! and every pair that touches one thing must be ordered by a path of dependencies: such a path means that the first
//! is over before the second begins, whether an event orders them or the host.
use std::collections::{HashMap, HashSet};

use super::hazards::{Access, Resource, accesses, edge};
use super::{Edge, Facts, Kind, Lane, Op, Pass, Resident, Schedule};
use crate::error::{Error, Result};

/// Checks `schedule` as the pass that follows `previous`.
///
/// # Errors
/// [`Error`] naming the operation and the rule that it breaks.
pub fn check(facts: &Facts, schedule: &Schedule, previous: Option<&Schedule>) -> Result<()> {
    let graph = Graph::new(schedule, previous)?;
    graph.check_edges()?;
    check_work(facts, schedule)?;
    graph.check_compute_order(facts, schedule)?;
    graph.check_hazards(facts, schedule, previous)
}

fn broken(op: &Op, rule: &str) -> Error {
    let Op { id, unit, micro_batch, .. } = *op;
    Error::OpRule { op: id, kind: format!("{:?}", op.kind), unit, micro_batch, rule: rule.to_owned() }
}

/// Both passes in one row: those of the previous pass first.
struct Graph<'a> {
    ops: Vec<&'a Op>,
    before: Vec<Vec<usize>>,
    /// Where this pass begins.
    start: usize,
}

impl<'a> Graph<'a> {
    fn new(schedule: &'a Schedule, previous: Option<&'a Schedule>) -> Result<Self> {
        let start = previous.map_or(0, |p| p.ops.len());
        let mut graph = Self { ops: Vec::new(), before: Vec::new(), start };
        for (ops, offset) in previous.map(|p| (&p.ops, 0)).into_iter().chain([(&schedule.ops, start)]) {
            for (index, op) in ops.iter().enumerate() {
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
                graph.ops.push(op);
                graph.before.push(before);
            }
        }
        Ok(graph)
    }

    /// Whether `first` is over before `second` begins.
    fn ordered(&self, first: usize, second: usize) -> bool {
        let mut seen = HashSet::new();
        let mut stack = vec![second];
        while let Some(at) = stack.pop() {
            for &before in &self.before[at] {
                if before == first {
                    return true;
                }
                if before > first && seen.insert(before) {
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

    /// The compute stream runs what the caller computes one after the other, micro-batches of a unit in order.
    fn check_compute_order(&self, facts: &Facts, schedule: &Schedule) -> Result<()> {
        let mut last: Option<usize> = None;
        let mut next: HashMap<(Kind, u32), u32> = HashMap::new();
        for (index, op) in self.ops.iter().enumerate() {
            if op.lane != Lane::Compute {
                continue;
            }
            if let Some(last) = last
                && index >= self.start
                && !self.ordered(last, index)
            {
                return Err(broken(op, "each computation follows the one before it"));
            }
            last = Some(index);
            if index >= self.start {
                let expected = next.entry((op.kind, op.unit)).or_insert(0);
                if op.micro_batch != *expected {
                    return Err(broken(op, "micro-batches of a unit are computed in order"));
                }
                *expected += 1;
            }
        }
        let turns: &[(Kind, bool)] = &[
            (Kind::Embed, false),
            (Kind::Forward, true),
            (Kind::Loss, false),
            (Kind::Backward, true),
            (Kind::EmbedBackward, false),
        ];
        let train = schedule.shape.pass == Pass::Train;
        for &(kind, layers) in
            turns.iter().filter(|(kind, _)| train || !matches!(kind, Kind::Backward | Kind::EmbedBackward))
        {
            let units = match kind {
                _ if layers => 1..facts.head(),
                Kind::Loss => facts.head()..facts.head() + 1,
                _ => 0..1,
            };
            for unit in units {
                let done = next.get(&(kind, unit)).copied().unwrap_or(0);
                if done != schedule.shape.micro_batches {
                    let (what, expected) = (format!("{kind:?} of unit {unit}"), schedule.shape.micro_batches);
                    return Err(Error::OpCount { what, found: done.into(), expected: expected.into() });
                }
            }
        }
        Ok(())
    }

    fn check_hazards(&self, facts: &Facts, schedule: &Schedule, previous: Option<&Schedule>) -> Result<()> {
        let mut contents = Contents::default();
        for held in previous.map_or(&[][..], |p| &p.resident) {
            for place in places(facts, *held) {
                contents.0.insert(place, Content { writer: None, holds: (held.unit, 0), readers: Vec::new() });
            }
        }
        for (index, op) in self.ops[..self.start].iter().enumerate() {
            let shape = previous.map_or(schedule.shape, |p| p.shape);
            for (resource, access) in accesses(facts, shape, op) {
                contents.follow(index, op, resource, access);
            }
        }
        for held in &schedule.resident {
            let there = |place| contents.0.get(&place).is_some_and(|c| c.holds == (held.unit, 0));
            if !places(facts, *held).all(there) {
                return Err(Error::NotResident { unit: held.unit });
            }
        }
        // What the pass does not know to be there must be loaded again, even where it happens to lie.
        let known: HashSet<Resource> = schedule.resident.iter().flat_map(|&held| places(facts, held)).collect();
        for (resource, content) in &mut contents.0 {
            let weights = matches!(resource, Resource::Slot(_) | Resource::Own(..));
            if weights && must_be_written(facts, *resource) && !known.contains(resource) {
                content.holds = STALE;
            }
        }
        for (index, op) in self.ops.iter().enumerate().skip(self.start) {
            for (resource, access) in accesses(facts, schedule.shape, op) {
                self.check_access(facts, &contents, index, resource, access)?;
                contents.follow(index, op, resource, access);
            }
        }
        Ok(())
    }

    fn check_access(
        &self,
        facts: &Facts,
        contents: &Contents,
        index: usize,
        resource: Resource,
        access: Access,
    ) -> Result<()> {
        let op = self.ops[index];
        let content = contents.0.get(&resource);
        match (access, content) {
            (Access::Read(unit, mb), Some(content)) => {
                if content.holds != (unit, mb) {
                    let holds = content.holds;
                    return Err(broken(op, &format!("{resource:?} holds {holds:?}, not what it reads")));
                }
                // The chain of computations, proved before, orders what an earlier link waited for.
                let chained = |&reader: &usize| self.ops[reader].lane == Lane::Compute;
                let proved = op.lane == Lane::Compute && content.readers.iter().any(chained);
                if !proved && content.writer.is_some_and(|writer| !self.ordered(writer, index)) {
                    return Err(broken(op, read_rule(resource)));
                }
            }
            (Access::Read(..), None) if must_be_written(facts, resource) => {
                return Err(broken(op, read_rule(resource)));
            }
            (Access::Write(unit, _) | Access::Add(unit, _), Some(content)) => {
                let mut before = content.readers.iter().copied().chain(content.writer);
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
    readers: Vec<usize>,
}

/// In place of a unit whose weights on the device are no longer those on the host.
const STALE: (u32, u32) = (u32::MAX, 0);

#[derive(Default)]
struct Contents(HashMap<Resource, Content>);

impl Contents {
    fn follow(&mut self, index: usize, op: &Op, resource: Resource, access: Access) {
        match access {
            Access::Read(unit, mb) => {
                // What the host holds was there before; whoever overwrites it must still wait for its readers.
                let fresh = || Content { writer: None, holds: (unit, mb), readers: Vec::new() };
                self.0.entry(resource).or_insert_with(fresh).readers.push(index);
            }
            Access::Write(unit, mb) | Access::Add(unit, mb) => {
                let content = Content { writer: Some(index), holds: (unit, mb), readers: Vec::new() };
                self.0.insert(resource, content);
            }
        }
        // (What is updated early is still to be read by this pass, as it was.)
        if let (Access::Write(..), false, Resource::Image(unit, _)) = (access, op.early, resource) {
            for (place, content) in &mut self.0 {
                if matches!(place, Resource::Slot(_) | Resource::Own(..)) && content.holds == (unit, 0) {
                    content.holds = STALE;
                }
            }
        }
    }
}

fn places(facts: &Facts, held: Resident) -> impl Iterator<Item = Resource> {
    let parts = if held.slot.is_some() { 1 } else { facts.unit(held.unit).parts };
    (0..parts).map(move |part| held.slot.map_or(Resource::Own(held.unit, part), Resource::Slot))
}

/// Host planes and weights that live on the device are there from the start; all else must be written first.
fn must_be_written(facts: &Facts, resource: Resource) -> bool {
    match resource {
        Resource::Image(..) | Resource::Count(_) => false,
        Resource::Own(unit, _) => !facts.unit(unit).on_device,
        _ => true,
    }
}

fn read_rule(resource: Resource) -> &'static str {
    match resource {
        Resource::Image(..) => "weights are sent only after the update that changes them",
        Resource::Own(..) | Resource::Slot(_) => "weights are loaded before they are used",
        Resource::Grad(_) => "a gradient is landed after backward has finished it",
        Resource::Slab(..) => "a gradient is used only after it has landed",
        Resource::Stage(_) => "activations are in the staging buffer before they are used",
        Resource::Visit(_) => "state is brought before it is updated, and updated before it returns",
        Resource::Area(..) => "activations are on the host before they are fetched",
        Resource::Sums(..) => "the norm is taken after all gradients have landed",
        Resource::Store(_) => "an update follows the sum over passes",
        Resource::Loss => "nothing is updated before the loss is known to be finite",
        Resource::Verdict => "an update follows the verdict",
        Resource::Count(_) => COUNTED,
        Resource::Files => APPENDED,
    }
}

fn write_rule(resource: Resource) -> &'static str {
    match resource {
        Resource::Image(..) => "weights are not changed while they are sent, nor before they have been written",
        Resource::Own(..) | Resource::Slot(_) => "weights on the device are not overwritten before their last use",
        Resource::Grad(_) => "a gradient buffer is not used again before it has landed",
        Resource::Slab(..) => "a slab is not used again before its gradient has been consumed",
        Resource::Stage(_) => "a staging buffer is not used again before it has been emptied",
        Resource::Visit(_) => "a visiting buffer is not used again before its state has returned",
        Resource::Area(..) => "activations on the host are not overwritten before they have been fetched",
        Resource::Sums(..) => "norm sums are not overwritten before the verdict",
        Resource::Store(_) => "the store is not overwritten before the update",
        Resource::Count(_) => COUNTED,
        Resource::Loss => "a loss is not replaced before all who wait for it have seen it",
        Resource::Verdict => "a verdict holds until all updates have seen it",
        Resource::Files => APPENDED,
    }
}

/// For all parts of a unit this is one update; the last of them counts it.
const COUNTED: &str = "the parts of a unit are updated in order";
const APPENDED: &str = "units are appended to the files in order, one after the other";

/// Every part of a unit that trains lands once and is updated once, where its state lives or visits, and what visits is
/// brought and returned once; so are, before that, the embedding's rows that the step does not look up.
fn check_work(facts: &Facts, schedule: &Schedule) -> Result<()> {
    let train = schedule.shape.pass == Pass::Train;
    for unit in 0..=facts.head() {
        let trains = train && facts.unit(unit).trains;
        let early = trains && unit == 0 && facts.early;
        let (parts, updates) = (facts.unit(unit).parts, facts.unit(unit).updates());
        let visits = trains && facts.unit(unit).visits > 0;
        for (kind, early, expected, parts) in [
            (Kind::Land, false, trains, parts),
            (Kind::Land, true, early && facts.tied, parts),
            (Kind::Gather, false, trains && facts.accumulate, parts),
            (Kind::Bring, false, visits, updates),
            (Kind::Update, false, trains, updates),
            (Kind::Update, true, early, parts),
            (Kind::Return, false, visits, updates),
        ] {
            let of_kind = |o: &&Op| (o.kind, o.unit, o.early) == (kind, unit, early);
            for part in 0..parts {
                let found = schedule.ops.iter().filter(of_kind).filter(|o| o.part == part).count();
                if found != usize::from(expected) {
                    let what = format!("{kind:?} of unit {unit}, part {part},");
                    return Err(Error::OpCount { what, found: found as u64, expected: expected.into() });
                }
            }
        }
        let written = schedule.ops.iter().filter(|o| o.kind == Kind::Write && o.unit == unit).count();
        if written != usize::from(schedule.shape.writes) {
            let what = format!("writing of unit {unit} (written {written} times)");
            return Err(Error::OpCount { what, found: written as u64, expected: schedule.shape.writes.into() });
        }
        let parts_of =
            |o: &Op| if matches!(o.kind, Kind::Bring | Kind::Update | Kind::Return) { updates } else { parts };
        if let Some(op) = schedule.ops.iter().find(|o| o.unit == unit && o.part >= parts_of(o)) {
            return Err(broken(op, "a unit has the parts that the plan gave it"));
        }
        let lane = if facts.unit(unit).updated_on_device() { Lane::Update } else { Lane::Host };
        if let Some(op) = schedule.ops.iter().find(|o| o.kind == Kind::Update && o.unit == unit && o.lane != lane) {
            return Err(broken(op, "a unit is updated where its state lives or visits"));
        }
        if !facts.unit(unit).on_device
            && let Some(op) = schedule.ops.iter().find(|o| o.kind == Kind::Land && o.unit == unit && o.slab.is_none())
        {
            return Err(broken(op, "a gradient whose unit's state lives on the host lands in a slab"));
        }
    }
    if let Some(op) = schedule.ops.iter().find(|o| (o.kind == Kind::Write) != (o.lane == Lane::Disk)) {
        return Err(broken(op, "files are written on the lane of files, and nothing else is done there"));
    }
    let verdicts = schedule.ops.iter().filter(|o| o.kind == Kind::Verdict).count();
    if verdicts != usize::from(train) {
        let what = "the verdict".to_owned();
        return Err(Error::OpCount { what, found: verdicts as u64, expected: train.into() });
    }
    Ok(())
}
