//! Whatever fails, wherever: the engine says which unit and operation, refuses everything after, and never hangs.
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use megatrain_core::device::sim::{FailedCall, Faults, SimDevice};
use megatrain_core::error::Error;
use megatrain_core::plan::{Count, Place, Request, UpdateMode, plan};
use megatrain_core::stream::{Engine, Options};

mod support;
use support::{FOREVER, Toy, request};

fn mixed(update: UpdateMode) -> Request {
    let mut request = Request { update, ..request(4, 2) };
    request.requests.inputs = Some(Place::Host);
    request.requests.state_on_device = Some(Count::Units(3));
    (request.requests.updates_on_device, request.requests.parts) = (Some(Count::Units(1)), Some(2));
    request
}

/// Calls of each kind that three steps make, set-up included.
fn calls(request: &Request) -> std::collections::HashMap<&'static str, u64> {
    let device = SimDevice::new(Some(1), Faults::default()).queueing_compute();
    run(request, &device).unwrap();
    device.calls()
}

fn run(request: &Request, device: &SimDevice) -> Result<(), Error> {
    let options = Options { threads: Some(1), huge_pages: false, poison: true, ..Options::default() };
    let engine = Engine::new(Arc::new(device.clone()), request, &plan(request)?, &options)?;
    let toy = Toy::new(device.clone(), request.clone());
    let result = (|| {
        toy.fill(&engine)?;
        for step in 0..3 {
            toy.step(&engine, step, Some(0.5))?;
        }
        toy.state(&engine).map(|_| ())
    })();
    if let Err(Error::Broken { .. }) = &result {
        // From then on everything is refused with the same words, whatever is asked.
        let first = result.as_ref().unwrap_err().to_string();
        assert_eq!(engine.drain(FOREVER).unwrap_err().to_string(), first);
        assert_eq!(engine.next(FOREVER).map(|_| ()).unwrap_err().to_string(), first);
        assert_eq!(toy.state(&engine).unwrap_err().to_string(), first);
        assert_eq!(engine.stats().unwrap_err().to_string(), first);
    }
    result
}

#[test]
fn every_device_call_that_fails_is_told_and_ends_the_run() {
    for update in [UpdateMode::JustInTime, UpdateMode::Immediate] {
        let request = mixed(update);
        let counts = calls(&request);
        for call in ["copy_to_device", "copy_to_host", "fill", "sum_squares", "adamw", "record", "wait", "synchronize"]
        {
            let total = counts.get(call).copied().unwrap_or(0);
            assert!(total > 0, "{call} is never made");
            // Some of the calls: the first, the last but a few (later ones may fall to closing), and between.
            for nth in (0..6).map(|i| 1 + i * (total * 3 / 4) / 5) {
                let fail = vec![FailedCall { call: call.to_owned(), nth, panic: false, lost: false }];
                let device = SimDevice::new(Some(nth), Faults { fail, ..Faults::default() }).queueing_compute();
                let text = run(&request, &device).err().map(|e| e.to_string()).unwrap_or_default();
                // What has passed already is not waited for, so that the number of waits differs from run to run.
                if text.is_empty() && call == "wait" && device.calls().get(call).is_none_or(|&made| made < nth) {
                    continue;
                }
                assert!(text.contains("asked to fail"), "{update:?}: call {nth} of {total} {call}: {text:?}");
                let in_a_step = text.starts_with("the engine is broken since");
                assert!(in_a_step || text.starts_with("device call"), "{text}");
            }
        }
    }
}

#[test]
fn a_device_that_is_lost_is_told_once_whatever_fails_while_that_is_handled() {
    // H34: from one call on everything fails or panics, in every lane, while the first failure is told and the engine
    // closed. What was queued on the device is never run, so it keeps its memory, and nothing waits for it.
    for update in [UpdateMode::JustInTime, UpdateMode::Immediate] {
        let request = mixed(update);
        let counts = calls(&request);
        let mut broken = 0;
        for call in ["copy_to_device", "copy_to_host", "sum_squares", "adamw", "record"] {
            for nth in (1..6).map(|i| 1 + i * counts[call] / 8) {
                let panic = nth % 2 == 0;
                let fail = vec![FailedCall { call: call.to_owned(), nth, panic, lost: true }];
                let device = SimDevice::new(Some(nth), Faults { fail, ..Faults::default() }).queueing_compute();
                let ran = std::panic::catch_unwind(AssertUnwindSafe(|| run(&request, &device)));
                assert!(device.refused() > 1, "{update:?}, {call} {nth}: closing makes calls");
                // A panic between steps is the caller's, who has made the call; one in a step is an error of the engine.
                let Ok(result) = ran else { continue };
                let text = result.unwrap_err().to_string();
                let words = if panic { "asked to panic" } else { "asked to fail" };
                assert!(text.contains(words), "{update:?}: {text}");
                broken += u32::from(text.starts_with("the engine is broken since"));
            }
        }
        assert!(broken > 12, "{update:?}: only {broken} of 25 runs broke in a step");
    }
}

#[test]
fn a_device_update_that_fails_names_its_unit_and_operation() {
    for update in [UpdateMode::JustInTime, UpdateMode::Immediate] {
        let mut request = Request { update, ..request(4, 2) };
        request.requests.updates_on_device = Some(Count::Units(2));
        let counts = calls(&request);
        for (call, words) in [("copy_to_device", "bring"), ("adamw", "update"), ("copy_to_host", "return")] {
            let told = |nth: u64| {
                let fail = vec![FailedCall { call: call.to_owned(), nth, panic: false, lost: false }];
                let device = SimDevice::new(Some(nth), Faults { fail, ..Faults::default() }).queueing_compute();
                run(&request, &device).err().map(|e| e.to_string()).unwrap_or_default()
            };
            let of_update = |text: &String| text.contains(words) && text.contains("asked to fail");
            let text = (1..=counts[call]).map(told).find(of_update).unwrap();
            assert!(text.contains("layers.1") || text.contains("layers.3"), "{text}");
        }
    }
}

#[test]
fn what_cannot_be_allocated_is_told_before_anything_runs() {
    let request = mixed(UpdateMode::JustInTime);
    let total = plan(&request).unwrap().totals.device;
    let faults = Faults { memory_bytes: Some(total / 2), ..Faults::default() };
    let device = SimDevice::new(None, faults);
    let error = run(&request, &device).unwrap_err().to_string();
    assert!(error.contains("allocate") && error.contains("of the plan"), "{error}");
    assert_eq!(device.allocated_bytes().0, 0, "nothing is left behind");
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
        toy.begin(&engine, megatrain_core::schedule::Pass::Train, 2, false).unwrap();
        for _ in 0..stop_after {
            let op = engine.next(FOREVER).map(support::ready).unwrap().unwrap();
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
