//! The fastest point that fits.
use std::cmp::Reverse;

use super::point::Point;
use super::space::{Candidate, Space};
use crate::error::{Error, Result, Tier};
use crate::estimate::{expected_step_s, simulated_micro_batches};
use crate::plan::{Budget, Place, Plan, Request, UpdateMode};

/// Operations simulated to compare candidates, at most: about half a second.
const SIMULATED: usize = 3 << 18;
/// Candidates that are simulated however many operations they have.
const FEWEST: usize = 24;
/// Step times that differ by less are alike: what cannot be shorter by more is not simulated.
const ALIKE: f64 = 1.0005;

/// The plan with the shortest simulated step among those that fit.
///
/// Candidates are simulated in the order of the least that their step can take, until that is more than the best one
/// found; so nearly all of them need no simulation.
///
/// # Errors
/// [`Error::DoesNotFit`] or [`Error::SharedMemory`] with the sum of the candidate that exceeds its budget by least.
pub(super) fn fastest(request: &Request) -> Result<Plan> {
    let all = Space::new(request)?.candidates()?;
    let mut fitting: Vec<(Point, f64)> =
        all.iter().filter_map(|candidate| Some((fitted(candidate, request)?, candidate.least_s))).collect();
    if fitting.is_empty() {
        return Err(refusal(request, &all));
    }
    // Among those that take as long, the one that asks least of the host and the link.
    let ease =
        |p: &Point| (p.device_updates, p.inputs == Place::Host, Reverse(p.state), Reverse(p.slots), Reverse(p.keep));
    fitting.sort_by(|(a, a_s), (b, b_s)| a_s.total_cmp(b_s).then_with(|| ease(a).cmp(&ease(b))));
    let group = request.requests.group.unwrap_or(request.micro_batches);
    let micro_batches = simulated_micro_batches(request.micro_batches, group) as usize;
    // Load, forward and backward, land and update of every unit, for each of the steps that an estimate runs.
    let operations = 3 * request.units.len() * (4 + 4 * micro_batches);
    let mut best: Option<(Plan, f64)> = None;
    for (point, least_s) in fitting.into_iter().take((SIMULATED / operations).max(FEWEST)) {
        if best.as_ref().is_some_and(|(_, seconds)| least_s * ALIKE >= *seconds) {
            break;
        }
        let (plan, _) = point.plan(request)?;
        let seconds = expected_step_s(request, &plan)?;
        if best.as_ref().is_none_or(|(_, least)| seconds < *least) {
            best = Some((plan, seconds));
        }
    }
    Ok(best.expect("at least one candidate fits and is simulated").0)
}

/// The candidate with as many slabs as fit, if it fits at all.
fn fitted(candidate: &Candidate, request: &Request) -> Option<Point> {
    let Candidate { point, device, host, slab, .. } = *candidate;
    let Budget { device: on_device, host: on_host } = request.budget;
    // A sum that is too large for its type is more than there is.
    let others = if request.shared_memory { host.checked_add(device)? } else { host };
    let left = on_host.checked_sub(others)?;
    if device > on_device {
        return None;
    }
    if request.update != UpdateMode::Immediate || slab == 0 {
        return Some(point);
    }
    let slabs = left / slab;
    if slabs == 0 || request.requests.slabs.is_some_and(|asked| u64::from(asked) > slabs) {
        return None;
    }
    Some(Point { slabs: u32::try_from(slabs).unwrap_or(u32::MAX).min(point.slabs), ..point })
}

/// The refusal with the sum of the candidate that exceeds the budgets by least. One that exceeds a single budget comes
/// first: the message names one tier, and with that one enlarged the candidate must fit.
fn refusal(request: &Request, all: &[Candidate]) -> Error {
    let Budget { device: on_device, host: on_host } = request.budget;
    let excess = |candidate: &Candidate| {
        let slabs = u64::from(request.requests.slabs.unwrap_or(1));
        let host = slabs.saturating_mul(candidate.slab).saturating_add(candidate.host);
        let beyond_device = candidate.device.saturating_sub(on_device);
        if request.shared_memory {
            return (false, candidate.device.saturating_add(host).saturating_sub(on_host).max(beyond_device));
        }
        let beyond_host = host.saturating_sub(on_host);
        (beyond_device > 0 && beyond_host > 0, beyond_device.saturating_add(beyond_host))
    };
    let nearest = all.iter().min_by_key(|candidate| excess(candidate)).expect("there is always a candidate");
    let point = Point { slabs: request.requests.slabs.unwrap_or(1), ..nearest.point };
    let plan = match point.plan(request) {
        Ok((plan, _)) => plan,
        Err(error) => return error,
    };
    let (totals, items) = (plan.totals, plan.items);
    if totals.device > on_device {
        return Error::DoesNotFit { tier: Tier::Device, needed: totals.device, available: on_device, items };
    }
    if totals.host > on_host {
        return Error::DoesNotFit { tier: Tier::Host, needed: totals.host, available: on_host, items };
    }
    Error::SharedMemory { needed: totals.device.saturating_add(totals.host), available: on_host, items }
}
