//! One point of the space, and the plan that it stands for.
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::layout::{Role, UnitLayout};
use crate::plan::{
    Activation, Forecast, Groups, Place, Placement, Plan, Request, Staged, State, Totals, UnitPlan, UpdateMode,
};

/// The numbers that decide a plan. Buffers that layers with state on the host share are
/// at most as many as there are such layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Point {
    /// Units whose state lives on the device, in the order of [`state_order`].
    pub(super) state: usize,
    /// Layers whose state lives on the host and that are updated on the device.
    pub(super) device_updates: u32,
    /// Layers, the last ones, whose activations are kept.
    pub(super) keep: usize,
    /// Micro-batches of the large group where it is larger than the others, else 0; and layers, the last ones, whose
    /// activations are kept there, as many as `keep` at most.
    pub(super) large: u32,
    pub(super) large_keep: usize,
    /// Layers of the others that are offloaded, the rest being recomputed: see [`evenly`].
    pub(super) offload: usize,
    /// Where the inputs of the other layers wait.
    pub(super) inputs: Place,
    /// Device weight buffers.
    pub(super) slots: u32,
    /// Shared slabs, immediate updates only.
    pub(super) slabs: u32,
    /// Device gradient buffers that layers share.
    pub(super) grad_buffers: u32,
    /// Staging buffers, where anything is staged.
    pub(super) stage_buffers: u32,
    /// Units whose state lives on disk, in the order of [`disk_order`].
    pub(super) on_disk: usize,
    /// The first ones of those, whose weights are there too.
    pub(super) weights: usize,
    /// Layers whose inputs wait on disk instead of on the host: see [`evenly`].
    pub(super) inputs_on_disk: usize,
}

impl Point {
    /// How a step's micro-batches are divided.
    pub(super) fn groups(&self, request: &Request) -> Groups {
        groups(request, self.large)
    }

    /// The plan, with its sum and without a forecast, and its placement.
    ///
    /// # Errors
    /// As for [`Placement::new`].
    pub(super) fn plan(&self, request: &Request, layouts: &Arc<[UnitLayout]>) -> Result<(Plan, Placement)> {
        let layers = request.num_layers();
        let on_device: Vec<usize> = state_order(request).take(self.state).collect();
        let on_disk: Vec<usize> = disk_order(request, self.state).take(self.on_disk).collect();
        let weights = &on_disk[..self.weights];
        let left = layers - if self.large > 0 { self.large_keep } else { self.keep };
        let inputs_on_disk: Vec<usize> = evenly(left, self.inputs_on_disk).map(|index| 1 + index).collect();
        let offloaded: Vec<usize> = evenly(left, self.offload).map(|index| 1 + index).collect();
        let unit = |index: usize| {
            let other = if offloaded.contains(&index) { Activation::Offload } else { Activation::Recompute };
            let layer = (1..=layers).contains(&index);
            let kept = !layer || index > layers - self.keep;
            let large_kept = self.large == 0 || !layer || index > layers - self.large_keep;
            UnitPlan {
                name: request.units[index].name.clone(),
                state: match index {
                    index if on_device.contains(&index) => State::Device,
                    index if on_disk.contains(&index) => State::Disk,
                    _ => State::Host,
                },
                activation: if kept { Activation::Keep } else { other },
                large_activation: (kept && !large_kept).then_some(other),
                // A kept layer holds its input among what it keeps; embed and head have none that waits.
                input: if kept && large_kept {
                    Place::Device
                } else if inputs_on_disk.contains(&index) {
                    Place::Disk
                } else {
                    self.inputs
                },
                update: if on_device.contains(&index) { Place::Device } else { Place::Host },
                weights_on_disk: weights.contains(&index),
            }
        };
        let units: Vec<UnitPlan> = (0..request.units.len()).map(unit).collect();
        let hosted = units[1..=layers].iter().filter(|unit| unit.state != State::Device).count();
        let hosted = u32::try_from(hosted).map_err(|_| Error::TooMany {
            what: "layers",
            count: hosted as u64,
            most: u32::MAX.into(),
        })?;
        let mut plan = Plan {
            units,
            slots: self.slots.min(hosted),
            slabs: match request.update {
                UpdateMode::JustInTime => hosted,
                UpdateMode::Immediate => self.slabs.min(hosted),
            },
            grad_buffers: self.grad_buffers.min(hosted),
            stage_buffers: 0,
            stage_bytes: 0,
            state_buffers: 0,
            disk_buffers: if on_disk.is_empty() { 0 } else { DISK_BUFFERS },
            weight_buffers: if weights.is_empty() { 0 } else { WEIGHT_BUFFERS },
            input_buffers: 0,
            group: self.groups(request).others(),
            large_group: self.large,
            large_begin: large_begin(request, self.large),
            micro_batches: request.micro_batches,
            graphs: false,
            items: Vec::new(),
            totals: Totals::default(),
            estimate: Forecast::default(),
        };
        // Evenly spread, so that the host's optimizer and the link meet the next forward side by side.
        for unit in updated_on_device(&hosted_layers(request, self.state), self.device_updates) {
            plan.units[unit].update = Place::Device;
            plan.state_buffers = state_buffers(request);
        }
        let staged: Vec<Staged> =
            (1..=layers).map(|unit| Staged::new(&request.units[unit], &plan.units[unit], plan.groups())).collect();
        plan.stage_bytes = staged.iter().map(Staged::largest).max().unwrap_or(0);
        plan.input_buffers = if staged.iter().any(|staged| staged.on_disk() > 0) { INPUT_BUFFERS } else { 0 };
        plan.stage_buffers = if plan.stage_bytes > 0 { self.stage_buffers } else { 0 };
        let placement = Placement::with_layouts(request, &plan, Arc::clone(layouts))?;
        plan.items = placement.items().to_vec();
        plan.totals = placement.totals();
        Ok((plan, placement))
    }
}

/// A step's groups where the large one has so many micro-batches; 0: all are alike.
pub(super) fn groups(request: &Request, large: u32) -> Groups {
    Groups::new(large_begin(request, large), large, request.requests.group.unwrap_or(request.micro_batches))
}

/// Updates are hidden by the forward of the first group, immediate ones by the backward of the last.
const fn large_begin(request: &Request, large: u32) -> u32 {
    match request.update {
        UpdateMode::Immediate if large > 0 => request.micro_batches.saturating_sub(large),
        _ => 0,
    }
}

/// One buffer for state on disk is filled, one is updated, one is emptied.
pub(super) const DISK_BUFFERS: u32 = 3;
/// One buffer for weights on disk is filled, one is sent to the device.
pub(super) const WEIGHT_BUFFERS: u32 = 2;
/// One buffer for inputs that wait on disk is filled, one is emptied.
pub(super) const INPUT_BUFFERS: u32 = 2;

/// Units in the order in which their state goes to disk, with the first `state` units' on the device: layers from the last one
/// backwards, which the next forward needs last and whose gradients come first; then head and embedding, of whose rows the
/// host updates many while the layers run backward.
pub(super) fn disk_order(request: &Request, state: usize) -> impl Iterator<Item = usize> {
    let (last, on_device) = (request.units.len() - 1, state_order(request).take(state).collect::<Vec<_>>());
    let order = (1..last).rev().chain([last, 0]);
    order.filter(move |unit| !on_device.contains(unit) && trains(request, *unit))
}

fn trains(request: &Request, unit: usize) -> bool {
    request.units[unit].tensors.iter().any(|t| t.role == Role::Trainable && t.numel() > 0)
}

/// Units in the order in which their state goes to the device: embed and head have their weights and gradients there
/// anyway, so the same bytes buy more parameters; then layers in the order in which the next forward needs them.
pub(super) fn state_order(request: &Request) -> impl Iterator<Item = usize> {
    let last = request.units.len() - 1;
    std::iter::once(0).chain(std::iter::once(last)).chain(1..last)
}

/// Layers that train and of whose state, with the first `state` units on the device, the host is the home.
pub(super) fn hosted_layers(request: &Request, state: usize) -> Vec<usize> {
    let layer = |u: &usize| (1..=request.num_layers()).contains(u) && trains(request, *u);
    let mut layers: Vec<usize> = state_order(request).skip(state).filter(layer).collect();
    layers.sort_unstable();
    layers
}

/// One state buffer is filled, one is emptied, and one absorbs the difference; immediate updates need two pairs (see
/// `schedule/build.rs`).
fn state_buffers(request: &Request) -> u32 {
    if request.update == UpdateMode::Immediate { 4 } else { 3 }
}

/// Which of the `hosted` layers are updated on the device when `count` are, or all where there are fewer.
pub(super) fn updated_on_device(hosted: &[usize], count: u32) -> impl Iterator<Item = usize> {
    evenly(hosted.len(), count as usize).map(|index| hosted[index])
}

/// `count` of the numbers below `all`, or all where there are fewer, as evenly spread as they can be.
pub(super) fn evenly(all: usize, count: usize) -> impl Iterator<Item = usize> {
    let count = count.min(all);
    (0..count).map(move |i| (2 * i + 1) * all / (2 * count))
}
