//! What a schedule depends on, and no more: counts and flags of a plan.
use std::collections::HashSet;

use crate::error::Result;
use crate::plan::{Groups, Placement, Plan, Request, Staged, State, UpdateMode};

/// The part of a plan that decides order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScheduleInputs {
    /// Unit by unit.
    pub units: Vec<UnitInputs>,
    /// Device weight buffers.
    pub slots: u32,
    /// Shared gradient buffers, as indices into the placement's.
    pub shared_grads: Vec<u32>,
    /// Shared slabs.
    pub shared_slabs: Vec<u32>,
    /// Staging buffers.
    pub stage_buffers: u32,
    /// State buffers.
    pub state_buffers: u32,
    /// Host buffers for state on disk.
    pub disk_buffers: u32,
    /// Host buffers for weights on disk.
    pub weight_buffers: u32,
    /// Host buffers for inputs that wait on disk.
    pub input_buffers: u32,
    /// How micro-batches are divided.
    pub groups: Groups,
    /// Micro-batches at most.
    pub micro_batches: u32,
    /// Whether each unit is updated as soon as its gradient has been offloaded.
    pub immediate: bool,
    /// Whether the head uses the embedding's weight.
    pub tied: bool,
    /// Whether gradients are accumulated in an fp32 store.
    pub accumulate: bool,
    /// Whether the embedding's rows that a step does not look up are updated while its layers run backward.
    pub early: bool,
}

/// One unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnitInputs {
    /// Whether it has anything to train.
    pub trains: bool,
    /// Whether its state lives on the device.
    pub on_device: bool,
    /// Whether it has a place of its own on the device.
    pub own_place: bool,
    /// Parts in which it is offloaded, updated and sent.
    pub parts: u32,
    /// Parts in which it is updated on the device while its state lives on the host; 0 where the host updates it.
    pub device_update_parts: u32,
    /// Parts in which its state is read from disk, updated by the host and written back; 0 where its home is elsewhere.
    pub disk_parts: u32,
    /// Whether its weights are on disk with its state, and are read from there to be loaded.
    pub weights_on_disk: bool,
    /// Its own gradient buffer.
    pub own_grad: Option<u32>,
    /// Its own slab.
    pub own_slab: Option<u32>,
    /// Whether its sum over micro-batches has a place of its own, so that only the last one writes the gradient buffer.
    pub sums_apart: bool,
    /// What of activations and inputs goes to the host, or to disk.
    pub staged: Staged,
    /// The unit with whose weights it is computed, where it has none.
    pub weights_of: Option<u32>,
    /// The unit whose forward decides which of its weights are sent, where that is not all of them.
    pub routed_by: Option<u32>,
    /// Whether its forward decides that of others.
    pub routes: bool,
}

impl ScheduleInputs {
    /// The inputs of a plan.
    ///
    /// # Errors
    /// As for [`Placement::new`].
    pub fn new(request: &Request, plan: &Plan) -> Result<Self> {
        Ok(Self::from_placement(request, plan, &Placement::new(request, plan)?))
    }

    /// The inputs of a plan that has been placed.
    #[must_use]
    pub fn from_placement(request: &Request, plan: &Plan, placement: &Placement) -> Self {
        let routing: HashSet<u32> = request.units.iter().filter_map(|unit| Some(unit.routed?.by)).collect();
        let unit = |u: usize| UnitInputs {
            trains: placement.trains(u),
            on_device: plan.units[u].state == State::Device,
            own_place: placement.own[u].is_some(),
            parts: u32::try_from(placement.parts[u].len()).expect("fewer parts than 2^32"),
            device_update_parts: u32::try_from(placement.device_update_parts[u].len()).expect("fewer parts than 2^32"),
            disk_parts: u32::try_from(placement.disk_parts[u].len()).expect("fewer parts than 2^32"),
            weights_on_disk: placement.weights_on_disk[u],
            own_grad: placement.own_grad[u],
            own_slab: placement.own_slab[u],
            sums_apart: placement.accumulator[u].is_some(),
            staged: placement.staged[u],
            weights_of: request.units[u].weights_of,
            routed_by: request.units[u].routed.map(|routed| routed.by),
            routes: routing.contains(&(u as u32)),
        };
        Self {
            units: (0..plan.units.len()).map(unit).collect(),
            slots: plan.slots,
            shared_grads: placement.shared_grads.clone(),
            shared_slabs: placement.shared_slabs.clone(),
            stage_buffers: plan.stage_buffers,
            state_buffers: plan.state_buffers,
            disk_buffers: plan.disk_buffers,
            weight_buffers: plan.weight_buffers,
            input_buffers: plan.input_buffers,
            groups: plan.groups(),
            micro_batches: plan.micro_batches,
            immediate: request.update == UpdateMode::Immediate,
            tied: request.tied,
            accumulate: request.requests.accumulate,
            early: request.update == UpdateMode::Immediate && placement.trains(0) && plan.units[0].state == State::Host,
        }
    }

    /// Index of the head.
    #[must_use]
    pub fn head(&self) -> u32 {
        u32::try_from(self.units.len() - 1).expect("fewer units than 2^32")
    }

    /// The unit with whose weights a unit is computed: itself, or the one that it has them of.
    pub(crate) fn holder(&self, unit: u32) -> u32 {
        self.unit(unit).weights_of.unwrap_or(unit)
    }

    /// What of a unit's weights is on the device while a micro-batch is computed: of one that is sent in part, what the group
    /// of micro-batches that begins with this one needs; of all others everything, which is 0.
    pub(super) fn sent(&self, unit: u32, micro_batch: u32) -> u32 {
        if self.unit(unit).routed_by.is_some() { self.groups.start(micro_batch) } else { 0 }
    }

    pub(crate) fn unit(&self, unit: u32) -> &UnitInputs {
        &self.units[unit as usize]
    }
}

impl UnitInputs {
    /// Parts in which it is updated.
    pub(super) fn update_parts(&self) -> u32 {
        if self.updated_apart() { self.device_update_parts.max(self.disk_parts) } else { self.parts }
    }

    /// Whether it is updated in other parts than it is offloaded and sent in: those in which its state comes and goes.
    pub(super) fn updated_apart(&self) -> bool {
        self.device_update_parts > 0 || self.disk_parts > 0
    }

    /// Whether it is updated on the device, wherever its state lives.
    pub(super) fn updated_on_device(&self) -> bool {
        self.on_device || self.device_update_parts > 0
    }
}
