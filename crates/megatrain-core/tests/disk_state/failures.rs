//! Whatever fails at any call on a disk.
use megatrain_core::disk::{Fault, FaultKind, SimDisk};
use megatrain_core::error::Error;
use megatrain_core::layout::Precision;
use megatrain_core::plan::{Request, UpdateMode, plan};
use megatrain_core::schedule::Pass;
use megatrain_core::stream::Options;

use super::support::{FOREVER, Toy, request};
use super::{queueing, support};

const EIO: i32 = 5;
const ENOSPC: i32 = 28;

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
        toy.begin(&engine, Pass::Eval, 1, false)?;
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
