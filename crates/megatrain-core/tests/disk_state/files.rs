//! Files on the system's disk and in memory: they hold what memory would, belong to one engine and go with it.
use std::path::{Path, PathBuf};
use std::sync::Arc;

use megatrain_core::disk::{Disk, Fault, FaultKind, SimDisk};
use megatrain_core::layout::Precision;
use megatrain_core::plan::{UpdateMode, plan};
use megatrain_core::store::spill::StateIo;
use megatrain_core::stream::{Engine, Options};

use super::support::{FOREVER, Toy};
use super::{options, queueing, spilled, support, with_weights};

pub(super) struct Folder(pub(super) PathBuf);

impl Folder {
    pub(super) fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("megatrain-disk-state-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(super) fn names(&self) -> Vec<String> {
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

pub(super) fn train(toy: &Toy, engine: &Engine) -> Vec<Vec<u8>> {
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
