//! The order of a step, as data: a list of operations with what each depends on, made by a pure function.
//!
//! The list is written in program order: running it one operation at a time from top to bottom is correct. What may
//! overlap follows from the dependencies, which are derived from what each operation reads and writes
//! (`schedule/hazards.rs`): a reader depends on the last writer, a writer on everyone who read what it overwrites. The engine
//! runs on each lane the ready operation of lowest priority number and decides nothing else.
//!
//! A dependency is an *edge* of one of two kinds. Between operations on the device, `issued`: the earlier one has been
//! queued, and the later one's stream waits for its event. Where the host takes part, `complete`: the earlier one is
//! known to be over. Dependencies marked `prior` refer to the pass before this one, whose offloads and updates may
//! still be under way.
use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub use self::check::check;
use self::hazards::Tracker;
pub use self::inputs::ScheduleInputs;
use crate::error::Result;

mod build;
mod check;
mod hazards;
mod inputs;
#[cfg(all(loom, test))]
mod interleavings;
pub(crate) mod progress;
mod slots;

/// What an operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Kind {
    /// Copies a unit's image from the host to its place on the device.
    Load,
    /// Computes what comes before the first layer.
    Embed,
    /// Computes a layer.
    Forward,
    /// Computes the head and the loss, and their backward.
    Loss,
    /// Computes a layer's backward.
    Backward,
    /// Computes the embedding's backward.
    EmbedBackward,
    /// Copies a micro-batch's staged activations to the host.
    OffloadActivation,
    /// Copies them back to the device.
    FetchActivation,
    /// Writes what was copied to the host to disk.
    WriteInput,
    /// Reads it from there again.
    ReadInput,
    /// Sums the squares of a unit's gradient and copies it to its slab.
    OffloadGrad,
    /// Adds an offloaded gradient to the fp32 store.
    AccumulateGrad,
    /// The norm is known; the caller decides how to clip, or to skip the step.
    ClipDecision,
    /// Copies the state and the gradient of a part of a unit from the host to a state buffer.
    FetchState,
    /// Reads the state of a part of a unit from disk into a host buffer.
    ReadState,
    /// Reads a unit's image from disk into a host buffer, from which it is loaded.
    ReadWeights,
    /// Updates a unit's weights.
    Update,
    /// Writes the state of a part of a unit back to disk.
    WriteState,
    /// Copies the state back from its state buffer.
    WriteBackState,
    /// Appends a unit's state to the files of a checkpoint.
    WriteCheckpoint,
}

impl Kind {
    /// Its name in traces and errors.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Load => "load",
            Self::Embed => "embed",
            Self::Forward => "forward",
            Self::Loss => "loss",
            Self::Backward => "backward",
            Self::EmbedBackward => "embed_backward",
            Self::OffloadActivation => "offload_activation",
            Self::FetchActivation => "fetch_activation",
            Self::WriteInput => "write_input",
            Self::ReadInput => "read_input",
            Self::OffloadGrad => "offload_grad",
            Self::AccumulateGrad => "accumulate_grad",
            Self::ClipDecision => "clip_decision",
            Self::FetchState => "fetch_state",
            Self::ReadState => "read_state",
            Self::ReadWeights => "read_weights",
            Self::Update => "update",
            Self::WriteState => "write_state",
            Self::WriteBackState => "write_back_state",
            Self::WriteCheckpoint => "write_checkpoint",
        }
    }
}

/// Where an operation is issued, in order of priority.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Lane {
    /// The caller computes, on the compute stream.
    Compute,
    /// Host to device copies.
    Upload,
    /// Device to host copies.
    Download,
    /// The host's optimizer.
    Host,
    /// Updates on the device, and the write-back of state that was fetched for that.
    Update,
    /// The caller's decision.
    Caller,
    /// Files of checkpoints.
    Disk,
    /// State read from disk to be updated, weights to be loaded, and layer inputs for backward.
    #[serde(rename = "state_read")]
    StateRead,
    /// State written back to disk, and layer inputs that wait there.
    #[serde(rename = "state_write")]
    StateWrite,
}

impl Lane {
    /// Every lane.
    pub const ALL: [Self; 9] = [
        Self::Compute,
        Self::Upload,
        Self::Download,
        Self::Host,
        Self::Update,
        Self::Caller,
        Self::Disk,
        Self::StateRead,
        Self::StateWrite,
    ];
    /// How many there are.
    pub const COUNT: usize = Self::ALL.len();

    /// Whether its operations are queued on a stream of the device.
    #[must_use]
    pub const fn on_device(self) -> bool {
        !matches!(self, Self::Host | Self::Caller | Self::Disk | Self::StateRead | Self::StateWrite)
    }

    /// Whether every training pass has operations on it, whatever the plan.
    pub(crate) const fn always_used(self) -> bool {
        !matches!(self, Self::Disk | Self::StateRead | Self::StateWrite)
    }

    /// Whether its operations move optimizer state, weights or layer inputs between disk and host.
    #[must_use]
    pub const fn moves_state_on_disk(self) -> bool {
        matches!(self, Self::StateRead | Self::StateWrite)
    }

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Upload => "upload",
            Self::Download => "download",
            Self::Host => "host",
            Self::Update => "update",
            Self::Caller => "caller",
            Self::Disk => "disk",
            Self::StateRead => "state_read",
            Self::StateWrite => "state_write",
        }
    }
}

/// A priority number from here on says what is wanted for the pass after this one: less what is here, it stands among
/// that pass's numbers.
pub(crate) const NEXT_PASS: u32 = u32::MAX / 2;

/// What must have happened to the earlier operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Edge {
    /// It has been queued; the later one's stream waits for its event.
    Issued,
    /// It is over.
    Complete,
}

/// A dependency.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Dep {
    /// The earlier operation.
    pub op: u32,
    /// What must have happened to it.
    pub edge: Edge,
    /// Whether it belongs to the pass before this one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub prior: bool,
}

/// One operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Op {
    /// Its position in the list.
    pub id: u32,
    /// What it does.
    pub kind: Kind,
    /// To which unit.
    pub unit: u32,
    /// For which micro-batch; 0 where none is meant.
    pub micro_batch: u32,
    /// Which part of the unit is offloaded, updated or sent; of a device update, and of state on disk, which of the parts in
    /// which its state comes and goes.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub part: u32,
    /// Whether only those rows of the embedding are meant that the step does not look up: their gradients are final
    /// before backward begins.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub early: bool,
    /// Where it is issued.
    pub lane: Lane,
    /// Ready operations of a lane are issued lowest number first.
    pub priority: u32,
    /// The slot that holds the unit's image; `None` where the unit has a place of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot: Option<u32>,
    /// The gradient buffer, an index into the placement's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grad: Option<u32>,
    /// The slab, an index into the placement's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slab: Option<u32>,
    /// The staging buffer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stage: Option<u32>,
    /// The state buffers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_buffer: Option<u32>,
    /// The host buffer for state on disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_buffer: Option<u32>,
    /// The host buffer for weights on disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_buffer: Option<u32>,
    /// The host buffer for inputs that wait on disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input_buffer: Option<u32>,
    /// What must have happened before.
    pub deps: Vec<Dep>,
}

impl Op {
    /// An operation that uses no buffer and depends on nothing yet.
    #[must_use]
    pub const fn new(id: u32, kind: Kind, unit: u32, lane: Lane) -> Self {
        Self {
            id,
            kind,
            unit,
            micro_batch: 0,
            part: 0,
            early: false,
            lane,
            priority: 0,
            slot: None,
            grad: None,
            slab: None,
            stage: None,
            state_buffer: None,
            disk_buffer: None,
            weight_buffer: None,
            input_buffer: None,
            deps: Vec::new(),
        }
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes what it may skip by reference")]
const fn is_zero(part: &u32) -> bool {
    *part == 0
}

/// What a pass is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Pass {
    /// Forward, backward, update.
    Train,
    /// Forward and loss.
    Eval,
    /// No more than what is written to disk: for state that no other pass carries there.
    Write,
}

/// What distinguishes one pass from another under one plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Shape {
    /// What it is for.
    pub pass: Pass,
    /// Its micro-batches, at most the plan's; none where it only writes.
    pub micro_batches: u32,
    /// Whether it carries a checkpoint to disk: each unit's state as the passes before have left it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub writes: bool,
}

impl Shape {
    /// A pass that writes nothing.
    #[must_use]
    pub const fn new(pass: Pass, micro_batches: u32) -> Self {
        Self { pass, micro_batches, writes: false }
    }
}

/// A unit whose weights are on the device as they are on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Resident {
    /// The unit.
    pub unit: u32,
    /// The slot that holds it; `None` where it has a place of its own.
    pub slot: Option<u32>,
}

/// The order of one pass.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Schedule {
    /// What it was made for.
    pub shape: Shape,
    /// Units that the passes before have left on the device and that need not be loaded.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub resident: Vec<Resident>,
    /// The operations, in program order.
    pub ops: Vec<Op>,
}

impl Schedule {
    /// The order of a pass of `shape` that follows `previous`, whose offloads and updates may still be under way, when
    /// `resident` units are on the device already: all or some of what [`Schedule::leaves`] returned for `previous`.
    ///
    /// # Errors
    /// [`crate::Error`] when the shape has no micro-batch or more than the plan, or only writes and has some.
    pub fn new(inputs: &ScheduleInputs, shape: Shape, previous: Option<&Self>, resident: &[Resident]) -> Result<Self> {
        let tracker = previous.map_or_else(Tracker::default, |p| Tracker::after(inputs, p.shape, &p.ops));
        Ok(build::build(inputs, shape, tracker, resident)?.0)
    }

    /// Steady state: two passes of the same shape that follow one of that shape, the second made to follow the first.
    /// Both have the same operations.
    ///
    /// # Errors
    /// As for [`Schedule::new`].
    pub fn steady(inputs: &ScheduleInputs, shape: Shape) -> Result<(Arc<Self>, Arc<Self>)> {
        let (start, tracker) = build::build(inputs, shape, Tracker::default(), &[])?;
        let (first, tracker) = build::build(inputs, shape, tracker.into_after(), &start.leaves(inputs))?;
        let (second, _) = build::build(inputs, shape, tracker.into_after(), &first.leaves(inputs))?;
        Ok((Arc::new(first), Arc::new(second)))
    }

    /// Units whose weights need not be loaded again after this pass: those that it has not updated, that are there in
    /// whole, and that the next one would not evict. With fewer slots than layers, others have taken a layer's slot by the time it is used again, and
    /// keeping some back would leave too few slots to load ahead.
    #[must_use]
    pub fn leaves(&self, inputs: &ScheduleInputs) -> Vec<Resident> {
        let mut places: std::collections::BTreeMap<(u32, Option<u32>), u32> = std::collections::BTreeMap::new();
        let place = |unit: u32, slot: Option<u32>| (if slot.is_some() { 0 } else { unit }, slot);
        for held in &self.resident {
            places.insert(place(held.unit, held.slot), held.unit);
        }
        for op in self.ops.iter().filter(|op| op.kind == Kind::Load && op.part == 0) {
            places.insert(place(op.unit, op.slot), op.unit);
        }
        let updates = self.ops.iter().filter(|op| op.kind == Kind::Update).map(|op| op.unit);
        let in_part = (0u32..).zip(&inputs.units).filter(|(_, u)| u.routed_by.is_some()).map(|(unit, _)| unit);
        let reloaded: std::collections::HashSet<u32> = updates.chain(in_part).collect();
        let all_in_slots = inputs.units.iter().filter(|u| !u.own_place).count() <= inputs.slots as usize;
        let kept = places
            .into_iter()
            .filter(|&((_, slot), unit)| !reloaded.contains(&unit) && (slot.is_none() || all_in_slots));
        let mut resident: Vec<Resident> = kept.map(|((_, slot), unit)| Resident { unit, slot }).collect();
        resident.sort_unstable();
        resident
    }
}
