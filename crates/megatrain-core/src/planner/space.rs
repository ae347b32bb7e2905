//! The points that are compared, each with its memory and with the least seconds that its step can take.
//!
//! Which points there are follows from the model, the rates and what was asked for, and never from the budgets: see
//! [`crate::planner`].
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;
use std::sync::Arc;

use super::point::{Point, evenly, hosted_layers};
use crate::error::Result;
use crate::estimate::{adding_s, allowance, simulated_micro_batches};
use crate::layout::UnitLayout;
use crate::plan::{
    Activation, Auto, Count, DeviceKind, Groups, Place, Placement, Rates, Request, Staged, State, UnitPlan,
    UnitRequest, UpdateMode, largest_torch_lines, torch_lines,
};

/// Landing places that layers share by default under immediate updates: enough that the host's optimizer always finds
/// the next gradient while the link lags or leads by a few layers.
const SLABS: u32 = 6;
/// One slot computes, one loads, and one is full already when the link is late.
const SLOTS: u32 = 3;
/// One staging buffer is filled, one is emptied, and one absorbs the difference.
const STAGE_BUFFERS: u32 = 3;
/// One gradient buffer is filled by backward while the other one is offloaded.
const GRAD_BUFFERS: u32 = 2;
/// The least that a schedule can be made with, at the cost of waiting: one slot loads only while nothing is computed.
const LEAST_SLOTS: u32 = 1;
/// One slot computes while another one loads.
const LEAN_SLOTS: u32 = 2;
const LEAST_STAGE_BUFFERS: u32 = 2;
const LEAST_GRAD_BUFFERS: u32 = 1;
/// Values of one number that are compared: all where there are no more, else evenly spaced ones.
const VALUES: usize = 20;
/// Numbers of layers updated on the device that are compared, evenly up to all whose state lives on the host.
const DEVICE_UPDATES: u32 = 8;
/// Sizes of a large group are compared in such parts of all micro-batches.
const LARGE_SIZES: u64 = 8;
/// Up to this number of slots every number is compared, beyond it every further half as many again.
const EACH_SLOT: u32 = 12;

/// A point with what decides between points.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub(super) point: Point,
    /// Bytes on the device.
    pub(super) device: u64,
    /// Bytes on the host without any shared slab, and bytes of one.
    pub(super) host: u64,
    pub(super) slab: u64,
    /// No step under this plan is shorter, in seconds.
    pub(super) least_s: f64,
}

/// Sizes and seconds of a model from which those of every point are sums.
pub(super) struct Space<'a> {
    pub(super) request: &'a Request,
    /// Of the request's units.
    pub(super) layouts: &'a Arc<[UnitLayout]>,
    pub(super) rates: Rates,
    pub(super) group: u32,
    /// Layers that are offloaded, of those that are not kept.
    offload: usize,
    /// Each layer where it is recomputed, and where it is offloaded.
    layers: Vec<[FirstLayers; 2]>,
    /// The same of so many first layers.
    first_layers: Vec<[FirstLayers; 2]>,
    /// By the number of layers that are kept: bytes that the last ones keep of a micro-batch.
    kept: Vec<u64>,
    /// Landing places under immediate updates: see [`waiting_slabs`].
    waiting_slabs: u32,
}

/// Sums over the first layers of a model, which are those that are not kept.
#[derive(Clone, Copy, Default)]
struct FirstLayers {
    /// Bytes of their inputs, of a micro-batch.
    inputs: u64,
    /// Bytes of a staging buffer, by whether their inputs wait on the host.
    stage: [u64; 2],
    /// Bytes that they leave on the host, of a micro-batch, and bytes that cross the link each way for that in a step.
    staged: [u64; 2],
    crossing: [u64; 2],
    /// Seconds of their forward, backward and recomputation, all micro-batches together.
    forward_s: f64,
    backward_s: f64,
    recompute_s: f64,
}

impl FirstLayers {
    /// One layer.
    fn of(request: &Request, rates: &Rates, unit: usize, activation: Activation) -> Self {
        let (sizes, times) = (&request.units[unit], f64::from(request.micro_batches));
        let again = if activation == Activation::Offload { 0.0 } else { sizes.recompute_s(rates) };
        let mut layer = Self {
            inputs: sizes.input_bytes,
            forward_s: times * sizes.forward_s(rates),
            backward_s: times * sizes.backward_s(rates),
            recompute_s: times * again,
            ..Self::default()
        };
        for (index, input) in [Place::Device, Place::Host].into_iter().enumerate() {
            let name = sizes.name.clone();
            let (state, update, weights_on_disk) = (State::Host, Place::Host, false);
            let large_activation = None;
            let choice = UnitPlan { name, state, activation, large_activation, input, update, weights_on_disk };
            let one = Staged::new(sizes, &choice, Groups::equal(1));
            layer.crossing[index] = u64::from(request.micro_batches).saturating_mul(one.largest());
            layer.stage[index] = one.largest();
            layer.staged[index] = one.on_host();
        }
        layer
    }

    /// These layers and others.
    fn with(&self, others: &Self) -> Self {
        let sum = |a: [u64; 2], b: [u64; 2]| [a[0].saturating_add(b[0]), a[1].saturating_add(b[1])];
        Self {
            inputs: self.inputs.saturating_add(others.inputs),
            stage: [self.stage[0].max(others.stage[0]), self.stage[1].max(others.stage[1])],
            staged: sum(self.staged, others.staged),
            crossing: sum(self.crossing, others.crossing),
            forward_s: self.forward_s + others.forward_s,
            backward_s: self.backward_s + others.backward_s,
            recompute_s: self.recompute_s + others.recompute_s,
        }
    }
}

/// What depends on nothing but where units are updated.
struct Base {
    /// Bytes on the device without slots, shared gradient buffers and what torch allocates; on the host without shared
    /// slabs and what is staged.
    device: u64,
    host: u64,
    slot: u64,
    slab: u64,
    grad_buffer: u64,
    /// Layers whose state lives on the host.
    hosted: u32,
    /// Bytes of the smallest of their images.
    smallest: u64,
    /// Bytes that every step loads: of embed and head, and of layers that train.
    loaded_ends: u64,
    loaded_layers: u64,
    /// Bytes of gradients that land on the host.
    offloaded: u64,
    /// Parameters that the host updates, and that the device does.
    on_host: u64,
    on_device: u64,
    /// Those of the embedding among the first.
    embed_on_host: u64,
    /// Bytes of state that is fetched to be updated on the device, and written back.
    fetched: u64,
    written: u64,
}

impl<'a> Space<'a> {
    pub(super) fn new(request: &'a Request, layouts: &'a Arc<[UnitLayout]>) -> Self {
        let layers = request.num_layers();
        let rates = request.sustained_rates();
        let group = request.requests.group.unwrap_or(request.micro_batches);
        let offload = match request.requests.activation {
            Some(Activation::Offload) => layers,
            _ => request.requests.offload.map_or(0, |count| count as usize),
        };
        let kinds = [Activation::Recompute, Activation::Offload];
        let each: Vec<[FirstLayers; 2]> =
            (1..=layers).map(|unit| kinds.map(|kind| FirstLayers::of(request, &rates, unit, kind))).collect();
        let mut first_layers = vec![[FirstLayers::default(); 2]];
        for (index, layer) in each.iter().enumerate() {
            first_layers.push([0, 1].map(|kind| first_layers[index][kind].with(&layer[kind])));
        }
        let mut kept = vec![0];
        for count in 1..=layers {
            kept.push(request.units[layers + 1 - count].kept_bytes.saturating_add(kept[count - 1]));
        }
        let waiting_slabs = waiting_slabs(request, &rates, group);
        Self { request, layouts, rates, group, offload, layers: each, first_layers, kept, waiting_slabs }
    }

    /// Every point that is compared.
    pub(super) fn candidates(&self) -> Result<Vec<Candidate>> {
        let states = self.states();
        let mut found = Vec::new();
        for &state in &states {
            let base = self.base(state, self.asked_device_updates())?;
            self.add_undecided(&mut found, state, &states, &base);
            if self.places_updates() && self.is_compared(state, &states) {
                let hosted = hosted_layers(self.request, state).len() as u32;
                let mut counts: Vec<u32> = (1..=DEVICE_UPDATES).map(|share| hosted * share / DEVICE_UPDATES).collect();
                counts.dedup();
                for device_updates in counts.into_iter().filter(|&count| count > 0) {
                    let with = self.base(state, device_updates)?;
                    self.add_leanest(&mut found, state, device_updates, &with);
                    self.add_all(&mut found, state, device_updates, &with, Some(&base));
                }
            }
        }
        Ok(found)
    }

    /// `points` with a large group, as far as that may make a step shorter than `seconds`: it hides more of the host's
    /// updates, and as many layers are kept in it as fit.
    pub(super) fn with_large_groups(&self, points: &[Point], seconds: f64) -> Result<Vec<Candidate>> {
        let (r, sizes) = (&self.request.requests, self.large_sizes());
        let all: Vec<usize> = (0..=self.request.num_layers()).collect();
        let mut bases: HashMap<(usize, u32), Base> = HashMap::new();
        let mut found = Vec::new();
        for &point in points {
            let base = match bases.entry((point.state, point.device_updates)) {
                Entry::Occupied(base) => base.into_mut(),
                Entry::Vacant(base) => base.insert(self.base(point.state, point.device_updates)?),
            };
            let inputs = if point.keep == self.request.num_layers() { self.inputs() } else { vec![point.inputs] };
            for (large, inputs) in sizes.iter().flat_map(|&large| inputs.iter().map(move |&inputs| (large, inputs))) {
                let stage_buffers = r.stage_buffers.unwrap_or(STAGE_BUFFERS);
                let with = |large_keep: usize| Point { large, large_keep, inputs, stage_buffers, ..point };
                let most = if r.large_keep.is_some() { point.large_keep } else { point.keep };
                if self.least_s(&with(most), base) >= seconds {
                    continue;
                }
                let fits = |&keep: &usize| self.device_bytes(&with(keep), base) <= self.request.budget.device;
                let keep =
                    if r.large_keep.is_some() { most } else { all[..=most].partition_point(fits).saturating_sub(1) };
                found.push(self.candidate(with(keep), base));
            }
        }
        Ok(found)
    }

    /// Sizes of a large group that are compared.
    fn large_sizes(&self) -> Vec<u32> {
        let (all, asked) = (self.request.micro_batches, self.asked_large());
        if asked > 0 {
            return vec![asked];
        }
        let mut sizes: Vec<u32> = (1..LARGE_SIZES).map(|part| (u64::from(all) * part / LARGE_SIZES) as u32).collect();
        sizes.retain(|&size| size > self.group && size < all);
        sizes.dedup();
        sizes
    }

    /// The number of layers that was asked to be kept in the large group, of `keep`; else none until it is known how many fit.
    fn asked_large_keep(&self, keep: usize) -> usize {
        self.request.requests.large_keep.map_or(0, |asked| keep.min(asked as usize))
    }

    /// The size that was asked for, where it makes a difference.
    pub(super) fn asked_large(&self) -> u32 {
        let differs = |&large: &u32| large > self.group && large < self.request.micro_batches;
        self.request.requests.large_group.filter(differs).unwrap_or(0)
    }

    /// Those of [`Self::candidates`] of which one fits wherever any does. An update on the device that was not asked for
    /// needs more memory than one on the host; without any, more state there needs more of the device's.
    pub(super) fn smallest_candidates(&self) -> Result<Vec<Candidate>> {
        let states = self.states();
        let mut found = Vec::new();
        for &state in &states {
            let base = self.base(state, self.asked_device_updates())?;
            if base.device > self.request.budget.device && self.asked_device_updates() == 0 {
                break;
            }
            self.add_undecided(&mut found, state, &states, &base);
        }
        Ok(found)
    }

    /// Numbers of units with state on the device.
    fn states(&self) -> Vec<usize> {
        match self.request.requests.state_on_device {
            Some(Count::Units(count)) => vec![count as usize],
            None | Some(Count::Auto(Auto::Auto)) if self.places_state() => (0..=self.request.units.len()).collect(),
            _ => vec![0],
        }
    }

    /// Whether one of these numbers is compared with every other choice: of embed and head it always pays to know; of
    /// layers, evenly spaced numbers are enough.
    fn is_compared(&self, state: usize, states: &[usize]) -> bool {
        states.len() <= VALUES || state < 2 || spaced(2, self.request.units.len()).any(|count| count == state)
    }

    /// The points with no other updates on the device than were asked for.
    fn add_undecided(&self, found: &mut Vec<Candidate>, state: usize, states: &[usize], base: &Base) {
        self.add_leanest(found, state, self.asked_device_updates(), base);
        if self.is_compared(state, states) {
            self.add_all(found, state, self.asked_device_updates(), base, None);
        }
    }

    fn asked_device_updates(&self) -> u32 {
        match self.request.requests.updates_on_device {
            Some(Count::Units(count)) => count,
            _ => 0,
        }
    }

    /// Whether the plan may move state to the device. Without a card of its own, the device's memory is the host's:
    /// moving state there frees nothing. Sums over passes are formed where the host's optimizer reads them.
    fn places_state(&self) -> bool {
        self.request.device == DeviceKind::Cuda && !self.request.requests.accumulate
    }

    /// Whether the plan decides which layers with their state on the host are updated on the device.
    fn places_updates(&self) -> bool {
        let free = matches!(self.request.requests.updates_on_device, None | Some(Count::Auto(Auto::Auto)));
        free && self.places_state()
    }

    /// Numbers of kept layers. Nothing is known about a layer whose activations have no size, so nothing can be promised
    /// about keeping them.
    fn keeps(&self) -> Vec<usize> {
        let (r, layers) = (&self.request.requests, self.request.num_layers());
        match (r.keep, r.activation) {
            (Some(keep), _) => vec![keep as usize],
            (None, Some(Activation::Keep)) => vec![layers],
            (None, Some(_)) => vec![0],
            (None, None) => {
                let sized = |unit: &&UnitRequest| unit.kept_bytes > 0;
                let most = self.request.units[1..=layers].iter().rev().take_while(sized).count();
                spaced(0, most.min(layers - self.offload)).collect()
            }
        }
    }

    fn inputs(&self) -> Vec<Place> {
        let r = &self.request.requests;
        // On disk are some of those that would wait on the host.
        let asked = r.inputs.or_else(|| r.inputs_on_disk.is_some_and(|count| count > 0).then_some(Place::Host));
        asked.map_or_else(|| vec![Place::Device, Place::Host], |place| vec![place])
    }

    /// The points that need least memory: what is left where none with buffers to spare fits, or where a unit's state on
    /// the device is worth more than buffers.
    fn add_leanest(&self, found: &mut Vec<Candidate>, state: usize, device_updates: u32, base: &Base) {
        let r = &self.request.requests;
        let slots = r.slots.map_or_else(|| vec![LEAN_SLOTS, LEAST_SLOTS], |slots| vec![slots]);
        let buffers = slots.iter().flat_map(|&slots| [(slots, GRAD_BUFFERS), (slots, LEAST_GRAD_BUFFERS)]);
        for inputs in self.inputs() {
            for (slots, grad_buffers) in buffers.clone() {
                let lean = |keep: usize| {
                    let point = Point {
                        state,
                        device_updates,
                        keep,
                        large: self.asked_large(),
                        large_keep: self.asked_large_keep(keep),
                        offload: self.offload,
                        inputs,
                        slots,
                        slabs: r.slabs.unwrap_or(self.waiting_slabs),
                        grad_buffers,
                        stage_buffers: r.stage_buffers.unwrap_or(LEAST_STAGE_BUFFERS),
                        on_disk: 0,
                        weights: 0,
                        inputs_on_disk: 0,
                    };
                    self.candidate(point, base)
                };
                // Torch may need more at the end of backward where little is kept: none is not always the least.
                found.extend(self.keeps().into_iter().map(lean).min_by_key(|lean| lean.device));
            }
        }
    }

    /// Every number of kept layers with every number of slots. Updates on the device that leave the bound of
    /// a step as it is `without` them are left out.
    fn add_all(
        &self,
        found: &mut Vec<Candidate>,
        state: usize,
        device_updates: u32,
        base: &Base,
        without: Option<&Base>,
    ) {
        let r = &self.request.requests;
        let point = Point {
            state,
            device_updates,
            keep: 0,
            large: self.asked_large(),
            large_keep: 0,
            offload: self.offload,
            inputs: Place::Device,
            slots: 0,
            slabs: r.slabs.unwrap_or(self.waiting_slabs),
            grad_buffers: GRAD_BUFFERS,
            stage_buffers: r.stage_buffers.unwrap_or(STAGE_BUFFERS),
            on_disk: 0,
            weights: 0,
            inputs_on_disk: 0,
        };
        for slots in r.slots.map_or_else(|| slot_counts(base.hosted), |slots| vec![slots]) {
            for keep in self.keeps() {
                for inputs in self.inputs() {
                    let candidate = self.candidate(
                        Point { keep, large_keep: self.asked_large_keep(keep), inputs, slots, ..point },
                        base,
                    );
                    if without.is_none_or(|base| candidate.least_s < self.least_s(&candidate.point, base)) {
                        found.push(candidate);
                    }
                }
            }
        }
    }

    /// Layers that are not kept, the first ones: in the large group, and in the others.
    pub(super) fn not_kept(&self, point: &Point) -> (usize, usize) {
        let layers = self.request.num_layers();
        (layers - if point.large > 0 { point.large_keep } else { point.keep }, layers - point.keep)
    }

    /// Sums over the first `count` of the `left` layers that are not kept.
    fn first(&self, count: usize, left: usize) -> FirstLayers {
        if self.offload == 0 || self.offload >= left {
            return self.first_layers[count][usize::from(self.offload > 0)];
        }
        let mut offloaded = vec![false; left];
        evenly(left, self.offload).for_each(|index| offloaded[index] = true);
        let layers = self.layers.iter().zip(offloaded).take(count);
        layers.fold(FirstLayers::default(), |sums, (layer, offloaded)| sums.with(&layer[usize::from(offloaded)]))
    }

    /// Bytes that one of the `left` layers which are not kept leaves on the host of a micro-batch, its input among them, in whole
    /// pages.
    pub(super) fn left_on_host(&self, layer: usize, left: usize) -> u64 {
        let offloaded = evenly(left, self.offload).any(|index| index + 1 == layer);
        self.layers[layer - 1][usize::from(offloaded)].staged[1]
    }

    /// Bytes of a staging buffer.
    fn stage_bytes(&self, (large, others): (usize, usize), index: usize) -> u64 {
        self.first(large, large).stage[index].max(self.first(others, large).stage[index])
    }

    fn candidate(&self, point: Point, base: &Base) -> Candidate {
        let point = Point { slabs: point.slabs.min(base.hosted), ..point };
        let (large, others) = self.not_kept(&point);
        let (groups, index) = (point.groups(self.request), usize::from(point.inputs == Place::Host));
        let staged = |group: u32, count: usize| u64::from(group).saturating_mul(self.first(count, large).staged[index]);
        Candidate {
            point,
            device: self.device_bytes(&point, base),
            host: total([base.host, staged(groups.large(), large).max(staged(groups.others(), others))]),
            slab: base.slab,
            least_s: self.least_s(&point, base),
        }
    }

    fn device_bytes(&self, point: &Point, base: &Base) -> u64 {
        let not_kept = self.not_kept(point);
        let (large, others) = not_kept;
        let (groups, index) = (point.groups(self.request), usize::from(point.inputs == Place::Host));
        let slots = u64::from(point.slots.min(base.hosted)).saturating_mul(base.slot);
        let grads = u64::from(point.grad_buffers.min(base.hosted)).saturating_mul(base.grad_buffer);
        let stage = u64::from(point.stage_buffers).saturating_mul(self.stage_bytes(not_kept, index));
        let torch = |group: u32, first: usize| {
            let inputs = if point.inputs == Place::Device { self.first_layers[first][0].inputs } else { 0 };
            let kept = self.kept[self.request.num_layers() - first];
            let of_group = |bytes: u64| u64::from(group).saturating_mul(bytes);
            torch_lines(self.request, group, of_group(kept), of_group(inputs))
        };
        let torch = largest_torch_lines([torch(groups.large(), large), torch(groups.others(), others)]);
        total([base.device, slots, grads, stage, total(torch.map(|line| line.1))])
    }

    /// What a step takes at least: its busiest lane; and forward and backward, each as long as its computing, what has to
    /// be loaded meanwhile and what has to be staged. Updates fall between the last group's backward, or its end where they
    /// wait for the norm, and the end of the next forward of the first one, as do the loads that follow them.
    fn least_s(&self, point: &Point, base: &Base) -> f64 {
        let (request, rates) = (self.request, &self.rates);
        let layers = request.num_layers();
        let not_kept = self.not_kept(point);
        let (large_recomputed, recomputed) = not_kept;
        let index = usize::from(point.inputs == Place::Host);
        // Micro-batches in the large group, in the first and in the last, as parts of all.
        let (all, groups) = (f64::from(request.micro_batches), point.groups(request));
        let part = |group: Range<u32>| f64::from(group.end - group.start) / all;
        let large_part = f64::from(groups.large().min(request.micro_batches)) / all;
        let first_part = groups.ranges(request.micro_batches).next().map_or(1.0, part);
        let last = groups.start(request.micro_batches - 1)..request.micro_batches;
        let (last_part, last_is_large) = (part(last.clone()), groups.has_in_large(last.start));
        let of_both = |large: f64, others: f64| large_part * large + (1.0 - large_part) * others;
        let crosses = |count: usize| self.first(count, large_recomputed).crossing[index] as f64;
        let crossing = of_both(crosses(large_recomputed), crosses(recomputed));
        let upload_s = |bytes: f64| bytes / (rates.h2d_gbs * 1e9);
        let download_s = |bytes: f64| bytes / (rates.d2h_gbs * 1e9);
        let forward_s = |first: usize| self.first_layers[first][0].forward_s;
        let backward_s = |first: usize| self.first_layers[first][0].backward_s;
        let recompute_s = |first: usize| self.first(first, large_recomputed).recompute_s;
        let again_s =
            |first: usize| of_both(recompute_s(first.min(large_recomputed)), recompute_s(first.min(recomputed)));
        let adding = (all - 1.0) * adding_s(base.on_host + base.on_device, rates);
        let (forward, backward) = (forward_s(layers), backward_s(layers) + again_s(layers) + adding);
        // Those whose state lives on the host are the last ones. As many as there are slots may be loaded before their
        // turn comes, and one may be under way.
        let resident = point.state.saturating_sub(2);
        let hosted_forward = forward - forward_s(resident);
        let hosted_backward = backward_s(layers) - backward_s(resident) + again_s(layers) - again_s(resident);
        let smallest = base.smallest as f64;
        let count = f64::from(groups.count(request.micro_batches));
        let loads = count * upload_s(f64::from(base.hosted.saturating_sub(point.slots.saturating_add(1))) * smallest);
        // What is staged and not yet taken away is in the staging buffers.
        let simulated = simulated_micro_batches(request.micro_batches, groups);
        let buffer = self.stage_bytes(not_kept, index) as f64 * all / f64::from(simulated);
        let staged = (crossing - f64::from(point.stage_buffers) * buffer).max(0.0);
        let waits = |computed: f64, needed: f64| (needed - computed).max(0.0);
        let head = &request.units[layers + 1];
        let loss = all * (head.forward_s(rates) + head.backward_s(rates));
        let (computed_forward, computed) = (forward, forward + loss + backward);
        let first_forward = forward * first_part;
        let recomputed_last = if last_is_large { large_recomputed } else { recomputed };
        let last_backward = (loss + backward_s(layers) + recompute_s(recomputed_last) + adding) * last_part;
        // The layers that stage anything are among these.
        let staging = large_recomputed.max(recomputed);
        let forward = forward + waits(hosted_forward, loads).max(waits(forward_s(staging), download_s(staged)));
        let backward = loss
            + backward
            + waits(hosted_backward, loads).max(waits(backward_s(staging) + again_s(layers), upload_s(staged)));

        let both = 2.0 / rates.both_ways;
        let (fetched, written) = (base.fetched as f64, base.written as f64);
        let fetch = both * upload_s(fetched);
        let loaded = base.loaded_ends as f64 + base.loaded_layers as f64;
        let again = (2.0 * count - 1.0) * f64::from(base.hosted.saturating_sub(point.slots)) * smallest;
        let upload = upload_s(loaded + again + crossing) + fetch;
        let download = download_s(base.offloaded as f64 + crossing);
        let update_bytes = request.state.update_bytes(request.precision);
        let on_device = update_bytes * base.on_device as f64 / (rates.hbm_gbs * 1e9) + both * download_s(written);

        let immediate = request.update == UpdateMode::Immediate;
        let beside = fetched + written + loaded + if immediate { base.offloaded as f64 + 2.0 * crossing } else { 0.0 };
        let on_host = base.on_host as f64;
        let host = rates.contention(beside, update_bytes * on_host) * on_host / (rates.adamw_gparams * 1e9);

        let longest = |times: [f64; 4]| times.into_iter().fold(0.0, f64::max);
        let lanes = longest([upload, download, host, on_device]);
        // Rows of the embedding that no token looks up are updated before.
        let updates = host * (base.on_host - base.embed_on_host) as f64 / (base.on_host as f64).max(1.0);
        let window = first_forward + if immediate { last_backward } else { 0.0 };
        let after = if immediate { 0.0 } else { upload_s(base.loaded_layers as f64) + fetch };
        let outside = (if immediate { computed } else { computed_forward + backward }) - window;
        let updated = outside + longest([window, updates, after, on_device]);
        lanes.max(forward + backward).max(updated) * allowance(base.fetched > 0, crossing > 0.0)
    }

    fn base(&self, state: usize, device_updates: u32) -> Result<Base> {
        let request = self.request;
        let point = Point {
            state,
            device_updates,
            keep: 0,
            large: 0,
            large_keep: 0,
            offload: self.offload,
            inputs: Place::Device,
            slots: LEAST_SLOTS,
            slabs: 1,
            grad_buffers: LEAST_GRAD_BUFFERS,
            stage_buffers: LEAST_STAGE_BUFFERS,
            on_disk: 0,
            weights: 0,
            inputs_on_disk: 0,
        };
        let (plan, placement) = point.plan(request, self.layouts)?;
        let layers = 1..=request.num_layers();
        let image = |u: usize| placement.layouts[u].image_bytes;
        let hosted = |u: &usize| plan.units[*u].state == State::Host;
        let slot = placement.slots.first().map_or(0, |slot| slot.len);
        let slab = placement.shared_slabs.first().map_or(0, |&slab| placement.slabs[slab as usize]);
        let grad_buffer = placement.shared_grads.first().map_or(0, |&buffer| placement.grads[buffer as usize].len);
        let first = self.first(request.num_layers(), request.num_layers());
        let inputs = u64::from(self.group).saturating_mul(first.inputs);
        let torch = total(torch_lines(request, self.group, 0, inputs).map(|line| line.1));
        let stage = u64::from(plan.stage_buffers).saturating_mul(plan.stage_bytes);
        let ends = [0, request.units.len() - 1];
        let trainable = |u: usize| placement.layouts[u].num_trainable();
        let updated = |place: Place| {
            let at = |u: &usize| plan.units[*u].update == place;
            (0..request.units.len()).filter(at).map(trainable).sum::<u64>()
        };
        let (fetched, written) = device_update_bytes(&placement);
        Ok(Base {
            device: plan.totals.device.saturating_sub(total([
                u64::from(plan.slots).saturating_mul(slot),
                (placement.shared_grads.len() as u64).saturating_mul(grad_buffer),
                torch,
                stage,
            ])),
            host: plan.totals.host.saturating_sub(total([
                (placement.shared_slabs.len() as u64).saturating_mul(slab),
                u64::from(self.group).saturating_mul(first.staged[0]),
            ])),
            slot,
            slab,
            grad_buffer,
            hosted: layers.clone().filter(hosted).count() as u32,
            smallest: layers.clone().filter(hosted).map(image).min().unwrap_or(0),
            loaded_ends: ends.into_iter().filter(hosted).filter(|&u| placement.trains(u)).map(image).sum(),
            loaded_layers: layers.filter(hosted).filter(|&u| placement.trains(u)).map(image).sum(),
            offloaded: (0..request.units.len()).filter(hosted).map(|u| placement.grad_bytes(u)).sum(),
            on_host: updated(Place::Host),
            embed_on_host: if plan.units[0].update == Place::Host { trainable(0) } else { 0 },
            on_device: updated(Place::Device),
            fetched,
            written,
        })
    }
}

/// Under immediate updates the gradients that wait when backward ends are all that the host has to do until the
/// next backward: as many as a forward takes, or the host idles meanwhile.
fn waiting_slabs(request: &Request, rates: &Rates, group: u32) -> u32 {
    let layers = &request.units[1..=request.num_layers()];
    let (mut forward, mut backward, mut update) = (0.0, 0.0, 0.0);
    for unit in layers {
        let (ahead, back) = (unit.forward_s(rates), unit.backward_s(rates));
        let numel = unit.tensors.iter().map(|t| t.numel()).sum::<u64>() as f64;
        let load = numel * request.precision.dtype().size() as f64 / (rates.h2d_gbs * 1e9);
        forward += load.max(f64::from(group) * ahead);
        backward += load.max(f64::from(group) * back);
        update += numel / (rates.adamw_gparams * 1e9);
    }
    if update <= backward {
        return SLABS;
    }
    // Of those that wait, the host consumes some while backward fills them; beside them, a few circulate.
    let waiting = (forward / update * layers.len() as f64) / (1.0 - backward / update);
    waiting.ceil().min(layers.len() as f64) as u32 + SLABS
}

/// Bytes fetched to the device, and written back, for updates there of units whose state lives on the host.
fn device_update_bytes(placement: &Placement) -> (u64, u64) {
    let parts = |unit: usize| (0..placement.device_update_parts[unit].len()).map(move |part| (unit, part));
    let all = (0..placement.device_update_parts.len())
        .flat_map(parts)
        .map(|(unit, part)| placement.device_update_bytes(unit, part));
    all.fold((0, 0), |sums, bytes| (sums.0 + bytes.0, sums.1 + bytes.1))
}

/// A sum that stays at the largest number where it would be larger.
pub(super) fn total<const N: usize>(terms: [u64; N]) -> u64 {
    terms.into_iter().fold(0, u64::saturating_add)
}

/// All whole numbers from `least` to `most`, or evenly spaced ones where those are many.
fn spaced(least: usize, most: usize) -> impl Iterator<Item = usize> {
    let steps = (most - least).min(VALUES);
    (0..=steps).map(move |i| least + ((most - least) * i).checked_div(steps).unwrap_or(0))
}

/// Numbers of slots that are compared, for so many layers with state on the host.
fn slot_counts(hosted: u32) -> Vec<u32> {
    let mut counts = vec![];
    let mut count = SLOTS;
    while count < hosted {
        counts.push(count);
        count = if count < EACH_SLOT { count + 1 } else { count + count / 2 };
    }
    counts.push(hosted);
    counts
}
