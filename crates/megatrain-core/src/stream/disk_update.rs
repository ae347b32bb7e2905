//! Updates of state whose home is a disk, part by part: read into a buffer, updated there by the host, written back. And the way
//! of callers and checkpoints to that state.
use std::sync::{Arc, PoisonError};

use super::execute::within;
use super::rows::{Share, element_ranges};
use super::state::{Decision, Shared};
use crate::error::{Error, Result};
use crate::host::HostSpan;
use crate::layout::{Dtype, Precision, TensorLayout, UnitLayout};
use crate::optimizer::TensorUpdate;
use crate::schedule::Op;
use crate::store::spill::{BLOCK_BYTES, Direction, PartPlanes, Spill};
use crate::store::{Plane, UnitPlanes};

/// Elements whose state is read or written for a caller at a time: 12 bytes each, beside the blocks that they come from, are
/// within the window.
const WINDOW_ELEMENTS: u64 = 128 << 10;

impl Shared {
    pub(super) fn on_disk(&self, unit: usize) -> bool {
        !self.placement.disk_parts[unit].is_empty()
    }

    fn spill(&self) -> Result<Arc<Spill>> {
        self.memory.spill().ok_or(Error::Closed)
    }

    fn disk_buffer(&self, op: &Op) -> &HostSpan {
        &self.memory.disk_buffers[op.disk_buffer.expect("state on disk passes through a buffer") as usize]
    }

    /// Reads a part's state; nothing when the updates are skipped.
    pub(super) fn read_state(&self, op: &Op, decision: Option<&Decision>) -> Result<()> {
        if decision.is_some_and(|decision| decision.skip) {
            return Ok(());
        }
        let buffer = self.disk_buffer(op);
        if self.options.poison {
            buffer.fill(0xff);
        }
        self.spill()?.transfer(Direction::Read, op.unit as usize, op.part as usize, buffer)
    }

    /// Writes it back; nothing when the updates are skipped.
    pub(super) fn write_state(&self, op: &Op, decision: Option<&Decision>) -> Result<()> {
        if decision.is_some_and(|decision| decision.skip) {
            return Ok(());
        }
        self.spill()?.transfer(Direction::Write, op.unit as usize, op.part as usize, self.disk_buffer(op))
    }

    /// Updates a part whose state is in its buffer.
    pub(super) fn update_from_disk(&self, op: &Op, decision: Option<&Decision>) -> Result<()> {
        let (unit, part) = (op.unit as usize, op.part as usize);
        let Some(coefficients) = self.coefficients(op, decision)? else { return Ok(()) };
        let layout = &self.placement.layouts[unit];
        let image = self.memory.store.image(unit).expect("weights of state on disk are on the host");
        let PartPlanes { residual, exp_avg, exp_avg_sq } = self.spill()?.planes(unit, part, self.disk_buffer(op));
        let (grad, grad_dtype) = self.host_gradient(op);
        let elements = &self.placement.disk_parts[unit][part];
        let mut updates = Vec::new();
        for range in element_ranges(layout, elements, Share::All) {
            let Some(&(_, scalars)) = coefficients.iter().find(|(tensor, _)| *tensor == range.tensor) else {
                continue; // without a gradient
            };
            let first = layout.tensors[range.tensor].element + range.start;
            let of_unit = first..first + range.len;
            let of_part = first - elements.start..first - elements.start + range.len;
            updates.push(TensorUpdate {
                weights: within(image, &of_unit, layout.precision.dtype().size()),
                residual: residual.as_ref().map(|span| within(span, &of_part, 2)),
                exp_avg: within(&exp_avg, &of_part, 4),
                exp_avg_sq: within(&exp_avg_sq, &of_part, 4),
                grad: within(&grad, &of_unit, grad_dtype.size()),
                grad_dtype,
                numel: range.len,
                scalars,
            });
        }
        self.adamw.update(&self.pool, &updates)
    }

    /// Reads elements of a plane from `start` on for a caller; the engine is broken where that fails.
    pub(super) fn read_from_disk(
        &self,
        unit: usize,
        tensor: usize,
        plane: Plane,
        start: u64,
        out: &mut [u8],
    ) -> Result<()> {
        let (dtype, _) = self.plane_of(unit, tensor, plane)?;
        let (len, size) = (out.len(), usize::try_from(dtype.size()).expect("a few bytes"));
        self.through_disk_window(unit, tensor, start, len, dtype, |window, first, count| {
            window.fill(&*self.spill()?, plane)?;
            window.planes.read(&window.layout, 0, plane, 0, &mut out[first * size..(first + count) * size])
        })
        .map_err(|error| self.broken_by_disk(unit, "read", error))
    }

    /// Overwrites elements of a plane from `start` on for a caller; the engine is broken where the disk fails.
    pub(super) fn write_to_disk(
        &self,
        unit: usize,
        tensor: usize,
        plane: Plane,
        start: u64,
        dtype: Dtype,
        source: &[u8],
    ) -> Result<()> {
        let size = usize::try_from(dtype.size()).expect("a few bytes");
        self.through_disk_window(unit, tensor, start, source.len(), dtype, |window, first, count| {
            window.planes.write(&window.layout, 0, plane, 0, dtype, &source[first * size..(first + count) * size])?;
            window.keep(&*self.spill()?, plane)
        })
        .map_err(|error| self.broken_by_disk(unit, "write", error))
    }

    /// What the disk refused or returned damaged ends the engine: the state of training is no longer whole.
    fn broken_by_disk(&self, unit: usize, op: &str, error: Error) -> Error {
        if !matches!(error, Error::StateFile { .. } | Error::StateFileShort { .. } | Error::StateDamaged { .. }) {
            return error;
        }
        self.fail_unit(unit, op, &error.to_string())
    }

    /// Works on elements `[start, ..)` of a tensor, as many as the window holds at a time: `work` is given a window, the first
    /// of its elements among the caller's, and their number.
    fn through_disk_window(
        &self,
        unit: usize,
        tensor: usize,
        start: u64,
        bytes: usize,
        dtype: Dtype,
        mut work: impl FnMut(&DiskWindow, usize, usize) -> Result<()>,
    ) -> Result<()> {
        let (layout, found) = self.find(unit, tensor)?;
        let len = super::access::whole_elements(found, start, bytes, dtype)?;
        // It guards no value that a panic could leave half-changed.
        let _alone = self.memory.window_use.lock().unwrap_or_else(PoisonError::into_inner);
        // Whoever had the window before may have broken the engine.
        drop(self.enter()?);
        let image = self.memory.store.image(unit).expect("weights of state on disk are on the host");
        let mut done = 0;
        while done < len {
            let count = WINDOW_ELEMENTS.min(len - done);
            let window = DiskWindow::new(&self.memory.window, image, layout, unit, found, start + done, count)?;
            let fits = "inside the caller's bytes";
            work(&window, usize::try_from(done).expect(fits), usize::try_from(count).expect(fits))?;
            done += count;
        }
        Ok(())
    }
}

/// Elements of one tensor laid out as a unit of its own: its weights where they are, its state in the window.
struct DiskWindow {
    planes: UnitPlanes,
    layout: UnitLayout,
    unit: usize,
    /// The first of the elements in the unit.
    first: u64,
    bounce: HostSpan,
}

impl DiskWindow {
    fn new(
        window: &HostSpan,
        image: &HostSpan,
        layout: &UnitLayout,
        unit: usize,
        tensor: &TensorLayout,
        start: u64,
        count: u64,
    ) -> Result<Self> {
        let first = tensor.element + start;
        let mut spec = tensor.spec.clone();
        spec.shape = vec![count];
        let own = UnitLayout::new(layout.name.as_str(), vec![spec], layout.precision)?;
        let mut at = BLOCK_BYTES;
        let mut carve = |size: u64| {
            let len = usize::try_from(count * size).expect("inside the window");
            at += len.next_multiple_of(512);
            window.slice(at - len.next_multiple_of(512), len)
        };
        let planes = UnitPlanes {
            image: within(image, &(first..first + count), layout.precision.dtype().size()),
            residual: (layout.precision == Precision::Bf16).then(|| carve(2)),
            exp_avg: carve(4),
            exp_avg_sq: carve(4),
        };
        Ok(Self { planes, layout: own, unit, first, bounce: window.slice(0, BLOCK_BYTES) })
    }

    /// The plane on disk that belongs to `plane`, and where it is in the window; none of weights that are no split master.
    fn stored(&self, plane: Plane) -> Option<(Plane, &HostSpan)> {
        match plane {
            Plane::Weights => None,
            Plane::Master | Plane::Residual => self.planes.residual.as_ref().map(|span| (Plane::Residual, span)),
            Plane::ExpAvg => Some((plane, &self.planes.exp_avg)),
            Plane::ExpAvgSq => Some((plane, &self.planes.exp_avg_sq)),
        }
    }

    /// Reads what `plane` needs.
    fn fill(&self, spill: &Spill, plane: Plane) -> Result<()> {
        let Some((stored, span)) = self.stored(plane) else { return Ok(()) };
        let mut out = span.elements_mut::<u8>(0, span.len() as u64);
        spill.read(self.unit, stored, self.first, &mut out, &self.bounce)
    }

    /// Writes what `plane` has changed.
    fn keep(&self, spill: &Spill, plane: Plane) -> Result<()> {
        let Some((stored, span)) = self.stored(plane) else { return Ok(()) };
        let source = span.elements::<u8>(0, span.len() as u64);
        spill.write(self.unit, stored, self.first, &source, &self.bounce)
    }
}
