//! What is done, how often and where.
use std::collections::{BTreeMap, HashMap};

use super::broken;
use crate::error::{Error, Result};
use crate::schedule::{Kind, Lane, Op, Pass, Schedule, ScheduleInputs, Shape};

/// Everything that indexes the plan is inside it.
pub(super) fn check_shape(inputs: &ScheduleInputs, schedule: &Schedule) -> Result<()> {
    let Shape { pass, micro_batches, .. } = schedule.shape;
    let fits = match pass {
        Pass::Write => micro_batches == 0,
        Pass::Train | Pass::Eval => (1..=inputs.micro_batches).contains(&micro_batches),
    };
    if !fits {
        return Err(Error::PassSize { asked: micro_batches, most: inputs.micro_batches });
    }
    if let Some(op) = schedule.ops.iter().find(|op| op.unit > inputs.head()) {
        return Err(broken(op, "an operation is about a unit of the model"));
    }
    for held in &schedule.resident {
        let known = held.unit <= inputs.head() && {
            let of = inputs.unit(held.unit);
            held.slot.map_or(of.own_place, |slot| !of.own_place && of.routed_by.is_none() && slot < inputs.slots)
        };
        if !known {
            return Err(Error::NotResident { unit: held.unit });
        }
    }
    Ok(())
}

/// What is not counted by micro-batch: a kind, a unit, a part of it, and whether it is early.
type Work = (Kind, u32, u32, bool);

/// Every part of a unit that trains is offloaded once and updated once, where its state lives or is fetched to, and what is
/// fetched is written back once; so are, before that, the embedding's rows that the step does not look up. What a pass has
/// no use for does not occur.
pub(super) fn check_work(inputs: &ScheduleInputs, schedule: &Schedule) -> Result<()> {
    let train = schedule.shape.pass == Pass::Train;
    let mut expected: BTreeMap<Work, u64> = BTreeMap::new();
    for unit in 0..=inputs.head() {
        let of = inputs.unit(unit);
        let trains = train && of.trains;
        let early = trains && unit == 0 && inputs.early;
        let (parts, updates) = (of.parts, of.update_parts());
        let away = trains && of.device_update_parts > 0;
        let on_disk = trains && of.disk_parts > 0;
        for (kind, early, wanted, parts) in [
            (Kind::OffloadGrad, false, trains, parts),
            (Kind::OffloadGrad, true, early && inputs.tied, parts),
            (Kind::AccumulateGrad, false, trains && inputs.accumulate, parts),
            (Kind::FetchState, false, away, updates),
            (Kind::ReadState, false, on_disk, updates),
            (Kind::WriteState, false, on_disk, updates),
            (Kind::Update, false, trains, updates),
            (Kind::Update, true, early, parts),
            (Kind::WriteBackState, false, away, updates),
        ] {
            if wanted {
                expected.extend((0..parts).map(|part| ((kind, unit, part, early), 1)));
            }
        }
        if schedule.shape.writes {
            expected.insert((Kind::WriteCheckpoint, unit, 0, false), 1);
        }
    }
    if train {
        expected.insert((Kind::ClipDecision, 0, 0, false), 1);
    }
    for op in &schedule.ops {
        let of = inputs.unit(op.unit);
        let parts = match op.kind {
            Kind::FetchState | Kind::ReadState | Kind::Update | Kind::WriteBackState | Kind::WriteState
                if !op.early =>
            {
                of.update_parts()
            }
            Kind::OffloadGrad | Kind::Update => of.parts,
            Kind::Load if of.own_place => of.parts,
            _ => 1,
        };
        if op.part >= parts {
            return Err(broken(op, "a unit has the parts that the plan gave it"));
        }
    }
    let mut found: BTreeMap<Work, u64> = BTreeMap::new();
    let counted = |op: &&Op| !matches!(op.kind, Kind::Load | Kind::ReadWeights) && !by_micro_batch(op.kind);
    for op in schedule.ops.iter().filter(counted) {
        *found.entry((op.kind, op.unit, op.part, op.early)).or_insert(0) += 1;
    }
    for work @ &(kind, unit, part, _) in expected.keys().chain(found.keys()) {
        let (found, expected) = (found.get(work).copied().unwrap_or(0), expected.get(work).copied().unwrap_or(0));
        if found != expected {
            let what = match kind {
                Kind::WriteCheckpoint => format!("WriteCheckpoint of unit {unit} (written {found} times)"),
                Kind::ClipDecision => "the clip decision".to_owned(),
                _ => format!("{kind:?} of unit {unit}, part {part},"),
            };
            return Err(Error::OpCount { what, found, expected });
        }
    }
    if let Some(op) = schedule.ops.iter().find(|op| !counted(op) && op.early) {
        return Err(broken(op, "only the embedding's gradient and update can be early"));
    }
    // (What is sent in part is named by the group of micro-batches that needs it, which the weights that are read show.)
    let in_part = |op: &Op| op.kind == Kind::Load && inputs.unit(op.unit).routed_by.is_some();
    let names_none = |op: &Op| !by_micro_batch(op.kind) && !in_part(op);
    if let Some(op) = schedule.ops.iter().find(|op| op.micro_batch != 0 && names_none(op)) {
        return Err(broken(op, "what is not done by micro-batch names none"));
    }
    Ok(())
}

/// What happens once for each micro-batch.
const fn by_micro_batch(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::Embed
            | Kind::Forward
            | Kind::Loss
            | Kind::Backward
            | Kind::EmbedBackward
            | Kind::OffloadActivation
            | Kind::FetchActivation
            | Kind::WriteInput
            | Kind::ReadInput
    )
}

/// Every operation is on the lane whose stream or thread executes its kind: elsewhere, the events by which others wait for it
/// would be recorded on another stream than the one that it is queued on.
pub(super) fn check_lanes(inputs: &ScheduleInputs, schedule: &Schedule) -> Result<()> {
    for op in &schedule.ops {
        let (lane, rule) = match op.kind {
            Kind::Embed | Kind::Forward | Kind::Loss | Kind::Backward | Kind::EmbedBackward => {
                (Lane::Compute, "the caller computes on the compute lane")
            }
            Kind::Load | Kind::FetchActivation | Kind::FetchState => {
                (Lane::Upload, "copies to the device are queued on the upload lane")
            }
            Kind::OffloadActivation | Kind::OffloadGrad => {
                (Lane::Download, "copies to the host are queued on the download lane")
            }
            Kind::AccumulateGrad => (Lane::Host, "gradients are accumulated by the host"),
            Kind::ClipDecision => (Lane::Caller, "the caller decides"),
            Kind::Update if inputs.unit(op.unit).updated_on_device() => {
                (Lane::Update, "a unit is updated where its state lives or is fetched to")
            }
            Kind::Update => (Lane::Host, "a unit is updated where its state lives or is fetched to"),
            Kind::WriteBackState => (Lane::Update, "state is written back on the update lane"),
            Kind::WriteCheckpoint => (Lane::Disk, "files are written on the lane of files"),
            Kind::ReadState => (Lane::StateRead, "state on disk is read on the lane that reads it"),
            Kind::ReadWeights => (Lane::StateRead, "weights on disk are read on the lane that reads state"),
            Kind::WriteState => (Lane::StateWrite, "state on disk is written on the lane that writes it"),
            Kind::ReadInput => (Lane::StateRead, "inputs on disk are read on the lane that reads state"),
            Kind::WriteInput => (Lane::StateWrite, "inputs on disk are written on the lane that writes state"),
        };
        if op.lane != lane {
            return Err(broken(op, rule));
        }
    }
    Ok(())
}

/// Each micro-batch is computed unit by unit, forward and then back, and those of a unit are computed in order; what is
/// staged is offloaded and fetched once for each, and what of that waits on disk is written and read once.
pub(super) fn check_compute_order(inputs: &ScheduleInputs, schedule: &Schedule) -> Result<()> {
    let (head, micro_batches) = (inputs.head(), schedule.shape.micro_batches);
    let train = schedule.shape.pass == Pass::Train;
    let mut next: HashMap<(Kind, u32), u32> = HashMap::new();
    let mut found: HashMap<(Kind, u32), u32> = HashMap::new();
    for op in schedule.ops.iter().filter(|op| by_micro_batch(op.kind)) {
        let expected = next.entry((op.kind, op.unit)).or_insert(0);
        let staged = &inputs.unit(op.unit).staged;
        let concerned = |micro_batch: u32| match op.kind {
            Kind::OffloadActivation | Kind::FetchActivation => staged.bytes(micro_batch) > 0,
            Kind::WriteInput | Kind::ReadInput => staged.disk_bytes(micro_batch) > 0,
            _ => true,
        };
        while *expected < micro_batches && !concerned(*expected) {
            *expected += 1;
        }
        if op.micro_batch != *expected {
            return Err(broken(op, "micro-batches of a unit are computed in order"));
        }
        *expected += 1;
        *found.entry((op.kind, op.unit)).or_insert(0) += 1;
    }
    let mut times = |kind: Kind, unit: u32, expected: u32| {
        let found = found.remove(&(kind, unit)).unwrap_or(0);
        if found == expected {
            return Ok(());
        }
        let what = format!("{kind:?} of unit {unit}");
        Err(Error::OpCount { what, found: found.into(), expected: expected.into() })
    };
    let backward = if train { micro_batches } else { 0 };
    times(Kind::Embed, 0, micro_batches)?;
    times(Kind::Loss, head, micro_batches)?;
    times(Kind::EmbedBackward, 0, backward)?;
    for unit in 1..head {
        times(Kind::Forward, unit, micro_batches)?;
        times(Kind::Backward, unit, backward)?;
        let leaves = |&micro_batch: &u32| inputs.unit(unit).staged.bytes(micro_batch) > 0;
        let staged = (0..backward).filter(leaves).count() as u32;
        times(Kind::OffloadActivation, unit, staged)?;
        times(Kind::FetchActivation, unit, staged)?;
        let goes = |&micro_batch: &u32| inputs.unit(unit).staged.disk_bytes(micro_batch) > 0;
        let on_disk = (0..backward).filter(goes).count() as u32;
        times(Kind::WriteInput, unit, on_disk)?;
        times(Kind::ReadInput, unit, on_disk)?;
    }
    if let Some((&(kind, unit), &found)) = found.iter().min_by_key(|(key, _)| **key) {
        let what = format!("{kind:?} of unit {unit}");
        return Err(Error::OpCount { what, found: found.into(), expected: 0 });
    }
    // How many computations of each micro-batch there have been says which one is next.
    let last_turn = if train { 2 * head + 1 } else { head + 1 };
    let mut done: Vec<u32> = vec![0; micro_batches as usize];
    let mut finished = 0;
    for op in schedule.ops.iter().filter(|op| op.lane == Lane::Compute) {
        let turn = &mut done[op.micro_batch as usize];
        let expected = match *turn {
            0 => (Kind::Embed, 0),
            turn if turn < head => (Kind::Forward, turn),
            turn if turn == head => (Kind::Loss, head),
            turn if turn < 2 * head => (Kind::Backward, 2 * head - turn),
            _ => (Kind::EmbedBackward, 0),
        };
        if (op.kind, op.unit) != expected {
            return Err(broken(op, "a micro-batch passes through the units in order, forward and then back"));
        }
        // Room for activations is that of one group.
        if *turn == 0 && inputs.groups.start(op.micro_batch) > finished {
            return Err(broken(op, "a group of micro-batches begins when the one before it has ended"));
        }
        *turn += 1;
        finished += u32::from(*turn == last_turn);
    }
    Ok(())
}
