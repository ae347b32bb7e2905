//! Plans: what is chosen, what is refused and how, and what a step is predicted to take.
use megatrain_core::error::{Error, Tier};
use megatrain_core::estimate::{estimate, forecast};
use megatrain_core::layout::Precision;
use megatrain_core::plan::{
    Activation, Auto, Budget, Count, DeviceKind, Place, Plan, Rates, Request, Requests, Routed, State, UnitRole,
    UpdateMode, fits, plan,
};
use megatrain_core::schedule::{Kind, Lane, Pass, Schedule, ScheduleInputs, Shape, check};
use proptest::prelude::*;

#[path = "../support/mod.rs"]
mod support;
use support::request;

mod memory;
mod requests;
mod sizes;
mod times;

/// Layers of 2^20 parameters, so that sizes are round.
fn model(layers: usize, micro_batches: u32) -> Request {
    let mut request = request(layers, micro_batches);
    for unit in &mut request.units {
        unit.tensors.truncate(1);
        unit.tensors[0].shape = vec![1 << 20];
        (unit.kept_bytes, unit.input_bytes, unit.flops) = (40 << 20, 2 << 20, 2e9);
    }
    (request.precision, request.grad_precision) = (Precision::Bf16, Precision::Bf16);
    request.requests = Default::default();
    request.budget.device = 1 << 40;
    request.budget.host = 1 << 40;
    request
}

fn text(error: Error) -> String {
    error.to_string()
}
