//! Layer inputs that wait on disk: what is written and read, what fails, and what a plan says of them.
use std::path::Path;
use std::sync::Arc;

use megatrain_core::disk::{Fault, FaultKind, SimDisk};
use megatrain_core::error::{Error, Tier};
use megatrain_core::layout::Precision;
use megatrain_core::plan::{Activation, Place, Plan, Request, Requests, UpdateMode, plan};
use megatrain_core::schedule::Pass;
use megatrain_core::store::spill::StateIo;
use megatrain_core::stream::{Engine, Options};

use super::files::{Folder, train};
use super::support::{FOREVER, Toy, request};
use super::{Run, options, queueing, sums, support};

const EIO: i32 = 5;
const ENOSPC: i32 = 28;

/// Two layers of three whose inputs go to disk.
fn with_inputs(update: UpdateMode, micro_batches: u32) -> Request {
    let mut request = Request { update, ..request(3, micro_batches) };
    (request.requests.inputs_on_disk, request.budget.disk) = (Some(2), 1 << 30);
    request
}

fn on_disk(plan: &Plan) -> usize {
    plan.units.iter().filter(|unit| unit.input == Place::Disk).count()
}

#[test]
fn an_input_is_written_once_and_read_once_in_a_step_and_never_in_an_evaluation() {
    for (group, activation) in [(4, None), (2, None), (1, None), (2, Some(Activation::Offload))] {
        let mut request = with_inputs(UpdateMode::JustInTime, 4);
        (request.requests.group, request.requests.activation) = (Some(group), activation);
        request.requests.keep = activation.is_none().then_some(0);
        let run = Run::start(&request);
        // Those of a group have places, which the next one's overwrite: a page each, or the pages of what is offloaded.
        let pages = run.plan.totals.disk / u64::from(2 * group) / 4096;
        assert_eq!(pages, if activation.is_none() { 1 } else { (4096 + 128 * 512 + 512u64).div_ceil(4096) });
        assert_eq!(sums(&run.plan), (run.plan.totals.host, run.plan.totals.disk));
        let allocated = |tier: Tier| run.engine.allocated().iter().filter(|i| i.tier == tier).map(|i| i.bytes).sum();
        assert_eq!((run.plan.totals.host, run.plan.totals.disk), (allocated(Tier::Host), allocated(Tier::Disk)));
        for step in 0..2 {
            run.toy.step(&run.engine, step, Some(0.5)).unwrap();
            assert_eq!(run.moved(), [8, 8], "groups of {group}");
            let stats = run.engine.stats().unwrap();
            assert_eq!([stats.state_bytes_read, stats.state_bytes_written], [8 * pages * 4096; 2]);
            assert_eq!(
                [run.plan.estimate.disk_read, run.plan.estimate.disk_written],
                [8 * pages * 4096; 2],
                "as was expected"
            );
        }
        run.toy.begin(&run.engine, Pass::Eval, 4, false).unwrap();
        run.toy.compute(&run.engine, 9).unwrap();
        assert_eq!(run.moved(), [0, 0], "an evaluation leaves the disk alone");
    }
}

#[test]
fn inputs_in_files_are_what_they_were_by_rings_and_by_threads_on_one_path_or_several() {
    let (one, other) = (Folder::new("inputs"), Folder::new("more-inputs"));
    for update in [UpdateMode::JustInTime, UpdateMode::Immediate] {
        let mut in_memory = Request { update, ..request(3, 2) };
        // Places of several blocks, the last one a part of a block.
        in_memory.units.iter_mut().for_each(|unit| unit.input_bytes = (5 << 19) + 700);
        let toy = Toy::new(queueing(1), in_memory.clone());
        let engine = support::engine(&toy.device, &in_memory, &plan(&in_memory).unwrap(), &Options::default());
        let expected = train(&toy, &engine.unwrap());
        for io in [StateIo::Auto, StateIo::Threads] {
            for paths in [&[&one.0 as &Path][..], &[&one.0, &other.0]] {
                let mut request = in_memory.clone();
                (request.requests.inputs_on_disk, request.budget.disk) = (Some(3), 1 << 30);
                let toy = Toy::new(queueing(2), request.clone());
                let (device, plan) = (Arc::new(toy.device.clone()), plan(&request).unwrap());
                let engine = Engine::new(device, &request, &plan, &options(paths, io)).unwrap();
                assert!(train(&toy, &engine) == expected, "{update:?}, {io:?}, {} paths", paths.len());
                engine.close();
                assert!(one.names().is_empty() && other.names().is_empty(), "a closed engine has removed its folders");
            }
        }
    }
}

/// A filled engine on a disk that then fails like this.
fn start(request: &Request, disk: &SimDisk, faults: Vec<Fault>) -> (Toy, Engine) {
    let options = Options { threads: Some(1), huge_pages: false, poison: true, ..Options::default() };
    let toy = Toy::new(queueing(3), request.clone());
    let engine = support::engine_on(disk, &toy.device, request, &plan(request).unwrap(), &options).unwrap();
    toy.fill(&engine).unwrap();
    disk.arm(faults);
    (toy, engine)
}

#[test]
fn whatever_fails_of_an_input_ends_its_pass_alone_and_the_step_can_be_made_again() {
    for update in [UpdateMode::JustInTime, UpdateMode::Immediate] {
        let request = with_inputs(update, 2);
        let whole = support::state_disk();
        let (toy, engine) = start(&request, &whole, Vec::new());
        for step in 0..2 {
            toy.step(&engine, step, Some(0.5)).unwrap();
        }
        let expected = toy.state(&engine).unwrap();
        let calls = whole.calls();
        let moved = calls.iter().filter(|call| call.starts_with("read") || call.starts_with("write")).count();
        assert_eq!((moved, calls.len()), (16, 16), "{calls:?}");
        let (mut again, mut lost) = (0, 0);
        for (call, name) in calls.iter().enumerate() {
            for kind in [FaultKind::Error(EIO), FaultKind::Error(ENOSPC), FaultKind::Short, FaultKind::FlipBit] {
                let faults = vec![Fault { call: call as u64, kind }];
                let (toy, engine) = start(&request, &support::state_disk(), faults);
                let (mut failed, mut step) = (0, 0);
                let ended = loop {
                    if step == 2 {
                        break toy.state(&engine);
                    }
                    match toy.step(&engine, step, Some(0.5)) {
                        Ok(_) => step += 1,
                        Err(error) => {
                            failed += 1;
                            named(&error, kind);
                            // Until it is abandoned, the pass fails with the same words, and no other one begins.
                            let same = engine.next(FOREVER).map(|_| ()).unwrap_err();
                            assert_eq!(same.to_string(), error.to_string());
                            let other = toy.begin(&engine, Pass::Train, 2, false).unwrap_err();
                            assert!(matches!(other, Error::PassUnderWay { .. }), "{other}");
                            if let Err(error) = engine.abandon(FOREVER) {
                                break Err(error);
                            }
                        }
                    }
                };
                match ended {
                    Ok(found) => {
                        assert!(found == expected, "{update:?}: {kind:?} at {name}");
                        assert_eq!(failed, usize::from(kind != FaultKind::Short), "{kind:?} at {name}");
                        again += failed;
                    }
                    Err(error) => {
                        let Error::Broken { cause, .. } = &error else { panic!("{error}") };
                        assert!(update == UpdateMode::Immediate && cause.contains("cannot be undone"), "{error}");
                        lost += 1;
                    }
                }
            }
        }
        assert!(again > 16, "{update:?}: {again} passes were made again");
        assert_eq!(lost > 0, update == UpdateMode::Immediate, "{lost}");
    }
}

/// The error says which unit and micro-batch, which file, what was to be done and what the system said.
fn named(error: &Error, kind: FaultKind) {
    let message = error.to_string();
    assert!(matches!(error, Error::PassFailed { .. }), "{message}");
    assert!(
        message.contains("write_input of unit layers.") || message.contains("read_input of unit layers."),
        "{message}"
    );
    assert!(message.contains("input of unit layers.") && message.contains("(micro-batch "), "{message}");
    assert!(message.contains("/state/") || message.contains("/more/"), "{message}");
    match kind {
        FaultKind::Error(EIO) => assert!(message.contains("Input/output error"), "{message}"),
        FaultKind::Error(_) => assert!(message.contains("No space left"), "{message}"),
        FaultKind::FlipBit => {
            assert!(message.contains("was damaged on disk") && message.contains("checksum"), "{message}")
        }
        _ => panic!("{message}"),
    }
}

#[test]
fn a_failed_input_costs_nothing_of_the_state_that_is_on_disk_too() {
    let mut request = with_inputs(UpdateMode::JustInTime, 2);
    (request.requests.state_on_disk, request.requests.parts) = (Some(5), Some(2));
    let start = || {
        let run = Run::start(&request);
        run.toy.step(&run.engine, 0, Some(0.5)).unwrap();
        run
    };
    let run = start();
    run.moved();
    run.toy.step(&run.engine, 1, Some(0.5)).unwrap();
    let expected = run.toy.state(&run.engine).unwrap();
    let run = start();
    run.moved();
    run.disk.arm(vec![Fault { call: 1, kind: FaultKind::Error(EIO) }]);
    let error = run.toy.step(&run.engine, 1, Some(0.5)).unwrap_err();
    named(&error, FaultKind::Error(EIO));
    let _ = run.engine.abandon(FOREVER).unwrap();
    run.toy.step(&run.engine, 1, Some(0.5)).unwrap();
    assert!(run.toy.state(&run.engine).unwrap() == expected);
}

/// Layers whose inputs are larger than all else.
fn long_rows(update: UpdateMode) -> Request {
    let mut request = Request { update, precision: Precision::Bf16, ..request(6, 2) };
    request.grad_precision = Precision::Bf16;
    request.requests = Requests { slabs: (update == UpdateMode::Immediate).then_some(1), ..Requests::default() };
    for unit in &mut request.units {
        (unit.kept_bytes, unit.input_bytes) = (40 << 20, 4 << 20);
    }
    request.budget.disk = 1 << 30;
    // Neither all inputs nor any activations fit on the device.
    request.requests.keep = Some(0);
    let mut host = request.clone();
    host.requests.inputs = Some(Place::Host);
    request.budget.device = plan(&host).unwrap().totals.device + (8 << 20);
    request
}

#[test]
fn inputs_go_to_disk_only_where_the_host_is_too_small_and_no_more_of_them_than_have_to() {
    for update in [UpdateMode::JustInTime, UpdateMode::Immediate] {
        let base = long_rows(update);
        let roomy = plan(&base).unwrap();
        assert_eq!((on_disk(&roomy), roomy.totals.disk, roomy.input_buffers), (0, 0, 0));
        assert!(roomy.units[1..7].iter().all(|unit| unit.input == Place::Host));
        let with = |count: u32| {
            let mut request = base.clone();
            request.requests.inputs_on_disk = Some(count);
            let found = plan(&request).unwrap();
            assert_eq!(on_disk(&found), count as usize);
            assert_eq!(sums(&found), (found.totals.host, found.totals.disk));
            found.totals.host
        };
        let needs: Vec<u64> = (0..=6).map(with).collect();
        let mut last = f64::INFINITY;
        let mut seen = std::collections::BTreeSet::new();
        let least = *needs.iter().min().unwrap();
        for host in (least..roomy.totals.host + 4096)
            .step_by(1 << 20)
            .chain(needs.iter().copied())
            .collect::<std::collections::BTreeSet<_>>()
        {
            let mut request = base.clone();
            request.budget.host = host;
            assert!(megatrain_core::plan::fits(&request).unwrap());
            let found = plan(&request).unwrap();
            found.matches(&request).unwrap();
            assert!(found.totals.host <= host);
            // State on disk frees far less than an input, and is written and read as often.
            let inputs = needs.iter().position(|&need| need <= host).unwrap();
            let moved = found.estimate.disk_read + found.estimate.disk_written;
            assert!(
                on_disk(&found) <= inputs && moved <= (4 * 2 * inputs as u64) << 21,
                "{update:?}: {host} bytes, {moved}"
            );
            assert!(found.estimate.expected_step_s <= last * 1.0005, "{update:?}: {host} bytes make it slower");
            last = found.estimate.expected_step_s;
            seen.insert(on_disk(&found));
        }
        assert!(seen.contains(&0) && seen.len() > 3, "{seen:?}");
        let mut small = base.clone();
        small.budget.disk = 1 << 20;
        small.budget.host = least;
        match plan(&small) {
            Err(Error::DoesNotFit { tier: Tier::Disk, needed, .. }) => small.budget.disk = needed,
            Err(Error::DoesNotFit { tier: Tier::Host, needed, .. }) => small.budget.host = needed,
            Err(Error::DoesNotFit { tier: Tier::Device, needed, .. }) => small.budget.device = needed,
            other => panic!("{other:?}"),
        }
        plan(&small).unwrap();
    }
}

#[test]
fn a_step_with_inputs_on_disk_is_expected_to_take_as_long_as_reading_them() {
    let mut request = long_rows(UpdateMode::JustInTime);
    request.requests.inputs_on_disk = Some(6);
    // A disk slower than everything else.
    (request.rates.state_read_gbs, request.rates.state_write_gbs) = (1e-2, 1e-2);
    let found = plan(&request).unwrap();
    let moved = 6 * 2 * (4 << 20) as u64;
    assert_eq!((found.estimate.disk_read, found.estimate.disk_written), (moved, moved));
    // Written during forward, and then read during backward.
    let off = found.estimate.step_s / (2.0 * moved as f64 / 1e7) - 1.0;
    assert!(off.abs() < 0.15, "{} s for {moved} bytes each way", found.estimate.step_s);
}

#[test]
fn inputs_that_cannot_wait_on_disk_are_refused_by_name() {
    let base = with_inputs(UpdateMode::JustInTime, 2);
    let refused = |change: &dyn Fn(&mut Request)| {
        let mut request = base.clone();
        change(&mut request);
        plan(&request).unwrap_err().to_string()
    };
    let error = refused(&|r| r.requests.inputs_on_disk = Some(4));
    assert!(error.contains("plan.inputs_on_disk = 4 exceeds the 3 units of layers that are not kept"), "{error}");
    let error = refused(&|r| r.requests.keep = Some(2));
    assert!(error.contains("plan.inputs_on_disk = 2 exceeds the 1 units"), "{error}");
    let error = refused(&|r| r.requests.inputs = Some(Place::Device));
    assert!(error.contains("plan.inputs_on_disk = 2 contradicts plan.inputs"), "{error}");
    let error = refused(&|r| r.requests.inputs = Some(Place::Disk));
    assert!(error.contains("plan.inputs_on_disk"), "{error}");
    // A large group that is no larger keeps as many as the others.
    let error = refused(&|r| (r.requests.keep, r.requests.large_group) = (Some(2), Some(2)));
    assert!(error.contains("plan.inputs_on_disk = 2, but the plan keeps the activations of all but 1"), "{error}");
    let error = refused(&|r| r.budget.disk = 4096);
    assert!(error.contains("disk space"), "{error}");
    // A plan from a file that names no buffer for them.
    let mut wrong = plan(&base).unwrap();
    wrong.input_buffers = 0;
    let device = Arc::new(queueing(1));
    let error = Engine::new(device.clone(), &base, &wrong, &Options::default()).err().unwrap().to_string();
    assert!(error.contains("input_buffers") && error.contains("layer inputs on disk pass through them"), "{error}");
    let error = Engine::new(device, &base, &plan(&base).unwrap(), &Options::default()).err().unwrap().to_string();
    assert!(error.contains("layer inputs on disk, and no folder for it was named"), "{error}");
}
