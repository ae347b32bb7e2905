//! What a plan is made from.
use std::collections::HashSet;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{Activation, Place};
use crate::error::{Error, Result};
use crate::layout::{Master, Precision, Role, StateFormat, TensorSpec, UnitLayout};

/// What a unit is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UnitRole {
    /// Everything before the first decoder layer.
    Embed,
    /// A decoder layer.
    Layer,
    /// The final norm and, where it is not tied, the output projection.
    Head,
}

impl UnitRole {
    /// Its name on every surface.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Embed => "embed",
            Self::Layer => "layer",
            Self::Head => "head",
        }
    }
}

/// Computations of one pass, forward, at most: beyond it, schedules take gigabytes.
const MOST_COMPUTATIONS: u64 = 1 << 21;
/// Buffers or parts of one kind, at most.
pub(super) const MOST_BUFFERS: u32 = 1 << 12;
/// Bytes of any one size in a request, at most.
const MOST_BYTES: u64 = 1 << 56;

fn at_most(setting: &'static str, value: u64, most: u64) -> Result<()> {
    if value <= most {
        return Ok(());
    }
    Err(Error::OutOfRange { setting, value, least: 0, most: Some(most), why: "no machine has as much" })
}

fn at_least(setting: &'static str, least: u64, value: u32, why: &'static str) -> Error {
    Error::OutOfRange { setting, value: value.into(), least, most: None, why }
}

const fn exceeds(setting: &'static str, value: u32, count: usize, of: &'static str) -> Error {
    Error::ExceedsModel { setting, value, count, of }
}

const fn contradicts(setting: &'static str, value: u32, other: &'static str) -> Error {
    Error::Contradiction { setting, value, other }
}

/// When the weights change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UpdateMode {
    /// Gradients wait until the norm of all is known.
    #[default]
    JustInTime,
    /// Each unit as soon as its gradient has been offloaded; no clipping.
    Immediate,
}

/// The kind of device planned for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum DeviceKind {
    /// The simulated device.
    Cpu,
    /// A GPU.
    Cuda,
}

/// One unit. Bytes and flops are those of one micro-batch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnitRequest {
    /// Its name, such as `layers.3`.
    pub name: String,
    /// What it is.
    pub role: UnitRole,
    /// Its tensors.
    pub tensors: Vec<TensorSpec>,
    /// Bytes that backward needs when nothing is recomputed, the input among them.
    #[serde(default)]
    pub kept_bytes: u64,
    /// Bytes of its input.
    #[serde(default)]
    pub input_bytes: u64,
    /// Floating-point operations of its forward's matmuls.
    #[serde(default)]
    pub flops: f64,
    /// Those of `flops` that attention takes, which runs at a rate of its own.
    #[serde(default)]
    pub attention_flops: f64,
    /// Tokens of the rows that attention is taken over: the longer, the higher that rate. 0 where it is not known, which
    /// counts as 1,024.
    #[serde(default)]
    pub attention_row: u32,
    /// Those of `flops` that recomputation leaves out: it stops at the last tensor that backward needs, so the last
    /// matmul is not repeated.
    #[serde(default)]
    pub spared_flops: f64,
    /// Bytes of device memory that the forward's kernels other than matmuls and attention read and write.
    #[serde(default)]
    pub moved_bytes: f64,
    /// Seconds that the calling thread takes to launch the forward's kernels: no forward is shorter, however small its
    /// tensors.
    #[serde(default)]
    pub launch_s: f64,
    /// Seconds in which the forward's kernels begin and end on the device, beside what they compute and move, whoever
    /// launches them. Backward has twice as many.
    #[serde(default)]
    pub ramp_s: f64,
    /// Whether its kernels may be captured once and replayed: those of a layer that is computed in tiles are not.
    #[serde(default = "yes")]
    pub captures: bool,
    /// The layer unit before it with whose weights it computes, where it has none of its own: what follows the experts of a
    /// layer that is spread over several units is computed with the weights of what precedes them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weights_of: Option<u32>,
    /// Of a unit of experts, those of which are sent that tokens are routed to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routed: Option<Routed>,
    /// Whether its backward makes again what matmuls read of its forward, rather than finding it among what was kept.
    #[serde(default = "yes")]
    pub remakes: bool,
}

/// How a unit of experts is sent in part: every tensor of it has the experts along its first dimension.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Routed {
    /// The layer unit before it whose forward decides which experts each micro-batch needs.
    pub by: u32,
    /// How many experts it has.
    pub experts: u32,
    /// The share of them that a group of micro-batches is expected to need.
    pub share: f64,
}

const fn yes() -> bool {
    true
}

/// How much memory may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Budget {
    /// Device bytes.
    pub device: u64,
    /// Host bytes.
    pub host: u64,
    /// Bytes on disk for optimizer state, weights and layer inputs that the host has no room for.
    #[serde(default)]
    pub disk: u64,
}

/// A number of units, or whatever fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Count {
    /// As many as this.
    Units(u32),
    /// `"auto"`.
    Auto(Auto),
}

/// The word `auto`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Auto {
    /// Whatever fits.
    Auto,
}

/// Derived numbers, asked for instead.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Requests {
    /// Device weight buffers for layers, at least 1, which loads only while nothing is computed.
    pub slots: Option<u32>,
    /// Slabs that layers share, under immediate updates only.
    pub slabs: Option<u32>,
    /// Micro-batches a group; by default all of them.
    pub group: Option<u32>,
    /// Micro-batches of the large group ([`crate::plan::Groups`]), at least as many.
    pub large_group: Option<u32>,
    /// Layers whose activations are kept in the large group, where that is larger: the last ones, `keep` at most.
    pub large_keep: Option<u32>,
    /// What becomes of the layers' activations.
    pub activation: Option<Activation>,
    /// Layers whose activations are kept, the last ones.
    pub keep: Option<u32>,
    /// Layers whose activations are offloaded to the host while the others that are not kept are recomputed: spread evenly
    /// among those, so that copies have the time in which the others are computed.
    pub offload: Option<u32>,
    /// Where layer inputs wait: on the device or on the host.
    pub inputs: Option<Place>,
    /// Layers whose inputs wait on disk instead of on the host, with their activations where those are offloaded: spread evenly
    /// among those that are not kept, so that reading and writing has the time in which the others are computed.
    pub inputs_on_disk: Option<u32>,
    /// Units whose state lives on the device: `embed`, `head`, then layers in forward order.
    pub state_on_device: Option<Count>,
    /// Layers whose state lives on the host and that are updated on the device, spread evenly among those.
    pub updates_on_device: Option<Count>,
    /// Units whose state lives on disk: layers from the last one backwards, then `head` and `embed`. Those whose state is on
    /// the device, or that train nothing, are passed over.
    pub state_on_disk: Option<u32>,
    /// Units whose weights are on disk too: the first ones of those whose state is.
    pub weights_on_disk: Option<u32>,
    /// Device buffers between activations and the host, at least 2.
    pub stage_buffers: Option<u32>,
    /// Parts in which the embedding and the head are offloaded, updated and sent, in which a layer is updated on the device,
    /// and in which state on disk is read and written; by default as their size asks for.
    pub parts: Option<u32>,
    /// Whether gradients of several passes may be added before they are applied: an fp32 store on the host.
    pub accumulate: bool,
    /// Whether layers whose weights stay on the device may be captured once and replayed (CUDA graphs), where the memory
    /// is left that their activations then take a second time.
    pub graphs: bool,
}

/// Measured rates of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Rates {
    /// Host to device, 1e9 bytes a second.
    pub h2d_gbs: f64,
    /// Device to host, 1e9 bytes a second.
    pub d2h_gbs: f64,
    /// Matmuls, 1e12 floating-point operations a second.
    pub matmul_tflops: f64,
    /// The host optimizer over state as the request stores it, 1e9 parameters a second.
    pub adamw_gparams: f64,
    /// Device memory, 1e9 bytes a second.
    pub hbm_gbs: f64,
    /// State read from disk while other state is written, 1e9 bytes a second.
    pub state_read_gbs: f64,
    /// State written to disk while other state is read, 1e9 bytes a second.
    pub state_write_gbs: f64,
    /// Bytes of its own traffic that the host optimizer loses for a byte that crosses the link meanwhile: both share the
    /// host's memory. A bound takes it for nothing.
    pub link_cost: f64,
    /// What the link carries both ways together beside the host's optimizer, as a multiple of what it carries one way.
    pub both_ways: f64,
    /// Whether a unit's computing takes the time of its attention, elementwise kernels and launches too; a bound counts
    /// the floating-point operations alone.
    pub beside_matmuls: bool,
}

/// Rates of state on disk where nothing was measured: one PCIe 4 drive that reads and writes at once.
const STATE_READ_GBS: f64 = 2.5;
const STATE_WRITE_GBS: f64 = 2.0;

impl Default for Rates {
    fn default() -> Self {
        Self {
            h2d_gbs: 25.0,
            d2h_gbs: 25.0,
            matmul_tflops: 400.0,
            adamw_gparams: 3.0,
            hbm_gbs: 2500.0,
            state_read_gbs: STATE_READ_GBS,
            state_write_gbs: STATE_WRITE_GBS,
            link_cost: LINK_COST,
            both_ways: 2.0,
            beside_matmuls: false,
        }
    }
}

/// Shares of the measured rates that a whole step sustains, measured on a card: matmuls, whose clock the power limit lowers
/// and which have gaps between them (705 of 746 TFLOP/s without the gaps); the same with everything that runs between
/// matmuls, where that is not known; and a link used in both directions.
const SUSTAINED_MATMUL: f64 = 0.92;
const SUSTAINED_COMPUTE: f64 = 0.73;
const SUSTAINED_LINK: f64 = 0.9;
const SUSTAINED_HBM: f64 = 0.8;
/// [`Rates::link_cost`] where nothing was measured: of a machine whose optimizer fell from 5.0 to 3.1 G parameters/s, of 26
/// bytes each, while 90 GB/s crossed the link.
const LINK_COST: f64 = 0.55;
/// [`Rates::both_ways`] there: 65 GB/s where 0.9 times 55 are sustained one way.
const BOTH_WAYS: f64 = 1.3;

impl Rates {
    /// What a step gets of the measured rates, each of which was measured alone. `profiled`: units say what they do
    /// beside matmuls.
    #[must_use]
    pub fn sustained(&self, profiled: bool) -> Self {
        Self {
            h2d_gbs: self.h2d_gbs * SUSTAINED_LINK,
            d2h_gbs: self.d2h_gbs * SUSTAINED_LINK,
            matmul_tflops: self.matmul_tflops * if profiled { SUSTAINED_MATMUL } else { SUSTAINED_COMPUTE },
            adamw_gparams: self.adamw_gparams,
            hbm_gbs: self.hbm_gbs * SUSTAINED_HBM,
            state_read_gbs: self.state_read_gbs,
            state_write_gbs: self.state_write_gbs,
            link_cost: self.link_cost,
            both_ways: BOTH_WAYS,
            beside_matmuls: true,
        }
    }

    /// By how much `crossing` bytes of the link make an update longer that moves `own` bytes: a factor.
    pub(crate) fn contention(&self, crossing: f64, own: f64) -> f64 {
        if self.beside_matmuls { 1.0 + self.link_cost * crossing / own.max(1.0) } else { 1.0 }
    }
}

/// A model, a batch and a machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// `embed`, the layers, `head`.
    pub units: Vec<UnitRequest>,
    /// Whether the head uses the embedding's weight.
    #[serde(default)]
    pub tied: bool,
    /// How weights are stored and sent.
    pub precision: Precision,
    /// How gradients are sent.
    pub grad_precision: Precision,
    /// How the optimizer's state is stored.
    #[serde(default)]
    pub state: StateFormat,
    /// When weights change.
    #[serde(default)]
    pub update: UpdateMode,
    /// Micro-batches of a step.
    pub micro_batches: u32,
    /// Device bytes that torch needs for the passing tensors of one unit, beside all that is kept.
    #[serde(default)]
    pub workspace_bytes: u64,
    /// Device bytes that torch needs for the passing tensors of a unit whose backward comes when nothing is kept any
    /// more: a recomputed layer's (the last layers are kept, and their backward comes first) and the embedding's.
    #[serde(default)]
    pub late_workspace_bytes: u64,
    /// Device bytes that the driver's context and the libraries' workspaces take.
    #[serde(default)]
    pub context_bytes: u64,
    /// What torch's allocator holds beyond what is in use, as a share of that, and at least as much as
    /// `largest_bytes`.
    #[serde(default)]
    pub fragmentation: f64,
    /// The largest tensor that torch allocates in a layer. Its place is taken by smaller ones once it is free, and is too
    /// small then for the next such tensor as long as one of them is alive.
    #[serde(default)]
    pub largest_bytes: u64,
    /// What may be used.
    pub budget: Budget,
    /// Whether device and host share one memory, as on the CPU: then both together may use no more than `budget.host`.
    #[serde(default)]
    pub shared_memory: bool,
    /// The kind of device.
    pub device: DeviceKind,
    /// Whether all micro-batches must pass forward before the first backward, since a term of the loss is taken over the
    /// whole step.
    #[serde(default)]
    pub one_group: bool,
    /// Whether layers' gradients have fp32 sums on the device where a step is one micro-batch too, since a layer's backward
    /// adds to them several times.
    #[serde(default)]
    pub sum_layers: bool,
    /// Overrides.
    #[serde(default)]
    pub requests: Requests,
    /// Rates.
    #[serde(default)]
    pub rates: Rates,
}

impl UnitRequest {
    /// A unit whose activations have no size and whose computing takes no time; set those fields where they are known.
    #[must_use]
    pub fn new(name: impl Into<String>, role: UnitRole, tensors: Vec<TensorSpec>) -> Self {
        Self {
            name: name.into(),
            role,
            tensors,
            kept_bytes: 0,
            input_bytes: 0,
            flops: 0.0,
            attention_flops: 0.0,
            attention_row: 0,
            spared_flops: 0.0,
            moved_bytes: 0.0,
            launch_s: 0.0,
            ramp_s: 0.0,
            captures: true,
            weights_of: None,
            routed: None,
            remakes: true,
        }
    }
}

impl Request {
    /// A request that leaves every choice to the planner: just-in-time updates, nothing tied, default rates, and none of
    /// torch's memory counted. Other fields can be set afterwards.
    #[must_use]
    pub fn new(units: Vec<UnitRequest>, precision: Precision, micro_batches: u32, budget: Budget) -> Self {
        Self {
            units,
            tied: false,
            precision,
            grad_precision: precision,
            state: StateFormat::default(),
            update: UpdateMode::default(),
            micro_batches,
            workspace_bytes: 0,
            late_workspace_bytes: 0,
            context_bytes: 0,
            fragmentation: 0.0,
            largest_bytes: 0,
            budget,
            shared_memory: false,
            device: DeviceKind::Cpu,
            one_group: false,
            sum_layers: false,
            requests: Requests::default(),
            rates: Rates::default(),
        }
    }

    /// Reads a request from JSON.
    ///
    /// # Errors
    /// [`Error`] with what is wrong and where.
    pub fn from_json(text: &str) -> Result<Self> {
        serde_json::from_str(text).map_err(|source| Error::Json { what: "plan request", source })
    }

    /// The rates that a whole step of this model sustains.
    #[must_use]
    pub fn sustained_rates(&self) -> Rates {
        self.rates.sustained(self.units.iter().any(|unit| unit.moved_bytes > 0.0))
    }

    /// The decoder layers: units 1 to this.
    #[must_use]
    pub fn num_layers(&self) -> usize {
        self.units.len().saturating_sub(2)
    }

    /// The layouts of all units; they follow from the units, their precision and the format of state alone.
    ///
    /// # Errors
    /// As [`UnitLayout::new`].
    pub fn layouts(&self) -> Result<Arc<[UnitLayout]>> {
        let layout = |u: &UnitRequest| UnitLayout::new(u.name.as_str(), u.tensors.clone(), self.precision);
        self.units.iter().map(|u| Ok(layout(u)?.with_state(self.state))).collect()
    }

    /// Refuses a request that contradicts itself.
    ///
    /// # Errors
    /// [`Error`] naming the key and its value.
    pub fn check(&self) -> Result<()> {
        let layers = self.num_layers();
        if layers == 0 {
            return Err(Error::TooFewUnits { given: self.units.len() });
        }
        let mut names = HashSet::new();
        for (index, unit) in self.units.iter().enumerate() {
            let role = match index {
                0 => UnitRole::Embed,
                i if i == layers + 1 => UnitRole::Head,
                _ => UnitRole::Layer,
            };
            if unit.role != role {
                let (expected, got) = (role.name(), unit.role.name());
                return Err(Error::WrongRole { index, unit: unit.name.clone(), expected, got });
            }
            if !names.insert(unit.name.as_str()) {
                return Err(Error::DuplicateUnit { unit: unit.name.clone() });
            }
            if let Some(holder) = unit.weights_of {
                let earlier = self.units.get(holder as usize).filter(|_| holder > 0 && (holder as usize) < index);
                if !unit.tensors.is_empty()
                    || unit.role != UnitRole::Layer
                    || earlier.is_none_or(|u| u.weights_of.is_some())
                {
                    return Err(Error::WeightsOf { unit: unit.name.clone(), holder });
                }
            }
            if let Some(Routed { by, experts, share }) = unit.routed {
                let earlier = self.units.get(by as usize).filter(|_| by > 0 && (by as usize) < index);
                let divided = unit.tensors.iter().all(|t| t.shape.first() == Some(&u64::from(experts)));
                if unit.role != UnitRole::Layer || earlier.is_none_or(|u| u.routed.is_some()) || !divided {
                    return Err(Error::Routed { unit: unit.name.clone(), by, experts });
                }
                if !(share > 0.0 && share <= 1.0) {
                    let what = format!("unit {}: share", unit.name);
                    return Err(Error::WrongNumber { what, value: share, allowed: "above 0 and at most 1" });
                }
            }
            let numbers = [
                ("flops", unit.flops),
                ("attention_flops", unit.attention_flops),
                ("spared_flops", unit.spared_flops),
                ("moved_bytes", unit.moved_bytes),
                ("launch_s", unit.launch_s),
                ("ramp_s", unit.ramp_s),
            ];
            if let Some((name, value)) = numbers.into_iter().find(|(_, value)| !value.is_finite() || *value < 0.0) {
                let what = format!("unit {}: {name}", unit.name);
                return Err(Error::WrongNumber { what, value, allowed: "finite and at least 0" });
            }
            if unit.attention_flops + unit.spared_flops > unit.flops {
                let what = format!("unit {}: attention_flops and spared_flops", unit.name);
                let value = unit.attention_flops + unit.spared_flops;
                return Err(Error::WrongNumber { what, value, allowed: "at most its flops" });
            }
        }
        let trainable = |t: &TensorSpec| t.role == Role::Trainable;
        if !self.units.iter().any(|u| u.tensors.iter().any(trainable)) {
            return Err(Error::NothingToTrain);
        }
        if self.micro_batches == 0 {
            return Err(at_least("micro_batches", 1, 0, ""));
        }
        let (micro_batches, units) = (self.micro_batches, self.units.len());
        if u64::from(micro_batches).saturating_mul(units as u64) > MOST_COMPUTATIONS {
            return Err(Error::TooManyOperations { micro_batches, units, most: MOST_COMPUTATIONS });
        }
        at_most("workspace_bytes", self.workspace_bytes, MOST_BYTES)?;
        at_most("largest_bytes", self.largest_bytes, MOST_BYTES)?;
        at_most("late_workspace_bytes", self.late_workspace_bytes, MOST_BYTES)?;
        at_most("context_bytes", self.context_bytes, MOST_BYTES)?;
        for unit in &self.units {
            at_most("kept_bytes", unit.kept_bytes, MOST_BYTES)?;
            at_most("input_bytes", unit.input_bytes, MOST_BYTES)?;
        }
        if !(0.0..=1.0).contains(&self.fragmentation) {
            let (what, value) = ("fragmentation".to_owned(), self.fragmentation);
            return Err(Error::WrongNumber { what, value, allowed: "a share between 0 and 1" });
        }
        if self.precision == Precision::Fp32 && self.grad_precision == Precision::Bf16 {
            return Err(Error::GradPrecision);
        }
        if self.precision == Precision::Fp32 && self.state.master == Master::Bits24 {
            return Err(Error::MasterPrecision);
        }
        for (name, rate) in [
            ("h2d_gbs", self.rates.h2d_gbs),
            ("d2h_gbs", self.rates.d2h_gbs),
            ("matmul_tflops", self.rates.matmul_tflops),
            ("adamw_gparams", self.rates.adamw_gparams),
            ("hbm_gbs", self.rates.hbm_gbs),
            ("state_read_gbs", self.rates.state_read_gbs),
            ("state_write_gbs", self.rates.state_write_gbs),
        ] {
            if !(rate.is_finite() && rate > 0.0) {
                let what = format!("rates.{name}");
                return Err(Error::WrongNumber { what, value: rate, allowed: "a positive number" });
            }
        }
        if !(self.rates.link_cost.is_finite() && self.rates.link_cost >= 0.0) {
            let (what, value) = ("rates.link_cost".to_owned(), self.rates.link_cost);
            return Err(Error::WrongNumber { what, value, allowed: "finite and at least 0" });
        }
        self.check_requests(layers)
    }

    fn check_requests(&self, layers: usize) -> Result<()> {
        let r = &self.requests;
        if r.slots == Some(0) {
            return Err(at_least("plan.slots", 1, 0, ""));
        }
        if let Some(buffers) = r.stage_buffers.filter(|&s| s < 2) {
            return Err(at_least("plan.stage_buffers", 2, buffers, "one is filled while one is emptied"));
        }
        if r.parts == Some(0) {
            return Err(at_least("plan.parts", 1, 0, ""));
        }
        at_most("plan.parts", r.parts.unwrap_or(0).into(), MOST_BUFFERS.into())?;
        at_most("plan.stage_buffers", r.stage_buffers.unwrap_or(0).into(), MOST_BUFFERS.into())?;
        if let Some(slabs) = r.slabs {
            if self.update == UpdateMode::JustInTime {
                return Err(Error::SlabsJustInTime { slabs });
            }
            if slabs == 0 {
                return Err(at_least("plan.slabs", 1, 0, ""));
            }
        }
        if let Some(group) = r.group
            && (group == 0 || group > self.micro_batches)
        {
            return Err(Error::GroupOutOfRange { value: group, micro_batches: self.micro_batches });
        }
        if let Some(large) = r.large_group {
            let least = r.group.unwrap_or(1).max(1);
            if !(least..=self.micro_batches).contains(&large) {
                return Err(Error::LargeGroupOutOfRange { value: large, least, micro_batches: self.micro_batches });
            }
        }
        if let (Some(large), keep) = (r.large_keep, r.keep.map_or(layers, |keep| keep as usize))
            && large as usize > keep
        {
            let of = if r.keep.is_some() { "units that plan.keep counts" } else { "units of layers" };
            return Err(exceeds("plan.large_keep", large, keep, of));
        }
        if let Some(keep) = r.keep {
            if keep as usize > layers {
                return Err(exceeds("plan.keep", keep, layers, "units of layers"));
            }
            match r.activation {
                Some(Activation::Keep) if keep as usize != layers => {
                    return Err(contradicts("plan.keep", keep, "keeping the activations of all layers"));
                }
                Some(Activation::Recompute) if keep != 0 => {
                    return Err(contradicts("plan.keep", keep, "recomputing every layer"));
                }
                _ => {}
            }
        }
        self.check_offload(layers)?;
        self.check_inputs(layers)?;
        if let Some(Count::Units(count)) = r.state_on_device {
            if count as usize > self.units.len() {
                return Err(exceeds("plan.state_on_device", count, self.units.len(), "units"));
            }
            if r.accumulate && count > 0 {
                let other = "accumulating gradients over passes, whose store is on the host";
                return Err(contradicts("plan.state_on_device", count, other));
            }
        }
        if let Some(count) = r.state_on_disk
            && count as usize > self.units.len()
        {
            return Err(exceeds("plan.state_on_disk", count, self.units.len(), "units"));
        }
        if let (Some(weights), Some(state)) = (r.weights_on_disk, r.state_on_disk)
            && weights > state
        {
            return Err(contradicts("plan.weights_on_disk", weights, "plan.state_on_disk, which is less"));
        }
        if let Some(count) = r.weights_on_disk
            && count as usize > self.units.len()
        {
            return Err(exceeds("plan.weights_on_disk", count, self.units.len(), "units"));
        }
        if r.state_on_disk.or(r.weights_on_disk).is_some_and(|count| count > 0)
            && matches!(r.updates_on_device, Some(Count::Units(count)) if count > 0)
        {
            let other = "plan.updates_on_device, whose state lives on the host";
            let (setting, count) = match (r.state_on_disk, r.weights_on_disk) {
                (Some(count), _) => ("plan.state_on_disk", count),
                (None, count) => ("plan.weights_on_disk", count.unwrap_or(0)),
            };
            return Err(contradicts(setting, count, other));
        }
        if let Some(Count::Units(count)) = r.updates_on_device {
            if count as usize > layers {
                return Err(exceeds("plan.updates_on_device", count, layers, "units of layers"));
            }
            if r.accumulate && count > 0 {
                let other = "accumulating gradients over passes, whose store only the host's optimizer reads";
                return Err(contradicts("plan.updates_on_device", count, other));
            }
        }
        if r.accumulate && self.update == UpdateMode::Immediate {
            return Err(Error::ImmediateAccumulation);
        }
        Ok(())
    }

    fn check_offload(&self, layers: usize) -> Result<()> {
        let r = &self.requests;
        let Some(offload) = r.offload else { return Ok(()) };
        if r.activation.is_some() {
            return Err(contradicts("plan.offload", offload, "plan.activation, which is about all layers"));
        }
        let left = layers - self.least_kept(layers);
        if offload as usize > left {
            return Err(exceeds("plan.offload", offload, left, "units of layers that are not kept"));
        }
        Ok(())
    }

    /// Layers that are kept whatever is chosen: fewer may be in a large group.
    fn least_kept(&self, layers: usize) -> usize {
        let r = &self.requests;
        if r.large_group.is_some() {
            return r.large_keep.map_or(0, |keep| keep as usize);
        }
        match r.activation {
            Some(Activation::Keep) => layers,
            _ => r.keep.map_or(0, |keep| keep as usize),
        }
    }

    fn check_inputs(&self, layers: usize) -> Result<()> {
        let r = &self.requests;
        if r.inputs == Some(Place::Disk) {
            return Err(Error::InputsPlace);
        }
        let Some(count) = r.inputs_on_disk.filter(|&count| count > 0) else { return Ok(()) };
        if r.inputs == Some(Place::Device) {
            return Err(contradicts(
                "plan.inputs_on_disk",
                count,
                "plan.inputs, by which all of them wait on the device",
            ));
        }
        let kept = self.least_kept(layers);
        if count as usize > layers - kept {
            return Err(exceeds("plan.inputs_on_disk", count, layers - kept, "units of layers that are not kept"));
        }
        Ok(())
    }
}
