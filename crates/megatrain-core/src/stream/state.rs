//! What the caller and the lanes share: one state under one lock.
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};

use super::kept::Kept;
use super::memory::Memory;
use super::rows::Rows;
use super::save::Saving;
use super::schedules::{KEPT_BYTES, Key, Prepared, ScheduleCache};
use super::stats::Counters;
use super::workers::{WORKED, guarded};
use super::{Group, Options};
use crate::adamw::Isa;
use crate::device::{Device, Event, Stream};
use crate::disk::Disk;
use crate::error::{Error, Result};
use crate::host::{Affinity, Pool};
use crate::optimizer::Adamw;
use crate::plan::{Placement, Plan, Request, UpdateMode};
use crate::schedule::progress::{Id, Progress};
use crate::schedule::{Op, Resident, Schedule, ScheduleInputs, Shape};
use crate::trace::Trace;

/// When an issued operation is over: an event, and one before it where times are kept.
#[derive(Clone)]
pub(super) struct Token {
    pub(super) start: Option<Event>,
    pub(super) end: Event,
}

/// What broke the engine first.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    unit: String,
    op: String,
    cause: String,
}

/// What has been decided about a pass's gradients.
#[derive(Clone, Debug)]
pub(super) struct Decision {
    pub(super) groups: Vec<Group>,
    pub(super) rows: Option<Arc<Rows>>,
    pub(super) grad_scale: f64,
    pub(super) skip: bool,
}

/// The newest pass, as its caller sees it.
pub(super) struct Current {
    pub(super) number: u64,
    pub(super) shape: Shape,
    /// Its compute operations in order, and how many have been finished.
    pub(super) computes: Arc<Vec<u32>>,
    pub(super) finished: usize,
    /// The operation that the caller holds.
    pub(super) held: Option<(Id, Option<Event>, Instant)>,
    /// What of it failed that concerns no other pass. It can only be abandoned then.
    pub(super) failure: Option<Failure>,
}

impl Current {
    /// # Errors
    /// [`Error::PassFailed`].
    pub(super) fn check(&self) -> Result<()> {
        self.failure.as_ref().map_or(Ok(()), |Failure { unit, op, cause }| {
            Err(Error::PassFailed { unit: unit.clone(), op: op.clone(), cause: cause.clone() })
        })
    }
}

#[derive(Default)]
pub(super) struct EngineState {
    pub(super) progress: Progress<Token>,
    pub(super) failure: Option<Failure>,
    pub(super) closing: bool,
    pub(super) current: Option<Current>,
    /// The training pass whose gradients wait for a decision.
    pub(super) undecided: Option<u64>,
    /// Whether a training pass has been computed, so that there are gradients to read.
    pub(super) trained: bool,
    /// Whether gradients of passes before have been accumulated and not been applied.
    pub(super) accumulated: bool,
    pub(super) decisions: HashMap<u64, Decision>,
    /// Updates of the newest pass that have begun (immediate mode cannot take them back).
    pub(super) updates_begun: bool,
    /// Issued operations whose events each device lane's second thread waits for.
    pub(super) awaited: [VecDeque<(Id, Token)>; 4],
    /// Units whose weights on the device are those on the host, once the newest pass is over.
    pub(super) resident: Vec<Resident>,
    /// The save that has been begun, until somebody has heard how it ended.
    pub(super) saving: Option<Saving>,
    /// By unit that is sent in part: which of its experts the group of micro-batches that was routed last needs.
    pub(super) routes: HashMap<usize, Vec<bool>>,
    pub(super) counters: Counters,
    /// Whether one operation runs at a time.
    pub(super) synchronous: bool,
}

pub(super) struct Shared {
    pub(super) device: Arc<dyn Device>,
    pub(super) disk: Arc<dyn Disk>,
    pub(super) plan: Plan,
    pub(super) placement: Placement,
    pub(super) inputs: ScheduleInputs,
    pub(super) immediate: bool,
    pub(super) tied: bool,
    pub(super) memory: Memory,
    pub(super) pool: Pool,
    pub(super) adamw: Adamw,
    pub(super) options: Options,
    pub(super) trace: Trace,
    /// The start of the trace on the device's clock; `None` where nothing is recorded.
    pub(super) trace_origin: Option<Event>,
    core: Mutex<EngineState>,
    changed: Condvar,
    /// Schedules made so far, under a lock of their own.
    pub(super) schedules: Mutex<ScheduleCache>,
}

/// A time limit.
#[derive(Clone, Copy)]
pub(super) struct Deadline(Instant);

impl Deadline {
    pub(super) fn after(limit: Duration) -> Self {
        // A limit beyond what the clock counts is as good as a day.
        Self(Instant::now().checked_add(limit).unwrap_or_else(|| Instant::now() + Duration::from_secs(86400)))
    }
}

impl Shared {
    pub(super) fn new(
        device: Arc<dyn Device>,
        disk: Arc<dyn Disk>,
        request: &Request,
        plan: &Plan,
        options: &Options,
        kept: Option<&Kept>,
    ) -> Result<Self> {
        request.check()?;
        plan.matches(request)?;
        let placement = Placement::new(request, plan)?;
        kept.map_or(Ok(()), |kept| kept.check(&placement))?;
        let inputs = ScheduleInputs::from_placement(request, plan, &placement);
        let isa = Isa::select(options.isa.as_deref())?;
        let pool = Pool::new(options.threads, &Affinity::Free)?;
        pool.fail_run(options.fail_pool_run);
        // A failure, or a panic, half-way may leave copies queued, which hold memory until they have run.
        let unfinished = Unfinished(device.as_ref());
        let memory = Memory::new(&placement, device.as_ref(), &pool, &disk, options, kept)?;
        std::mem::forget(unfinished);
        // Statistics are kept of every run, so that events keep their times whether or not spans are recorded.
        device.keep_times(true);
        let trace_origin = if options.trace {
            let event = device.record(Stream::Upload)?;
            device.synchronize(&event)?;
            Some(event)
        } else {
            None
        };
        let trace = Trace::new(options.trace);
        Ok(Self {
            device,
            disk,
            plan: plan.clone(),
            placement,
            inputs,
            immediate: request.update == UpdateMode::Immediate,
            tied: request.tied,
            memory,
            pool,
            adamw: Adamw::new(isa),
            options: options.clone(),
            trace,
            trace_origin,
            core: Mutex::new(EngineState { synchronous: options.synchronous, ..EngineState::default() }),
            changed: Condvar::new(),
            schedules: Mutex::new(ScheduleCache::new(KEPT_BYTES)),
        })
    }

    /// The state, whatever happened to other threads: what changes it under the lock does not panic half-way.
    pub(super) fn lock(&self) -> MutexGuard<'_, EngineState> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state, unless the engine is broken or closed.
    pub(super) fn enter(&self) -> Result<MutexGuard<'_, EngineState>> {
        let core = self.lock();
        core.check()?;
        Ok(core)
    }

    pub(super) fn wait<'a>(&self, core: MutexGuard<'a, EngineState>) -> MutexGuard<'a, EngineState> {
        self.changed.wait(core).unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `done` returns something, the engine breaks, or time is up.
    pub(super) fn wait_until<'a, R>(
        &self,
        mut core: MutexGuard<'a, EngineState>,
        deadline: Deadline,
        mut done: impl FnMut(&mut EngineState) -> Option<R>,
    ) -> Result<Poll<(MutexGuard<'a, EngineState>, R)>> {
        loop {
            core.check()?;
            if let Some(answer) = done(&mut core) {
                return Ok(Poll::Ready((core, answer)));
            }
            let left = deadline.0.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(Poll::Pending);
            }
            core = self.changed.wait_timeout(core, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Something has changed that others may wait for.
    pub(super) fn notify(&self) {
        self.changed.notify_all();
    }

    /// Marks the engine broken by an operation of a schedule; the first failure is the one that is reported.
    pub(super) fn fail(&self, op: &Op, cause: &str) -> Error {
        self.fail_unit(op.unit as usize, op.kind.name(), cause)
    }

    /// Makes device calls that are no operation of a schedule. When one fails or panics, the engine is broken: copies queued
    /// before it may still run, so that the memory they use must not be used again.
    pub(super) fn guard<R>(&self, unit: usize, op: &str, calls: impl FnOnce() -> Result<R>) -> Result<R> {
        guarded(calls).map_err(|cause| self.fail_unit(unit, op, &cause))
    }

    /// Ends a pass of which an operation has failed that concerns no other one: nothing of it begins any more.
    pub(super) fn fail_pass(&self, id: Id, op: &Op, cause: String) {
        let mut core = self.lock();
        let unit = self.placement.layouts[op.unit as usize].name.clone();
        core.progress.halt(id.pass);
        core.progress.forget(id);
        if let Some(current) = core.current.as_mut().filter(|current| current.number == id.pass) {
            current.failure.get_or_insert(Failure { unit, op: op.kind.name().to_owned(), cause });
        }
        drop(core);
        self.notify();
    }

    pub(super) fn fail_unit(&self, unit: usize, op: &str, cause: &str) -> Error {
        let mut core = self.lock();
        let unit = self.placement.layouts[unit].name.clone();
        let failure = Failure { unit, op: op.to_owned(), cause: cause.to_owned() };
        let error = core.failure.get_or_insert(failure).error();
        drop(core);
        self.notify();
        error
    }

    /// The schedule of a pass, made and checked once. Takes a while for a large one, so that it is not asked for under the
    /// lock of the state.
    pub(super) fn schedule(&self, key: &Key, previous: Option<&Schedule>) -> Result<Arc<Prepared>> {
        let cache = || self.schedules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(prepared) = cache().get(key) {
            return Ok(prepared);
        }
        let prepared = Arc::new(Prepared::new(&self.inputs, key, previous)?);
        cache().put(key.clone(), Arc::clone(&prepared));
        Ok(prepared)
    }

    pub(super) fn close(&self) {
        let mut core = self.lock();
        core.closing = true;
        core.saving.iter().for_each(|saving| saving.save.close());
        drop(core);
        self.notify();
    }

    /// Waits until the device is done with our memory.
    pub(super) fn settle(&self) {
        settle(self.device.as_ref());
    }
}

/// Settles the device when it is dropped.
struct Unfinished<'a>(&'a dyn Device);

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        settle(self.0);
    }
}

/// Waits until everything queued on a device is over. Errors no longer matter to anyone, and a panic would abort the process
/// where another one drops the engine.
fn settle(device: &dyn Device) {
    for stream in Stream::ALL {
        let _ = guarded(|| device.synchronize(&device.record(stream)?));
    }
}

impl Failure {
    fn error(&self) -> Error {
        Error::Broken { unit: self.unit.clone(), op: self.op.clone(), cause: self.cause.clone() }
    }
}

impl EngineState {
    pub(super) fn check(&self) -> Result<()> {
        match &self.failure {
            Some(failure) => Err(failure.error()),
            None if self.closing => Err(Error::Closed),
            None => Ok(()),
        }
    }

    /// Whether the newest pass has something left to compute.
    pub(super) fn computing(&self) -> bool {
        self.current.as_ref().is_some_and(|c| c.finished < c.computes.len())
    }

    /// Drops the newest pass, of which nothing must be under way. What it has left on the device is not known.
    pub(super) fn drop_newest(&mut self) {
        self.progress.drop_newest();
        self.resident.clear();
    }

    /// Whether a lane may take an operation now: with one at a time, only when nothing is under way.
    pub(super) fn may_take(&self) -> bool {
        !self.synchronous || self.progress.under_way() == 0
    }

    /// Whether nothing is under way and nothing can begin but what the caller computes or decides.
    pub(super) fn is_drained(&self) -> bool {
        let held = usize::from(self.current.as_ref().is_some_and(|c| c.held.is_some()));
        self.progress.under_way() == held && !WORKED.into_iter().any(|lane| self.progress.is_ready(lane))
    }
}
