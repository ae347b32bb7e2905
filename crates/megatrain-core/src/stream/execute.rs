//! What a lane does for one operation.
use std::ops::Range;

use super::rows::{Share, element_ranges};
use super::save::Save;
use super::state::{Decision, Shared, Token};
use super::workers::stream;
use crate::adamw::{AdamwScalars, kernels};
use crate::device::{DeviceAdamw, DeviceMemory, Event, Stream};
use crate::error::{Error, Result};
use crate::host::HostSpan;
use crate::layout::{Dtype, Role, TensorLayout, UnitLayout};
use crate::optimizer::{TensorSum, TensorUpdate};
use crate::plan::{DeviceRange, Part, StateBuffer};
use crate::schedule::progress::Awaited;
use crate::schedule::{Kind, Op};
use crate::trace::SpanOf;

/// How far an operation has come.
pub(super) enum Done {
    /// Queued on its stream.
    Queued(Token),
    /// Over.
    Over,
}

impl Shared {
    pub(super) fn execute(
        &self,
        op: &Op,
        awaited: &[Awaited<Token>],
        decision: Option<&Decision>,
        save: Option<&Save>,
    ) -> Result<Done> {
        let Some(stream) = stream(op.lane) else {
            match op.kind {
                Kind::AccumulateGrad => self.accumulate_grad(op)?,
                Kind::ReadState => self.read_state(op, decision)?,
                Kind::ReadWeights => self.read_weights(op)?,
                Kind::WriteState => self.write_state(op, decision)?,
                Kind::WriteInput => self.write_input(op)?,
                Kind::ReadInput => self.read_input(op)?,
                Kind::Update if op.disk_buffer.is_some() => self.update_from_disk(op, decision)?,
                Kind::Update => self.update_on_host(op, decision)?,
                // (A save that was given up is no longer there.)
                Kind::WriteCheckpoint => save.map_or(Ok(()), |save| self.write_unit(op, save))?,
                _ => {}
            }
            return Ok(Done::Over);
        };
        for other in awaited.iter().filter(|a| a.lane != op.lane && !a.complete) {
            self.device.wait(stream, &other.token.end)?;
        }
        let start = Some(self.device.record(stream)?);
        match op.kind {
            Kind::Load => self.load(op)?,
            Kind::OffloadActivation => self.offload_activation(op)?,
            Kind::FetchActivation => self.fetch_activation(op)?,
            Kind::OffloadGrad => self.offload_grad(op)?,
            Kind::FetchState => self.fetch_state(op, decision)?,
            Kind::Update => self.update_on_device(op, decision)?,
            Kind::WriteBackState => self.write_back_state(op, decision)?,
            _ => {}
        }
        Ok(Done::Queued(Token { start, end: self.device.record(stream)? }))
    }

    fn load(&self, op: &Op) -> Result<()> {
        let unit = op.unit as usize;
        let place = op.slot.map_or(self.placement.own[unit], |slot| Some(self.placement.slots[slot as usize]));
        let place = self.memory.at(place.expect("a unit without a slot has a place of its own"));
        let image = match op.weight_buffer {
            Some(buffer) => &self.memory.weight_buffers[buffer as usize],
            None => self.memory.store.image(unit).expect("weights that are loaded are on the host or read from disk"),
        };
        let part = &self.placement.parts[unit][op.part as usize].image;
        let whole = place.slice(part.start, part.end - part.start);
        if self.options.poison {
            self.device.fill(Stream::Upload, &whole, 0xff)?;
        }
        let sent = self.routed_bytes(unit)?.unwrap_or_else(|| vec![part.clone()]);
        for bytes in &sent {
            let place = place.slice(bytes.start, bytes.end - bytes.start);
            // SAFETY: the schedule orders every write of the image (an update, state that returns), or of the buffer that
            // weights on disk are read to, before or after its loads, which `schedule::check` has proved; `Engine::write`
            // writes it only while nothing is under way.
            unsafe { self.device.copy_to_device(Stream::Upload, &within(image, bytes, 1), &place) }?;
        }
        Ok(())
    }

    fn stage(&self, op: &Op) -> (DeviceMemory, HostSpan) {
        let stage = op.stage.expect("what is offloaded or fetched passes through a staging buffer");
        let area = match self.input_buffer(op) {
            Some(buffer) => {
                let bytes = self.placement.staged[op.unit as usize].bytes(op.micro_batch);
                buffer.slice(0, usize::try_from(bytes).expect("a mapped length"))
            }
            None => self.memory.area(op.unit as usize, op.micro_batch, &self.placement),
        };
        let buffer = self.memory.at(self.placement.stage[stage as usize]);
        (buffer.slice(0, area.len() as u64), area)
    }

    fn offload_activation(&self, op: &Op) -> Result<()> {
        let (buffer, area) = self.stage(op);
        if self.options.poison && op.input_buffer.is_some() {
            area.fill(0xff);
        }
        // SAFETY: the host never looks at an area, and writes a buffer to disk or reads it from there before or after copies;
        // the schedule orders all of these, as is proved there.
        unsafe { self.device.copy_to_host(Stream::Download, &buffer, &area) }
    }

    fn fetch_activation(&self, op: &Op) -> Result<()> {
        let (buffer, area) = self.stage(op);
        if self.options.poison {
            self.device.fill(Stream::Upload, &buffer, 0xff)?;
        }
        // SAFETY: as in `offload_activation`.
        unsafe { self.device.copy_to_device(Stream::Upload, &area, &buffer) }
    }

    pub(super) fn grad_dtype(&self) -> Dtype {
        self.placement.grad_precision.dtype()
    }

    fn offload_grad(&self, op: &Op) -> Result<()> {
        let unit = op.unit as usize;
        let grad = op.grad.expect("what is offloaded has a gradient buffer");
        let grad = self.memory.at(self.placement.grads[grad as usize]).slice(0, self.placement.grad_bytes(unit));
        let dtype = self.grad_dtype();
        let Part { elements, blocks, .. } = &self.placement.parts[unit][op.part as usize];
        let slab = op.slab.map(|slab| within(&self.slab(slab, unit), elements, dtype.size()));
        let norm = self.placement.norm[unit].as_ref().expect("what is offloaded is trained");
        let count = blocks.end - blocks.start;
        let table = self.memory.at(norm.table).slice(blocks.start * 16, count * 16);
        let sums = self.memory.at(norm.sums).slice(blocks.start * 8, count * 8);
        let host_sums = within(&self.memory.sums[unit], blocks, 8);
        if self.options.poison {
            // Nobody reads a slab before its gradient has been offloaded, nor the sums before the clip decision.
            slab.iter().for_each(|slab| slab.fill(0xff));
            if !op.early {
                host_sums.fill(0xff);
            }
        }
        if !op.early {
            self.device.sum_squares(Stream::Download, &grad, dtype, &table, count, &sums)?;
            // SAFETY: whoever reads or adds to the sums depends on this operation, and the next pass's offload on them: the
            // schedule's check has proved it.
            unsafe { self.device.copy_to_host(Stream::Download, &sums, &host_sums) }?;
        }
        let Some(slab) = slab else { return Ok(()) };
        let grad = grad.slice(elements.start * dtype.size(), slab.len() as u64);
        // SAFETY: whoever reads the slab depends on this operation, and this one on who read it before: the schedule's
        // check has proved it.
        unsafe { self.device.copy_to_host(Stream::Download, &grad, &slab) }
    }

    /// The unit's part of a slab that larger units may share.
    pub(super) fn slab(&self, slab: u32, unit: usize) -> HostSpan {
        let len = usize::try_from(self.placement.grad_bytes(unit)).expect("a mapped length");
        self.memory.slabs[slab as usize].slice(0, len)
    }

    fn trainable(&self, unit: usize) -> impl Iterator<Item = (usize, &TensorLayout)> {
        let tensors = self.placement.layouts[unit].tensors.iter().enumerate();
        tensors.filter(|(_, t)| t.spec.role == Role::Trainable && t.spec.numel() > 0)
    }

    /// Adds the offloaded gradient to the fp32 store and takes the norm of the sum.
    fn accumulate_grad(&self, op: &Op) -> Result<()> {
        let unit = op.unit as usize;
        let offloaded = self.slab(op.slab.expect("what is accumulated has been offloaded"), unit);
        let store = &self.memory.accumulated[unit];
        if !self.lock().accumulated {
            store.fill(0);
        }
        let dtype = self.grad_dtype();
        let sums = self.trainable(unit).map(|(_, tensor)| {
            let numel = tensor.spec.numel();
            TensorSum {
                store: part(store, tensor.element, numel, 4),
                values: part(&offloaded, tensor.element, numel, dtype.size()),
                dtype,
                numel,
            }
        });
        self.adamw.accumulate(&self.pool, &sums.collect::<Vec<_>>())?;
        let layout = &self.placement.layouts[unit];
        let mut partials = self.memory.sums[unit].elements_mut::<f64>(0, layout.num_norm_blocks());
        for (sum, (first, len)) in partials.iter_mut().zip(layout.norm_blocks()) {
            *sum = kernels::sum_squares(self.adamw.isa(), kernels::Values::F32(&store.elements::<f32>(first, len)));
        }
        Ok(())
    }

    /// The coefficients of the next update of each trainable tensor that has a gradient; its count advances.
    pub(super) fn coefficients(
        &self,
        op: &Op,
        decision: Option<&Decision>,
    ) -> Result<Option<Vec<(usize, AdamwScalars)>>> {
        let unit = op.unit as usize;
        let decision = decision.ok_or(Error::Undecided)?;
        if decision.skip {
            return Ok(None);
        }
        let parts = &self.placement.parts[unit];
        let apart = self.placement.device_update_parts[unit].len() + self.placement.disk_parts[unit].len();
        if self.immediate && !op.early {
            // Where state comes and goes in other parts, the gradient has been offloaded as a whole.
            let blocks = &parts[if apart == 0 { op.part as usize } else { 0 }].blocks;
            let sums = self.memory.sums[unit].elements::<f64>(blocks.start, blocks.end - blocks.start);
            if sums.iter().any(|s| !s.is_finite()) {
                return Err(Error::GradientNotFinite { unit: self.placement.layouts[unit].name.clone() });
            }
        }
        let store = &self.memory.store;
        let idle = |group: u32| decision.groups[group as usize].idle;
        let coefficients =
            self.trainable(unit).filter(|(_, tensor)| !idle(tensor.spec.group)).map(|(index, tensor)| {
                let count = store.step_count(unit, index)? + 1;
                let g = decision.groups[tensor.spec.group as usize];
                let betas = (g.beta1, g.beta2);
                let scalars = AdamwScalars::new(g.lr, betas, g.eps, g.weight_decay, count, decision.grad_scale)?;
                let scalars = scalars.rounded_by(self.options.seed, &tensor.spec.name, count);
                Ok((index, scalars.of_part(tensor.spec.begin)))
            });
        let coefficients = coefficients.collect::<Result<Vec<_>>>()?;
        // All parts make up one update; the schedule runs them in order.
        let count = if apart == 0 { parts.len() } else { apart };
        let last = !op.early && op.part as usize + 1 == count;
        for &(index, _) in coefficients.iter().filter(|_| last) {
            store.set_step_count(unit, index, store.step_count(unit, index)? + 1)?;
        }
        Ok(Some(coefficients))
    }

    /// The gradient by which the host updates a unit: its slab, or the sum over passes.
    pub(super) fn host_gradient(&self, op: &Op) -> (HostSpan, Dtype) {
        let unit = op.unit as usize;
        match op.slab {
            Some(slab) => (self.slab(slab, unit), self.grad_dtype()),
            None => (self.memory.accumulated[unit].clone(), Dtype::F32),
        }
    }

    fn update_on_host(&self, op: &Op, decision: Option<&Decision>) -> Result<()> {
        let unit = op.unit as usize;
        let Some(coefficients) = self.coefficients(op, decision)? else { return Ok(()) };
        let (grad, dtype) = self.host_gradient(op);
        let planes = self.memory.store.planes(unit).expect("only units whose state is on the host are updated there");
        let layout = &self.placement.layouts[unit];
        let update = |&(tensor, scalars): &(usize, _)| planes.update(layout, tensor, &grad, dtype, scalars);
        let updates: Vec<TensorUpdate> = coefficients.iter().map(update).collect();
        let split = unit == 0 && self.inputs.early;
        let parts = &self.placement.parts[unit];
        if parts.len() == 1 && !split {
            return self.adamw.update(&self.pool, &updates);
        }
        let rows = decision.and_then(|d| d.rows.as_deref());
        let share = match (split, op.early) {
            (false, _) => Share::All,
            (true, true) => Share::Early(rows),
            (true, false) => Share::Late(rows),
        };
        let elements = &parts[op.part as usize].elements;
        let mut ranges = element_ranges(layout, elements, share);
        let place = |tensor: usize| coefficients.iter().position(|&(index, _)| index == tensor);
        ranges.retain(|range| place(range.tensor).is_some());
        if ranges.is_empty() {
            return Ok(());
        }
        if op.early && !self.tied {
            self.zero(&within(&grad, elements, dtype.size()))?;
        }
        for range in &mut ranges {
            range.tensor = place(range.tensor).expect("the others are left out");
        }
        self.adamw.update_ranges(&self.pool, &updates, &ranges)
    }

    /// Zeros, written by the optimizer's threads.
    fn zero(&self, span: &HostSpan) -> Result<()> {
        let threads = self.pool.threads();
        let each = span.len().div_ceil(threads);
        self.pool.run(threads, &|i| {
            let start = (i * each).min(span.len());
            span.slice(start, each.min(span.len() - start)).fill(0);
        })
    }

    fn update_on_device(&self, op: &Op, decision: Option<&Decision>) -> Result<()> {
        let unit = op.unit as usize;
        let Some(coefficients) = self.coefficients(op, decision)? else { return Ok(()) };
        let layout = &self.placement.layouts[unit];
        let StateBuffer { weights, state, grad } = self.device_planes(op);
        let elements = self.device_elements(op);
        let dtype = self.grad_dtype();
        for range in element_ranges(layout, &elements, Share::All) {
            let Some(&(_, scalars)) = coefficients.iter().find(|(tensor, _)| *tensor == range.tensor) else {
                continue; // without a gradient
            };
            let first = layout.tensors[range.tensor].element + range.start - elements.start;
            let at = |place: DeviceRange, size: u64| self.memory.at(place).slice(first * size, range.len * size);
            let stored = layout.state.moments;
            let moments =
                |place: DeviceRange| self.memory.at(place).slice(stored.bytes(first), stored.bytes(range.len));
            let residual = (state.residual.len > 0).then(|| at(state.residual, layout.residual_size()));
            let update = DeviceAdamw {
                weights: &at(weights, layout.precision.dtype().size()),
                residual: residual.as_ref(),
                exp_avg: &moments(state.exp_avg),
                exp_avg_sq: &moments(state.exp_avg_sq),
                state: layout.state,
                first: range.start,
                grad: &at(grad, dtype.size()),
                grad_dtype: dtype,
                numel: range.len,
                scalars,
            };
            self.device.adamw(Stream::Update, &update)?;
        }
        Ok(())
    }

    /// Seconds that an operation took on its stream, and its span in the trace.
    pub(super) fn measure(&self, op: &Op, token: &Token) -> Result<f64> {
        let Some(start) = &token.start else { return Ok(0.0) };
        let unit = &self.placement.layouts[op.unit as usize].name;
        if let Some(origin) = &self.trace_origin
            && let Some(began) = self.elapsed(origin, start)?
            && let Some(took) = self.elapsed(start, &token.end)?
        {
            self.trace.device(span_of(op, unit), began, took);
        }
        Ok(self.elapsed(start, &token.end)?.unwrap_or(0.0) / 1e3)
    }

    fn elapsed(&self, from: &Event, to: &Event) -> Result<Option<f64>> {
        self.device.elapsed_ms(from, to)
    }
}

/// How an operation appears in the trace.
pub(super) fn span_of<'a>(op: &Op, unit: &'a str) -> SpanOf<'a> {
    let kind = op.kind.name();
    SpanOf { row: op.lane as u8, kind, unit, micro_batch: op.micro_batch }
}

/// Elements `range` of a span, of `size` bytes each.
pub(super) fn within(span: &HostSpan, range: &Range<u64>, size: u64) -> HostSpan {
    part(span, range.start, range.end - range.start, size)
}

/// The moments of elements `range` of a unit, in one of its planes.
pub(super) fn within_moments(layout: &UnitLayout, span: &HostSpan, range: &Range<u64>) -> HostSpan {
    let stored = layout.state.moments;
    part(span, stored.bytes(range.start), stored.bytes(range.end - range.start), 1)
}

fn part(span: &HostSpan, element: u64, numel: u64, size: u64) -> HostSpan {
    let fits = "a layout's offsets lie inside its spans";
    span.slice(usize::try_from(element * size).expect(fits), usize::try_from(numel * size).expect(fits))
}
