//! How many micro-batches pass through a unit before the next one is loaded.
//!
//! All of them (layer-major): weights and gradients cross the link once a step, and activations of all micro-batches wait
//! for backward. One: activations of a single micro-batch wait, so that they can be kept, and weights either cross the
//! link for each micro-batch or stay on the device, where gradients are summed too; but updates of the step before are
//! hidden by the forward of a single micro-batch, so the first group may be larger than the others; immediate ones by
//! the backward of a single one, so the last group may be. Groups are in order, so
//! gradients are summed in the same order whatever the sizes.
use super::on_disk::{disk_traffic, input_traffic};
use super::search;
use crate::error::{Error, Result, Tier};
use crate::estimate::expected_step_s;
use crate::plan::{Place, Plan, Request, Staged, State, UnitPlan};

/// Step times that differ by less than this factor are alike.
const ALIKE: f64 = 1.0005;

/// The fastest plan over the group sizes, of those that fit; fewer bytes read from disk and written there come before speed. Of plans that
/// take as long, the one that leaves least to the host and the link. Of those, larger groups load fewer weights; with all
/// state on the device nothing is loaded, and the smallest group has the fewest activations waiting.
///
/// # Errors
/// As for [`search::fastest`], of all micro-batches in one group.
pub(super) fn fastest(request: &Request) -> Result<Plan> {
    let mut found: Vec<(Plan, f64)> = Vec::new();
    let (layouts, mut refusal, mut too_few) = (request.layouts()?, None, None);
    // Whoever asks for a size asks for equal groups.
    let compare_large = request.requests.group.is_none() && request.requests.large_group.is_none();
    for asked in in_groups(request) {
        let plan = match search::fastest(&asked, &layouts, compare_large) {
            Ok(plan) => plan,
            Err(error @ (Error::DoesNotFit { .. } | Error::SharedMemory { .. })) => {
                refusal.get_or_insert(error);
                continue;
            }
            // How many layers leave inputs depends on the groups.
            Err(error @ Error::TooFewInputsForDisk { .. }) => {
                too_few.get_or_insert(error);
                continue;
            }
            Err(error) => return Err(error),
        };
        let seconds = expected_step_s(&asked, &layouts, &plan)?;
        found.push((plan, seconds));
    }
    let fewest = found.iter().map(|(plan, _)| traffic(request, plan)).min().unwrap_or(0);
    found.retain(|(plan, _)| traffic(request, plan) == fewest);
    let least = found.iter().map(|found| found.1).fold(f64::INFINITY, f64::min);
    found.retain(|found| found.1 < least * ALIKE);
    let best = found.into_iter().map(|(plan, _)| plan).min_by_key(|plan| {
        let (hosted, updated) = elsewhere(plan);
        (hosted, updated, if hosted == 0 { plan.group } else { 0 })
    });
    best.ok_or_else(|| refusal.or(too_few).expect("each size is planned or refused"))
}

/// Whether a plan fits with any of the group sizes.
///
/// # Errors
/// As for [`search::fits`].
pub(super) fn any_fits(request: &Request) -> Result<bool> {
    let layouts = request.layouts()?;
    let (mut answered, mut too_few) = (false, None);
    for asked in in_groups(request) {
        match search::fits(&asked, &layouts) {
            Ok(true) => return Ok(true),
            Ok(false) => answered = true,
            Err(error @ Error::TooFewInputsForDisk { .. }) => too_few = too_few.or(Some(error)),
            Err(error) => return Err(error),
        }
    }
    too_few.filter(|_| !answered).map_or(Ok(false), Err)
}

/// What a step of a plan reads from disk and writes there, by which plans are compared.
fn traffic(request: &Request, plan: &Plan) -> u64 {
    let of = |what: &str| -> u64 {
        let items = plan.items.iter().filter(|item| item.tier == Tier::Disk && item.what == what);
        items.map(|item| item.bytes).sum()
    };
    let (weights, inputs) = (of("weights"), of("activations"));
    let groups = plan.groups();
    let state = disk_traffic(plan.totals.disk - inputs, weights, groups.count(plan.micro_batches));
    let units = request.units.iter().zip(&plan.units).filter(|(_, choice)| choice.input == Place::Disk);
    let moved = units.map(|(unit, choice)| {
        let staged = Staged::new(unit, choice, groups);
        (0..plan.micro_batches).map(|micro_batch| staged.disk_bytes(micro_batch)).sum::<u64>()
    });
    state.saturating_add(input_traffic(moved.fold(0, |sum: u64, bytes| sum.saturating_add(bytes))))
}

/// The request with each of the group sizes that are compared asked for.
fn in_groups(request: &Request) -> impl Iterator<Item = Request> + '_ {
    sizes(request).into_iter().map(|group| {
        let mut asked = request.clone();
        asked.requests.group = group;
        asked
    })
}

/// Units whose state is not on the device, and those of them that are updated there.
fn elsewhere(plan: &Plan) -> (usize, usize) {
    let count = |what: fn(&UnitPlan) -> bool| plan.units.iter().filter(|unit| what(unit)).count();
    (count(|unit| unit.state != State::Device), count(UnitPlan::needs_device_update))
}

/// The sizes that are compared, as they are asked for. Sums over several passes, and a loss term over the whole step,
/// need all micro-batches in one group.
fn sizes(request: &Request) -> Vec<Option<u32>> {
    let (r, all) = (&request.requests, request.micro_batches);
    if r.large_group == Some(all) {
        return vec![Some(all)];
    }
    if r.group.is_some() || r.accumulate || request.one_group {
        return vec![r.group];
    }
    let smaller = [all.div_ceil(2), 4, 2, 1];
    let mut sizes: Vec<u32> = std::iter::once(all).chain(smaller.into_iter().filter(|&size| size < all)).collect();
    sizes.dedup();
    sizes.sort_unstable_by_key(|&size| std::cmp::Reverse(size));
    sizes.dedup();
    sizes.retain(|&size| r.large_group.is_none_or(|large| size <= large));
    sizes.into_iter().map(Some).collect()
}
