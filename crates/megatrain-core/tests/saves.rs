//! Saves: whatever runs above them, files hold one step's state, and the numbers of training do not notice.
use std::path::{Path, PathBuf};
use std::sync::Arc;

use megatrain_core::device::sim::{FailedCall, Faults, SimDevice};
use megatrain_core::disk::{Disk, Fault, FaultKind, SimDisk};
use megatrain_core::error::Error;
use megatrain_core::layout::{Precision, Role};
use megatrain_core::plan::{Activation, Count, Place, Request, UpdateMode, plan};
use megatrain_core::schedule::Pass;
use megatrain_core::store::Plane;
use megatrain_core::store::spill::{StateFiles, StateIo};
use megatrain_core::stream::{Engine, Options, SaveFile, Saved};

mod support;
use support::{FOREVER, Toy, ready, request};

const CHUNK: u64 = 8192;

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("megatrain-saves-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// Every file's name and bytes.
    fn contents(&self) -> Vec<(String, Vec<u8>)> {
        let mut found: Vec<_> = std::fs::read_dir(&self.0)
            .unwrap()
            .map(|entry| entry.unwrap())
            .map(|entry| (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap()))
            .collect();
        found.sort();
        found
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn options() -> Options {
    let disk = Some(StateFiles { paths: vec![std::env::temp_dir()], io: StateIo::Auto });
    Options { threads: Some(1), huge_pages: false, disk, ..Options::default() }
}

fn start(request: &Request, device: &SimDevice, options: &Options) -> (Engine, Toy) {
    let engine = Engine::new(Arc::new(device.clone()), request, &plan(request).unwrap(), options).unwrap();
    let toy = Toy::new(device.clone(), request.clone());
    toy.fill(&engine).unwrap();
    (engine, toy)
}

fn queueing(seed: u64) -> SimDevice {
    SimDevice::new(Some(seed), Faults::default()).queueing_compute()
}

/// Two files a plane, each after a header that is no multiple of a block.
fn files(engine: &Engine, folder: &Path) -> Vec<SaveFile> {
    let tensors = |plane: Plane| -> Vec<(usize, usize)> {
        let of_unit = |(u, layout): (usize, &megatrain_core::layout::UnitLayout)| {
            let wanted = |role: Role| role == Role::Trainable || plane == Plane::Weights;
            let of = layout.tensors.iter().enumerate().filter(|(_, t)| wanted(t.spec.role));
            of.map(|(t, _)| (u, t)).collect::<Vec<_>>()
        };
        engine.layouts().iter().enumerate().flat_map(of_unit).collect()
    };
    let split = engine.layouts()[0].precision == Precision::Bf16;
    let planes = [Plane::Weights, Plane::Residual, Plane::ExpAvg, Plane::ExpAvgSq];
    let planes = planes.into_iter().filter(|&plane| split || plane != Plane::Residual);
    let of_plane = |plane: Plane| {
        let mut all = tensors(plane);
        let mut cut = all.len() / 2;
        if plane == Plane::Weights {
            // The frozen ones apart, as where they are of another width: in the second file units start over.
            all.sort_by_key(|&(_, tensor)| tensor != 1);
            cut = all.len() / 3;
        }
        let file = |(i, part): (usize, &[(usize, usize)])| SaveFile {
            path: folder.join(format!("{}-{i}", plane.name())),
            header: vec![7; 24],
            plane,
            tensors: part.to_vec(),
        };
        let (first, second) = all.split_at(cut);
        [first, second].into_iter().enumerate().map(file).collect::<Vec<_>>()
    };
    planes.flat_map(of_plane).collect()
}

fn begin(engine: &Engine, folder: &Folder) {
    engine.begin_save(files(engine, &folder.0), CHUNK, 1).unwrap();
}

/// Sums by file name, and counts.
type Summary = (Vec<(String, Vec<u32>)>, Vec<Vec<u64>>);

fn summary(saved: Saved) -> Summary {
    let name = |path: PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
    let mut sums: Vec<_> = saved.sums.into_iter().map(|(path, sums)| (name(path), sums)).collect();
    sums.sort();
    (sums, saved.counts)
}

fn finish(engine: &Engine) -> Summary {
    summary(engine.finish_save(FOREVER).map(ready).unwrap())
}

fn placements(base: &Request) -> Vec<Request> {
    let mut all = vec![base.clone()];
    let mut add = |change: &dyn Fn(&mut Request)| {
        let mut request = base.clone();
        change(&mut request);
        all.push(request);
    };
    add(&|r| r.requests.slots = Some(99));
    add(&|r| (r.requests.group, r.requests.inputs) = (Some(1), Some(Place::Host)));
    add(&|r| (r.requests.keep, r.requests.activation) = (Some(2), Some(Activation::Offload)));
    add(&|r| r.requests.state_on_device = Some(Count::Units(2)));
    add(&|r| r.requests.state_on_device = Some(Count::Units(6)));
    add(&|r| r.requests.updates_on_device = Some(Count::Units(4)));
    add(&|r| (r.requests.updates_on_device, r.requests.parts) = (Some(Count::Units(2)), Some(2)));
    let on_disk = |r: &mut Request, units| (r.requests.state_on_disk, r.budget.disk) = (Some(units), 1 << 30);
    add(&|r| {
        on_disk(r, 6);
        r.requests.parts = Some(2);
    });
    add(&|r| {
        on_disk(r, 6);
        (r.requests.parts, r.requests.weights_on_disk) = (Some(2), Some(6));
    });
    add(&|r| {
        on_disk(r, 2);
        r.requests.weights_on_disk = Some(1);
        r.requests.state_on_device = Some(Count::Units(3));
    });
    all
}

#[test]
fn files_hold_the_step_they_were_asked_after_whatever_follows() {
    for (precision, update, tied) in [
        (Precision::Bf16, UpdateMode::JustInTime, false),
        (Precision::Fp32, UpdateMode::JustInTime, true),
        (Precision::Bf16, UpdateMode::Immediate, true),
        (Precision::Fp32, UpdateMode::Immediate, false),
    ] {
        let base = Request { precision, grad_precision: precision, update, tied, ..request(4, 2) };
        // Reference: everything waited for, one operation at a time.
        let reference = Folder::new("reference");
        let (engine, toy) = start(&base, &queueing(0), &Options { synchronous: true, ..options() });
        for step in 0..2 {
            toy.step(&engine, step, Some(0.5)).unwrap();
        }
        engine.drain(FOREVER).map(ready).unwrap();
        begin(&engine, &reference);
        let expected = finish(&engine);
        let contents = reference.contents();
        assert!(contents.len() >= 6 && contents.iter().any(|(_, bytes)| bytes.len() > 8192));
        assert!(expected.1.iter().flatten().any(|&count| count == 2));
        for step in 2..4 {
            toy.step(&engine, step, Some(0.5)).unwrap();
        }
        let after = toy.state(&engine).unwrap();
        for (p, request) in placements(&base).iter().enumerate() {
            for seed in 0..6 {
                let run = Options { poison: seed % 2 == 1, synchronous: seed == 5, ..options() };
                let (engine, toy) = start(request, &queueing(seed), &run);
                for step in 0..2 {
                    toy.step(&engine, step, Some(0.5)).unwrap();
                }
                let here = Folder::new("here");
                begin(&engine, &here);
                let evaluate = |half: bool| {
                    toy.begin(&engine, Pass::Eval, 1, false).unwrap();
                    if half {
                        let op = engine.next(FOREVER).map(ready).unwrap().unwrap();
                        toy.launch(&engine, &op, 9);
                        engine.finish(op.id).unwrap();
                        engine.abandon(FOREVER).map(ready).unwrap();
                    } else {
                        toy.compute(&engine, 9).unwrap();
                    }
                };
                let mut rest = 2..4;
                let found = match seed {
                    // Nothing, evaluations, one that is abandoned, a step whose weights are then read, two steps.
                    0 => finish(&engine),
                    1 => {
                        evaluate(false);
                        evaluate(false);
                        finish(&engine)
                    }
                    2 => {
                        evaluate(true);
                        finish(&engine)
                    }
                    3 => {
                        toy.step(&engine, 2, Some(0.5)).unwrap();
                        rest.start = 3;
                        toy.state(&engine).unwrap();
                        finish(&engine)
                    }
                    _ => {
                        for step in rest.by_ref() {
                            toy.step(&engine, step, Some(0.5)).unwrap();
                        }
                        finish(&engine)
                    }
                };
                let place = format!("{precision:?} {update:?}, placement {p}, seed {seed}");
                assert!(found == expected, "{place}");
                assert!(here.contents() == contents, "{place}");
                for step in rest {
                    toy.step(&engine, step, Some(0.5)).unwrap();
                }
                assert!(toy.state(&engine).unwrap() == after, "training after a save: {place}");
            }
        }
    }
}

#[test]
fn a_save_between_gradients_and_their_update_holds_the_weights_before_it() {
    for update in [UpdateMode::JustInTime, UpdateMode::Immediate] {
        let (engine, toy) = start(&Request { update, ..request(3, 2) }, &queueing(3), &options());
        toy.step(&engine, 0, None).unwrap();
        let (before, between) = (Folder::new("before"), Folder::new("between"));
        begin(&engine, &before);
        let expected = finish(&engine);
        toy.begin(&engine, Pass::Train, 2, false).unwrap();
        let refused = engine.begin_save(Vec::new(), CHUNK, 1).unwrap_err().to_string();
        assert!(refused.contains("a pass is under way"), "{refused}");
        toy.compute(&engine, 1).unwrap();
        begin(&engine, &between);
        let found = finish(&engine);
        toy.apply(&engine, None).unwrap();
        // Immediate updates have been made by then.
        assert_eq!(found == expected, update == UpdateMode::JustInTime);
        assert_eq!(between.contents() == before.contents(), update == UpdateMode::JustInTime);
        toy.step(&engine, 2, None).unwrap();
    }
}

#[test]
fn weights_that_are_written_over_after_a_save_was_asked_for_are_not_in_it() {
    let (engine, toy) = start(&request(3, 2), &queueing(4), &options());
    toy.step(&engine, 0, None).unwrap();
    let (before, after) = (Folder::new("asked"), Folder::new("asked-late"));
    begin(&engine, &before);
    let expected = finish(&engine);
    begin(&engine, &after);
    toy.fill(&engine).unwrap();
    assert!(finish(&engine) == expected);
    assert!(after.contents() == before.contents());
}

#[test]
fn a_disk_that_fails_ends_the_save_and_nothing_else() {
    let (engine, toy) = start(&request(3, 2), &queueing(5), &options());
    toy.step(&engine, 0, None).unwrap();
    let folder = Folder::new("fails");
    // A file in the place of the second one of a plane: met in the middle.
    std::fs::write(folder.0.join("exp_avg-1"), b"in the way").unwrap();
    begin(&engine, &folder);
    toy.step(&engine, 1, None).unwrap();
    let error = engine.finish_save(FOREVER).unwrap_err();
    assert!(matches!(error, Error::Storage { .. }), "{error}");
    assert!(error.to_string().contains("exp_avg-1 cannot be written: File exists"), "{error}");
    let error = engine.finish_save(FOREVER).unwrap_err().to_string();
    assert!(error.contains("no save has begun"), "{error}");
    toy.step(&engine, 2, None).unwrap();
    let folder = Folder::new("fails-not");
    begin(&engine, &folder);
    assert!(engine.save_progress().is_ok_and(|(written, over)| written == 0 && !over));
    let error = engine.begin_save(Vec::new(), CHUNK, 1).unwrap_err().to_string();
    assert!(error.contains("a save is under way"), "{error}");
    finish(&engine);
    toy.step(&engine, 3, None).unwrap();
}

#[test]
fn a_save_that_is_given_up_or_closed_upon_leaves_nobody_waiting() {
    let (engine, toy) = start(&request(3, 2), &queueing(6), &options());
    for step in 0..4 {
        toy.step(&engine, step, None).unwrap();
        let folder = Folder::new("given-up");
        begin(&engine, &folder);
        if step % 2 == 0 {
            toy.step(&engine, step, None).unwrap();
        }
        engine.cancel_save();
        std::fs::remove_dir_all(&folder.0).unwrap();
        assert!(engine.save_progress().is_err());
    }
    let folder = Folder::new("closed");
    begin(&engine, &folder);
    engine.close();
    let error = engine.finish_save(FOREVER).unwrap_err().to_string();
    assert!(error.contains("closed before everything had been saved"), "{error}");
    // What was complete by then can still be asked about.
    let (engine, toy) = start(&request(3, 2), &queueing(7), &options());
    toy.step(&engine, 0, None).unwrap();
    let folder = Folder::new("complete");
    begin(&engine, &folder);
    engine.drain(FOREVER).map(ready).unwrap();
    engine.close();
    assert_eq!(finish(&engine).1.len(), 5);
}

#[test]
fn what_fails_in_a_thread_that_writes_breaks_the_engine_and_is_named() {
    let mut base = request(3, 2);
    base.requests.state_on_device = Some(Count::Units(2));
    let until = |device: &SimDevice| {
        let (engine, toy) = start(&base, device, &options());
        toy.step(&engine, 0, None).unwrap();
        engine.drain(FOREVER).map(ready).unwrap();
        (engine, toy)
    };
    let device = queueing(8);
    let _running = until(&device);
    let calls = device.calls()["copy_to_host"];
    for panic in [false, true] {
        let fail = vec![FailedCall { call: "copy_to_host".to_owned(), nth: calls + 1, panic, lost: false }];
        let device = SimDevice::new(Some(8), Faults { fail, ..Faults::default() }).queueing_compute();
        let (engine, toy) = until(&device);
        let folder = Folder::new("panics");
        begin(&engine, &folder);
        let error = engine.finish_save(FOREVER).unwrap_err();
        assert!(matches!(&error, Error::Broken { op, .. } if op == "write_checkpoint"), "{error}");
        assert_eq!(error.to_string().contains("panic"), panic, "{error}");
        assert_eq!(toy.step(&engine, 1, None).unwrap_err().to_string(), error.to_string());
        engine.cancel_save();
    }
}

#[test]
fn files_that_are_not_the_models_are_refused() {
    let (engine, _toy) = start(&request(3, 2), &queueing(9), &options());
    let file = |plane: Plane, tensors: &[(usize, usize)]| SaveFile {
        path: PathBuf::from("/nowhere/file"),
        header: Vec::new(),
        plane,
        tensors: tensors.to_vec(),
    };
    for (file, words) in [
        (file(Plane::ExpAvg, &[(1, 0), (0, 0)]), "ascending"),
        (file(Plane::ExpAvg, &[(0, 1)]), "frozen"),
        (file(Plane::Residual, &[(0, 0)]), "no residual"),
        (file(Plane::Weights, &[(0, 9)]), "no tensor 9"),
        (file(Plane::Weights, &[(9, 0)]), "no unit 9"),
        (file(Plane::Master, &[(0, 0)]), "stored as it is"),
    ] {
        let error = engine.begin_save(vec![file], CHUNK, 1).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    assert!(engine.save_progress().is_err());
}

// ---------------------------------------------------------------------------------------------- power cuts and bad disks

const ENOSPC: i32 = 28;
const EIO: i32 = 5;

/// An engine after one step whose files go to a disk in memory.
fn on_sim_disk(seed: u64) -> (Engine, Toy, SimDisk) {
    let (disk, device, request) = (SimDisk::default(), queueing(seed), request(3, 2));
    disk.create_folder(Path::new("/save")).unwrap();
    disk.sync_folder(Path::new("/")).unwrap();
    let (engine_disk, plan) = (Arc::new(disk.clone()), plan(&request).unwrap());
    let engine = Engine::with_disk(Arc::new(device.clone()), engine_disk, &request, &plan, &options()).unwrap();
    let toy = Toy::new(device, request);
    toy.fill(&engine).unwrap();
    toy.step(&engine, 0, None).unwrap();
    engine.drain(FOREVER).map(ready).unwrap();
    (engine, toy, disk)
}

/// Saves with a fault of one call of the disk; the outcome, and that call's name.
fn save_with(engine: &Engine, disk: &SimDisk, fault: Option<Fault>) -> (Result<Saved, Error>, String) {
    disk.arm(fault.into_iter().collect());
    engine.begin_save(files(engine, Path::new("/save")), CHUNK, 12_345).unwrap();
    let outcome = engine.finish_save(FOREVER).map(ready);
    (outcome, fault.map_or(String::new(), |fault| disk.calls()[fault.call as usize].clone()))
}

/// Whether every state that a power cut leaves now has each file, with the bytes that its checksums are of.
fn is_safe(disk: &SimDisk, saved: &Saved) -> bool {
    let sums = |bytes: &[u8]| bytes.chunks(CHUNK as usize).map(crc32fast::hash).collect::<Vec<_>>();
    let whole = |state: &megatrain_core::disk::CrashState| {
        saved.sums.iter().all(|(path, wanted)| state.file(path).is_some_and(|bytes| sums(bytes) == *wanted))
    };
    disk.sync_folder(Path::new("/save")).unwrap();
    disk.crash_states().iter().all(whole)
}

fn clear(disk: &SimDisk) {
    disk.arm(Vec::new());
    for path in disk.contents().entries.into_keys().filter(|path| path.parent() == Some(Path::new("/save"))) {
        disk.remove(&path).unwrap();
    }
}

#[test]
fn files_are_whole_after_a_power_cut_and_each_write_and_flush_is_needed_for_that() {
    let (engine, _toy, disk) = on_sim_disk(10);
    let (saved, _) = save_with(&engine, &disk, None);
    assert!(is_safe(&disk, &saved.unwrap()));
    let calls = disk.calls().len() as u64 - 1; // less the flush of the folder, which is the caller's
    let mut left_out = Vec::new();
    for call in 0..calls {
        clear(&disk);
        let (saved, name) = save_with(&engine, &disk, Some(Fault { call, kind: FaultKind::LeftOut }));
        if !name.starts_with("create") {
            assert!(!is_safe(&disk, &saved.unwrap()), "nobody notices that this is left out: {name}");
            left_out.push(name.split(' ').next().unwrap().to_owned());
        }
    }
    left_out.sort();
    left_out.dedup();
    assert_eq!(left_out, ["set", "sync", "write"]);
}

#[test]
fn a_call_that_fails_is_named_and_the_next_save_is_whole() {
    let (engine, toy, disk) = on_sim_disk(11);
    let contents = |disk: &SimDisk| disk.contents().entries;
    save_with(&engine, &disk, None).0.unwrap();
    let (wanted, calls) = (contents(&disk), disk.calls().len() as u64);
    assert!(calls > 20, "{calls}");
    for call in 0..calls {
        for kind in [FaultKind::Error(ENOSPC), FaultKind::Error(EIO), FaultKind::PowerCut] {
            clear(&disk);
            let (outcome, name) = save_with(&engine, &disk, Some(Fault { call, kind }));
            let error = outcome.unwrap_err();
            // Once it is reported nothing is written any more: the next save may be at the same paths.
            let made = disk.calls().len();
            std::thread::sleep(std::time::Duration::from_millis(2));
            assert_eq!(disk.calls().len(), made, "{name}");
            let (action, path) = name.split_at(name.find(" /").unwrap());
            assert!(matches!(&error, Error::Storage { needed: 12_345, .. }), "{error}");
            let said = error.to_string();
            let words = if kind == FaultKind::Error(ENOSPC) { "No space left" } else { "Input/output error" };
            assert!(said.contains(words) && said.contains("12345 bytes were needed"), "{said}");
            if kind != FaultKind::PowerCut {
                assert!(said.starts_with(path.trim_start()) && said.contains(action), "{name}: {said}");
            }
        }
        clear(&disk);
        let (short, name) = save_with(&engine, &disk, Some(Fault { call, kind: FaultKind::Short }));
        assert!(short.is_ok() && contents(&disk) == wanted, "{name}");
        clear(&disk);
        let (flipped, name) = save_with(&engine, &disk, Some(Fault { call, kind: FaultKind::FlipBit }));
        let (flipped, noticed) = (flipped.unwrap(), name.starts_with("write"));
        let padding = contents(&disk) == wanted; // the bit was in what fills up the last block
        assert_eq!(is_safe(&disk, &flipped), !noticed || padding, "{name}");
    }
    clear(&disk);
    toy.step(&engine, 1, None).unwrap();
    let (saved, _) = save_with(&engine, &disk, None);
    assert!(is_safe(&disk, &saved.unwrap()));
}
