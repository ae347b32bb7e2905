//! What fits, and where everything goes: [`plan`] turns a [`Request`] into a [`Plan`] without allocating anything.
//!
//! It places what a step cannot do without, then spends free device memory where that makes the step shortest: on
//! optimizer state (`embed`, `head`, then layers in forward order) while the host's optimizer is what the step waits for,
//! on kept activations (last layers first) once it is not, on slots with what is left. Where the optimizer is what a step
//! still waits for, some layers are updated on the device, which their state passes through, while the host updates others. Candidates are compared by their
//! simulated step time. Every choice can be asked for in [`crate::plan::Requests`]; a choice that cannot be honoured is refused by
//! name, and a plan that does not fit is refused with its sum.
use crate::error::Result;
use crate::plan::{Plan, Request};

mod choose;

/// Plans a request.
///
/// # Errors
/// [`crate::Error`] for a request that contradicts itself, [`crate::Error::DoesNotFit`] with the sum.
pub fn plan(request: &Request) -> Result<Plan> {
    request.check()?;
    let mut plan = choose::choose(request)?;
    plan.estimate = crate::estimate::forecast(request, &plan)?;
    Ok(plan)
}
