"""A pass that runs out of memory: what the error says, and that nothing of the step remains."""

import re
from typing import Any

import pytest
import torch

import megatrain
from megatrain.engine.out_of_memory import OutOfMemory
from megatrain.engine.step import Pass
from support.reference import assert_unchanged, batches, build, engine, weights

WORDS = "CUDA out of memory. Tried to allocate 3.00 MiB. GPU 0 has a total capacity of 79.10 GiB"


def fail_once(monkeypatch: pytest.MonkeyPatch, phase: str, unit: int, micro_batch: int) -> None:
    """Lets torch run out of memory the first time that this is computed, after its work has been done."""
    compute, failed = getattr(Pass, f"_{phase}"), []

    def limited(self: Pass, op: Any) -> None:
        compute(self, op)
        if (op.unit, op.micro_batch) == (unit, micro_batch) and not failed:
            failed.append(op)
            raise torch.OutOfMemoryError(WORDS)

    monkeypatch.setattr(Pass, f"_{phase}", limited)


@pytest.mark.parametrize(
    ("phase", "unit", "words"),
    [
        ("embed", 0, "embed of embed, micro-batch 1"),
        ("forward", 2, "forward of model.layers.1, micro-batch 1"),
        ("loss", 5, "loss of head, micro-batch 1"),
        ("backward", 2, "backward of model.layers.1, micro-batch 1"),
        ("embed_backward", 0, "embed backward of embed, micro-batch 1"),
    ],
)
def test_phase_unit_and_bytes_are_named_and_nothing_of_the_step_remains(
    monkeypatch: pytest.MonkeyPatch, phase: str, unit: int, words: str
) -> None:
    ours, twin = engine(build("gpt2", attn_pdrop=0.1)), engine(build("gpt2", attn_pdrop=0.1))
    assert ours.step(batches(2)) == twin.step(batches(2))
    before = weights(ours)
    fail_once(monkeypatch, phase, unit, 1)
    with pytest.raises(OutOfMemory) as raised:
        ours.step(batches(2, seed=1))
    error = raised.value
    assert error.operation == words.replace("model.layers", ours.decoder.units[1].name.rpartition(".")[0])
    assert error.wanted == error.shortfall == 3 << 20
    assert error.planned == sum(i["bytes"] for i in ours.plan["items"] if i["what"].endswith("(torch)"))
    for part in (error.operation, "an allocation of 3.00 MiB failed", "the plan allows torch", "'recompute'"):
        assert part in str(error)
    assert isinstance(error, torch.OutOfMemoryError)
    assert isinstance(error, megatrain.MegatrainError)
    assert_unchanged(ours, before)
    assert ours.num_steps == 1
    assert ours.step(batches(2, seed=1)) == twin.step(batches(2, seed=1))  # dropout included
    for name in ours.decoder.tensors:
        assert torch.equal(ours.weight(name), twin.weight(name)), name


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({}, ["plan={'activation': 'recompute'}"]),
        ({"activation": "recompute"}, []),
        ({"activation": "recompute", "mlp_tiles": 2}, ["plan={'mlp_tiles': 4}"]),
        ({"mlp_tiles": 2}, ["plan={'activation': 'recompute'}", "plan={'mlp_tiles': 4}"]),
    ],
)
def test_only_what_can_be_changed_is_advised(
    monkeypatch: pytest.MonkeyPatch, plan: dict[str, Any], said: list[str]
) -> None:
    ours = engine(build(), plan=plan)
    fail_once(monkeypatch, "forward", 2, 0)
    with pytest.raises(OutOfMemory, match=r"Use fewer rows or shorter ones, .*or lower memory=") as raised:
        ours.step(batches(1))
    assert re.findall(r"plan=\{.*?\}", str(raised.value)) == said


def test_an_evaluation_says_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = engine(build())
    fail_once(monkeypatch, "forward", 1, 0)
    with pytest.raises(OutOfMemory, match=r"forward of .*layers\.0, micro-batch 0: out of memory"):
        ours.evaluate(batches(1))
    assert ours.evaluate(batches(1)) > 0


def test_room_that_was_measured_is_planned_for() -> None:
    plain = engine(build(), micro_batch=(2, 32), micro_batches=1)
    roomier = engine(build(), micro_batch=(2, 32), micro_batches=1, plan={"more_workspace": 5 << 20})
    assert roomier.plan["totals"]["device"] - plain.plan["totals"]["device"] == 5 << 20
    with pytest.raises(megatrain.ConfigError, match=r"plan\.more_workspace must be a whole number"):
        engine(build(), plan={"more_workspace": "5GiB"})


def test_what_torch_holds_between_blocks_in_use_is_missing_too() -> None:
    def error(planned: int, in_use: int, held: int) -> OutOfMemory:
        return OutOfMemory("loss of head", planned << 20, in_use << 20, torch.OutOfMemoryError(WORDS), held=held << 20)

    scattered = error(14, 9, 13)
    assert "the plan allows torch 14.00 MiB; 9.00 MiB were in use of 13.00 MiB that it held" in str(scattered)
    assert scattered.shortfall == 2 << 20, "the 13 that it held and the 3 that it wanted are 2 more than 14"
    dense = error(14, 12, 12)
    assert "12.00 MiB were in use)" in str(dense)
    assert dense.shortfall == 1 << 20
    assert error(16, 9, 13).shortfall == 0
