//! What memory is spent on.

use super::*;

#[test]
fn twelve_bytes_a_parameter_on_the_host_and_two_more_while_gradients_wait() {
    let mut request = model(30, 1);
    request.requests.state_on_device = Some(Count::Units(0));
    let parameters = 32 << 20;
    let waiting = plan(&request).unwrap().totals.host;
    request.update = UpdateMode::Immediate;
    // With a slower optimizer, more gradients would wait to be consumed during the next forward.
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
    let fragmentation = |request: &Request| {
        let items = plan(request).unwrap().items;
        items.iter().find(|i| i.what == "fragmentation (torch)").map_or(0, |i| i.bytes)
    };
    let share = fragmentation(&request);
    request.largest_bytes = share - 1;
    assert_eq!(fragmentation(&request), share);
    request.largest_bytes = share + 1;
    assert_eq!(fragmentation(&request), share + 1, "the gap of the largest tensor, where that is more");
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
fn layers_are_captured_where_their_activations_fit_a_second_time() {
    let mut request = Request { device: DeviceKind::Cuda, ..model(6, 2) };
    (request.context_bytes, request.workspace_bytes, request.fragmentation) = (100 << 20, 64 << 20, 0.05);
    let without = plan(&request).unwrap();
    assert!(!without.graphs);
    request.requests.graphs = true;
    let with = plan(&request).unwrap();
    let torch = |plan: &Plan| -> u64 {
        plan.items.iter().filter(|i| i.tier == Tier::Device && i.what.ends_with("(torch)")).map(|i| i.bytes).sum()
    };
    assert!(with.graphs);
    assert_eq!(torch(&with), 2 * torch(&without) - (100 << 20), "a context is there once");
    assert_eq!(with.units, without.units);
    with.matches(&request).unwrap();
    // They never take what makes a step shorter otherwise.
    request.budget.device = with.totals.device - 1;
    let less = plan(&request).unwrap();
    assert_eq!((less.graphs, less.units), (false, without.units));
    // Nothing of a layer whose weights pass through slots, or whose activations go to the host, stays where it is.
    request.budget.device = 1 << 40;
    request.requests.state_on_device = Some(Count::Units(2));
    assert!(!plan(&request).unwrap().graphs);
    request.requests.state_on_device = None;
    request.requests.activation = Some(Activation::Offload);
    assert!(!plan(&request).unwrap().graphs);
    (request.requests.activation, request.device) = (None, DeviceKind::Cpu);
    assert!(!plan(&request).unwrap().graphs);
}

#[test]
fn captured_layers_take_less_time_to_launch() {
    let mut request = Request { device: DeviceKind::Cuda, ..model(6, 1) };
    request.rates.beside_matmuls = true;
    request.units[1..7].iter_mut().for_each(|unit| unit.launch_s = 1e-3);
    let without = plan(&request).unwrap().estimate.step_s;
    request.requests.graphs = true;
    let with = plan(&request).unwrap().estimate.step_s;
    assert!(without > 6.0 * 2.4e-3 && with < without / 5.0, "{without} s without and {with} s with");
    // Layers that are computed in tiles are not captured.
    request.units[1..5].iter_mut().for_each(|unit| unit.captures = false);
    let few = plan(&request).unwrap();
    assert!(few.graphs && few.estimate.step_s > without / 2.0, "{} s with two of six", few.estimate.step_s);
    request.units[5..7].iter_mut().for_each(|unit| unit.captures = false);
    let none = plan(&request).unwrap();
    assert!(!none.graphs && (none.estimate.step_s - without).abs() < 1e-9);
}

#[test]
fn of_groups_that_take_as_long_the_one_that_leaves_more_on_the_device_is_taken() {
    // All four at once, or one by one: computing bounds both, and one by one all state fits beside what is kept.
    let mut request = Request { device: DeviceKind::Cuda, ..model(8, 4) };
    request.units.iter_mut().for_each(|unit| unit.flops = 1e12);
    request.requests.keep = Some(8);
    request.requests.group = Some(1);
    let one = plan(&request).unwrap();
    assert!(one.units.iter().all(|unit| unit.state == State::Device));
    request.requests.group = None;
    request.budget.device = one.totals.device;
    let found = plan(&request).unwrap();
    assert_eq!((found.group, &found.units), (1, &one.units));
    // With room for all four at once too, the fewest activations wait; what has to be loaded is loaded seldom.
    request.budget.device = 1 << 40;
    let roomy = plan(&request).unwrap();
    assert_eq!((roomy.group, roomy.units), (1, one.units));
    request.requests.state_on_device = Some(Count::Units(0));
    assert_eq!(plan(&request).unwrap().group, 4);
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
fn a_group_of_one_micro_batch_is_chosen_where_activations_then_stay_on_the_device() {
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
    // On the CPU too, where both are one memory.
    let mut shared = Request { device: DeviceKind::Cpu, shared_memory: true, ..request.clone() };
    shared.budget.host = 4 << 30;
    let in_turn = plan(&shared).unwrap();
    shared.requests.group = Some(8);
    let at_once = plan(&shared).unwrap();
    assert!(in_turn.group < 8 && in_turn.estimate.expected_step_s < at_once.estimate.expected_step_s);
    request.one_group = true;
    assert_eq!(plan(&request).unwrap().group, 8, "a term over the whole step keeps all micro-batches together");
}

/// Sixteen micro-batches whose activations fit one at a time, and updates that take as long as six forward passes.
fn updates_of_six_micro_batches() -> Request {
    let mut request = Request { device: DeviceKind::Cuda, ..model(8, 16) };
    for unit in &mut request.units[1..=8] {
        (unit.kept_bytes, unit.input_bytes) = (64 << 20, 1 << 20);
        (unit.flops, unit.spared_flops, unit.moved_bytes) = (4e12, 2e12, 1.0);
    }
    request.rates.adamw_gparams = 8.0 * 1048576e-9 / (6.0 * 8.0 * 0.01);
    (request.requests.state_on_device, request.requests.updates_on_device) =
        (Some(Count::Units(2)), Some(Count::Units(0)));
    request
}

#[test]
fn a_large_last_group_hides_immediate_updates_that_one_micro_batch_does_not() {
    let mut request = Request { update: UpdateMode::Immediate, ..updates_of_six_micro_batches() };
    let one = Request { requests: Requests { group: Some(1), ..request.requests.clone() }, ..request.clone() };
    let kept = plan(&one).unwrap();
    request.budget.device = 1100 << 20;
    let found = plan(&request).unwrap();
    assert_eq!((found.group, kept.large_group), (1, 0));
    // A backward pass is twice as long as a forward pass, and the next step's first micro-batch hides some too.
    assert!((2..=4).contains(&found.large_group), "{}", found.large_group);
    assert_eq!(found.large_begin + found.large_group, 16);
    let (with, without) = (found.estimate.expected_step_s, kept.estimate.expected_step_s);
    assert!(with < 0.98 * without, "{with} {without}");
    assert!(found.totals.device <= request.budget.device);
    let facts = ScheduleInputs::new(&request, &found).unwrap();
    for micro_batches in [1, 13, 16] {
        let (first, steady) = Schedule::steady(&facts, Shape::new(Pass::Train, micro_batches)).unwrap();
        check(&facts, &steady, Some(&first)).unwrap();
    }
}

#[test]
fn a_large_first_group_hides_the_updates_that_one_micro_batch_does_not() {
    let mut request = updates_of_six_micro_batches();
    let one = Request { requests: Requests { group: Some(1), ..request.requests.clone() }, ..request.clone() };
    let kept = plan(&one).unwrap();
    request.budget.device = 1100 << 20;
    let found = plan(&request).unwrap();
    assert_eq!((found.group, kept.large_group, found.large_begin), (1, 0, 0));
    assert!((3..=8).contains(&found.large_group), "{}", found.large_group);
    // What is kept of single micro-batches is computed again in the large group, as far as there is no room.
    let differs = |unit: &&megatrain_core::plan::UnitPlan| unit.large_activation == Some(Activation::Recompute);
    let again = found.units.iter().filter(differs).count();
    assert!(again > 0 && found.units[1..=8].iter().all(|unit| unit.activation == Activation::Keep));
    assert!(found.estimate.expected_step_s < 0.97 * kept.estimate.expected_step_s);
    assert!(found.totals.device <= request.budget.device);
    // Whoever asks for groups of one gets those.
    let asked = Request { requests: one.requests, ..request.clone() };
    assert_eq!(plan(&asked).unwrap().large_group, 0);
    // With room for everything, nothing is computed twice.
    request.budget.device = 1 << 40;
    let roomy = plan(&request).unwrap();
    assert!(roomy.units.iter().all(|unit| unit.large_activation.is_none()));
    assert!(roomy.estimate.expected_step_s <= found.estimate.expected_step_s);
}

#[test]
fn layers_are_summed_in_fp32_for_one_micro_batch_only_where_that_is_asked_for() {
    let sums = |request: &Request| -> Vec<u64> {
        let items = plan(request).unwrap().items;
        items.iter().filter(|i| i.what == "gradient sums: layers").map(|i| i.bytes).collect()
    };
    let mut request = model(6, 1);
    request.units[2].tensors[0].shape = vec![3 << 20];
    assert!(sums(&request).is_empty(), "each layer's gradient is rounded once");
    request.sum_layers = true;
    assert_eq!(sums(&request), [12 << 20], "one place for all, as large as the largest layer's sums");
    request.micro_batches = 2;
    assert_eq!(sums(&request), [12 << 20]);
    (request.precision, request.grad_precision) = (Precision::Fp32, Precision::Fp32);
    assert!(sums(&request).is_empty(), "in fp32 the gradient itself holds the sum");
}

#[test]
fn a_single_slot_is_what_is_left_where_two_do_not_fit() {
    let mut request = model(6, 2);
    request.requests.state_on_device = Some(Count::Units(0));
    let of = |slots: u32, device: u64| {
        let mut asked = request.clone();
        asked.requests.slots = Some(slots);
        asked.budget.device = device;
        plan(&asked)
    };
    let least = |slots: u32| {
        let (mut low, mut high) = (0, 1u64 << 40);
        while high - low > 1 {
            let middle = low.midpoint(high);
            if of(slots, middle).is_ok() { high = middle } else { low = middle }
        }
        high
    };
    let (one, two) = (least(1), least(2));
    assert!(one < two);
    request.budget.device = two;
    assert!(plan(&request).unwrap().slots >= 2, "loads are hidden where that fits");
    request.budget.device = two - 1;
    let found = plan(&request).unwrap();
    assert_eq!(found.slots, 1);
    assert!(fits(&request).unwrap());
    let facts = ScheduleInputs::new(&request, &found).unwrap();
    let (first, steady) = Schedule::steady(&facts, Shape::new(Pass::Train, 2)).unwrap();
    check(&facts, &steady, Some(&first)).unwrap();
    request.budget.device = one - 1;
    assert!(!fits(&request).unwrap());
}
