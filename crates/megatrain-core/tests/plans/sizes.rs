//! Models of any size.

use super::*;

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
    // Decades within which a rate is drawn, of the link each way, the arithmetic and the host's optimizer.
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

/// That a plan is within its budgets, that its items add up, and that the schedules made of it pass their check.
fn assert_sound(request: &Request, found: &Plan) {
    let (totals, budget) = (found.totals, request.budget);
    assert!(totals.device <= budget.device && totals.host <= budget.host && totals.disk <= budget.disk);
    let shared = if request.shared_memory { totals.device } else { 0 };
    assert!(totals.host + shared <= budget.host, "{totals:?} of {budget:?}");
    assert_eq!(Plan::sum(&found.items), totals);
    found.matches(request).unwrap();
    let facts = ScheduleInputs::new(request, found).unwrap();
    let shape = Shape::new(Pass::Train, found.micro_batches);
    let (first, steady) = Schedule::steady(&facts, shape).unwrap();
    check(&facts, &steady, Some(&first)).unwrap();
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
                assert_sound(&request, &found);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn with_a_disk_more_host_memory_never_moves_more_to_and_from_it_and_every_plan_passes_its_check(request in any_model()) {
        let mut request = request;
        (request.budget.disk, request.requests.parts) = (1 << 40, Some(4));
        let parameters = (request.units.len() as u64) << 20;
        let (mut least, mut most) = (0, 0);
        for percent in (1u64..=60).rev().step_by(2) {
            let mut request = request.clone();
            request.budget.host = 16 * parameters * percent / 50;
            let Ok(found) = plan(&request) else {
                least = u64::MAX;
                continue;
            };
            prop_assert!(least < u64::MAX, "refused with more memory, accepted with {}%", percent);
            // Everything once each way, and weights for forward and backward of each group.
            let weights = found.items.iter().filter(|item| item.tier == Tier::Disk && item.what == "weights");
            let groups = u64::from(found.micro_batches.div_ceil(found.group));
            let moved = 2 * found.totals.disk + 2 * groups * weights.map(|item| item.bytes).sum::<u64>();
            prop_assert!(moved >= least, "{} bytes with {}% and {} with more", moved, percent, least);
            least = moved;
            let count = |is: fn(&&megatrain_core::plan::UnitPlan) -> bool| found.units.iter().filter(is).count();
            let on_disk = (count(|unit| unit.state == State::Disk), count(|unit| unit.weights_on_disk));
            prop_assert!(on_disk.0 >= on_disk.1);
            most = most.max(on_disk.0);
            assert_sound(&request, &found);
        }
        prop_assert!(most > 0 || request.device == DeviceKind::Cuda, "nothing went to disk");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn in_shared_memory_the_sum_of_both_tiers_fits(request in any_model(), keep in 0u32..3) {
        let mut request = Request { device: DeviceKind::Cpu, shared_memory: true, ..request };
        request.update = UpdateMode::Immediate;
        request.requests = Requests { keep: Some(keep.min(request.num_layers() as u32)), ..request.requests };
        request.requests.inputs = Some(Place::Host);
        let all = plan(&request).unwrap().totals;
        for percent in (30u64..=100).step_by(2) {
            let mut request = request.clone();
            request.budget.host = (all.device + all.host) * percent / 100;
            if let Ok(found) = plan(&request) {
                assert_sound(&request, &found);
            }
        }
    }
}

/// Bytes that a step reads from disk and writes there, twice over, as plans are compared by them: those of inputs count a
/// quarter more.
fn moved(request: &Request, plan: &Plan) -> u64 {
    let of = |what: &str| -> u64 {
        plan.items.iter().filter(|item| item.tier == Tier::Disk && item.what == what).map(|item| item.bytes).sum()
    };
    let groups = u64::from(plan.micro_batches.div_ceil(plan.group));
    let units = request.units.iter().zip(&plan.units).filter(|(_, choice)| choice.input == Place::Disk);
    let inputs: u64 = units.map(|(unit, _)| unit.input_bytes * u64::from(plan.micro_batches)).sum();
    4 * (of("optimizer state") + of("weights") * (1 + groups)) + 5 * inputs
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn with_a_disk_inputs_go_there_only_as_far_as_they_must_and_every_plan_passes_its_check(
        request in any_model(), device in 0.0..1.0f64, asked in 0u32..4,
    ) {
        let mut request = request;
        (request.budget.disk, request.requests.parts) = (1 << 40, Some(4));
        // Inputs several times as large as the weights, which leave the device.
        request.units.iter_mut().for_each(|unit| (unit.input_bytes, unit.kept_bytes) = (unit.input_bytes * 8, 1 << 30));
        let mut on_host = request.clone();
        on_host.requests = Requests { inputs: Some(Place::Host), keep: Some(0), slots: Some(2), ..request.requests.clone() };
        on_host.requests.state_on_device = Some(Count::Units(0));
        on_host.requests.updates_on_device = Some(Count::Units(0));
        on_host.requests.group = Some(request.micro_batches);
        let least = plan(&on_host).unwrap().totals;
        request.budget.device = least.device + (device * 16.0 * f64::from(1 << 20)) as u64;
        let (mut fewest, mut most) = (0, 0);
        for percent in (4u64..=100).rev().step_by(6) {
            let mut request = request.clone();
            request.budget.host = least.host * percent / 100;
            let found = plan(&request);
            prop_assert_eq!(fits(&request).unwrap(), found.is_ok(), "{}%", percent);
            let Ok(found) = found else {
                fewest = u64::MAX;
                continue;
            };
            prop_assert!(fewest < u64::MAX, "refused with more memory, accepted with {}%", percent);
            let traffic = moved(&request, &found);
            prop_assert!(traffic >= fewest, "{} bytes with {}% and {} with more", traffic, percent, fewest);
            fewest = traffic;
            most = most.max(found.units.iter().filter(|unit| unit.input == Place::Disk).count());
            assert_sound(&request, &found);
            // No number of inputs that is asked for moves fewer bytes.
            request.requests.inputs_on_disk = Some(asked.min(request.num_layers() as u32));
            if let Ok(other) = plan(&request) {
                prop_assert!(traffic <= moved(&request, &other), "{}%: {:?} inputs", percent, request.requests.inputs_on_disk);
            }
        }
// (Smaller groups have less room to give, a card has room for state, and of few layers the buffers hold as much.)
        let given = request.micro_batches > 1 || request.device == DeviceKind::Cuda || request.num_layers() < 6;
        prop_assert!(most > 0 || given, "nothing went to disk");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn what_fits_is_known_without_a_plan(
        request in any_model(),
        disk in any::<bool>(),
        asked in (any::<bool>(), any::<bool>(), any::<bool>()),
        budgets in prop::collection::vec((0.0..1.0f64, 0.0..1.0f64, 0.0..1.0f64), 40),
    ) {
        let roomy = plan(&request).unwrap().totals.device as f64;
        let all = 14.0 * (request.units.len() << 20) as f64;
        prop_assert!(fits(&request).unwrap());
        for (device, host, drive) in budgets {
            let mut request = request.clone();
            request.budget = Budget {
                device: (device * roomy) as u64,
                host: (host * 2.0 * all) as u64,
                disk: if disk { (drive * all) as u64 } else { 0 },
            };
            request.shared_memory = asked.0 && request.device == DeviceKind::Cpu;
            request.requests.inputs = asked.1.then_some(Place::Host);
            request.requests.updates_on_device =
                (asked.2 && request.device == DeviceKind::Cuda).then_some(Count::Units(1));
            prop_assert_eq!(fits(&request).unwrap(), plan(&request).is_ok(), "{:?}", request.budget);
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
