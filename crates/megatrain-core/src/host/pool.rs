//! The optimizer's own threads: a fixed division of the work, so that each thread works on the same pages every step.
//!
//! Not a work-stealing pool on purpose: stealing undoes locality, and a pool shared with PyTorch's would fight it for
//! cores. The number of threads follows what the process may use, not `OMP_NUM_THREADS`, which launchers set to 1.
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::PoisonError;
#[cfg(not(loom))]
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
#[cfg(not(loom))]
use std::thread::{Builder, JoinHandle};

// Under `--cfg loom` the pool runs on loom's primitives, which try every order of their calls (tests/loom.rs).
#[cfg(loom)]
use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
#[cfg(loom)]
use loom::thread::{Builder, JoinHandle};

use super::process::Process;
use crate::error::{Error, Result};

/// Cores left to the thread that launches work, and to autograd's.
const SPARED_CPUS: usize = 2;

/// Which cores the workers run on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Affinity {
    /// Wherever the system puts them.
    #[default]
    Free,
    /// Worker `i` on the `i`-th of these cores, starting over when there are more workers than cores.
    Cores(Vec<usize>),
}

/// A job handed to the workers; its borrow is over before [`Pool::run`] returns.
#[derive(Clone, Copy)]
struct Job(*const (dyn Fn(usize) + Sync));

// SAFETY: the pointee is `Sync`, so that calling it from several threads is allowed, and `Pool::run` keeps it alive
// until the last worker has reported.
unsafe impl Send for Job {}

#[derive(Default)]
struct State {
    job: Option<Job>,
    num_jobs: usize,
    /// Counts runs, so that a worker knows a new one from the one it has finished.
    generation: u64,
    /// Workers that have not finished the current run.
    busy: usize,
    /// What the first worker that failed said.
    failure: Option<String>,
    /// Fault injection: runs to go before one fails; 0 when none is to fail.
    fail_in: u64,
    stop: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    start: Condvar,
    done: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No code of a job runs under this lock, so a poisoned lock holds a consistent state.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A dedicated pool of worker threads, joined when dropped.
pub struct Pool {
    shared: Arc<Shared>,
    /// One run at a time; callers queue here.
    turn: Mutex<()>,
    workers: Vec<JoinHandle<()>>,
    process: Process,
}

impl Pool {
    /// Starts `threads` workers; `None`: [`default_threads`].
    ///
    /// # Errors
    /// [`Error`] for 0 threads or an empty list of cores, [`Error::Worker`] when a thread cannot be started or
    /// bound to its core.
    pub fn new(threads: Option<usize>, affinity: &Affinity) -> Result<Self> {
        let threads = threads.unwrap_or_else(default_threads);
        if threads == 0 {
            return Err(Error::OutOfRange { setting: "threads", value: 0, least: 1, most: None, why: "" });
        }
        if *affinity == Affinity::Cores(Vec::new()) {
            return Err(Error::NoCores);
        }
        let mut pool = Self {
            shared: Arc::new(Shared::default()),
            turn: Mutex::new(()),
            workers: Vec::new(),
            process: Process::current(),
        };
        for index in 0..threads {
            let shared = Arc::clone(&pool.shared);
            let worker = Builder::new()
                .name(format!("megatrain-opt-{index}"))
                .spawn(move || work(&shared, index, threads))
                .map_err(|e| Error::Worker(format!("thread {index} of {threads} could not be started: {e}")))?;
            pool.workers.push(worker);
        }
        if let Affinity::Cores(cores) = affinity {
            let bound = Mutex::new(Ok(()));
            pool.run(threads, &|index| {
                let core = cores[index % cores.len()];
                if let Err(e) = bind_to_core(core) {
                    let failure = Error::Worker(format!("thread {index} could not be bound to core {core}: {e}"));
                    *bound.lock().unwrap_or_else(PoisonError::into_inner) = Err(failure);
                }
            })?;
            bound.into_inner().unwrap_or_else(PoisonError::into_inner)?;
        }
        Ok(pool)
    }

    /// How many workers there are.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.workers.len()
    }

    /// Calls `job(i)` for each `i` below `num_jobs`, job `i` on worker `i % threads`, and waits for all of them.
    /// Must not be called from inside a job.
    ///
    /// # Errors
    /// [`Error::Worker`] when a job panicked; the others have run, and the pool can be used again.
    pub fn run(&self, num_jobs: usize, job: &(dyn Fn(usize) + Sync)) -> Result<()> {
        if num_jobs == 0 {
            return Ok(());
        }
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: only the lifetime is erased. Workers use the pointer between the start of this run and their report,
        // and this function returns only after all of them have reported (`busy == 0`), whatever panics in a job.
        let job = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync + 'static)>(job)
        };
        let mut state = self.shared.lock();
        state.job = Some(Job(job));
        state.num_jobs = num_jobs;
        state.busy = self.workers.len();
        state.generation += 1;
        self.shared.start.notify_all();
        while state.busy > 0 {
            state = self.shared.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.job = None;
        match state.failure.take() {
            None => Ok(()),
            Some(cause) => Err(Error::Worker(cause)),
        }
    }

    /// Fault injection for tests: the `nth` run from now (1 is the next) fails in one worker.
    pub fn fail_run(&self, nth: u64) {
        self.shared.lock().fail_in = nth;
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if self.process.is_forked() {
            // The workers run in the parent only.
            self.workers.drain(..).for_each(std::mem::forget);
            return;
        }
        self.shared.lock().stop = true;
        self.shared.start.notify_all();
        for worker in self.workers.drain(..) {
            // Panics of jobs are caught, so a worker ends only by returning.
            let _ = worker.join();
        }
    }
}

fn work(shared: &Shared, index: usize, threads: usize) {
    let mut seen = 0;
    loop {
        let mut state = shared.lock();
        while state.generation == seen && !state.stop {
            state = shared.start.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.generation == seen {
            return;
        }
        seen = state.generation;
        let job = state.job.expect("a new generation is published together with its job");
        let num_jobs = state.num_jobs;
        let injected = index == 0 && state.fail_in > 0 && {
            state.fail_in -= 1;
            state.fail_in == 0
        };
        drop(state);
        let mut failure = None;
        for i in (index..num_jobs).step_by(threads) {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                assert!(!injected, "injected fault");
                // SAFETY: `Pool::run` keeps the job alive until this worker has reported, below.
                let job = unsafe { &*job.0 };
                job(i);
            }));
            if let Err(payload) = outcome {
                failure.get_or_insert_with(|| format!("job {i} on thread {index} of {threads}: {}", words(&*payload)));
            }
        }
        let mut state = shared.lock();
        if let Some(cause) = failure {
            state.failure.get_or_insert(cause);
        }
        state.busy -= 1;
        if state.busy == 0 {
            shared.done.notify_all();
        }
    }
}

fn words(payload: &(dyn Any + Send)) -> &str {
    payload
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| payload.downcast_ref::<&str>().copied())
        .unwrap_or("panicked")
}

/// The default number of workers: the cores that the process may use less two, at least one.
#[must_use]
pub fn default_threads() -> usize {
    permitted_cpus().saturating_sub(SPARED_CPUS).max(1)
}

/// Cores that this process may use at once: its affinity mask and the quotas of its control groups, as the standard
/// library reads them (both versions of control groups, with all ancestors, rounded down).
#[must_use]
pub fn permitted_cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(target_os = "linux")]
fn bind_to_core(core: usize) -> std::io::Result<()> {
    if core >= 8 * size_of::<libc::cpu_set_t>() {
        return Err(std::io::Error::from_raw_os_error(libc::EINVAL));
    }
    // SAFETY: `cpu_set_t` is a plain array of words, for which all zeros is a value.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the core's index lies inside the set, as checked above.
    unsafe { libc::CPU_SET(core, &mut set) };
    // SAFETY: `set` is a live, initialised set of the size given; 0 names the calling thread.
    match unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

#[cfg(not(target_os = "linux"))]
fn bind_to_core(_core: usize) -> std::io::Result<()> {
    Err(std::io::Error::from(std::io::ErrorKind::Unsupported))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn every_job_runs_once_on_its_own_thread() {
        let pool = Pool::new(Some(3), &Affinity::Free).unwrap();
        let names: Vec<Mutex<Vec<String>>> = (0..10).map(|_| Mutex::default()).collect();
        for _ in 0..2 {
            pool.run(10, &|i| {
                let name = std::thread::current().name().unwrap().to_owned();
                names[i].lock().unwrap().push(name);
            })
            .unwrap();
        }
        for (i, seen) in names.into_iter().enumerate() {
            let expected = format!("megatrain-opt-{}", i % 3);
            assert_eq!(seen.into_inner().unwrap(), [expected.clone(), expected]);
        }
    }

    #[test]
    fn a_panic_is_an_error_and_the_pool_goes_on() {
        let pool = Pool::new(Some(2), &Affinity::Free).unwrap();
        let finished = AtomicUsize::new(0);
        let error = pool
            .run(4, &|i| {
                assert!(i != 1, "job one is bad");
                finished.fetch_add(1, Ordering::Relaxed);
            })
            .unwrap_err();
        assert!(error.to_string().contains("job 1 on thread 1 of 2: job one is bad"), "{error}");
        assert_eq!(finished.load(Ordering::Relaxed), 3);
        pool.run(1, &|_| ()).unwrap();
    }

    #[test]
    fn an_injected_fault_hits_the_named_run_only() {
        let pool = Pool::new(Some(2), &Affinity::Free).unwrap();
        pool.fail_run(2);
        pool.run(2, &|_| ()).unwrap();
        assert!(pool.run(2, &|_| ()).unwrap_err().to_string().contains("injected fault"));
        pool.run(2, &|_| ()).unwrap();
    }

    #[test]
    fn callers_on_several_threads_take_turns() {
        let pool = Pool::new(Some(2), &Affinity::Free).unwrap();
        let total = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        pool.run(3, &|_| _ = total.fetch_add(1, Ordering::Relaxed)).unwrap();
                    }
                });
            }
        });
        assert_eq!(total.load(Ordering::Relaxed), 600);
    }

    #[test]
    fn workers_can_be_bound_to_cores_and_a_core_that_is_not_there_is_an_error() {
        if cfg!(target_os = "linux") {
            Pool::new(Some(2), &Affinity::Cores(vec![0])).unwrap();
            let error = Pool::new(Some(1), &Affinity::Cores(vec![1 << 20])).err().unwrap();
            assert!(error.to_string().contains("core 1048576"), "{error}");
        }
        assert!(Pool::new(Some(0), &Affinity::Free).is_err());
        assert!(Pool::new(Some(1), &Affinity::Cores(vec![])).is_err());
    }

    #[test]
    fn the_default_leaves_two_cores_and_is_at_least_one() {
        assert!(default_threads() >= 1);
        assert!(default_threads() + SPARED_CPUS >= permitted_cpus().min(3));
    }
}
