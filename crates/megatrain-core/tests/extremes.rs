//! Absurd sizes and counts are refused with a sentence: nothing wraps, panics, aborts or takes minutes.
use megatrain_core::Error;
use megatrain_core::layout::{Precision, TensorSpec, UnitLayout};
use megatrain_core::plan::{Activation, Budget, Count, DeviceKind, Place, Placement, Plan, Request, UpdateMode, plan};
use megatrain_core::schedule::ScheduleInputs;
use megatrain_core::store::{Store, StoreOptions};
use proptest::prelude::*;

mod support;
use support::request;

fn size() -> impl Strategy<Value = u64> {
    prop_oneof![
        Just(0),
        Just(1),
        Just(4095),
        any::<u32>().prop_map(u64::from),
        (31u32..64, -1i64..2).prop_map(|(log2, off)| (1u64 << log2).wrapping_add_signed(off)),
        Just(u64::MAX),
        Just(u64::MAX - 511),
        any::<u64>(),
    ]
}

fn count() -> impl Strategy<Value = u32> {
    prop_oneof![
        0u32..7,
        Just(4096),
        Just(65_536),
        Just(1 << 20),
        Just(1 << 31),
        Just(u32::MAX - 1),
        Just(u32::MAX),
        any::<u32>()
    ]
}

fn any_real() -> impl Strategy<Value = f64> {
    prop_oneof![Just(0.0), Just(-1.0), Just(1e300), Just(f64::NAN), Just(f64::INFINITY), Just(1e-300), Just(0.5)]
}

/// A request of which some numbers, chosen at random, are absurd.
fn absurd() -> impl Strategy<Value = Request> {
    let sizes = prop::collection::vec(prop::option::weighted(0.25, size()), 10);
    let counts = prop::collection::vec(prop::option::weighted(0.2, count()), 8);
    let reals = prop::collection::vec(prop::option::weighted(0.1, any_real()), 4);
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), 0usize..4);
    (sizes, counts, reals, flags).prop_map(|(sizes, counts, reals, (immediate, cuda, host_inputs, at))| {
        let mut r = request(3, 2);
        let set = |to: &mut u64, i: usize| *to = sizes[i].unwrap_or(*to);
        set(&mut r.workspace_bytes, 0);
        set(&mut r.late_workspace_bytes, 1);
        set(&mut r.context_bytes, 2);
        set(&mut r.budget.device, 3);
        set(&mut r.budget.host, 4);
        set(&mut r.units[at].kept_bytes, 5);
        set(&mut r.units[at].input_bytes, 6);
        set(&mut r.units[at].tensors[0].shape[0], 7);
        set(&mut r.units[at].tensors[0].shape[1], 8);
        set(&mut r.units[4].input_bytes, 9);
        r.micro_batches = counts[0].unwrap_or(r.micro_batches);
        let q = &mut r.requests;
        (q.slots, q.stage_buffers, q.parts, q.keep) = (counts[1], counts[2], counts[3], counts[4].or(q.keep));
        (q.group, q.slabs) = (counts[5], counts[6].filter(|_| immediate));
        (q.large_group, q.large_keep) = (counts[1].or(counts[5]), counts[4].filter(|_| host_inputs));
        (q.state_on_device, q.updates_on_device) = (counts[7].map(Count::Units), counts[6].map(Count::Units));
        q.inputs = host_inputs.then_some(Place::Host);
        q.activation = (at == 3).then_some(Activation::Offload);
        if at == 3 {
            q.keep = None;
        }
        r.update = if immediate { UpdateMode::Immediate } else { UpdateMode::JustInTime };
        r.device = if cuda { DeviceKind::Cuda } else { DeviceKind::Cpu };
        r.fragmentation = reals[0].unwrap_or(r.fragmentation);
        r.rates.h2d_gbs = reals[1].unwrap_or(r.rates.h2d_gbs);
        r.rates.adamw_gparams = reals[2].unwrap_or(r.rates.adamw_gparams);
        r.units[at].flops = reals[3].unwrap_or(r.units[at].flops);
        r
    })
}

/// What a request needs at the least, in numbers that cannot wrap.
fn least(request: &Request) -> (u128, u128) {
    let torch = u128::from(request.workspace_bytes) + u128::from(request.context_bytes);
    let numel = |t: &TensorSpec| t.shape.iter().map(|&d| u128::from(d)).product::<u128>();
    let all: u128 = request.units.iter().flat_map(|u| &u.tensors).map(numel).sum();
    (torch, 4 * all)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_plan_is_true_or_refused_whatever_the_numbers(request in absurd()) {
        let budget = request.budget;
        match plan(&request) {
            Ok(plan) => {
                let sum: u128 = plan.items.iter().map(|i| u128::from(i.bytes)).sum();
                prop_assert_eq!(sum, u128::from(plan.totals.device) + u128::from(plan.totals.host));
                prop_assert!(plan.totals.device <= budget.device && plan.totals.host <= budget.host);
                let (device, everywhere) = least(&request);
                prop_assert!(u128::from(plan.totals.device) >= device, "{:?} of {device}", plan.totals);
                prop_assert!(sum >= everywhere, "{sum} of {everywhere}");
                ScheduleInputs::new(&request, &plan).unwrap();
            }
            Err(Error::DoesNotFit { needed, available, .. }) => prop_assert!(needed > available),
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }

    #[test]
    fn a_plan_from_a_file_is_placed_or_refused_whatever_its_numbers(
        counts in prop::collection::vec(prop::option::weighted(0.3, count()), 8), bytes in prop::option::of(size()),
        staged in any::<bool>(),
    ) {
        let mut request = request(3, 2);
        request.requests.inputs = staged.then_some(Place::Host);
        let good = plan(&request).unwrap();
        let mut bad: Plan = serde_json::from_str(&serde_json::to_string(&good).unwrap()).unwrap();
        let fields = [
            &mut bad.slots, &mut bad.slabs, &mut bad.grad_buffers, &mut bad.stage_buffers, &mut bad.state_buffers,
            &mut bad.group, &mut bad.large_group, &mut bad.micro_batches,
        ];
        for (field, number) in fields.into_iter().zip(&counts) {
            *field = number.unwrap_or(*field);
        }
        bad.stage_bytes = bytes.unwrap_or(bad.stage_bytes);
        if Placement::new(&request, &bad).is_ok() {
            ScheduleInputs::new(&request, &bad).unwrap();
        }
        prop_assert!(bad.matches(&request).is_ok() <= (bad.group > 0));
    }
}

#[test]
fn the_sizes_that_once_wrapped_are_refused_with_their_numbers() {
    let refused = |change: &dyn Fn(&mut Request)| {
        let mut request = request(3, 2);
        change(&mut request);
        plan(&request).unwrap_err().to_string()
    };
    let workspace = refused(&|r| r.workspace_bytes = u64::MAX);
    assert!(workspace.contains("workspace_bytes") && workspace.contains("18446744073709551615"), "{workspace}");
    let buffers = refused(&|r| (r.requests.stage_buffers, r.requests.inputs) = (Some(1 << 31), Some(Place::Host)));
    assert!(buffers.contains("plan.stage_buffers") && buffers.contains("2147483648"), "{buffers}");
    let batches = refused(&|r| r.micro_batches = u32::MAX);
    assert!(batches.contains("micro_batches = 4294967295"), "{batches}");
    for unit in [0, 2] {
        let embedding = refused(&|r| r.units[unit].tensors[0] = TensorSpec::trainable("wide", [1 << 40, 1 << 8]));
        assert!(embedding.contains("does not fit") && embedding.contains("TiB"), "{embedding}");
    }
    let device_update = refused(&|r| {
        r.units[2].tensors[0] = TensorSpec::trainable("wide", [1 << 40, 1 << 8]);
        r.requests.updates_on_device = Some(Count::Units(3));
    });
    assert!(device_update.contains("does not fit"), "{device_update}");
    let huge = refused(&|r| {
        r.budget = Budget { device: u64::MAX, host: u64::MAX, disk: 0 };
        r.units.iter_mut().for_each(|u| u.tensors[0] = TensorSpec::trainable("wide", [1 << 58]));
    });
    assert!(huge.contains("2^60"), "{huge}");
}

#[test]
fn a_store_of_more_than_all_memory_is_an_ordinary_error() {
    let unit = |i: usize| {
        UnitLayout::new(format!("u{i}"), vec![TensorSpec::trainable("w", [1 << 58])], Precision::Fp32).unwrap()
    };
    let layouts: Vec<UnitLayout> = (0..40).map(unit).collect();
    let error = Store::new(&layouts, &[true; 40], StoreOptions::default()).err().unwrap();
    assert!(matches!(error, Error::HostMemory { .. }), "{error}");
}
