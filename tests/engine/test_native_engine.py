"""The engine as Python meets it: waiting that can be interrupted, breaking, closing, and memory that outlives it."""

import gc
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain import _core
from support.interrupts import Interrupted

NUMEL = 1000
GROUP = (1e-3, 0.9, 0.999, 1e-8, 0.0)


def request(numel: int = NUMEL, **changes: Any) -> str:
    """Three units of one tensor each."""
    units = [
        {
            "name": name,
            "role": role,
            "tensors": [{"name": f"{name}.weight", "shape": [numel], "dtype": "f32", "role": "trainable", "group": 0}],
            "kept_bytes": 0,
            "input_bytes": 0,
            "flops": 1.0,
        }
        for name, role in (("embed", "embed"), ("layers.0", "layer"), ("head", "head"))
    ]
    whole = {
        "units": units,
        "tied": False,
        "precision": "fp32",
        "grad_precision": "fp32",
        "update": "just_in_time",
        "micro_batches": 1,
        "workspace_bytes": 0,
        "budget": {"device": 1 << 30, "host": 1 << 30},
        "device": "cpu",
    }
    return json.dumps(whole | changes)


def make(
    faults: str | None = None, numel: int = NUMEL, options: dict[str, Any] | None = None, **changes: Any
) -> _core.Engine:
    """An engine on the simulated device."""
    asked = request(numel, **changes)
    chosen = json.dumps({"threads": 1} | (options or {}))
    return _core.Engine(_core.Device.cpu(faults=faults), asked, _core.plan(asked), chosen)


def step(engine: _core.Engine) -> _core.Outcome:
    """One step with gradients of ones."""
    grads = torch.from_dlpack(engine.region("grads"))
    numels = [json.loads(engine.layout())[unit]["tensors"][0]["spec"]["shape"][0] for unit in range(3)]
    engine.begin("train", 1)
    while (op := engine.next()) is not None:
        if op.phase in ("loss", "backward", "embed_backward"):
            assert op.grad is not None
            grads[op.grad : op.grad + 4 * numels[op.unit]].view(torch.float32).fill_(1.0)
        engine.finish(op)
    return engine.apply([GROUP], None)


def master(engine: _core.Engine, unit: int) -> torch.Tensor:
    """A unit's master."""
    out = torch.empty(NUMEL)
    engine.read(unit, 0, "master", out)
    return out


# --- how it waits


def drain_again_and_again(engine: _core.Engine) -> None:
    while True:
        engine.drain()


def test_a_wait_ends_by_an_interrupt_while_updates_go_on(interrupt_after: Callable[[float], None]) -> None:
    engine = make(numel=1 << 23, options={"isa": "scalar"})

    steps = 0

    def interrupted_while_updating() -> bool:
        nonlocal steps
        step(engine)
        steps += 1
        interrupt_after(0.01)
        with pytest.raises(Interrupted):
            drain_again_and_again(engine)
        return any(lane["lane"] == "host" for lane in json.loads(engine.lanes())["lanes"])

    # On a busy machine an interrupt may come too late to find the updates under way, but not each time.
    assert any(interrupted_while_updating() for _ in range(50))
    # The updates went on, and the engine is as good as before.
    engine.drain()
    assert engine.step_count(1, 0) == steps
    assert not step(engine).skipped


def test_setting_up_can_be_interrupted(interrupt_after: Callable[[float], None]) -> None:
    interrupt_after(0.05)
    with pytest.raises(Interrupted):
        _core.probe_host(1 << 30, 1)
    # The work goes on by itself: control came back before it was over.
    threads = {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}
    assert "megatrain-probe" in threads


# --- what breaks


@pytest.mark.parametrize("panic", ["false", "true"], ids=["error", "panic"])
@pytest.mark.parametrize("lost", ["false", "true"], ids=["once", "for good"])  # then closing fails as well
def test_a_failing_call_breaks_the_engine_by_unit_and_operation_and_it_stays_broken(panic: str, lost: str) -> None:
    engine = make(f'{{"fail": [{{"call": "copy_to_host", "nth": 2, "panic": {panic}, "lost": {lost}}}]}}')
    with pytest.raises(_core.EngineBroken, match=r"since offload_grad of unit \S+: .*copy_to_host") as first:
        step(engine)
    for call in (engine.drain, engine.next, lambda: engine.begin("train", 1), lambda: master(engine, 1)):
        with pytest.raises(_core.EngineBroken) as again:
            call()
        assert str(again.value) == str(first.value)
    engine.close()
    gc.collect()
    assert step(make()).grad_norm == pytest.approx((3 * NUMEL) ** 0.5)


def test_a_broken_engine_does_not_stop_the_next_one() -> None:
    engine = make('{"fail": [{"call": "adamw", "nth": 1}]}', requests={"state_on_device": 3})
    step(engine)
    with pytest.raises(_core.EngineBroken, match=r"since update of unit \S+: .*adamw"):
        engine.drain()  # the update fails beneath what follows the step
    del engine
    gc.collect()
    other = make()
    assert step(other).grad_norm == pytest.approx((3 * NUMEL) ** 0.5)


def test_a_refused_pin_is_a_warning_and_changes_nothing() -> None:
    plain, refused = make(), make('{"pin_limit_bytes": 0}')
    assert plain.warnings() == []
    assert len(refused.warnings()) == 1
    for engine in (plain, refused):
        for unit in range(3):
            engine.write(unit, 0, "master", torch.linspace(-1, 1, NUMEL))
        step(engine)
    for unit in range(3):
        assert torch.equal(master(plain, unit), master(refused, unit))


# --- what is refused


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda e: e.next(), "no pass has begun"),
        (lambda e: e.begin("test", 1), "train or eval"),
        (lambda e: e.begin("train", 2), "micro-batch"),
        (lambda e: e.apply([GROUP], None), "no gradients wait"),
        (lambda e: e.region("moments"), "no region"),
        (lambda e: e.read(3, 0, "master", torch.empty(1)), "no unit 3: the model has 3"),
        (lambda e: e.read(0, 1, "master", torch.empty(1)), "no tensor 1: it has 1"),
        (lambda e: e.read(0, 0, "momentum", torch.empty(1)), "momentum"),
        (lambda e: e.read(0, 0, "master", torch.empty(1, dtype=torch.float16)), "float32 is needed"),
        (lambda e: e.read(0, 0, "master", torch.empty(2), NUMEL - 1), "leave a tensor of 1000"),
        (lambda e: e.read(0, 0, "gradient", torch.empty(1)), "no gradient"),
        (lambda e: e.write(0, 0, "master", torch.tensor([float("nan")])), "NaN"),
        (lambda e: e.write(0, 0, "master", torch.tensor([1e300], dtype=torch.float64)), "finite"),
        (lambda e: e.write(0, 0, "gradient", torch.ones(1)), "not written"),
        (lambda e: e.write(0, 0, "master", torch.ones(1, dtype=torch.int32)), "int32|I32|i32"),
    ],
)
def test_misuse_is_a_value_error_that_says_what_was_wrong(call: Callable[[_core.Engine], object], words: str) -> None:
    engine = make()
    before = master(engine, 0)
    with pytest.raises(ValueError, match=words):
        call(engine)
    assert torch.equal(master(engine, 0), before)
    assert not step(engine).skipped


def test_operations_are_finished_in_the_order_they_are_handed_out() -> None:
    engine = make()
    engine.begin("train", 1)
    first = engine.next()
    assert first is not None
    with pytest.raises(ValueError, match="has not been finished"):
        engine.next()
    engine.finish(first)
    with pytest.raises(ValueError, match=r"."):
        engine.finish(first)


@pytest.mark.parametrize(
    ("options", "words"),
    [('{"thread": 1}', "thread"), ('{"threads": 0}', "threads"), ('{"isa": "mmx"}', "mmx"), ("[", "options")],
)
def test_unknown_options_are_refused_by_name(options: str, words: str) -> None:
    asked = request()
    with pytest.raises(ValueError, match=words):
        _core.Engine(_core.Device.cpu(), asked, _core.plan(asked), options)


def test_a_plan_for_another_request_is_refused() -> None:
    plan = _core.plan(request())
    with pytest.raises(ValueError, match="another request"):
        _core.Engine(_core.Device.cpu(), request(precision="bf16", grad_precision="bf16"), plan)


def test_what_does_not_fit_carries_its_sum() -> None:
    with pytest.raises(_core.DoesNotFit) as caught:
        _core.plan(request(budget={"device": 5000, "host": 1 << 24}))
    items = caught.value.items
    assert {"what", "tier", "bytes", "pinned"} == set(items[0])
    device = sum(item["bytes"] for item in items if item["tier"] == "device")
    assert device > 5000
    assert f"{device / 1024:.2f} KiB of device memory are needed" in str(caught.value)


# --- how it ends


def test_regions_outlive_the_engine() -> None:
    engine = make()
    engine.write(0, 0, "master", torch.full((NUMEL,), 0.5))
    step(engine)
    held = {name: torch.from_dlpack(engine.region(name)) for name in ("weights", "grads")}
    engine.close()
    del engine
    gc.collect()
    for region in held.values():
        region.fill_(7)
        assert int(region.sum(dtype=torch.int64)) == 7 * region.numel()


def test_a_region_that_a_plan_does_not_need_is_empty() -> None:
    assert torch.from_dlpack(make().region("stage")).numel() == 0


def test_a_closed_engine_refuses_and_may_be_closed_again() -> None:
    engine = make()
    step(engine)
    engine.close()
    engine.close()
    for call in (engine.drain, engine.next, lambda: master(engine, 0), engine.abandon):
        with pytest.raises((ValueError, _core.MegatrainError), match="closed"):
            call()


def test_an_engine_dropped_in_the_middle_of_a_step_ends_quietly() -> None:
    engine = make()
    engine.begin("train", 1)
    engine.next()
    del engine
    gc.collect()


def test_other_threads_of_python_run_while_the_engine_waits() -> None:
    engine = make(numel=1 << 23, options={"isa": "scalar"})
    step(engine)
    ticks = 0
    stop = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.wait(0.001):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    engine.drain()
    stop.set()
    thread.join()
    assert ticks >= 5
