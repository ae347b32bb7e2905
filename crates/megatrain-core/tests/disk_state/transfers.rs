//! What is read and written: no block twice, by steps and by callers.
use megatrain_core::disk::{Fault, FaultKind};
use megatrain_core::error::Tier;
use megatrain_core::layout::{Dtype, Precision};
use megatrain_core::plan::{Request, State, UpdateMode};
use megatrain_core::schedule::Pass;
use megatrain_core::store::Plane;
use megatrain_core::stream::{Engine, PlaneName};

use super::{Run, spilled, sums, with_weights};

/// Blocks that a step reads and writes of the whole plan's state and weights on disk, weights that are sent not counted.
fn blocks_of_updates(run: &Run) -> u64 {
    let blocks = |bytes: u64| bytes.div_ceil(1 << 20);
    let of = |unit: usize| {
        let elements = run.engine.layouts()[unit].elements;
        let weights = if run.plan.units[unit].weights_on_disk { blocks(2 * elements) } else { 0 };
        blocks(10 * elements) + weights
    };
    (0..run.plan.units.len()).filter(|&unit| run.plan.units[unit].state == State::Disk).map(of).sum()
}

#[test]
fn state_is_read_once_and_written_once_in_a_step_however_many_passes_it_adds_up() {
    for (update, passes) in [(UpdateMode::JustInTime, 1), (UpdateMode::JustInTime, 3), (UpdateMode::Immediate, 1)] {
        let mut request = spilled(update, Precision::Bf16, 4);
        request.requests.accumulate = passes > 1;
        let run = Run::start(&request);
        let (toy, engine) = (&run.toy, &run.engine);
        let of_state: u64 = (0..5)
            .filter(|&unit| run.plan.units[unit].state == State::Disk)
            .map(|unit| 10 * engine.layouts()[unit].elements)
            .sum();
        assert_eq!(of_state, run.plan.totals.disk);
        let blocks = blocks_of_updates(&run);
        assert!(blocks > 4);
        for step in 0..2 {
            for pass in 0..passes {
                toy.begin(engine, Pass::Train, 2, pass > 0).unwrap();
                toy.compute(engine, step).unwrap();
            }
            toy.apply(engine, Some(0.5)).unwrap();
            assert_eq!(run.moved(), [blocks; 2], "{update:?}, {passes} passes");
        }
        if update == UpdateMode::JustInTime {
            toy.spoil.store(true, std::sync::atomic::Ordering::Relaxed);
            toy.begin(engine, Pass::Train, 2, false).unwrap();
            toy.compute(engine, 9).unwrap();
            assert!(toy.apply(engine, Some(0.5)).unwrap().skipped);
            assert_eq!(run.moved(), [0, 0], "a step that is skipped leaves the disk alone");
        }
    }
}

#[test]
fn weights_on_disk_are_read_once_for_each_load_and_once_with_the_state_and_written_once() {
    for (update, group, slots) in [
        (UpdateMode::JustInTime, 2, 2),
        (UpdateMode::JustInTime, 1, 2),
        (UpdateMode::JustInTime, 2, 3),
        (UpdateMode::Immediate, 2, 2),
        (UpdateMode::Immediate, 1, 3),
    ] {
        let mut request = with_weights(&spilled(update, Precision::Bf16, 5), 5);
        (request.requests.group, request.requests.slots) = (Some(group), Some(slots));
        let run = Run::start(&request);
        let (planned, toy, engine) = (&run.plan, &run.toy, &run.engine);
        let updates = blocks_of_updates(&run);
        // Weights of a unit, and a page of what is frozen.
        let image = |unit: usize| (2 * engine.layouts()[unit].elements).div_ceil(1 << 20) + 1;
        let all: u64 = (0..5).map(image).sum();
        // A layer is loaded for forward and for backward of each group, unless one of the slots has it from before.
        let groups = 2 / group;
        let again = u64::from(3 - slots) * u64::from(2 * groups - 1) * image(1);
        for step in 0..3 {
            toy.step(engine, step, Some(0.5)).unwrap();
            assert_eq!(run.moved(), [updates + all + again, updates], "{update:?}, groups of {group}, {slots} slots");
        }
        let bytes = engine.stats().unwrap();
        let images = planned.items.iter().find(|item| item.tier == Tier::Disk && item.what == "weights").unwrap().bytes;
        assert_eq!(planned.totals.disk, sums(planned).1);
        // (Immediate updates fall before or after the decision at which figures are taken.)
        let least = planned.totals.disk - (5 << 12) + images;
        assert!(update == UpdateMode::Immediate || bytes.state_bytes_read >= least);
        // An evaluation reads what it loads and writes nothing; a second one finds embedding and head, and what the slots hold.
        for held in [0, 2] {
            toy.begin(engine, Pass::Eval, 2, false).unwrap();
            toy.compute(engine, 9).unwrap();
            let kept = if held == 0 { 0 } else { image(0) + image(4) + if slots == 3 { 3 * image(1) } else { 0 } };
            let forward: u64 = if group == 1 && slots < 3 { all + again / 3 } else { all };
            assert_eq!(run.moved(), [forward - kept, 0], "{update:?}, groups of {group}, {slots} slots, {held} held");
        }
    }
}

#[test]
fn weights_on_disk_are_read_and_written_by_callers_as_those_in_memory_are() {
    for precision in [Precision::Bf16, Precision::Fp32] {
        let mut request = spilled(UpdateMode::JustInTime, precision, 5);
        for unit in &mut request.units {
            unit.tensors[0].shape = vec![700_001, 3];
            // A frozen tensor of several blocks.
            unit.tensors[1].shape = vec![300_007];
        }
        let in_memory = Request { requests: Default::default(), ..request.clone() };
        let runs = [in_memory, with_weights(&request, 5)].map(|request| Run::start(&request));
        let size = precision.dtype().size() as usize;
        let read = |engine: &Engine, tensor, plane, start, bytes: usize| {
            let mut out = vec![0; bytes];
            engine.read(2, tensor, PlaneName::State(plane), start, &mut out).map(|()| out)
        };
        let same = |tensor, plane, start, bytes| {
            let [one, other] = [0, 1].map(|i| read(&runs[i].engine, tensor, plane, start, bytes).unwrap());
            assert!(one == other, "{precision:?}: {plane:?} of tensor {tensor} from {start}");
        };
        let everything = || {
            for (start, count) in [(0, 2_100_003), (1, 1), (524_287, 3), (600_000, 1_200_001), (2_100_002, 1)] {
                same(0, Plane::Weights, start, count * size);
                same(0, Plane::Master, start, count * 4);
            }
            same(2, Plane::Master, 3, 20 * 4);
            for (start, count) in [(0, 300_007), (262_143, 2), (7, 1)] {
                same(1, Plane::Weights, start, count * 4);
            }
        };
        everything();
        // Pieces of masters, weights and frozen tensors, across blocks and inside one.
        let value = |i: usize| (i % 77) as f32 / 8.0;
        let floats = |count: usize| (0..count).flat_map(|i| value(i).to_le_bytes()).collect::<Vec<u8>>();
        let weights: Vec<u8> = if size == 4 { floats(300_000) } else { vec![0x3f; 600_000] };
        for Run { engine, .. } in &runs {
            let write = |tensor, plane, start, dtype, bytes: &[u8]| {
                engine.write(2, tensor, PlaneName::State(plane), start, dtype, bytes).unwrap();
            };
            write(0, Plane::Master, 524_200, Dtype::F32, &floats(700_000));
            write(0, Plane::Master, 2_000_000, Dtype::Bf16, &[0x3f; 40]);
            write(0, Plane::Weights, 1_500_001, precision.dtype(), &weights);
            write(1, Plane::Weights, 262_000, Dtype::F32, &floats(300));
            let refused = engine.write(2, 1, PlaneName::State(Plane::Weights), 0, Dtype::Bf16, &[0; 2]).unwrap_err();
            assert!(refused.to_string().contains("takes f32, not bf16"), "{refused}");
            let refused = engine.write(2, 0, PlaneName::State(Plane::Master), 0, Dtype::F32, &f32::NAN.to_le_bytes());
            assert!(refused.unwrap_err().to_string().contains("NaN"));
        }
        everything();
        for Run { engine, toy, .. } in &runs {
            toy.step(engine, 0, Some(0.5)).unwrap();
        }
        everything();
        let [one, other] = [0, 1].map(|i| runs[i].toy.state(&runs[i].engine).unwrap());
        assert!(one == other);
        // What the disk returns otherwise is named by its tensor, whoever reads it.
        let Run { engine, disk, .. } = &runs[1];
        disk.arm(vec![Fault { call: 0, kind: FaultKind::FlipBit }]);
        let (tensor, name) = match precision {
            Precision::Bf16 => (0, "weights of layers.1.weight"),
            Precision::Fp32 => (1, "weights of layers.1.scale"),
        };
        let error = read(engine, tensor, Plane::Weights, 0, 8).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("damaged"), "{error}");
    }
}

#[test]
fn a_caller_reads_no_block_of_a_plane_twice_and_writes_each_once() {
    for weights in [0, 5] {
        no_block_twice(weights);
    }
}

fn no_block_twice(weights: u32) {
    let mut request = with_weights(&spilled(UpdateMode::JustInTime, Precision::Bf16, 5), weights);
    for unit in &mut request.units {
        unit.tensors[0].shape = vec![700_001, 3];
    }
    let run = Run::start(&request);
    let engine = &run.engine;
    for plane in [Plane::Master, Plane::Residual, Plane::ExpAvg, Plane::ExpAvgSq] {
        let numel = engine.layouts()[2].tensors[0].spec.numel();
        let (size, dtype) = if plane == Plane::Residual { (2, Dtype::I16) } else { (4, Dtype::F32) };
        let stored = numel * if matches!(plane, Plane::Master | Plane::Residual) { 2 } else { 4 };
        let mut out = vec![0; (numel * size) as usize];
        run.moved();
        engine.read(2, 0, PlaneName::State(plane), 0, &mut out).unwrap();
        // A plane's ends may be inside a block; a master is joined by two blocks of lower halves at a time.
        let blocks = stored.div_ceil(1 << 20) + 1;
        let most = match plane {
            // By windows of half as many elements, of upper halves as well as lower ones.
            Plane::Master if weights > 0 => 2 * (stored.div_ceil(1 << 20) + stored.div_ceil(1 << 20) + 1),
            Plane::Master => blocks + stored.div_ceil(2 << 20),
            _ => blocks,
        };
        let [read, _] = run.moved();
        assert!(read <= most, "{plane:?}: {read} reads of {blocks} blocks");
        engine.write(2, 0, PlaneName::State(plane), 0, dtype, &out).unwrap();
        let [_, written] = run.moved();
        assert!(written <= most, "{plane:?}: {written} writes of {blocks} blocks");
        let mut again = vec![0; out.len()];
        engine.read(2, 0, PlaneName::State(plane), 0, &mut again).unwrap();
        assert!(again == out, "{plane:?}");
    }
}
