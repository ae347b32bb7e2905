//! Device updates of state that lives on the host, part by part: fetched into a state buffer with
//! its gradient, updated there like state that lives on the device, and returned.
use std::ops::Range;

use super::execute::{within, within_moments};
use super::state::{Decision, Shared};
use crate::device::{DeviceMemory, Stream};
use crate::error::Result;
use crate::host::HostSpan;
use crate::plan::{DeviceRange, StateBuffer};
use crate::schedule::Op;

impl Shared {
    /// Copies a part's state and gradient to its state buffer; nothing when the updates are skipped.
    pub(super) fn fetch_state(&self, op: &Op, decision: Option<&Decision>) -> Result<()> {
        if decision.is_some_and(|decision| decision.skip) {
            return Ok(());
        }
        let buffer = self.device_planes(op);
        let size = self.grad_dtype().size();
        let slab = self.slab(op.slab.expect("a device update has its gradient in a slab"), op.unit as usize);
        let elements = self.device_elements(op);
        let grad = self.memory.at(buffer.grad).slice(0, (elements.end - elements.start) * size);
        let mut copies = self.state_copies(op, &buffer);
        copies.push((within(&slab, &elements, size), grad));
        for (span, memory) in &copies {
            if self.options.poison {
                self.device.fill(Stream::Upload, memory, 0xff)?;
            }
            // SAFETY: the planes are next written by this part's write-back, which depends on this operation, and the slab by
            // an offload that does: the schedule's check has proved both.
            unsafe { self.device.copy_to_device(Stream::Upload, span, memory) }?;
        }
        Ok(())
    }

    /// Copies a part's state back; nothing when the updates are skipped.
    pub(super) fn write_back_state(&self, op: &Op, decision: Option<&Decision>) -> Result<()> {
        if decision.is_some_and(|decision| decision.skip) {
            return Ok(());
        }
        for (span, memory) in self.state_copies(op, &self.device_planes(op)) {
            if self.options.poison {
                // Nobody reads the state on the host before it has returned.
                span.fill(0xff);
            }
            // SAFETY: between the operation that fetched this part and those that depend on its write-back, nobody reads or
            // writes the planes: the schedule's check has proved it.
            unsafe { self.device.copy_to_host(Stream::Update, &memory, &span) }?;
        }
        Ok(())
    }

    /// Each plane of a part on the host with its place in the state buffer.
    fn state_copies(&self, op: &Op, buffer: &StateBuffer) -> Vec<(HostSpan, DeviceMemory)> {
        let unit = op.unit as usize;
        let elements = self.device_elements(op);
        let planes = self.memory.store.planes(unit).expect("a device update has its state on the host");
        let layout = &self.placement.layouts[unit];
        let pair = |span: HostSpan, place: DeviceRange| {
            let memory = self.memory.at(place).slice(0, span.len() as u64);
            (span, memory)
        };
        let moments = |span: &HostSpan| within_moments(layout, span, &elements);
        let mut copies = vec![
            pair(within(&planes.image, &elements, layout.precision.dtype().size()), buffer.weights),
            pair(moments(&planes.exp_avg), buffer.state.exp_avg),
            pair(moments(&planes.exp_avg_sq), buffer.state.exp_avg_sq),
        ];
        let residual = |span: &HostSpan| pair(within(span, &elements, layout.residual_size()), buffer.state.residual);
        copies.extend(planes.residual.as_ref().map(residual));
        copies
    }

    /// Where on the device a unit is updated: in a state buffer, or where its state lives.
    pub(super) fn device_planes(&self, op: &Op) -> StateBuffer {
        let (placement, unit) = (&self.placement, op.unit as usize);
        op.state_buffer.map_or_else(
            || StateBuffer {
                weights: placement.own[unit].expect("state on the device has a place of its own"),
                state: placement.device_state[unit].expect("updated on the device, where its state is"),
                grad: placement.grads[op.grad.expect("what is trained has a gradient buffer") as usize],
            },
            |buffer| placement.state_buffers[buffer as usize],
        )
    }

    /// The elements of the unit that are updated there.
    pub(super) fn device_elements(&self, op: &Op) -> Range<u64> {
        let unit = op.unit as usize;
        match op.state_buffer {
            Some(_) => self.placement.device_update_parts[unit][op.part as usize].clone(),
            None => 0..self.placement.layouts[unit].elements,
        }
    }
}
