//! The fastest point that fits.
use std::cmp::Reverse;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread::Builder;

use super::on_disk::{InputsOnDisk, OnDisk};
use super::point::{Point, disk_order};
use super::space::{Candidate, Space, total};
use crate::error::{Error, Result, Tier};
use crate::estimate::{expected_step_s, simulated_micro_batches};
use crate::layout::UnitLayout;
use crate::plan::{Budget, Groups, Place, Plan, Request, UpdateMode};

/// Operations simulated to compare candidates, at most: about half a second.
const SIMULATED: usize = 3 << 18;
/// Candidates that are simulated however many operations they have.
const FEWEST: usize = 24;
/// Candidates that are simulated beside the best one with a large group: those with that group, and as many layers kept.
const NEAR: usize = 96;
/// Numbers of slabs, from one, with which the best point is simulated too.
const FEW_SLABS: u32 = 6;
/// Candidates that are simulated at a time.
const MOST_WORKERS: usize = 8;
/// What must gain less than this is not simulated with a large group.
const WORTH_UNEQUAL: f64 = 1.005;
/// Step times that differ by less are alike: what cannot be shorter by more is not simulated.
const ALIKE: f64 = 1.0005;

/// The plan with the shortest simulated step among those that fit.
///
/// Candidates are simulated in the order of the least that their step can take, until that is more than the best one
/// found; so nearly all of them need no simulation. Then the same with a large group, where those are compared.
///
/// # Errors
/// [`Error::DoesNotFit`] or [`Error::SharedMemory`] with the sum of the candidate that exceeds its budget by least.
pub(super) fn fastest(request: &Request, layouts: &Arc<[UnitLayout]>, compare_large_groups: bool) -> Result<Plan> {
    let space = Space::new(request, layouts);
    let all = space.candidates()?;
    let asked = asked(request);
    let mut fitting = if asked { Vec::new() } else { fitting_in_memory(request, &all) };
    if fitting.is_empty() {
        let on_disk = OnDiskChoices::new(request, &space, &all)?;
        fitting = fitting_with_disk(request, &space, &all, &on_disk);
        if fitting.is_empty() {
            return Err(refusal(request, layouts, &all, &on_disk));
        }
    }
    let group = request.requests.group.unwrap_or(request.micro_batches);
    // Load, forward and backward, land and update of every unit, for each of the steps that an estimate runs.
    let operations = |micro_batches: u32| 3 * request.units.len() * (4 + 4 * micro_batches as usize);
    let most = |micro_batches: u32| (SIMULATED / operations(micro_batches)).max(FEWEST);
    let in_memory = |point: &Point| point.on_disk == 0 && point.inputs_on_disk == 0;
    let points: Vec<Point> = fitting.iter().map(|found| found.0).filter(in_memory).collect();
    let simulated = simulated_micro_batches(request.micro_batches, Groups::equal(group));
    let mut best = shortest(request, layouts, fitting, most(simulated), None)?;
    if compare_large_groups || request.requests.large_group.is_some() {
        let seconds = best.as_ref().map_or(f64::INFINITY, |best| best.1);
        let all =
            space.with_large_groups(&points, seconds / if compare_large_groups { WORTH_UNEQUAL } else { ALIKE })?;
        let mut fitting = fitting_in_memory(request, &all);
        let first = most(request.micro_batches) / 2;
        best = shortest(request, layouts, fitting.clone(), first, best)?;
        if let Some((_, _, Point { large: large @ 1.., keep, inputs, .. })) = best {
            // How long the next forward waits for the first units' updates depends on slots and on whose state is on the
            // device, which the least that a step can take does not show.
            in_order(&mut fitting);
            let near = |(point, _): &(Point, f64)| (point.large, point.keep, point.inputs) == (large, keep, inputs);
            let near: Vec<_> = fitting.into_iter().skip(first).filter(near).collect();
            best = shortest(request, layouts, near, NEAR, best)?;
        }
    }
    let (mut best, mut seconds, point) = best.expect("at least one candidate fits and is simulated");
    if request.update == UpdateMode::Immediate && request.requests.slabs.is_none() {
        // Fewer slabs delay gradients and leave the link to loads, which is faster at times, most of all where every weight
        // has a slot; without this a host with less memory would get the better plan.
        let alike = |other: &&Point| Point { slots: point.slots, slabs: point.slabs, ..**other } == point;
        // (In shared memory slots take room from slabs: with more of those, no more slabs than fitted beside them.)
        let most = points.iter().filter(alike).map(|other| (other.slots, other.slabs)).max();
        let more_slots = most.filter(|most| most.0 > point.slots);
        for (slots, most) in std::iter::once((point.slots, point.slabs)).chain(more_slots) {
            for slabs in 1..most.min(FEW_SLABS + 1) {
                let (plan, _) = Point { slots, slabs, ..point }.plan(request, layouts)?;
                let found = expected_step_s(request, layouts, &plan)?;
                if found < seconds {
                    (best, seconds) = (plan, found);
                }
            }
        }
    }
    Ok(best)
}

/// Sorts points by the least that a step of them can take; among those that take as long, the one comes first that asks
/// least of the host and the link.
fn in_order(points: &mut [(Point, f64)]) {
    let ease =
        |p: &Point| (p.device_updates, p.inputs == Place::Host, Reverse(p.state), Reverse(p.slots), Reverse(p.keep));
    points.sort_by(|(a, a_s), (b, b_s)| a_s.total_cmp(b_s).then_with(|| ease(a).cmp(&ease(b))));
}

/// The point with the shortest simulated step, of as many as `most` that may have it, or `best`: its plan, seconds and itself.
fn shortest(
    request: &Request,
    layouts: &Arc<[UnitLayout]>,
    mut fitting: Vec<(Point, f64)>,
    most: usize,
    mut best: Option<(Plan, f64, Point)>,
) -> Result<Option<(Plan, f64, Point)>> {
    in_order(&mut fitting);
    fitting.truncate(most);
    let plan_of = |point: Point| -> Result<(Plan, f64)> {
        let (plan, _) = point.plan(request, layouts)?;
        let seconds = expected_step_s(request, layouts, &plan)?;
        Ok((plan, seconds))
    };
    let simulated = |&(point, least_s): &(Point, f64)| (point, least_s, plan_of(point));
    // Some are simulated side by side, and looked at one after the other: how many there are at a time does not matter.
    let workers = std::thread::available_parallelism().map_or(1, usize::from).min(MOST_WORKERS);
    for some in fitting.chunks(workers) {
        let hopeless = |least_s: f64, best: &Option<(Plan, f64, Point)>| {
            best.as_ref().is_some_and(|(_, seconds, _)| least_s * ALIKE >= *seconds)
        };
        if hopeless(some[0].1, &best) {
            break;
        }
        for one in side_by_side(some, simulated) {
            let (point, least_s, found) = one;
            if hopeless(least_s, &best) {
                return Ok(best);
            }
            let (plan, seconds) = found?;
            if best.as_ref().is_none_or(|(_, least, _)| seconds < *least) {
                best = Some((plan, seconds, point));
            }
        }
    }
    Ok(best)
}

/// What `work` returns for each item, in their order: on a thread for each, as far as there are threads to be had.
fn side_by_side<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Copy + Send) -> Vec<R> {
    std::thread::scope(|scope| {
        let spawn = |item| (item, Builder::new().spawn_scoped(scope, move || work(item)));
        let others: Vec<_> = items.iter().skip(1).map(spawn).collect();
        let first = items.first().map(work);
        let others = others.into_iter().map(|(item, thread)| match thread {
            Ok(thread) => thread.join().unwrap_or_else(|cause| resume_unwind(cause)),
            Err(_) => work(item),
        });
        first.into_iter().chain(others).collect()
    })
}

/// Whether any candidate fits.
///
/// # Errors
/// [`Error::TooFewUnitsForDisk`] and [`Error::TooFewInputsForDisk`] where a number of units on disk was asked for that no
/// candidate leaves.
pub(super) fn fits(request: &Request, layouts: &Arc<[UnitLayout]>) -> Result<bool> {
    let space = Space::new(request, layouts);
    let all = space.smallest_candidates()?;
    if all.is_empty() {
        return Ok(false);
    }
    if !asked(request) && !fitting_in_memory(request, &all).is_empty() {
        return Ok(true);
    }
    let on_disk = OnDiskChoices::new(request, &space, &all)?;
    Ok(!fitting_with_disk(request, &space, &all, &on_disk).is_empty())
}

/// Whether it was asked for what is on disk.
const fn asked(request: &Request) -> bool {
    let r = &request.requests;
    r.state_on_disk.is_some() || r.weights_on_disk.is_some() || r.inputs_on_disk.is_some()
}

/// Points that fit with all state in memory, each with the least seconds of its step.
fn fitting_in_memory(request: &Request, all: &[Candidate]) -> Vec<(Point, f64)> {
    let (on_disk, inputs) = (OnDisk::default(), InputsOnDisk::default());
    let fits = |candidate: &Candidate| Some((fitted(candidate, &on_disk, &inputs, request)?, candidate.least_s));
    all.iter().filter_map(fits).collect()
}

/// Those that fit with the fewest bytes that a step reads from disk and writes there: a disk is far slower than everything
/// else, so that nothing makes up for more.
fn fitting_with_disk(
    request: &Request,
    space: &Space<'_>,
    all: &[Candidate],
    choices: &OnDiskChoices,
) -> Vec<(Point, f64)> {
    let (mut found, mut fewest) = (Vec::new(), u64::MAX);
    for candidate in all.iter().filter(|candidate| candidate.device <= request.budget.device) {
        let of_state = choices.of(candidate);
        for inputs in choices.inputs_of(candidate) {
            if inputs.traffic() > fewest {
                break;
            }
            let beyond = host_bytes(candidate, inputs, request).saturating_sub(request.budget.host);
            for on_disk in &of_state[of_state.partition_point(|on_disk| on_disk.most_spared < beyond)..] {
                let traffic = on_disk.traffic.saturating_add(inputs.traffic());
                if traffic > fewest || on_disk.disk.saturating_add(inputs.disk) > request.budget.disk {
                    break;
                }
                if let Some(point) = fitted(candidate, on_disk, inputs, request) {
                    fewest = traffic;
                    found.push((point, candidate.least_s.max(space.least_disk_s(on_disk, inputs)), traffic));
                    break;
                }
            }
        }
    }
    found.into_iter().filter(|found| found.2 == fewest).map(|(point, least_s, _)| (point, least_s)).collect()
}

/// What a candidate takes of the host at least, with all state there and these inputs on disk.
fn host_bytes(candidate: &Candidate, inputs: &InputsOnDisk, request: &Request) -> u64 {
    let device = if request.shared_memory { candidate.device } else { 0 };
    let slabs = if request.update == UpdateMode::Immediate { least_slabs(candidate, request) } else { 0 };
    total([with_inputs(candidate.host, inputs), device, candidate.slab.saturating_mul(slabs)])
}

/// Host bytes where some inputs of those that wait there wait on disk.
const fn with_inputs(host: u64, inputs: &InputsOnDisk) -> u64 {
    host.saturating_sub(inputs.disk).saturating_add(inputs.buffers)
}

/// What may be on disk: state and weights, by the number of units whose state is on the device; inputs, by the layers that are
/// not kept.
struct OnDiskChoices {
    of_state: HashMap<usize, Vec<OnDisk>>,
    of_inputs: HashMap<(usize, usize), Vec<InputsOnDisk>>,
    /// For inputs that wait on the device.
    no_inputs: Vec<InputsOnDisk>,
}

impl OnDiskChoices {
    /// What was asked for; else, where there is a disk, every number of units.
    ///
    /// # Errors
    /// [`Error::TooFewUnitsForDisk`] and [`Error::TooFewInputsForDisk`] when no candidate leaves as many units as were asked for.
    fn new(request: &Request, space: &Space<'_>, all: &[Candidate]) -> Result<Self> {
        let (state, weights) = (request.requests.state_on_disk, request.requests.weights_on_disk);
        let setting = if state.is_some() { "plan.state_on_disk" } else { "plan.weights_on_disk" };
        let asked = state.or(weights);
        let (mut choices, mut most) = (HashMap::new(), 0);
        for state in all.iter().map(|candidate| candidate.point.state) {
            if let Entry::Vacant(place) = choices.entry(state) {
                let mut found = vec![OnDisk::default()];
                if asked.is_some() || request.budget.disk > 0 {
                    found = space.on_disk(state);
                }
                most = most.max(disk_order(request, state).count());
                if let Some(asked) = request.requests.state_on_disk {
                    found.retain(|on_disk| on_disk.units == asked as usize);
                }
                let mut most_spared = 0;
                for on_disk in &mut found {
                    most_spared = on_disk.freed.saturating_sub(on_disk.buffers).max(most_spared);
                    on_disk.most_spared = most_spared;
                }
                place.insert(found);
            }
        }
        let choices = Self::with_inputs(request, space, all, choices)?;
        match asked {
            Some(asked) if all.iter().all(|candidate| choices.of(candidate).is_empty()) => {
                Err(Error::TooFewUnitsForDisk { setting, asked, most })
            }
            _ => Ok(choices),
        }
    }

    fn with_inputs(
        request: &Request,
        space: &Space<'_>,
        all: &[Candidate],
        of_state: HashMap<usize, Vec<OnDisk>>,
    ) -> Result<Self> {
        let asked = request.requests.inputs_on_disk.map(|asked| asked as usize);
        let mut of_inputs = HashMap::new();
        for point in all.iter().map(|candidate| &candidate.point).filter(|point| point.inputs == Place::Host) {
            if let Entry::Vacant(place) = of_inputs.entry((point.keep, point.large_keep)) {
                let mut found = space.inputs_on_disk(point);
                match asked {
                    Some(asked) => found.retain(|inputs| inputs.layers == asked),
                    None if request.budget.disk == 0 => found.truncate(1),
                    // In the order of the bytes that a step moves.
                    None => found.sort_by_key(|inputs| inputs.moved),
                }
                place.insert(found);
            }
        }
        let no_inputs = if asked.unwrap_or(0) == 0 { vec![InputsOnDisk::default()] } else { Vec::new() };
        match asked.filter(|&asked| asked > 0 && of_inputs.values().all(Vec::is_empty)) {
            Some(asked) => {
                let left = of_inputs.keys().map(|&(keep, _)| request.num_layers() - keep).max().unwrap_or(0);
                Err(Error::TooFewInputsForDisk { asked: u32::try_from(asked).unwrap_or(u32::MAX), left })
            }
            None => Ok(Self { of_state, of_inputs, no_inputs }),
        }
    }

    /// The choices of inputs of a candidate, fewest bytes first.
    fn inputs_of(&self, candidate: &Candidate) -> &[InputsOnDisk] {
        let point = &candidate.point;
        if point.inputs == Place::Host { &self.of_inputs[&(point.keep, point.large_keep)] } else { &self.no_inputs }
    }

    /// Those of a candidate, fewest bytes first, on disk as of a step's traffic; none where its units on the device leave fewer than were asked for.
    /// Layers that are updated on the device have their state on the host.
    fn of(&self, candidate: &Candidate) -> &[OnDisk] {
        let choices = &self.of_state[&candidate.point.state];
        let in_memory = choices.iter().take_while(|on_disk| on_disk.units == 0).count();
        if candidate.point.device_updates > 0 { &choices[..in_memory] } else { choices }
    }
}

/// Slabs that a candidate needs: as many as were asked for, of which it has no more than layers that use them; else one.
fn least_slabs(candidate: &Candidate, request: &Request) -> u64 {
    request.requests.slabs.map_or(1, |_| candidate.point.slabs.max(1)).into()
}

/// The candidate with as many slabs as fit, if it fits at all.
fn fitted(candidate: &Candidate, on_disk: &OnDisk, inputs: &InputsOnDisk, request: &Request) -> Option<Point> {
    let Candidate { point, device, host, slab, .. } = *candidate;
    let point = Point { on_disk: on_disk.units, weights: on_disk.weights, inputs_on_disk: inputs.layers, ..point };
    let host = with_inputs(host, inputs).saturating_sub(on_disk.freed).saturating_add(on_disk.buffers);
    let Budget { device: on_device, host: on_host, disk } = request.budget;
    // A sum that is too large for its type is more than there is.
    let others = if request.shared_memory { host.checked_add(device)? } else { host };
    let left = on_host.checked_sub(others)?;
    if device > on_device || on_disk.disk.saturating_add(inputs.disk) > disk {
        return None;
    }
    if request.update != UpdateMode::Immediate || slab == 0 {
        return Some(point);
    }
    let slabs = left / slab;
    if slabs < least_slabs(candidate, request) {
        return None;
    }
    Some(Point { slabs: u32::try_from(slabs).unwrap_or(u32::MAX).min(point.slabs), ..point })
}

/// The refusal with the sum of the candidate that exceeds the budgets by least. One that exceeds a single budget comes
/// first: the message names one tier, and with that one enlarged the candidate must fit.
fn refusal(request: &Request, layouts: &Arc<[UnitLayout]>, all: &[Candidate], choices: &OnDiskChoices) -> Error {
    let Budget { device: on_device, host: on_host, disk } = request.budget;
    let excess = |(candidate, on_disk, inputs): &(&Candidate, &OnDisk, &InputsOnDisk)| {
        let host = least_slabs(candidate, request).saturating_mul(candidate.slab).saturating_add(candidate.host);
        let host = with_inputs(host, inputs).saturating_sub(on_disk.freed).saturating_add(on_disk.buffers);
        let on_disk = on_disk.disk.saturating_add(inputs.disk);
        let beyond_device = candidate.device.saturating_sub(on_device);
        let beyond_disk = on_disk.saturating_sub(disk);
        let beyond_host = if request.shared_memory {
            candidate.device.saturating_add(host).saturating_sub(on_host).max(beyond_device)
        } else {
            beyond_device.saturating_add(host.saturating_sub(on_host))
        };
        let exceeded = [beyond_device > 0, host > on_host, beyond_disk > 0].into_iter().filter(|&is| is).count();
        let several = if request.shared_memory { beyond_host > 0 && beyond_disk > 0 } else { exceeded > 1 };
        (several, beyond_host.saturating_add(beyond_disk), on_disk)
    };
    // Of inputs, the fewest and the most are enough to say what is missing.
    let ends = |found: &'_ [InputsOnDisk]| {
        if found.len() > 1 { vec![found[0], found[found.len() - 1]] } else { found.to_vec() }
    };
    let of_inputs: Vec<Vec<InputsOnDisk>> = all.iter().map(|candidate| ends(choices.inputs_of(candidate))).collect();
    // The refusal's numbers are not those of a single slot beside more state on the device than there has to be: state would
    // leave it first.
    let least_state = all.iter().map(|candidate| candidate.point.state).min();
    let is_sensible = |point: &Point| point.slots > 1 || Some(point.state) == least_state;
    let sensible = all.iter().zip(&of_inputs).filter(|(candidate, _)| is_sensible(&candidate.point));
    let pairs = sensible.flat_map(|(candidate, of_inputs)| {
        let pair = move |on_disk| of_inputs.iter().map(move |inputs| (candidate, on_disk, inputs));
        choices.of(candidate).iter().flat_map(pair)
    });
    let (nearest, on_disk, inputs) = pairs.min_by_key(excess).expect("there is always a candidate");
    let (slabs, weights) = (request.requests.slabs.unwrap_or(1), on_disk.weights);
    let point = Point { slabs, on_disk: on_disk.units, weights, inputs_on_disk: inputs.layers, ..nearest.point };
    let plan = match point.plan(request, layouts) {
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
    if totals.disk > disk {
        return Error::DoesNotFit { tier: Tier::Disk, needed: totals.disk, available: disk, items };
    }
    Error::SharedMemory { needed: totals.device.saturating_add(totals.host), available: on_host, items }
}
