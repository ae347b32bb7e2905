//! The memory that torch allocates.
use super::carver::Carver;
use crate::error::Tier;
use crate::plan::{Activation, Place, Plan, Request};

/// Names and bytes of what torch allocates.
pub(crate) type TorchLines = [(&'static str, u64); 6];

/// What torch allocates on the device: listed so that the total is true, and never allocated by the engine.
pub(super) fn torch_items(request: &Request, plan: &Plan, carver: &mut Carver) {
    let groups = plan.groups();
    let lines = largest_torch_lines([(true, groups.large()), (false, groups.others())].map(|(large, group)| {
        let (mut kept, mut inputs) = (0, 0);
        for unit in 1..request.units.len() - 1 {
            let (sizes, choice) = (&request.units[unit], &plan.units[unit]);
            if choice.activation_in(large) == Activation::Keep {
                kept = u64::from(group).saturating_mul(sizes.kept_bytes).saturating_add(kept);
            } else if choice.input == Place::Device {
                inputs = u64::from(group).saturating_mul(sizes.input_bytes).saturating_add(inputs);
            }
        }
        torch_lines(request, group, kept, inputs)
    }));
    for (what, bytes) in lines {
        carver.item(what, Tier::Device, bytes, false);
    }
    if plan.graphs {
        // Graphs keep memory of their own, and a pass of another shape runs beside them without graphs.
        let captured = lines.iter().fold(0, |sum: u64, line| sum.saturating_add(line.1)) - request.context_bytes;
        carver.item("captured layers (torch)", Tier::Device, captured, false);
    }
}

/// The lines of torch's memory: those of the large group of micro-batches or those of another one, whichever need more.
pub(crate) fn largest_torch_lines(groups: [TorchLines; 2]) -> TorchLines {
    let total = |lines: &TorchLines| lines.iter().fold(0, |sum: u64, line| sum.saturating_add(line.1));
    let [large, others] = groups;
    if total(&large) > total(&others) { large } else { others }
}

/// The lines of torch's memory where the activations that are kept and the inputs that wait on the device have these
/// sizes.
pub(crate) fn torch_lines(request: &Request, group: u32, kept: u64, inputs: u64) -> TorchLines {
    // The last hidden states, and the gradients that replace them one by one.
    let hidden = (u64::from(group) + 1).saturating_mul(request.units[request.units.len() - 1].input_bytes);
    // What is needed late takes the place of what was kept.
    let workspace = request.workspace_bytes.max(request.late_workspace_bytes.saturating_sub(kept));
    let used = kept.saturating_add(inputs).saturating_add(hidden).saturating_add(workspace);
    [
        ("kept activations (torch)", kept),
        ("layer inputs (torch)", inputs),
        ("hidden states (torch)", hidden),
        ("workspace (torch)", workspace),
        ("fragmentation (torch)", ((used as f64 * request.fragmentation) as u64).max(request.largest_bytes)),
        ("context and libraries (torch)", request.context_bytes),
    ]
}
