//! The caller's side of a pass: which operation to compute next, and the offsets of its buffers.
use std::task::Poll;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::execute::span_of;
use super::state::{Current, Deadline, Shared, Token};
use super::workers::guarded;
use crate::device::{DeviceMemory, Stream};
use crate::error::{Error, Result};
use crate::plan::{Activation, Place};
use crate::schedule::progress::Id;
use crate::schedule::{Kind, Lane, Op, Pass, Shape};

/// What to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Phase {
    Embed,
    Forward,
    Loss,
    Backward,
    EmbedBackward,
}

impl Phase {
    /// Its name on every surface.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Embed => "embed",
            Self::Forward => "forward",
            Self::Loss => "loss",
            Self::Backward => "backward",
            Self::EmbedBackward => "embed_backward",
        }
    }
}

/// What the caller must compute next. Offsets are bytes into the regions of the same name.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ComputeOp {
    /// Names it to [`super::Engine::finish`].
    pub id: u64,
    /// What to compute.
    pub phase: Phase,
    /// Of which unit.
    pub unit: u32,
    /// For which micro-batch.
    pub micro_batch: u32,
    /// Whether it is the unit's first micro-batch of the pass (start the sum) …
    pub first: bool,
    /// … or its last one (round the sum into the transfer buffer).
    pub last: bool,
    /// Region `weights`: the unit's image.
    pub weights: u64,
    /// Region `weights`: the embed unit's image, in phase `loss` of a tied model.
    pub tied_weights: Option<u64>,
    /// Region `grads`: the unit's transfer buffer.
    pub grad: Option<u64>,
    /// Region `accumulators`: the unit's fp32 sum over micro-batches; `None`: the sum is formed in `grad`.
    pub accumulator: Option<u64>,
    /// Region `accumulators`: the fp32 sum of the head's use of a tied weight, laid out as the embed unit.
    pub tied_accumulator: Option<u64>,
    /// Region `grads`: the embed unit's transfer buffer, in phase `loss` of a tied model.
    pub tied_grad: Option<u64>,
    /// Whether `tied_accumulator`, which no further `loss` adds to, is to be rounded into `tied_grad`: the rows that the
    /// step does not look up are offloaded from there before the embedding's backward.
    pub round_tied: bool,
    /// What becomes of the unit's activations.
    pub activation: Activation,
    /// Whether the unit's input goes to the host, or on to disk, between forward and backward.
    pub input_on_host: bool,
    /// Region `stage`: where forward leaves what goes to the host, and backward finds it again.
    pub stage: Option<u64>,
}

impl Shared {
    pub(super) fn next(&self, limit: Duration) -> Result<Poll<Option<ComputeOp>>> {
        let deadline = Deadline::after(limit);
        let core = self.enter()?;
        let current = core.current.as_ref().ok_or(Error::NoPass)?;
        current.check()?;
        if let Some((held, ..)) = current.held {
            return Err(Error::NotFinished { id: held.op.into() });
        }
        let Some(&index) = current.computes.get(current.finished) else { return Ok(Poll::Ready(None)) };
        let (id, shape) = (Id { pass: current.number, op: index }, current.shape);
        let asked = Instant::now();
        // What a failed pass waits for may never come.
        let waited = self.wait_until(core, deadline, |core| {
            let failed = core.current.as_ref().is_some_and(|current| current.failure.is_some());
            (failed || core.progress.op_is_ready(id) && core.may_take()).then_some(())
        });
        let mut core = match waited? {
            Poll::Pending => {
                self.lock().counters.waited(asked.elapsed());
                return Ok(Poll::Pending);
            }
            Poll::Ready((core, ())) => core,
        };
        core.counters.waited(asked.elapsed());
        core.current.as_ref().map_or(Err(Error::NoPass), Current::check)?;
        core.progress.take_op(id);
        let awaited = core.progress.awaited(id);
        let op = core.progress.op(id);
        self.begin_routing(&mut core, &op);
        drop(core);
        let prepared = guarded(|| self.prepare_compute(&op, shape, &awaited));
        let start = prepared.map_err(|cause| self.fail(&op, &cause))?;
        let mut core = self.enter()?;
        if let Some(current) = core.current.as_mut() {
            current.held = Some((id, start, Instant::now()));
        }
        Ok(Poll::Ready(Some(self.describe(&op, shape))))
    }

    /// Makes the compute stream, or this thread where computing is the host's, wait for what the operation reads.
    fn prepare_compute(
        &self,
        op: &Op,
        shape: Shape,
        awaited: &[crate::schedule::progress::Awaited<Token>],
    ) -> Result<Option<crate::device::Event>> {
        let host = self.device.compute_is_host();
        for other in awaited.iter().filter(|a| a.lane != Lane::Compute && !a.complete) {
            if host {
                self.device.synchronize(&other.token.end)?;
            } else {
                self.device.wait(Stream::Compute, &other.token.end)?;
            }
        }
        if self.options.poison && self.poison_compute(op, shape)? && host {
            self.device.synchronize(&self.device.record(Stream::Compute)?)?;
        }
        if host { Ok(None) } else { self.device.record(Stream::Compute).map(Some) }
    }

    /// Fills with NaN what the operation is about to write afresh; returns whether there was anything.
    fn poison_compute(&self, op: &Op, shape: Shape) -> Result<bool> {
        let mut stale: Vec<DeviceMemory> = Vec::new();
        if shape.pass == Pass::Train {
            if op.kind == Kind::Forward
                && let Some(stage) = op.stage
            {
                stale.push(self.memory.at(self.placement.stage[stage as usize]));
            }
            let sums = |unit: u32, grad: Option<u32>, stale: &mut Vec<DeviceMemory>| {
                let accumulator = self.placement.accumulator[unit as usize];
                if op.micro_batch == 0
                    && let Some(sum) = accumulator
                {
                    stale.push(self.memory.at(sum));
                }
                let writes =
                    if accumulator.is_some() { op.micro_batch + 1 == shape.micro_batches } else { op.micro_batch == 0 };
                if let Some(grad) = grad.filter(|_| writes) {
                    stale.push(self.memory.at(self.placement.grads[grad as usize]));
                }
            };
            match op.kind {
                Kind::Loss => {
                    sums(op.unit, op.grad, &mut stale);
                    if self.tied && op.micro_batch == 0 {
                        let grad = self.placement.own_grad[0].filter(|_| self.placement.accumulator[0].is_none());
                        let whole = self.placement.accumulator[0].or(grad.map(|g| self.placement.grads[g as usize]));
                        stale.extend(whole.map(|range| self.memory.at(range)));
                    }
                    if self.rounds_tied(op, shape) {
                        let grad = self.placement.own_grad[0].map(|g| self.placement.grads[g as usize]);
                        stale.extend(grad.map(|range| self.memory.at(range)));
                    }
                }
                Kind::Backward => sums(op.unit, op.grad, &mut stale),
                // A tied embedding's sum was begun by the loss; its transfer buffer is still written afresh at the end.
                Kind::EmbedBackward if self.tied => {
                    let last = op.micro_batch + 1 == shape.micro_batches && self.placement.accumulator[0].is_some();
                    let grad = op.grad.filter(|_| last);
                    stale.extend(grad.map(|g| self.memory.at(self.placement.grads[g as usize])));
                }
                Kind::EmbedBackward => sums(op.unit, op.grad, &mut stale),
                _ => {}
            }
        }
        for memory in &stale {
            self.device.fill(Stream::Compute, memory, 0xff)?;
        }
        Ok(!stale.is_empty())
    }

    /// Whether the loss leaves the head's part of a tied gradient in the transfer buffer, where it is offloaded early.
    fn rounds_tied(&self, op: &Op, shape: Shape) -> bool {
        let last = shape.pass == Pass::Train && op.micro_batch + 1 == shape.micro_batches;
        op.kind == Kind::Loss && last && self.tied && self.inputs.early && self.placement.accumulator[0].is_some()
    }

    fn describe(&self, op: &Op, shape: Shape) -> ComputeOp {
        let (p, unit) = (&self.placement, op.unit as usize);
        let phase = match op.kind {
            Kind::Embed => Phase::Embed,
            Kind::Forward => Phase::Forward,
            Kind::Loss => Phase::Loss,
            Kind::Backward => Phase::Backward,
            _ => Phase::EmbedBackward,
        };
        let train = shape.pass == Pass::Train;
        let summing = train && matches!(phase, Phase::Loss | Phase::Backward | Phase::EmbedBackward);
        let tied_loss = self.tied && phase == Phase::Loss;
        let tied_sum = train && self.tied && matches!(phase, Phase::Loss | Phase::EmbedBackward);
        let holder = self.inputs.holder(op.unit) as usize;
        let place = op.slot.map_or(p.own[holder], |slot| Some(p.slots[slot as usize]));
        let (plan, in_large) = (&self.plan.units[unit], self.inputs.groups.has_in_large(op.micro_batch));
        ComputeOp {
            id: u64::from(op.id),
            phase,
            unit: op.unit,
            micro_batch: op.micro_batch,
            first: op.micro_batch == 0,
            last: op.micro_batch + 1 == shape.micro_batches,
            weights: place.map_or(0, |s| s.offset),
            tied_weights: p.own[0].filter(|_| tied_loss).map(|s| s.offset),
            grad: op.grad.filter(|_| summing).map(|g| p.grads[g as usize].offset),
            accumulator: p.accumulator[unit].filter(|_| summing).map(|s| s.offset),
            tied_accumulator: p.accumulator[0].filter(|_| tied_sum).map(|s| s.offset),
            tied_grad: p.own_grad[0].filter(|_| tied_loss && train).map(|g| p.grads[g as usize].offset),
            round_tied: self.rounds_tied(op, shape),
            activation: plan.activation_in(in_large),
            input_on_host: plan.input_in(in_large) != Place::Device,
            stage: op.stage.filter(|_| train).map(|s| p.stage[s as usize].offset),
        }
    }

    pub(super) fn finish(&self, id: u64) -> Result<()> {
        let mut core = self.enter()?;
        let current = core.current.as_mut().ok_or(Error::NoPass)?;
        let Some((held, start, began)) = current.held.take_if(|(held, ..)| u64::from(held.op) == id) else {
            return Err(Error::NotHandedOut { id });
        };
        let op = core.progress.op(held);
        if self.device.compute_is_host() {
            core.counters.busy(Lane::Compute, began.elapsed().as_secs_f64());
            let unit = &self.placement.layouts[op.unit as usize].name;
            self.trace.host(span_of(&op, unit), began, Instant::now());
            core.progress.complete(held);
        } else {
            drop(core);
            let took = began.elapsed();
            let query = || start.as_ref().map_or(Ok(false), |start| self.device.query(start));
            let caught_up = guarded(query).map_err(|cause| self.fail(&op, &cause))?;
            let end = guarded(|| self.device.record(Stream::Compute)).map_err(|cause| self.fail(&op, &cause))?;
            core = self.enter()?;
            if caught_up {
                core.counters.launching(took);
            }
            let token = Token { start, end };
            core.progress.issued(held, token.clone());
            core.awaited[Stream::Compute.index()].push_back((held, token));
        }
        if let Some(current) = core.current.as_mut() {
            current.finished += 1;
            if current.finished == current.computes.len() {
                core.trained |= current.shape.pass == Pass::Train;
                core.counters.pass_computed();
            }
        }
        drop(core);
        self.notify();
        Ok(())
    }
}
