//! Plans a model of 7 billion parameters for a card of 24 GiB, prints where everything goes, and what a step takes.
//!
//! ```text
//! cargo run --release -p megatrain-core --example 01_plan
//! ```
//!
//! Nothing is allocated: a plan is arithmetic.
use megatrain_core::layout::{Precision, TensorSpec};
use megatrain_core::plan::{Budget, DeviceKind, Plan, Request, State, UnitRequest, UnitRole, plan};
use megatrain_core::{Error, Tier};

const GIB: u64 = 1 << 30;
const HIDDEN: u64 = 4096;
const TOKENS: u64 = 8192;

/// One matrix a unit, so that the sizes are those of a Llama of 7 billion parameters.
fn unit(name: String, role: UnitRole, parameters: u64) -> UnitRequest {
    let weight = TensorSpec::trainable(format!("{name}.weight"), [parameters / HIDDEN, HIDDEN]);
    let matmul = if role == UnitRole::Embed { 0.0 } else { 2.0 * (parameters * TOKENS) as f64 };
    let input_bytes = TOKENS * HIDDEN * 2;
    UnitRequest {
        kept_bytes: 17 * input_bytes,
        input_bytes,
        flops: matmul,
        ..UnitRequest::new(name, role, vec![weight])
    }
}

fn request() -> Request {
    let mut units = vec![unit("embed".into(), UnitRole::Embed, 131 << 20)];
    units.extend((0..32).map(|i| unit(format!("layers.{i}"), UnitRole::Layer, 202 << 20)));
    units.push(unit("head".into(), UnitRole::Head, 131 << 20));
    let budget = Budget { device: 24 * GIB, host: 128 * GIB, disk: 0 };
    Request { device: DeviceKind::Cuda, workspace_bytes: 2 * GIB, ..Request::new(units, Precision::Bf16, 4, budget) }
}

fn print(plan: &Plan) {
    for item in &plan.items {
        println!("{:<32} {:>8} {:>9.2} GiB", item.what, format!("{:?}", item.tier), item.bytes as f64 / GIB as f64);
    }
    let on_device = plan.units.iter().filter(|u| u.state == State::Device).count();
    println!("{} slots; state of {on_device} of {} units on the device", plan.slots, plan.units.len());
    println!("a step takes {:.2} s; busiest: {}", plan.estimate.step_s, plan.estimate.bound);
    for (lane, seconds) in &plan.estimate.lanes {
        println!("  {lane:<9} {seconds:>6.2} s");
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut request = request();
    print(&plan(&request)?);

    // What does not fit is refused with its sum.
    request.budget.host = 32 * GIB;
    match plan(&request) {
        Err(refusal @ Error::DoesNotFit { tier: Tier::Host, .. }) => {
            println!("\nwith less host memory: {refusal}");
            Ok(())
        }
        Err(other) => Err(other.into()),
        Ok(plan) => Err(format!("{} bytes should not fit", plan.totals.host).into()),
    }
}
