//! What fits, and where everything goes: [`plan`] turns a [`Request`] into a [`Plan`] without allocating anything.
//!
//! A plan is a point in a small space (`space`): how many units have their optimizer state on the device, how many
//! layers keep their activations, how many others are updated on the device, how many buffers there are, and where
//! layer inputs wait. The points that are compared follow from the model and the rates, never from the budgets, and
//! of those that fit the one with the shortest simulated step is taken (`search`). So whatever is chosen under a small
//! budget is a candidate under a larger one, and more memory never makes a plan slower. A request is refused only when
//! no point fits, with the sum of the point that misses by least.
//!
//! The same is done for each number of micro-batches in a group (`groups`).
//!
//! What memory is left then may serve to capture layers (`Requests::graphs`).
//!
//! Every choice can be asked for in [`crate::plan::Requests`]; one that cannot be honoured is refused by name.
use crate::error::Result;
use crate::plan::{DeviceKind, Placement, Plan, Request};

mod groups;
mod on_disk;
mod point;
mod search;
mod space;

/// Plans a request.
///
/// # Errors
/// [`crate::Error`] for a request that contradicts itself; [`crate::Error::DoesNotFit`] or
/// [`crate::Error::SharedMemory`] with the sum.
///
/// ```
/// use megatrain_core::Error;
/// use megatrain_core::layout::{Precision, TensorSpec};
/// use megatrain_core::plan::{Budget, Request, UnitRequest, UnitRole, plan};
///
/// let unit = |name: &str, role| UnitRequest::new(name, role, vec![TensorSpec::trainable("weight", [512, 512])]);
/// let units = vec![
///     unit("embed", UnitRole::Embed),
///     unit("layers.0", UnitRole::Layer),
///     unit("layers.1", UnitRole::Layer),
///     unit("head", UnitRole::Head),
/// ];
/// let budget = Budget { device: 64 << 20, host: 64 << 20, disk: 0 };
/// let mut request = Request::new(units, Precision::Bf16, 2, budget);
///
/// let planned = plan(&request)?;
/// assert_eq!(planned.units.len(), 4);
/// assert!(planned.totals.device <= 64 << 20 && planned.totals.host <= 64 << 20);
///
/// request.budget.host = 1 << 10;
/// request.budget.device = 1 << 10;
/// assert!(matches!(plan(&request), Err(Error::DoesNotFit { .. } | Error::SharedMemory { .. })));
/// # Ok::<(), Error>(())
/// ```
pub fn plan(request: &Request) -> Result<Plan> {
    request.check()?;
    let mut plan = with_graphs(request, groups::fastest(request)?)?;
    plan.estimate = crate::estimate::forecast(request, &plan)?;
    Ok(plan)
}

/// Whether [`plan`] finds a plan: adds up memory, and simulates nothing.
///
/// # Errors
/// As for [`plan`], except that what does not fit is an answer.
pub fn fits(request: &Request) -> Result<bool> {
    request.check()?;
    groups::any_fits(request)
}

/// The plan with its resident layers captured, where that was allowed and fits beside everything else.
fn with_graphs(request: &Request, plan: Plan) -> Result<Plan> {
    let captured = (1..=request.num_layers()).any(|unit| plan.units[unit].can_be_captured(&request.units[unit]));
    if !request.requests.graphs || request.device != DeviceKind::Cuda || !captured {
        return Ok(plan);
    }
    let mut captured = Plan { graphs: true, ..plan.clone() };
    let placement = Placement::new(request, &captured)?;
    (captured.items, captured.totals) = (placement.items().to_vec(), placement.totals());
    let fits = captured.totals.device <= request.budget.device;
    Ok(if fits { captured } else { plan })
}
