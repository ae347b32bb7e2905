//! What each resource holds.
use std::collections::HashMap;

use crate::schedule::hazards::{Access, Resource};
use crate::schedule::{Lane, Op, Resident, ScheduleInputs};

/// What a resource holds, who put it there in these two passes, and who has read it since.
pub(super) struct Content {
    pub(super) writer: Option<usize>,
    pub(super) holds: (u32, u32),
    /// Readers that compute nothing.
    pub(super) readers: Vec<usize>,
    /// The latest computation that has read it: it follows all before it.
    pub(super) last_compute: Option<usize>,
}

impl Content {
    pub(super) const fn new(writer: Option<usize>, holds: (u32, u32)) -> Self {
        Self { writer, holds, readers: Vec::new(), last_compute: None }
    }
}

/// In place of a unit whose weights on the device are no longer those on the host.
pub(super) const STALE: (u32, u32) = (u32::MAX, 0);

#[derive(Default)]
pub(super) struct Contents {
    pub(super) of: HashMap<Resource, Content>,
    /// Places of copies of weights that hold something.
    weights: Vec<Resource>,
}

impl Contents {
    pub(super) fn put(&mut self, resource: Resource, content: Content) {
        let fresh = self.of.insert(resource, content).is_none();
        if fresh && matches!(resource, Resource::Slot(_) | Resource::Own(..) | Resource::WeightBuffer(_)) {
            self.weights.push(resource);
        }
    }

    pub(super) fn follow(&mut self, index: usize, op: &Op, resource: Resource, access: Access) {
        match access {
            Access::Read(unit, mb) => {
                // What the host holds was there before; whoever overwrites it must still wait for its readers.
                if !self.of.contains_key(&resource) {
                    self.put(resource, Content::new(None, (unit, mb)));
                }
                let content = self.of.get_mut(&resource).expect("put there above");
                if op.lane == Lane::Compute {
                    content.last_compute = Some(index);
                } else {
                    content.readers.push(index);
                }
            }
            Access::Write(unit, mb) | Access::Add(unit, mb) => {
                self.put(resource, Content::new(Some(index), (unit, mb)));
            }
        }
        // (What is updated early is still to be read by this pass, as it was.)
        if let (Access::Write(..), false, Resource::Image(unit, _)) = (access, op.early, resource) {
            for place in &self.weights {
                if let Some(content) = self.of.get_mut(place).filter(|content| content.holds.0 == unit) {
                    content.holds = STALE;
                }
            }
        }
    }
}

pub(super) fn places(inputs: &ScheduleInputs, held: Resident) -> impl Iterator<Item = Resource> {
    let parts = if held.slot.is_some() { 1 } else { inputs.unit(held.unit).parts };
    (0..parts).map(move |part| held.slot.map_or(Resource::Own(held.unit, part), Resource::Slot))
}

/// Planes on the host and on disk, and weights that live on the device, are there from the start; all else must be written
/// first.
pub(super) fn must_be_written(inputs: &ScheduleInputs, resource: Resource) -> bool {
    match resource {
        Resource::Image(..) | Resource::Disk(..) | Resource::Count(_) => false,
        Resource::Own(unit, _) => !inputs.unit(unit).on_device,
        _ => true,
    }
}

pub(super) fn read_rule(resource: Resource) -> &'static str {
    match resource {
        Resource::Image(..) => "weights are sent only after the update that changes them",
        Resource::Disk(..) => "state is read from disk only after it has been written there",
        Resource::DiskBuffer(_) => "state is read before it is updated, and updated before it is written",
        Resource::WeightBuffer(_) => "weights on disk are read before they are sent",
        Resource::Own(..) | Resource::Slot(_) => "weights are loaded before they are used",
        Resource::Grad(_) => "a gradient is offloaded after backward has finished it",
        Resource::Slab(..) => "a gradient is used only after it has been offloaded",
        Resource::Stage(_) => "activations are in the staging buffer before they are used",
        Resource::StateBuffer(_) => "state is fetched before it is updated, and updated before it is written back",
        Resource::Area(..) => "activations are on the host, or on disk, before they are fetched or read",
        Resource::InputBuffer(_) => {
            "inputs are copied to the host before they are written, and read before they are fetched"
        }
        Resource::Sums(..) => "the norm is taken after all gradients have been offloaded",
        Resource::Store(_) => "an update follows the sum over passes",
        Resource::Route(_) => "which weights are sent is known before they are",
        Resource::Loss => "nothing is updated before the loss is known to be finite",
        Resource::ClipDecision => "an update follows the clip decision",
        Resource::Count(_) => COUNTED,
        Resource::Files => APPENDED,
    }
}

pub(super) fn write_rule(resource: Resource) -> &'static str {
    match resource {
        Resource::Image(..) => "weights are not changed while they are sent, nor before they have been written",
        Resource::Disk(..) => "state on disk is not overwritten before it has been read",
        Resource::DiskBuffer(_) => "a buffer is not used again before its state has been written to disk",
        Resource::WeightBuffer(_) => "a buffer is not used again before its weights have been sent",
        Resource::Own(..) | Resource::Slot(_) => "weights on the device are not overwritten before their last use",
        Resource::Grad(_) => "a gradient buffer is not used again before it has been offloaded",
        Resource::Slab(..) => "a slab is not used again before its gradient has been consumed",
        Resource::Stage(_) => "a staging buffer is not used again before it has been emptied",
        Resource::StateBuffer(_) => "a state buffer is not used again before its state has been written back",
        Resource::Area(..) => {
            "activations on the host, or on disk, are not overwritten before they have been fetched or read"
        }
        Resource::InputBuffer(_) => "a buffer is not used again before its input has been written to disk, or fetched",
        Resource::Sums(..) => "norm sums are not overwritten before the clip decision",
        Resource::Store(_) => "the store is not overwritten before the update",
        Resource::Count(_) => COUNTED,
        Resource::Route(_) => {
            "a group of micro-batches is routed when the weights for the one before it have been sent"
        }
        Resource::Loss => "a loss is not replaced before all who wait for it have seen it",
        Resource::ClipDecision => "a clip decision holds until all updates have seen it",
        Resource::Files => APPENDED,
    }
}

/// For all parts of a unit this is one update; the last of them counts it.
const COUNTED: &str = "the parts of a unit are updated in order";
const APPENDED: &str = "units are appended to the files in order, one after the other";
