"""Layer inputs that wait on disk for backward (`plan.inputs_on_disk`): bit-equal to a run in memory, and no more than
scratch, of which nothing is left."""

import itertools
import os
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megatrain import Engine
from megatrain.errors import ConfigError, EngineBroken, StorageError
from support.resume import batches, same, started, state

LAYERS = 3
"""Of the model, between embedding and head."""

MODES = {
    "just in time": {},
    "immediate": {"update": "immediate", "max_grad_norm": None},
}
TIERS: dict[str, dict[str, Any]] = {
    "host": {},
    "device": {"state_on_device": 3},
    "visiting": {"updates_on_device": 2, "parts": 2},
    "disk": {"state_on_disk": 5, "weights_on_disk": 2, "parts": 2},
}


def on_disk(folder: Path, plan: dict[str, Any]) -> dict[str, Any]:
    return {"memory": {"gpu": "1GiB", "host": "1GiB", "nvme": {"path": folder}}, "plan": {"slots": 2, **plan}}


def trained(engine: Engine, accumulation: int) -> tuple[list[tuple[float, float]], dict[str, Any]]:
    outs = [engine.step(batches(step, accumulation)) for step in range(3)]
    engine.evaluate(batches(9, 1))
    found = [(out.loss, out.grad_norm) for out in outs], state(engine)
    engine.close()
    return found


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("precision", "tied", "accumulation"), [("bf16", True, 2), ("fp32", False, 3)])
def test_inputs_on_disk_do_not_show(
    tmp_path: Path, tier: str, mode: str, precision: str, tied: bool, accumulation: int
) -> None:
    plain = trained(started(precision, tied, accumulation=accumulation, **MODES[mode]), accumulation)
    cases = itertools.product(("whole", "halves"), ("recompute", "offload"), {1, accumulation}, (1, LAYERS))
    for fragments, activation, group, inputs in cases:
        plan = TIERS[tier] | {"fragments": fragments, "activation": activation, "group": group, "poison": group == 1}
        options = on_disk(tmp_path, plan | {"inputs_on_disk": inputs})
        engine = started(precision, tied, accumulation=accumulation, **options, **MODES[mode])
        assert sum(unit["input"] == "disk" for unit in engine.plan["units"]) == inputs
        assert engine.plan["totals"]["disk"] > 0
        losses, found = trained(engine, accumulation)
        assert losses == plain[0], (fragments, activation, group, inputs)
        assert same(found, plain[1]), (fragments, activation, group, inputs)
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_a_large_group_whose_inputs_wait_on_disk_does_not_show(tmp_path: Path) -> None:
    plain = trained(started("bf16", False, accumulation=3), 3)
    plan = {"group": 1, "large_group": 2, "keep": 2, "large_keep": 1, "inputs_on_disk": 2}
    losses, found = trained(started("bf16", False, accumulation=3, **on_disk(tmp_path, plan)), 3)
    assert losses == plain[0]
    assert same(found, plain[1])


def input_file(folder: Path) -> Path:
    links = {one: os.path.realpath(one) for one in Path("/proc/self/fd").iterdir()}
    held = [one for one, target in links.items() if str(folder) in target and target.endswith("inputs (deleted)")]
    assert len(held) == 1
    return held[0]


def wait_for_data(file: Path) -> None:
    """Until something has been written to a file of zeros."""
    end = time.monotonic() + 60
    while not any(file.read_bytes()):
        assert time.monotonic() < end, "no input was written"
        time.sleep(0.005)


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("mode", MODES)
def test_an_input_that_cannot_be_read_again_costs_its_step_and_nothing_else(
    tmp_path: Path, tier: str, mode: str
) -> None:
    # Both micro-batches pass all layers before the first loss, so inputs are being written by then.
    plan = TIERS[tier] | {"inputs_on_disk": LAYERS, "activation": "recompute", "group": 2}
    options = on_disk(tmp_path, plan)
    plain, engine = (started("bf16", False, accumulation=2, **MODES[mode], **more) for more in ({}, options))
    cut = False

    def loss(hidden: Tensor, head: Any, _: dict[str, Tensor]) -> Tensor:
        if cut:
            if file.stat().st_size > 0:
                wait_for_data(file)
            os.truncate(file, 0)
        return head(hidden).float().square().sum()

    for one in (plain, engine):
        one.step(batches(0, 2), loss_fn=loss)
    before, file, cut = state(engine), input_file(tmp_path), True
    assert any(file.read_bytes()), "inputs were there"
    size = file.stat().st_size
    for length in (0, size):  # what the step before has written is gone
        os.truncate(file, length)
    failed = r"_input of unit layers\.\d failed.* of unit layers\.\d \(micro-batch \d\).*(shortened|damaged)"
    with pytest.raises(StorageError, match=failed):
        engine.step(batches(1, 2), loss_fn=loss)
    cut = False
    try:
        found = state(engine)
    except EngineBroken:  # a unit before that one has been updated
        assert mode == "immediate"
        with pytest.raises(EngineBroken, match="cannot be undone"):
            engine.step(batches(1, 2), loss_fn=loss)
        return
    assert same(found, before), "the state is that of the finished step"
    assert engine.step(batches(1, 2), loss_fn=loss).loss == plain.step(batches(1, 2), loss_fn=loss).loss
    assert same(state(engine), state(plain))
    engine.close()
    plain.close()


@pytest.mark.parametrize(
    ("memory", "plan", "reason"),
    [
        ({}, {"inputs_on_disk": 2}, r"plan\.inputs_on_disk is 2, and no disk is named"),
        ({"nvme": {"path": "."}}, {"inputs_on_disk": -1}, r"plan\.inputs_on_disk"),
        ({"nvme": {"path": "."}}, {"inputs_on_disk": 4}, r"plan\.inputs_on_disk = 4 exceeds the 3 units of layers"),
        (
            {"nvme": {"path": "."}},
            {"inputs_on_disk": 2, "keep": 2},
            r"plan\.inputs_on_disk = 2 exceeds the 1 units of layers that are not kept",
        ),
        (
            {"nvme": {"path": "."}},
            {"inputs_on_disk": 2, "inputs": "device"},
            r"plan\.inputs_on_disk = 2 contradicts plan\.inputs",
        ),
    ],
)
def test_inputs_that_cannot_be_on_disk_are_refused_by_name(
    memory: dict[str, Any], plan: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        started("bf16", False, memory={"gpu": "1GiB", "host": "1GiB", **memory}, plan=plan)
