//! A forked child has copies of an engine and none of its threads: it lets go of them without a word, and the parent goes on.
#![expect(unsafe_code, reason = "forks")]
use std::sync::Arc;
use std::time::{Duration, Instant};

use megatrain_core::device::Device;
use megatrain_core::device::sim::{Faults, SimDevice};
use megatrain_core::host::{Affinity, HostSpan, Pool};
use megatrain_core::plan::plan;
use megatrain_core::store::spill::{StateFiles, StateIo};
use megatrain_core::stream::{Engine, Options};

mod support;
use support::{FOREVER, Toy, request};

/// Runs `work` in a child. Whether the child ended by itself, without a panic.
fn in_a_fork(work: impl FnOnce()) -> bool {
    // SAFETY: the child runs `work` on the one thread it has and ends at once; glibc keeps its allocator usable there.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "no child");
    if child == 0 {
        let silent = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).is_ok();
        // SAFETY: ends the child without running anything that belongs to the parent.
        unsafe { libc::_exit(i32::from(!silent)) }
    }
    let began = Instant::now();
    loop {
        let mut status = 0;
        // SAFETY: the pointer is to a live number.
        let ended = unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) };
        if ended == child {
            return libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0;
        }
        if began.elapsed() > FOREVER {
            // SAFETY: the child is ours and has not been waited for.
            unsafe { libc::kill(child, libc::SIGKILL) };
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn an_engine_is_dropped_in_silence_and_works_on_in_the_parent() {
    for (closed, rounds) in [(false, 10), (true, 1)] {
        let request = request(3, 2);
        let device = SimDevice::new(Some(1), Faults::default()).queueing_compute();
        let plan = plan(&request).unwrap();
        let engine =
            Engine::new(Arc::new(device.clone()), &request, &plan, &Options { threads: Some(2), ..Options::default() })
                .unwrap();
        let toy = Toy::new(device, request.clone());
        toy.fill(&engine).unwrap();
        let mut engine = Some(engine);
        for step in 0..rounds {
            let held = engine.as_ref().unwrap();
            toy.step(held, step, Some(1.0)).unwrap();
            if closed {
                held.close();
            }
            // Updates are under way, and any lock may be held.
            assert!(in_a_fork(|| {
                let engine = engine.take().unwrap();
                engine.close();
                drop(engine);
            }));
        }
        if !closed {
            engine.as_ref().unwrap().drain(FOREVER).map(support::ready).unwrap();
        }
    }
}

#[test]
fn state_that_is_kept_is_dropped_in_silence_and_its_files_stay_the_parents() {
    let folder = std::env::temp_dir().join(format!("megatrain-forks-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let names = || std::fs::read_dir(&folder).unwrap().count();
    let mut request = request(3, 2);
    (request.requests.state_on_disk, request.budget.disk) = (Some(5), 1 << 30);
    let (device, plan) = (SimDevice::new(Some(1), Faults::default()).queueing_compute(), plan(&request).unwrap());
    let disk = Some(StateFiles { paths: vec![folder.clone()], io: StateIo::Auto });
    let options = Options { threads: Some(1), disk, ..Options::default() };
    let toy = Toy::new(device.clone(), request.clone());
    let engine = Engine::new(Arc::new(device.clone()), &request, &plan, &options).unwrap();
    toy.fill(&engine).unwrap();
    toy.step(&engine, 0, Some(1.0)).unwrap();
    let mut kept = Some(engine.keep().unwrap());
    drop(engine);
    assert!(in_a_fork(|| drop(kept.take())));
    assert_eq!(names(), 1);
    let engine = Engine::with_kept(Arc::new(device), &request, &plan, &options, kept.as_ref().unwrap()).unwrap();
    toy.step(&engine, 1, Some(1.0)).unwrap();
    toy.state(&engine).unwrap();
    drop((engine, kept));
    assert_eq!(names(), 0);
    std::fs::remove_dir(&folder).unwrap();
}

#[test]
fn a_pool_and_registered_memory_are_dropped_in_silence() {
    let mut pool = Some(Pool::new(Some(3), &Affinity::Free).unwrap());
    let device = SimDevice::new(None, Faults::default());
    let span = HostSpan::map(4096).unwrap();
    let mut pin = Some(device.pin(&span).unwrap());
    assert!(in_a_fork(|| {
        drop(pool.take());
        drop(pin.take());
    }));
    pool.unwrap().run(3, &|_| ()).unwrap();
    drop(pin);
    assert_eq!(device.pinned_bytes(), 0);
}
