//! State whose home is a disk: real files and simulated ones, what fails, and what the plan says of it.
use std::path::{Path, PathBuf};
use std::sync::Arc;

use megatrain_core::device::sim::{Faults, SimDevice};
use megatrain_core::disk::{Disk, Fault, FaultKind, SimDisk};
use megatrain_core::error::{Error, Tier};
use megatrain_core::layout::{Dtype, Precision, Role};
use megatrain_core::plan::{Count, DeviceKind, Place, Plan, Request, State, UpdateMode, plan};
use megatrain_core::store::Plane;
use megatrain_core::store::spill::{StateFiles, StateIo};
use megatrain_core::stream::{Engine, Options, PlaneName};

mod support;
use support::{FOREVER, Toy, request};

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("megatrain-disk-state-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).unwrap().flatten();
        let mut names: Vec<String> = entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn queueing(seed: u64) -> SimDevice {
    SimDevice::new(Some(seed), Faults::default()).queueing_compute()
}

fn options(paths: &[&Path], io: StateIo) -> Options {
    let paths = paths.iter().map(|path| path.to_path_buf()).collect();
    Options { threads: Some(1), huge_pages: false, disk: Some(StateFiles { paths, io }), ..Options::default() }
}

/// The same with the weights of the first of these units there too.
fn with_weights(request: &Request, units: u32) -> Request {
    let mut request = request.clone();
    request.requests.weights_on_disk = Some(units);
    request
}

/// Layers whose state takes several blocks of a file.
fn spilled(update: UpdateMode, precision: Precision, units: u32) -> Request {
    let mut request = Request { update, precision, grad_precision: precision, ..request(3, 2) };
    for unit in &mut request.units {
        unit.tensors[0].shape = vec![70_001, 3];
    }
    request.requests.state_on_disk = Some(units);
    request.budget.disk = 1 << 30;
    request
}

fn train(toy: &Toy, engine: &Engine) -> Vec<Vec<u8>> {
    toy.fill(engine).unwrap();
    for step in 0..3 {
        toy.step(engine, step, Some(0.5)).unwrap();
    }
    toy.state(engine).unwrap()
}

#[test]
fn files_hold_what_memory_would_by_rings_and_by_threads_on_one_path_or_several() {
    let (one, other) = (Folder::new("one"), Folder::new("other"));
    for update in [UpdateMode::JustInTime, UpdateMode::Immediate] {
        for precision in [Precision::Fp32, Precision::Bf16] {
            let in_memory = spilled(update, precision, 0);
            let toy = Toy::new(queueing(1), in_memory.clone());
            let engine = support::engine(&toy.device, &in_memory, &plan(&in_memory).unwrap(), &Options::default());
            let expected = train(&toy, &engine.unwrap());
            for (io, weights) in [(StateIo::Auto, 0), (StateIo::Auto, 5), (StateIo::Threads, 0), (StateIo::Threads, 3)]
            {
                for paths in [&[&one.0 as &Path][..], &[&one.0, &other.0]] {
                    let request = with_weights(&spilled(update, precision, 5), weights);
                    let toy = Toy::new(queueing(2), request.clone());
                    let made = Engine::new(
                        Arc::new(toy.device.clone()),
                        &request,
                        &plan(&request).unwrap(),
                        &options(paths, io),
                    );
                    let engine = made.unwrap();
                    assert!(
                        train(&toy, &engine) == expected,
                        "{update:?}, {precision:?}, {io:?}, weights of {weights}, {} paths",
                        paths.len()
                    );
                    engine.close();
                    assert!(
                        one.names().is_empty() && other.names().is_empty(),
                        "a closed engine has removed its folders"
                    );
                }
            }
        }
    }
}

#[test]
fn engines_that_share_a_path_have_files_of_their_own_and_leftovers_are_removed() {
    let folder = Folder::new("shared");
    // As a killed process leaves it: a folder with a lock that nobody holds. What is not ours stays.
    std::fs::create_dir_all(folder.0.join("megatrain-1-0")).unwrap();
    std::fs::write(folder.0.join("megatrain-1-0/lock"), b"").unwrap();
    std::fs::write(folder.0.join("notes.txt"), b"mine").unwrap();
    let request = spilled(UpdateMode::JustInTime, Precision::Bf16, 5);
    let start = |seed| {
        let toy = Toy::new(queueing(seed), request.clone());
        let device = Arc::new(toy.device.clone());
        let made = Engine::new(device, &request, &plan(&request).unwrap(), &options(&[&folder.0], StateIo::Auto));
        (toy, made.unwrap())
    };
    let (first_toy, first) = start(1);
    let (second_toy, second) = start(2);
    let own = folder.names();
    assert_eq!(own.len(), 3, "two folders and the notes: {own:?}");
    for name in own.iter().filter(|name| *name != "notes.txt") {
        let inside: Vec<_> = std::fs::read_dir(folder.0.join(name)).unwrap().flatten().map(|e| e.file_name()).collect();
        assert_eq!(inside, ["lock"], "state files have no names");
    }
    first_toy.fill(&first).unwrap();
    second_toy.fill(&second).unwrap();
    for step in 0..3 {
        first_toy.step(&first, step, Some(0.5)).unwrap();
        second_toy.step(&second, step, Some(0.5)).unwrap();
    }
    assert!(first_toy.state(&first).unwrap() == second_toy.state(&second).unwrap());
    drop((first, second));
    assert_eq!(folder.names(), ["notes.txt"]);
}

#[test]
fn an_engine_on_a_simulated_disk_leaves_the_systems_alone_and_no_folder_where_its_lock_cannot_be_made() {
    let folder = Folder::new("simulated");
    std::fs::create_dir_all(folder.0.join("megatrain-1-0")).unwrap();
    std::fs::write(folder.0.join("megatrain-1-0/lock"), b"").unwrap();
    let request = spilled(UpdateMode::JustInTime, Precision::Bf16, 5);
    let planned = plan(&request).unwrap();
    let start = |disk: &SimDisk| {
        let toy = Toy::new(queueing(1), request.clone());
        let paths = options(&[&folder.0], StateIo::Auto);
        Engine::with_disk(Arc::new(toy.device), Arc::new(disk.clone()), &request, &planned, &paths)
    };
    let disk = SimDisk::default();
    let parents: Vec<&Path> = folder.0.ancestors().collect();
    parents.iter().rev().skip(1).for_each(|parent| disk.create_folder(parent).unwrap());
    let before = disk.contents();
    disk.arm(vec![Fault { call: 1, kind: FaultKind::Error(28) }]);
    assert!(start(&disk).is_err());
    assert!(disk.calls()[1].starts_with("create ") && disk.calls()[1].ends_with("lock"));
    assert!(disk.contents() == before);
    disk.arm(Vec::new());
    drop(start(&disk).unwrap());
    assert!(disk.contents() == before);
    assert_eq!(folder.names(), ["megatrain-1-0"]);
}

#[test]
fn a_file_that_was_shortened_is_named_with_expected_and_actual_bytes() {
    let folder = Folder::new("shortened");
    let request = spilled(UpdateMode::JustInTime, Precision::Fp32, 5);
    for io in [StateIo::Auto, StateIo::Threads] {
        let toy = Toy::new(queueing(1), request.clone());
        let device = Arc::new(toy.device.clone());
        let engine = Engine::new(device, &request, &plan(&request).unwrap(), &options(&[&folder.0], io)).unwrap();
        toy.fill(&engine).unwrap();
        let own = folder.names().pop().unwrap();
        let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten().find(|entry| {
            std::fs::read_link(entry.path())
                .is_ok_and(|to| to.to_string_lossy().contains(&own) && to.ends_with("state (deleted)"))
        });
        let file = std::fs::OpenOptions::new().write(true).open(open.unwrap().path()).unwrap();
        file.set_len(4096).unwrap();
        let result = (|| {
            toy.step(&engine, 0, Some(0.5))?;
            engine.drain(FOREVER).map(|_| ())
        })();
        let message = result.unwrap_err().to_string();
        assert!(message.contains("state of unit ") && message.contains("read_state"), "{message}");
        assert!(message.contains("it was shortened") && message.contains(&own), "{message}");
        assert_eq!(engine.drain(FOREVER).map(|_| ()).unwrap_err().to_string(), message, "refused from then on");
    }
}

#[test]
fn a_file_system_that_cannot_reserve_room_is_warned_of() {
    let request = spilled(UpdateMode::JustInTime, Precision::Fp32, 2);
    let (planned, options) = (plan(&request).unwrap(), Options { threads: Some(1), ..Options::default() });
    let warnings = |short: bool| {
        let disk = support::state_disk();
        disk.arm(Vec::new());
        let start = || support::engine_on(&disk, &queueing(1), &request, &planned, &options).unwrap();
        drop(start());
        let call = disk.calls().iter().position(|call| call.starts_with("preallocate /more")).unwrap() as u64;
        disk.arm(short.then_some(Fault { call, kind: FaultKind::Short }).into_iter().collect());
        let all = start().warnings();
        all.into_iter().filter(|warning| warning.contains("cannot reserve")).collect::<Vec<_>>()
    };
    assert!(warnings(false).is_empty());
    let found = warnings(true);
    assert!(found.len() == 1 && found[0].contains("/more") && found[0].contains(" bytes"), "{found:?}");
}

/// Everything that uses state: filled, trained, evaluated, read.
fn everything(request: &Request, disk: &SimDisk) -> Result<Vec<Vec<u8>>, Error> {
    let options = Options { threads: Some(1), huge_pages: false, poison: true, ..Options::default() };
    let toy = Toy::new(queueing(3), request.clone());
    let engine = support::engine_on(disk, &toy.device, request, &plan(request)?, &options)?;
    let result = (|| {
        toy.fill(&engine)?;
        for step in 0..2 {
            toy.step(&engine, step, Some(0.5))?;
        }
        toy.begin(&engine, megatrain_core::schedule::Pass::Eval, 1, false)?;
        toy.compute(&engine, 9)?;
        toy.state(&engine)
    })();
    if let Err(error) = &result {
        // From then on everything is refused with the same words.
        let first = error.to_string();
        assert_eq!(engine.drain(FOREVER).map(|_| ()).unwrap_err().to_string(), first);
        assert_eq!(toy.state(&engine).unwrap_err().to_string(), first);
    }
    result
}

const EIO: i32 = 5;
const ENOSPC: i32 = 28;

#[test]
fn whatever_fails_at_any_call_is_named_and_ends_the_run_and_nothing_wrong_is_ever_used() {
    for (update, weights) in [
        (UpdateMode::JustInTime, 0),
        (UpdateMode::Immediate, 0),
        (UpdateMode::JustInTime, 3),
        (UpdateMode::Immediate, 3),
    ] {
        let precision = Precision::Bf16;
        let mut request = Request { update, precision, grad_precision: precision, ..request(2, 1) };
        (request.requests.state_on_disk, request.requests.parts) = (Some(3), Some(2));
        request.requests.weights_on_disk = Some(weights);
        request.budget.disk = 1 << 30;
        let whole = support::state_disk();
        whole.arm(Vec::new());
        let expected = everything(&request, &whole).unwrap();
        let calls = whole.calls();
        let (mut ended, mut seen) = (0, 0);
        for (call, name) in calls.iter().enumerate() {
            let moved = name.starts_with("read") || name.starts_with("write");
            let kinds = [FaultKind::Error(EIO), FaultKind::Error(ENOSPC), FaultKind::Short, FaultKind::FlipBit];
            for kind in kinds.into_iter().filter(|kind| moved || matches!(kind, FaultKind::Error(_))) {
                let disk = support::state_disk();
                disk.arm(vec![Fault { call: call as u64, kind }]);
                match everything(&request, &disk) {
                    // What is flipped where nothing reads it again changes nothing, nor does a transfer in two halves; nor
                    // does a folder that cannot be removed in the end.
                    Ok(found) => {
                        let harmless = !matches!(kind, FaultKind::Error(_)) || name.starts_with("remove");
                        assert!(harmless && found == expected, "{update:?}: {kind:?} at {name}");
                        seen += 1;
                    }
                    Err(error) => {
                        let message = error.to_string();
                        assert!(message.contains("/state") || message.contains("/more"), "names the file: {message}");
                        assert!(!moved || message.contains("state of unit "), "names the unit: {message}");
                        if kind == FaultKind::Error(EIO) {
                            assert!(message.contains("Input/output error"), "{message}");
                        } else if kind == FaultKind::FlipBit {
                            assert!(message.contains("damaged") && message.contains("checksum"), "{message}");
                        }
                        ended += 1;
                    }
                }
            }
        }
        assert!(ended > 2 * calls.len() - 20 && seen > 0, "{ended} and {seen} of {} calls", calls.len());
    }
}

#[test]
fn state_is_read_once_and_written_once_in_a_step_however_many_passes_it_adds_up() {
    for (update, passes) in [(UpdateMode::JustInTime, 1), (UpdateMode::JustInTime, 3), (UpdateMode::Immediate, 1)] {
        let mut request = spilled(update, Precision::Bf16, 4);
        request.requests.accumulate = passes > 1;
        let planned = plan(&request).unwrap();
        let (disk, toy) = (support::state_disk(), Toy::new(queueing(1), request.clone()));
        let options = Options { threads: Some(1), huge_pages: false, ..Options::default() };
        let engine = support::engine_on(&disk, &toy.device, &request, &planned, &options).unwrap();
        toy.fill(&engine).unwrap();
        // Calls by kind; all but the last block of a part are whole.
        let moved = || {
            while engine.drain(FOREVER).unwrap().is_pending() {}
            let calls = disk.calls();
            disk.arm(Vec::new());
            ["read", "write"].map(|kind| calls.iter().filter(|call| call.starts_with(kind)).count() as u64)
        };
        moved();
        let blocks: u64 = {
            let state = |u: usize| 10 * engine.layouts()[u].elements;
            let on_disk = (0..planned.units.len()).filter(|&u| planned.units[u].state == State::Disk);
            let bytes: Vec<u64> = on_disk.map(state).collect();
            assert_eq!(bytes.iter().sum::<u64>(), planned.totals.disk);
            bytes.iter().map(|bytes| bytes.div_ceil(1 << 20)).sum()
        };
        assert!(blocks > 4);
        for step in 0..2 {
            for pass in 0..passes {
                toy.begin(&engine, megatrain_core::schedule::Pass::Train, 2, pass > 0).unwrap();
                toy.compute(&engine, step).unwrap();
            }
            toy.apply(&engine, Some(0.5)).unwrap();
            assert_eq!(moved(), [blocks; 2], "{update:?}, {passes} passes");
        }
        if update == UpdateMode::JustInTime {
            toy.spoil.store(true, std::sync::atomic::Ordering::Relaxed);
            toy.begin(&engine, megatrain_core::schedule::Pass::Train, 2, false).unwrap();
            toy.compute(&engine, 9).unwrap();
            assert!(toy.apply(&engine, Some(0.5)).unwrap().skipped);
            assert_eq!(moved(), [0, 0], "a step that is skipped leaves the disk alone");
        }
    }
}

/// Blocks that a step reads and writes of the whole plan's state and weights on disk, weights that are sent not counted.
fn blocks_of_updates(engine: &Engine, planned: &Plan) -> u64 {
    let blocks = |bytes: u64| bytes.div_ceil(1 << 20);
    let layout = |unit: usize| &engine.layouts()[unit];
    let of = |unit: usize| {
        let weights = if planned.units[unit].weights_on_disk { blocks(2 * layout(unit).elements) } else { 0 };
        blocks(10 * layout(unit).elements) + weights
    };
    (0..planned.units.len()).filter(|&unit| planned.units[unit].state == State::Disk).map(of).sum()
}

#[test]
fn weights_on_disk_are_read_once_for_each_load_and_once_with_the_state_and_written_once() {
    for (update, group, slots) in [
        (UpdateMode::JustInTime, 2, 2),
        (UpdateMode::JustInTime, 1, 2),
        (UpdateMode::JustInTime, 2, 3),
        (UpdateMode::Immediate, 2, 2),
        (UpdateMode::Immediate, 1, 3),
    ] {
        let mut request = with_weights(&spilled(update, Precision::Bf16, 5), 5);
        (request.requests.group, request.requests.slots) = (Some(group), Some(slots));
        let planned = plan(&request).unwrap();
        let (disk, toy) = (support::state_disk(), Toy::new(queueing(1), request.clone()));
        let options = Options { threads: Some(1), huge_pages: false, ..Options::default() };
        let engine = support::engine_on(&disk, &toy.device, &request, &planned, &options).unwrap();
        toy.fill(&engine).unwrap();
        let moved = || {
            while engine.drain(FOREVER).unwrap().is_pending() {}
            let calls = disk.calls();
            disk.arm(Vec::new());
            ["read", "write"].map(|kind| calls.iter().filter(|call| call.starts_with(kind)).count() as u64)
        };
        moved();
        let updates = blocks_of_updates(&engine, &planned);
        // Weights of a unit, and a page of what is frozen.
        let image = |unit: usize| (2 * engine.layouts()[unit].elements).div_ceil(1 << 20) + 1;
        let all: u64 = (0..5).map(image).sum();
        // A layer is loaded for forward and for backward of each group, unless one of the slots has it from before.
        let groups = 2 / group;
        let again = u64::from(3 - slots) * u64::from(2 * groups - 1) * image(1);
        for step in 0..3 {
            toy.step(&engine, step, Some(0.5)).unwrap();
            assert_eq!(moved(), [updates + all + again, updates], "{update:?}, groups of {group}, {slots} slots");
        }
        let bytes = engine.stats().unwrap();
        let images = planned.items.iter().find(|item| item.tier == Tier::Disk && item.what == "weights").unwrap().bytes;
        assert_eq!(planned.totals.disk, sums(&planned).1);
        // (Immediate updates fall before or after the decision at which figures are taken.)
        let least = planned.totals.disk - (5 << 12) + images;
        assert!(update == UpdateMode::Immediate || bytes.state_bytes_read >= least);
        // An evaluation reads what it loads and writes nothing; a second one finds embedding and head, and what the slots hold.
        for held in [0, 2] {
            toy.begin(&engine, megatrain_core::schedule::Pass::Eval, 2, false).unwrap();
            toy.compute(&engine, 9).unwrap();
            let kept = if held == 0 { 0 } else { image(0) + image(4) + if slots == 3 { 3 * image(1) } else { 0 } };
            let forward: u64 = if group == 1 && slots < 3 { all + again / 3 } else { all };
            assert_eq!(moved(), [forward - kept, 0], "{update:?}, groups of {group}, {slots} slots, {held} held");
        }
    }
}

#[test]
fn weights_on_disk_are_read_and_written_by_callers_as_those_in_memory_are() {
    for precision in [Precision::Bf16, Precision::Fp32] {
        let mut request = spilled(UpdateMode::JustInTime, precision, 5);
        for unit in &mut request.units {
            unit.tensors[0].shape = vec![700_001, 3];
            // A frozen tensor of several blocks.
            unit.tensors[1].shape = vec![300_007];
        }
        let in_memory = Request { requests: Default::default(), ..request.clone() };
        let engines = [in_memory, with_weights(&request, 5)].map(|request| {
            let toy = Toy::new(queueing(1), request.clone());
            let options = Options { threads: Some(1), huge_pages: false, ..Options::default() };
            let disk = support::state_disk();
            let engine = support::engine_on(&disk, &toy.device, &request, &plan(&request).unwrap(), &options).unwrap();
            toy.fill(&engine).unwrap();
            (engine, toy, disk)
        });
        let size = precision.dtype().size() as usize;
        let read = |engine: &Engine, tensor, plane, start, bytes: usize| {
            let mut out = vec![0; bytes];
            engine.read(2, tensor, PlaneName::State(plane), start, &mut out).map(|()| out)
        };
        let same = |tensor, plane, start, bytes| {
            let [one, other] = [0, 1].map(|i| read(&engines[i].0, tensor, plane, start, bytes).unwrap());
            assert!(one == other, "{precision:?}: {plane:?} of tensor {tensor} from {start}");
        };
        let everything = || {
            for (start, count) in [(0, 2_100_003), (1, 1), (524_287, 3), (600_000, 1_200_001), (2_100_002, 1)] {
                same(0, Plane::Weights, start, count * size);
                same(0, Plane::Master, start, count * 4);
            }
            same(2, Plane::Master, 3, 20 * 4);
            for (start, count) in [(0, 300_007), (262_143, 2), (7, 1)] {
                same(1, Plane::Weights, start, count * 4);
            }
        };
        everything();
        // Pieces of masters, weights and frozen tensors, across blocks and inside one.
        let value = |i: usize| (i % 77) as f32 / 8.0;
        let floats = |count: usize| (0..count).flat_map(|i| value(i).to_le_bytes()).collect::<Vec<u8>>();
        let weights: Vec<u8> = if size == 4 { floats(300_000) } else { vec![0x3f; 600_000] };
        for (engine, ..) in &engines {
            let write = |tensor, plane, start, dtype, bytes: &[u8]| {
                engine.write(2, tensor, PlaneName::State(plane), start, dtype, bytes).unwrap();
            };
            write(0, Plane::Master, 524_200, Dtype::F32, &floats(700_000));
            write(0, Plane::Master, 2_000_000, Dtype::Bf16, &[0x3f; 40]);
            write(0, Plane::Weights, 1_500_001, precision.dtype(), &weights);
            write(1, Plane::Weights, 262_000, Dtype::F32, &floats(300));
            let refused = engine.write(2, 1, PlaneName::State(Plane::Weights), 0, Dtype::Bf16, &[0; 2]).unwrap_err();
            assert!(refused.to_string().contains("takes f32, not bf16"), "{refused}");
            let refused = engine.write(2, 0, PlaneName::State(Plane::Master), 0, Dtype::F32, &f32::NAN.to_le_bytes());
            assert!(refused.unwrap_err().to_string().contains("NaN"));
        }
        everything();
        for (engine, toy, _) in &engines {
            toy.step(engine, 0, Some(0.5)).unwrap();
        }
        everything();
        let [one, other] = [0, 1].map(|i| engines[i].1.state(&engines[i].0).unwrap());
        assert!(one == other);
        // What the disk returns otherwise is named by its tensor, whoever reads it.
        let (engine, _, disk) = &engines[1];
        disk.arm(vec![Fault { call: 0, kind: FaultKind::FlipBit }]);
        let (tensor, name) = match precision {
            Precision::Bf16 => (0, "weights of layers.1.weight"),
            Precision::Fp32 => (1, "weights of layers.1.scale"),
        };
        let error = read(engine, tensor, Plane::Weights, 0, 8).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("damaged"), "{error}");
    }
}

#[test]
fn weights_follow_the_state_to_disk_only_where_the_host_is_still_too_small() {
    for update in [UpdateMode::JustInTime, UpdateMode::Immediate] {
        let mut base = Request { requests: Default::default(), ..spilled(update, Precision::Bf16, 0) };
        // Parts small enough that the buffers they pass through do not take what the weights leave.
        base.requests.parts = Some(8);
        base.requests.slabs = (update == UpdateMode::Immediate).then_some(1);
        let with = |units: u32, weights: u32| {
            let mut request = with_weights(&base, weights);
            request.requests.state_on_disk = Some(units);
            request.requests.slabs = (update == UpdateMode::Immediate).then_some(1);
            let plan = plan(&request).unwrap();
            assert_eq!(plan.units.iter().filter(|unit| unit.weights_on_disk).count() as u32, weights);
            assert!(plan.units.iter().all(|unit| !unit.weights_on_disk || unit.state == State::Disk));
            plan
        };
        let count = |plan: &Plan| {
            let of = |is: fn(&&megatrain_core::plan::UnitPlan) -> bool| plan.units.iter().filter(is).count();
            (of(|unit| unit.state == State::Disk), of(|unit| unit.weights_on_disk))
        };
        let roomy = plan(&base).unwrap();
        let needs: Vec<Plan> = (0..=5).map(|n| with(n, 0)).chain((1..=5).map(|n| with(5, n))).collect();
        let least = needs.iter().map(|plan| plan.totals.host).min().unwrap();
        let mut last = f64::INFINITY;
        let mut seen = std::collections::BTreeSet::new();
        let steps = (least..roomy.totals.host + 4096).step_by(64 << 10);
        for host in steps.chain(needs.iter().map(|plan| plan.totals.host)).collect::<std::collections::BTreeSet<_>>() {
            let mut request = base.clone();
            request.budget.host = host;
            assert!(megatrain_core::plan::fits(&request).unwrap());
            let found = plan(&request).unwrap();
            found.matches(&request).unwrap();
            assert!(found.totals.host <= host && sums(&found) == (found.totals.host, found.totals.disk));
            let first = needs.iter().find(|plan| plan.totals.host <= host).unwrap();
            assert_eq!(count(&found), count(first), "{update:?}: {host} bytes");
            assert!(found.estimate.expected_step_s <= last * 1.0005, "{update:?}: {host} bytes make it slower");
            last = found.estimate.expected_step_s;
            seen.insert(count(&found));
        }
        assert!(seen.iter().any(|&(units, weights)| units == 5 && weights > 1), "{seen:?}");
        let mut small = base.clone();
        small.budget.host = least - 1;
        assert!(!megatrain_core::plan::fits(&small).unwrap());
        assert!(matches!(plan(&small), Err(Error::DoesNotFit { tier: Tier::Host, .. })));
    }
}

#[test]
fn a_step_with_weights_on_disk_is_expected_to_take_as_long_as_reading_them() {
    for groups in [1, 2] {
        let mut request = with_weights(&spilled(UpdateMode::JustInTime, Precision::Bf16, 5), 5);
        request.requests.group = Some(2 / groups);
        // A disk slower than everything else.
        (request.rates.state_read_gbs, request.rates.state_write_gbs) = (1e-3, 1.0);
        let found = plan(&request).unwrap();
        let image =
            found.items.iter().find(|item| item.tier == Tier::Disk && item.what == "weights").unwrap().bytes / 5;
        let loads = 5 + u64::from(2 * groups - 1);
        let read = found.totals.disk - 5 * 4096 + loads * image;
        let off = found.estimate.step_s / (read as f64 / 1e6) - 1.0;
        assert!(off.abs() < 0.02, "{groups}: {} s for {read} bytes", found.estimate.step_s);
        assert_eq!(found.estimate.bound, "state_read");
        assert_eq!((found.estimate.disk_read, found.estimate.disk_written), (read, found.totals.disk - 5 * 4096));
    }
}

#[test]
fn a_caller_reads_no_block_of_a_plane_twice_and_writes_each_once() {
    for weights in [0, 5] {
        no_block_twice(weights);
    }
}

fn no_block_twice(weights: u32) {
    let mut request = with_weights(&spilled(UpdateMode::JustInTime, Precision::Bf16, 5), weights);
    for unit in &mut request.units {
        unit.tensors[0].shape = vec![700_001, 3];
    }
    let planned = plan(&request).unwrap();
    let (disk, toy) = (support::state_disk(), Toy::new(queueing(1), request.clone()));
    let options = Options { threads: Some(1), huge_pages: false, ..Options::default() };
    let engine = support::engine_on(&disk, &toy.device, &request, &planned, &options).unwrap();
    toy.fill(&engine).unwrap();
    for plane in [Plane::Master, Plane::Residual, Plane::ExpAvg, Plane::ExpAvgSq] {
        let numel = engine.layouts()[2].tensors[0].spec.numel();
        let (size, dtype) = if plane == Plane::Residual { (2, Dtype::I16) } else { (4, Dtype::F32) };
        let stored = numel * if matches!(plane, Plane::Master | Plane::Residual) { 2 } else { 4 };
        let mut out = vec![0; (numel * size) as usize];
        let counted = |kind: &str| disk.calls().iter().filter(|call| call.starts_with(kind)).count() as u64;
        disk.arm(Vec::new());
        engine.read(2, 0, PlaneName::State(plane), 0, &mut out).unwrap();
        // A plane's ends may be inside a block; a master is joined by two blocks of lower halves at a time.
        let blocks = stored.div_ceil(1 << 20) + 1;
        let most = match plane {
            // By windows of half as many elements, of upper halves as well as lower ones.
            Plane::Master if weights > 0 => 2 * (stored.div_ceil(1 << 20) + stored.div_ceil(1 << 20) + 1),
            Plane::Master => blocks + stored.div_ceil(2 << 20),
            _ => blocks,
        };
        assert!(counted("read") <= most, "{plane:?}: {} reads of {blocks} blocks", counted("read"));
        disk.arm(Vec::new());
        engine.write(2, 0, PlaneName::State(plane), 0, dtype, &out).unwrap();
        assert!(counted("write") <= most, "{plane:?}: {} writes of {blocks} blocks", counted("write"));
        let mut again = vec![0; out.len()];
        engine.read(2, 0, PlaneName::State(plane), 0, &mut again).unwrap();
        assert!(again == out, "{plane:?}");
    }
}

fn sums(plan: &Plan) -> (u64, u64) {
    let on_disk = |tier| plan.items.iter().filter(|item| item.tier == tier).map(|item| item.bytes).sum();
    (on_disk(Tier::Host), on_disk(Tier::Disk))
}

#[test]
fn state_goes_to_disk_only_where_the_host_is_too_small_and_no_more_of_it_than_has_to() {
    for update in [UpdateMode::JustInTime, UpdateMode::Immediate] {
        let base = Request { requests: Default::default(), ..spilled(update, Precision::Bf16, 0) };
        let roomy = plan(&base).unwrap();
        assert_eq!((roomy.totals.disk, roomy.disk_buffers), (0, 0));
        // The least that every number of units needs on the host.
        let with = |units: u32| {
            let mut request = base.clone();
            request.requests.state_on_disk = Some(units);
            request.requests.slabs = (update == UpdateMode::Immediate).then_some(1);
            let plan = plan(&request).unwrap();
            assert_eq!(sums(&plan), (plan.totals.host, plan.totals.disk));
            assert_eq!(plan.units.iter().filter(|unit| unit.state == State::Disk).count() as u32, units);
            plan.totals
        };
        let needs: Vec<_> = (0..=5).map(with).collect();
        let least = needs.iter().map(|totals| totals.host).min().unwrap();
        for host in (least..roomy.totals.host + 4096).step_by(64 << 10).chain(needs.iter().map(|totals| totals.host)) {
            let request = Request { budget: megatrain_core::plan::Budget { host, ..base.budget }, ..base.clone() };
            let found = plan(&request).unwrap();
            assert!(found.totals.host <= host);
            let fewest = needs.iter().filter(|totals| totals.host <= host).map(|totals| totals.disk).min().unwrap();
            assert_eq!(found.totals.disk, fewest, "{update:?}: {host} bytes");
        }
        // Without a disk it is the host that is too small; with too small a disk, one budget is named that is enough.
        let mut small = base.clone();
        (small.budget.host, small.budget.disk) = (least, 0);
        assert!(matches!(plan(&small), Err(Error::DoesNotFit { tier: Tier::Host, .. })));
        small.budget.disk = 4096;
        match plan(&small) {
            Err(Error::DoesNotFit { tier: Tier::Disk, needed, .. }) => small.budget.disk = needed,
            Err(Error::DoesNotFit { tier: Tier::Host, needed, .. }) => small.budget.host = needed,
            other => panic!("{other:?}"),
        }
        plan(&small).unwrap();
    }
}

#[test]
fn as_much_state_is_on_disk_as_was_asked_for_also_where_a_card_has_room_for_all() {
    let mut request = Request { requests: Default::default(), ..spilled(UpdateMode::JustInTime, Precision::Bf16, 0) };
    request.device = DeviceKind::Cuda;
    let on_disk = |request: &Request| plan(request).unwrap().units.iter().filter(|u| u.state == State::Disk).count();
    assert_eq!(on_disk(&request), 0);
    for asked in 0..=5 {
        request.requests.state_on_disk = Some(asked);
        assert_eq!(on_disk(&request), asked as usize);
    }
    // Two units on the device leave three.
    request.requests.state_on_device = Some(Count::Units(2));
    let error = plan(&request).unwrap_err().to_string();
    assert!(error.contains("plan.state_on_disk = 5, but only 3 units"), "{error}");
    request.requests.state_on_disk = Some(3);
    assert_eq!(on_disk(&request), 3);
    // What does not train has no state.
    request.units[3].tensors.iter_mut().for_each(|tensor| tensor.role = Role::Frozen);
    let error = plan(&request).unwrap_err().to_string();
    assert!(error.contains("plan.state_on_disk = 3, but only 2 units"), "{error}");
}

#[test]
fn state_on_disk_is_never_updated_on_the_device() {
    for update in [UpdateMode::JustInTime, UpdateMode::Immediate] {
        let mut request = Request { requests: Default::default(), ..spilled(update, Precision::Bf16, 0) };
        request.device = DeviceKind::Cuda;
        request.requests.state_on_device = Some(Count::Units(0));
        // A host so slow that updates on the device are worth their way.
        request.rates.adamw_gparams = 1e-3;
        let updated = |plan: &Plan| plan.units.iter().filter(|unit| unit.update == Place::Device).count();
        assert!(updated(&plan(&request).unwrap()) > 0, "without a disk they pay");
        for asked in 1..=5 {
            request.requests.state_on_disk = Some(asked);
            let found = plan(&request).unwrap();
            assert_eq!(updated(&found), 0, "{update:?}: {asked} units");
            assert_eq!(sums(&found), (found.totals.host, found.totals.disk));
        }
    }
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let request = spilled(UpdateMode::JustInTime, Precision::Bf16, 2);
    let planned = plan(&request).unwrap();
    let device = || Arc::new(queueing(1));
    let error = Engine::new(device(), &request, &planned, &Options::default()).err().unwrap().to_string();
    assert!(error.contains("no folder for it was named"), "{error}");
    let missing = std::env::temp_dir().join("megatrain-no-such-folder");
    let error =
        Engine::new(device(), &request, &planned, &options(&[&missing], StateIo::Auto)).err().unwrap().to_string();
    assert!(error.contains("megatrain-no-such-folder") && error.contains("No such file"), "{error}");
    let mut both = request.clone();
    both.requests.updates_on_device = Some(Count::Units(1));
    let error = plan(&both).unwrap_err().to_string();
    assert!(error.contains("plan.state_on_disk = 2 contradicts plan.updates_on_device"), "{error}");
    let mut more = with_weights(&request, 3);
    let error = plan(&more).unwrap_err().to_string();
    assert!(error.contains("plan.weights_on_disk = 3 contradicts plan.state_on_disk"), "{error}");
    more.requests.state_on_disk = None;
    assert_eq!(plan(&more).unwrap().units.iter().filter(|unit| unit.weights_on_disk).count(), 3);
    more.requests.updates_on_device = Some(Count::Units(1));
    let error = plan(&more).unwrap_err().to_string();
    assert!(error.contains("plan.weights_on_disk = 3 contradicts plan.updates_on_device"), "{error}");
    more.requests.updates_on_device = None;
    more.requests.weights_on_disk = Some(6);
    let error = plan(&more).unwrap_err().to_string();
    assert!(error.contains("plan.weights_on_disk = 6") && error.contains('5'), "{error}");
    // A plan from a file that puts weights where no state is, or names no buffer for them.
    let written = plan(&with_weights(&request, 2)).unwrap();
    let mut wrong = written.clone();
    wrong.units.iter_mut().for_each(|unit| unit.weights_on_disk = true);
    let error = Engine::new(device(), &request, &wrong, &Options::default()).err().unwrap().to_string();
    assert!(error.contains("the weights of unit embed on disk, and its state elsewhere"), "{error}");
    let mut wrong = written;
    wrong.weight_buffers = 0;
    let error = Engine::new(device(), &request, &wrong, &Options::default()).err().unwrap().to_string();
    assert!(error.contains("weight_buffers") && error.contains("weights on disk pass through them"), "{error}");
    let mut many = request;
    many.requests.state_on_disk = Some(6);
    let error = plan(&many).unwrap_err().to_string();
    assert!(error.contains("plan.state_on_disk") && error.contains('6'), "{error}");
}
