//! How many micro-batches pass through a unit before the next one is loaded.
//!
//! All of them (layer-major): weights and gradients cross the link once a step, and activations of all micro-batches wait
//! for backward. One: activations of a single micro-batch wait, so that they can be kept, and weights either cross the
//! link for each micro-batch or stay on the device, where gradients are summed too. Groups are of equal size and in
//! order, so gradients are summed in the same order whatever the size.
use std::cmp::Ordering;

use super::search;
use crate::error::{Error, Result};
use crate::estimate::expected_step_s;
use crate::plan::{DeviceKind, Plan, Request};

/// A smaller group must shorten the step by this factor.
const WORTH_SMALLER: f64 = 1.0005;

/// The fastest plan over the group sizes, of those that fit; fewer bytes of state on disk come before speed.
///
/// # Errors
/// As for [`search::fastest`], of all micro-batches in one group.
pub(super) fn fastest(request: &Request) -> Result<Plan> {
    let mut best: Option<(Plan, f64)> = None;
    let mut refusal = None;
    for group in sizes(request) {
        let mut asked = request.clone();
        asked.requests.group = group;
        let plan = match search::fastest(&asked) {
            Ok(plan) => plan,
            Err(error @ (Error::DoesNotFit { .. } | Error::SharedMemory { .. })) => {
                refusal.get_or_insert(error);
                continue;
            }
            Err(error) => return Err(error),
        };
        let seconds = expected_step_s(&asked, &plan)?;
        let better = best.as_ref().is_none_or(|(other, least)| match plan.totals.disk.cmp(&other.totals.disk) {
            Ordering::Less => true,
            Ordering::Equal => seconds * WORTH_SMALLER < *least,
            Ordering::Greater => false,
        });
        if better {
            best = Some((plan, seconds));
        }
    }
    best.map(|(plan, _)| plan).ok_or_else(|| refusal.expect("each size is planned or refused"))
}

/// The sizes that are compared, as they are asked for. Sums over several passes, and a loss term over the whole step,
/// need all micro-batches in one group; on the CPU the device's memory is the host's, so nothing is won.
fn sizes(request: &Request) -> Vec<Option<u32>> {
    let r = &request.requests;
    if r.group.is_some() || r.accumulate || request.one_group || request.device == DeviceKind::Cpu {
        return vec![r.group];
    }
    let all = request.micro_batches;
    let smaller = [all.div_ceil(2), 4, 2, 1];
    let mut sizes: Vec<u32> = std::iter::once(all).chain(smaller.into_iter().filter(|&size| size < all)).collect();
    sizes.dedup();
    sizes.sort_unstable_by_key(|&size| std::cmp::Reverse(size));
    sizes.dedup();
    sizes.into_iter().map(Some).collect()
}
