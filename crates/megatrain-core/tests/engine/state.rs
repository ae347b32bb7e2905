//! The state of the model: allocated, read and written in every tier.

use super::*;

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
            let mut begin = Begin::new(Pass::Train, request.micro_batches);
            begin.groups = groups;
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
