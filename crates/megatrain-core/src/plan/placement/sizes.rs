//! Sizes on the device and on the host, aligned.
use crate::plan::{Activation, Groups, Place, UnitPlan, UnitRequest};

/// Alignment of everything on the device and of host spans.
const ALIGN: u64 = 512;

pub(super) const PAGE: u64 = 4096;

/// Sizes saturate while they are added up; a plan that comes near the end of the numbers is refused as a whole.
pub(super) fn aligned(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(ALIGN).unwrap_or(u64::MAX)
}

/// What a unit leaves on the host between forward and backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Staged {
    groups: Groups,
    /// Bytes of a micro-batch in the first group, and of one in another.
    first: u64,
    others: u64,
}

impl Staged {
    /// Nothing.
    pub(crate) fn none() -> Self {
        Self { groups: Groups::new(1, 1), first: 0, others: 0 }
    }

    /// What a plan for micro-batches in such groups makes of a unit.
    pub(crate) fn new(unit: &UnitRequest, choice: &UnitPlan, groups: Groups) -> Self {
        let bytes = |first: bool| {
            let offloads = choice.activation_in(first) == Activation::Offload;
            let kept = if offloads { offloaded_bytes(unit.kept_bytes) } else { 0 };
            let input = if choice.input_in(first) == Place::Host { aligned(unit.input_bytes) } else { 0 };
            aligned(kept.saturating_add(input))
        };
        Self { groups, first: bytes(true), others: bytes(false) }
    }

    /// Bytes of a micro-batch, of which the first one is 0.
    #[must_use]
    pub const fn bytes(&self, micro_batch: u32) -> u64 {
        if self.groups.has_in_first(micro_batch) { self.first } else { self.others }
    }

    /// Those of a micro-batch that leaves most.
    #[must_use]
    pub fn largest(&self) -> u64 {
        self.first.max(self.others)
    }

    /// Bytes on the host of all micro-batches of a group, where each begins a page and has room for the largest.
    pub(crate) fn on_host(&self) -> u64 {
        let most = if self.first > 0 { self.groups.first() } else { self.groups.others() };
        whole_pages(self.largest()).saturating_mul(most.into())
    }

    /// Where in those a micro-batch begins.
    pub(crate) fn offset(&self, micro_batch: u32) -> u64 {
        u64::from(micro_batch - self.groups.start(micro_batch)) * whole_pages(self.largest())
    }
}

/// Room for saved tensors packed one after the other, each on its own line.
fn offloaded_bytes(kept: u64) -> u64 {
    kept.saturating_add(128 * ALIGN)
}

fn whole_pages(staged: u64) -> u64 {
    staged.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX)
}
