//! A plan: what becomes of every unit, how many buffers there are, and every line of the sum.
use serde::{Deserialize, Serialize};

use super::{Groups, Placement, Request, UnitRequest};
use crate::error::{Error, Item, Result, Tier};

/// Where a unit's weights, residual and moments live between steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum State {
    /// On the host; its weights are sent to the device when they are needed, and updated by the host's optimizer.
    Host,
    /// Residual and moments on disk, from which they are read part by part to be updated by the host's optimizer; weights on
    /// the host, or on disk too ([`UnitPlan::weights_on_disk`]).
    Disk,
    /// On the device for good, and updated there.
    Device,
}

/// What becomes of the tensors that a unit's backward needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Activation {
    /// They stay on the device.
    Keep,
    /// They go to the host and come back.
    Offload,
    /// They are computed again from the unit's input.
    Recompute,
}

/// Where a unit's input waits for backward, or where a unit is updated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Place {
    /// On the device.
    Device,
    /// On the host.
    Host,
    /// On disk, through buffers of the host's. (No unit is updated there.)
    Disk,
}

/// What the plan says of one unit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct UnitPlan {
    /// Its name.
    pub name: String,
    /// Where its state lives.
    pub state: State,
    /// What becomes of its activations.
    pub activation: Activation,
    /// What becomes of them in the large group of micro-batches, where that is something else.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub large_activation: Option<Activation>,
    /// Where its input waits, of micro-batches whose activations are not kept. On disk, activations that are offloaded wait
    /// with it.
    pub input: Place,
    /// Where it is updated: where its state lives, or on the device, through which its state then passes.
    pub update: Place,
    /// Whether the weights of a unit whose state lives on disk are there too, from which they are read each time that they are
    /// sent to the device.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub weights_on_disk: bool,
}

impl UnitPlan {
    /// What becomes of the activations of a micro-batch that is in the large group, or in another one.
    #[must_use]
    pub fn activation_in(&self, large_group: bool) -> Activation {
        self.large_activation.filter(|_| large_group).unwrap_or(self.activation)
    }

    /// Where the input of such a micro-batch waits: with what is kept, or where the plan says.
    #[must_use]
    pub fn input_in(&self, large_group: bool) -> Place {
        if self.activation_in(large_group) == Activation::Keep { Place::Device } else { self.input }
    }

    /// Whether its state lives on the host and is copied to the device to be updated.
    #[must_use]
    pub fn needs_device_update(&self) -> bool {
        self.state == State::Host && self.update == Place::Device
    }

    /// Whether every step finds what a layer computes with where the step before did: its weights stay on the device, and
    /// nothing that it saves goes to the host.
    #[must_use]
    pub fn can_be_captured(&self, unit: &UnitRequest) -> bool {
        let same = self.large_activation.is_none();
        unit.captures
            && self.state == State::Device
            && same
            && self.activation != Activation::Offload
            && self.input == Place::Device
    }
}

/// Bytes by tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Totals {
    /// Device bytes.
    pub device: u64,
    /// Host bytes.
    pub host: u64,
    /// Bytes on disk.
    #[serde(default)]
    pub disk: u64,
}

/// The step time that the rates predict, from [`crate::estimate`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Forecast {
    /// Seconds a step in steady state, at the measured rates: no step can be faster.
    pub step_s: f64,
    /// Seconds a step at the rates that a whole step sustains ([`super::Rates::sustained`]): what to expect.
    #[serde(default)]
    pub expected_step_s: f64,
    /// The busiest lane.
    pub bound: String,
    /// Seconds busy, by lane.
    pub lanes: std::collections::BTreeMap<String, f64>,
    /// Seconds busy, by lane, at the rates that a whole step sustains: what a run's lanes are compared with.
    #[serde(default)]
    pub expected_lanes: std::collections::BTreeMap<String, f64>,
    /// Bytes that a step reads from disk: state, layer inputs, and weights that are there too each time that they are sent.
    #[serde(default)]
    pub disk_read: u64,
    /// Bytes that a step writes to disk: state with its weights, and layer inputs.
    #[serde(default)]
    pub disk_written: u64,
}

/// Placement, order and sizes of everything. Changes nothing about the numbers of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Plan {
    /// Unit by unit.
    pub units: Vec<UnitPlan>,
    /// Device weight buffers that layers with state on the host share.
    pub slots: u32,
    /// Slabs on the host that layers share (immediate updates), or one for each layer whose state is there.
    pub slabs: u32,
    /// Device gradient buffers that layers with state on the host share.
    pub grad_buffers: u32,
    /// Device buffers through which activations pass to the host and back.
    pub stage_buffers: u32,
    /// Bytes of one of them.
    pub stage_bytes: u64,
    /// Device buffers through which state passes that lives on the host and is updated on the device.
    #[serde(rename = "visit_buffers")]
    pub state_buffers: u32,
    /// Host buffers through which state passes that lives on disk.
    #[serde(default)]
    pub disk_buffers: u32,
    /// Host buffers through which weights on disk are sent to the device.
    #[serde(default)]
    pub weight_buffers: u32,
    /// Host buffers through which inputs that wait on disk go there and come back.
    #[serde(default)]
    pub input_buffers: u32,
    /// Micro-batches that pass through a unit before the next unit is loaded.
    pub group: u32,
    /// As many of the large group, where one is larger than the others; else 0.
    #[serde(default)]
    pub large_group: u32,
    /// The micro-batch that the large group begins with.
    #[serde(default)]
    pub large_begin: u32,
    /// Micro-batches of a step, at most.
    pub micro_batches: u32,
    /// Whether layers whose weights stay on the device are captured once and replayed.
    #[serde(default)]
    pub graphs: bool,
    /// Every line of the sum.
    pub items: Vec<Item>,
    /// The sums.
    pub totals: Totals,
    /// What the rates predict.
    #[serde(default)]
    pub estimate: Forecast,
}

impl Plan {
    /// How the micro-batches of a step are divided.
    #[must_use]
    pub fn groups(&self) -> Groups {
        Groups::new(self.large_begin, self.large_group, self.group)
    }

    /// The totals of `items`.
    #[must_use]
    pub fn sum(items: &[Item]) -> Totals {
        let of = |tier: Tier| {
            items.iter().filter(|i| i.tier == tier).fold(0, |sum: u64, item| sum.saturating_add(item.bytes))
        };
        Totals { device: of(Tier::Device), host: of(Tier::Host), disk: of(Tier::Disk) }
    }

    /// Refuses a plan that was not made for this request.
    ///
    /// # Errors
    /// [`Error`] naming the first difference.
    pub fn matches(&self, request: &Request) -> Result<()> {
        let differs =
            |what: &'static str, plan: String, request: String| Err(Error::PlanMismatch { what, plan, request });
        if self.units.len() != request.units.len() {
            return differs("the number of units", self.units.len().to_string(), request.units.len().to_string());
        }
        for (plan, unit) in self.units.iter().zip(&request.units) {
            if plan.name != unit.name {
                return differs("a unit", plan.name.clone(), unit.name.clone());
            }
        }
        if self.micro_batches != request.micro_batches {
            return differs("micro_batches", self.micro_batches.to_string(), request.micro_batches.to_string());
        }
        let placement = Placement::new(request, self)?;
        if placement.items() != self.items {
            return differs("the sum of its items", format!("{:?}", self.totals), format!("{:?}", placement.totals()));
        }
        Ok(())
    }
}
