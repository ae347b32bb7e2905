//! The greedy choices.
use super::placement::staged_bytes;
use super::request::{Auto, Count};
use super::{Activation, DeviceKind, Forecast, Place, Placement, Plan, Request, State, Totals, UnitPlan, UpdateMode};
use crate::error::{Error, Result, Tier};

/// Landing places that layers share at least by default under immediate updates: enough that the host's optimizer
/// always finds the next gradient while the link lags or leads by a few layers.
const SLABS: u32 = 6;
/// One slot computes, one loads, and one is full already when the link is late.
const SLOTS: u32 = 3;
/// One staging buffer is filled, one is emptied, and one absorbs the difference.
const STAGE_BUFFERS: u32 = 3;
/// One gradient buffer is filled by backward while the other one lands.
const GRAD_BUFFERS: u32 = 2;

/// A plan being improved step by step; every step keeps what fits and gives back what does not.
struct Choice<'a> {
    request: &'a Request,
    plan: Plan,
}

pub(super) fn choose(request: &Request) -> Result<Plan> {
    let mut choice = Choice { request, plan: smallest(request) };
    choice.finish()?;
    choice.fit_inputs()?;
    choice.refuse_unless_it_fits(&[Tier::Device])?;
    choice.grow_slots(SLOTS)?;
    choice.grow_slabs()?;
    choice.place_state()?;
    choice.keep_activations()?;
    choice.grow_slots(u32::MAX)?;
    choice.refuse_unless_it_fits(&[Tier::Device, Tier::Host])?;
    Ok(choice.plan)
}

/// What a step cannot do without, and what was asked for.
fn smallest(request: &Request) -> Plan {
    let r = &request.requests;
    let layers = request.num_layers();
    let keep = match (r.keep, r.activation) {
        (Some(keep), _) => keep as usize,
        (None, Some(Activation::Keep)) => layers,
        _ => 0,
    };
    let other = if r.activation == Some(Activation::Offload) { Activation::Offload } else { Activation::Recompute };
    let devices = match r.state_on_device {
        Some(Count::Units(count)) => count as usize,
        _ => 0,
    };
    let on_device = state_order(request).into_iter().take(devices).collect::<Vec<_>>();
    let unit = |index: usize| {
        let layer = (1..=layers).contains(&index);
        let kept = index > layers - keep;
        let activation = if !layer || kept { Activation::Keep } else { other };
        // A kept layer holds its input among what it keeps; embed and head have none that waits for the host.
        let input = if layer && !kept { r.inputs.unwrap_or(Place::Device) } else { Place::Device };
        let state = if on_device.contains(&index) { State::Device } else { State::Host };
        UnitPlan { name: request.units[index].name.clone(), state, activation, input }
    };
    Plan {
        units: (0..request.units.len()).map(unit).collect(),
        slots: 0,
        slabs: 0,
        grad_buffers: 0,
        stage_buffers: 0,
        stage_bytes: 0,
        group: r.group.unwrap_or(request.micro_batches),
        micro_batches: request.micro_batches,
        items: Vec::new(),
        totals: Totals::default(),
        estimate: Forecast::default(),
    }
}

/// Units in the order in which their state goes to the device: embed and head have their weights and gradients there
/// anyway, so the same bytes buy more parameters; then layers in the order in which the next forward needs them.
fn state_order(request: &Request) -> Vec<usize> {
    let last = request.units.len() - 1;
    std::iter::once(0).chain(std::iter::once(last)).chain(1..last).collect()
}

impl Choice<'_> {
    /// Derives the counts that follow from the choices, and the sum.
    fn finish(&mut self) -> Result<()> {
        let (request, plan) = (self.request, &mut self.plan);
        let r = &request.requests;
        let layers = 1..=request.num_layers();
        let host_layers = layers.clone().filter(|&u| plan.units[u].state == State::Host).count();
        let host_layers = u32::try_from(host_layers).map_err(|_| Error::Invalid("too many layers".to_owned()))?;
        let wanted = r.slots.unwrap_or(plan.slots.max(2));
        plan.slots = wanted.min(host_layers);
        plan.grad_buffers = GRAD_BUFFERS.min(host_layers);
        plan.slabs = match request.update {
            UpdateMode::JustInTime => host_layers,
            UpdateMode::Immediate => r.slabs.unwrap_or(plan.slabs.max(SLABS)).min(host_layers),
        };
        plan.stage_bytes = layers.map(|u| staged_bytes(request, plan, u)).max().unwrap_or(0);
        plan.stage_buffers = if plan.stage_bytes > 0 { r.stage_buffers.unwrap_or(STAGE_BUFFERS) } else { 0 };
        let placement = Placement::new(request, plan)?;
        plan.items = placement.items().to_vec();
        plan.totals = placement.totals();
        Ok(())
    }

    /// Keeps a change when it still fits, and tells so. What does not fit on the host yet may come to fit, as state moves
    /// to the device, so there a change must only not make it worse.
    fn attempt(&mut self, change: impl FnOnce(&mut Plan)) -> Result<bool> {
        let before = self.plan.clone();
        change(&mut self.plan);
        self.finish()?;
        let (totals, budget) = (self.plan.totals, self.request.budget);
        let fits = totals.device <= budget.device && totals.host <= budget.host.max(before.totals.host);
        if !fits {
            self.plan = before;
        }
        Ok(fits)
    }

    /// Layer inputs stay on the device while everything else fits beside them.
    fn fit_inputs(&mut self) -> Result<()> {
        if self.request.requests.inputs.is_some() || self.plan.totals.device <= self.request.budget.device {
            return Ok(());
        }
        let before = self.plan.clone();
        for unit in &mut self.plan.units[1..=self.request.num_layers()] {
            if unit.activation != Activation::Keep {
                unit.input = Place::Host;
            }
        }
        self.finish()?;
        if self.plan.totals.device >= before.totals.device {
            self.plan = before;
        }
        Ok(())
    }

    fn grow_slots(&mut self, most: u32) -> Result<()> {
        let layers = u32::try_from(self.request.num_layers()).unwrap_or(u32::MAX);
        // Between three slots and all of them, a further one only saves a load where backward turns round.
        if self.request.requests.slots.is_none() && self.plan.slots < most.min(layers) {
            self.attempt(|plan| plan.slots = most.min(layers))?;
        }
        Ok(())
    }

    /// Under immediate updates the gradients that wait when backward ends are all that the host has to do until the
    /// next backward: as many as a forward takes, or the host idles meanwhile.
    fn grow_slabs(&mut self) -> Result<()> {
        let request = self.request;
        if request.update != UpdateMode::Immediate || request.requests.slabs.is_some() {
            return Ok(());
        }
        let (rates, layers) = (&request.rates, &request.units[1..=request.num_layers()]);
        let layouts = request.layouts()?;
        let (mut forward, mut backward, mut update) = (0.0, 0.0, 0.0);
        for (unit, layout) in layers.iter().zip(&layouts[1..]) {
            let compute = f64::from(self.plan.group) * unit.flops / (rates.matmul_tflops * 1e12);
            let load = layout.image_bytes as f64 / (rates.h2d_gbs * 1e9);
            forward += load.max(compute);
            backward += load.max(2.0 * compute);
            update += layout.num_trainable() as f64 / (rates.adamw_gparams * 1e9);
        }
        if update <= backward {
            return Ok(());
        }
        // Of those that wait, the host consumes some while backward fills them; beside them, a few circulate.
        let waiting = (forward / update * layers.len() as f64) / (1.0 - backward / update);
        let wanted = waiting.ceil().min(layers.len() as f64) as u32 + SLABS;
        self.attempt(|plan| plan.slabs = wanted)?;
        Ok(())
    }

    fn place_state(&mut self) -> Result<()> {
        let r = &self.request.requests;
        // Without a card of its own, the device's memory is the host's: moving state there frees nothing.
        let automatic = match r.state_on_device {
            None | Some(Count::Auto(Auto::Auto)) => self.request.device == DeviceKind::Cuda && !r.accumulate,
            Some(Count::Units(_)) => false,
        };
        if !automatic {
            return Ok(());
        }
        for unit in state_order(self.request) {
            if !self.attempt(|plan| plan.units[unit].state = State::Device)?
                && unit != 0
                && unit <= self.request.num_layers()
            {
                break;
            }
        }
        Ok(())
    }

    fn keep_activations(&mut self) -> Result<()> {
        let r = &self.request.requests;
        if r.keep.is_some() || r.activation.is_some() {
            return Ok(());
        }
        for unit in (1..=self.request.num_layers()).rev() {
            // Nothing is known about this layer's activations, so nothing can be promised about keeping them.
            if self.request.units[unit].kept_bytes == 0 {
                break;
            }
            let kept = self.attempt(|plan| {
                plan.units[unit].activation = Activation::Keep;
                plan.units[unit].input = Place::Device;
            })?;
            if !kept {
                break;
            }
        }
        Ok(())
    }

    fn refuse_unless_it_fits(&self, tiers: &[Tier]) -> Result<()> {
        let (totals, budget) = (self.plan.totals, self.request.budget);
        for &tier in tiers {
            let (needed, available) = match tier {
                Tier::Device => (totals.device, budget.device),
                Tier::Host => (totals.host, budget.host),
            };
            if needed > available {
                return Err(Error::DoesNotFit { tier, needed, available, items: self.plan.items.clone() });
            }
        }
        Ok(())
    }
}
