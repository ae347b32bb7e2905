//! How the micro-batches of a step are divided.
use std::cmp::Ordering;
use std::ops::Range;

/// How many micro-batches pass through a unit before the next unit is loaded: in the large group, which hides the host's
/// updates, and in the others. The large group is the first one, whose forward hides the updates of the step before, or
/// with immediate updates the last one, whose backward hides those of its own step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups {
    /// The micro-batch that the large group begins with.
    begin: u32,
    large: u32,
    others: u32,
}

impl Groups {
    /// A large group of `large` micro-batches from `begin` on, or of `others` where that is more, and others of `others`,
    /// at least 1; the one before the large group has as many as are left.
    #[must_use]
    pub fn new(begin: u32, large: u32, others: u32) -> Self {
        let others = others.max(1);
        Self { begin, large: large.max(others), others }
    }

    /// Groups of one size.
    #[must_use]
    pub fn equal(size: u32) -> Self {
        Self::new(0, size, size)
    }

    /// The groups of a step of so many micro-batches, in order.
    pub fn ranges(self, micro_batches: u32) -> impl Iterator<Item = Range<u32>> {
        let mut next = 0_u32;
        std::iter::from_fn(move || {
            let (size, end) = match next.cmp(&self.begin) {
                Ordering::Less => (self.others, self.begin),
                Ordering::Equal => (self.large, micro_batches),
                Ordering::Greater => (self.others, micro_batches),
            };
            let range = next..next.saturating_add(size).min(end).min(micro_batches);
            next = range.end;
            (!range.is_empty()).then_some(range)
        })
    }

    /// How many groups such a step has.
    #[must_use]
    pub fn count(self, micro_batches: u32) -> u32 {
        let before = self.begin.min(micro_batches);
        let rest = micro_batches - before;
        let after = rest.saturating_sub(self.large);
        before.div_ceil(self.others) + u32::from(rest > 0) + after.div_ceil(self.others)
    }

    /// The first micro-batch of the group that a micro-batch is in.
    #[must_use]
    pub const fn start(self, micro_batch: u32) -> u32 {
        if self.has_in_large(micro_batch) {
            return self.begin;
        }
        let from = if micro_batch < self.begin { 0 } else { self.begin + self.large };
        micro_batch - (micro_batch - from) % self.others
    }

    /// Whether a micro-batch is in the large group.
    #[must_use]
    pub const fn has_in_large(self, micro_batch: u32) -> bool {
        micro_batch >= self.begin && micro_batch - self.begin < self.large
    }

    /// Micro-batches in the large group, where there are as many.
    #[must_use]
    pub const fn large(self) -> u32 {
        self.large
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
        for (begin, large, others) in (0..8).flat_map(|b| (0..6).flat_map(move |l| (1..5).map(move |o| (b, l, o)))) {
            let groups = Groups::new(begin, large, others);
            for micro_batches in 0..14 {
                let ranges: Vec<Range<u32>> = groups.ranges(micro_batches).collect();
                assert_eq!(ranges.len() as u32, groups.count(micro_batches));
                assert!(ranges.iter().cloned().flatten().eq(0..micro_batches));
                for range in &ranges {
                    let is_large = range.start == begin;
                    let most = if is_large { large.max(others) } else { others };
                    let is_cut = range.end == micro_batches || range.end == begin;
                    assert!(range.len() as u32 <= most && (range.len() as u32 == most || is_cut));
                    assert!(range.clone().all(|micro| groups.start(micro) == range.start));
                    assert!(range.clone().all(|micro| groups.has_in_large(micro) == is_large));
                }
            }
        }
    }
}
