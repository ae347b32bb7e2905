//! Passes: their sizes, evaluation, accumulation, what is abandoned and what is refused.

use super::*;

#[test]
fn experts_are_named_while_they_are_routed_to() {
    let mut base = request(3, 1);
    route(&mut base, 2);
    let run = start(&base, queueing(0), &options());
    let refusal = |unit: usize, wanted: &[bool]| run.engine.route(unit, wanted).unwrap_err().to_string();
    assert!(refusal(2, &[true; 37]).contains("37 experts of unit 2 were named; its 37 are named while"));
    run.toy.begin(&run.engine, Pass::Train, 1, false).unwrap();
    let failure = loop {
        match run.engine.next(FOREVER).map(ready) {
            Ok(Some(op)) => {
                run.toy.launch(&run.engine, &op, 0);
                if (op.phase, op.unit) == (Phase::Forward, 1) {
                    assert!(refusal(2, &[true; 36]).contains("36 experts of unit 2"));
                    assert!(refusal(3, &[true; 37]).contains("its 0 are named"));
                    assert!(refusal(9, &[]).contains("experts of unit 9"));
                }
                run.engine.finish(op.id).unwrap();
            }
            other => break other.unwrap_err().to_string(),
        }
    };
    assert!(failure.contains("nobody has named the experts of unit layers.1 that tokens are routed to"), "{failure}");
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
fn after_a_pass_that_was_added_to_another_is_abandoned_nothing_waits() {
    let mut base = request(4, 3);
    base.requests.accumulate = true;
    let run = start(&base, queueing(1), &options());
    for pass in 0..2 {
        run.toy.begin(&run.engine, Pass::Train, 3, pass > 0).unwrap();
        run.toy.compute(&run.engine, pass).unwrap();
        run.engine.gradient_norm(FOREVER).map(ready).unwrap();
    }
    run.engine.abandon(FOREVER).map(ready).unwrap();
    run.engine.drain(FOREVER).map(ready).unwrap();
    run.engine.keep().unwrap();
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
fn an_immediate_update_that_is_not_finite_breaks_the_engine() {
    let base = Request { update: UpdateMode::Immediate, ..request(4, 3) };
    let run = start(&base, queueing(5), &options());
    run.toy.spoil.store(true, std::sync::atomic::Ordering::Relaxed);
    let error = run.toy.step(&run.engine, 0, None).unwrap_err().to_string();
    assert!(error.contains("not finite") && error.contains("update"), "{error}");
    assert!(run.engine.drain(FOREVER).unwrap_err().to_string().contains("broken"));
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
