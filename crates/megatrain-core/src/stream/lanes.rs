//! Where the lanes stand: what each does, and what it waits for. For reports of a step that does not go on.
use serde::{Deserialize, Serialize};

use super::state::Shared;
use crate::schedule::{Lane, Op};

/// Where every lane stands.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Lanes {
    /// Operations that are over since the engine was made: a number that stays the same means that nothing goes on.
    pub completed: u64,
    /// The lanes with anything left to do in the passes that are alive.
    pub lanes: Vec<LaneState>,
}

/// Where one lane stands. Operations are named by what they do, their unit and their micro-batch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LaneState {
    /// Its name; `caller` is whoever drives the engine.
    pub lane: String,
    /// Operations under way.
    pub running: Vec<String>,
    /// The one that follows.
    pub next: Option<String>,
    /// What that one waits for.
    pub waits_for: Vec<String>,
}

impl Shared {
    pub(super) fn lanes(&self) -> Lanes {
        let core = self.lock();
        let states = Lane::ALL.map(|lane| (lane, core.progress.lane(lane)));
        let completed = core.progress.completed();
        drop(core);
        let named = |ops: &[Op]| ops.iter().map(|op| self.named(op)).collect();
        let lanes = states
            .iter()
            .filter(|(_, state)| state.next.is_some() || !state.running.is_empty())
            .map(|(lane, state)| LaneState {
                lane: lane.name().to_owned(),
                running: named(&state.running),
                next: state.next.as_ref().map(|op| self.named(op)),
                waits_for: named(&state.waits_for),
            })
            .collect();
        Lanes { completed, lanes }
    }

    fn named(&self, op: &Op) -> String {
        let unit = &self.placement.layouts[op.unit as usize].name;
        format!("{} of {unit}, micro-batch {}", op.kind.name(), op.micro_batch)
    }
}
