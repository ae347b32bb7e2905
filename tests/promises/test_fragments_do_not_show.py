"""Layers sent whole or in halves give the same bits, wherever state and activations are, and across checkpoints."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from megatrain import Engine
from support.resume import batches, same, started, state

MODES = {
    "just in time": {},
    "immediate": {"update": "immediate", "max_grad_norm": None},
}
TIERS = {
    "host": {},
    "device": {"state_on_device": 4},
    "visiting": {"updates_on_device": 2, "parts": 2},
    "disk": {"state_on_disk": 4, "parts": 2},
}
FRAGMENTS = ("whole", "halves")


def options(tier: str, fragments: str, disk: Path, **plan: Any) -> dict[str, Any]:
    memory: dict[str, Any] = {"gpu": "1GiB", "host": "1GiB"}
    if tier == "disk":
        memory["nvme"] = {"path": disk}
    return {"memory": memory, "plan": {"poison": True, "fragments": fragments, **TIERS[tier], **plan}}


def trained(engine: Engine, accumulation: int) -> tuple[list[tuple[float, float]], dict[str, Any]]:
    outs = [engine.step(batches(step, accumulation)) for step in range(3)]
    found = [(out.loss, out.grad_norm) for out in outs], state(engine)
    engine.close()
    return found


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("precision", "tied", "accumulation"), [("bf16", True, 2), ("bf16", False, 1), ("fp32", False, 3)]
)
def test_every_tier_and_activation_gives_the_same_bits(
    tmp_path: Path, tier: str, mode: str, precision: str, tied: bool, accumulation: int
) -> None:
    plain = trained(started(precision, tied, accumulation=accumulation, **MODES[mode]), accumulation)
    for fragments, activation, group in itertools.product(
        FRAGMENTS, ("keep", "offload", "recompute"), {1, accumulation}
    ):
        given = options(tier, fragments, tmp_path, activation=activation, group=group, slots=2)
        engine = started(precision, tied, accumulation=accumulation, **given, **MODES[mode])
        assert len(engine.plan["units"]) == (5 if fragments == "whole" else 8)
        losses, found = trained(engine, accumulation)
        assert losses == plain[0], (fragments, activation, group)
        assert same(found, plain[1]), (fragments, activation, group)


@pytest.mark.parametrize("first", FRAGMENTS)
def test_a_checkpoint_does_not_depend_on_it(tmp_path: Path, first: str) -> None:
    straight = started("bf16", True, accumulation=2)
    losses = [straight.step(batches(step, 2)).loss for step in range(6)]
    files = {}
    for fragments in (first, *(other for other in FRAGMENTS if other != first)):
        engine = started("bf16", True, accumulation=2, **options("host", fragments, tmp_path))
        for step in range(3):
            engine.step(batches(step, 2))
        engine.save(tmp_path / fragments, step=3)
        files[fragments] = {
            path.name: path.read_bytes() for path in (tmp_path / fragments).rglob("*") if path.is_file()
        }
        engine.close()
    assert files["whole"] == files["halves"], "every byte of every file"
    other = next(other for other in FRAGMENTS if other != first)
    after = started("bf16", True, seed=77, accumulation=2, **options("host", other, tmp_path))
    after.load(tmp_path / first)
    assert [after.step(batches(step, 2)).loss for step in range(3, 6)] == losses[3:]
    assert same(state(after), state(straight))
    after.close()
    straight.close()


def test_a_larger_step_may_be_planned_in_halves_and_goes_on_with_the_same_bits() -> None:
    plain = started("fp32", False, accumulation=1, micro_batch=None, micro_batches=None)
    wanted = [plain.step(batches(step, 1 + step)).loss for step in range(3)]
    engine = started("fp32", False, accumulation=1, micro_batch=None, micro_batches=None)
    found = [engine.step(batches(0, 1)).loss]
    engine._runtime.settings["fragments"] = "halves"
    found += [engine.step(batches(step, 1 + step)).loss for step in (1, 2)]
    assert len(engine.decoder.units) == 8
    assert found == wanted
    assert same(state(engine), state(plain))
