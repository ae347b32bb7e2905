//! Which slot holds which layer when: decided ahead, since the whole pass is known.
use std::collections::HashMap;

use super::{Resident, ScheduleInputs};

/// A layer's use in a pass: the slot that holds it, and whether it must be loaded first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Turn {
    pub(super) slot: u32,
    pub(super) load: bool,
}

/// A layer, and what of its weights is sent ([`ScheduleInputs::sent`]).
type Sent = (u32, u32);

/// Assigns slots to `turns` (layers in the order in which a pass computes them). The layer whose next turn is farthest
/// makes room (Belady, "A study of replacement algorithms for a virtual-storage computer", 1966: it loads least); among layers without a next turn, the one whose last turn is longest
/// ago, since its slot is free first. `resident` layers are in their slots already.
pub(super) fn assign(inputs: &ScheduleInputs, turns: &[Sent], resident: &[Resident]) -> Vec<Option<Turn>> {
    let mut next: Vec<usize> = vec![usize::MAX; turns.len()];
    let mut seen: HashMap<Sent, usize> = HashMap::new();
    for (i, unit) in turns.iter().enumerate().rev() {
        next[i] = seen.insert(*unit, i).unwrap_or(usize::MAX);
    }
    // (unit, its next turn, its last turn)
    let mut slots: Vec<Option<(Sent, usize, usize)>> = vec![None; inputs.slots as usize];
    for held in resident {
        if let Some(slot) = held.slot {
            let unit = (held.unit, 0);
            slots[slot as usize] = Some((unit, seen.get(&unit).copied().unwrap_or(usize::MAX), 0));
        }
    }
    turns
        .iter()
        .enumerate()
        .map(|(i, &unit)| {
            if inputs.unit(unit.0).own_place {
                return None;
            }
            let held = slots.iter().position(|s| s.is_some_and(|(u, ..)| u == unit));
            let slot = held.unwrap_or_else(|| {
                let worth = |s: &Option<(_, usize, usize)>| match s {
                    None => (usize::MAX, usize::MAX),
                    Some((_, next, last)) => (*next, usize::MAX - 1 - last),
                };
                let best = slots.iter().enumerate().max_by_key(|(index, s)| (worth(s), usize::MAX - index));
                best.map_or(0, |(index, _)| index)
            });
            slots[slot] = Some((unit, next[i], i));
            Some(Turn { slot: u32::try_from(slot).expect("fewer slots than 2^32"), load: held.is_none() })
        })
        .collect()
}
