//! What is requested, refused and kept.

use super::*;

#[test]
fn requests_are_honoured_or_refused_by_name() {
    let base = model(6, 4);
    let of = |change: &dyn Fn(&mut Request)| {
        let mut request = base.clone();
        change(&mut request);
        plan(&request)
    };
    assert_eq!(of(&|r| r.requests.slots = Some(4)).unwrap().slots, 4);
    assert_eq!(of(&|r| r.requests.group = Some(2)).unwrap().group, 2);
    let sizes = |group, large_group| {
        let found = of(&|r| (r.requests.group, r.requests.large_group) = (group, Some(large_group))).unwrap();
        (found.large_group, found.group)
    };
    assert_eq!((sizes(Some(1), 3), sizes(Some(2), 2)), ((3, 1), (0, 2)));
    assert_eq!((sizes(Some(1), 4), sizes(None, 4)), ((0, 4), (0, 4)), "a first group of all is the only one");
    assert_eq!(of(&|r| (r.update, r.requests.slabs) = (UpdateMode::Immediate, Some(3))).unwrap().slabs, 3);
    let offloaded = of(&|r| (r.requests.activation, r.requests.stage_buffers) = (Some(Activation::Offload), Some(4)));
    assert_eq!(offloaded.unwrap().stage_buffers, 4);
    for (words, error) in [
        ("plan.slots must be at least 1", of(&|r| r.requests.slots = Some(0))),
        ("plan.slabs = 3 needs train.update: immediate", of(&|r| r.requests.slabs = Some(3))),
        ("plan.group must be between 1 and micro_batches = 4, not 5", of(&|r| r.requests.group = Some(5))),
        (
            "plan.large_group must be between plan.group = 2 and micro_batches = 4, not 1",
            of(&|r| (r.requests.group, r.requests.large_group) = (Some(2), Some(1))),
        ),
        (
            "plan.large_group must be between plan.group = 1 and micro_batches = 4, not 5",
            of(&|r| r.requests.large_group = Some(5)),
        ),
        ("plan.keep = 7 exceeds the 6 units of layers", of(&|r| r.requests.keep = Some(7))),
        ("contradicts keeping", of(&|r| (r.requests.keep, r.requests.activation) = (Some(1), Some(Activation::Keep)))),
        ("plan.state_on_device = 9", of(&|r| r.requests.state_on_device = Some(Count::Units(9)))),
        (
            "plan.updates_on_device = 7 exceeds the 6 units of layers",
            of(&|r| r.requests.updates_on_device = Some(Count::Units(7))),
        ),
        (
            "plan.updates_on_device = 1 contradicts accumulating",
            of(&|r| (r.requests.updates_on_device, r.requests.accumulate) = (Some(Count::Units(1)), true)),
        ),
        ("plan.stage_buffers must be at least 2", of(&|r| r.requests.stage_buffers = Some(1))),
        ("cannot be accumulated", of(&|r| (r.update, r.requests.accumulate) = (UpdateMode::Immediate, true))),
        ("micro_batches must be at least 1", of(&|r| r.micro_batches = 0)),
        ("rates.h2d_gbs is 0", of(&|r| r.rates.h2d_gbs = 0.0)),
        ("two units are called embed", of(&|r| r.units[1].name = "embed".to_owned())),
        ("precision fp32 sends fp32 gradients", of(&|r| r.precision = Precision::Fp32)),
    ] {
        let error = text(error.unwrap_err());
        assert!(error.contains(words), "{error}");
    }
    let error = text(Request::from_json(r#"{"units": [], "tide": true}"#).unwrap_err());
    assert!(error.contains("tide"), "{error}");
}

#[test]
fn a_request_and_its_plan_survive_json() {
    let request = model(4, 2);
    let text = serde_json::to_string(&request).unwrap();
    assert_eq!(Request::from_json(&text).unwrap(), request);
    let plan = plan(&request).unwrap();
    assert_eq!(serde_json::from_str::<Plan>(&serde_json::to_string(&plan).unwrap()).unwrap(), plan);
    let minimal = r#"{"units": [
        {"name": "embed", "role": "embed", "tensors": [{"name": "e", "shape": [8, 4], "dtype": "f32", "role": "trainable"}]},
        {"name": "layers.0", "role": "layer", "tensors": [{"name": "w", "shape": [4], "dtype": "bf16", "role": "trainable"}]},
        {"name": "head", "role": "head", "tensors": [{"name": "n", "shape": [4], "dtype": "bf16", "role": "frozen"}]}],
        "tied": true, "precision": "bf16", "grad_precision": "bf16", "micro_batches": 1,
        "budget": {"device": 10000000, "host": 10000000}, "device": "cuda",
        "requests": {"state_on_device": "auto", "activation": null}}"#;
    megatrain_core::plan::plan(&Request::from_json(minimal).unwrap()).unwrap();
}

/// GPT-OSS-120B: 36 layers of 3.2 G parameters, of which a token computes with 0.1 G.
fn gpt_oss_120b() -> Request {
    let mut request = Request { device: DeviceKind::Cuda, ..model(36, 4) };
    let (hidden, experts, vocabulary) = (2880, 128, 201_088);
    for unit in &mut request.units {
        let shape = match unit.role {
            UnitRole::Layer => vec![experts, 3 * hidden + 64, hidden],
            _ => vec![vocabulary, hidden],
        };
        unit.tensors[0].shape = shape;
        (unit.kept_bytes, unit.input_bytes, unit.flops) = (12 << 30, 4096 * 5760, 2.0 * 4096.0 * 0.1e9);
    }
    (request.workspace_bytes, request.late_workspace_bytes) = (8 << 30, 12 << 30);
    request.update = UpdateMode::Immediate;
    (request.budget.device, request.budget.host) = (79 << 30, 1 << 42);
    request
}

#[test]
fn nothing_is_refused_while_some_number_of_buffers_fits() {
    let mut request = gpt_oss_120b();
    request.requests.state_on_device = Some(Count::Units(0));
    let roomy = plan(&request).unwrap();
    assert!(roomy.slabs >= 6);
    let slab = 2 * 128 * (3 * 2880 + 64) * 2880;
    // Room for three slabs, for one, and for none.
    for (left, slabs) in [(3, Some(3)), (1, Some(1)), (0, None)] {
        request.budget.host = roomy.totals.host - (u64::from(roomy.slabs) - left) * slab;
        match slabs {
            Some(slabs) => assert_eq!(plan(&request).unwrap().slabs, slabs),
            None => {
                let refused = text(plan(&request).unwrap_err());
                assert!(refused.contains("gradient slabs") && refused.contains("too little"), "{refused}");
            }
        }
    }
    // The state of embed and head has room on the device.
    request.requests.state_on_device = None;
    plan(&request).unwrap();
    // The device's least: one slot, one gradient buffer, inputs on the host.
    (request.budget.host, request.budget.device) = (1 << 42, 1);
    let Error::DoesNotFit { tier: Tier::Device, needed, .. } = plan(&request).unwrap_err() else { panic!() };
    request.budget.device = needed;
    let least = plan(&request).unwrap();
    assert_eq!((least.slots, least.grad_buffers, least.totals.device), (1, 1, needed));
    request.budget.device = needed - 1;
    plan(&request).unwrap_err();
}

#[test]
fn a_refusal_names_the_one_budget_that_is_too_small() {
    let mut request = model(12, 4);
    let roomy = plan(&request).unwrap().totals.device;
    let mut refused = 0;
    for percent in (5..=100).step_by(5) {
        (request.budget.device, request.budget.host) = (roomy * percent / 100, 1 << 40);
        if plan(&request).is_err() {
            continue;
        }
        // With a larger host it fits, so it is the host that is too small.
        request.budget.host = 64 << 20;
        if let Err(error) = plan(&request) {
            let Error::DoesNotFit { tier: Tier::Host, needed, .. } = error else { panic!("{percent}: {error}") };
            request.budget.host = needed;
            plan(&request).unwrap();
            refused += 1;
        }
    }
    assert!(refused > 5, "{refused}");
}

#[test]
fn more_slabs_than_layers_that_use_them_take_no_more_memory() {
    let mut request = Request { device: DeviceKind::Cuda, update: UpdateMode::Immediate, ..model(3, 1) };
    request.requests.state_on_device = Some(Count::Units(0));
    (request.requests.keep, request.requests.slabs) = (Some(3), Some(40));
    let roomy = plan(&request).unwrap();
    assert_eq!(roomy.slabs, 3);
    request.budget.host = roomy.totals.host;
    assert!(fits(&request).unwrap());
    assert_eq!(plan(&request).unwrap().totals, roomy.totals);
    request.budget.host -= 1;
    let Error::DoesNotFit { needed, available, .. } = plan(&request).unwrap_err() else { panic!("another refusal") };
    assert_eq!((needed, available), (roomy.totals.host, request.budget.host));
}

#[test]
fn inputs_on_disk_that_one_group_size_does_not_leave_are_planned_with_another() {
    let mut request = Request { device: DeviceKind::Cuda, ..model(3, 8) };
    request.budget.disk = 1 << 40;
    (request.requests.large_group, request.requests.keep) = (Some(4), Some(2));
    request.requests.inputs_on_disk = Some(2);
    assert!(fits(&request).unwrap());
    let found = plan(&request).unwrap();
    assert_eq!((found.large_group, found.units.iter().filter(|unit| unit.input == Place::Disk).count()), (4, 2));
    request.requests.large_keep = Some(2);
    let said = text(plan(&request).unwrap_err());
    assert_eq!(text(fits(&request).unwrap_err()), said);
    assert!(said.contains("inputs_on_disk"), "{said}");
}

#[test]
fn a_unit_is_sent_in_part_as_an_earlier_layer_routes_to_its_experts() {
    let base = model(6, 4);
    let of = |unit: usize, routed: Routed| {
        let mut request = base.clone();
        request.units[unit].tensors.iter_mut().for_each(|tensor| tensor.shape = vec![8, tensor.numel() / 8]);
        request.units[unit].routed = Some(routed);
        (request.requests.slots, request.requests.state_on_device) = (Some(2), Some(Count::Units(0)));
        plan(&request)
    };
    let good = Routed { by: 2, experts: 8, share: 0.25 };
    let in_part = of(4, good).unwrap().estimate.lanes["upload"];
    assert!(in_part < of(4, Routed { share: 1.0, ..good }).unwrap().estimate.lanes["upload"]);
    for (unit, routed) in [
        (4, Routed { by: 4, ..good }),
        (4, Routed { by: 0, ..good }),
        (4, Routed { by: 99, ..good }),
        (4, Routed { experts: 4, ..good }),
        (7, good),
    ] {
        let error = of(unit, routed).unwrap_err().to_string();
        assert!(error.contains("is to be sent in part") && error.contains("as many rows"), "{unit}: {error}");
    }
    for share in [0.0, -1.0, 1.5, f64::NAN] {
        assert!(of(4, Routed { share, ..good }).unwrap_err().to_string().contains("layers.3: share"));
    }
}

#[test]
fn some_of_the_layers_that_are_not_kept_are_offloaded() {
    let base = model(8, 4);
    let of = |change: &dyn Fn(&mut Request)| {
        let mut request = base.clone();
        (request.requests.keep, request.requests.offload, request.requests.group) = (Some(2), Some(3), Some(4));
        change(&mut request);
        plan(&request)
    };
    let found = of(&|_| {}).unwrap();
    let activations: Vec<Activation> = found.units[1..9].iter().map(|unit| unit.activation).collect();
    let (keep, offload, again) = (Activation::Keep, Activation::Offload, Activation::Recompute);
    assert_eq!(activations, [again, offload, again, offload, again, offload, keep, keep]);
    let none = of(&|r| r.requests.offload = Some(0)).unwrap();
    assert!(found.totals.host > none.totals.host + 3 * 4 * (40 << 20));
    assert!(found.estimate.lanes["compute"] < none.estimate.lanes["compute"]);
    assert!(found.estimate.lanes["download"] > none.estimate.lanes["download"]);
    let all = of(&|r| r.requests.offload = Some(6)).unwrap();
    assert_eq!(all, of(&|r| (r.requests.offload, r.requests.activation) = (None, Some(offload))).unwrap());
    let kept = of(&|r| (r.requests.keep, r.requests.offload) = (None, Some(3))).unwrap();
    assert_eq!(kept.units.iter().filter(|unit| unit.activation == offload).count(), 3, "others are kept or recomputed");
    let large =
        of(&|r| (r.requests.group, r.requests.large_group, r.requests.large_keep) = (Some(1), Some(3), Some(0)));
    let large: Vec<_> = large.unwrap().units[1..9].iter().map(|u| (u.activation, u.large_activation)).collect();
    assert_eq!(large[1], (offload, None));
    assert_eq!((large[6], large[7]), ((keep, Some(offload)), (keep, Some(again))));
    assert!(text(of(&|r| r.requests.offload = Some(7)).unwrap_err()).contains("plan.offload = 7 exceeds the 6 units"));
    for activation in [keep, offload, again] {
        let error = text(of(&|r| (r.requests.keep, r.requests.activation) = (None, Some(activation))).unwrap_err());
        assert!(error.contains("plan.offload") && error.contains("plan.activation"), "{error}");
    }
}

#[test]
fn weights_of_another_unit_are_those_of_an_earlier_layer_that_has_some() {
    let base = model(6, 4);
    let of = |unit: usize, holder: u32, clear: bool| {
        let mut request = base.clone();
        if clear {
            request.units[unit].tensors.clear();
        }
        request.units[unit].weights_of = Some(holder);
        plan(&request)
    };
    of(4, 2, true).unwrap();
    for (unit, holder, clear) in [(4, 4, true), (4, 5, true), (4, 0, true), (4, 99, true), (4, 2, false), (7, 2, true)]
    {
        let error = of(unit, holder, clear).unwrap_err().to_string();
        assert!(error.contains("only a layer without tensors can be"), "{unit} of {holder}: {error}");
    }
    let mut chain = base;
    for (unit, holder) in [(3, 2), (4, 3)] {
        chain.units[unit].tensors.clear();
        chain.units[unit].weights_of = Some(holder);
    }
    assert!(plan(&chain).unwrap_err().to_string().contains("those of an earlier layer that has some"));
}
