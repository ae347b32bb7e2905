//! Statistics, traces and schedules that are kept.

use super::*;

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
    for name in [
        "forward layers.0",
        "load embed",
        "offload_grad head",
        "update layers.3",
        "offload_activation layers.1",
        "fetch_activation layers.1",
    ] {
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
