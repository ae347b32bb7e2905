//! The order of operations: which is over before which begins.
use std::collections::HashSet;

use super::broken;
use super::contents::{Content, Contents, STALE, must_be_written, places, read_rule, write_rule};
use crate::error::{Error, Result};
use crate::schedule::hazards::{Access, Resource, accesses, edge};
use crate::schedule::{Edge, Lane, Op, Schedule, ScheduleInputs};

/// Both passes in one row: those of the previous pass first.
pub(super) struct Graph<'a> {
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
    pub(super) fn new(schedule: &'a Schedule, previous: Option<&'a Schedule>) -> Result<Self> {
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

    pub(super) fn check_edges(&self) -> Result<()> {
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
    pub(super) fn check_compute_chain(&mut self) -> Result<()> {
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

    pub(super) fn check_hazards(
        &self,
        inputs: &ScheduleInputs,
        schedule: &Schedule,
        previous: Option<&Schedule>,
    ) -> Result<()> {
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
