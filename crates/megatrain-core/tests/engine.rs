//! The engine on the adversarial device: whatever the plan, seed and delays, bit-equal to one operation at a time.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use megatrain_core::device::sim::{Faults, SimDevice};
use megatrain_core::device::{Device, Stream};
use megatrain_core::error::{Error, Tier};
use megatrain_core::layout::{Dtype, Precision};
use megatrain_core::plan::{Activation, Count, Place, Plan, Region, Request, UpdateMode, plan};
use megatrain_core::schedule::Pass;
use megatrain_core::store::Plane;
use megatrain_core::stream::{Begin, Engine, Group, Options, PlaneName};
use proptest::prelude::*;

mod support;
use support::{FOREVER, GROUPS, Toy, any_request, ready, request};

fn options() -> Options {
    Options { threads: Some(1), huge_pages: false, ..Options::default() }
}

struct Run {
    toy: Toy,
    engine: Engine,
    plan: Plan,
}

fn start(request: &Request, device: SimDevice, options: &Options) -> Run {
    let plan = plan(request).unwrap();
    let engine = Engine::new(Arc::new(device.clone()), request, &plan, options).unwrap();
    let toy = Toy::new(device, request.clone());
    toy.fill(&engine).unwrap();
    Run { toy, engine, plan }
}

/// Trains `steps` steps and returns every bit of the state after each.
fn train(request: &Request, device: SimDevice, options: &Options, steps: u64, clip: Option<f64>) -> Vec<Vec<Vec<u8>>> {
    let run = start(request, device, options);
    let after = |step| {
        run.toy.step(&run.engine, step, clip).unwrap();
        run.toy.state(&run.engine).unwrap()
    };
    (0..steps).map(after).collect()
}

/// Trains without reading anything in between, so that updates run beneath the next step.
fn train_through(
    request: &Request,
    device: SimDevice,
    options: &Options,
    steps: u64,
    clip: Option<f64>,
) -> Vec<Vec<u8>> {
    let run = start(request, device, options);
    for step in 0..steps {
        run.toy.step(&run.engine, step, clip).unwrap();
    }
    run.toy.state(&run.engine).unwrap()
}

fn queueing(seed: u64) -> SimDevice {
    SimDevice::new(Some(seed), Faults::default()).queueing_compute()
}

fn delayed(seed: u64, streams: &[&str]) -> SimDevice {
    let delay_ms: BTreeMap<String, f64> = streams.iter().map(|s| ((*s).to_owned(), 5.0)).collect();
    SimDevice::new(Some(seed), Faults { delay_ms, ..Faults::default() }).queueing_compute()
}

fn synchronous() -> Options {
    Options { synchronous: true, ..options() }
}

/// The plan does not show: every request here differs in placement and order only.
fn placements(base: &Request) -> Vec<(String, Request)> {
    let mut all = Vec::new();
    let mut add = |name: &str, change: &dyn Fn(&mut Request)| {
        let mut request = base.clone();
        change(&mut request);
        all.push((name.to_owned(), request));
    };
    add("smallest", &|_| {});
    add("three slots", &|r| r.requests.slots = Some(3));
    add("all slots", &|r| r.requests.slots = Some(99));
    add("groups of one", &|r| r.requests.group = Some(1));
    add("groups of two", &|r| (r.requests.group, r.requests.slots) = (Some(2), Some(3)));
    add("inputs on the host", &|r| r.requests.inputs = Some(Place::Host));
    add("inputs on the host in groups", &|r| {
        (r.requests.inputs, r.requests.group, r.requests.stage_buffers) = (Some(Place::Host), Some(2), Some(2));
    });
    add("offloaded", &|r| (r.requests.keep, r.requests.activation) = (Some(2), Some(Activation::Offload)));
    for units in [1, 2, 4, 7] {
        add(&format!("state of {units} units on the device"), &|r| {
            r.requests.state_on_device = Some(Count::Units(units));
        });
    }
    let device_updates = |r: &mut Request, layers: u32, parts: u32| {
        (r.requests.updates_on_device, r.requests.parts) = (Some(Count::Units(layers)), Some(parts));
    };
    add("two layers updated on the device", &|r| device_updates(r, 2, 1));
    add("all layers updated on the device in parts", &|r| device_updates(r, 5, 2));
    add("device updates beside state on the device", &|r| {
        device_updates(r, 2, 2);
        (r.requests.state_on_device, r.requests.slots) = (Some(Count::Units(4)), Some(3));
    });
    add("device updates in groups of one", &|r| {
        device_updates(r, 3, 2);
        (r.requests.inputs, r.requests.group) = (Some(Place::Host), Some(1));
    });
    if base.update == UpdateMode::Immediate {
        add("one slab", &|r| r.requests.slabs = Some(1));
        add("device updates through one slab", &|r| {
            device_updates(r, 3, 2);
            r.requests.slabs = Some(1);
        });
        add("device updates that wait in slabs", &|r| {
            device_updates(r, 3, 2);
            r.requests.slabs = Some(5);
        });
    }
    all
}

fn precisions(base: &Request) -> [(&'static str, Request); 3] {
    let of = |precision, grad_precision| Request { precision, grad_precision, ..base.clone() };
    [
        ("fp32", of(Precision::Fp32, Precision::Fp32)),
        ("bf16", of(Precision::Bf16, Precision::Bf16)),
        ("bf16 with fp32 gradients", of(Precision::Bf16, Precision::Fp32)),
    ]
}

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
fn what_is_allocated_is_what_the_plan_lists() {
    for base in [request(5, 3), Request { update: UpdateMode::Immediate, ..request(5, 3) }] {
        for (_, base) in precisions(&base) {
            for (name, request) in placements(&base) {
                let device = queueing(0);
                let run = start(&request, device.clone(), &options());
                let torch = |what: &str| what.ends_with("(torch)");
                let planned: Vec<_> = run.plan.items.iter().filter(|i| !torch(&i.what)).cloned().collect();
                let mut allocated = run.engine.allocated();
                allocated.sort_by_key(|i| {
                    planned.iter().position(|p| (&p.what, p.tier, p.pinned) == (&i.what, i.tier, i.pinned))
                });
                assert_eq!(allocated, planned, "{name}");
                let sum = |tier| planned.iter().filter(|i| i.tier == tier).map(|i| i.bytes).sum::<u64>();
                assert_eq!(device.allocated_bytes().0, sum(Tier::Device), "{name}");
                assert_eq!(run.engine.mapped_bytes(), sum(Tier::Host), "{name}");
                let pinned = planned.iter().filter(|i| i.pinned).map(|i| i.bytes).sum::<u64>();
                assert_eq!(device.pinned_bytes(), pinned, "{name}");
                // After warm-up a step allocates nothing on the device.
                run.toy.step(&run.engine, 0, Some(0.5)).unwrap();
                assert_eq!(device.allocated_bytes().1, sum(Tier::Device), "{name}");
            }
        }
    }
}

#[test]
fn fewer_micro_batches_than_planned_are_a_step_too() {
    let base = request(4, 4);
    let run = |options: &Options, seed| {
        let run = start(&base, queueing(seed), options);
        for (step, micro_batches) in [4, 1, 3, 4, 2].into_iter().enumerate() {
            run.toy.begin(&run.engine, Pass::Train, micro_batches, false).unwrap();
            run.toy.compute(&run.engine, step as u64).unwrap();
            run.toy.apply(&run.engine, Some(0.5)).unwrap();
        }
        let more = run.toy.begin(&run.engine, Pass::Train, 5, false).unwrap_err().to_string();
        assert!(more.contains("5 micro-batches"), "{more}");
        run.toy.state(&run.engine).unwrap()
    };
    let reference = run(&synchronous(), 0);
    for seed in 0..5 {
        assert!(run(&options(), seed) == reference, "seed {seed}");
    }
}

#[test]
fn evaluations_change_nothing_wherever_they_come() {
    let base = request(4, 3);
    let reference = train_through(&base, queueing(0), &synchronous(), 3, Some(0.5));
    for seed in 0..5 {
        let run = start(&base, queueing(seed), &options());
        for step in 0..3 {
            run.toy.begin(&run.engine, Pass::Train, 3, false).unwrap();
            run.toy.compute(&run.engine, step).unwrap();
            // Gradients wait meanwhile.
            for micro_batches in [2, 1] {
                run.toy.begin(&run.engine, Pass::Eval, micro_batches, false).unwrap();
                run.toy.compute(&run.engine, 77).unwrap();
            }
            run.toy.apply(&run.engine, Some(0.5)).unwrap();
            run.toy.begin(&run.engine, Pass::Eval, 3, false).unwrap();
            run.toy.compute(&run.engine, 78).unwrap();
        }
        assert!(run.toy.state(&run.engine).unwrap() == reference, "seed {seed}");
    }
}

#[test]
fn written_weights_are_sent_again() {
    let mut base = request(4, 2);
    base.requests.slots = Some(4);
    let run = start(&base, queueing(1), &options());
    let loss_weights = |unit: usize| {
        let place = run.engine.weights_offset(unit).unwrap();
        let engine = &run.engine;
        let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
        let (memory, out) = (engine.region(Region::Weights).slice(place, 64), Arc::clone(&seen));
        run.toy.device.launch(Stream::Compute, move |m| out.lock().unwrap().extend_from_slice(m.bytes(&memory)));
        run.toy.device.synchronize(&run.toy.device.record(Stream::Compute).unwrap()).unwrap();
        Arc::try_unwrap(seen).unwrap().into_inner().unwrap()
    };
    let evaluate = || {
        run.toy.begin(&run.engine, Pass::Eval, 2, false).unwrap();
        run.toy.compute(&run.engine, 0).unwrap();
        run.engine.drain(FOREVER).map(ready).unwrap();
    };
    evaluate();
    let before = loss_weights(5);
    evaluate();
    assert_eq!(run.engine.stats().unwrap().bytes_to_device, 0, "nothing has changed, so nothing is sent");
    let values: Vec<u8> = (0..16).flat_map(|i| (i as f32).to_ne_bytes()).collect();
    run.engine.write(5, 0, PlaneName::State(Plane::Master), 0, Dtype::F32, &values).unwrap();
    evaluate();
    assert_ne!(before, values);
    assert_eq!(loss_weights(5), values);
}

#[test]
fn a_pass_that_is_abandoned_leaves_no_trace() {
    let base = request(4, 3);
    let reference = train_through(&base, queueing(0), &synchronous(), 3, Some(0.5));
    for stop_after in [0, 1, 7, 20, 29, usize::MAX] {
        for held in [false, true] {
            let run = start(&base, queueing(stop_after as u64), &options());
            for step in 0..3 {
                run.toy.begin(&run.engine, Pass::Train, 3, false).unwrap();
                for _ in 0..stop_after.min(1000) {
                    let Some(op) = run.engine.next(FOREVER).map(ready).unwrap() else { break };
                    run.toy.launch(&run.engine, &op, 99);
                    run.engine.finish(op.id).unwrap();
                }
                if held && let Some(op) = run.engine.next(FOREVER).map(ready).unwrap() {
                    run.toy.launch(&run.engine, &op, 99);
                }
                run.engine.abandon(FOREVER).map(ready).unwrap();
                run.toy.step(&run.engine, step, Some(0.5)).unwrap();
            }
            assert!(run.toy.state(&run.engine).unwrap() == reference, "after {stop_after}, held {held}");
        }
    }
}

#[test]
fn gradients_of_several_passes_are_added_before_they_are_applied() {
    let mut base = request(4, 3);
    base.requests.accumulate = true;
    for (name, base) in precisions(&base) {
        let run = |options: &Options, seed: u64| {
            let run = start(&base, queueing(seed), options);
            let mut norms = Vec::new();
            for step in 0..3 {
                for pass in 0..3 {
                    run.toy.begin(&run.engine, Pass::Train, 3, pass > 0).unwrap();
                    run.toy.compute(&run.engine, 10 * step + pass).unwrap();
                    norms.push(run.engine.gradient_norm(FOREVER).map(ready).unwrap());
                }
                run.toy.apply(&run.engine, Some(0.5)).unwrap();
            }
            (norms, run.toy.state(&run.engine).unwrap())
        };
        let reference = run(&synchronous(), 0);
        assert!(reference.0[1] > reference.0[0], "{name}: {:?}", reference.0);
        for seed in 0..4 {
            assert!(run(&options(), seed) == reference, "{name}, seed {seed}");
        }
    }
}

#[test]
fn gradients_that_are_not_finite_change_nothing() {
    let mut base = request(4, 3);
    for device_updates in [0, 3] {
        base.requests.updates_on_device = Some(Count::Units(device_updates));
        let run = start(&base, queueing(5), &Options { poison: device_updates > 0, ..options() });
        run.toy.step(&run.engine, 0, Some(0.5)).unwrap();
        let before = run.toy.state(&run.engine).unwrap();
        run.toy.spoil.store(true, std::sync::atomic::Ordering::Relaxed);
        let outcome = run.toy.step(&run.engine, 1, Some(0.5)).unwrap();
        assert!(outcome.skipped && !outcome.grad_norm.is_finite(), "{outcome:?}");
        assert!(run.toy.state(&run.engine).unwrap() == before);
        run.toy.spoil.store(false, std::sync::atomic::Ordering::Relaxed);
        assert!(!run.toy.step(&run.engine, 2, Some(0.5)).unwrap().skipped);
        assert_eq!(run.engine.step_count(1, 0).unwrap(), 2);
    }
}

#[test]
fn state_that_is_updated_on_the_device_is_read_written_and_evaluated_like_any_other() {
    for update in [UpdateMode::JustInTime, UpdateMode::Immediate] {
        let run = |device_updates: u32, seed: u64, options: &Options| {
            let mut request = Request { update, ..request(4, 3) };
            (request.requests.updates_on_device, request.requests.parts) =
                (Some(Count::Units(device_updates)), Some(2));
            let run =
                start(&request, delayed(seed, &[["upload"], ["download"], ["update"]][seed as usize % 3]), options);
            let values: Vec<u8> = (0..16).flat_map(|i| (i as f32 / 8.0).to_ne_bytes()).collect();
            let mut seen = Vec::new();
            for step in 0..4 {
                run.toy.step(&run.engine, step, Some(0.5)).unwrap();
                let mut gradient = vec![0; 64];
                if update == UpdateMode::JustInTime {
                    run.engine.read(2, 0, PlaneName::Gradient, 2040, &mut gradient[..]).unwrap();
                }
                if step == 1 {
                    // Across the border between two parts.
                    run.engine.write(2, 0, PlaneName::State(Plane::ExpAvg), 2040, Dtype::F32, &values).unwrap();
                }
                run.toy.begin(&run.engine, Pass::Eval, 2, false).unwrap();
                run.toy.compute(&run.engine, 50 + step).unwrap();
                seen.push((gradient, run.toy.state(&run.engine).unwrap()));
            }
            seen
        };
        let reference = run(0, 0, &synchronous());
        for seed in 0..6 {
            let found = run(1 + seed as u32 % 4, seed, &Options { poison: seed % 2 == 1, ..options() });
            assert!(found == reference, "{update:?}, seed {seed}");
        }
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

#[test]
fn an_immediate_update_that_is_not_finite_breaks_the_engine() {
    let base = Request { update: UpdateMode::Immediate, ..request(4, 3) };
    let run = start(&base, queueing(5), &options());
    run.toy.spoil.store(true, std::sync::atomic::Ordering::Relaxed);
    let error = run.toy.step(&run.engine, 0, None).unwrap_err().to_string();
    assert!(error.contains("not finite") && error.contains("update"), "{error}");
    assert!(run.engine.drain(FOREVER).unwrap_err().to_string().contains("broken"));
}

#[test]
fn every_plane_is_read_and_written_wherever_it_lives() {
    for (name, base) in precisions(&request(2, 1)) {
        for units in [0, 4] {
            let mut request = base.clone();
            request.requests.state_on_device = Some(Count::Units(units));
            let run = start(&request, queueing(1), &options());
            run.toy.step(&run.engine, 0, None).unwrap();
            let engine = &run.engine;
            let mut master = vec![0; 4 * 1001 * 3];
            engine.read(0, 0, PlaneName::State(Plane::Master), 0, &mut master).unwrap();
            // A part of it, at an odd place.
            let part = &master[4 * 7..4 * 20];
            let mut found = vec![0; part.len()];
            engine.read(0, 0, PlaneName::State(Plane::Master), 7, &mut found).unwrap();
            assert_eq!(found, part, "{name}, {units}");
            let values: Vec<u8> = (0..13).flat_map(|i| (i as f32 * 0.37 - 1.0).to_le_bytes()).collect();
            for plane in [Plane::Master, Plane::ExpAvg, Plane::ExpAvgSq] {
                engine.write(1, 0, PlaneName::State(plane), 100, Dtype::F32, &values).unwrap();
                engine.read(1, 0, PlaneName::State(plane), 100, &mut found).unwrap();
                assert_eq!(found, values, "{name}, {units}, {plane:?}");
            }
            let mut frozen = vec![0; 20];
            engine.read(1, 1, PlaneName::State(Plane::Weights), 0, &mut frozen).unwrap();
            assert!(frozen.iter().any(|&b| b != 0));
            let mut grad = vec![0; 4 * 13];
            engine.read(1, 0, PlaneName::Gradient, 3, &mut grad).unwrap();
            assert!(grad.iter().any(|&b| b != 0), "{name}, {units}");
            let error = engine.read(1, 1, PlaneName::Gradient, 0, &mut grad).unwrap_err().to_string();
            assert!(error.contains("layers.0.scale is frozen"), "{error}");
            let error = engine.read(0, 0, PlaneName::State(Plane::Master), 3000, &mut grad).unwrap_err().to_string();
            assert!(error.contains("embed.weight"), "{error}");
            let infinite = f32::INFINITY.to_le_bytes();
            let dtype = Dtype::F32;
            let error =
                engine.write(1, 0, PlaneName::State(Plane::Master), 0, dtype, &infinite).unwrap_err().to_string();
            assert!(error.contains("finite"), "{error}");
        }
    }
}

#[test]
fn an_idle_group_stays_as_it_is_wherever_its_state_lies() {
    let idle = [GROUPS[0], Group { idle: true, ..GROUPS[1] }];
    let mut found = Vec::new();
    for update in [UpdateMode::JustInTime, UpdateMode::Immediate] {
        for (placement, request) in placements(&Request { update, ..request(5, 2) }) {
            let run = start(&request, queueing(3), &options());
            run.toy.step(&run.engine, 0, None).unwrap();
            let before = run.toy.state(&run.engine).unwrap();
            let groups = (update == UpdateMode::Immediate).then(|| idle.to_vec());
            let (pass, micro_batches) = (Pass::Train, request.micro_batches);
            let begin = Begin {
                pass,
                micro_batches,
                compute_stream: 0,
                groups,
                rows: None,
                accumulate: false,
                synchronous: false,
            };
            run.engine.begin(&begin, FOREVER).map(ready).unwrap();
            run.toy.compute(&run.engine, 1).unwrap();
            run.engine.apply(&idle, None, FOREVER).map(ready).unwrap();
            let after = run.toy.state(&run.engine).unwrap();
            // Of each unit three planes and the count: of a tensor of group 0, then of one of group 1.
            for (entry, (was, is)) in before.iter().zip(&after).enumerate() {
                assert_eq!(was == is, entry % 8 >= 4, "{update:?}, {placement}: entry {entry}");
            }
            run.toy.step(&run.engine, 2, None).unwrap();
            found.push((placement, run.toy.state(&run.engine).unwrap()));
        }
    }
    for (placement, state) in &found {
        assert!(*state == found[0].1, "{placement}");
    }
}

#[test]
fn calls_out_of_turn_are_refused_and_break_nothing() {
    let run = start(&request(4, 3), queueing(0), &options());
    let engine = &run.engine;
    let refused = |result: megatrain_core::Result<()>, word: &str| {
        let text = result.unwrap_err().to_string();
        assert!(text.contains(word), "{text}");
    };
    refused(engine.next(FOREVER).map(|_| ()), "no pass has begun");
    refused(engine.apply(&GROUPS, None, FOREVER).map(|_| ()), "no gradients wait");
    refused(run.toy.begin(engine, Pass::Train, 3, true), "no gradients to accumulate");
    run.toy.begin(engine, Pass::Train, 3, false).unwrap();
    refused(run.toy.begin(engine, Pass::Train, 3, false), "under way");
    let op = engine.next(FOREVER).map(ready).unwrap().unwrap();
    refused(engine.next(FOREVER).map(|_| ()), "has not been finished");
    refused(engine.finish(op.id + 1), "was not handed out");
    run.toy.launch(engine, &op, 0);
    engine.finish(op.id).unwrap();
    refused(engine.apply(&GROUPS, None, FOREVER).map(|_| ()), "under way");
    refused(engine.write(1, 0, PlaneName::State(Plane::Master), 0, Dtype::F32, &[0; 4]), "under way");
    run.toy.compute(engine, 0).unwrap();
    refused(run.toy.begin(engine, Pass::Train, 3, false), "neither applied nor abandoned");
    refused(run.toy.begin(engine, Pass::Train, 3, true), "no store");
    refused(engine.apply(&GROUPS[..1], None, FOREVER).map(|_| ()), "parameter group 1");
    refused(engine.apply(&GROUPS, Some(f64::NAN), FOREVER).map(|_| ()), "max_grad_norm");
    run.toy.apply(engine, Some(1.0)).unwrap();
    run.toy.step(engine, 1, Some(1.0)).unwrap();
    engine.close();
    refused(run.toy.begin(engine, Pass::Train, 3, false), "closed");
}

#[test]
fn seconds_in_which_a_device_waited_for_its_callers_launches_are_counted() {
    for queueing in [true, false] {
        let device = if queueing { self::queueing(0) } else { SimDevice::new(Some(0), Faults::default()) };
        let run = start(&request(4, 1), device, &options());
        run.toy.begin(&run.engine, Pass::Train, 1, false).unwrap();
        let mut num_ops = 0;
        while let Some(op) = run.engine.next(FOREVER).map(ready).unwrap() {
            let before = run.toy.device.record(Stream::Compute).unwrap();
            run.toy.device.synchronize(&before).unwrap();
            std::thread::sleep(Duration::from_millis(5));
            run.toy.launch(&run.engine, &op, 0);
            run.engine.finish(op.id).unwrap();
            num_ops += 1;
        }
        run.toy.apply(&run.engine, None).unwrap();
        let stats = run.engine.stats().unwrap();
        if queueing {
            assert!(stats.launching_s >= 0.005 * f64::from(num_ops), "{stats:?}");
        } else {
            assert_eq!((stats.launching_s, stats.bound.as_str()), (0.0, "compute"), "{stats:?}");
        }
    }
}

#[test]
fn statistics_and_trace_tell_of_every_lane() {
    let mut base = request(4, 3);
    base.requests.inputs = Some(Place::Host);
    let run = start(&base, queueing(0), &Options { trace: true, ..options() });
    for step in 0..3 {
        run.toy.step(&run.engine, step, Some(0.5)).unwrap();
    }
    let stats = run.engine.stats().unwrap();
    let images: u64 = run.engine.layouts().iter().map(|l| l.image_bytes).sum();
    assert!(stats.bytes_to_device > images && stats.bytes_to_host > 0 && stats.parameters_updated > 0, "{stats:?}");
    assert!(stats.lanes["compute"] > 0.0 && stats.lanes["upload"] > 0.0, "{stats:?}");
    run.engine.drain(FOREVER).map(ready).unwrap();
    let trace: serde_json::Value = serde_json::from_str(&run.engine.trace()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    for name in ["forward layers.0", "load embed", "land head", "update layers.3", "save layers.1", "fetch layers.1"] {
        assert!(events.iter().any(|e| e["name"] == name), "{name} is missing");
    }
}

#[test]
fn schedules_are_made_once_and_kept_within_bounds() {
    let run = start(&request(4, 3), queueing(0), &options());
    assert_eq!(run.engine.cached_schedules().count, 0);
    let step = || {
        run.toy.step(&run.engine, 0, Some(1.0)).unwrap();
        run.engine.cached_schedules()
    };
    // The first step follows nothing, the second one a step that followed nothing, and so on.
    let _ = (step(), step(), step());
    let steady = step();
    assert_eq!(step(), steady);
    assert!(steady.count > 0 && steady.bytes > 0 && steady.bytes <= steady.limit, "{steady:?}");
}
