//! How long a step is predicted to take, and the plans that follow from it.

use super::*;

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
fn state_goes_to_the_device_until_the_hosts_updates_overlap_with_the_next_forward() {
    let none = spent(&plan(&contended(24, 0.001, UpdateMode::JustInTime)).unwrap());
    let some = spent(&plan(&contended(24, 0.016, UpdateMode::JustInTime)).unwrap());
    let most = spent(&plan(&contended(24, 0.100, UpdateMode::JustInTime)).unwrap());
    // With updates that hide anyway, all that is left goes to activations: each spares a recomputation.
    assert!(none.1 >= 5, "{none:?}");
    // With updates half as long again as a forward, a part of the layers has its state on the device, no more.
    assert!(some.0 > none.0 && some.0 < most.0 && some.1 > most.1 && some.1 < none.1, "{none:?} {some:?} {most:?}");
    assert!(most.0 >= 12, "{most:?}");
    // Immediate updates overlap with backward too, so the same optimizer needs less help.
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
        both_ways: 2.0,
        hbm_gbs: 1e9,
        ..Rates::default()
    };
    request
}

#[test]
fn copies_and_updates_overlap_with_computing_when_they_take_as_long() {
    // H38: a layer's load, computation and update take about the same time.
    let request = timed(32, 0.010, 0.020, 0.020, UpdateMode::JustInTime);
    let plan = plan(&request).unwrap();
    let found = estimate(&request, &plan, &request.rates).unwrap();
    let phases: f64 = found.lanes.values().sum();
    assert!(found.step_s <= 0.7 * phases, "{} of {phases}", found.step_s);
    // What is left of the updates runs during the next forward: backward, then the longer of forward and optimizer.
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
        // A budget that its buffers do not fit in, where no layer's input may make room for them, leaves the host alone
        // with its updates.
        request.requests.updates_on_device = None;
        request.requests.keep = Some(0);
        request.requests.inputs = Some(Place::Device);
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
    for unit in &mut request.units[1..=4] {
        (unit.launch_s, unit.ramp_s) = (0.0, 0.1);
    }
    let keep = Requests { activation: Some(Activation::Keep), ..Requests::default() };
    let kept = plan(&Request { requests: keep, ..request.clone() }).unwrap().estimate;
    let (ramps, between) = (4.0 * 0.1 * 3.0, 2.0e-3);
    let without = (plain.expected_step_s, plain.step_s);
    assert!((kept.expected_step_s - without.0 - ramps - between).abs() < 0.01 * ramps, "{kept:?} {without:?}");
    assert!((kept.step_s - without.1).abs() < 1e-9, "a bound counts the floating-point operations alone");
    request.units[1].spared_flops = f64::NAN;
    assert!(plan(&request).is_err());
}

#[test]
fn attention_over_long_rows_comes_nearer_to_the_rate_of_matmuls() {
    let step_s = |row: u32| {
        let mut request = model(4, 1);
        for unit in &mut request.units[1..=4] {
            (unit.flops, unit.attention_flops, unit.attention_row, unit.moved_bytes) = (1e15, 1e15, row, 1.0);
        }
        plan(&request).unwrap().estimate.expected_step_s
    };
    // Forward, and backward with 2.5 times as much arithmetic: 0.50 and 0.32 of the rate, then 0.85 and 0.65.
    let (short, long) = (1.0 / 0.50 + 2.5 / 0.32, 1.0 / 0.85 + 2.5 / 0.65);
    let ratio = step_s(1024) / step_s(131_072);
    assert!((ratio / (short / long) - 1.0).abs() < 0.02, "{ratio}");
    assert!((step_s(0) - step_s(1024)).abs() < 1e-9, "rows whose length is not known");
}

#[test]
fn a_plan_is_timed_at_other_rates_than_it_was_made_with() {
    let mut request = contended(8, 0.016, UpdateMode::JustInTime);
    let made = plan(&request).unwrap();
    assert_eq!(forecast(&request, &made).unwrap(), made.estimate);
    let lanes = &made.estimate.expected_lanes;
    request.rates.adamw_gparams /= 2.0;
    let slower = forecast(&request, &made).unwrap();
    // A rate changes its own lane, in proportion, and no other one.
    for (name, seconds) in lanes {
        let times = if name == "host" { 2.0 } else { 1.0 };
        let (found, wanted) = (slower.expected_lanes[name], times * seconds);
        assert!((found - wanted).abs() <= 1e-9 * wanted, "{name}: {found} is not {wanted}");
    }
    assert!(lanes["host"] > 0.0 && slower.expected_step_s > made.estimate.expected_step_s);
}
