//! Which buffers are used.
use std::collections::HashMap;

use super::broken;
use crate::error::Result;
use crate::schedule::{Kind, Pass, Schedule, ScheduleInputs};

/// Every buffer that an operation uses is named, is one that its unit may use, and is inside the plan's; none that it does not
/// use is named.
pub(super) fn check_buffers(inputs: &ScheduleInputs, schedule: &Schedule) -> Result<()> {
    let train = schedule.shape.pass == Pass::Train;
    // Where forward left a micro-batch's activations, and where they were fetched to.
    let mut staged: HashMap<(Kind, u32, u32), Option<u32>> = HashMap::new();
    // Where those units that have no weights of their own were computed backward: by whose weights they have.
    let mut joined: HashMap<(u32, u32), Option<u32>> = HashMap::new();
    // Where a unit's weights were read to.
    let mut read: HashMap<u32, Option<u32>> = HashMap::new();
    for op in &schedule.ops {
        let (kind, of) = (op.kind, inputs.unit(op.unit));
        let computes_layer = matches!(kind, Kind::Forward | Kind::Backward);
        let slot = (kind == Kind::Load || computes_layer) && !inputs.unit(inputs.holder(op.unit)).own_place;
        if !named(op.slot, slot, |slot| slot < inputs.slots) {
            return Err(broken(op, "a layer without a place of its own is loaded into a slot, and computed from one"));
        }
        if kind == Kind::Load && (of.on_device || of.weights_of.is_some()) {
            return Err(broken(
                op,
                "weights that live on the device are not loaded, nor those that a unit has of another one",
            ));
        }
        // What the backward of such a unit has made for that of the other one refers to the weights where they were.
        if kind == Kind::Backward && of.weights_of.is_some() {
            joined.insert((inputs.holder(op.unit), op.micro_batch), op.slot);
        }
        let before = joined.get(&(op.unit, op.micro_batch));
        if kind == Kind::Backward && before.is_some_and(|slot| *slot != op.slot) {
            return Err(broken(
                op,
                "a unit is computed backward in the slot in which the one that has its weights was",
            ));
        }
        let sums = match kind {
            Kind::Loss => train,
            Kind::Backward | Kind::EmbedBackward | Kind::OffloadGrad => true,
            Kind::Update => of.on_device,
            _ => false,
        };
        let grad = |grad| of.own_grad.map_or_else(|| inputs.shared_grads.contains(&grad), |own| own == grad);
        if !named(op.grad, sums && of.trains, grad) {
            return Err(broken(op, "a unit that trains has its gradient in a buffer that the plan gave it"));
        }
        let uses_slab = match kind {
            Kind::OffloadGrad | Kind::AccumulateGrad | Kind::FetchState => !of.on_device,
            Kind::Update => !of.updated_on_device() && !inputs.accumulate,
            _ => false,
        };
        let slab = |slab| of.own_slab.map_or_else(|| inputs.shared_slabs.contains(&slab), |own| own == slab);
        if !named(op.slab, uses_slab, slab) {
            return Err(broken(op, "a gradient whose unit's state lives on the host is offloaded to a slab"));
        }
        let moves = matches!(kind, Kind::OffloadActivation | Kind::FetchActivation);
        let stages = train && (moves || computes_layer) && of.staged.bytes(op.micro_batch) > 0;
        if !named(op.stage, stages, |stage| stage < inputs.stage_buffers) {
            return Err(broken(op, "activations that go to the host pass through a staging buffer"));
        }
        let moved = moves || matches!(kind, Kind::WriteInput | Kind::ReadInput);
        let through = train && moved && of.staged.disk_bytes(op.micro_batch) > 0;
        if !named(op.input_buffer, through, |buffer| buffer < inputs.input_buffers) {
            return Err(broken(op, "inputs that wait on disk, and no others, pass through a buffer of the host's"));
        }
        match kind {
            Kind::Forward | Kind::FetchActivation => {
                staged.insert((kind, op.unit, op.micro_batch), op.stage);
            }
            Kind::OffloadActivation | Kind::Backward => {
                let from = if kind == Kind::Backward { Kind::FetchActivation } else { Kind::Forward };
                if stages && staged.get(&(from, op.unit, op.micro_batch)) != Some(&op.stage) {
                    return Err(broken(op, "activations are taken from the staging buffer that they were put into"));
                }
            }
            _ => {}
        }
        let away = matches!(kind, Kind::FetchState | Kind::Update | Kind::WriteBackState) && of.device_update_parts > 0;
        if !named(op.state_buffer, away, |buffer| buffer < inputs.state_buffers) {
            return Err(broken(op, "a device update passes through a state buffer"));
        }
        let spilled = matches!(kind, Kind::ReadState | Kind::Update | Kind::WriteState) && of.disk_parts > 0;
        if !named(op.disk_buffer, spilled, |buffer| buffer < inputs.disk_buffers) {
            return Err(broken(op, "state on disk passes through a buffer of the host's"));
        }
        let sent = matches!(kind, Kind::Load | Kind::ReadWeights) && of.weights_on_disk;
        if !named(op.weight_buffer, sent, |buffer| buffer < inputs.weight_buffers) {
            return Err(broken(op, "weights on disk, and no others, are sent through a buffer of the host's"));
        }
        match kind {
            Kind::ReadWeights if !of.weights_on_disk => {
                return Err(broken(op, "only weights on disk are read from there"));
            }
            Kind::ReadWeights => {
                read.insert(op.unit, op.weight_buffer);
            }
            Kind::Load if sent && read.remove(&op.unit) != Some(op.weight_buffer) => {
                return Err(broken(op, "weights are sent from the buffer that they were read to, once"));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Whether a buffer is named where one is used, and is one that may be.
fn named(buffer: Option<u32>, used: bool, fits: impl FnOnce(u32) -> bool) -> bool {
    buffer.map_or(!used, |buffer| used && fits(buffer))
}
