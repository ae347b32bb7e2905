//! Units of experts that are sent in part: of each the experts that the micro-batches of a group are routed to.
use std::ops::Range;

use super::state::{EngineState, Shared};
use crate::error::{Error, Result};
use crate::layout::{Role, UnitLayout};
use crate::schedule::{Kind, Op};

impl Shared {
    /// Names the experts of a unit that the micro-batch which is being routed needs, in addition to those of the others of its
    /// group.
    pub(super) fn route(&self, unit: usize, wanted: &[bool]) -> Result<()> {
        let mut core = self.enter()?;
        let held =
            core.current.as_ref().and_then(|current| current.held.as_ref()).map(|(id, ..)| core.progress.op(*id));
        let by = self.inputs.units.get(unit).and_then(|of| of.routed_by);
        let experts = by.map_or(0, |_| num_experts(&self.placement.layouts[unit]));
        let routing = held.is_some_and(|op| op.kind == Kind::Forward && by == Some(op.unit));
        if !routing || wanted.len() != experts {
            return Err(Error::NotRouting { unit, given: wanted.len(), experts });
        }
        let named = core.routes.entry(unit).or_insert_with(|| vec![false; experts]);
        named.iter_mut().zip(wanted).for_each(|(named, wanted)| *named |= wanted);
        Ok(())
    }

    /// Forgets what the group of micro-batches before needed, when the first one of the next is about to be routed.
    pub(super) fn begin_routing(&self, core: &mut EngineState, op: &Op) {
        if op.kind == Kind::Forward
            && self.inputs.unit(op.unit).routes
            && self.inputs.groups.start(op.micro_batch) == op.micro_batch
        {
            let of = |unit: &usize| self.inputs.units[*unit].routed_by == Some(op.unit);
            core.routes.retain(|unit, _| !of(unit));
        }
    }

    /// The bytes of a unit's image that are sent; `None` where those are all that the operation is about.
    pub(super) fn routed_bytes(&self, unit: usize) -> Result<Option<Vec<Range<u64>>>> {
        if self.inputs.units[unit].routed_by.is_none() {
            return Ok(None);
        }
        let (core, layout) = (self.lock(), &self.placement.layouts[unit]);
        let wanted = core.routes.get(&unit).ok_or_else(|| Error::NotRouted { unit: layout.name.clone() })?;
        let mut ranges = Vec::new();
        for tensor in &layout.tensors {
            let dtype = if tensor.spec.role == Role::Trainable { layout.precision.dtype() } else { tensor.spec.dtype };
            let each = tensor.spec.numel() / wanted.len() as u64 * dtype.size();
            let mut begin = 0;
            for run in wanted.chunk_by(|a, b| a == b) {
                let end = begin + run.len() as u64;
                if run[0] {
                    ranges.push(tensor.byte + begin * each..tensor.byte + end * each);
                }
                begin = end;
            }
        }
        Ok(Some(ranges))
    }
}

/// Experts of a unit that is sent in part: the rows of each of its tensors.
fn num_experts(layout: &UnitLayout) -> usize {
    layout.tensors.first().and_then(|tensor| tensor.spec.shape.first()).map_or(0, |&rows| rows as usize)
}
