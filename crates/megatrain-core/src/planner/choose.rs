//! The choices: what a step cannot do without first, then what the free device memory buys, compared by step time.
use crate::error::{Error, Result, Tier};
use crate::layout::Role;
use crate::plan::{
    Activation, Auto, Count, DeviceKind, Forecast, Place, Placement, Plan, Request, State, Totals, UnitPlan,
    UpdateMode, staged_bytes,
};
use crate::schedule::Lane;

/// Slabs that layers share at least by default under immediate updates: enough that the host's optimizer
/// always finds the next gradient while the link lags or leads by a few layers.
const SLABS: u32 = 6;
/// One slot computes, one loads, and one is full already when the link is late.
const SLOTS: u32 = 3;
/// One staging buffer is filled, one is emptied, and one absorbs the difference.
const STAGE_BUFFERS: u32 = 3;
/// Operations simulated to compare candidates; where that is not enough for all of them, an even choice of candidates is
/// looked at first, at least [`FEWEST`], and then those around the best.
const SIMULATED: usize = 1 << 20;
const FEWEST: usize = 12;
/// A step must become shorter by this factor for layers to be updated away from their state: that takes more of the link and of locked memory.
const WORTH_DEVICE_UPDATES: f64 = 1.02;
/// Numbers of layers updated on the device that are compared, evenly up to all whose state lives on the host.
const DEVICE_UPDATES_TRIED: u32 = 12;
/// Step times that differ by less are alike.
const ALIKE: f64 = 1.001;
/// One state buffer is filled, one is emptied, and one absorbs the difference.
const STATE_BUFFERS: u32 = 3;
/// One gradient buffer is filled by backward while the other one is offloaded.
const GRAD_BUFFERS: u32 = 2;

/// A plan being improved step by step; every step keeps what fits and gives back what does not.
struct Choice<'a> {
    request: &'a Request,
    plan: Plan,
    /// Layers that are updated on the device as far as their state lives on the host.
    device_updates: u32,
}

pub(super) fn choose(request: &Request) -> Result<Plan> {
    let device_updates = match request.requests.updates_on_device {
        Some(Count::Units(count)) => count,
        _ => 0,
    };
    let mut choice = Choice { request, plan: smallest(request), device_updates };
    choice.finish()?;
    choice.fit_inputs()?;
    choice.relieve_host()?;
    choice.refuse_unless_it_fits()?;
    choice.grow_slots(SLOTS)?;
    choice.grow_slabs()?;
    choice.spend()?;
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
        // `finish` says which layers are updated elsewhere than where their state lives.
        UnitPlan { name: request.units[index].name.clone(), state, activation, input, update: Place::Host }
    };
    Plan {
        units: (0..request.units.len()).map(unit).collect(),
        slots: 0,
        slabs: 0,
        grad_buffers: 0,
        stage_buffers: 0,
        stage_bytes: 0,
        state_buffers: 0,
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

/// Lets `count` of the layers whose state lives on the host be updated on the device, as far as there are so many: evenly
/// spread, so that the host's optimizer and the link meet the next forward side by side. Returns how many there are.
fn spread(request: &Request, plan: &mut Plan, count: u32) -> usize {
    for unit in &mut plan.units {
        unit.update = if unit.state == State::Device { Place::Device } else { Place::Host };
    }
    let trains = |u: &usize| request.units[*u].tensors.iter().any(|t| t.role == Role::Trainable && t.numel() > 0);
    let hosted: Vec<usize> =
        (1..=request.num_layers()).filter(|&u| plan.units[u].state == State::Host).filter(trains).collect();
    let count = (count as usize).min(hosted.len());
    for i in 0..count {
        plan.units[hosted[(2 * i + 1) * hosted.len() / (2 * count)]].update = Place::Device;
    }
    count
}

impl Choice<'_> {
    /// Derives the counts that follow from the choices, and the sum.
    fn finish(&mut self) -> Result<()> {
        let (request, plan) = (self.request, &mut self.plan);
        let r = &request.requests;
        let layers = 1..=request.num_layers();
        let host_layers = layers.clone().filter(|&u| plan.units[u].state == State::Host).count();
        let host_layers = u32::try_from(host_layers).map_err(|_| Error::TooMany {
            what: "layers",
            count: host_layers as u64,
            most: u32::MAX.into(),
        })?;
        let wanted = r.slots.unwrap_or(plan.slots.max(2));
        plan.slots = wanted.min(host_layers);
        plan.grad_buffers = GRAD_BUFFERS.min(host_layers);
        plan.slabs = match request.update {
            UpdateMode::JustInTime => host_layers,
            UpdateMode::Immediate => r.slabs.unwrap_or(plan.slabs.max(SLABS)).min(host_layers),
        };
        plan.state_buffers = match (spread(request, plan, self.device_updates), request.update) {
            (0, _) => 0,
            (_, UpdateMode::JustInTime) => STATE_BUFFERS,
            // Two pairs: see `schedule/build.rs`.
            (_, UpdateMode::Immediate) => 4,
        };
        plan.stage_bytes = layers.map(|u| staged_bytes(request, plan, u)).max().unwrap_or(0);
        plan.stage_buffers = if plan.stage_bytes > 0 { r.stage_buffers.unwrap_or(STAGE_BUFFERS) } else { 0 };
        let placement = Placement::new(request, plan)?;
        plan.items = placement.items().to_vec();
        plan.totals = placement.totals();
        Ok(())
    }

    fn fits(&self) -> bool {
        let (totals, budget) = (self.plan.totals, self.request.budget);
        totals.device <= budget.device && totals.host <= budget.host
    }

    /// Keeps a change when it still fits, and returns whether it does.
    fn attempt(&mut self, change: impl FnOnce(&mut Plan)) -> Result<bool> {
        let before = self.plan.clone();
        change(&mut self.plan);
        self.finish()?;
        let fits = self.fits();
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

    /// Between three slots and one for each layer, every further one saves a load where backward begins.
    fn grow_slots(&mut self, most: u32) -> Result<()> {
        let host = |u: &&UnitPlan| u.state == State::Host;
        let layers = self.plan.units[1..=self.request.num_layers()].iter().filter(host).count();
        let most = most.min(u32::try_from(layers).unwrap_or(u32::MAX));
        if self.request.requests.slots.is_some() || self.plan.slots >= most {
            return Ok(());
        }
        if self.attempt(|plan| plan.slots = most)? {
            return Ok(());
        }
        let (mut low, mut high) = (self.plan.slots, most);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if self.attempt(|plan| plan.slots = middle)? {
                low = middle;
            } else {
                high = middle;
            }
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
        let (rates, layers) = (request.rates.sustained(), &request.units[1..=request.num_layers()]);
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

    /// Whether the plan decides which units' state lives on the device. Without a card of its own, the device's memory
    /// is the host's: moving state there frees nothing.
    fn places_state(&self) -> bool {
        let r = &self.request.requests;
        match r.state_on_device {
            None | Some(Count::Auto(Auto::Auto)) => self.request.device == DeviceKind::Cuda && !r.accumulate,
            Some(Count::Units(_)) => false,
        }
    }

    /// What the host cannot hold goes to the device, where that has room for it.
    fn relieve_host(&mut self) -> Result<()> {
        if !self.places_state() || self.plan.totals.host <= self.request.budget.host {
            return Ok(());
        }
        let before = self.plan.clone();
        for unit in state_order(self.request) {
            self.plan.units[unit].state = State::Device;
            self.finish()?;
            if self.plan.totals.host <= self.request.budget.host {
                break;
            }
        }
        if !self.fits() {
            self.plan = before;
        }
        Ok(())
    }

    /// Spends what is left of the device's memory. State on the device is worth having while the host's optimizer is
    /// what the step waits for, kept activations once it is not, and both are bought with the same bytes: so every
    /// number of units with their state on the device, with as many layers' activations as fit beside it, is a
    /// candidate, and the fastest one is taken. So is each with a slot for every layer before any activations: its weights
    /// cross the link once a step, which leaves more of the host's memory to the optimizer.
    fn spend(&mut self) -> Result<()> {
        let base = self.plan.clone();
        let (best, seconds) = self.fastest_plan()?;
        if self.places_updates() && self.waits_for_updates(&best)? {
            // First the number of layers to update on the device beside the state that is on the device now; beside that number, another
            // split of the memory may be the fastest.
            self.device_updates = self.fastest_device_updates(&base, &best)?;
            self.plan = base;
            self.finish()?;
            if self.device_updates > 0 && self.fits() {
                let (with_updates, sooner) = self.fastest_plan()?;
                if sooner * WORTH_DEVICE_UPDATES < seconds {
                    self.plan = with_updates;
                    return Ok(());
                }
            }
        }
        self.plan = best;
        Ok(())
    }

    /// The number of device updates that makes a step shortest, where what `best` leaves on the host stays there.
    fn fastest_device_updates(&mut self, base: &Plan, best: &Plan) -> Result<u32> {
        let rates = self.request.rates.sustained();
        let hosted = best.units.iter().filter(|unit| unit.state == State::Host).count() as u32;
        let mut fastest = (0, f64::INFINITY);
        for count in (1..=DEVICE_UPDATES_TRIED).map(|share| hosted * share / DEVICE_UPDATES_TRIED) {
            self.plan = base.clone();
            for (unit, chosen) in self.plan.units.iter_mut().zip(&best.units) {
                unit.state = chosen.state;
            }
            self.device_updates = count;
            self.finish()?;
            // The state buffers take the place of some state.
            for unit in state_order(self.request).into_iter().rev() {
                if !self.fits() && self.places_state() && self.plan.units[unit].state == State::Device {
                    self.plan.units[unit].state = State::Host;
                    self.finish()?;
                }
            }
            if count > 0 && self.fits() {
                self.keep_most()?;
                self.grow_slots(u32::MAX)?;
                let seconds = crate::estimate::estimate(self.request, &self.plan, &rates)?.step_s;
                if seconds * ALIKE < fastest.1 {
                    fastest = (count, seconds);
                }
            }
        }
        Ok(fastest.0)
    }

    /// The fastest plan with as many layers updated on the device as now, and its step's seconds.
    fn fastest_plan(&mut self) -> Result<(Plan, f64)> {
        let kept_first = self.fastest_of(Self::keep_most)?;
        if self.request.requests.slots.is_none() {
            let slots_first = self.fastest_of(|choice| {
                choice.grow_slots(u32::MAX)?;
                choice.keep_most()
            })?;
            if slots_first.1 * ALIKE < kept_first.1 {
                return Ok(slots_first);
            }
        }
        Ok(kept_first)
    }

    /// Whether the plan decides which layers with their state on the host are updated on the device. Without a card of its own
    /// there is no other memory there to update them in.
    fn places_updates(&self) -> bool {
        let r = &self.request.requests;
        match r.updates_on_device {
            None | Some(Count::Auto(Auto::Auto)) => self.request.device == DeviceKind::Cuda && !r.accumulate,
            Some(Count::Units(_)) => false,
        }
    }

    /// Whether a step takes longer than its computing, which only updates and copies can be the reason of.
    fn waits_for_updates(&self, plan: &Plan) -> Result<bool> {
        let found = crate::estimate::estimate(self.request, plan, &self.request.rates.sustained())?;
        let computing = found.lanes.get(Lane::Compute.name()).copied().unwrap_or(0.0);
        Ok(found.step_s > WORTH_DEVICE_UPDATES * computing)
    }

    /// The fastest plan over every amount of state on the device, where `fill` says what the rest of the memory is for;
    /// what that leaves goes to slots.
    fn fastest_of(&mut self, fill: impl Fn(&mut Self) -> Result<()>) -> Result<(Plan, f64)> {
        let base = self.plan.clone();
        let candidates = self.candidates(fill)?;
        let mut seconds = vec![None; candidates.len()];
        // Load, forward, backward, offload and update of every unit, for each of the steps that an estimate runs.
        let operations = 3 * self.request.units.len() * (4 + 4 * self.request.micro_batches as usize);
        let stride = candidates.len().div_ceil((SIMULATED / operations).max(FEWEST));
        let last = candidates.len() - 1;
        // On the whole the step time falls and then rises along the candidates.
        let coarse = (0..last).step_by(stride).chain(std::iter::once(last));
        let best = self.fastest(&candidates, &mut seconds, coarse)?;
        let near = best.saturating_sub(stride)..(best + stride + 1).min(candidates.len());
        let best = self.fastest(&candidates, &mut seconds, near)?;
        self.plan = candidates[best].clone();
        self.grow_slots(u32::MAX)?;
        let best_s = seconds[best].expect("the fastest one has been looked at");
        Ok((std::mem::replace(&mut self.plan, base), best_s))
    }

    /// The index of the fastest candidate among those looked at so far and `these`.
    fn fastest(
        &mut self,
        candidates: &[Plan],
        seconds: &mut [Option<f64>],
        these: impl Iterator<Item = usize>,
    ) -> Result<usize> {
        let rates = self.request.rates.sustained();
        for index in these {
            if seconds[index].is_none() {
                self.plan = candidates[index].clone();
                self.grow_slots(u32::MAX)?;
                seconds[index] = Some(crate::estimate::estimate(self.request, &self.plan, &rates)?.step_s);
            }
        }
        let known = || seconds.iter().enumerate().filter_map(|(index, s)| s.map(|s| (index, s)));
        let least = known().map(|(_, s)| s).fold(f64::INFINITY, f64::min);
        // Of those that are as fast, the one with most state on the device: it needs least of the host.
        let best = known().filter(|&(_, s)| s <= least * ALIKE).map(|(index, _)| index).next_back();
        Ok(best.unwrap_or(0))
    }

    /// Plans with more and more units' state on the device, each with the rest of the memory filled.
    fn candidates(&mut self, fill: impl Fn(&mut Self) -> Result<()>) -> Result<Vec<Plan>> {
        let mut candidates = Vec::new();
        let (base, last) = (self.plan.clone(), self.request.units.len() - 1);
        fill(self)?;
        candidates.push(std::mem::replace(&mut self.plan, base));
        if !self.places_state() {
            return Ok(candidates);
        }
        for unit in state_order(self.request) {
            if self.plan.units[unit].state == State::Device {
                continue;
            }
            if self.attempt(|plan| plan.units[unit].state = State::Device)? {
                let base = self.plan.clone();
                fill(self)?;
                candidates.push(std::mem::replace(&mut self.plan, base));
            } else if unit != 0 && unit != last {
                break;
            }
        }
        Ok(candidates)
    }

    /// Keeps the activations of as many of the last layers as fit.
    fn keep_most(&mut self) -> Result<()> {
        let r = &self.request.requests;
        if r.keep.is_some() || r.activation.is_some() {
            return Ok(());
        }
        let layers = self.request.num_layers();
        // Nothing is known about a layer whose activations have no size, so nothing can be promised about keeping them.
        let sized = self.request.units[1..=layers].iter().rev().take_while(|u| u.kept_bytes > 0).count();
        let (mut low, mut high) = (0, sized + 1);
        let keep = |count: usize| {
            move |plan: &mut Plan| {
                for unit in &mut plan.units[layers + 1 - count..=layers] {
                    (unit.activation, unit.input) = (Activation::Keep, Place::Device);
                }
            }
        };
        let before = self.plan.clone();
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if self.attempt(keep(middle))? {
                self.plan = before.clone();
                low = middle;
            } else {
                high = middle;
            }
        }
        if low > 0 {
            self.attempt(keep(low))?;
        }
        Ok(())
    }

    fn refuse_unless_it_fits(&self) -> Result<()> {
        let (totals, budget) = (self.plan.totals, self.request.budget);
        for (tier, needed, available) in
            [(Tier::Device, totals.device, budget.device), (Tier::Host, totals.host, budget.host)]
        {
            if needed > available {
                return Err(Error::DoesNotFit { tier, needed, available, items: self.plan.items.clone() });
            }
        }
        Ok(())
    }
}
