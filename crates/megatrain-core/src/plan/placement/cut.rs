//! Cuts large units into the parts that are offloaded, updated and sent by themselves.
use std::ops::Range;

use super::Part;
use crate::layout::{UNIT_ALIGN, UnitLayout};
use crate::plan::request::MOST_BUFFERS;
use crate::plan::{Plan, Request, State};

/// Blocks of the gradient norm (65,536 elements each) that a part has at least: the host updates them in a millisecond.
const PART_BLOCKS: u64 = 64;
/// The most elements of a part that is updated on the device: copied in a few milliseconds, which is how long weights that are
/// needed sooner may have to wait for the link.
const DEVICE_UPDATE_ELEMENTS: u64 = 16 << 20;
/// The most parts. The first part's offload and the last one's sending are all that does not overlap.
const MOST_PARTS: u64 = 16;

/// Cuts a unit. Only the ends have a place of their own for weights and gradient while their state is on the host.
pub(super) fn parts(request: &Request, plan: &Plan, unit: usize, layout: &UnitLayout) -> Vec<Part> {
    let total = layout.num_norm_blocks();
    let end = unit == 0 || unit + 1 == request.units.len();
    let cut = end && total > 0 && plan.units[unit].state == State::Host && !request.requests.accumulate;
    let wanted = request.requests.parts.map_or_else(|| (total / PART_BLOCKS).min(MOST_PARTS), u64::from);
    let count = if cut { wanted.clamp(1, total) } else { 1 };
    let size = layout.precision.dtype().size();
    let first = |part: u64| total * part / count;
    let element = |part: u64| if part == 0 { 0 } else { layout.norm_block_start(first(part)) };
    let part = |i: u64| {
        let elements = element(i)..element(i + 1);
        let last = if i + 1 == count { layout.image_bytes } else { elements.end * size };
        Part { image: elements.start * size..last, elements, blocks: first(i)..first(i + 1) }
    };
    (0..count).map(part).collect()
}

/// Cuts a unit that is updated on the device with its state on the host. No operation of the optimizer looks beyond one element, so that
/// the cuts are free; they are where both tensors and pages may begin.
pub(super) fn device_update_parts(request: &Request, plan: &Plan, unit: usize, layout: &UnitLayout) -> Vec<Range<u64>> {
    if !plan.units[unit].needs_device_update() || layout.elements == 0 {
        return Vec::new();
    }
    let steps = layout.elements / UNIT_ALIGN;
    let wanted = request.requests.parts.map_or_else(|| layout.elements.div_ceil(DEVICE_UPDATE_ELEMENTS), u64::from);
    let count = wanted.clamp(1, steps.min(MOST_BUFFERS.into()));
    // The first `steps % count` parts are one step longer; a product with `steps` could overflow.
    let cut = |i: u64| (steps / count * i + i.min(steps % count)) * UNIT_ALIGN;
    (0..count).map(|i| cut(i)..cut(i + 1)).collect()
}
