//! Schedules: every one that a plan can ask for is accepted, and every one that has been tampered with is refused.
use megatrain_core::plan::{Count, Request, UpdateMode, plan};
use megatrain_core::schedule::{Dep, Edge, Kind, Lane, Op, Pass, Schedule, ScheduleInputs, Shape, check};
use proptest::prelude::*;

mod support;
use support::{any_request, join, request, route};

fn facts(request: &Request) -> ScheduleInputs {
    ScheduleInputs::new(request, &plan(request).unwrap()).unwrap()
}

fn train(micro_batches: u32) -> Shape {
    Shape::new(Pass::Train, micro_batches)
}

fn eval(micro_batches: u32) -> Shape {
    Shape::new(Pass::Eval, micro_batches)
}

const WRITE: Shape = Shape { pass: Pass::Write, micro_batches: 0, writes: true };

fn writing(shape: Shape) -> Shape {
    Shape { writes: true, ..shape }
}

/// Whether a path of dependencies leads from `first` to `second` of one schedule pair, without the edge in question.
fn implied(previous: &Schedule, schedule: &Schedule, op: usize, skipped: usize) -> bool {
    let target = schedule.ops[op].deps[skipped];
    let mut stack: Vec<(bool, u32)> =
        schedule.ops[op].deps.iter().enumerate().filter(|(i, _)| *i != skipped).map(|(_, d)| (d.prior, d.op)).collect();
    let mut seen = std::collections::HashSet::new();
    while let Some((prior, id)) = stack.pop() {
        if (prior, id) == (target.prior, target.op) {
            return true;
        }
        if seen.insert((prior, id)) {
            let (ops, of_previous) = if prior { (&previous.ops, true) } else { (&schedule.ops, false) };
            // What the previous pass waited for outside itself is past.
            let deps = ops[id as usize].deps.iter().filter(|d| !(of_previous && d.prior));
            stack.extend(deps.map(|d| (of_previous || d.prior, d.op)));
        }
    }
    false
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_schedule_that_a_plan_can_ask_for_is_accepted(request in any_request(), fewer in 0u32..3) {
        let facts = facts(&request);
        let m = request.micro_batches;
        let less = train(m.saturating_sub(fewer).max(1));
        let shapes = [
            train(m), train(m), eval(m), less, eval(1), eval(1), train(m), writing(train(m)), writing(train(m)), train(m),
            WRITE, train(m), writing(eval(m)), eval(1), WRITE, WRITE, less,
        ];
        let mut previous: Option<Schedule> = None;
        for shape in shapes {
            let resident = previous.as_ref().map_or_else(Vec::new, |p: &Schedule| p.leaves(&facts));
            let schedule = Schedule::new(&facts, shape, previous.as_ref(), &resident).unwrap();
            prop_assert_eq!(check(&facts, &schedule, previous.as_ref()).map_err(|e| e.to_string()), Ok(()));
            let alone = Schedule::new(&facts, shape, None, &[]).unwrap();
            prop_assert_eq!(check(&facts, &alone, None).map_err(|e| e.to_string()), Ok(()));
            previous = Some(schedule);
        }
    }

    #[test]
    fn no_dependency_can_be_left_out(request in any_request(), before in any::<bool>(), kind in 0u32..4) {
        let facts = facts(&request);
        let shape = train(request.micro_batches);
        let first = if before { writing(shape) } else { shape };
        let shape = [shape, writing(shape), writing(eval(1)), WRITE][kind as usize];
        let previous = Schedule::new(&facts, first, None, &[]).unwrap();
        let schedule = Schedule::new(&facts, shape, Some(&previous), &previous.leaves(&facts)).unwrap();
        for op in 0..schedule.ops.len() {
            for dep in 0..schedule.ops[op].deps.len() {
                if implied(&previous, &schedule, op, dep) {
                    continue;
                }
                let mut mutated = schedule.clone();
                let gone = mutated.ops[op].deps.remove(dep);
                let refused = check(&facts, &mutated, Some(&previous)).is_err();
                prop_assert!(refused, "{:?} of unit {} without {:?}", schedule.ops[op].kind, schedule.ops[op].unit, gone);
            }
        }
    }

    #[test]
    fn a_swapped_place_is_refused(request in any_request(), pick in any::<prop::sample::Index>()) {
        let facts = facts(&request);
        let schedule = Schedule::new(&facts, train(request.micro_batches), None, &[]).unwrap();
        let change = |mutate: &dyn Fn(&mut Op) -> bool| {
            let candidates: Vec<usize> =
                (0..schedule.ops.len()).filter(|&i| mutate(&mut schedule.ops[i].clone())).collect();
            if candidates.is_empty() {
                return None;
            }
            let mut mutated = schedule.clone();
            mutate(&mut mutated.ops[candidates[pick.index(candidates.len())]]);
            Some(check(&facts, &mutated, None).is_err())
        };
        let other = |slot: &mut Option<u32>, of: u32| slot.as_mut().is_some_and(|s| { *s = (*s + 1) % of; of > 1 });
        let slots = change(&|op| other(&mut op.slot, facts.slots));
        prop_assert!(slots != Some(false), "another slot");
        // (In backward, another buffer may still hold the same activations from forward, which is as good.)
        let stages = change(&|op| op.lane != Lane::Upload && op.kind != Kind::Backward && other(&mut op.stage, facts.stage_buffers));
        prop_assert!(stages != Some(false), "another staging buffer");
        let offloaded = change(&|op| op.kind == Kind::OffloadGrad && other(&mut op.grad, 2 + facts.shared_grads.len() as u32));
        prop_assert!(offloaded != Some(false), "another gradient buffer");
        let inputs = change(&|op| other(&mut op.input_buffer, facts.input_buffers));
        prop_assert!(inputs != Some(false), "another buffer for an input");
        let visited = change(&|op| other(&mut op.state_buffer, facts.state_buffers));
        prop_assert!(visited != Some(false), "another state buffer");
        let part = change(&|op| op.state_buffer.is_some() && { op.part ^= 1; true });
        prop_assert!(part != Some(false), "another part of a device update");
        let unit = change(&|op| { op.unit = (op.unit + 1) % (facts.head() + 1); op.kind == Kind::Update });
        prop_assert!(unit != Some(false), "another unit's update");
    }
}

#[test]
fn an_event_cannot_order_the_host() {
    let facts = facts(&request(3, 2));
    let mut schedule = Schedule::new(&facts, train(2), None, &[]).unwrap();
    let update = schedule.ops.iter_mut().rfind(|op| op.lane == Lane::Host).unwrap();
    update.deps[0].edge = Edge::Issued;
    let error = check(&facts, &schedule, None).unwrap_err().to_string();
    assert!(error.contains("must wait until it is over"), "{error}");
}

#[test]
fn each_rule_is_told_in_words() {
    let facts = facts(&request(3, 2));
    let good = Schedule::new(&facts, train(2), None, &[]).unwrap();
    let rule = |mutate: &dyn Fn(&mut Vec<Op>)| {
        let mut schedule = good.clone();
        mutate(&mut schedule.ops);
        check(&facts, &schedule, None).unwrap_err().to_string()
    };
    let forget = |ops: &mut Vec<Op>, kind: Kind, of: Kind| {
        let ids: Vec<u32> = ops.iter().filter(|o| o.kind == of).map(|o| o.id).collect();
        let op = ops.iter_mut().find(|o| o.kind == kind && o.deps.iter().any(|d| ids.contains(&d.op))).unwrap();
        op.deps.retain(|d| !ids.contains(&d.op));
    };
    let cases: [(&str, Kind, Kind); 5] = [
        ("weights are loaded before they are used", Kind::Forward, Kind::Load),
        ("not overwritten before their last use", Kind::Load, Kind::Forward),
        ("offloaded after backward has finished it", Kind::OffloadGrad, Kind::Backward),
        ("norm is taken after all gradients have been offloaded", Kind::ClipDecision, Kind::OffloadGrad),
        ("an update follows the clip decision", Kind::Update, Kind::ClipDecision),
    ];
    for (words, kind, of) in cases {
        let error = rule(&|ops| forget(ops, kind, of));
        assert!(error.contains(words), "{error}");
    }
    let error = rule(&|ops| ops.retain(|o| o.kind != Kind::ClipDecision));
    assert!(error.contains("position in the list") || error.contains("clip decision"), "{error}");
    let error = rule(&|ops| {
        let last = ops.last_mut().unwrap();
        last.kind = Kind::AccumulateGrad;
    });
    assert!(error.contains("occurs"), "{error}");
    let error = rule(&|ops| ops.iter_mut().filter(|o| o.kind == Kind::Backward).for_each(|o| o.micro_batch ^= 1));
    assert!(error.contains("in order"), "{error}");
}

#[test]
fn a_unit_with_the_weights_of_another_one_is_computed_where_those_are() {
    let mut base = request(5, 2);
    join(&mut base, 4, 1); // 2 and 3 are what is between them
    let facts = facts(&base);
    let (first, good) = Schedule::steady(&facts, train(2)).unwrap();
    check(&facts, &good, Some(&first)).unwrap();
    assert!(!good.ops.iter().any(|op| op.unit == 4 && op.kind == Kind::Load));
    let slots = |kind: Kind, unit: u32| -> Vec<Option<u32>> {
        good.ops.iter().filter(|op| (op.kind, op.unit) == (kind, unit)).map(|op| op.slot).collect()
    };
    assert_eq!(slots(Kind::Backward, 4), slots(Kind::Backward, 1), "what it has made is used there");
    assert_eq!(slots(Kind::Forward, 4), slots(Kind::Forward, 1));
    let between = [slots(Kind::Backward, 3), slots(Kind::Backward, 2)].concat();
    assert!(between.iter().all(|slot| !slots(Kind::Backward, 1).contains(slot)), "and stays there meanwhile");
    let mut moved = (*good).clone();
    let backward: Vec<usize> =
        (0..moved.ops.len()).filter(|&i| (moved.ops[i].kind, moved.ops[i].unit) == (Kind::Backward, 1)).collect();
    let other = moved.ops[backward[0]].slot.map(|slot| 1 - slot);
    backward.iter().for_each(|&op| moved.ops[op].slot = other);
    let error = check(&facts, &moved, Some(&first)).unwrap_err().to_string();
    assert!(error.contains("holds (2, 0), not what it reads"), "{error}");
    // Loaded anew elsewhere in between, so that nothing else is wrong.
    let at = backward[0];
    moved.ops = renumbered(&moved.ops, at, 1);
    for op in &mut moved.ops[at + 1..] {
        op.deps.iter_mut().filter(|dep| !dep.prior && dep.op as usize == at).for_each(|dep| dep.op += 1);
    }
    let mut load = Op::new(at as u32, Kind::Load, 1, Lane::Upload);
    (load.slot, load.priority) = (other, moved.ops[at].priority);
    let computed = moved.ops[..at].iter().rfind(|op| op.lane == Lane::Compute).unwrap().id;
    load.deps = vec![Dep { op: computed, edge: Edge::Issued, prior: false }];
    moved.ops[at] = load;
    moved.ops[at + 1].deps.push(Dep { op: at as u32, edge: Edge::Issued, prior: false });
    let error = check(&facts, &moved, Some(&first)).unwrap_err().to_string();
    assert!(error.contains("computed backward in the slot in which the one that has its weights was"), "{error}");
}

#[test]
fn a_unit_that_is_sent_in_part_is_sent_for_each_group_of_micro_batches() {
    let mut base = request(4, 4);
    route(&mut base, 3);
    (base.requests.slots, base.requests.group) = (Some(9), Some(2));
    let facts = facts(&base);
    for pass in [Pass::Train, Pass::Eval] {
        let (first, good) = Schedule::steady(&facts, Shape::new(pass, 4)).unwrap();
        check(&facts, &good, Some(&first)).unwrap();
        let loads = |unit: u32| -> Vec<u32> {
            good.ops.iter().filter(|op| (op.kind, op.unit) == (Kind::Load, unit)).map(|op| op.micro_batch).collect()
        };
        assert_eq!(loads(3), [0, 2], "although there is a slot for each layer");
        assert_eq!(loads(2).len(), usize::from(pass == Pass::Train));
        assert!(good.leaves(&facts).iter().all(|held| held.unit != 3));
        let mut early = (*good).clone();
        let load = early.ops.iter().position(|op| (op.kind, op.unit) == (Kind::Load, 3)).unwrap();
        let routed = good.ops.iter().find(|op| (op.kind, op.unit, op.micro_batch) == (Kind::Forward, 2, 1)).unwrap().id;
        assert!(good.ops[load].deps.contains(&Dep { op: routed, edge: Edge::Issued, prior: false }));
        early.ops[load].deps.retain(|dep| dep.prior || dep.op != routed);
        let error = check(&facts, &early, Some(&first)).unwrap_err().to_string();
        assert!(error.contains("which weights are sent is known before they are"), "{error}");
    }
}

#[test]
fn each_rule_of_device_updates_is_told_in_words() {
    let mut base = request(4, 2);
    base.requests.updates_on_device = Some(Count::Units(3));
    base.requests.parts = Some(2);
    let facts = facts(&base);
    let device_updates: Vec<u32> = facts.units.iter().map(|u| u.device_update_parts).collect();
    assert_eq!((device_updates.as_slice(), facts.state_buffers), (&[0, 2, 0, 2, 2, 0][..], 3));
    let (first, good) = Schedule::steady(&facts, train(2)).unwrap();
    check(&facts, &good, Some(&first)).unwrap();
    let error = |mutate: &dyn Fn(&mut Vec<Op>)| {
        let mut schedule = (*good).clone();
        mutate(&mut schedule.ops);
        check(&facts, &schedule, Some(&first)).unwrap_err().to_string()
    };
    // Whichever operation of `kind` it is that waits for one of kind `of`, of the pass before where that is a load.
    let forget = |ops: &mut Vec<Op>, kind: Kind, of: Kind| {
        let kinds: Vec<(Kind, bool)> = ops.iter().map(|o| (o.kind, o.state_buffer.is_some())).collect();
        let of = |d: &megatrain_core::schedule::Dep| {
            d.prior == (kind == Kind::Load) && kinds[d.op as usize] == (of, of != Kind::ClipDecision)
        };
        let op = ops.iter_mut().find(|o| o.kind == kind && o.unit != 0 && o.deps.iter().any(of)).unwrap();
        op.deps.retain(|d| !of(d));
    };
    for (words, kind, of) in [
        ("weights are sent only after the update that changes them", Kind::Load, Kind::WriteBackState),
        (
            "a state buffer is not used again before its state has been written back",
            Kind::FetchState,
            Kind::WriteBackState,
        ),
        ("an update follows the clip decision", Kind::FetchState, Kind::ClipDecision),
        (
            "state is fetched before it is updated, and updated before it is written back",
            Kind::Update,
            Kind::FetchState,
        ),
        (
            "state is fetched before it is updated, and updated before it is written back",
            Kind::WriteBackState,
            Kind::Update,
        ),
    ] {
        let error = error(&|ops| forget(ops, kind, of));
        assert!(error.contains(words), "{kind:?} without {of:?}: {error}");
    }
    let early = error(&|ops| ops.iter_mut().filter(|o| o.kind == Kind::FetchState).for_each(|o| o.slab = Some(0)));
    assert!(early.contains("holds (0, 0), not what it reads"), "{early}");
    let twice = error(&|ops| ops.iter_mut().filter(|o| o.kind == Kind::WriteBackState).for_each(|o| o.part = 0));
    assert!(twice.contains("WriteBackState of unit 1, part 0, occurs 2 times"), "{twice}");
    let elsewhere = error(&|ops| {
        let update = ops.iter_mut().find(|o| o.kind == Kind::Update && o.state_buffer.is_some()).unwrap();
        update.lane = Lane::Host;
        ops.iter_mut().flat_map(|o| &mut o.deps).for_each(|d| d.edge = Edge::Complete);
    });
    assert!(elsewhere.contains("updated where its state lives or is fetched to"), "{elsewhere}");
}

#[test]
fn each_rule_of_inputs_on_disk_is_told_in_words() {
    let mut base = request(4, 4);
    // Groups of two, and more inputs than buffers, so that places and buffers are used again.
    (base.requests.inputs_on_disk, base.requests.group, base.budget.disk) = (Some(3), Some(2), 1 << 30);
    let facts = facts(&base);
    assert_eq!(facts.input_buffers, 2);
    let (first, good) = Schedule::steady(&facts, train(4)).unwrap();
    check(&facts, &good, Some(&first)).unwrap();
    let count = |schedule: &Schedule, kind| schedule.ops.iter().filter(|op| op.kind == kind).count();
    assert_eq!([Kind::WriteInput, Kind::ReadInput].map(|kind| count(&good, kind)), [12; 2]);
    assert_eq!([Kind::OffloadActivation, Kind::FetchActivation].map(|kind| count(&good, kind)), [16; 2]);
    let error = |mutate: &dyn Fn(&mut Vec<Op>)| {
        let mut schedule = (*good).clone();
        mutate(&mut schedule.ops);
        check(&facts, &schedule, Some(&first)).unwrap_err().to_string()
    };
    // What is said where an operation of `kind` does not wait for one of kind `of`, unless others imply that it does.
    let forgotten = |kind: Kind, of: Kind| {
        let later = good.ops.iter().filter(|op| op.kind == kind && op.input_buffer.is_some());
        let dep = |op: &Op| op.deps.iter().position(|dep| !dep.prior && good.ops[dep.op as usize].kind == of);
        let mut found = later.filter_map(|op| {
            let mut schedule = (*good).clone();
            schedule.ops[op.id as usize].deps.remove(dep(op)?);
            check(&facts, &schedule, Some(&first)).err().map(|error| error.to_string())
        });
        found.next().unwrap_or_default()
    };
    let copied = "inputs are copied to the host before they are written, and read before they are fetched";
    let again = "a buffer is not used again before its input has been written to disk, or fetched";
    let waits = "activations are on the host, or on disk, before they are fetched or read";
    for (words, kind, of) in [
        (copied, Kind::WriteInput, Kind::OffloadActivation),
        (copied, Kind::FetchActivation, Kind::ReadInput),
        (again, Kind::OffloadActivation, Kind::WriteInput),
        (again, Kind::ReadInput, Kind::FetchActivation),
        (waits, Kind::ReadInput, Kind::WriteInput),
    ] {
        let error = forgotten(kind, of);
        assert!(error.contains(words), "{kind:?} without {of:?}: {error}");
    }
    let twice =
        error(&|ops| ops.iter_mut().filter(|o| o.kind == Kind::ReadInput).for_each(|o| o.kind = Kind::WriteInput));
    assert!(twice.contains("in order") || twice.contains("WriteInput"), "{twice}");
    let elsewhere = error(&|ops| ops.iter_mut().find(|o| o.kind == Kind::ReadInput).unwrap().lane = Lane::Upload);
    assert!(elsewhere.contains("inputs on disk are read on the lane that reads state"), "{elsewhere}");
    let unnamed = error(&|ops| ops.iter_mut().find(|o| o.kind == Kind::WriteInput).unwrap().input_buffer = Some(7));
    assert!(unnamed.contains("WriteInput of unit 1"), "{unnamed}");
    // An evaluation writes nothing and reads nothing.
    let evaluated = Schedule::new(&facts, eval(4), Some(&good), &good.leaves(&facts)).unwrap();
    assert_eq!([Kind::WriteInput, Kind::ReadInput].map(|kind| count(&evaluated, kind)), [0; 2]);
}

#[test]
fn a_unit_is_written_between_two_of_its_updates() {
    let mut base = request(3, 2);
    base.requests.state_on_device = Some(Count::Units(2));
    for (update, device_updates) in [
        (UpdateMode::JustInTime, 0),
        (UpdateMode::Immediate, 0),
        (UpdateMode::JustInTime, 3),
        (UpdateMode::Immediate, 3),
    ] {
        base.update = update;
        base.requests.updates_on_device = Some(Count::Units(device_updates));
        let facts = facts(&base);
        assert_eq!(facts.units.iter().any(|u| u.device_update_parts > 0), device_updates > 0);
        let step = Schedule::new(&facts, train(2), None, &[]).unwrap();
        let good = Schedule::new(&facts, writing(train(2)), Some(&step), &step.leaves(&facts)).unwrap();
        check(&facts, &good, Some(&step)).unwrap();
        let units =
            |s: &Schedule| s.ops.iter().filter(|o| o.kind == Kind::WriteCheckpoint).map(|o| o.unit).collect::<Vec<_>>();
        assert_eq!(units(&good), [0, 1, 2, 3, 4]);
        let refused = |mutate: &dyn Fn(&mut Vec<Op>)| {
            let mut schedule = good.clone();
            mutate(&mut schedule.ops);
            check(&facts, &schedule, Some(&step)).unwrap_err().to_string()
        };
        // Not before the update of the step that it is to hold, whether the host or the device makes that ...
        for unit in [0usize, 4] {
            let error = refused(&|ops| ops[unit].deps.retain(|d| !d.prior));
            assert!(error.contains("Write"), "{error}");
        }
        // ... and not after the next one. (Of layer 3, the first updated on the device under immediate updates: the others follow it
        // through a buffer.)
        for unit in [0u32, 3, 4] {
            let error = refused(&|ops| {
                let others = ops.iter_mut().filter(|o| o.kind != Kind::WriteCheckpoint);
                others.for_each(|o| o.deps.retain(|d| d.prior || d.op != unit));
            });
            assert!(error.contains("Update") || error.contains("WriteBackState"), "{error}");
        }
        let error = refused(&|ops| ops[1].deps.iter_mut().for_each(|d| d.edge = Edge::Issued));
        assert!(error.contains("must wait until it is over"), "{error}");
        let error = refused(&|ops| ops[3].deps.retain(|d| d.prior));
        assert!(error.contains("appended to the files in order"), "{error}");
        let error = refused(&|ops| ops[3].unit = 2);
        assert!(error.contains("written 2 times"), "{error}");
        let error = refused(&|ops| ops[2].lane = Lane::Host);
        assert!(error.contains("lane of files"), "{error}");
        // A pass that does not say so writes nothing, and one that only writes computes nothing.
        let mut silent = good.clone();
        silent.shape.writes = false;
        assert!(check(&facts, &silent, Some(&step)).is_err());
        let alone = Schedule::new(&facts, WRITE, Some(&step), &step.leaves(&facts)).unwrap();
        assert_eq!(units(&alone).len(), alone.ops.len());
        assert_eq!(alone.leaves(&facts), step.leaves(&facts));
        let mut swapped = Schedule::new(&facts, WRITE, None, &[]).unwrap();
        (swapped.ops[2].unit, swapped.ops[3].unit) = (3, 2);
        let error = check(&facts, &swapped, None).unwrap_err().to_string();
        assert!(error.contains("Files holds (1, 0), not what it reads"), "{error}");
        assert!(Schedule::new(&facts, Shape { micro_batches: 1, ..WRITE }, None, &[]).is_err());
    }
}

#[test]
fn layer_major_sends_each_weight_at_most_twice_however_many_micro_batches() {
    let mut request = request(8, 16);
    request.requests.slots = Some(3);
    let facts = facts(&request);
    let schedule = Schedule::new(&facts, train(16), None, &[]).unwrap();
    let loads = |unit| schedule.ops.iter().filter(|o| o.kind == Kind::Load && o.unit == unit).count();
    assert_eq!((0..10).map(loads).collect::<Vec<_>>(), [1, 2, 2, 2, 2, 2, 1, 1, 1, 1]);
    let offloads = schedule.ops.iter().filter(|o| o.kind == Kind::OffloadGrad).count();
    assert_eq!(offloads, 10);
    // With a slot for every layer nothing is loaded for backward.
    request.requests.slots = Some(8);
    let schedule = Schedule::new(&self::facts(&request), train(16), None, &[]).unwrap();
    assert_eq!(schedule.ops.iter().filter(|o| o.kind == Kind::Load).count(), 10);
}

#[test]
fn weights_that_are_there_are_not_sent_again_until_they_change() {
    let mut base = request(4, 2);
    base.requests.slots = Some(4);
    base.units[2].tensors.iter_mut().for_each(|t| t.role = megatrain_core::layout::Role::Frozen);
    let facts = facts(&base);
    let loads = |s: &Schedule| s.ops.iter().filter(|o| o.kind == Kind::Load).map(|o| o.unit).collect::<Vec<_>>();
    let step = Schedule::new(&facts, train(2), None, &[]).unwrap();
    assert_eq!(loads(&step), [0, 1, 2, 3, 4, 5]);
    // After a step, only what is frozen is still as it was.
    let first = Schedule::new(&facts, eval(2), Some(&step), &step.leaves(&facts)).unwrap();
    assert_eq!(loads(&first), [0, 1, 3, 4, 5]);
    let second = Schedule::new(&facts, eval(1), Some(&first), &first.leaves(&facts)).unwrap();
    assert!(loads(&second).is_empty());
    check(&facts, &second, Some(&first)).unwrap();
    // Weights that a step has changed cannot be claimed to be there, nor may a load be left out.
    let mut claimed = step.leaves(&facts);
    claimed.push(megatrain_core::schedule::Resident { unit: 0, slot: None });
    let wrong = Schedule::new(&facts, eval(2), Some(&step), &claimed).unwrap();
    let error = check(&facts, &wrong, Some(&step)).unwrap_err().to_string();
    assert!(error.contains("unit 0 is not on the device"), "{error}");
    // With fewer slots than layers, all but embed and head take turns.
    base.requests.slots = Some(3);
    let facts = self::facts(&base);
    let first = Schedule::new(&facts, eval(2), None, &[]).unwrap();
    let second = Schedule::new(&facts, eval(2), Some(&first), &first.leaves(&facts)).unwrap();
    assert_eq!(loads(&second), [1, 2, 3, 4]);
}

#[test]
fn a_schedule_survives_json() {
    let facts = facts(&request(3, 2));
    let (_, steady) = Schedule::steady(&facts, train(2)).unwrap();
    let text = serde_json::to_string(&*steady).unwrap();
    assert_eq!(serde_json::from_str::<Schedule>(&text).unwrap(), *steady);
}

/// Every way in which one operation can be wrong that leaves the list well-formed, with a name.
fn mutants(op: &Op, facts: &ScheduleInputs) -> Vec<(String, Op)> {
    const KINDS: [Kind; 20] = [
        Kind::Load,
        Kind::Embed,
        Kind::Forward,
        Kind::Loss,
        Kind::Backward,
        Kind::EmbedBackward,
        Kind::OffloadActivation,
        Kind::FetchActivation,
        Kind::WriteInput,
        Kind::ReadInput,
        Kind::OffloadGrad,
        Kind::AccumulateGrad,
        Kind::ClipDecision,
        Kind::FetchState,
        Kind::ReadState,
        Kind::ReadWeights,
        Kind::Update,
        Kind::WriteState,
        Kind::WriteBackState,
        Kind::WriteCheckpoint,
    ];
    let mut mutants = Vec::new();
    let mut with = |what: String, change: &dyn Fn(&mut Op)| {
        let mut mutant = op.clone();
        change(&mut mutant);
        if mutant != *op {
            mutants.push((what, mutant));
        }
    };
    for kind in KINDS {
        with(format!("kind {kind:?}"), &|op| op.kind = kind);
    }
    for lane in Lane::ALL {
        with(format!("lane {lane:?}"), &|op| op.lane = lane);
    }
    for number in [0, 1, op.unit + 1, facts.head(), facts.head() + 1, u32::MAX] {
        with(format!("unit {number}"), &|op| op.unit = number);
    }
    for number in [0, 1, op.micro_batch + 1, facts.micro_batches, u32::MAX] {
        with(format!("micro-batch {number}"), &|op| op.micro_batch = number);
    }
    for number in [0, 1, op.part + 1, u32::MAX] {
        with(format!("part {number}"), &|op| op.part = number);
    }
    with("early".to_owned(), &|op| op.early ^= true);
    type Field = fn(&mut Op) -> &mut Option<u32>;
    let buffers: [(&str, Field, usize); 8] = [
        ("slot", |op| &mut op.slot, facts.slots as usize),
        ("grad", |op| &mut op.grad, facts.shared_grads.len() + 3),
        ("slab", |op| &mut op.slab, facts.shared_slabs.len() + 3),
        ("stage", |op| &mut op.stage, facts.stage_buffers as usize),
        ("state buffer", |op| &mut op.state_buffer, facts.state_buffers as usize),
        ("disk buffer", |op| &mut op.disk_buffer, facts.disk_buffers as usize),
        ("weight buffer", |op| &mut op.weight_buffer, facts.weight_buffers as usize),
        ("input buffer", |op| &mut op.input_buffer, facts.input_buffers as usize),
    ];
    for (name, field, count) in buffers {
        let numbers = [0, 1, 2, count as u32, count as u32 + 7, u32::MAX].map(Some);
        for number in numbers.into_iter().chain([None]) {
            with(format!("{name} {number:?}"), &|op| *field(op) = number);
        }
    }
    mutants
}

/// The list without one operation, or with one twice: what follows is renumbered.
fn renumbered(ops: &[Op], from: usize, by: i64) -> Vec<Op> {
    let mut list: Vec<Op> = ops.to_vec();
    if by > 0 {
        list.insert(from, ops[from].clone());
    } else {
        list.remove(from);
    }
    let moved = |id: u32| if id as usize > from { u32::try_from(i64::from(id) + by).unwrap() } else { id };
    for (index, op) in list.iter_mut().enumerate() {
        op.id = u32::try_from(index).unwrap();
        op.deps.retain(|d| d.prior || by > 0 || d.op as usize != from);
        op.deps.iter_mut().filter(|d| !d.prior).for_each(|d| d.op = moved(d.op));
    }
    list
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_wrong_operation_is_refused(
        request in any_request(), kind in 0u32..4, picks in prop::collection::vec(any::<prop::sample::Index>(), 12),
    ) {
        let facts = facts(&request);
        let m = request.micro_batches;
        let shape = [train(m), writing(train(m)), writing(eval(1)), eval(m)][kind as usize];
        let previous = Schedule::new(&facts, train(m), None, &[]).unwrap();
        let schedule = Schedule::new(&facts, shape, Some(&previous), &previous.leaves(&facts)).unwrap();
        check(&facts, &schedule, Some(&previous)).unwrap();
        for pick in picks {
            let at = pick.index(schedule.ops.len());
            for (what, op) in mutants(&schedule.ops[at], &facts) {
                // Where sums are formed apart, only the last micro-batch rounds its sum into a gradient buffer.
                let original = &schedule.ops[at];
                let unused = original.kind == Kind::Backward
                    && original.micro_batch + 1 < m
                    && facts.units[original.unit as usize].sums_apart;
                if unused && what.starts_with("grad") && op.grad.is_some_and(|g| facts.shared_grads.contains(&g)) {
                    continue;
                }
                let mut mutated = schedule.clone();
                mutated.ops[at] = op;
                let refused = check(&facts, &mutated, Some(&previous)).is_err();
                prop_assert!(refused, "{:?} with {what}", schedule.ops[at]);
            }
            for by in [-1, 1] {
                let mutated = Schedule { ops: renumbered(&schedule.ops, at, by), ..schedule.clone() };
                let refused = check(&facts, &mutated, Some(&previous)).is_err();
                prop_assert!(refused, "{:?} {} times", schedule.ops[at], 1 + by);
            }
            // Two computations of a micro-batch in the other order, each with the other's dependencies.
            let alike = |op: &Op| op.lane == Lane::Compute && op.micro_batch == schedule.ops[at].micro_batch;
            let next = schedule.ops[at + 1..].iter().position(alike).map(|i| at + 1 + i);
            if let Some(next) = next.filter(|_| schedule.ops[at].lane == Lane::Compute) {
                let mut mutated = schedule.clone();
                mutated.ops.swap(at, next);
                let deps = std::mem::take(&mut mutated.ops[at].deps);
                let other = std::mem::replace(&mut mutated.ops[next].deps, deps);
                mutated.ops[at].deps = other;
                (mutated.ops[at].id, mutated.ops[next].id) = (at as u32, next as u32);
                let refused = check(&facts, &mutated, Some(&previous)).is_err();
                prop_assert!(refused, "{:?} after {:?}", schedule.ops[at], schedule.ops[next]);
            }
        }
    }
}

#[test]
fn what_is_claimed_to_be_on_the_device_is_inside_the_plan() {
    let facts = facts(&request(3, 2));
    let first = Schedule::new(&facts, train(2), None, &[]).unwrap();
    let good = Schedule::new(&facts, eval(2), Some(&first), &[]).unwrap();
    check(&facts, &good, Some(&first)).unwrap();
    for (unit, slot) in [(9, None), (u32::MAX, Some(0)), (1, Some(2)), (1, Some(u32::MAX)), (1, None), (0, Some(0))] {
        let resident = vec![megatrain_core::schedule::Resident { unit, slot }];
        let mutated = Schedule { resident, ..good.clone() };
        assert!(check(&facts, &mutated, Some(&first)).is_err(), "unit {unit} in {slot:?}");
    }
    for shape in [train(3), train(0), eval(u32::MAX), Shape { micro_batches: 1, ..WRITE }] {
        assert!(check(&facts, &Schedule { shape, ..good.clone() }, Some(&first)).is_err(), "{shape:?}");
    }
}

#[test]
fn a_large_schedule_is_proved() {
    let mut request = request(80, 256);
    (request.requests.inputs, request.requests.slots) = (Some(megatrain_core::plan::Place::Host), Some(3));
    let facts = facts(&request);
    let (first, second) = Schedule::steady(&facts, train(256)).unwrap();
    // In a twentieth of a second on a quiet machine.
    check(&facts, &second, Some(&first)).unwrap();
    assert!(second.ops.len() > 80_000, "{} operations", second.ops.len());
}
