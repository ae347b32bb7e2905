//! The turn between two steps: the embedding in parts, its rows that were not looked up while the layers run backward. No bit of
//! either shows in the numbers.
use std::sync::Arc;

use megatrain_core::device::sim::{Faults, SimDevice};
use megatrain_core::layout::Precision;
use megatrain_core::plan::{Budget, Count, Request, UpdateMode, plan};
use megatrain_core::schedule::{Kind, Op, Pass, Schedule, ScheduleInputs, Shape, check};
use megatrain_core::stream::{Begin, Engine, Options, PlaneName, Rows};

mod support;
use support::{FOREVER, GROUPS, Toy, ready, request};

const ROWS: [u64; 9] = [0, 1, 2, 7, 500, 501, 502, 999, 1000];

/// An embedding of several norm blocks, so that it can be cut.
fn large(tied: bool) -> Request {
    let mut request = Request { tied, update: UpdateMode::Immediate, ..request(3, 2) };
    request.units[0].tensors[0].shape = vec![45_001, 3];
    request
}

fn of_precision(mut request: Request, precision: usize) -> Request {
    (request.precision, request.grad_precision) =
        [(Precision::Fp32, Precision::Fp32), (Precision::Bf16, Precision::Bf16), (Precision::Bf16, Precision::Fp32)]
            [precision];
    request
}

fn run(
    request: &Request,
    options: &Options,
    seed: u64,
    rows: Option<&[u64]>,
    tell: bool,
    delay: &[&str],
) -> Vec<Vec<u8>> {
    let delay_ms = delay.iter().map(|s| ((*s).to_owned(), 5.0)).collect();
    let device = SimDevice::new(Some(seed), Faults { delay_ms, ..Faults::default() }).queueing_compute();
    let plan = plan(request).unwrap();
    let engine = Engine::new(Arc::new(device.clone()), request, &plan, options).unwrap();
    let mut toy = Toy::new(device, request.clone());
    (toy.rows, toy.give_rows) = (rows.map(<[u64]>::to_vec), tell);
    toy.fill(&engine).unwrap();
    for step in 0..2 {
        toy.step(&engine, step, Some(0.5)).unwrap();
        if step == 0 {
            // What an evaluation in between leaves on the device is not taken for the updated weights.
            toy.begin(&engine, Pass::Eval, 1, false).unwrap();
            toy.compute(&engine, step).unwrap();
        }
    }
    let mut state = toy.state(&engine).unwrap();
    let mut gradient = vec![0; request.units[0].tensors[0].numel() as usize * 4];
    engine.read(0, 0, PlaneName::Gradient, 0, &mut gradient).unwrap();
    state.push(gradient);
    state
}

fn options(poison: bool) -> Options {
    Options { threads: Some(2), huge_pages: false, poison, ..Options::default() }
}

#[test]
fn rows_updated_early_are_those_of_one_update_bit_for_bit() {
    for tied in [false, true] {
        for precision in 0..3 {
            let base = of_precision(Request { tied, update: UpdateMode::Immediate, ..request(3, 2) }, precision);
            let synchronous = Options { synchronous: true, ..options(false) };
            let late = run(&base, &synchronous, 0, Some(&ROWS), false, &[]);
            let just_in_time = Request { update: UpdateMode::JustInTime, ..base.clone() };
            for seed in 0..3 {
                for (group, on_device) in [(2, 0), (1, 0), (2, 1), (2, 5)] {
                    let mut request = base.clone();
                    request.requests.group = Some(group);
                    request.requests.state_on_device = Some(Count::Units(on_device));
                    let delay: &[&str] = [&["download"][..], &["upload"], &["compute"]][seed as usize];
                    let found = run(&request, &options(seed == 1), seed, Some(&ROWS), true, delay);
                    assert!(found == late, "tied {tied}, precision {precision}, seed {seed}, {group}, {on_device}");
                }
            }
            // Told rows just in time are no error and change nothing.
            let clipped = run(&just_in_time, &options(false), 0, Some(&ROWS), false, &[]);
            assert!(run(&just_in_time, &options(true), 1, Some(&ROWS), true, &[]) == clipped);
        }
    }
}

#[test]
fn parts_of_the_ends_do_not_show() {
    for tied in [false, true] {
        for update in [UpdateMode::Immediate, UpdateMode::JustInTime] {
            let base = of_precision(Request { update, ..large(tied) }, 1);
            let whole = Request {
                requests: megatrain_core::plan::Requests { parts: Some(1), ..base.requests.clone() },
                ..base
            };
            let rows: Vec<u64> = (0..45_001).filter(|row| row % 5 == 0 || (21_800..21_900).contains(row)).collect();
            let synchronous = Options { synchronous: true, ..options(false) };
            let reference = run(&whole, &synchronous, 0, Some(&rows), false, &[]);
            for (seed, parts) in [(1, 3), (2, 99)] {
                let mut request = whole.clone();
                request.requests.parts = Some(parts);
                let found = run(&request, &options(seed == 1), seed, Some(&rows), seed != 2, &["download"]);
                assert!(found == reference, "tied {tied}, {update:?}, {parts} parts");
            }
        }
    }
}

#[test]
fn a_large_embedding_is_cut_unless_its_state_is_on_the_device() {
    let mut request = large(true);
    request.budget = Budget { device: 1 << 40, host: 1 << 40 };
    request.units[0].tensors[0].shape = vec![151_936, 2048];
    let parts = |request: &Request| ScheduleInputs::new(request, &plan(request).unwrap()).unwrap().units[0].parts;
    request.requests.state_on_device = Some(Count::Units(0));
    assert_eq!(parts(&request), 16);
    request.requests.state_on_device = Some(Count::Units(1));
    assert_eq!(parts(&request), 1);
    request.requests.state_on_device = Some(Count::Units(0));
    request.units[0].tensors[0].shape = vec![1001, 3];
    assert_eq!(parts(&request), 1);
    request.requests.parts = Some(0);
    assert!(plan(&request).unwrap_err().to_string().contains("plan.parts must be at least 1"));
}

fn schedules(tied: bool, update: UpdateMode) -> (ScheduleInputs, Schedule, Schedule) {
    let mut request = of_precision(Request { update, ..large(tied) }, 1);
    request.requests.parts = Some(3);
    let facts = ScheduleInputs::new(&request, &plan(&request).unwrap()).unwrap();
    let shape = Shape::new(Pass::Train, 2);
    let (first, second) = Schedule::steady(&facts, shape).unwrap();
    (facts, (*first).clone(), (*second).clone())
}

#[test]
fn schedules_in_parts_are_proved_and_no_dependency_can_be_left_out() {
    for tied in [false, true] {
        for update in [UpdateMode::Immediate, UpdateMode::JustInTime] {
            let (facts, previous, schedule) = schedules(tied, update);
            check(&facts, &schedule, Some(&previous)).unwrap();
            let early = schedule.ops.iter().filter(|op| op.early);
            let immediate = usize::from(update == UpdateMode::Immediate);
            assert_eq!(early.count(), immediate * 3 * (1 + usize::from(tied)));
            for op in schedule.ops.iter().filter(|op| op.unit == 0) {
                for dep in op.deps.iter().filter(|_| matches!(op.kind, Kind::OffloadGrad | Kind::Update | Kind::Load)) {
                    let mut mutated = schedule.clone();
                    mutated.ops[op.id as usize].deps.retain(|d| d != dep);
                    let refused = check(&facts, &mutated, Some(&previous)).is_err();
                    assert!(refused || implied(&previous, &schedule, op, *dep), "{op:?} without {dep:?}");
                }
            }
        }
    }
}

/// Whether another dependency of the operation leads to the one in question.
fn implied(previous: &Schedule, schedule: &Schedule, op: &Op, without: megatrain_core::schedule::Dep) -> bool {
    let mut stack: Vec<(bool, u32)> = op.deps.iter().filter(|d| **d != without).map(|d| (d.prior, d.op)).collect();
    while let Some((prior, id)) = stack.pop() {
        if (prior, id) == (without.prior, without.op) {
            return true;
        }
        let ops = if prior { &previous.ops } else { &schedule.ops };
        stack.extend(ops[id as usize].deps.iter().filter(|d| !(prior && d.prior)).map(|d| (prior || d.prior, d.op)));
    }
    false
}

#[test]
fn parts_that_are_missing_doubled_or_out_of_order_are_refused() {
    let (facts, previous, schedule) = schedules(true, UpdateMode::Immediate);
    let refused = |change: &dyn Fn(&mut Op)| {
        let mut mutated = schedule.clone();
        mutated.ops.iter_mut().for_each(change);
        check(&facts, &mutated, Some(&previous)).unwrap_err().to_string()
    };
    let of = |kind: Kind, early: bool| move |op: &Op| op.unit == 0 && op.kind == kind && op.early == early;
    for (kind, early) in
        [(Kind::OffloadGrad, false), (Kind::OffloadGrad, true), (Kind::Update, false), (Kind::Update, true)]
    {
        let again = refused(&|op| op.part = if of(kind, early)(op) { op.part.min(1) } else { op.part });
        assert!(again.contains("occurs"), "{again}");
    }
    let late = refused(&|op| op.early &= op.kind != Kind::Update);
    assert!(late.contains("occurs"), "{late}");
    let beyond = refused(&|op| op.part += u32::from(op.kind == Kind::Load && op.unit == 0 && op.part == 2));
    assert!(beyond.contains("parts"), "{beyond}");
    let swapped = refused(&|op| op.part = if of(Kind::Update, false)(op) { 2 - op.part } else { op.part });
    assert!(swapped.contains("breaks a rule"), "{swapped}");
}

#[test]
fn rows_that_cannot_be_are_refused_before_anything_begins() {
    let request = Request { update: UpdateMode::Immediate, ..request(3, 2) };
    let device = SimDevice::new(None, Faults::default());
    let engine = Engine::new(Arc::new(device), &request, &plan(&request).unwrap(), &options(false)).unwrap();
    let begin = |rows: Vec<u64>| {
        let mut begin = Begin::new(Pass::Train, 2);
        (begin.groups, begin.rows) = (Some(GROUPS.to_vec()), Some(Rows { tensor: 0, rows }));
        begin
    };
    let error = engine.begin(&begin(vec![3, 2]), FOREVER).unwrap_err().to_string();
    assert!(error.contains("embed.weight must be distinct and ascending"), "{error}");
    let error = engine.begin(&begin(vec![1001]), FOREVER).unwrap_err().to_string();
    assert!(error.contains("1001 rows"), "{error}");
    ready(engine.begin(&begin(vec![2, 3]), FOREVER).unwrap());
}
