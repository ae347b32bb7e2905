//! Whatever fails, wherever: the engine says which unit and operation, refuses everything after, frees everything and never
//! hangs.
use std::collections::BTreeSet;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use megatrain_core::device::Device;
use megatrain_core::device::sim::{FailedCall, Faults, SimDevice};
use megatrain_core::error::{Error, Result};
use megatrain_core::layout::Role;
use megatrain_core::plan::{Count, Place, Request, UpdateMode, plan};
use megatrain_core::schedule::Pass;
use megatrain_core::store::Plane;
use megatrain_core::stream::{Engine, Options, PlaneName, SaveFile};

mod support;
use support::{FOREVER, GROUPS, Toy, ready, request};

/// Long enough for the slowest machine: only a hang is longer.
const HANG: Duration = Duration::from_secs(300);

/// Every kind of unit: state on the device, state that is copied there to be updated, state on the host; inputs offloaded.
fn mixed(update: UpdateMode) -> Request {
    let mut request = Request { update, ..request(4, 2) };
    request.requests.inputs = Some(Place::Host);
    request.requests.state_on_device = Some(Count::Units(3));
    (request.requests.updates_on_device, request.requests.parts) = (Some(Count::Units(1)), Some(2));
    request
}

fn options() -> Options {
    Options { threads: Some(1), huge_pages: false, poison: true, trace: true, ..Options::default() }
}

/// A folder that goes with its guard.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("megatrain-failures-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn files(engine: &Engine, folder: &Path) -> Vec<SaveFile> {
    let trainable = |plane: Plane| -> Vec<(usize, usize)> {
        let of_unit = |(u, layout): (usize, &megatrain_core::layout::UnitLayout)| {
            let tensors = layout.tensors.iter().enumerate();
            let wanted = tensors.filter(|(_, t)| plane == Plane::Weights || t.spec.role == Role::Trainable);
            wanted.map(|(t, _)| (u, t)).collect::<Vec<_>>()
        };
        engine.layouts().iter().enumerate().flat_map(of_unit).collect()
    };
    let file = |plane: Plane| SaveFile {
        path: folder.join(plane.name()),
        header: vec![7; 24],
        plane,
        tensors: trainable(plane),
    };
    [Plane::Weights, Plane::ExpAvg, Plane::ExpAvgSq].map(file).into()
}

/// All that an engine is used for: state written and read, steps, a save while a step runs, an evaluation, a pass that is
/// abandoned.
fn use_engine(engine: &Engine, toy: &Toy, folder: &Path) -> Result<()> {
    toy.fill(engine)?;
    toy.step(engine, 0, Some(0.5))?;
    engine.begin_save(files(engine, folder), 8192, 1)?;
    toy.step(engine, 1, Some(0.5))?;
    engine.finish_save(FOREVER).map(ready)?;
    toy.begin(engine, Pass::Eval, 1, false)?;
    toy.compute(engine, 2)?;
    toy.state(engine)?;
    for (unit, layout) in engine.layouts().iter().enumerate() {
        let mut gradient = vec![0; layout.tensors[0].spec.numel() as usize * 4];
        match engine.read(unit, 0, PlaneName::Gradient, 0, &mut gradient) {
            Err(Error::GradientGone { .. }) => {}
            other => other?,
        }
    }
    toy.begin(engine, Pass::Eval, 2, false)?;
    let op = engine.next(FOREVER).map(ready)?.unwrap();
    toy.launch(engine, &op, 3);
    engine.abandon(FOREVER).map(ready)?;
    toy.fill(engine)?;
    toy.step(engine, 4, None)?;
    engine.stats()?;
    engine.drain(FOREVER).map(ready)
}

/// From the first failure on, every call is refused with its words.
fn assert_refuses(engine: &Engine, toy: &Toy, first: &Error, folder: &Path) {
    assert!(matches!(first, Error::Broken { .. }), "{first}");
    let refusals = [
        engine.check(),
        engine.drain(FOREVER).map(|_| ()),
        engine.next(FOREVER).map(|_| ()),
        engine.finish(0),
        engine.apply(&GROUPS, None, FOREVER).map(|_| ()),
        engine.gradient_norm(FOREVER).map(|_| ()),
        engine.abandon(FOREVER).map(|_| ()),
        toy.begin(engine, Pass::Eval, 1, false),
        toy.state(engine).map(|_| ()),
        toy.fill(engine),
        engine.set_step_count(0, 0, 1),
        engine.stats().map(|_| ()),
        engine.begin_save(files(engine, folder), 8192, 1),
    ];
    for refusal in refusals {
        assert_eq!(refusal.unwrap_err().to_string(), first.to_string());
    }
    // A save that was under way ends too.
    if let Err(error) = engine.finish_save(FOREVER) {
        assert!(matches!(error, Error::Broken { .. } | Error::NoSave), "{error}");
    }
    engine.cancel_save();
}

/// What one run with a fault led to.
struct Ran {
    /// The failure, and whether the engine had been made by then.
    failure: Option<(Error, bool)>,
    /// Calls of the device that were made to fail before the engine was closed.
    refused: u64,
    warnings: Vec<String>,
}

/// Uses an engine to its end, with the checks that hold after any failure. It must end in time, and unless the device was
/// lost, nothing of it must be left: no thread, no device memory, no registration.
fn run(request: &Request, device: &SimDevice, options: &Options, lost: bool) -> Ran {
    let (sender, receiver) = mpsc::channel();
    let (request, device, options) = (request.clone(), device.clone(), options.clone());
    let thread = std::thread::spawn(move || {
        let shared: Arc<dyn Device> = Arc::new(device.clone());
        let weak = Arc::downgrade(&shared);
        let folder = Folder::new();
        let made = || Engine::new(Arc::clone(&shared), &request, &plan(&request)?, &options);
        let made = std::panic::catch_unwind(AssertUnwindSafe(made)).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().expect("the simulated device panics with a text").clone();
            Err(Error::Worker(text))
        });
        let ran = match made {
            Err(error) => Ran { failure: Some((error, false)), refused: device.refused(), warnings: Vec::new() },
            Ok(engine) => {
                let toy = Toy::new(device.clone(), request.clone());
                let failure = use_engine(&engine, &toy, &folder.0).err();
                let refused = device.refused();
                if let Some(first) = &failure {
                    assert_refuses(&engine, &toy, first, &folder.0);
                }
                let warnings = engine.warnings();
                drop(engine);
                Ran { failure: failure.map(|error| (error, true)), refused, warnings }
            }
        };
        drop(shared);
        // Every lane and every waiting thread holds the device.
        assert_eq!(weak.strong_count(), 0, "a thread of the engine is still there");
        assert_eq!(device.pinned_bytes(), 0);
        // A failure while the engine is closed leaves what is queued to the device, as does one that is lost.
        if !lost && ran.refused == device.refused() {
            assert_eq!(device.allocated_bytes().0, 0, "device memory is left");
        }
        sender.send(ran).expect("the test waits");
    });
    match receiver.recv_timeout(HANG) {
        Ok(ran) => {
            thread.join().unwrap();
            ran
        }
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("a run with a fault hangs"),
        Err(mpsc::RecvTimeoutError::Disconnected) => std::panic::resume_unwind(thread.join().unwrap_err()),
    }
}

fn faulty(seed: u64, call: &str, nth: u64, panic: bool, lost: bool) -> SimDevice {
    let fail = vec![FailedCall { call: call.to_owned(), nth, panic, lost }];
    SimDevice::new(Some(seed), Faults { fail, ..Faults::default() }).queueing_compute()
}

/// Calls of each kind that a run makes.
fn calls(request: &Request) -> std::collections::HashMap<&'static str, u64> {
    let device = SimDevice::new(Some(1), Faults::default()).queueing_compute();
    let ran = run(request, &device, &options(), false);
    assert!(ran.failure.is_none(), "{:?}", ran.failure);
    device.calls()
}

const CALLS: [&str; 12] = [
    "allocate",
    "set_compute_stream",
    "copy_to_device",
    "copy_to_host",
    "fill",
    "sum_squares",
    "adamw",
    "record",
    "wait",
    "query",
    "synchronize",
    "elapsed_ms",
];

/// Makes each call of a name fail in turn, until a run makes no call of that number any more.
fn fail_each(update: UpdateMode, names: &[&str], panic: bool, lost: bool) {
    let request = mixed(update);
    let counts = calls(&request);
    for &call in names {
        let (mut broken, mut operations) = (0, BTreeSet::new());
        for nth in 1.. {
            let ran = run(&request, &faulty(nth, call, nth, panic, lost), &options(), lost);
            let place = format!("{update:?}, call {nth} of {call}, panic {panic}, lost {lost}");
            if ran.refused == 0 {
                assert!(ran.failure.is_none(), "{place}: {:?}", ran.failure);
                // How much of an abandoned pass was begun is chance, so that the numbers differ a little from run to run, and
                // what has passed already is not waited for; the last calls are made while the engine is closed.
                let enough = call == "wait" || nth * 10 >= counts[call] * 8;
                assert!(enough, "{place}: only {nth} of {} were made", counts[call]);
                break;
            }
            let (error, made) = ran.failure.unwrap_or_else(|| panic!("{place}: the failure was lost"));
            let words = if panic { "asked to panic" } else { "asked to fail" };
            assert!(error.to_string().contains(words), "{place}: {error}");
            match error {
                Error::Broken { unit, op, .. } => {
                    assert!(!unit.is_empty() && !op.is_empty(), "{place}");
                    operations.insert(op);
                    broken += 1;
                }
                other => assert!(!made, "{place}: {other}"),
            }
        }
        assert!(broken > 0 || call == "allocate", "{update:?}: no {call} failed in a step");
    }
}

#[test]
fn every_device_call_that_fails_breaks_the_engine_and_is_named() {
    fail_each(UpdateMode::JustInTime, &CALLS, false, false);
}

#[test]
fn every_device_call_that_fails_under_immediate_updates_breaks_the_engine_and_is_named() {
    fail_each(UpdateMode::Immediate, &CALLS, false, false);
}

#[test]
fn every_device_call_that_panics_is_an_error_of_the_engine() {
    fail_each(UpdateMode::JustInTime, &CALLS, true, false);
}

#[test]
fn a_device_that_is_lost_is_reported_once_whatever_fails_while_that_is_handled() {
    // H34: from one call on everything fails, in every lane, while the first failure is reported and the engine closed. What
    // was queued on the device is never run, so it keeps its memory, and nothing waits for it.
    fail_each(UpdateMode::JustInTime, &CALLS, false, true);
}

#[test]
fn a_device_that_is_lost_with_a_panic_is_reported_once_too() {
    fail_each(UpdateMode::Immediate, &["copy_to_device", "copy_to_host", "adamw", "synchronize"], true, true);
}

#[test]
fn every_run_of_the_optimizers_threads_that_fails_breaks_the_engine_and_is_named() {
    for update in [UpdateMode::JustInTime, UpdateMode::Immediate] {
        let request = mixed(update);
        let mut broken = 0;
        for nth in 1.. {
            let device = SimDevice::new(Some(nth), Faults::default()).queueing_compute();
            let ran = run(&request, &device, &Options { fail_pool_run: nth, ..options() }, false);
            let Some((error, made)) = ran.failure else { break };
            assert!(error.to_string().contains("optimizer thread failed"), "{update:?}, run {nth}: {error}");
            match error {
                Error::Broken { op, .. } => {
                    assert_eq!(op, "update");
                    broken += 1;
                }
                other => assert!(!made, "{other}"),
            }
        }
        // Three steps, in each of which the host updates two units.
        assert!(broken >= 6, "{update:?}: only {broken} updates failed");
    }
}

#[test]
fn memory_that_cannot_be_pinned_is_a_warning() {
    let request = mixed(UpdateMode::JustInTime);
    for nth in 1.. {
        let ran = run(&request, &faulty(nth, "pin", nth, false, false), &options(), false);
        assert!(ran.failure.is_none(), "{:?}", ran.failure);
        if ran.refused == 0 {
            assert!(nth > 1);
            break;
        }
        assert!(ran.warnings.iter().any(|w| w.contains("could be pinned") && w.contains("asked to fail")));
    }
}

#[test]
fn a_device_update_that_fails_names_its_unit_and_operation() {
    for update in [UpdateMode::JustInTime, UpdateMode::Immediate] {
        let mut request = Request { update, ..request(4, 2) };
        request.requests.updates_on_device = Some(Count::Units(2));
        let counts = calls(&request);
        for (call, words) in
            [("copy_to_device", "fetch_state"), ("adamw", "update"), ("copy_to_host", "write_back_state")]
        {
            let failure = |nth: u64| {
                let ran = run(&request, &faulty(nth, call, nth, false, false), &options(), false);
                ran.failure.map(|(error, _)| error.to_string()).unwrap_or_default()
            };
            let of_update = |text: &String| text.contains(words) && text.contains("asked to fail");
            let text = (1..=counts[call]).map(failure).find(of_update).unwrap();
            assert!(text.contains("layers.1") || text.contains("layers.3"), "{text}");
        }
    }
}

#[test]
fn memory_that_cannot_be_allocated_is_reported_before_anything_runs() {
    let request = mixed(UpdateMode::JustInTime);
    let total = plan(&request).unwrap().totals.device;
    let device = SimDevice::new(None, Faults { memory_bytes: Some(total / 2), ..Faults::default() });
    let (error, made) = run(&request, &device, &options(), false).failure.unwrap();
    let error = error.to_string();
    assert!(!made && error.contains("allocate") && error.contains("of the plan"), "{error}");
}

#[test]
fn closing_in_the_middle_of_anything_ends_at_once_and_frees_everything() {
    for stop_after in [0, 1, 5, 13] {
        let request = mixed(UpdateMode::JustInTime);
        let device = SimDevice::new(Some(stop_after), Faults::default()).queueing_compute();
        let options = Options { threads: Some(1), huge_pages: false, ..Options::default() };
        let engine = Engine::new(Arc::new(device.clone()), &request, &plan(&request).unwrap(), &options).unwrap();
        let toy = Toy::new(device.clone(), request.clone());
        toy.fill(&engine).unwrap();
        toy.begin(&engine, Pass::Train, 2, false).unwrap();
        for _ in 0..stop_after {
            let op = engine.next(FOREVER).map(ready).unwrap().unwrap();
            toy.launch(&engine, &op, 0);
            engine.finish(op.id).unwrap();
        }
        drop(engine);
        drop(toy);
        assert_eq!(device.allocated_bytes().0, 0);
        assert_eq!(device.pinned_bytes(), 0);
    }
}

#[test]
fn a_plan_made_for_another_request_is_refused() {
    let (one, other) = (request(4, 2), request(5, 2));
    let device = Arc::new(SimDevice::new(None, Faults::default()));
    let error = Engine::new(device, &other, &plan(&one).unwrap(), &Options::default()).err().unwrap().to_string();
    assert!(error.contains("another request") && error.contains("6 in it, 7 here"), "{error}");
}
