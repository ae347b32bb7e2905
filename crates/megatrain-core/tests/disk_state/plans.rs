//! What of the state and of the weights a plan puts on disk, what it expects of that, and what it refuses.
use std::sync::Arc;

use megatrain_core::error::{Error, Tier};
use megatrain_core::layout::{Precision, Role};
use megatrain_core::plan::{Budget, Count, DeviceKind, Place, Plan, Request, State, UnitPlan, UpdateMode, plan};
use megatrain_core::store::spill::StateIo;
use megatrain_core::stream::{Engine, Options};

use super::{options, queueing, spilled, sums, with_weights};

#[test]
fn weights_follow_the_state_to_disk_only_where_the_host_is_still_too_small() {
    for update in [UpdateMode::JustInTime, UpdateMode::Immediate] {
        let mut base = Request { requests: Default::default(), ..spilled(update, Precision::Bf16, 0) };
        // Parts small enough that the buffers they pass through do not take what the weights leave.
        base.requests.parts = Some(8);
        base.requests.slabs = (update == UpdateMode::Immediate).then_some(1);
        let with = |units: u32, weights: u32| {
            let mut request = with_weights(&base, weights);
            request.requests.state_on_disk = Some(units);
            request.requests.slabs = (update == UpdateMode::Immediate).then_some(1);
            let plan = plan(&request).unwrap();
            assert_eq!(plan.units.iter().filter(|unit| unit.weights_on_disk).count() as u32, weights);
            assert!(plan.units.iter().all(|unit| !unit.weights_on_disk || unit.state == State::Disk));
            plan
        };
        let count = |plan: &Plan| {
            let of = |is: fn(&&UnitPlan) -> bool| plan.units.iter().filter(is).count();
            (of(|unit| unit.state == State::Disk), of(|unit| unit.weights_on_disk))
        };
        let roomy = plan(&base).unwrap();
        let needs: Vec<Plan> = (0..=5).map(|n| with(n, 0)).chain((1..=5).map(|n| with(5, n))).collect();
        let least = needs.iter().map(|plan| plan.totals.host).min().unwrap();
        let mut last = f64::INFINITY;
        let mut seen = std::collections::BTreeSet::new();
        let steps = (least..roomy.totals.host + 4096).step_by(64 << 10);
        for host in steps.chain(needs.iter().map(|plan| plan.totals.host)).collect::<std::collections::BTreeSet<_>>() {
            let mut request = base.clone();
            request.budget.host = host;
            assert!(megatrain_core::plan::fits(&request).unwrap());
            let found = plan(&request).unwrap();
            found.matches(&request).unwrap();
            assert!(found.totals.host <= host && sums(&found) == (found.totals.host, found.totals.disk));
            let first = needs.iter().find(|plan| plan.totals.host <= host).unwrap();
            assert_eq!(count(&found), count(first), "{update:?}: {host} bytes");
            assert!(found.estimate.expected_step_s <= last * 1.0005, "{update:?}: {host} bytes make it slower");
            last = found.estimate.expected_step_s;
            seen.insert(count(&found));
        }
        assert!(seen.iter().any(|&(units, weights)| units == 5 && weights > 1), "{seen:?}");
        let mut small = base.clone();
        small.budget.host = least - 1;
        assert!(!megatrain_core::plan::fits(&small).unwrap());
        assert!(matches!(plan(&small), Err(Error::DoesNotFit { tier: Tier::Host, .. })));
    }
}

#[test]
fn a_step_with_weights_on_disk_is_expected_to_take_as_long_as_reading_them() {
    for groups in [1, 2] {
        let mut request = with_weights(&spilled(UpdateMode::JustInTime, Precision::Bf16, 5), 5);
        request.requests.group = Some(2 / groups);
        // A disk slower than everything else.
        (request.rates.state_read_gbs, request.rates.state_write_gbs) = (1e-3, 1.0);
        let found = plan(&request).unwrap();
        let image =
            found.items.iter().find(|item| item.tier == Tier::Disk && item.what == "weights").unwrap().bytes / 5;
        let loads = 5 + u64::from(2 * groups - 1);
        let read = found.totals.disk - 5 * 4096 + loads * image;
        let off = found.estimate.step_s / (read as f64 / 1e6) - 1.0;
        assert!(off.abs() < 0.02, "{groups}: {} s for {read} bytes", found.estimate.step_s);
        assert_eq!(found.estimate.bound, "state_read");
        assert_eq!((found.estimate.disk_read, found.estimate.disk_written), (read, found.totals.disk - 5 * 4096));
    }
}

#[test]
fn state_goes_to_disk_only_where_the_host_is_too_small_and_no_more_of_it_than_has_to() {
    for update in [UpdateMode::JustInTime, UpdateMode::Immediate] {
        let base = Request { requests: Default::default(), ..spilled(update, Precision::Bf16, 0) };
        let roomy = plan(&base).unwrap();
        assert_eq!((roomy.totals.disk, roomy.disk_buffers), (0, 0));
        // The least that every number of units needs on the host.
        let with = |units: u32| {
            let mut request = base.clone();
            request.requests.state_on_disk = Some(units);
            request.requests.slabs = (update == UpdateMode::Immediate).then_some(1);
            let plan = plan(&request).unwrap();
            assert_eq!(sums(&plan), (plan.totals.host, plan.totals.disk));
            assert_eq!(plan.units.iter().filter(|unit| unit.state == State::Disk).count() as u32, units);
            plan.totals
        };
        let needs: Vec<_> = (0..=5).map(with).collect();
        let least = needs.iter().map(|totals| totals.host).min().unwrap();
        for host in (least..roomy.totals.host + 4096).step_by(64 << 10).chain(needs.iter().map(|totals| totals.host)) {
            let request = Request { budget: Budget { host, ..base.budget }, ..base.clone() };
            let found = plan(&request).unwrap();
            assert!(found.totals.host <= host);
            let fewest = needs.iter().filter(|totals| totals.host <= host).map(|totals| totals.disk).min().unwrap();
            assert_eq!(found.totals.disk, fewest, "{update:?}: {host} bytes");
        }
        // Without a disk it is the host that is too small; with too small a disk, one budget is named that is enough.
        let mut small = base.clone();
        (small.budget.host, small.budget.disk) = (least, 0);
        assert!(matches!(plan(&small), Err(Error::DoesNotFit { tier: Tier::Host, .. })));
        small.budget.disk = 4096;
        match plan(&small) {
            Err(Error::DoesNotFit { tier: Tier::Disk, needed, .. }) => small.budget.disk = needed,
            Err(Error::DoesNotFit { tier: Tier::Host, needed, .. }) => small.budget.host = needed,
            other => panic!("{other:?}"),
        }
        plan(&small).unwrap();
    }
}

#[test]
fn as_much_state_is_on_disk_as_was_asked_for_also_where_a_card_has_room_for_all() {
    let mut request = Request { requests: Default::default(), ..spilled(UpdateMode::JustInTime, Precision::Bf16, 0) };
    request.device = DeviceKind::Cuda;
    let on_disk = |request: &Request| plan(request).unwrap().units.iter().filter(|u| u.state == State::Disk).count();
    assert_eq!(on_disk(&request), 0);
    for asked in 0..=5 {
        request.requests.state_on_disk = Some(asked);
        assert_eq!(on_disk(&request), asked as usize);
    }
    // Two units on the device leave three.
    request.requests.state_on_device = Some(Count::Units(2));
    let error = plan(&request).unwrap_err().to_string();
    assert!(error.contains("plan.state_on_disk = 5, but only 3 units"), "{error}");
    request.requests.state_on_disk = Some(3);
    assert_eq!(on_disk(&request), 3);
    // What does not train has no state.
    request.units[3].tensors.iter_mut().for_each(|tensor| tensor.role = Role::Frozen);
    let error = plan(&request).unwrap_err().to_string();
    assert!(error.contains("plan.state_on_disk = 3, but only 2 units"), "{error}");
}

#[test]
fn state_on_disk_is_never_updated_on_the_device() {
    for update in [UpdateMode::JustInTime, UpdateMode::Immediate] {
        let mut request = Request { requests: Default::default(), ..spilled(update, Precision::Bf16, 0) };
        request.device = DeviceKind::Cuda;
        request.requests.state_on_device = Some(Count::Units(0));
        // A host so slow that updates on the device are worth their way.
        request.rates.adamw_gparams = 1e-3;
        let updated = |plan: &Plan| plan.units.iter().filter(|unit| unit.update == Place::Device).count();
        assert!(updated(&plan(&request).unwrap()) > 0, "without a disk they pay");
        for asked in 1..=5 {
            request.requests.state_on_disk = Some(asked);
            let found = plan(&request).unwrap();
            assert_eq!(updated(&found), 0, "{update:?}: {asked} units");
            assert_eq!(sums(&found), (found.totals.host, found.totals.disk));
        }
    }
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let request = spilled(UpdateMode::JustInTime, Precision::Bf16, 2);
    let planned = plan(&request).unwrap();
    let device = || Arc::new(queueing(1));
    let error = Engine::new(device(), &request, &planned, &Options::default()).err().unwrap().to_string();
    assert!(error.contains("no folder for it was named"), "{error}");
    let missing = std::env::temp_dir().join("megatrain-no-such-folder");
    let error =
        Engine::new(device(), &request, &planned, &options(&[&missing], StateIo::Auto)).err().unwrap().to_string();
    assert!(error.contains("megatrain-no-such-folder") && error.contains("No such file"), "{error}");
    let mut both = request.clone();
    both.requests.updates_on_device = Some(Count::Units(1));
    let error = plan(&both).unwrap_err().to_string();
    assert!(error.contains("plan.state_on_disk = 2 contradicts plan.updates_on_device"), "{error}");
    let mut more = with_weights(&request, 3);
    let error = plan(&more).unwrap_err().to_string();
    assert!(error.contains("plan.weights_on_disk = 3 contradicts plan.state_on_disk"), "{error}");
    more.requests.state_on_disk = None;
    assert_eq!(plan(&more).unwrap().units.iter().filter(|unit| unit.weights_on_disk).count(), 3);
    more.requests.updates_on_device = Some(Count::Units(1));
    let error = plan(&more).unwrap_err().to_string();
    assert!(error.contains("plan.weights_on_disk = 3 contradicts plan.updates_on_device"), "{error}");
    more.requests.updates_on_device = None;
    more.requests.weights_on_disk = Some(6);
    let error = plan(&more).unwrap_err().to_string();
    assert!(error.contains("plan.weights_on_disk = 6") && error.contains('5'), "{error}");
    // A plan from a file that puts weights where no state is, or names no buffer for them.
    let written = plan(&with_weights(&request, 2)).unwrap();
    let mut wrong = written.clone();
    wrong.units.iter_mut().for_each(|unit| unit.weights_on_disk = true);
    let error = Engine::new(device(), &request, &wrong, &Options::default()).err().unwrap().to_string();
    assert!(error.contains("the weights of unit embed on disk, and its state elsewhere"), "{error}");
    let mut wrong = written;
    wrong.weight_buffers = 0;
    let error = Engine::new(device(), &request, &wrong, &Options::default()).err().unwrap().to_string();
    assert!(error.contains("weight_buffers") && error.contains("weights on disk pass through them"), "{error}");
    let mut many = request;
    many.requests.state_on_disk = Some(6);
    let error = plan(&many).unwrap_err().to_string();
    assert!(error.contains("plan.state_on_disk") && error.contains('6'), "{error}");
}
