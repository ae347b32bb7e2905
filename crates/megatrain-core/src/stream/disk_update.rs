//! Updates of state whose home is a disk, part by part: read into a buffer, updated there by the host, written back. Weights
//! that are on disk too come and go with it, and are read by themselves to be sent to the device. And the way of callers and
//! checkpoints to what is on disk.
use std::sync::{Arc, PoisonError};

use super::execute::{within, within_moments};
use super::rows::{Share, element_ranges};
use super::state::{Decision, Shared};
use crate::error::{Error, Result};
use crate::host::HostSpan;
use crate::layout::{Dtype, Precision, TensorLayout, UnitLayout};
use crate::optimizer::TensorUpdate;
use crate::schedule::Op;
use crate::store::spill::{BLOCK_BYTES, Direction, PartPlanes, Spill};
use crate::store::{Plane, UnitPlanes, check_stored, elements_in};

/// The first blocks of the window hold what was read from disk or is about to be written there. As many bytes after them hold
/// what is on disk of the masters that are being joined or split: low halves, and upper ones where weights are there too.
const WINDOW_BLOCKS: usize = 2;

impl Shared {
    pub(super) fn on_disk(&self, unit: usize) -> bool {
        !self.placement.disk_parts[unit].is_empty()
    }

    pub(super) fn weights_on_disk(&self, unit: usize) -> bool {
        self.placement.weights_on_disk[unit]
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

    /// Reads a unit's image into the buffer from which it is sent.
    pub(super) fn read_weights(&self, op: &Op) -> Result<()> {
        let buffer = op.weight_buffer.expect("weights on disk are sent through a buffer");
        let buffer = &self.memory.weight_buffers[buffer as usize];
        if self.options.poison {
            buffer.fill(0xff);
        }
        self.spill()?.read_image(op.unit as usize, buffer)
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
        let PartPlanes { weights, residual, exp_avg, exp_avg_sq } =
            self.spill()?.planes(unit, part, self.disk_buffer(op));
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
            let moments = |span: &HostSpan| within_moments(layout, span, &of_part);
            let size = layout.precision.dtype().size();
            updates.push(TensorUpdate {
                weights: match &weights {
                    Some(weights) => within(weights, &of_part, size),
                    None => within(self.image_on_host(unit), &of_unit, size),
                },
                residual: residual.as_ref().map(|span| within(span, &of_part, layout.residual_size())),
                exp_avg: moments(&exp_avg),
                exp_avg_sq: moments(&exp_avg_sq),
                state: layout.state,
                first: range.start,
                grad: within(&grad, &of_unit, grad_dtype.size()),
                grad_dtype,
                numel: range.len,
                scalars,
            });
        }
        self.adamw.update(&self.pool, &updates)
    }

    fn image_on_host(&self, unit: usize) -> &HostSpan {
        self.memory.store.image(unit).expect("weights that are not on disk are on the host")
    }

    /// Whether a plane's bytes are on disk as callers read and write them.
    fn stored_on_disk(&self, unit: usize, plane: Plane) -> bool {
        is_stored(plane) || (plane == Plane::Weights && self.weights_on_disk(unit))
    }

    /// Reads elements of a plane from `start` on for a caller; the engine is broken where that fails. What is stored as it is
    /// read passes through the whole window, so that no block is read twice and several are under way.
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
        if self.stored_on_disk(unit, plane) {
            return self.alone_on_disk(unit, tensor, plane, start, len, dtype, "read", |layout, found, _| {
                let first = first_byte(layout, found, plane) + start * dtype.size();
                self.spill()?.read(unit, plane, first, out, &self.memory.window)
            });
        }
        self.alone_on_disk(unit, tensor, plane, start, len, dtype, "read", |layout, found, len| {
            self.by_windows(unit, layout, found, start, len, |window, first, count| {
                window.fill(&*self.spill()?, plane)?;
                window.planes.read(&window.layout, 0, plane, 0, &mut out[first * size..(first + count) * size])
            })
        })
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
        let (len, size) = (source.len(), usize::try_from(dtype.size()).expect("a few bytes"));
        if self.stored_on_disk(unit, plane) {
            let (own, _) = self.plane_of(unit, tensor, plane)?;
            return self.alone_on_disk(unit, tensor, plane, start, len, dtype, "write", |layout, found, _| {
                check_stored(found, plane, own, start, dtype, source)?;
                let first = first_byte(layout, found, plane) + start * own.size();
                self.spill()?.write(unit, plane, first, source, &self.memory.window)
            });
        }
        self.alone_on_disk(unit, tensor, plane, start, len, dtype, "write", |layout, found, len| {
            self.by_windows(unit, layout, found, start, len, |window, first, count| {
                window.planes.write(
                    &window.layout,
                    0,
                    plane,
                    0,
                    dtype,
                    &source[first * size..(first + count) * size],
                )?;
                window.keep(&*self.spill()?, plane)
            })
        })
    }

    /// What the disk refused or returned damaged ends the engine: the state of training is no longer whole.
    fn broken_by_disk(&self, unit: usize, op: &str, error: Error) -> Error {
        if !matches!(error, Error::StateFile { .. } | Error::StateFileShort { .. } | Error::StateDamaged { .. }) {
            return error;
        }
        self.fail_unit(unit, op, &error.to_string())
    }

    /// Works on elements `[start, ..)` of a tensor while nobody else uses the window: `work` is given the unit's layout, the
    /// tensor's and the number of elements.
    #[expect(clippy::too_many_arguments, reason = "what a caller names, and how an error names it")]
    fn alone_on_disk(
        &self,
        unit: usize,
        tensor: usize,
        plane: Plane,
        start: u64,
        bytes: usize,
        dtype: Dtype,
        op: &str,
        work: impl FnOnce(&UnitLayout, &TensorLayout, u64) -> Result<()>,
    ) -> Result<()> {
        let (layout, found) = self.find(unit, tensor)?;
        let (_, held) = self.plane_of(unit, tensor, plane)?;
        let len = elements_in(found, start, bytes, dtype, held)?;
        // It guards no value that a panic could leave half-changed.
        let _alone = self.memory.window_use.lock().unwrap_or_else(PoisonError::into_inner);
        // Whoever had the window before may have broken the engine.
        drop(self.enter()?);
        work(layout, found, len).map_err(|error| self.broken_by_disk(unit, op, error))
    }

    /// As many elements as the window holds at a time: `work` is given a window, the first of its elements among the
    /// caller's, and their number.
    fn by_windows(
        &self,
        unit: usize,
        layout: &UnitLayout,
        tensor: &TensorLayout,
        start: u64,
        len: u64,
        mut work: impl FnMut(&DiskWindow, usize, usize) -> Result<()>,
    ) -> Result<()> {
        let image = (!self.weights_on_disk(unit)).then(|| self.image_on_host(unit));
        let most = DiskWindow::most_elements(layout, image.is_none());
        let mut done = 0;
        while done < len {
            let count = most.min(len - done);
            let window = DiskWindow::new(&self.memory.window, image, layout, unit, tensor, start + done, count)?;
            let fits = "inside the caller's bytes";
            work(&window, usize::try_from(done).expect(fits), usize::try_from(count).expect(fits))?;
            done += count;
        }
        Ok(())
    }
}

/// Where an element of a plane is stored in its unit's plane, in bytes.
pub(super) fn stored_offset(layout: &UnitLayout, plane: Plane, element: u64) -> u64 {
    match plane {
        Plane::Residual => element * layout.residual_size(),
        _ => layout.state.moments.bytes(element),
    }
}

/// Where a tensor's first element of a plane that is stored as it is begins in its unit's plane, in bytes.
fn first_byte(layout: &UnitLayout, tensor: &TensorLayout, plane: Plane) -> u64 {
    if plane == Plane::Weights { tensor.byte } else { stored_offset(layout, plane, tensor.element) }
}

/// Whether a plane's bytes are stored as callers read and write them, apart from the weights.
pub(super) const fn is_stored(plane: Plane) -> bool {
    matches!(plane, Plane::Residual | Plane::ExpAvg | Plane::ExpAvgSq)
}

/// Elements of one tensor laid out as a unit of its own, for masters: their upper halves where the weights are, or in the window
/// where those are on disk; the lower ones in the window.
struct DiskWindow {
    planes: UnitPlanes,
    layout: UnitLayout,
    unit: usize,
    /// The first of the elements in the unit.
    first: u64,
    bounce: HostSpan,
    /// Whether the weights are on disk.
    weights: bool,
}

impl DiskWindow {
    /// How many elements it holds; `weights`: whether their weights are on disk.
    fn most_elements(layout: &UnitLayout, weights: bool) -> u64 {
        let size = if weights { layout.precision.dtype().size() } else { 0 } + layout.residual_size();
        // Under fp32 with the weights on the host, nothing passes through the window.
        (WINDOW_BLOCKS * BLOCK_BYTES) as u64 / size.max(2)
    }

    fn new(
        window: &HostSpan,
        image: Option<&HostSpan>,
        layout: &UnitLayout,
        unit: usize,
        tensor: &TensorLayout,
        start: u64,
        count: u64,
    ) -> Result<Self> {
        let first = tensor.element + start;
        let mut spec = tensor.spec.clone();
        spec.shape = vec![count];
        let own = UnitLayout::new(layout.name.as_str(), vec![spec], layout.precision)?.with_state(layout.state);
        let blocks = WINDOW_BLOCKS * BLOCK_BYTES;
        let size = layout.precision.dtype().size();
        let halves = |size: u64| usize::try_from(size * count).expect("inside the window");
        let upper = if image.is_none() { halves(size) } else { 0 };
        let planes = UnitPlanes {
            image: image
                .map_or_else(|| window.slice(blocks, upper), |image| within(image, &(first..first + count), size)),
            residual: (layout.precision == Precision::Bf16)
                .then(|| window.slice(blocks + upper, halves(layout.residual_size()))),
            // Neither is reached through a window.
            exp_avg: window.slice(0, 0),
            exp_avg_sq: window.slice(0, 0),
        };
        let (bounce, weights) = (window.slice(0, blocks), image.is_none());
        Ok(Self { planes, layout: own, unit, first, bounce, weights })
    }

    /// What a plane takes from disk: which planes, where in the window, and where of the unit's in bytes.
    fn pieces(&self, plane: Plane) -> impl Iterator<Item = (Plane, &HostSpan, u64)> {
        let weights = (Plane::Weights, &self.planes.image, self.first * self.layout.precision.dtype().size());
        let low = self.planes.residual.as_ref().filter(|_| plane == Plane::Master);
        let low = low.map(|span| (Plane::Residual, span, self.first * self.layout.residual_size()));
        self.weights.then_some(weights).into_iter().chain(low)
    }

    /// Reads what `plane` needs.
    fn fill(&self, spill: &Spill, plane: Plane) -> Result<()> {
        self.pieces(plane).try_for_each(|(plane, span, start)| {
            let mut out = span.elements_mut::<u8>(0, span.len() as u64);
            spill.read(self.unit, plane, start, &mut out, &self.bounce)
        })
    }

    /// Writes what `plane` has changed.
    fn keep(&self, spill: &Spill, plane: Plane) -> Result<()> {
        self.pieces(plane).try_for_each(|(plane, span, start)| {
            let source = span.elements::<u8>(0, span.len() as u64);
            spill.write(self.unit, plane, start, &source, &self.bounce)
        })
    }
}
