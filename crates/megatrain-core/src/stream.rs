//! The engine: runs schedules on a device, lends each unit's weights to whoever computes, and takes gradients back.
//!
//! ```text
//! begin -> next -> (compute) -> finish -> next ... -> None -> apply
//! ```
//!
//! The caller computes; everything else happens on lanes, one thread per lane, which issue the ready operation of lowest
//! priority number (`schedule/progress.rs`). Device lanes have a second thread that waits for events and marks what is over. A
//! lease on a unit's weights ends when [`Engine::finish`] records an event on the compute stream; nothing is overwritten
//! before that event.
//!
//! Calls that wait take a time limit and return [`Poll::Pending`] when it is over, so that a caller can handle
//! signals. Once an operation has failed, every call returns [`crate::Error::Broken`] with the unit and the operation.
use std::sync::Arc;
use std::task::Poll;
use std::thread::JoinHandle;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use self::access::PlaneName;
pub use self::compute::{ComputeOp, Phase};
pub use self::kept::Kept;
pub use self::lanes::{LaneState, Lanes};
pub use self::rows::Rows;
pub use self::save::{SaveFile, Saved};
pub use self::schedules::CachedSchedules;
use self::state::Shared;
pub use self::stats::Stats;
use crate::device::{Device, DeviceMemory};
use crate::disk::{Disk, RealDisk};
use crate::error::{Item, Result};
use crate::host::Process;
use crate::layout::UnitLayout;
use crate::plan::{Plan, Region, Request};
use crate::schedule::{Lane, Pass};
use crate::store::spill::StateFiles;

#[expect(unsafe_code, reason = "queues copies of host memory")]
mod access;
mod compute;
#[expect(unsafe_code, reason = "queues copies of host memory")]
mod device_update;
mod disk_update;
#[expect(unsafe_code, reason = "queues copies of host memory")]
mod execute;
mod input_io;
mod kept;
mod lanes;
#[expect(unsafe_code, reason = "queues copies of host memory")]
mod memory;
mod passes;
mod routes;
mod rows;
mod save;
mod schedules;
mod state;
mod stats;
mod workers;

/// How an engine is to run; none of it changes the numbers, apart from the seed.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Options {
    /// Threads of the host's optimizer; by default all permitted ones less two.
    pub threads: Option<usize>,
    /// Fill every buffer with NaN before it is used again.
    pub poison: bool,
    /// Run one operation at a time.
    pub synchronous: bool,
    /// Ask for huge pages.
    pub huge_pages: bool,
    /// Record every operation for [`Engine::trace`].
    pub trace: bool,
    /// The optimizer's instruction set; by default the best there is.
    pub isa: Option<String>,
    /// Seed of the stochastic rounding of smaller states.
    pub seed: u64,
    /// Where state is kept whose home is a disk, and layer inputs that wait there; needed where the plan has any.
    pub disk: Option<StateFiles>,
    /// Fault injection for tests: this run of the optimizer's threads fails, counted from 1; 0 lets all succeed.
    #[doc(hidden)]
    #[serde(skip)]
    pub fail_pool_run: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            threads: None,
            poison: false,
            synchronous: false,
            huge_pages: true,
            trace: false,
            isa: None,
            seed: 0,
            disk: None,
            fail_pool_run: 0,
        }
    }
}

/// Hyper-parameters of one parameter group, as in `torch.optim.AdamW`.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Group {
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    /// Nothing of the group has a gradient in this step, so that all of it stays as it is, counts of updates included.
    pub idle: bool,
}

/// A pass to begin.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Begin {
    /// What it is for.
    pub pass: Pass,
    /// Its micro-batches, at most the plan's.
    pub micro_batches: u32,
    /// The `CUstream` on which the caller computes.
    pub compute_stream: u64,
    /// Hyper-parameters by group: with immediate updates only.
    pub groups: Option<Vec<Group>>,
    /// The rows of the embedding that a training pass looks up, where they are known. Without them, all its rows wait
    /// for the end of backward.
    pub rows: Option<Rows>,
    /// Adds this pass's gradients to those of the last one, which have not been applied.
    pub accumulate: bool,
    /// Runs one operation at a time from here to the next pass, whatever [`Options::synchronous`] says.
    pub synchronous: bool,
}

impl Begin {
    /// A pass of this kind, on the default compute stream.
    #[must_use]
    pub const fn new(pass: Pass, micro_batches: u32) -> Self {
        Self { pass, micro_batches, compute_stream: 0, groups: None, rows: None, accumulate: false, synchronous: false }
    }
}

/// Result of one optimizer step.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Outcome {
    /// The norm before clipping, over what was transferred; not finite when a gradient was not.
    pub grad_norm: f64,
    /// What the gradients were multiplied with.
    pub clip: f64,
    /// Whether the update was skipped because a gradient was not finite.
    pub skipped: bool,
}

/// The engine over one model's units.
pub struct Engine {
    shared: Arc<Shared>,
    threads: std::sync::Mutex<Vec<JoinHandle<()>>>,
    process: Process,
}

impl Engine {
    /// Allocates what the plan lists and starts the lanes.
    ///
    /// # Errors
    /// [`crate::Error`] when the plan was made for another request, and the errors of allocation.
    pub fn new(device: Arc<dyn Device>, request: &Request, plan: &Plan, options: &Options) -> Result<Self> {
        Self::with_disk(device, Arc::new(RealDisk), request, plan, options)
    }

    /// [`Engine::new`] with its files on another disk than the system's.
    ///
    /// # Errors
    /// As there.
    pub fn with_disk(
        device: Arc<dyn Device>,
        disk: Arc<dyn Disk>,
        request: &Request,
        plan: &Plan,
        options: &Options,
    ) -> Result<Self> {
        Self::start(Shared::new(device, disk, request, plan, options, None)?)
    }

    /// An engine that takes over the state of one that was closed, under a plan by which all of that stays where it is. Its
    /// files are on the same disk, and in the same folders unless `options` name others. Where this fails, another plan can be tried, such as the one before.
    ///
    /// # Errors
    /// [`crate::Error::OtherState`] when it would not stay, [`crate::Error::StateInUse`] while another engine has it, and those
    /// of [`Engine::new`].
    pub fn with_kept(
        device: Arc<dyn Device>,
        request: &Request,
        plan: &Plan,
        options: &Options,
        kept: &Kept,
    ) -> Result<Self> {
        let mut taken = kept.taken.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if taken.strong_count() > 0 {
            return Err(crate::Error::StateInUse);
        }
        let disk = options.disk.clone().or_else(|| kept.folders.clone());
        let options = Options { disk, ..options.clone() };
        let engine = Self::start(Shared::new(device, Arc::clone(&kept.disk), request, plan, &options, Some(kept))?)?;
        *taken = Arc::downgrade(&engine.shared);
        Ok(engine)
    }

    fn start(shared: Shared) -> Result<Self> {
        let shared = Arc::new(shared);
        let engine =
            Self { shared: Arc::clone(&shared), threads: std::sync::Mutex::default(), process: Process::current() };
        let started = workers::start(&shared, &mut engine.lock_threads());
        started.map(|()| engine)
    }

    /// The layout of each unit.
    #[must_use]
    pub fn layouts(&self) -> &[UnitLayout] {
        &self.shared.placement.layouts
    }

    /// The items as they were allocated; those of the plan, less torch's.
    #[must_use]
    pub fn allocated(&self) -> Vec<Item> {
        self.shared.memory.items(&self.shared.placement)
    }

    /// Bytes of all host mappings.
    #[must_use]
    pub fn mapped_bytes(&self) -> u64 {
        self.shared.memory.mapped_bytes()
    }

    /// Requests that could not be honoured, one sentence per request.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        self.shared.memory.warnings.clone()
    }

    /// A device region; without bytes when the plan needs none.
    #[must_use]
    pub fn region(&self, region: Region) -> DeviceMemory {
        self.shared.memory.region(region).clone()
    }

    /// The offset in [`Region::Weights`] of a unit with a place of its own.
    #[must_use]
    pub fn weights_offset(&self, unit: usize) -> Option<u64> {
        self.shared.placement.own.get(unit).copied().flatten().map(|s| s.offset)
    }

    /// Whether anything can be asked of it.
    ///
    /// # Errors
    /// [`crate::Error::Broken`], with what broke it first.
    pub fn check(&self) -> Result<()> {
        self.shared.enter().map(drop)
    }

    /// Starts a pass.
    ///
    /// # Errors
    /// [`crate::Error`] when a pass is under way, gradients wait for a decision, or groups are missing.
    pub fn begin(&self, begin: &Begin, limit: Duration) -> Result<Poll<()>> {
        self.shared.begin(begin, limit)
    }

    /// The next operation to compute, once its inputs are on their way and the compute stream waits for them; `None`
    /// when the pass has no more.
    ///
    /// # Errors
    /// [`crate::Error`] when no pass has begun or the last operation has not been finished; [`crate::Error::PassFailed`] once a
    /// layer's input could not be written to disk or read again, until the pass is abandoned.
    pub fn next(&self, limit: Duration) -> Result<Poll<Option<ComputeOp>>> {
        self.shared.next(limit)
    }

    /// Names the experts of `unit` that the micro-batch needs whose forward the caller is computing, in the unit that routes
    /// to them: those that any micro-batch of its group needs are sent ([`crate::plan::Routed`]).
    ///
    /// # Errors
    /// [`crate::Error::NotRouting`] at another time, or when not every expert is named as wanted or not.
    pub fn route(&self, unit: usize, wanted: &[bool]) -> Result<()> {
        self.shared.route(unit, wanted)
    }

    /// The operation's work has been launched on the compute stream.
    ///
    /// # Errors
    /// [`crate::Error`] when another operation, or none, was handed out.
    pub fn finish(&self, id: u64) -> Result<()> {
        self.shared.finish(id)
    }

    /// The norm over all gradients of the pass, once they have been offloaded.
    ///
    /// # Errors
    /// [`crate::Error`] when no gradients wait.
    pub fn gradient_norm(&self, limit: Duration) -> Result<Poll<f64>> {
        self.shared.gradient_norm(limit)
    }

    /// Decides: clips to `max_norm`, queues the updates (they run in the background of what follows), or skips them when a gradient
    /// is not finite. Immediate updates have been queued before: then this only waits and reports.
    ///
    /// # Errors
    /// [`crate::Error`] when no gradients wait, or a group is missing.
    pub fn apply(&self, groups: &[Group], max_norm: Option<f64>, limit: Duration) -> Result<Poll<Outcome>> {
        self.shared.apply(groups, max_norm, limit)
    }

    /// Drops a pass that has begun and was not applied. After immediate updates have run, the engine is broken instead.
    ///
    /// # Errors
    /// [`crate::Error::Broken`] then.
    pub fn abandon(&self, limit: Duration) -> Result<Poll<()>> {
        self.shared.abandon(limit)
    }

    /// Waits for every pending update and copy.
    ///
    /// # Errors
    /// [`crate::Error::Broken`].
    pub fn drain(&self, limit: Duration) -> Result<Poll<()>> {
        self.shared.drain(limit)
    }

    /// Where every lane stands now, whatever has become of the engine.
    #[must_use]
    pub fn lanes(&self) -> Lanes {
        self.shared.lanes()
    }

    /// Figures of the last pass that was finished.
    ///
    /// # Errors
    /// [`crate::Error::Broken`].
    pub fn stats(&self) -> Result<Stats> {
        self.shared.stats()
    }

    /// What the cache of schedules holds. It is no part of the plan, which counts what a step works in.
    #[must_use]
    pub fn cached_schedules(&self) -> CachedSchedules {
        self.shared.schedules.lock().unwrap_or_else(std::sync::PoisonError::into_inner).held()
    }

    /// Chrome trace (Perfetto) of everything recorded so far.
    #[must_use]
    pub fn trace(&self) -> String {
        self.shared.trace.to_json(&Lane::ALL.map(Lane::name))
    }

    /// Stops the lanes and waits for the device. Calls after this return [`crate::Error::Closed`]. Does nothing in a fork of
    /// the engine's process, where there are no lanes, and whose copies of locks may be held by threads it does not have.
    pub fn close(&self) {
        if self.process.is_forked() {
            return;
        }
        self.shared.close();
        for thread in self.lock_threads().drain(..) {
            // Panics on a lane are caught there, so a thread ends only by returning.
            let _ = thread.join();
        }
        self.shared.settle();
        self.shared.memory.release_files();
    }

    fn lock_threads(&self) -> std::sync::MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.threads.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.process.is_forked() {
            // What the lanes, the pool and the device hold is the parent's.
            std::mem::forget(Arc::clone(&self.shared));
            let threads = self.threads.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
            threads.drain(..).for_each(std::mem::forget);
            return;
        }
        self.close();
    }
}
