//! How the micro-batches of a step are divided.
use std::ops::Range;

/// How many micro-batches pass through a unit before the next unit is loaded: in the first group, whose forward hides the
/// updates of the step before, and in each of the others. A step that ends earlier ends with a smaller group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups {
    first: u32,
    others: u32,
}

impl Groups {
    /// A first group of `first`, or `others` where that is more, and others of `others`, at least 1.
    #[must_use]
    pub fn new(first: u32, others: u32) -> Self {
        let others = others.max(1);
        Self { first: first.max(others), others }
    }

    /// The groups of a step of so many micro-batches, in order.
    pub fn ranges(self, micro_batches: u32) -> impl Iterator<Item = Range<u32>> {
        let mut next = 0_u32;
        std::iter::from_fn(move || {
            let size = if next == 0 { self.first } else { self.others };
            let range = next..next.saturating_add(size).min(micro_batches);
            next = range.end;
            (!range.is_empty()).then_some(range)
        })
    }

    /// How many groups such a step has.
    #[must_use]
    pub const fn count(self, micro_batches: u32) -> u32 {
        let after = micro_batches.saturating_sub(self.first);
        if micro_batches == 0 { 0 } else { 1 + after.div_ceil(self.others) }
    }

    /// The first micro-batch of the group that a micro-batch is in.
    #[must_use]
    pub const fn start(self, micro_batch: u32) -> u32 {
        if self.has_in_first(micro_batch) { 0 } else { micro_batch - (micro_batch - self.first) % self.others }
    }

    /// Whether a micro-batch is in the first group.
    #[must_use]
    pub const fn has_in_first(self, micro_batch: u32) -> bool {
        micro_batch < self.first
    }

    /// Micro-batches in the first group, where there are as many.
    #[must_use]
    pub const fn first(self) -> u32 {
        self.first
    }

    /// Micro-batches in another one.
    #[must_use]
    pub const fn others(self) -> u32 {
        self.others
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_cover_every_micro_batch_once_and_agree_with_where_each_one_begins() {
        for first in 0..6 {
            for others in 1..5 {
                let groups = Groups::new(first, others);
                for micro_batches in 0..12 {
                    let ranges: Vec<Range<u32>> = groups.ranges(micro_batches).collect();
                    assert_eq!(ranges.len() as u32, groups.count(micro_batches));
                    assert!(ranges.iter().cloned().flatten().eq(0..micro_batches));
                    for (index, range) in ranges.iter().enumerate() {
                        let most = if index == 0 { first.max(others) } else { others };
                        assert!(
                            range.len() as u32 <= most && (range.len() as u32 == most || range.end == micro_batches)
                        );
                        assert!(range.clone().all(|micro| groups.start(micro) == range.start));
                        assert!(range.clone().all(|micro| groups.has_in_first(micro) == (index == 0)));
                    }
                }
            }
        }
    }
}
