//! Memory that io_uring pins. Alone in its process, so that nothing else is measured.
use std::sync::Arc;

use megatrain_core::device::sim::{FailedCall, Faults, SimDevice};
use megatrain_core::plan::plan;
use megatrain_core::store::spill::rates;
use megatrain_core::store::spill::{StateFiles, StateIo};
use megatrain_core::stream::{Engine, Options};

mod support;
use support::{Toy, request};

/// Rings of an engine, each of which has the buffers registered.
const RINGS: u64 = 3;

/// Bytes that this process has pinned.
fn pinned() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPin:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[test]
fn the_buffers_of_state_on_disk_are_registered_while_an_engine_uses_them_and_no_longer() {
    let folder = std::env::temp_dir().join(format!("megatrain-pins-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let means = rates::measure(vec![folder.clone()], 128 << 20).unwrap().means;
    if means != "io_uring with registered buffers" {
        eprintln!("skipped: state on disk is read and written by {means}");
        return;
    }
    assert_eq!(pinned(), 0);
    let mut request = request(3, 2);
    (request.requests.state_on_disk, request.requests.weights_on_disk, request.budget.disk) =
        (Some(5), Some(2), 1 << 30);
    let planned = plan(&request).unwrap();
    let disk = Some(StateFiles { paths: vec![folder.clone()], io: StateIo::Auto });
    let options = Options { threads: Some(1), huge_pages: false, disk, ..Options::default() };
    let toy = Toy::new(SimDevice::new(Some(1), Faults::default()).queueing_compute(), request.clone());
    let device = || Arc::new(toy.device.clone());
    let buffers = |engine: &Engine| {
        let named = ["disk buffers", "weights: read from disk", "transfer window"];
        let items = engine.allocated().into_iter().filter(|item| named.contains(&item.what.as_str()));
        items.map(|item| item.bytes.next_multiple_of(4096)).sum::<u64>()
    };

    let first = Engine::new(device(), &request, &planned, &options).unwrap();
    toy.fill(&first).unwrap();
    toy.step(&first, 0, Some(0.5)).unwrap();
    assert!(buffers(&first) > 0);
    assert_eq!(pinned(), RINGS * buffers(&first));
    let kept = first.keep().unwrap();
    assert_eq!(pinned(), 0, "the state is kept, and what it passes through is not");
    drop(first);
    // An engine that takes the state over and cannot start, when it has its buffers.
    let fail = vec![FailedCall { call: "copy_to_device".to_owned(), nth: 1, panic: false, lost: false }];
    let faulty = SimDevice::new(Some(1), Faults { fail, ..Faults::default() });
    assert!(Engine::with_kept(Arc::new(faulty), &request, &planned, &options, &kept).is_err());
    assert_eq!(pinned(), 0);
    let second = Engine::with_kept(device(), &request, &planned, &options, &kept).unwrap();
    assert_eq!(pinned(), RINGS * buffers(&second));
    toy.step(&second, 1, Some(0.5)).unwrap();
    toy.state(&second).unwrap();
    drop((second, kept));
    assert_eq!(pinned(), 0);
    std::fs::remove_dir_all(&folder).unwrap();
}
