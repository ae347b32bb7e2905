//! Planning, the schedule and its simulation: JSON in, JSON out.
use megatrain_core::estimate::{self, estimate};
use megatrain_core::plan::{self, Placement, Plan, Rates, Request};
use megatrain_core::schedule::{Pass, Schedule, ScheduleInputs, Shape, check};
use megatrain_core::{Error, Result};
use pyo3::prelude::*;
use serde::Serialize;

use crate::error::detached;

/// Reads a plan that `plan` has written.
pub(crate) fn read_plan(text: &str) -> Result<Plan> {
    read("plan", text)
}

/// Reads any of our JSON documents.
pub(crate) fn read<T: serde::de::DeserializeOwned>(what: &'static str, text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|source| Error::Json { what, source })
}

/// Writes any of our JSON documents.
pub(crate) fn write(what: &'static str, value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(|source| Error::Json { what, source })
}

/// JSON in, JSON out: see `plan.rs` of the core. Allocates nothing. Raises DoesNotFit with the sum.
#[pyfunction]
#[pyo3(name = "plan")]
pub(crate) fn make_plan(py: Python<'_>, request: &str) -> PyResult<String> {
    detached(py, || write("the plan", &plan::plan(&Request::from_json(request)?)?))
}

/// Whether `plan` finds a plan for a request, without simulating any.
#[pyfunction]
pub(crate) fn fits(py: Python<'_>, request: &str) -> PyResult<bool> {
    detached(py, || plan::fits(&Request::from_json(request)?))
}

/// Runs the schedule of one steady step on a virtual clock.
#[pyfunction]
pub(crate) fn simulate(py: Python<'_>, request: &str, plan: &str, rates: &str) -> PyResult<String> {
    detached(py, || {
        let request = Request::from_json(request)?;
        let plan = read_plan(plan)?;
        plan.matches(&request)?;
        write("the estimate", &estimate(&request, &plan, &read::<Rates>("rates", rates)?)?)
    })
}

/// What a plan takes at the rates of a request: the `estimate` of a plan.
#[pyfunction]
pub(crate) fn forecast(py: Python<'_>, request: &str, plan: &str) -> PyResult<String> {
    detached(py, || {
        let request = Request::from_json(request)?;
        request.check()?;
        let plan = read_plan(plan)?;
        plan.matches(&request)?;
        write("the forecast", &estimate::forecast(&request, &plan)?)
    })
}

/// The schedule of one steady step as JSON, checked.
#[pyfunction]
pub(crate) fn schedule(py: Python<'_>, request: &str, plan: &str) -> PyResult<String> {
    detached(py, || {
        let request = Request::from_json(request)?;
        let plan = read_plan(plan)?;
        plan.matches(&request)?;
        let facts = ScheduleInputs::from_placement(&request, &plan, &Placement::new(&request, &plan)?);
        let shape = Shape::new(Pass::Train, plan.micro_batches);
        let (first, steady) = Schedule::steady(&facts, shape)?;
        check(&facts, &steady, Some(&first))?;
        write("the schedule", steady.as_ref())
    })
}
