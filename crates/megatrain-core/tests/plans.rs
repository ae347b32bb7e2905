//! Plans: what is chosen, what is refused and how, and what a step is predicted to take.
use megatrain_core::error::{Error, Tier};
use megatrain_core::estimate::estimate;
use megatrain_core::layout::Precision;
use megatrain_core::plan::{
    Activation, Auto, Budget, Count, DeviceKind, Place, Plan, Rates, Request, Requests, State, UnitRole, UpdateMode,
    plan,
};
use megatrain_core::schedule::{Kind, Lane, Pass, Schedule, ScheduleInputs, Shape, check};
use proptest::prelude::*;

mod support;
use support::request;

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

#[test]
fn twelve_bytes_a_parameter_on_the_host_and_two_more_while_gradients_wait() {
    let mut request = model(30, 1);
    request.requests.state_on_device = Some(Count::Units(0));
    let parameters = 32 << 20;
    let waiting = plan(&request).unwrap().totals.host;
    request.update = UpdateMode::Immediate;
    // With a slower optimizer, more gradients would wait to be consumed beneath the next forward.
    request.rates.adamw_gparams = 1e6;
    let immediate = plan(&request).unwrap().totals.host;
    let slack = 1 << 20;
    assert!((14 * parameters..14 * parameters + slack).contains(&waiting), "{waiting}");
    // Six slabs for layers, and those of embed and head.
    assert!((12 * parameters + (16 << 20)..12 * parameters + (16 << 20) + slack).contains(&immediate), "{immediate}");
}

#[test]
fn a_plan_fits_every_budget_it_is_accepted_under() {
    for device in [DeviceKind::Cpu, DeviceKind::Cuda] {
        let base = Request { device, ..model(12, 4) };
        let roomy = plan(&base).unwrap();
        let mut accepted = 0;
        for percent in (2..=100).step_by(2) {
            let mut request = base.clone();
            request.budget.device = roomy.totals.device * percent / 100;
            match plan(&request) {
                Ok(plan) => {
                    accepted += 1;
                    assert!(plan.totals.device <= request.budget.device);
                    assert_eq!(Plan::sum(&plan.items), plan.totals);
                    plan.matches(&request).unwrap();
                }
                Err(Error::DoesNotFit { tier: Tier::Device, needed, available, items }) => {
                    assert_eq!(items.iter().filter(|i| i.tier == Tier::Device).map(|i| i.bytes).sum::<u64>(), needed);
                    assert!(needed > available && available == request.budget.device);
                    assert_eq!(accepted, 0, "a larger budget is refused after a smaller one was accepted");
                }
                Err(other) => panic!("{other}"),
            }
        }
        assert!(accepted > 10);
    }
}

#[test]
fn free_device_memory_goes_to_state_activations_and_slots() {
    let mut request = Request { device: DeviceKind::Cuda, ..model(6, 2) };
    let everything = plan(&request).unwrap();
    assert!(everything.units.iter().all(|u| u.state == State::Device && u.activation == Activation::Keep));
    assert_eq!((everything.slots, everything.slabs), (0, 0));
    // Two layers' state less than everything needs: later layers stay on the host, embed and head do not.
    request.requests.state_on_device = Some(Count::Units(4));
    request.requests.keep = Some(0);
    let smaller = plan(&request).unwrap();
    let states: Vec<State> = smaller.units.iter().map(|u| u.state).collect();
    let (d, h) = (State::Device, State::Host);
    assert_eq!(states, [d, d, d, h, h, h, h, d]);
    assert_eq!(smaller.slots, 4, "what is left goes to a slot for every layer");
    // On the CPU, moving state to the device would free nothing.
    request.requests.state_on_device = Some(Count::Auto(Auto::Auto));
    let cpu = plan(&Request { device: DeviceKind::Cpu, ..request }).unwrap();
    assert!(cpu.units.iter().all(|u| u.state == h));
}

/// Layers on a card with too little memory for everything: a forward of one takes 10 ms, its update `update` seconds.
fn contended(layers: usize, update: f64, mode: UpdateMode) -> Request {
    let mut request = timed(layers, 0.001, 0.040, update, mode);
    request.device = DeviceKind::Cuda;
    (request.requests.keep, request.requests.slots, request.requests.state_on_device) = (None, None, None);
    // What lives on the host is updated there.
    request.requests.updates_on_device = Some(Count::Units(0));
    request.rates.hbm_gbs = 1e6;
    let mut tight = request.clone();
    (tight.requests.keep, tight.requests.state_on_device) = (Some(0), Some(Count::Units(2)));
    // What is left holds the activations of five layers, or the state of about sixteen.
    request.budget.device = plan(&tight).unwrap().totals.device + ((5 * 40) << 20);
    request
}

fn spent(plan: &Plan) -> (usize, usize) {
    let state = plan.units.iter().filter(|u| u.state == State::Device).count();
    (state, plan.units[1..plan.units.len() - 1].iter().filter(|u| u.activation == Activation::Keep).count())
}

#[test]
fn state_goes_to_the_device_until_the_hosts_updates_hide_beneath_the_next_forward() {
    let none = spent(&plan(&contended(24, 0.001, UpdateMode::JustInTime)).unwrap());
    let some = spent(&plan(&contended(24, 0.016, UpdateMode::JustInTime)).unwrap());
    let most = spent(&plan(&contended(24, 0.100, UpdateMode::JustInTime)).unwrap());
    // With updates that hide anyway, all that is left goes to activations: each spares a recomputation.
    assert!(none.1 >= 5, "{none:?}");
    // With updates half as long again as a forward, a part of the layers has its state on the device, no more.
    assert!(some.0 > none.0 && some.0 < most.0 && some.1 > most.1 && some.1 < none.1, "{none:?} {some:?} {most:?}");
    assert!(most.0 >= 12, "{most:?}");
    // Immediate updates hide beneath backward too, so the same optimizer needs less help.
    let immediate = spent(&plan(&contended(24, 0.016, UpdateMode::Immediate)).unwrap());
    assert!(immediate.0 < some.0 && immediate.1 >= some.1, "{immediate:?} {some:?}");
}

#[test]
fn no_other_split_of_the_memory_is_expected_to_be_faster() {
    for (update, mode) in [
        (0.001, UpdateMode::JustInTime),
        (0.016, UpdateMode::JustInTime),
        (0.100, UpdateMode::JustInTime),
        (0.060, UpdateMode::Immediate),
    ] {
        let request = contended(12, update, mode);
        let chosen = plan(&request).unwrap();
        for units in 0..=14 {
            for keep in 0..=12 {
                let mut other = request.clone();
                (other.requests.state_on_device, other.requests.keep) = (Some(Count::Units(units)), Some(keep));
                // Inputs leave the device only where the plan does not fit otherwise.
                other.requests.inputs = Some(Place::Device);
                let Ok(other) = plan(&other) else { continue };
                let (best, other) = (chosen.estimate.expected_step_s, other.estimate.expected_step_s);
                assert!(
                    best <= other * 1.005,
                    "{update}: {units} units and {keep} layers kept: {other} against {best}"
                );
            }
        }
        assert_eq!(plan(&request).unwrap(), chosen, "the same request gives the same plan");
        assert!(chosen.estimate.expected_step_s >= chosen.estimate.step_s);
    }
}

#[test]
fn what_the_card_loses_to_context_and_fragmentation_is_part_of_the_sum() {
    let mut request = Request { device: DeviceKind::Cuda, workspace_bytes: 100 << 20, ..model(4, 1) };
    let bare = plan(&request).unwrap();
    let torch = |plan: &Plan| -> u64 {
        plan.items.iter().filter(|i| i.tier == Tier::Device && i.what.ends_with("(torch)")).map(|i| i.bytes).sum()
    };
    (request.context_bytes, request.fragmentation) = (600 << 20, 0.125);
    let whole = plan(&request).unwrap();
    assert_eq!(whole.totals.device, bare.totals.device + torch(&bare) / 8 + (600 << 20));
    request.fragmentation = 1.5;
    assert!(text(plan(&request).unwrap_err()).contains("fragmentation is 1.5"));
}

#[test]
fn what_is_needed_when_nothing_is_kept_any_more_takes_the_place_of_what_was() {
    let mut request = Request { device: DeviceKind::Cuda, workspace_bytes: 10 << 20, ..model(8, 1) };
    (request.requests.slots, request.requests.keep, request.late_workspace_bytes) = (Some(2), Some(0), 200 << 20);
    request.units[1..9].iter_mut().for_each(|u| u.kept_bytes = 64 << 20);
    let workspace = |keep| {
        let request =
            Request { requests: Requests { keep: Some(keep), ..request.requests.clone() }, ..request.clone() };
        let plan = plan(&request).unwrap();
        plan.items.iter().find(|i| i.what == "workspace (torch)").unwrap().bytes >> 20
    };
    assert_eq!([0, 1, 2, 3, 8].map(workspace), [200, 136, 72, 10, 10]);
}

#[test]
fn leftover_memory_is_spent_on_as_many_slots_as_fit() {
    let mut request = Request { device: DeviceKind::Cuda, ..model(12, 1) };
    (request.requests.keep, request.requests.state_on_device) = (Some(0), Some(Count::Units(0)));
    let all = plan(&request).unwrap();
    assert_eq!(all.slots, 12);
    // Two slots and a bit less.
    request.budget.device = all.totals.device - (5 << 20);
    assert_eq!(plan(&request).unwrap().slots, 9);
}

#[test]
fn the_last_layers_are_kept_as_far_as_memory_goes_and_inputs_leave_when_it_does_not() {
    let mut request = model(8, 2);
    request.requests.slots = Some(2);
    request.requests.keep = Some(3);
    let three = plan(&request).unwrap();
    let kept = |plan: &Plan| plan.units[1..9].iter().map(|u| u.activation == Activation::Keep).collect::<Vec<_>>();
    assert_eq!(kept(&three), [false, false, false, false, false, true, true, true]);
    request.requests.keep = None;
    request.budget.device = three.totals.device;
    assert_eq!(kept(&plan(&request).unwrap()), kept(&three));
    request.requests.keep = Some(0);
    let mut long = request.clone();
    long.units.iter_mut().for_each(|u| u.input_bytes = 64 << 20);
    long.budget.device = 1 << 40;
    assert!(plan(&long).unwrap().units.iter().all(|u| u.input == Place::Device));
    // Too little even with a single gradient buffer, which is given up before.
    long.budget.device = plan(&long).unwrap().totals.device / 2;
    let moved = plan(&long).unwrap();
    assert!(moved.units[1..9].iter().all(|u| u.input == Place::Host));
    assert!(moved.stage_buffers >= 2 && moved.items.iter().any(|i| i.what == "activations" && i.tier == Tier::Host));
}

#[test]
fn requests_are_honoured_or_refused_by_name() {
    let base = model(6, 4);
    let of = |change: &dyn Fn(&mut Request)| {
        let mut request = base.clone();
        change(&mut request);
        plan(&request)
    };
    assert_eq!(of(&|r| r.requests.slots = Some(4)).unwrap().slots, 4);
    assert_eq!(of(&|r| r.requests.group = Some(2)).unwrap().group, 2);
    assert_eq!(of(&|r| (r.update, r.requests.slabs) = (UpdateMode::Immediate, Some(3))).unwrap().slabs, 3);
    let offloaded = of(&|r| (r.requests.activation, r.requests.stage_buffers) = (Some(Activation::Offload), Some(4)));
    assert_eq!(offloaded.unwrap().stage_buffers, 4);
    for (words, error) in [
        ("plan.slots must be at least 2", of(&|r| r.requests.slots = Some(1))),
        ("plan.slabs = 3 needs train.update: immediate", of(&|r| r.requests.slabs = Some(3))),
        ("plan.group must lie between 1 and micro_batches = 4, not 5", of(&|r| r.requests.group = Some(5))),
        ("plan.keep = 7 exceeds the 6 layers", of(&|r| r.requests.keep = Some(7))),
        ("contradicts keeping", of(&|r| (r.requests.keep, r.requests.activation) = (Some(1), Some(Activation::Keep)))),
        ("plan.state_on_device = 9", of(&|r| r.requests.state_on_device = Some(Count::Units(9)))),
        (
            "plan.updates_on_device = 7 exceeds the 6 layers",
            of(&|r| r.requests.updates_on_device = Some(Count::Units(7))),
        ),
        (
            "plan.updates_on_device = 1 contradicts accumulating",
            of(&|r| (r.requests.updates_on_device, r.requests.accumulate) = (Some(Count::Units(1)), true)),
        ),
        ("plan.stage_buffers must be at least 2", of(&|r| r.requests.stage_buffers = Some(1))),
        ("cannot be accumulated", of(&|r| (r.update, r.requests.accumulate) = (UpdateMode::Immediate, true))),
        ("micro_batches must be at least 1", of(&|r| r.micro_batches = 0)),
        ("rates.h2d_gbs is 0", of(&|r| r.rates.h2d_gbs = 0.0)),
        ("two units are called embed", of(&|r| r.units[1].name = "embed".to_owned())),
        ("precision fp32 sends fp32 gradients", of(&|r| r.precision = Precision::Fp32)),
    ] {
        let error = text(error.unwrap_err());
        assert!(error.contains(words), "{error}");
    }
    let error = text(Request::from_json(r#"{"units": [], "tide": true}"#).unwrap_err());
    assert!(error.contains("tide"), "{error}");
}

#[test]
fn a_request_and_its_plan_survive_json() {
    let request = model(4, 2);
    let text = serde_json::to_string(&request).unwrap();
    assert_eq!(Request::from_json(&text).unwrap(), request);
    let plan = plan(&request).unwrap();
    assert_eq!(serde_json::from_str::<Plan>(&serde_json::to_string(&plan).unwrap()).unwrap(), plan);
    let minimal = r#"{"units": [
        {"name": "embed", "role": "embed", "tensors": [{"name": "e", "shape": [8, 4], "dtype": "f32", "role": "trainable"}]},
        {"name": "layers.0", "role": "layer", "tensors": [{"name": "w", "shape": [4], "dtype": "bf16", "role": "trainable"}]},
        {"name": "head", "role": "head", "tensors": [{"name": "n", "shape": [4], "dtype": "bf16", "role": "frozen"}]}],
        "tied": true, "precision": "bf16", "grad_precision": "bf16", "micro_batches": 1,
        "budget": {"device": 10000000, "host": 10000000}, "device": "cuda",
        "requests": {"state_on_device": "auto", "activation": null}}"#;
    megatrain_core::plan::plan(&Request::from_json(minimal).unwrap()).unwrap();
}

/// A model of equal layers where one layer's load, computation (forward and backward) and update take `load`, `compute`
/// and `update` seconds.
fn timed(layers: usize, load: f64, compute: f64, update: f64, mode: UpdateMode) -> Request {
    let mut request = Request { update: mode, ..model(layers, 1) };
    for unit in [0, layers + 1] {
        request.units[unit].tensors[0].shape = vec![128];
        (request.units[unit].flops, request.units[unit].input_bytes) = (0.0, 1);
    }
    request.units[1].input_bytes = 1;
    let r = &mut request.requests;
    (r.keep, r.slots, r.state_on_device) = (Some(0), Some(3), Some(Count::Units(0)));
    let parameters = f64::from(1 << 20);
    request.rates = Rates {
        h2d_gbs: 2.0 * parameters / load / 1e9,
        d2h_gbs: 2.0 * parameters / load / 1e9,
        // Forward, then backward with recomputation: four times the forward's operations.
        matmul_tflops: 4.0 * 2e9 / compute / 1e12,
        adamw_gparams: parameters / update / 1e9,
        link_cost: 0.0,
        both_ways: 2.0,
        hbm_gbs: 1e9,
        ..Rates::default()
    };
    request
}

#[test]
fn copies_and_updates_hide_beneath_computing_when_each_takes_as_long() {
    // H38: a layer's load, computation and update take about the same time.
    let request = timed(32, 0.010, 0.020, 0.020, UpdateMode::JustInTime);
    let plan = plan(&request).unwrap();
    let found = estimate(&request, &plan, &request.rates).unwrap();
    let phases: f64 = found.lanes.values().sum();
    assert!(found.step_s <= 0.7 * phases, "{} of {phases}", found.step_s);
    // What is left of the updates runs beneath the next forward: backward, then the longer of forward and optimizer.
    let (computing, updating) = (found.lanes["compute"], found.lanes["host"]);
    let predicted = 0.75 * computing + (0.25 * computing).max(updating);
    assert!((found.step_s / predicted - 1.0).abs() < 0.05, "{} against {predicted}", found.step_s);
    // Within a forward, computations follow each other without a gap as soon as updates are ahead.
    let waits = gaps(&found.spans, Kind::Backward);
    assert!(waits < 0.05 * found.step_s, "{waits} of {}", found.step_s);
}

/// Seconds without computing between the first and the last span of a kind in the measured step.
fn gaps(spans: &[megatrain_core::estimate::Span], kind: Kind) -> f64 {
    let mut turns: Vec<(f64, f64)> =
        spans.iter().filter(|s| s.kind == kind && s.step == 1).map(|s| (s.start_s, s.end_s)).collect();
    turns.sort_by(|a, b| a.0.total_cmp(&b.0));
    turns.windows(2).map(|w| (w[1].0 - w[0].1).max(0.0)).sum()
}

#[test]
fn a_step_that_waits_for_the_host_is_shorter_where_some_layers_are_updated_on_the_device() {
    // A layer's update takes the host 20 ms; its state comes in 14 ms and returns in 12.
    for (mode, compute, layers_updated) in [
        (UpdateMode::JustInTime, 0.008, [6, 13, 24]),
        (UpdateMode::JustInTime, 0.040, [6, 13, 16]),
        (UpdateMode::Immediate, 0.004, [6, 13, 24]),
    ] {
        let mut request = timed(32, 0.002, compute, 0.020, mode);
        request.requests.updates_on_device = Some(Count::Units(0));
        let of = |request: &Request| estimate(request, &plan(request).unwrap(), &request.rates).unwrap();
        let before = of(&request);
        for device_updates in layers_updated {
            request.requests.updates_on_device = Some(Count::Units(device_updates));
            let found = of(&request);
            let (forward, backward) = (8.0 * compute, 24.0 * compute);
            let (host, on_device) =
                (f64::from(32 - device_updates) * 0.020, f64::from(device_updates) * 0.014 + 32.0 * 0.002);
            let longest = match mode {
                UpdateMode::JustInTime => backward + forward.max(host).max(on_device),
                UpdateMode::Immediate => (forward + backward).max(host).max(on_device + 32.0 * 0.002),
            };
            assert!(found.step_s < longest * 1.1, "{mode:?} {device_updates}: {} against {longest}", found.step_s);
            assert!(found.step_s < before.step_s * 0.98, "{mode:?} {device_updates}: {}", found.step_s);
        }
    }
}

#[test]
fn layers_are_updated_on_the_device_where_that_makes_a_step_shorter() {
    let device_updates = |plan: &Plan| plan.units.iter().filter(|unit| unit.needs_device_update()).count();
    let tight = |compute: f64, mode: UpdateMode| {
        let mut request = timed(24, 0.001, compute, 0.020, mode);
        request.device = DeviceKind::Cuda;
        (request.requests.slots, request.requests.keep) = (None, None);
        request
    };
    for mode in [UpdateMode::JustInTime, UpdateMode::Immediate] {
        let mut request = tight(0.004, mode);
        let chosen = plan(&request).unwrap();
        assert!(device_updates(&chosen) >= 6, "{mode:?}: {}", device_updates(&chosen));
        let buffers = chosen.items.iter().find(|item| item.what == "device update buffers").unwrap();
        let count = if mode == UpdateMode::Immediate { 4 } else { 3 };
        assert_eq!((buffers.bytes, chosen.state_buffers), ((u64::from(count) * 14) << 20, count));
        let pinned: u64 = chosen.items.iter().filter(|i| i.what == "exp_avg" && i.pinned).map(|i| i.bytes).sum();
        assert_eq!(pinned, (device_updates(&chosen) as u64) << 22);
        for (count, slack) in [(0, 0.9), (3, 0.95), (12, 1.01), (24, 1.01)] {
            request.requests.updates_on_device = Some(Count::Units(count));
            let other = plan(&request).unwrap();
            assert_eq!(device_updates(&other), count as usize);
            let (best, other) = (chosen.estimate.expected_step_s, other.estimate.expected_step_s);
            assert!(best <= other * slack, "{mode:?}, {count}: {best} against {other}");
        }
        // A budget that its buffers and a slot do not fit in leaves the host alone with its updates.
        request.requests.updates_on_device = None;
        request.requests.keep = Some(0);
        request.budget.device = plan(&Request { device: DeviceKind::Cpu, ..request.clone() }).unwrap().totals.device;
        request.requests.slots = Some(24);
        assert_eq!(device_updates(&plan(&request).unwrap()), 0);
    }
    // Where computing takes longer, where there is no card, where gradients are accumulated: none.
    let none = tight(0.200, UpdateMode::JustInTime);
    assert_eq!(device_updates(&plan(&none).unwrap()), 0);
    let mut elsewhere = tight(0.004, UpdateMode::JustInTime);
    elsewhere.device = DeviceKind::Cpu;
    assert_eq!(device_updates(&plan(&elsewhere).unwrap()), 0);
    elsewhere.device = DeviceKind::Cuda;
    elsewhere.requests.accumulate = true;
    assert_eq!(device_updates(&plan(&elsewhere).unwrap()), 0);
}

#[test]
fn immediate_updates_make_a_step_its_longest_lane() {
    for (load, compute, update) in [(0.004, 0.020, 0.010), (0.004, 0.010, 0.020), (0.020, 0.010, 0.010)] {
        let request = timed(64, load, compute, update, UpdateMode::Immediate);
        let plan = plan(&request).unwrap();
        let found = estimate(&request, &plan, &request.rates).unwrap();
        let longest = found.lanes.values().copied().fold(0.0, f64::max);
        let ratio = found.step_s / longest;
        assert!((0.99..1.06).contains(&ratio), "{load} {compute} {update}: {ratio}, {:?}", found.lanes);
    }
}

#[test]
fn a_step_is_never_shorter_than_its_longest_lane() {
    for mode in [UpdateMode::JustInTime, UpdateMode::Immediate] {
        for layers in [1, 2, 9] {
            let request = timed(layers, 0.01, 0.01, 0.01, mode);
            let plan = plan(&request).unwrap();
            let found = estimate(&request, &plan, &request.rates).unwrap();
            assert!(found.lanes.values().all(|&busy| found.step_s >= busy * 0.999), "{found:?}");
            assert_eq!(plan.estimate.step_s, found.step_s);
            assert!(found.spans.iter().any(|s| s.lane == Lane::Host && s.kind == Kind::Update));
        }
    }
}

#[test]
fn planning_a_model_of_a_hundred_billion_parameters_is_a_matter_of_arithmetic() {
    let mut request = Request { device: DeviceKind::Cuda, ..model(96, 64) };
    for unit in &mut request.units {
        let tensor = unit.tensors[0].clone();
        unit.tensors = (0..12)
            .map(|i| {
                let name = format!("{}.{i}", tensor.name);
                megatrain_core::layout::TensorSpec { name, shape: vec![12_288, 8_192], ..tensor.clone() }
            })
            .collect();
    }
    request.budget.device = 80 << 30;
    request.budget.host = 2 << 40;
    let plan = plan(&request).unwrap();
    assert!(plan.totals.host > 1_500_000_000_000 && plan.estimate.step_s > 0.0);
    for unit in 0..request.units.len() {
        let layout = &request.layouts().unwrap()[unit];
        assert_eq!(layout.norm_blocks().len(), 12 * 1536);
    }
}

/// A model of random sizes on a machine of random rates.
fn any_model() -> impl Strategy<Value = Request> {
    let sizes = (1usize..14, 1u32..6, 1u64..41, 1u64..5, any::<bool>(), any::<bool>());
    // Decades within which a rate lies, of the link each way, the arithmetic and the host's optimizer.
    let rates = (0.0..2.0f64, 0.0..2.0f64, 0.0..2.0f64, -1.0..1.0f64);
    (sizes, rates).prop_map(|((layers, micro_batches, kept, input, immediate, cuda), (up, down, matmul, adamw))| {
        let mut request = model(layers, micro_batches);
        for (index, unit) in request.units.iter_mut().enumerate() {
            (unit.kept_bytes, unit.input_bytes) = ((kept + input) << 20, input << 20);
            unit.flops = 2e9 * (1.0 + index as f64 / 40.0);
        }
        request.workspace_bytes = 8 << 20;
        request.late_workspace_bytes = 24 << 20;
        request.update = if immediate { UpdateMode::Immediate } else { UpdateMode::JustInTime };
        request.device = if cuda { DeviceKind::Cuda } else { DeviceKind::Cpu };
        request.rates = Rates {
            h2d_gbs: 10f64.powf(up),
            d2h_gbs: 10f64.powf(down),
            matmul_tflops: 10f64.powf(matmul),
            adamw_gparams: 10f64.powf(adamw),
            ..Rates::default()
        };
        request
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn more_memory_is_never_a_slower_plan_and_every_plan_fits_and_passes_its_check(request in any_model()) {
        let roomy = plan(&request).unwrap();
        // Room for everything, then ever less of the device's memory, of the host's, of both.
        for (device, host) in [(true, false), (false, true), (true, true)] {
            let mut slowest = 0.0;
            for percent in [100u64, 90, 81, 73, 66, 59, 53, 48, 43, 35, 28, 23, 18, 15, 12, 10, 8] {
                let mut request = request.clone();
                if device {
                    request.budget.device = roomy.totals.device * percent / 100;
                }
                if host {
                    // Nothing on the device: what the host would hold then is all that it could use.
                    let parameters = (request.units.len() as u64) << 20;
                    request.budget.host = 56 * parameters * percent / 100;
                }
                let found = match plan(&request) {
                    Ok(found) => found,
                    Err(Error::DoesNotFit { tier, needed, available, items }) => {
                        prop_assert!(needed > available);
                        prop_assert_eq!(items.iter().filter(|i| i.tier == tier).map(|i| i.bytes).sum::<u64>(), needed);
                        slowest = f64::INFINITY;
                        continue;
                    }
                    Err(other) => return Err(TestCaseError::fail(other.to_string())),
                };
                prop_assert!(slowest < f64::INFINITY, "refused with more memory, accepted with {}%", percent);
                let seconds = found.estimate.expected_step_s;
                prop_assert!(seconds * 1.0005 >= slowest, "{} s with {}% and {} s with more", seconds, percent, slowest);
                slowest = seconds;
                prop_assert!(found.totals.device <= request.budget.device && found.totals.host <= request.budget.host);
                prop_assert_eq!(Plan::sum(&found.items), found.totals);
                found.matches(&request).unwrap();
                let facts = ScheduleInputs::new(&request, &found).unwrap();
                let shape = Shape::new(Pass::Train, found.micro_batches);
                let (first, steady) = Schedule::steady(&facts, shape).unwrap();
                check(&facts, &steady, Some(&first)).unwrap();
            }
        }
    }
}

#[test]
fn a_hundred_layers_are_planned_the_same_way() {
    for (micro_batches, mode, adamw) in [(4, UpdateMode::JustInTime, 0.3), (64, UpdateMode::Immediate, 3.0)] {
        let mut request = Request { device: DeviceKind::Cuda, update: mode, ..model(100, micro_batches) };
        request.rates.adamw_gparams = adamw;
        let roomy = plan(&request).unwrap().totals.device;
        let mut slowest = 0.0;
        for percent in [100, 80, 60, 45, 30, 20, 12, 8] {
            request.budget.device = roomy * percent / 100;
            let Ok(found) = plan(&request) else { break };
            assert!(found.totals.device <= request.budget.device);
            let seconds = found.estimate.expected_step_s;
            assert!(seconds * 1.0005 >= slowest, "{micro_batches}: {seconds} s with {percent}%, {slowest} s with more");
            slowest = seconds;
        }
    }
}

/// GPT-OSS-120B: 36 layers of 3.2 G parameters, of which a token computes with 0.1 G.
fn gpt_oss_120b() -> Request {
    let mut request = Request { device: DeviceKind::Cuda, ..model(36, 4) };
    let (hidden, experts, vocabulary) = (2880, 128, 201_088);
    for unit in &mut request.units {
        let shape = match unit.role {
            UnitRole::Layer => vec![experts, 3 * hidden + 64, hidden],
            _ => vec![vocabulary, hidden],
        };
        unit.tensors[0].shape = shape;
        (unit.kept_bytes, unit.input_bytes, unit.flops) = (12 << 30, 4096 * 5760, 2.0 * 4096.0 * 0.1e9);
    }
    (request.workspace_bytes, request.late_workspace_bytes) = (8 << 30, 12 << 30);
    request.update = UpdateMode::Immediate;
    (request.budget.device, request.budget.host) = (79 << 30, 1 << 42);
    request
}

#[test]
fn nothing_is_refused_while_some_number_of_buffers_fits() {
    let mut request = gpt_oss_120b();
    request.requests.state_on_device = Some(Count::Units(0));
    let roomy = plan(&request).unwrap();
    assert!(roomy.slabs >= 6);
    let slab = 2 * 128 * (3 * 2880 + 64) * 2880;
    // Room for three landing places, for the last one, and for none.
    for (left, slabs) in [(3, Some(3)), (1, Some(1)), (0, None)] {
        request.budget.host = roomy.totals.host - (u64::from(roomy.slabs) - left) * slab;
        match slabs {
            Some(slabs) => assert_eq!(plan(&request).unwrap().slabs, slabs),
            None => {
                let refused = text(plan(&request).unwrap_err());
                assert!(refused.contains("gradient slabs") && refused.contains("too little"), "{refused}");
            }
        }
    }
    // The state of embed and head has room on the device.
    request.requests.state_on_device = None;
    plan(&request).unwrap();
    // The device's least: two slots, one gradient buffer, inputs on the host.
    (request.budget.host, request.budget.device) = (1 << 42, 1);
    let Error::DoesNotFit { tier: Tier::Device, needed, .. } = plan(&request).unwrap_err() else { panic!() };
    request.budget.device = needed;
    let least = plan(&request).unwrap();
    assert_eq!((least.slots, least.grad_buffers, least.totals.device), (2, 1, needed));
    request.budget.device = needed - 1;
    plan(&request).unwrap_err();
}

#[test]
fn a_refusal_names_the_one_budget_that_is_too_small() {
    let mut request = model(12, 4);
    let roomy = plan(&request).unwrap().totals.device;
    let mut refused = 0;
    for percent in (5..=100).step_by(5) {
        (request.budget.device, request.budget.host) = (roomy * percent / 100, 1 << 40);
        if plan(&request).is_err() {
            continue;
        }
        // With a larger host it fits, so it is the host that is too small.
        request.budget.host = 64 << 20;
        if let Err(error) = plan(&request) {
            let Error::DoesNotFit { tier: Tier::Host, needed, .. } = error else { panic!("{percent}: {error}") };
            request.budget.host = needed;
            plan(&request).unwrap();
            refused += 1;
        }
    }
    assert!(refused > 5, "{refused}");
}

#[test]
fn memory_that_device_and_host_share_is_given_out_once() {
    let mut request = Request { shared_memory: true, ..model(6, 2) };
    let roomy = plan(&request).unwrap();
    let whole = roomy.totals.device + roomy.totals.host;
    for percent in [100, 90, 80, 60, 40, 20] {
        request.budget.host = whole * percent / 100;
        match plan(&request) {
            Ok(found) => assert!(found.totals.device + found.totals.host <= request.budget.host),
            Err(Error::SharedMemory { needed, available, items }) => {
                assert_eq!((needed, available), (items.iter().map(|i| i.bytes).sum(), request.budget.host));
                assert!(needed > available && percent < 60);
            }
            Err(other) => panic!("{other}"),
        }
    }
}

#[test]
fn the_smallest_of_groups_is_taken_where_it_lets_activations_stay() {
    // Eight micro-batches whose activations fit one at a time: in one group they would all be recomputed.
    let mut request = model(8, 8);
    request.device = DeviceKind::Cuda;
    for unit in &mut request.units[1..=8] {
        (unit.kept_bytes, unit.input_bytes, unit.flops) = (64 << 20, 1 << 20, 4e12);
    }
    request.budget = Budget { device: 2 << 30, host: 8 << 30, disk: 0 };
    let chosen = plan(&request).unwrap();
    let expected = |group: u32| {
        let mut asked = request.clone();
        asked.requests.group = Some(group);
        plan(&asked).unwrap().estimate.expected_step_s
    };
    assert!(chosen.group < 8, "{}", chosen.group);
    let fastest = [1, 2, 4, 8].map(expected).into_iter().fold(f64::INFINITY, f64::min);
    assert!(chosen.estimate.expected_step_s <= fastest * 1.001);
    request.one_group = true;
    assert_eq!(plan(&request).unwrap().group, 8, "a term over the whole step keeps all micro-batches together");
}

#[test]
fn computing_takes_the_time_of_attention_of_elementwise_kernels_and_of_launches_too() {
    let mut request = model(4, 1);
    let plain = plan(&request).unwrap().estimate;
    for unit in &mut request.units[1..=4] {
        unit.moved_bytes = 50e9;
    }
    let moving = plan(&request).unwrap().estimate;
    assert!(moving.expected_step_s > plain.expected_step_s + 0.1, "{moving:?}");
    assert!((moving.step_s - plain.step_s).abs() < 1e-9, "a bound counts the floating-point operations alone");
    for unit in &mut request.units[1..=4] {
        (unit.moved_bytes, unit.launch_s) = (1.0, 0.5);
    }
    assert!(plan(&request).unwrap().estimate.expected_step_s > 4.0 * 0.5 * 2.4 * 0.99);
    request.units[1].spared_flops = f64::NAN;
    assert!(plan(&request).is_err());
}
