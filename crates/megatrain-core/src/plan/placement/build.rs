//! Puts everything in its place, kind by kind.
use std::sync::Arc;

use super::carver::Carver;
use super::cut::{device_update_parts, disk_parts, parts};
use super::sizes::Staged;
use super::torch::torch_items;
use super::{DeviceState, HostState, NormPlace, Placement, Region, StateBuffer, part_bytes};
use crate::error::{Error, Result, Tier};
use crate::layout::{Precision, UnitLayout};
use crate::plan::request::MOST_BUFFERS;
use crate::plan::{Plan, Request, State, UpdateMode};

/// Bytes of the window for reading and writing state on the device and on disk.
pub(crate) const TRANSFER_WINDOW: u64 = 4 << 20;

impl Placement {
    /// Places what the choices of `plan` (everything but its items and totals) need.
    ///
    /// # Errors
    /// [`Error`] when a layout is impossible or the choices contradict the request.
    pub fn new(request: &Request, plan: &Plan) -> Result<Self> {
        Self::with_layouts(request, plan, request.layouts()?)
    }

    /// As [`Self::new`], with the layouts of the request's units, which are the same for any plan.
    pub(crate) fn with_layouts(request: &Request, plan: &Plan, layouts: Arc<[UnitLayout]>) -> Result<Self> {
        let n = layouts.len();
        if plan.units.len() != n {
            let (plan, request) = (plan.units.len().to_string(), n.to_string());
            return Err(Error::PlanMismatch { what: "the number of units", plan, request });
        }
        check_counts(request, plan)?;
        let mut p = Self {
            parts: (0..n).map(|unit| parts(request, plan, unit, &layouts[unit])).collect(),
            device_update_parts: (0..n).map(|unit| device_update_parts(request, plan, unit, &layouts[unit])).collect(),
            state_buffers: Vec::new(),
            disk_parts: (0..n).map(|unit| disk_parts(request, plan, unit, &layouts[unit])).collect(),
            disk_buffers: Vec::new(),
            weights_on_disk: plan.units.iter().map(|unit| unit.weights_on_disk).collect(),
            weight_buffers: Vec::new(),
            input_buffers: Vec::new(),
            own: vec![None; n],
            slots: Vec::new(),
            grads: Vec::new(),
            own_grad: vec![None; n],
            shared_grads: Vec::new(),
            accumulator: vec![None; n],
            stage: Vec::new(),
            device_state: vec![None; n],
            norm: vec![None; n],
            norm_blocks: 0,
            host_state: vec![None; n],
            slabs: Vec::new(),
            own_slab: vec![None; n],
            shared_slabs: Vec::new(),
            staged: vec![Staged::none(); n],
            store: vec![0; n],
            window: 0,
            grad_precision: request.grad_precision,
            sizes: Default::default(),
            carved: Vec::new(),
            items: Vec::new(),
            layouts,
        };
        let mut carver = Carver { sizes: Default::default(), carved: Vec::new(), items: Vec::new() };
        p.place_weights(plan, &mut carver);
        p.place_gradients(request, plan, &mut carver);
        p.place_accumulators(request, plan, &mut carver);
        p.place_staging(request, plan, &mut carver)?;
        p.place_device_state(plan, &mut carver);
        p.place_device_updates(request, plan, &mut carver)?;
        p.place_norm(&mut carver);
        torch_items(request, plan, &mut carver);
        p.place_host(request, plan, &mut carver);
        p.place_disk(plan, &mut carver)?;
        p.place_inputs_on_disk(plan, &mut carver)?;
        carver.check()?;
        p.sizes = carver.sizes;
        p.carved = carver.carved;
        p.items = carver.items;
        Ok(p)
    }

    fn place_weights(&mut self, plan: &Plan, carver: &mut Carver) {
        let last = self.layouts.len() - 1;
        for (unit, what) in [(0, "weights: embed"), (last, "weights: head")] {
            self.own[unit] = Some(carver.device(Region::Weights, what, self.layouts[unit].image_bytes));
        }
        for unit in self.layers() {
            if plan.units[unit].state == State::Device {
                let image = self.layouts[unit].image_bytes;
                self.own[unit] = Some(carver.device(Region::Weights, "weights: resident layers", image));
            }
        }
        let host = |u: &usize| plan.units[*u].state != State::Device;
        let slot = self.layers().filter(host).map(|u| self.layouts[u].image_bytes).max().unwrap_or(0);
        self.slots = (0..plan.slots).map(|_| carver.device(Region::Weights, "weights: slots", slot)).collect();
    }

    fn place_gradients(&mut self, request: &Request, plan: &Plan, carver: &mut Carver) {
        let last = self.layouts.len() - 1;
        for unit in 0..self.layouts.len() {
            let what = match unit {
                0 => "gradients: embed",
                u if u == last => "gradients: head",
                _ => "gradients: resident layers",
            };
            if self.trains(unit) && (unit == 0 || unit == last || plan.units[unit].state == State::Device) {
                self.own_grad[unit] = Some(u32::try_from(self.grads.len()).expect("fewer buffers than 2^32"));
                self.grads.push(carver.device(Region::Grads, what, self.grad_bytes(unit)));
            }
        }
        let size = self.shared(plan).map(|u| self.grad_bytes(u)).max().unwrap_or(0);
        if size > 0 {
            for _ in 0..plan.grad_buffers {
                self.shared_grads.push(u32::try_from(self.grads.len()).expect("fewer buffers than 2^32"));
                self.grads.push(carver.device(Region::Grads, "gradients: layers", size));
            }
        }
        debug_assert_eq!(request.units.len(), self.layouts.len());
    }

    /// Layers that train and whose state is not on the device: those that share gradient buffers and slabs.
    fn shared<'a>(&'a self, plan: &'a Plan) -> impl Iterator<Item = usize> + 'a {
        self.layers().filter(|&u| self.trains(u) && plan.units[u].state != State::Device)
    }

    fn place_accumulators(&mut self, request: &Request, plan: &Plan, carver: &mut Carver) {
        let last = self.layouts.len() - 1;
        let rounded = request.grad_precision == Precision::Bf16;
        let several_groups = plan.groups().count(plan.micro_batches) > 1;
        if rounded || several_groups {
            for (unit, what) in [(0, "gradient sums: embed"), (last, "gradient sums: head")] {
                // In fp32 their own buffers hold the sums, across groups too: no other unit uses those.
                if rounded && self.trains(unit) {
                    self.accumulator[unit] =
                        Some(carver.device(Region::Accumulators, what, self.layouts[unit].sum_bytes()));
                }
            }
        }
        let layers: Vec<usize> = self.layers().filter(|&u| self.trains(u)).collect();
        if several_groups {
            for unit in layers {
                if rounded || self.own_grad[unit].is_none() {
                    let bytes = self.layouts[unit].sum_bytes();
                    self.accumulator[unit] = Some(carver.device(Region::Accumulators, "gradient sums: layers", bytes));
                }
            }
        } else if rounded && (plan.micro_batches > 1 || request.sum_layers) {
            let bytes = layers.iter().map(|&u| self.layouts[u].sum_bytes()).max().unwrap_or(0);
            if bytes > 0 {
                let one = carver.device(Region::Accumulators, "gradient sums: layers", bytes);
                layers.iter().for_each(|&u| self.accumulator[u] = Some(one));
            }
        }
    }

    fn place_staging(&mut self, request: &Request, plan: &Plan, carver: &mut Carver) -> Result<()> {
        for unit in self.layers() {
            self.staged[unit] = Staged::new(&request.units[unit], &plan.units[unit], plan.groups());
        }
        let largest = self.staged.iter().map(Staged::largest).max().unwrap_or(0);
        if largest > 0 && (plan.stage_buffers < 2 || plan.stage_bytes < largest) {
            let (buffers, bytes) = (plan.stage_buffers, plan.stage_bytes);
            return Err(Error::StagingTooSmall { buffers, bytes, needed: largest });
        }
        self.stage = (0..plan.stage_buffers)
            .map(|_| carver.device(Region::Stage, "staging buffers", plan.stage_bytes))
            .collect();
        Ok(())
    }

    fn place_device_state(&mut self, plan: &Plan, carver: &mut Carver) {
        for unit in 0..self.layouts.len() {
            if plan.units[unit].state == State::Device {
                let (residual, moment) = (self.layouts[unit].residual_bytes(), self.layouts[unit].moment_bytes());
                let mut take = |bytes| carver.device(Region::State, "optimizer state on the device", bytes);
                self.device_state[unit] =
                    Some(DeviceState { residual: take(residual), exp_avg: take(moment), exp_avg_sq: take(moment) });
            }
        }
    }

    fn place_device_updates(&mut self, request: &Request, plan: &Plan, carver: &mut Carver) -> Result<()> {
        let last = self.layouts.len() - 1;
        let away = (0..=last).find(|&unit| plan.units[unit].needs_device_update());
        if let Some(unit) = away.filter(|_| plan.state_buffers == 0 || request.requests.accumulate) {
            return Err(Error::DeviceUpdate { unit: self.layouts[unit].name.clone(), buffers: plan.state_buffers });
        }
        if let Some(unit) = [0, last].into_iter().find(|&unit| plan.units[unit].needs_device_update()) {
            return Err(Error::DeviceUpdate { unit: self.layouts[unit].name.clone(), buffers: plan.state_buffers });
        }
        let largest = self.device_update_parts.iter().flatten().map(|part| part.end - part.start).max().unwrap_or(0);
        let precision = self.layouts[0].precision;
        let residual = self.layouts[0].residual_size() * largest;
        let moment = self.layouts[0].state.moments.bytes(largest);
        let (image, grad) = (precision.dtype().size() * largest, self.grad_precision.dtype().size() * largest);
        let mut take = |bytes| carver.device(Region::StateBuffers, "device update buffers", bytes);
        let mut buffer = || StateBuffer {
            weights: take(image),
            state: DeviceState { residual: take(residual), exp_avg: take(moment), exp_avg_sq: take(moment) },
            grad: take(grad),
        };
        self.state_buffers = (0..plan.state_buffers).map(|_| buffer()).collect();
        Ok(())
    }

    fn place_disk(&mut self, plan: &Plan, carver: &mut Carver) -> Result<()> {
        let (mut largest, mut largest_image) = (0, 0);
        for (unit, (layout, parts)) in self.layouts.iter().zip(&self.disk_parts).enumerate() {
            let weights = self.weights_on_disk[unit];
            if weights && parts.is_empty() {
                return Err(Error::WeightsWithoutState { unit: layout.name.clone() });
            }
            let bytes = |weights: bool| parts.iter().map(move |part| part_bytes(layout, part, weights));
            largest = largest.max(bytes(weights).max().unwrap_or(0));
            carver.item("optimizer state", Tier::Disk, bytes(false).sum(), false);
            if weights {
                largest_image = largest_image.max(layout.image_bytes);
                carver.item("weights", Tier::Disk, layout.image_bytes, false);
            }
        }
        if largest > 0 && plan.disk_buffers == 0 {
            let why = "state on disk passes through them";
            return Err(Error::OutOfRange { setting: "disk_buffers", value: 0, least: 1, most: None, why });
        }
        for _ in 0..plan.disk_buffers {
            carver.item("disk buffers", Tier::Host, largest, false);
            self.disk_buffers.push(largest);
        }
        if largest_image > 0 && plan.weight_buffers == 0 {
            let why = "weights on disk pass through them";
            return Err(Error::OutOfRange { setting: "weight_buffers", value: 0, least: 1, most: None, why });
        }
        for _ in 0..plan.weight_buffers {
            carver.item("weights: read from disk", Tier::Host, largest_image, true);
            self.weight_buffers.push(largest_image);
        }
        Ok(())
    }

    fn place_inputs_on_disk(&mut self, plan: &Plan, carver: &mut Carver) -> Result<()> {
        let largest = self.staged.iter().map(Staged::largest_on_disk).max().unwrap_or(0);
        if largest > 0 && plan.input_buffers == 0 {
            let why = "layer inputs on disk pass through them";
            return Err(Error::OutOfRange { setting: "input_buffers", value: 0, least: 1, most: None, why });
        }
        for staged in &self.staged {
            carver.item("activations", Tier::Disk, staged.on_disk(), false);
        }
        for _ in 0..plan.input_buffers {
            carver.item("activations: to and from disk", Tier::Host, largest, true);
            self.input_buffers.push(largest);
        }
        Ok(())
    }

    fn place_norm(&mut self, carver: &mut Carver) {
        for unit in 0..self.layouts.len() {
            if self.trains(unit) {
                let blocks = self.layouts[unit].num_norm_blocks();
                let table = carver.device(Region::Norm, "gradient norm", blocks * 16);
                let sums = carver.device(Region::Norm, "gradient norm", blocks * 8);
                self.norm[unit] = Some(NormPlace { blocks, table, sums, first: self.norm_blocks });
                self.norm_blocks += blocks;
            }
        }
    }

    fn place_host(&mut self, request: &Request, plan: &Plan, carver: &mut Carver) {
        let last = self.layouts.len() - 1;
        for unit in 0..=last {
            let layout = &self.layouts[unit];
            let on_disk = plan.units[unit].state == State::Disk;
            if plan.units[unit].state != State::Device && !self.weights_on_disk[unit] {
                let (residual, moment) =
                    if on_disk { (0, 0) } else { (layout.residual_bytes(), layout.moment_bytes()) };
                let state = HostState { image: layout.image_bytes, residual, moment };
                carver.item("weights", Tier::Host, state.image, true);
                let copied = !self.device_update_parts[unit].is_empty();
                carver.item("weights: residual", Tier::Host, state.residual, copied);
                carver.item("exp_avg", Tier::Host, state.moment, copied);
                carver.item("exp_avg_sq", Tier::Host, state.moment, copied);
                self.host_state[unit] = Some(state);
            }
            if plan.units[unit].state != State::Host {
                self.window = TRANSFER_WINDOW;
            }
        }
        for unit in 0..=last {
            let shares = unit != 0 && unit != last && request.update == UpdateMode::Immediate;
            if self.trains(unit) && plan.units[unit].state != State::Device && !shares {
                self.own_slab[unit] = Some(self.push_slab(self.grad_bytes(unit), carver));
            }
        }
        if request.update == UpdateMode::Immediate {
            let size = self.shared(plan).map(|u| self.grad_bytes(u)).max().unwrap_or(0);
            if size > 0 {
                self.shared_slabs = (0..plan.slabs).map(|_| self.push_slab(size, carver)).collect();
            }
        }
        for unit in 0..=last {
            carver.item("activations", Tier::Host, self.staged[unit].on_host(), true);
            if request.requests.accumulate && self.trains(unit) {
                self.store[unit] = self.layouts[unit].sum_bytes();
                carver.item("gradient store", Tier::Host, self.store[unit], false);
            }
        }
        carver.item("gradient norm", Tier::Host, self.norm_bytes(), true);
        carver.item("transfer window", Tier::Host, self.window, true);
    }

    fn push_slab(&mut self, bytes: u64, carver: &mut Carver) -> u32 {
        carver.item("gradient slabs", Tier::Host, bytes, true);
        self.slabs.push(bytes);
        u32::try_from(self.slabs.len() - 1).expect("fewer slabs than 2^32")
    }
}

/// Refuses counts that no request leads to, so that a plan from a file cannot ask for what does not exist.
fn check_counts(request: &Request, plan: &Plan) -> Result<()> {
    let most_units = request.units.len() as u64;
    for (setting, value, least, most) in [
        ("slots", plan.slots, 0, most_units),
        ("slabs", plan.slabs, 0, most_units),
        ("grad_buffers", plan.grad_buffers, 0, most_units),
        ("stage_buffers", plan.stage_buffers, 0, MOST_BUFFERS.into()),
        ("visit_buffers", plan.state_buffers, 0, MOST_BUFFERS.into()),
        ("disk_buffers", plan.disk_buffers, 0, MOST_BUFFERS.into()),
        ("weight_buffers", plan.weight_buffers, 0, MOST_BUFFERS.into()),
        ("input_buffers", plan.input_buffers, 0, MOST_BUFFERS.into()),
        ("micro_batches", plan.micro_batches, 1, request.micro_batches.into()),
        ("group", plan.group, 1, plan.micro_batches.into()),
        ("large_group", plan.large_group, 0, plan.micro_batches.into()),
        ("large_begin", plan.large_begin, 0, plan.micro_batches.saturating_sub(plan.large_group).into()),
    ] {
        let value = u64::from(value);
        if value < least || value > most {
            let why = "a plan is made for one request";
            return Err(Error::OutOfRange { setting, value, least, most: Some(most), why });
        }
    }
    Ok(())
}
