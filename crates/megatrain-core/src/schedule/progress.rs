//! How far passes have come: which operations are ready on which lane, and what follows when one is issued or over.
//!
//! Pure bookkeeping, without threads or devices: the engine's lanes drive it in real time, the estimate on a virtual
//! clock. At most two passes are alive, since every pass uses every unit and so waits for all updates of the one
//! before it.
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use crate::schedule::{Dep, Edge, Lane, NEXT_PASS, Op, Schedule};

/// An operation of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Id {
    /// Counts passes.
    pub(crate) pass: u64,
    /// Position in the pass's schedule.
    pub(crate) op: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    Waiting,
    Ready,
    Taken,
    Issued,
    Complete,
}

/// `T` is what the driver remembers of an issued operation: an event, or the time at which it will be over.
struct PassProgress<T> {
    number: u64,
    schedule: Arc<Schedule>,
    /// Who waits, and the same into the next pass.
    followers: Followers,
    next_followers: Followers,
    unmet: Vec<u32>,
    status: Vec<Status>,
    tokens: Vec<Option<T>>,
    open: usize,
    under_way: usize,
    halted: bool,
}

/// The operations that wait for each operation of a pass, and by which edge.
#[derive(Default)]
struct Followers {
    /// Where those of an operation begin, and where the last one's end.
    begin: Vec<usize>,
    list: Vec<(u32, Edge)>,
}

impl Followers {
    /// Which of `later`, operations of the same pass or of the next one, wait for each of `len`; `waited_for` says by which
    /// dependencies.
    fn new(len: usize, later: &[Op], waited_for: impl Fn(&Dep) -> bool) -> Self {
        let mut begin = vec![0; len + 1];
        let waiting =
            || later.iter().flat_map(|op| op.deps.iter().filter(|dep| waited_for(dep)).map(|dep| (op.id, *dep)));
        for (_, dep) in waiting() {
            begin[dep.op as usize + 1] += 1;
        }
        for op in 0..len {
            begin[op + 1] += begin[op];
        }
        let mut next = begin.clone();
        let mut list = vec![(0, Edge::Issued); begin[len]];
        for (op, dep) in waiting() {
            let place = &mut next[dep.op as usize];
            list[*place] = (op, dep.edge);
            *place += 1;
        }
        Self { begin, list }
    }

    fn of(&self, op: u32) -> std::ops::Range<usize> {
        let op = op as usize;
        if op + 1 < self.begin.len() { self.begin[op]..self.begin[op + 1] } else { 0..0 }
    }
}

/// The state of up to two passes.
pub(crate) struct Progress<T> {
    passes: VecDeque<PassProgress<T>>,
    ready: [BTreeSet<Rank>; Lane::COUNT],
    next_number: u64,
    /// Uploads that have been taken and are not over.
    uploads: usize,
    /// Operations that are over, of all passes so far.
    completed: u64,
}

/// Where one lane stands, for a report.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct LaneProgress {
    /// Operations that have been taken and are not over.
    pub(crate) running: Vec<Op>,
    /// The one that follows them in the lane's order.
    pub(crate) next: Option<Op>,
    /// What `next` depends on and is not over, or not issued where that is enough.
    pub(crate) waits_for: Vec<Op>,
}

/// Where a ready operation stands: the pass for which it is wanted and its priority number there, then its own pass
/// and position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    wanted: (u64, u32),
    pass: u64,
    op: u32,
}

impl Rank {
    fn of(pass: u64, op: &Op) -> Self {
        let wanted = op.priority.checked_sub(NEXT_PASS).map_or((pass, op.priority), |number| (pass + 1, number));
        Self { wanted, pass, op: op.id }
    }
}

/// Uploads under way at most: one runs, and the other waits so that the link never does.
const UPLOADS: usize = 2;

impl<T> Default for Progress<T> {
    fn default() -> Self {
        Self { passes: VecDeque::new(), ready: Default::default(), next_number: 0, uploads: 0, completed: 0 }
    }
}

/// What an operation's stream must wait for.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Awaited<T> {
    pub(crate) lane: Lane,
    pub(crate) token: T,
    pub(crate) complete: bool,
}

impl<T: Clone> Progress<T> {
    /// Starts a pass. `schedule` must have been made to follow the newest pass when that is still alive.
    ///
    /// # Panics
    /// When two passes are alive.
    pub(crate) fn begin(&mut self, schedule: Arc<Schedule>) -> u64 {
        assert!(self.passes.len() < 2, "a third pass begins only when the first is over");
        let number = self.next_number;
        self.next_number += 1;
        let len = schedule.ops.len();
        let mut unmet = vec![0; len];
        let followers = Followers::new(len, &schedule.ops, |dep| !dep.prior);
        if let Some(previous) = self.passes.back_mut() {
            let waited_for = |dep: &Dep| dep.prior && !previous.meets(dep.op, dep.edge);
            let next = Followers::new(previous.status.len(), &schedule.ops, waited_for);
            previous.next_followers = next;
            previous.next_followers.list.iter().for_each(|&(op, _)| unmet[op as usize] += 1);
        }
        followers.list.iter().for_each(|&(op, _)| unmet[op as usize] += 1);
        let mut pass = PassProgress {
            number,
            followers,
            next_followers: Followers::default(),
            unmet,
            status: vec![Status::Waiting; len],
            tokens: (0..len).map(|_| None).collect(),
            open: len,
            under_way: 0,
            halted: false,
            schedule,
        };
        for op in &pass.schedule.ops {
            if pass.unmet[op.id as usize] == 0 {
                pass.status[op.id as usize] = Status::Ready;
                self.ready[op.lane as usize].insert(Rank::of(number, op));
            }
        }
        self.passes.push_back(pass);
        number
    }

    /// Takes the ready operation of lowest priority number of the oldest pass for which there is one; what a pass leaves
    /// for the next one is taken in turn with that one's own, so that state that is updated on the device is copied
    /// during a forward without holding up the weights that it needs first.
    ///
    /// A stream runs its operations in the order in which they were queued: those taken early stand before one that is
    /// ready later and more urgent. So of uploads only two are under way at a time, or else the weights that the next
    /// forward needs first, whose updates end last, would be sent after all others.
    pub(crate) fn take(&mut self, lane: Lane) -> Option<Id> {
        if lane == Lane::Upload && self.uploads == UPLOADS {
            return None;
        }
        let Rank { pass, op, .. } = self.ready[lane as usize].pop_first()?;
        let pass = self.pass_mut(pass);
        pass.status[op as usize] = Status::Taken;
        pass.under_way += 1;
        let id = Id { pass: pass.number, op };
        self.uploads += usize::from(lane == Lane::Upload);
        Some(id)
    }

    /// Whether the lane has a ready operation.
    pub(crate) fn is_ready(&self, lane: Lane) -> bool {
        !self.ready[lane as usize].is_empty()
    }

    /// Whether this operation is ready.
    pub(crate) fn op_is_ready(&self, id: Id) -> bool {
        self.find(id.pass).is_some_and(|p| p.status[id.op as usize] == Status::Ready)
    }

    /// Takes one ready operation.
    pub(crate) fn take_op(&mut self, id: Id) {
        let op = self.op(id);
        let taken = self.ready[op.lane as usize].remove(&Rank::of(id.pass, &op));
        assert!(taken, "{id:?} is taken while it is ready");
        let pass = self.pass_mut(id.pass);
        pass.status[id.op as usize] = Status::Taken;
        pass.under_way += 1;
    }

    /// Gives a taken operation up as if it had never been taken; its pass must be halted.
    pub(crate) fn forget(&mut self, id: Id) {
        let pass = self.pass_mut(id.pass);
        pass.status[id.op as usize] = Status::Waiting;
        pass.under_way -= 1;
    }

    /// Nothing of this pass begins any more, but what it writes to disk: that is of passes before, which stand.
    pub(crate) fn halt(&mut self, number: u64) {
        self.pass_mut(number).halted = true;
        for (lane, ready) in self.ready.iter_mut().enumerate() {
            ready.retain(|rank| rank.pass != number || lane == Lane::Disk as usize);
        }
    }

    /// Drops the newest pass, of which nothing must be under way.
    pub(crate) fn drop_newest(&mut self) {
        if let Some(pass) = self.passes.pop_back() {
            for lane in &mut self.ready {
                lane.retain(|rank| rank.pass != pass.number);
            }
            if let Some(previous) = self.passes.back_mut() {
                previous.next_followers = Followers::default();
            }
        }
    }

    /// What the operation's stream must wait for: every dependency by event that leads to it.
    pub(crate) fn awaited(&self, id: Id) -> Vec<Awaited<T>> {
        let awaited = |(token, pass, op): (&T, &PassProgress<T>, usize)| Awaited {
            lane: pass.schedule.ops[op].lane,
            token: token.clone(),
            complete: pass.status[op] == Status::Complete,
        };
        self.awaited_in(id).map(awaited).collect()
    }

    /// As [`Progress::awaited`]: the tokens alone.
    pub(crate) fn awaited_tokens(&self, id: Id) -> impl Iterator<Item = &T> {
        self.awaited_in(id).map(|(token, ..)| token)
    }

    fn awaited_in(&self, id: Id) -> impl Iterator<Item = (&T, &PassProgress<T>, usize)> {
        let index = self.index(id.pass);
        self.passes[index].schedule.ops[id.op as usize].deps.iter().filter_map(move |dep| {
            let pass = self.passes.get(if dep.prior { index.checked_sub(1)? } else { index })?;
            Some((pass.tokens[dep.op as usize].as_ref()?, pass, dep.op as usize))
        })
    }

    /// The operation has been queued; `token` says when it is over.
    pub(crate) fn issued(&mut self, id: Id, token: T) {
        let pass = self.pass_mut(id.pass);
        pass.status[id.op as usize] = Status::Issued;
        pass.tokens[id.op as usize] = Some(token);
        self.release(id, Edge::Issued);
    }

    /// The operation is over (whether it was reported as issued before or not).
    pub(crate) fn complete(&mut self, id: Id) {
        let pass = self.pass_mut(id.pass);
        let before = std::mem::replace(&mut pass.status[id.op as usize], Status::Complete);
        if before == Status::Complete {
            return;
        }
        pass.open -= 1;
        pass.under_way -= 1;
        let upload = pass.schedule.ops[id.op as usize].lane == Lane::Upload;
        self.uploads -= usize::from(upload);
        self.completed += 1;
        if before != Status::Issued {
            self.release(id, Edge::Issued);
        }
        self.release(id, Edge::Complete);
    }

    fn release(&mut self, id: Id, edge: Edge) {
        let index = self.index(id.pass);
        for next in 0..2 {
            let pass = &self.passes[index];
            let followers = if next == 0 { &pass.followers } else { &pass.next_followers };
            for place in followers.of(id.op) {
                let pass = &self.passes[index];
                let (op, of) = if next == 0 { &pass.followers } else { &pass.next_followers }.list[place];
                if of != edge {
                    continue;
                }
                let target = &mut self.passes[index + next];
                target.unmet[op as usize] -= 1;
                let written = target.schedule.ops[op as usize].lane == Lane::Disk;
                if target.unmet[op as usize] == 0 && (!target.halted || written) {
                    target.status[op as usize] = Status::Ready;
                    let op = &target.schedule.ops[op as usize];
                    self.ready[op.lane as usize].insert(Rank::of(target.number, op));
                }
            }
        }
    }

    /// Forgets passes that are over, oldest first; they are over for good only when nothing of them is open.
    pub(crate) fn retire(&mut self) {
        while self.passes.front().is_some_and(|p| p.open == 0) && self.passes.len() > 1 {
            self.passes.pop_front();
        }
    }

    /// Operations that have been taken and are not over.
    pub(crate) fn under_way(&self) -> usize {
        self.passes.iter().map(|p| p.under_way).sum()
    }

    /// Operations of one pass that have been taken and are not over.
    pub(crate) fn under_way_of(&self, pass: u64) -> usize {
        self.find(pass).map_or(0, |p| p.under_way)
    }

    /// Operations that are over, of all passes so far.
    pub(crate) fn completed(&self) -> u64 {
        self.completed
    }

    /// Where a lane stands.
    pub(crate) fn lane(&self, lane: Lane) -> LaneProgress {
        let mut found = LaneProgress::default();
        let mut next: Option<(Rank, usize)> = None;
        for (index, pass) in self.passes.iter().enumerate() {
            for op in pass.schedule.ops.iter().filter(|op| op.lane == lane) {
                match pass.status[op.id as usize] {
                    Status::Taken | Status::Issued => found.running.push(op.clone()),
                    Status::Waiting | Status::Ready => {
                        let rank = Rank::of(pass.number, op);
                        if next.is_none_or(|(least, _)| rank < least) {
                            next = Some((rank, index));
                        }
                    }
                    Status::Complete => {}
                }
            }
        }
        let Some((rank, index)) = next else { return found };
        let op = &self.passes[index].schedule.ops[rank.op as usize];
        for dep in &op.deps {
            let from = if dep.prior { index.checked_sub(1) } else { Some(index) };
            let Some(pass) = from.and_then(|index| self.passes.get(index)) else { continue };
            if !pass.meets(dep.op, dep.edge) {
                found.waits_for.push(pass.schedule.ops[dep.op as usize].clone());
            }
        }
        found.next = Some(op.clone());
        found
    }

    /// Passes that are alive.
    pub(crate) fn alive(&self) -> usize {
        self.passes.len()
    }

    /// Whether this pass is.
    pub(crate) fn is_alive(&self, pass: u64) -> bool {
        self.find(pass).is_some()
    }

    /// The newest pass's schedule.
    pub(crate) fn newest(&self) -> Option<(u64, Arc<Schedule>)> {
        self.passes.back().map(|p| (p.number, Arc::clone(&p.schedule)))
    }

    /// The operation itself.
    pub(crate) fn op(&self, id: Id) -> Op {
        self.passes[self.index(id.pass)].schedule.ops[id.op as usize].clone()
    }

    /// The pass's schedule.
    pub(crate) fn schedule(&self, pass: u64) -> Arc<Schedule> {
        Arc::clone(&self.passes[self.index(pass)].schedule)
    }

    fn find(&self, pass: u64) -> Option<&PassProgress<T>> {
        self.passes.iter().find(|p| p.number == pass)
    }

    fn index(&self, pass: u64) -> usize {
        self.passes.iter().position(|p| p.number == pass).expect("the pass of an operation under way is alive")
    }

    fn pass_mut(&mut self, pass: u64) -> &mut PassProgress<T> {
        let index = self.index(pass);
        &mut self.passes[index]
    }
}

impl<T> PassProgress<T> {
    fn meets(&self, op: u32, edge: Edge) -> bool {
        match self.status[op as usize] {
            Status::Complete => true,
            // An issued operation still orders streams by its event.
            Status::Issued => edge == Edge::Issued,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{Kind, Pass, Shape};

    /// Lane, priority number, and what it depends on: an operation, an edge, and whether of the pass before.
    type Outline<'a> = (Lane, u32, &'a [(u32, Edge, bool)]);

    fn schedule(ops: &[Outline<'_>]) -> Arc<Schedule> {
        let op = |(id, &(lane, priority, deps)): (usize, &Outline<'_>)| {
            let mut op = Op::new(u32::try_from(id).unwrap(), Kind::Load, 0, lane);
            op.priority = priority;
            op.deps = deps.iter().map(|&(op, edge, prior)| Dep { op, edge, prior }).collect();
            op
        };
        let shape = Shape::new(Pass::Eval, 1);
        Arc::new(Schedule { shape, resident: Vec::new(), ops: ops.iter().enumerate().map(op).collect() })
    }

    fn id(pass: u64, op: u32) -> Id {
        Id { pass, op }
    }

    #[test]
    fn ready_operations_are_taken_lowest_number_first_and_old_passes_before_new_ones() {
        let mut progress = Progress::<u8>::default();
        progress.begin(schedule(&[(Lane::Host, 5, &[]), (Lane::Host, 2, &[]), (Lane::Upload, 0, &[])]));
        progress.begin(schedule(&[(Lane::Host, 0, &[])]));
        let order: Vec<Id> = std::iter::from_fn(|| progress.take(Lane::Host)).collect();
        assert_eq!(order, [id(0, 1), id(0, 0), id(1, 0)]);
    }

    #[test]
    fn what_a_pass_leaves_for_the_next_is_taken_in_turn_with_that_ones_own() {
        let mut progress = Progress::<u8>::default();
        let late = |number: u32| (Lane::Host, NEXT_PASS + number, &[][..]);
        progress.begin(schedule(&[late(4), late(2), (Lane::Host, 9, &[])]));
        progress.begin(schedule(&[(Lane::Host, 3, &[]), (Lane::Host, 4, &[]), late(0)]));
        let order: Vec<Id> = std::iter::from_fn(|| progress.take(Lane::Host)).collect();
        assert_eq!(order, [id(0, 2), id(0, 1), id(1, 0), id(0, 0), id(1, 1), id(1, 2)]);
    }

    #[test]
    fn an_issued_edge_opens_on_issue_and_a_complete_one_when_it_is_over() {
        let mut progress = Progress::<u8>::default();
        let edges: &[(u32, Edge, bool)] = &[(0, Edge::Issued, false)];
        let waits: &[(u32, Edge, bool)] = &[(0, Edge::Complete, false)];
        progress.begin(schedule(&[(Lane::Upload, 0, &[]), (Lane::Compute, 0, edges), (Lane::Host, 0, waits)]));
        let first = progress.take(Lane::Upload).unwrap();
        assert!(progress.take(Lane::Compute).is_none());
        progress.issued(first, 7);
        assert_eq!(progress.take(Lane::Compute), Some(id(0, 1)));
        let awaited = Awaited { lane: Lane::Upload, token: 7, complete: false };
        assert_eq!(progress.awaited(id(0, 1)), [awaited]);
        assert!(progress.take(Lane::Host).is_none());
        progress.complete(first);
        assert_eq!(progress.take(Lane::Host), Some(id(0, 2)));
        assert_eq!(progress.under_way(), 2);
    }

    #[test]
    fn a_lane_names_what_it_does_and_what_its_next_operation_waits_for() {
        let mut progress = Progress::<u8>::default();
        let waits: &[(u32, Edge, bool)] = &[(0, Edge::Complete, false)];
        progress.begin(schedule(&[(Lane::Upload, 0, &[]), (Lane::Host, 0, waits)]));
        let ids = |ops: &[Op]| ops.iter().map(|op| op.id).collect::<Vec<_>>();
        let idle = progress.lane(Lane::Upload);
        assert_eq!((ids(&idle.running), idle.next.map(|op| op.id)), (vec![], Some(0)));
        let upload = progress.take(Lane::Upload).unwrap();
        assert_eq!(ids(&progress.lane(Lane::Upload).running), [0]);
        let host = progress.lane(Lane::Host);
        assert_eq!((host.next.map(|op| op.id), ids(&host.waits_for), progress.completed()), (Some(1), vec![0], 0));
        progress.complete(upload);
        assert_eq!((ids(&progress.lane(Lane::Host).waits_for), progress.completed()), (vec![], 1));
    }

    #[test]
    fn the_next_pass_waits_for_what_is_left_of_the_one_before() {
        let mut progress = Progress::<u8>::default();
        let prior: &[(u32, Edge, bool)] = &[(0, Edge::Complete, true)];
        progress.begin(schedule(&[(Lane::Host, 0, &[])]));
        progress.begin(schedule(&[(Lane::Upload, 0, prior)]));
        assert!(!progress.is_ready(Lane::Upload));
        let update = progress.take(Lane::Host).unwrap();
        progress.complete(update);
        assert!(progress.is_ready(Lane::Upload));
        progress.retire();
        assert_eq!(progress.alive(), 1);
        // What was over before the pass began is not waited for.
        let load = progress.take(Lane::Upload).unwrap();
        progress.complete(load);
        progress.begin(schedule(&[(Lane::Upload, 0, prior)]));
        assert!(progress.is_ready(Lane::Upload));
    }

    #[test]
    fn a_halted_pass_begins_nothing_more_and_can_be_dropped() {
        let mut progress = Progress::<u8>::default();
        let waits: &[(u32, Edge, bool)] = &[(0, Edge::Complete, false)];
        let number = progress.begin(schedule(&[(Lane::Host, 0, &[]), (Lane::Host, 1, waits), (Lane::Upload, 0, &[])]));
        let running = progress.take(Lane::Host).unwrap();
        progress.halt(number);
        assert!(progress.take(Lane::Upload).is_none());
        assert_eq!(progress.under_way_of(number), 1);
        progress.complete(running);
        assert!(progress.take(Lane::Host).is_none());
        progress.drop_newest();
        assert!(!progress.is_alive(number) && progress.under_way() == 0);
    }

    #[test]
    fn an_upload_that_is_ready_late_and_urgent_waits_for_two_others_at_most() {
        let free: Outline<'_> = (Lane::Upload, 5, &[]);
        let late: Outline<'_> = (Lane::Upload, 0, &[(0, Edge::Complete, false)]);
        let mut progress = Progress::<()>::default();
        let number = progress.begin(schedule(&[(Lane::Host, 0, &[]), free, free, free, late]));
        let update = progress.take(Lane::Host).unwrap();
        let first = progress.take(Lane::Upload).unwrap();
        progress.issued(first, ());
        progress.take(Lane::Upload).unwrap();
        assert_eq!(progress.take(Lane::Upload), None);
        assert!(progress.is_ready(Lane::Upload));
        progress.complete(update);
        progress.complete(first);
        assert_eq!(progress.take(Lane::Upload), Some(id(number, 4)));
        assert_eq!(progress.take(Lane::Upload), None);
    }
}
