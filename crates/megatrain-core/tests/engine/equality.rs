//! Plans, orders and delays change no bit.

use super::*;

#[test]
fn no_placement_order_or_seed_shows_in_the_numbers() {
    for tied in [false, true] {
        for (name, base) in precisions(&Request { tied, ..request(5, 3) }) {
            let reference = train_through(&base, queueing(0), &synchronous(), 3, Some(0.5));
            for (placement, request) in placements(&base) {
                for seed in 0..4 {
                    let poison = Options { poison: seed % 2 == 1, ..options() };
                    let found = train_through(&request, queueing(seed), &poison, 3, Some(0.5));
                    assert!(found == reference, "{name}, tied {tied}, {placement}, seed {seed}");
                }
            }
        }
    }
}

#[test]
fn no_placement_order_or_seed_shows_in_smaller_states() {
    let formats = [(Moments::Bf16, Master::Bits32), (Moments::Bits8, Master::Bits24), (Moments::Fp32, Master::Bits24)];
    for (moments, master) in formats {
        let state = StateFormat { moments, master };
        for (name, base) in precisions(&Request { state, ..request(5, 3) }) {
            if base.precision == Precision::Fp32 && master == Master::Bits24 {
                assert!(plan(&base).unwrap_err().to_string().contains("24-bit master"));
                continue;
            }
            for update in [UpdateMode::JustInTime, UpdateMode::Immediate] {
                let base = Request { update, ..base.clone() };
                let clip = (update == UpdateMode::JustInTime).then_some(0.5);
                let seeded = |options| Options { seed: 5, ..options };
                let reference = train_through(&base, queueing(0), &seeded(synchronous()), 3, clip);
                for (seed, (placement, request)) in placements(&base).into_iter().enumerate() {
                    let drawn = Options { poison: seed % 2 == 1, threads: Some(1 + seed % 3), ..options() };
                    let found = train_through(&request, queueing(seed as u64), &seeded(drawn), 3, clip);
                    assert!(found == reference, "{state:?}, {name}, {placement}, {update:?}");
                }
                let other = train_through(&base, queueing(0), &Options { seed: 6, ..synchronous() }, 3, clip);
                assert!(other != reference, "{state:?}: the seed decides how states are rounded");
            }
        }
    }
}

#[test]
fn rows_that_are_updated_early_do_not_show_in_smaller_states() {
    let state = StateFormat { moments: Moments::Bits8, master: Master::Bits24 };
    for tied in [false, true] {
        let of = |give_rows| {
            let base = request(3, 2);
            let request = Request { tied, state, precision: Precision::Bf16, grad_precision: Precision::Bf16, ..base };
            let mut run = start(&request, queueing(3), &options());
            (run.toy.rows, run.toy.give_rows) = (Some(vec![1, 4]), give_rows);
            for step in 0..4 {
                run.toy.step(&run.engine, step, Some(0.5)).unwrap();
            }
            run.toy.state(&run.engine).unwrap()
        };
        assert!(of(true) == of(false), "tied {tied}");
    }
}

#[test]
fn immediate_updates_equal_unclipped_ones_just_in_time() {
    for (name, base) in precisions(&request(5, 3)) {
        let reference = train_through(&base, queueing(0), &synchronous(), 3, None);
        let immediate = Request { update: UpdateMode::Immediate, ..base };
        for (placement, request) in placements(&immediate) {
            for seed in 0..4 {
                let poison = Options { poison: seed % 2 == 1, ..options() };
                let found = train_through(&request, queueing(seed), &poison, 3, None);
                assert!(found == reference, "{name}, {placement}, seed {seed}");
            }
        }
    }
}

#[test]
fn experts_that_are_sent_alone_do_not_show() {
    for update in [UpdateMode::JustInTime, UpdateMode::Immediate] {
        for (name, base) in precisions(&Request { update, ..request(5, 3) }) {
            let mut routed = base;
            for unit in [2, 4] {
                route(&mut routed, unit);
            }
            let mut whole = routed.clone();
            whole.units.iter_mut().for_each(|unit| unit.routed = None);
            let clip = (update == UpdateMode::JustInTime).then_some(0.5);
            let reference = train_through(&whole, queueing(0), &synchronous(), 3, clip);
            for (seed, (placement, request)) in placements(&routed).into_iter().enumerate() {
                let poison = Options { poison: true, ..options() };
                let run = start(&request, queueing(seed as u64), &poison);
                for step in 0..3 {
                    // What an evaluation was sent is no part of what the step needs.
                    run.toy.begin(&run.engine, Pass::Eval, 2, false).unwrap();
                    run.toy.compute(&run.engine, step + 1).unwrap();
                    run.toy.step(&run.engine, step, clip).unwrap();
                }
                assert!(run.toy.state(&run.engine).unwrap() == reference, "{name}, {placement}");
                let unsent = run.toy.unsent.load(std::sync::atomic::Ordering::Relaxed);
                let units = plan(&request).unwrap().units;
                let streamed = [2, 4].iter().any(|&unit: &usize| units[unit].state != State::Device);
                assert_eq!(unsent > 0, streamed, "{name}, {placement}: {unsent} elements were not sent");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_combination_of_choices_shows(request in any_request(), seed: u64, threads in 1usize..4, poison in 0u32..3) {
        let clip = (request.update == UpdateMode::JustInTime).then_some(0.5);
        // The toy trains the first and the last tensor of every unit.
        let Request { units, requests, .. } = support::request(request.units.len() - 2, 1);
        let request = Request { units, ..request };
        let plain = Request { update: UpdateMode::JustInTime, requests, ..request.clone() };
        let reference = train_through(&plain, queueing(0), &synchronous(), 3, clip);
        let drawn = Options { threads: Some(threads), poison: poison == 0, ..options() };
        prop_assert!(train_through(&request, queueing(seed), &drawn, 3, clip) == reference);
    }
}

#[test]
fn a_gradient_copy_that_comes_late_is_never_read_early() {
    // H13: a long delay before every copy to the host, the optimizer starting as early as it can, compared every step.
    for update in [UpdateMode::JustInTime, UpdateMode::Immediate] {
        let mut request = Request { update, ..request(4, 3) };
        request.requests.slabs = (update == UpdateMode::Immediate).then_some(1);
        let reference = train(&request, queueing(0), &synchronous(), 50, None);
        let found = train(&request, delayed(1, &["download"]), &options(), 50, None);
        assert!(found == reference, "{update:?}");
    }
}

#[test]
fn buffers_that_are_used_again_never_mix_under_any_delay() {
    // H14: the fewest buffers, delays on each stream alone and together, 200 steps, 20 seeds.
    let mut smallest = request(4, 3);
    smallest.requests.inputs = Some(Place::Host);
    smallest.requests.stage_buffers = Some(2);
    // A device with no room for a second gradient buffer either.
    smallest.budget.device = 1;
    let Err(Error::DoesNotFit { needed, .. }) = plan(&smallest) else { panic!("one byte is enough") };
    smallest.budget.device = needed;
    assert_eq!(plan(&smallest).unwrap().grad_buffers, 1);
    let reference = train_through(&request(4, 3), queueing(0), &synchronous(), 200, Some(0.5));
    let streams: [&[&str]; 4] = [&["compute"], &["upload"], &["download"], &["compute", "upload", "download"]];
    for seed in 0..20 {
        let device = delayed(seed, streams[seed as usize % streams.len()]);
        let poison = Options { poison: seed % 2 == 1, ..options() };
        let found = train_through(&smallest, device, &poison, 200, Some(0.5));
        assert!(found == reference, "seed {seed}");
    }
}

#[test]
fn computing_on_the_host_gives_the_same_numbers() {
    let mut request = request(5, 3);
    request.requests.inputs = Some(Place::Host);
    let reference = train_through(&request, queueing(0), &synchronous(), 3, Some(0.5));
    for seed in [None, Some(1), Some(2)] {
        for poison in [false, true] {
            let device = SimDevice::new(seed, Faults::default());
            let found = train_through(&request, device, &Options { poison, ..options() }, 3, Some(0.5));
            assert!(found == reference, "seed {seed:?}, poison {poison}");
        }
    }
}

#[test]
fn thread_counts_do_not_show() {
    let request = request(4, 3);
    let one = train_through(&request, queueing(0), &options(), 3, Some(0.5));
    let three = train_through(&request, queueing(0), &Options { threads: Some(3), ..options() }, 3, Some(0.5));
    assert!(one == three);
}

#[test]
fn less_memory_to_pin_changes_one_warning_and_no_bit() {
    // H11: pinning stops after some bytes, after few, and at once.
    let mut request = request(5, 3);
    let reference = train_through(&request, queueing(0), &options(), 3, Some(0.5));
    for (limit, device_updates) in [(150_000, 0), (20_000, 0), (0, 0), (300_000, 5), (200_000, 5), (0, 5)] {
        request.requests.updates_on_device = Some(Count::Units(device_updates));
        let faults = Faults { pin_limit_bytes: Some(limit), ..Faults::default() };
        let run = start(&request, SimDevice::new(Some(3), faults).queueing_compute(), &options());
        let warnings = run.engine.warnings();
        assert_eq!(warnings.iter().filter(|w| w.contains("pinned")).count(), 1, "{warnings:?}");
        for step in 0..3 {
            run.toy.step(&run.engine, step, Some(0.5)).unwrap();
        }
        assert!(run.toy.state(&run.engine).unwrap() == reference, "limit {limit}, {device_updates} device_updates");
    }
}

#[test]
fn device_updates_never_mix_in_their_buffers_under_any_delay() {
    for update in [UpdateMode::JustInTime, UpdateMode::Immediate] {
        let mut base = Request { update, ..request(4, 3) };
        (base.requests.parts, base.requests.slots) = (Some(2), Some(3));
        base.requests.slabs = (update == UpdateMode::Immediate).then_some(2);
        let reference = train_through(&base, queueing(0), &synchronous(), 60, None);
        base.requests.updates_on_device = Some(Count::Units(4));
        let streams: [&[&str]; 5] =
            [&["compute"], &["upload"], &["download"], &["update"], &["upload", "download", "update"]];
        for seed in 0..15 {
            let poison = Options { poison: seed % 2 == 1, ..options() };
            let found = train_through(&base, delayed(seed, streams[seed as usize % streams.len()]), &poison, 60, None);
            assert!(found == reference, "{update:?}, seed {seed}");
        }
    }
}

fn train_steps(run: &Run, steps: std::ops::Range<u64>, clip: Option<f64>) {
    for step in steps {
        run.toy.step(&run.engine, step, clip).unwrap();
    }
}

#[test]
fn a_plan_that_takes_over_the_state_of_another_changes_no_bit_and_moves_none_of_it() {
    let mut taken = 0;
    for (name, base) in precisions(&request(5, 3)) {
        for update in [UpdateMode::JustInTime, UpdateMode::Immediate] {
            let base = Request { update, ..base.clone() };
            let clip = (update == UpdateMode::JustInTime).then_some(0.5);
            let reference = train_through(&base, queueing(0), &synchronous(), 4, clip);
            let all = placements(&base);
            for (index, (first, request)) in all.iter().enumerate() {
                for (second, next) in all.iter().skip(index % 4).step_by(4) {
                    let device = queueing(index as u64);
                    let mut run = start(request, device.clone(), &options());
                    train_steps(&run, 0..2, clip);
                    let kept = run.engine.keep().unwrap();
                    let places = |plan: &Plan| {
                        plan.units.iter().map(|unit| (unit.state, unit.weights_on_disk)).collect::<Vec<_>>()
                    };
                    let any = |plan: &Plan, state| plan.units.iter().any(|unit| unit.state == state);
                    let (other, device) = (plan(next).unwrap(), Arc::new(device));
                    let slots = |plan: &Plan| any(plan, State::Device).then_some(plan.slots);
                    let cut = |request: &Request, plan: &Plan| any(plan, State::Disk).then_some(request.requests.parts);
                    let stays = places(&run.plan) == places(&other)
                        && slots(&run.plan) == slots(&other)
                        && cut(request, &run.plan) == cut(next, &other);
                    drop(run.engine);
                    let made = Engine::with_kept(Arc::clone(&device) as _, next, &other, &options(), &kept);
                    run.engine = match made {
                        Ok(engine) => {
                            taken += 1;
                            run.toy.request = next.clone();
                            engine
                        }
                        Err(Error::OtherState { .. }) => {
                            assert!(!stays, "{name}: {first} to {second}");
                            // The plan before goes on where it was.
                            Engine::with_kept(device, request, &run.plan, &options(), &kept).unwrap()
                        }
                        Err(error) => panic!("{name}: {first} to {second}: {error}"),
                    };
                    train_steps(&run, 2..4, clip);
                    let found = run.toy.state(&run.engine).unwrap();
                    assert!(found == reference, "{name}, {update:?}: {first} to {second}");
                }
            }
        }
    }
    assert!(taken > 100, "only {taken} changes of plan kept the state where it was");
}

#[test]
fn the_state_is_kept_between_steps_only() {
    let run = start(&request(2, 2), queueing(1), &options());
    run.toy.begin(&run.engine, Pass::Train, 2, false).unwrap();
    assert!(matches!(run.engine.keep(), Err(Error::PassUnderWay { .. })));
    run.toy.compute(&run.engine, 0).unwrap();
    assert!(matches!(run.engine.keep(), Err(Error::PassUnderWay { .. })), "gradients wait for a decision");
    run.toy.apply(&run.engine, None).unwrap();
    run.engine.keep().unwrap();
    assert!(matches!(run.engine.check(), Err(Error::Closed)));
}
