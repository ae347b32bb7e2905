//! The threads: one a lane that issues, one more a device lane that waits for events.
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::Instant;

use super::execute::{Done, span_of};
use super::input_io::concerns_its_pass_alone;
use super::state::{Shared, Token};
use crate::device::Stream;
use crate::error::{Error, Result};
use crate::schedule::progress::Id;
use crate::schedule::{Kind, Lane, Op};

/// Lanes whose operations are issued by a thread of their own, not by the caller.
pub(super) const WORKED: [Lane; 7] =
    [Lane::Upload, Lane::Download, Lane::Host, Lane::Update, Lane::Disk, Lane::StateRead, Lane::StateWrite];

/// Starts every thread; those started before a failure end when the caller drops the engine.
pub(super) fn start(shared: &Arc<Shared>, threads: &mut Vec<JoinHandle<()>>) -> Result<()> {
    let mut spawn = |name: String, work: Box<dyn FnOnce(&Shared) + Send>| {
        let shared = Arc::clone(shared);
        let thread = Builder::new().name(name.clone()).spawn(move || work(&shared));
        threads.push(thread.map_err(|e| Error::Worker(format!("thread {name} could not be started: {e}")))?);
        Ok(())
    };
    for lane in WORKED.into_iter().filter(|&lane| shared.placement.uses_disk() || !lane.moves_state_on_disk()) {
        spawn(format!("megatrain-{}", lane.name()), Box::new(move |shared| issue(shared, lane)))?;
    }
    for stream in Stream::ALL {
        spawn(format!("megatrain-{}-done", stream.name()), Box::new(move |shared| complete(shared, stream)))?;
    }
    Ok(())
}

/// The stream on which a lane queues its operations.
pub(super) const fn stream(lane: Lane) -> Option<Stream> {
    match lane {
        Lane::Compute => Some(Stream::Compute),
        Lane::Upload => Some(Stream::Upload),
        Lane::Download => Some(Stream::Download),
        Lane::Update => Some(Stream::Update),
        Lane::Host | Lane::Caller | Lane::Disk | Lane::StateRead | Lane::StateWrite => None,
    }
}

/// Turns a panic into a message: a lane that dies must take the engine with it, not leave the others waiting.
pub(super) fn guarded<R>(work: impl FnOnce() -> Result<R>) -> std::result::Result<R, String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(|e| e.to_string()),
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
            Err(format!("panic: {}", text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default()))
        }
    }
}

/// Issues the lane's ready operations until the engine closes or breaks.
fn issue(shared: &Shared, lane: Lane) {
    let mut core = shared.lock();
    loop {
        if core.check().is_err() {
            return;
        }
        let taken = if core.may_take() { core.progress.take(lane) } else { None };
        let Some(id) = taken else {
            core = shared.wait(core);
            continue;
        };
        let op = core.progress.op(id);
        let awaited = core.progress.awaited(id);
        if op.kind == Kind::Update {
            core.updates_begun |= core.undecided == Some(id.pass);
        }
        let decision = core.decisions.get(&id.pass).cloned();
        let save = core.saving.as_ref().filter(|s| s.pass == Some(id.pass)).map(|s| Arc::clone(&s.save));
        drop(core);
        let began = Instant::now();
        let done = guarded(|| shared.execute(&op, &awaited, decision.as_ref(), save.as_deref()));
        match done {
            Ok(done) => {
                core = shared.lock();
                core.counters.moved(&op, &shared.placement);
                match done {
                    Done::Queued(token) => {
                        core.progress.issued(id, token.clone());
                        if let Some(stream) = stream(lane) {
                            core.awaited[stream.index()].push_back((id, token));
                        }
                    }
                    Done::Over => {
                        core.counters.busy(lane, began.elapsed().as_secs_f64());
                        let unit = &shared.placement.layouts[op.unit as usize].name;
                        shared.trace.host(span_of(&op, unit), began, Instant::now());
                        core.progress.complete(id);
                    }
                }
                shared.notify();
            }
            Err(cause) if concerns_its_pass_alone(op.kind) => {
                shared.fail_pass(id, &op, cause);
                core = shared.lock();
            }
            Err(cause) => {
                shared.fail(&op, &cause);
                return;
            }
        }
    }
}

/// Waits for the events of a stream, in order, and marks what is over.
fn complete(shared: &Shared, stream: Stream) {
    // Offloaded gradients wake the host's optimizer one by one, the end of an upload makes room for another, and so does state that
    // returns; nobody waits for a single computation, so that the newest speaks for all before it.
    let one_by_one = stream != Stream::Compute;
    loop {
        let mut core = shared.lock();
        let batch: Vec<(Id, Token)> = loop {
            if core.check().is_err() {
                return;
            }
            let one_by_one = one_by_one || core.synchronous;
            let queue = &mut core.awaited[stream.index()];
            if queue.is_empty() {
                core = shared.wait(core);
            } else {
                let len = if one_by_one { 1 } else { queue.len() };
                break queue.drain(..len).collect();
            }
        };
        let ops: Vec<Op> = batch.iter().map(|(id, _)| core.progress.op(*id)).collect();
        drop(core);
        let Some(((_, last), op)) = batch.last().zip(ops.last()) else { continue };
        let seconds = guarded(|| {
            shared.device.synchronize(&last.end)?;
            batch.iter().zip(&ops).map(|((_, token), op)| shared.measure(op, token)).collect::<Result<Vec<f64>>>()
        });
        match seconds {
            Ok(seconds) => {
                let mut core = shared.lock();
                for (((id, _), op), seconds) in batch.iter().zip(&ops).zip(seconds) {
                    core.counters.busy(op.lane, seconds);
                    core.progress.complete(*id);
                }
                drop(core);
                shared.notify();
            }
            Err(cause) => {
                shared.fail(op, &cause);
                return;
            }
        }
    }
}
