//! Schedules that have been made and checked, kept for passes of the same kind: bounded, and apart from the state that the
//! lanes share, so that making one holds nobody up.
use std::collections::HashMap;
use std::sync::Arc;

use crate::error::Result;
use crate::schedule::{Dep, Lane, Op, Resident, Schedule, ScheduleInputs, Shape, check};

/// Bytes of schedules that are kept, besides those in use. A pass of 80 layers and 32 micro-batches takes about 2 MiB.
pub(super) const KEPT_BYTES: u64 = 64 << 20;

/// What a schedule depends on beside the plan: its shape, what is on the device, and the same of the pass before it.
pub(super) type Key = (Shape, Vec<Resident>, Option<(Shape, Vec<Resident>)>);

/// A schedule, and what follows from it.
pub(super) struct Prepared {
    pub(super) schedule: Arc<Schedule>,
    /// What it leaves on the device.
    pub(super) leaves: Vec<Resident>,
    /// Its compute operations in order.
    pub(super) computes: Arc<Vec<u32>>,
}

impl Prepared {
    /// Makes and checks a schedule.
    pub(super) fn new(inputs: &ScheduleInputs, key: &Key, previous: Option<&Schedule>) -> Result<Self> {
        let schedule = Schedule::new(inputs, key.0, previous, &key.1)?;
        check(inputs, &schedule, previous)?;
        let computes = schedule.ops.iter().filter(|op| op.lane == Lane::Compute).map(|op| op.id).collect();
        let leaves = schedule.leaves(inputs);
        Ok(Self { schedule: Arc::new(schedule), leaves, computes: Arc::new(computes) })
    }

    fn bytes(&self) -> u64 {
        let deps: usize = self.schedule.ops.iter().map(|op| op.deps.capacity()).sum();
        let ops = self.schedule.ops.capacity() * size_of::<Op>() + deps * size_of::<Dep>();
        (ops + self.computes.len() * size_of::<u32>()) as u64
    }
}

/// How much the cache of schedules holds: see [`super::Engine::cached_schedules`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CachedSchedules {
    /// Schedules.
    pub count: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes that are never exceeded, but by a single schedule that is larger by itself.
    pub limit: u64,
}

struct Entry {
    prepared: Arc<Prepared>,
    bytes: u64,
    /// When it was used last.
    used: u64,
}

/// The schedules used last, as many as there is room for.
pub(super) struct ScheduleCache {
    entries: HashMap<Key, Entry>,
    bytes: u64,
    limit: u64,
    uses: u64,
}

impl ScheduleCache {
    pub(super) fn new(limit: u64) -> Self {
        Self { entries: HashMap::new(), bytes: 0, limit, uses: 0 }
    }

    pub(super) fn get(&mut self, key: &Key) -> Option<Arc<Prepared>> {
        self.uses += 1;
        let entry = self.entries.get_mut(key)?;
        entry.used = self.uses;
        Some(Arc::clone(&entry.prepared))
    }

    /// Keeps a schedule; those unused for longest make room.
    pub(super) fn put(&mut self, key: Key, prepared: Arc<Prepared>) {
        self.uses += 1;
        let bytes = prepared.bytes();
        if let Some(replaced) = self.entries.insert(key, Entry { prepared, bytes, used: self.uses }) {
            self.bytes -= replaced.bytes;
        }
        self.bytes += bytes;
        while self.bytes > self.limit && self.entries.len() > 1 {
            let oldest = self.entries.iter().min_by_key(|(_, entry)| entry.used).map(|(key, _)| key.clone());
            let Some(gone) = oldest.and_then(|key| self.entries.remove(&key)) else { break };
            self.bytes -= gone.bytes;
        }
    }

    pub(super) fn held(&self) -> CachedSchedules {
        CachedSchedules { count: self.entries.len(), bytes: self.bytes, limit: self.limit }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::Pass;

    fn prepared(ops: u32) -> Arc<Prepared> {
        let shape = Shape::new(Pass::Eval, 1);
        let op = |id| Op::new(id, crate::schedule::Kind::Load, 0, Lane::Upload);
        let schedule = Schedule { shape, resident: Vec::new(), ops: (0..ops).map(op).collect() };
        Arc::new(Prepared { schedule: Arc::new(schedule), leaves: Vec::new(), computes: Arc::default() })
    }

    fn key(micro_batches: u32) -> Key {
        (Shape::new(Pass::Train, micro_batches), Vec::new(), None)
    }

    #[test]
    fn schedules_unused_for_longest_make_room_and_the_bytes_stay_below_the_limit() {
        let each = prepared(100).bytes();
        let mut cache = ScheduleCache::new(3 * each);
        for micro_batches in 1..=3 {
            cache.put(key(micro_batches), prepared(100));
        }
        assert!(cache.get(&key(1)).is_some());
        cache.put(key(4), prepared(100));
        assert!(cache.get(&key(2)).is_none(), "unused for longest");
        assert!([1, 3, 4].iter().all(|&m| cache.get(&key(m)).is_some()));
        for micro_batches in 0..1000 {
            cache.put(key(micro_batches), prepared(micro_batches % 100));
            let held = cache.held();
            assert!(held.bytes <= held.limit, "{held:?}");
        }
        // One that is larger by itself is kept alone.
        cache.put(key(1), prepared(1000));
        assert_eq!(cache.held().count, 1);
        cache.put(key(1), prepared(10));
        assert_eq!((cache.held().count, cache.held().bytes), (1, prepared(10).bytes()));
    }
}
