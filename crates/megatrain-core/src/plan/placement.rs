//! The place of everything: the one computation of sizes and offsets that plan, schedule and engine share.
use std::ops::Range;

use super::request::MOST_BUFFERS;
use super::{Activation, Place, Plan, Request, State, Totals, UnitPlan, UnitRequest, UpdateMode};
use crate::error::{Error, Item, Result, Tier};
use crate::layout::{Precision, UNIT_ALIGN, UnitLayout};
use crate::store::spill::state_bytes;

/// Device allocations; each is one piece of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Region {
    /// Images of embed, head and resident units, then slots.
    Weights,
    /// Gradients in the transfer precision.
    Grads,
    /// fp32 sums over micro-batches.
    Accumulators,
    /// Activations on their way to the host and back.
    Stage,
    /// Residuals and moments of units whose state lives on the device.
    State,
    /// Buffers for state that is copied to the device to be updated there.
    StateBuffers,
    /// Tables and sums of the gradient norm.
    Norm,
}

impl Region {
    /// Every region.
    pub const ALL: [Self; 7] =
        [Self::Weights, Self::Grads, Self::Accumulators, Self::Stage, Self::State, Self::StateBuffers, Self::Norm];
}

/// A stretch of a device region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceRange {
    /// The region.
    pub region: Region,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// Device places of one unit whose state lives on the device, or of a part of one whose state is copied there to be updated.
#[derive(Clone, Copy, Debug)]
pub struct DeviceState {
    /// Low halves of the masters; empty under fp32.
    pub residual: DeviceRange,
    /// First moments.
    pub exp_avg: DeviceRange,
    /// Second moments.
    pub exp_avg_sq: DeviceRange,
}

/// A state buffer: where a part of a unit's state is while it is updated.
#[derive(Clone, Copy, Debug)]
pub struct StateBuffer {
    /// Its stretch of the trainable plane of the image.
    pub weights: DeviceRange,
    /// Its ranges of residual and moments.
    pub state: DeviceState,
    /// Its stretch of the gradient.
    pub grad: DeviceRange,
}

/// What the host keeps of one unit, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostState {
    /// The image.
    pub image: u64,
    /// Low halves of the masters.
    pub residual: u64,
    /// One moment plane.
    pub moment: u64,
}

/// The sums of the gradient norm of one unit.
#[derive(Clone, Copy, Debug)]
pub struct NormPlace {
    /// Number of blocks.
    pub blocks: u64,
    /// Table of (first element, length) pairs of u64 on the device.
    pub table: DeviceRange,
    /// One f64 a block on the device.
    pub sums: DeviceRange,
    /// The first of its sums in the host's list.
    pub first: u64,
}

/// A part of a unit's trainable plane that is offloaded, updated and sent by itself: whole blocks of the gradient norm,
/// with the padding after them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its elements.
    pub elements: Range<u64>,
    /// Its blocks of the gradient norm.
    pub blocks: Range<u64>,
    /// Its bytes of the image; those of the last part include what is frozen.
    pub image: Range<u64>,
}

/// The place of everything.
#[derive(Clone, Debug)]
pub struct Placement {
    /// The units' layouts.
    pub layouts: Vec<UnitLayout>,
    /// The parts of each unit, in order; one, but of a large embedding or head whose work between two steps would
    /// otherwise be the sum of offload, update and sending.
    pub parts: Vec<Vec<Part>>,
    /// The elements of each part in which a unit with its state on the host is updated on the device; empty where the host
    /// updates it.
    pub device_update_parts: Vec<Vec<Range<u64>>>,
    /// The state buffers.
    pub state_buffers: Vec<StateBuffer>,
    /// The elements of each part in which state on disk is read, updated and written; empty where it is elsewhere.
    pub disk_parts: Vec<Vec<Range<u64>>>,
    /// Bytes of each host buffer through which that state passes.
    pub disk_buffers: Vec<u64>,
    /// A unit's own place in `weights`: embed, head and units whose state lives on the device.
    pub own: Vec<Option<DeviceRange>>,
    /// The slots.
    pub slots: Vec<DeviceRange>,
    /// Gradient buffers: those of single units, then the shared ones.
    pub grads: Vec<DeviceRange>,
    /// A unit's own gradient buffer, as an index into `grads`.
    pub own_grad: Vec<Option<u32>>,
    /// The shared gradient buffers, as indices into `grads`.
    pub shared_grads: Vec<u32>,
    /// A unit's fp32 sum over micro-batches; `None`: the sum is formed in its gradient buffer.
    pub accumulator: Vec<Option<DeviceRange>>,
    /// Staging buffers.
    pub stage: Vec<DeviceRange>,
    /// Residual and moments on the device.
    pub device_state: Vec<Option<DeviceState>>,
    /// Norm sums of units with trainable tensors.
    pub norm: Vec<Option<NormPlace>>,
    /// Blocks of all units.
    pub norm_blocks: u64,
    /// Planes on the host.
    pub host_state: Vec<Option<HostState>>,
    /// Bytes of each slab: those of single units, then the shared ones.
    pub slabs: Vec<u64>,
    /// A unit's own slab.
    pub own_slab: Vec<Option<u32>>,
    /// The shared slabs.
    pub shared_slabs: Vec<u32>,
    /// Bytes that each staged unit leaves on the host a micro-batch; 0 where nothing is staged.
    pub staged: Vec<u64>,
    /// Micro-batches whose staged bytes wait on the host at a time.
    pub staged_micro_batches: u32,
    /// Bytes of each unit's fp32 store for gradients accumulated over passes.
    pub store: Vec<u64>,
    /// Bytes of the window through which callers and checkpoints read and write state on the device and on disk.
    pub window: u64,
    /// Dtype in which gradients are sent.
    pub grad_precision: Precision,
    sizes: [u64; Region::ALL.len()],
    carved: Vec<(String, DeviceRange)>,
    items: Vec<Item>,
}

/// Alignment of everything on the device and of host spans.
const ALIGN: u64 = 512;
const PAGE: u64 = 4096;
/// Bytes of the window for reading and writing state on the device and on disk.
pub(crate) const TRANSFER_WINDOW: u64 = 4 << 20;
/// Blocks of the gradient norm (65,536 elements each) that a part has at least: the host updates them in a millisecond.
const PART_BLOCKS: u64 = 64;
/// The most elements of a part that is updated on the device: copied in a few milliseconds, which is how long weights that are
/// needed sooner may have to wait for the link.
const DEVICE_UPDATE_ELEMENTS: u64 = 16 << 20;
/// The most elements of a part of state on disk: long enough that the blocks of a few files are under way at a time, short enough
/// that even a slow disk reads or writes one within a second.
const DISK_ELEMENTS: u64 = 8 << 20;
/// The most parts. The first part's offload and the last one's sending are all that does not overlap.
const MOST_PARTS: u64 = 16;

/// The exponent of the bytes that a tier can have: an exbibyte.
const MOST_BYTES_LOG2: u32 = 60;

struct Carver {
    sizes: [u64; Region::ALL.len()],
    carved: Vec<(String, DeviceRange)>,
    items: Vec<Item>,
}

/// Sizes saturate while they are added up; a plan that comes near the end of the numbers is refused as a whole.
fn aligned(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(ALIGN).unwrap_or(u64::MAX)
}

impl Carver {
    /// Refuses what cannot be counted with: beyond this, sums and offsets would wrap.
    fn check(&self) -> Result<()> {
        let totals = Plan::sum(&self.items);
        let lines = self.items.iter().map(|item| (item.what.as_str(), item.bytes));
        let sums = [
            ("all of the device's memory", totals.device),
            ("all of the host's memory", totals.host),
            ("all state on disk", totals.disk),
        ];
        match lines.chain(sums).find(|&(_, bytes)| bytes >= 1 << MOST_BYTES_LOG2) {
            None => Ok(()),
            Some((what, bytes)) => Err(Error::TooLarge { what: what.to_owned(), bytes, log2: MOST_BYTES_LOG2 }),
        }
    }

    fn device(&mut self, region: Region, what: &str, bytes: u64) -> DeviceRange {
        let len = aligned(bytes);
        let offset = self.sizes[region as usize];
        self.sizes[region as usize] = offset.saturating_add(len);
        self.item(what, Tier::Device, len, false);
        let stretch = DeviceRange { region, offset, len };
        self.carved.push((what.to_owned(), stretch));
        stretch
    }

    fn item(&mut self, what: &str, tier: Tier, bytes: u64, pinned: bool) {
        if bytes == 0 {
            return;
        }
        match self.items.iter_mut().find(|i| i.what == what && i.tier == tier && i.pinned == pinned) {
            Some(item) => item.bytes = item.bytes.saturating_add(bytes),
            None => self.items.push(Item { what: what.to_owned(), tier, bytes, pinned }),
        }
    }
}

impl Placement {
    /// Places what the choices of `plan` (everything but its items and totals) need.
    ///
    /// # Errors
    /// [`Error`] when a layout is impossible or the choices contradict the request.
    pub fn new(request: &Request, plan: &Plan) -> Result<Self> {
        let layouts = request.layouts()?;
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
            staged: vec![0; n],
            staged_micro_batches: plan.group,
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
        carver.check()?;
        p.sizes = carver.sizes;
        p.carved = carver.carved;
        p.items = carver.items;
        Ok(p)
    }

    /// Every line of the sum. Lines that end in `(torch)` are torch's to allocate; all others are the engine's.
    #[must_use]
    pub fn items(&self) -> &[Item] {
        &self.items
    }

    /// The sums.
    #[must_use]
    pub fn totals(&self) -> Totals {
        Plan::sum(&self.items)
    }

    /// Every stretch of the device regions, with the name of its line.
    pub(crate) fn carved(&self) -> &[(String, DeviceRange)] {
        &self.carved
    }

    /// Bytes of a device region.
    #[must_use]
    pub fn region_bytes(&self, region: Region) -> u64 {
        self.sizes[region as usize]
    }

    /// Whether a unit has anything to train.
    #[must_use]
    pub fn trains(&self, unit: usize) -> bool {
        self.layouts[unit].elements > 0
    }

    /// Bytes copied for one part of a device update: to the device, with its gradient, and back.
    pub(crate) fn device_update_bytes(&self, unit: usize, part: usize) -> (u64, u64) {
        let (elements, precision) = (&self.device_update_parts[unit][part], self.layouts[unit].precision);
        let state = precision.dtype().size() + if precision == Precision::Bf16 { 10 } else { 8 };
        let count = elements.end - elements.start;
        (count * (state + self.grad_precision.dtype().size()), count * state)
    }

    /// Bytes of one part of a unit's state on disk.
    pub(crate) fn disk_bytes(&self, unit: usize, part: usize) -> u64 {
        let elements = &self.disk_parts[unit][part];
        (elements.end - elements.start) * state_bytes(self.layouts[unit].precision)
    }

    /// Bytes of a unit's gradient as it is sent.
    #[must_use]
    pub fn grad_bytes(&self, unit: usize) -> u64 {
        self.layouts[unit].elements * self.grad_precision.dtype().size()
    }

    fn layers(&self) -> std::ops::Range<usize> {
        1..self.layouts.len() - 1
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
        let several_groups = plan.group < plan.micro_batches;
        if rounded || several_groups {
            for (unit, what) in [(0, "gradient sums: embed"), (last, "gradient sums: head")] {
                // In fp32 their own buffers hold the sums, across groups too: no other unit uses those.
                if rounded && self.trains(unit) {
                    self.accumulator[unit] =
                        Some(carver.device(Region::Accumulators, what, self.layouts[unit].moment_bytes()));
                }
            }
        }
        let layers: Vec<usize> = self.layers().filter(|&u| self.trains(u)).collect();
        if several_groups {
            for unit in layers {
                if rounded || self.own_grad[unit].is_none() {
                    let bytes = self.layouts[unit].moment_bytes();
                    self.accumulator[unit] = Some(carver.device(Region::Accumulators, "gradient sums: layers", bytes));
                }
            }
        } else if rounded && plan.micro_batches > 1 {
            let bytes = layers.iter().map(|&u| self.layouts[u].moment_bytes()).max().unwrap_or(0);
            if bytes > 0 {
                let one = carver.device(Region::Accumulators, "gradient sums: layers", bytes);
                layers.iter().for_each(|&u| self.accumulator[u] = Some(one));
            }
        }
    }

    fn place_staging(&mut self, request: &Request, plan: &Plan, carver: &mut Carver) -> Result<()> {
        for unit in self.layers() {
            self.staged[unit] = staged_bytes(&request.units[unit], &plan.units[unit]);
        }
        let largest = self.staged.iter().copied().max().unwrap_or(0);
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
        let residual = if precision == Precision::Bf16 { 2 * largest } else { 0 };
        let (image, grad) = (precision.dtype().size() * largest, self.grad_precision.dtype().size() * largest);
        let mut take = |bytes| carver.device(Region::StateBuffers, "device update buffers", bytes);
        let mut buffer = || StateBuffer {
            weights: take(image),
            state: DeviceState { residual: take(residual), exp_avg: take(4 * largest), exp_avg_sq: take(4 * largest) },
            grad: take(grad),
        };
        self.state_buffers = (0..plan.state_buffers).map(|_| buffer()).collect();
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
            if plan.units[unit].state != State::Device {
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
            let bytes = staged_on_host(self.staged[unit]).saturating_mul(plan.group.into());
            carver.item("activations", Tier::Host, bytes, true);
            if request.requests.accumulate && self.trains(unit) {
                self.store[unit] = self.layouts[unit].moment_bytes();
                carver.item("gradient store", Tier::Host, self.store[unit], false);
            }
        }
        carver.item("gradient norm", Tier::Host, self.norm_bytes(), true);
        carver.item("transfer window", Tier::Host, self.window, true);
    }

    fn place_disk(&mut self, plan: &Plan, carver: &mut Carver) -> Result<()> {
        let mut largest = 0;
        for (layout, parts) in self.layouts.iter().zip(&self.disk_parts) {
            let each = state_bytes(layout.precision);
            let part = parts.iter().map(|part| part.end - part.start).max().unwrap_or(0);
            largest = largest.max(each.saturating_mul(part));
            if !parts.is_empty() {
                carver.item("optimizer state", Tier::Disk, each.saturating_mul(layout.elements), false);
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
        Ok(())
    }

    /// Bytes of the host's list of norm sums.
    #[must_use]
    pub fn norm_bytes(&self) -> u64 {
        // Each unit's sums arrive in one copy of whole 512-byte lines.
        self.norm
            .iter()
            .flatten()
            .fold(0, |sum: u64, n| sum.saturating_add(n.sums.len))
            .checked_next_multiple_of(PAGE)
            .unwrap_or(u64::MAX)
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
        ("micro_batches", plan.micro_batches, 1, request.micro_batches.into()),
        ("group", plan.group, 1, plan.micro_batches.into()),
    ] {
        let value = u64::from(value);
        if value < least || value > most {
            let why = "a plan is made for one request";
            return Err(Error::OutOfRange { setting, value, least, most: Some(most), why });
        }
    }
    Ok(())
}

/// Cuts a unit. Only the ends have a place of their own for weights and gradient while their state is on the host.
fn parts(request: &Request, plan: &Plan, unit: usize, layout: &UnitLayout) -> Vec<Part> {
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
fn device_update_parts(request: &Request, plan: &Plan, unit: usize, layout: &UnitLayout) -> Vec<Range<u64>> {
    if plan.units[unit].needs_device_update() { cuts(request, layout, DEVICE_UPDATE_ELEMENTS) } else { Vec::new() }
}

/// Cuts the state of a unit whose home is a disk.
fn disk_parts(request: &Request, plan: &Plan, unit: usize, layout: &UnitLayout) -> Vec<Range<u64>> {
    if plan.units[unit].state == State::Disk { disk_cuts(request, layout) } else { Vec::new() }
}

/// The parts in which a unit's state is read and written where its home is a disk.
pub(crate) fn disk_cuts(request: &Request, layout: &UnitLayout) -> Vec<Range<u64>> {
    cuts(request, layout, DISK_ELEMENTS)
}

/// Cuts a unit's elements evenly, in as many parts as were asked for, or so that none has more than `most`.
fn cuts(request: &Request, layout: &UnitLayout, most: u64) -> Vec<Range<u64>> {
    if layout.elements == 0 {
        return Vec::new();
    }
    let steps = layout.elements / UNIT_ALIGN;
    let wanted = request.requests.parts.map_or_else(|| layout.elements.div_ceil(most), u64::from);
    let count = wanted.clamp(1, steps.min(MOST_BUFFERS.into()));
    // The first `steps % count` parts are one step longer; a product with `steps` could overflow.
    let cut = |i: u64| (steps / count * i + i.min(steps % count)) * UNIT_ALIGN;
    (0..count).map(|i| cut(i)..cut(i + 1)).collect()
}

/// Bytes that one micro-batch of a unit leaves on the host between forward and backward.
pub(crate) fn staged_bytes(unit: &UnitRequest, choice: &UnitPlan) -> u64 {
    let kept = if choice.activation == Activation::Offload { offloaded_bytes(unit.kept_bytes) } else { 0 };
    let input = if choice.input == Place::Host { aligned(unit.input_bytes) } else { 0 };
    aligned(kept.saturating_add(input))
}

/// Room for saved tensors packed one after the other, each on its own line.
fn offloaded_bytes(kept: u64) -> u64 {
    kept.saturating_add(128 * ALIGN)
}

/// Staging on the host takes whole pages.
pub(crate) fn staged_on_host(staged: u64) -> u64 {
    staged.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX)
}

/// What torch allocates on the device: listed so that the total is true, and never allocated by the engine.
fn torch_items(request: &Request, plan: &Plan, carver: &mut Carver) {
    let group = u64::from(plan.group);
    let (mut kept, mut inputs) = (0, 0);
    for unit in 1..request.units.len() - 1 {
        let (sizes, choice) = (&request.units[unit], &plan.units[unit]);
        if choice.activation == Activation::Keep {
            kept = group.saturating_mul(sizes.kept_bytes).saturating_add(kept);
        } else if choice.input == Place::Device {
            inputs = group.saturating_mul(sizes.input_bytes).saturating_add(inputs);
        }
    }
    for (what, bytes) in torch_lines(request, plan.group, kept, inputs) {
        carver.item(what, Tier::Device, bytes, false);
    }
}

/// The lines of torch's memory where the activations that are kept and the inputs that wait on the device have these
/// sizes.
pub(crate) fn torch_lines(request: &Request, group: u32, kept: u64, inputs: u64) -> [(&'static str, u64); 6] {
    // The last hidden states, and the gradients that replace them one by one.
    let hidden = (u64::from(group) + 1).saturating_mul(request.units[request.units.len() - 1].input_bytes);
    // What is needed late takes the place of what was kept.
    let workspace = request.workspace_bytes.max(request.late_workspace_bytes.saturating_sub(kept));
    let used = kept.saturating_add(inputs).saturating_add(hidden).saturating_add(workspace);
    [
        ("kept activations (torch)", kept),
        ("layer inputs (torch)", inputs),
        ("hidden states (torch)", hidden),
        ("workspace (torch)", workspace),
        ("fragmentation (torch)", (used as f64 * request.fragmentation) as u64),
        ("context and libraries (torch)", request.context_bytes),
    ]
}
