//! Sizes on the device and on the host, aligned.
use crate::plan::{Activation, Groups, Place, UnitPlan, UnitRequest};

/// Alignment of everything on the device and of host spans.
const ALIGN: u64 = 512;

pub(super) const PAGE: u64 = 4096;

/// Sizes saturate while they are added up; a plan that comes near the end of the numbers is refused as a whole.
pub(super) fn aligned(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(ALIGN).unwrap_or(u64::MAX)
}

/// What a unit leaves on the host, or on disk, between forward and backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Staged {
    groups: Groups,
    on_disk: bool,
    /// Bytes of a micro-batch in the large group, and of one in another.
    large: u64,
    others: u64,
}

impl Staged {
    /// Nothing.
    pub(crate) fn none() -> Self {
        Self { groups: Groups::equal(1), on_disk: false, large: 0, others: 0 }
    }

    /// What a plan for micro-batches in such groups makes of a unit.
    pub(crate) fn new(unit: &UnitRequest, choice: &UnitPlan, groups: Groups) -> Self {
        let bytes = |large: bool| {
            let offloads = choice.activation_in(large) == Activation::Offload;
            let kept = if offloads { offloaded_bytes(unit.kept_bytes) } else { 0 };
            let stays = choice.input_in(large) == Place::Device;
            let input = if stays { 0 } else { aligned(unit.input_bytes) };
            aligned(kept.saturating_add(input))
        };
        Self { groups, on_disk: choice.input == Place::Disk, large: bytes(true), others: bytes(false) }
    }

    /// Bytes of a micro-batch, of which the first one is 0.
    #[must_use]
    pub const fn bytes(&self, micro_batch: u32) -> u64 {
        if self.groups.has_in_large(micro_batch) { self.large } else { self.others }
    }

    /// Those of a micro-batch that leaves most.
    #[must_use]
    pub fn largest(&self) -> u64 {
        self.large.max(self.others)
    }

    /// Bytes of all micro-batches of a group, where each begins a page and has room for the largest.
    fn group_bytes(&self) -> u64 {
        whole_pages(self.largest()).saturating_mul(self.places().into())
    }

    /// Micro-batches for which there is a place.
    fn places(&self) -> u32 {
        if self.large > 0 { self.groups.large() } else { self.groups.others() }
    }

    /// Which of these places is a micro-batch's.
    pub(crate) fn place(&self, micro_batch: u32) -> u32 {
        micro_batch - self.groups.start(micro_batch)
    }

    /// Those bytes, where they are on the host.
    pub(crate) fn on_host(&self) -> u64 {
        if self.on_disk { 0 } else { self.group_bytes() }
    }

    /// The same where they are on disk.
    pub(crate) fn on_disk(&self) -> u64 {
        if self.on_disk { self.group_bytes() } else { 0 }
    }

    /// Bytes that are written to disk, and read from there, of a micro-batch.
    pub(crate) fn disk_bytes(&self, micro_batch: u32) -> u64 {
        if self.on_disk { whole_pages(self.bytes(micro_batch)) } else { 0 }
    }

    /// Micro-batches for which there is a place on disk.
    pub(crate) fn disk_places(&self) -> u32 {
        if self.largest_on_disk() > 0 { self.places() } else { 0 }
    }

    /// The most of these bytes.
    pub(crate) fn largest_on_disk(&self) -> u64 {
        if self.on_disk { whole_pages(self.largest()) } else { 0 }
    }

    /// Where in those a micro-batch begins.
    pub(crate) fn offset(&self, micro_batch: u32) -> u64 {
        u64::from(self.place(micro_batch)) * whole_pages(self.largest())
    }
}

/// Room for saved tensors packed one after the other, each on its own line.
fn offloaded_bytes(kept: u64) -> u64 {
    kept.saturating_add(128 * ALIGN)
}

pub(crate) fn whole_pages(staged: u64) -> u64 {
    staged.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX)
}
