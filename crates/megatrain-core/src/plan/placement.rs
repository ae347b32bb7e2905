//! The place of everything: the one computation of sizes and offsets that plan, schedule and engine share.
use std::ops::Range;
use std::sync::Arc;

use super::{Plan, Totals};
use crate::error::Item;
use crate::layout::{Precision, UnitLayout};
use crate::store::spill::{state_bytes, weights_bytes};

pub(crate) use self::build::TRANSFER_WINDOW;
pub(crate) use self::cut::disk_cuts;
use self::sizes::PAGE;
pub use self::sizes::Staged;
pub(crate) use self::torch::{largest_torch_lines, torch_lines};

mod build;
mod carver;
mod cut;
mod sizes;
mod torch;

/// Device allocations; each is one piece of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
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

/// A range of a device region.
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
#[non_exhaustive]
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
#[non_exhaustive]
pub struct StateBuffer {
    /// Its range of the trainable plane of the image.
    pub weights: DeviceRange,
    /// Its ranges of residual and moments.
    pub state: DeviceState,
    /// Its range of the gradient.
    pub grad: DeviceRange,
}

/// What the host keeps of one unit, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
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
#[non_exhaustive]
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
#[non_exhaustive]
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
#[non_exhaustive]
pub struct Placement {
    /// The units' layouts.
    pub layouts: Arc<[UnitLayout]>,
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
    /// Whether a unit's weights are on disk with its state.
    pub weights_on_disk: Vec<bool>,
    /// Bytes of each host buffer through which those are sent to the device.
    pub weight_buffers: Vec<u64>,
    /// Bytes of each host buffer through which layer inputs go to disk and come back.
    pub input_buffers: Vec<u64>,
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
    /// Planes on the host; `None` where the device or a disk holds all of them.
    pub host_state: Vec<Option<HostState>>,
    /// Bytes of each slab: those of single units, then the shared ones.
    pub slabs: Vec<u64>,
    /// A unit's own slab.
    pub own_slab: Vec<Option<u32>>,
    /// The shared slabs.
    pub shared_slabs: Vec<u32>,
    /// What each unit leaves on the host, or on disk, between forward and backward.
    pub staged: Vec<Staged>,
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

impl Placement {
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

    /// Every range of the device regions, with the name of its line.
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
        let (elements, layout) = (&self.device_update_parts[unit][part], &self.layouts[unit]);
        let count = elements.end - elements.start;
        let weights = count * (layout.precision.dtype().size() + layout.residual_size());
        let state = weights + 2 * layout.state.moments.bytes(count);
        (state + count * self.grad_precision.dtype().size(), state)
    }

    /// Bytes of one part of a unit's state on disk, with its weights where they are there too.
    pub(crate) fn disk_bytes(&self, unit: usize, part: usize) -> u64 {
        let elements = &self.disk_parts[unit][part];
        part_bytes(&self.layouts[unit], elements, self.weights_on_disk[unit])
    }

    /// Whether a step reads or writes anything on disk.
    #[must_use]
    pub fn uses_disk(&self) -> bool {
        !self.disk_buffers.is_empty() || !self.input_buffers.is_empty()
    }

    /// Bytes of a unit's gradient as it is sent.
    #[must_use]
    pub fn grad_bytes(&self, unit: usize) -> u64 {
        self.layouts[unit].elements * self.grad_precision.dtype().size()
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

    fn layers(&self) -> std::ops::Range<usize> {
        1..self.layouts.len() - 1
    }
}

/// Bytes that are read and written of one part of a unit's state on disk, `weights` included or not.
pub(crate) fn part_bytes(layout: &UnitLayout, elements: &Range<u64>, weights: bool) -> u64 {
    let count = elements.end - elements.start;
    state_bytes(layout, count) + if weights { weights_bytes(layout, count) } else { 0 }
}
