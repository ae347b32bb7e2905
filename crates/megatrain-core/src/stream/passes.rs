//! Where passes begin and end: begin, the clip decision, abandon, drain.
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use super::schedules::{Key, Prepared};
use super::state::{Current, Deadline, Decision, EngineState, Shared};
use super::workers::guarded;
use super::{Begin, Group, Outcome};
use crate::adamw::clip::{clip_coefficient, global_norm};
use crate::device::Stream;
use crate::error::{Error, Result};
use crate::layout::Role;
use crate::schedule::progress::Id;
use crate::schedule::{Kind, Pass, Shape};

/// Returns early with `Pending`, like `?` does with an error.
macro_rules! ready {
    ($poll:expr) => {
        match $poll {
            Poll::Ready(value) => value,
            Poll::Pending => return Ok(Poll::Pending),
        }
    };
}

impl Shared {
    pub(super) fn begin(&self, begin: &Begin, limit: Duration) -> Result<Poll<()>> {
        let deadline = Deadline::after(limit);
        let mut made: Option<(Key, Arc<Prepared>)> = None;
        loop {
            let core = self.enter()?;
            self.may_begin(&core, begin)?;
            let waits_for_all = core.undecided.is_some();
            let (core, ()) = ready!(self.wait_until(core, deadline, |core| {
                core.progress.retire();
                let ready = if waits_for_all { core.is_drained() } else { core.progress.alive() < 2 };
                ready.then_some(())
            })?);
            // A pass follows the newest one, unless that one's gradients wait; then nothing is known about what is on the
            // device.
            let previous = core.progress.newest().map(|(_, schedule)| schedule).filter(|_| core.undecided.is_none());
            let writes = core.saving.as_ref().is_some_and(|s| s.pass.is_none());
            let shape = Shape { pass: begin.pass, micro_batches: begin.micro_batches, writes };
            let resident = if previous.is_some() { core.resident.clone() } else { Vec::new() };
            let key = (shape, resident, previous.as_ref().map(|p| (p.shape, p.resident.clone())));
            if let Some((_, prepared)) = made.take_if(|(for_key, _)| *for_key == key) {
                return self.begin_prepared(core, begin, shape, &prepared).map(Poll::Ready);
            }
            // The lanes go on meanwhile. Should another call change what the pass follows, it is made again.
            drop(core);
            let prepared = self.schedule(&key, previous.as_deref())?;
            made = Some((key, prepared));
        }
    }

    fn begin_prepared(
        &self,
        mut core: std::sync::MutexGuard<'_, EngineState>,
        begin: &Begin,
        shape: Shape,
        prepared: &Prepared,
    ) -> Result<()> {
        if let Err(cause) = guarded(|| self.device.set_compute_stream(begin.compute_stream)) {
            drop(core);
            return Err(self.fail_unit(0, "begin", &cause));
        }
        if let Some(undecided) = core.undecided {
            // The pass whose gradients wait is kept; an evaluation after it changes nothing, and gradients that are
            // added to have been accumulated.
            if core.progress.newest().is_some_and(|(number, _)| number != undecided) {
                core.drop_newest();
            }
            if begin.pass == Pass::Train {
                core.drop_newest();
                core.undecided = None;
                core.accumulated = true;
            }
        } else if begin.pass == Pass::Train {
            core.accumulated = false;
        }
        core.synchronous = self.options.synchronous || begin.synchronous;
        core.resident.clone_from(&prepared.leaves);
        let number = core.progress.begin(Arc::clone(&prepared.schedule));
        if let Some(saving) = core.saving.as_mut().filter(|_| shape.writes) {
            saving.pass = Some(number);
        }
        if begin.pass == Pass::Train {
            core.undecided = Some(number);
            core.updates_begun = false;
            if let Some(groups) = begin.groups.as_ref().filter(|_| self.immediate) {
                let rows = begin.rows.clone().map(Arc::new);
                let decision = Decision { groups: groups.clone(), rows, grad_scale: 1.0, skip: false };
                core.decisions.insert(number, decision);
            }
        }
        let EngineState { decisions, progress, .. } = &mut *core;
        decisions.retain(|&pass, _| progress.is_alive(pass));
        core.counters.pass_begun(begin.pass == Pass::Train);
        let computes = Arc::clone(&prepared.computes);
        core.current = Some(Current { number, shape, computes, finished: 0, held: None, failure: None });
        drop(core);
        self.notify();
        Ok(())
    }

    fn may_begin(&self, core: &EngineState, begin: &Begin) -> Result<()> {
        if core.computing() {
            return Err(Error::PassUnderWay { remedy: "compute all of it, or abandon it, before another one begins" });
        }
        if begin.pass != Pass::Train {
            return Ok(());
        }
        begin.rows.iter().try_for_each(|rows| rows.check(&self.placement.layouts[0]))?;
        match (core.undecided, begin.accumulate) {
            (Some(_), false) => return Err(Error::GradientsWait),
            (None, true) => return Err(Error::NothingToAccumulate),
            (_, true) if self.immediate => return Err(Error::ImmediateAccumulation),
            (_, true) if !self.inputs.accumulate => return Err(Error::NoGradientStore),
            _ => {}
        }
        match &begin.groups {
            Some(groups) if self.immediate => self.check_groups(groups),
            None if self.immediate => Err(Error::GroupsAtWrongTime { when: "immediate", given: "when a pass begins" }),
            Some(_) => Err(Error::GroupsAtWrongTime {
                when: "just-in-time",
                given: "when gradients are applied, not when a pass begins",
            }),
            None => Ok(()),
        }
    }

    fn check_groups(&self, groups: &[Group]) -> Result<()> {
        for tensor in self.placement.layouts.iter().flat_map(|l| &l.tensors).filter(|t| t.spec.role == Role::Trainable)
        {
            if tensor.spec.group as usize >= groups.len() {
                let (tensor, group) = (tensor.spec.name.clone(), tensor.spec.group);
                return Err(Error::MissingGroup { tensor, group, given: groups.len() });
            }
        }
        for group in groups {
            // Refused here, where nothing has changed yet, rather than in the middle of the updates.
            let (betas, decay) = ((group.beta1, group.beta2), group.weight_decay);
            crate::adamw::AdamwScalars::new(group.lr, betas, group.eps, decay, 1, 1.0)?;
        }
        Ok(())
    }

    /// Waits until every gradient of the undecided pass has been offloaded.
    fn gradients_offloaded<'a>(
        &'a self,
        core: std::sync::MutexGuard<'a, EngineState>,
        deadline: Deadline,
    ) -> Result<Poll<(std::sync::MutexGuard<'a, EngineState>, Id)>> {
        let number = core.undecided.ok_or(Error::NothingToApply)?;
        if core.computing() {
            return Err(Error::PassUnderWay { remedy: "compute all of it first" });
        }
        let schedule = core.progress.schedule(number);
        let decision = schedule.ops.iter().find(|op| op.kind == Kind::ClipDecision).map(|op| op.id);
        let id = Id { pass: number, op: decision.expect("a training pass has a clip decision") };
        self.wait_until(core, deadline, move |core| core.progress.op_is_ready(id).then_some(id))
    }

    fn norm(&self) -> f64 {
        let partials = self.placement.norm.iter().zip(&self.memory.sums);
        global_norm(
            partials
                .filter_map(|(norm, sums)| norm.as_ref().map(|norm| sums.elements::<f64>(0, norm.blocks).to_vec()))
                .flatten(),
        )
    }

    pub(super) fn gradient_norm(&self, limit: Duration) -> Result<Poll<f64>> {
        let (core, _) = ready!(self.gradients_offloaded(self.enter()?, Deadline::after(limit))?);
        drop(core);
        Ok(Poll::Ready(self.norm()))
    }

    pub(super) fn apply(&self, groups: &[Group], max_norm: Option<f64>, limit: Duration) -> Result<Poll<Outcome>> {
        if let Some(max_norm) = max_norm {
            if self.immediate {
                return Err(Error::ImmediateClipping { max_norm });
            }
            if !(max_norm.is_finite() && max_norm >= 0.0) {
                let what = "max_grad_norm".to_owned();
                return Err(Error::WrongNumber { what, value: max_norm, allowed: "finite and at least 0" });
            }
        }
        if !self.immediate {
            self.check_groups(groups)?;
        }
        let deadline = Deadline::after(limit);
        let core = self.enter()?;
        let evaluated = core.undecided.is_some() && core.progress.newest().map(|(n, _)| n) != core.undecided;
        let (core, waiting) = ready!(self.gradients_offloaded(core, deadline)?);
        let (mut core, ()) =
            ready!(self.wait_until(core, deadline, |core| (!evaluated || core.is_drained()).then_some(()))?);
        if evaluated {
            // Updates follow the training pass directly: what the evaluation left on the device is read no more.
            core.drop_newest();
        }
        let grad_norm = self.norm();
        let skipped = !grad_norm.is_finite() && !self.immediate;
        let clip = match max_norm {
            Some(max_norm) if !skipped => f64::from(clip_coefficient(grad_norm, max_norm)),
            _ => 1.0,
        };
        if !self.immediate {
            let decision = Decision { groups: groups.to_vec(), rows: None, grad_scale: clip, skip: skipped };
            core.decisions.insert(waiting.pass, decision);
        }
        core.progress.take_op(waiting);
        core.progress.complete(waiting);
        core.undecided = None;
        core.accumulated = false;
        core.counters.applied();
        drop(core);
        self.notify();
        Ok(Poll::Ready(Outcome { grad_norm, clip, skipped }))
    }

    pub(super) fn abandon(&self, limit: Duration) -> Result<Poll<()>> {
        let deadline = Deadline::after(limit);
        let mut core = self.enter()?;
        let running = core.computing();
        if core.undecided.is_none() && !running {
            return Ok(Poll::Ready(()));
        }
        let Some((newest, schedule)) = core.progress.newest() else { return Ok(Poll::Ready(())) };
        core.progress.halt(newest);
        let training = core.undecided == Some(newest);
        if self.immediate && training && core.updates_begun {
            let op = schedule
                .ops
                .iter()
                .find(|op| op.kind == Kind::ClipDecision)
                .cloned()
                .expect("training has a clip decision");
            drop(core);
            return Err(
                self.fail(&op, "the pass was abandoned after some units had been updated, which cannot be undone")
            );
        }
        let mut unit = 0;
        if let Some((held, ..)) = core.current.as_mut().and_then(|c| c.held.take()) {
            unit = core.progress.op(held).unit as usize;
            core.progress.forget(held);
        }
        let (mut core, ()) = ready!(self.wait_until(core, deadline, |core| {
            (core.progress.under_way_of(newest) == 0 && core.is_drained()).then_some(())
        })?);
        // What the caller launched for the operation that it held may still run.
        if !self.device.compute_is_host() {
            drop(core);
            let launched = || self.device.synchronize(&self.device.record(Stream::Compute)?);
            self.guard(unit, "abandon", launched)?;
            core = self.enter()?;
        }
        core.drop_newest();
        if let Some(undecided) = core.undecided.take()
            && undecided != newest
        {
            if training || !running {
                core.drop_newest();
            } else {
                // An evaluation was abandoned; the gradients before it still wait.
                core.undecided = Some(undecided);
            }
        }
        core.current = None;
        // Gradients that an abandoned pass was to be added to are gone with it.
        core.accumulated &= core.undecided.is_some();
        Ok(Poll::Ready(()))
    }

    pub(super) fn drain(&self, limit: Duration) -> Result<Poll<()>> {
        let deadline = Deadline::after(limit);
        if !self.lock().computing() {
            ready!(self.carry_save(limit)?);
        }
        let waited = self.wait_until(self.enter()?, deadline, |core| core.is_drained().then_some(()))?;
        Ok(waited.map(|_| ()))
    }
}
