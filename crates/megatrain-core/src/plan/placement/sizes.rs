//! Sizes on the device and on the host, aligned.
use crate::plan::{Activation, Place, UnitPlan, UnitRequest};

/// Alignment of everything on the device and of host spans.
const ALIGN: u64 = 512;

pub(super) const PAGE: u64 = 4096;

/// Sizes saturate while they are added up; a plan that comes near the end of the numbers is refused as a whole.
pub(super) fn aligned(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(ALIGN).unwrap_or(u64::MAX)
}

/// Bytes that one micro-batch of a unit leaves on the host between forward and backward.
pub(crate) fn staged_bytes(unit: &UnitRequest, choice: &UnitPlan) -> u64 {
    let kept = if choice.activation == Activation::Offload { offloaded_bytes(unit.kept_bytes) } else { 0 };
    let input = if choice.input == Place::Host { aligned(unit.input_bytes) } else { 0 };
    aligned(kept.saturating_add(input))
}

/// Room for saved tensors packed one after the other, each on its own line.
fn offloaded_bytes(kept: u64) -> u64 {
    kept.saturating_add(128 * ALIGN)
}

/// Staging on the host takes whole pages.
pub(crate) fn staged_on_host(staged: u64) -> u64 {
    staged.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX)
}
