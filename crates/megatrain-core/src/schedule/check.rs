//! Proves a schedule: finds the first rule that it breaks.
//!
//! Nothing is believed about how the schedule was built. Each operation must be one that the plan asks for, as often as it
//! asks for it, on the lane that its kind is executed on, with every buffer that it uses named and inside the plan's. Then
//! each operation's reads and writes are followed in program order, and every pair that touches one thing must be ordered by
//! a path of dependencies: such a path means that the first is over before the second begins, whether an event orders them
//! or the host.
//!
//! Whether a path exists is answered in near-constant time: computations form a chain (which is proved first), so that
//! the latest computation before an operation and the earliest one after it stand for all others, and only paths
//! without a computation are searched.

use self::buffers::check_buffers;
use self::graph::Graph;
use self::work::{check_compute_order, check_lanes, check_shape, check_work};
use super::{Op, Schedule, ScheduleInputs};
use crate::error::{Error, Result};

mod buffers;
mod contents;
mod graph;
mod work;

/// Checks `schedule` as the pass that follows `previous`, which is checked itself as far as this proof rests on it.
///
/// # Errors
/// [`Error::OpRule`] naming the operation and the rule that it breaks, [`Error::OpCount`] for an operation too few or too
/// many, [`Error::NotResident`], [`Error::PassSize`].
pub fn check(inputs: &ScheduleInputs, schedule: &Schedule, previous: Option<&Schedule>) -> Result<()> {
    for schedule in previous.into_iter().chain([schedule]) {
        check_shape(inputs, schedule)?;
    }
    let mut graph = Graph::new(schedule, previous)?;
    graph.check_edges()?;
    for schedule in previous.into_iter().chain([schedule]) {
        check_work(inputs, schedule)?;
        check_lanes(inputs, schedule)?;
    }
    graph.check_compute_chain()?;
    for schedule in previous.into_iter().chain([schedule]) {
        check_compute_order(inputs, schedule)?;
    }
    graph.check_hazards(inputs, schedule, previous)?;
    for schedule in previous.into_iter().chain([schedule]) {
        check_buffers(inputs, schedule)?;
    }
    Ok(())
}

fn broken(op: &Op, rule: &str) -> Error {
    let Op { id, unit, micro_batch, .. } = *op;
    Error::OpRule { op: id, kind: format!("{:?}", op.kind), unit, micro_batch, rule: rule.to_owned() }
}
