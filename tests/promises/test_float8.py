"""Training with `train.matmul: fp8`: the same bits under any plan and after a resume, and losses near those of bf16."""

import logging
from pathlib import Path
from typing import Any

import pytest

from megatrain import AdamW, Engine
from megatrain.cli import main
from megatrain.config import Config
from megatrain.config.diff import diff
from megatrain.models.decoder import Decoder
from support.fake_core import llama
from support.resume import OPTIMIZER, batches, same, started, state

PLANS: dict[str, dict[str, Any]] = {
    "kept": {"activation": "keep"},
    "recomputed": {"activation": "recompute", "inputs": "host", "poison": True},
    "offloaded, a micro-batch at a time": {"activation": "offload", "group": 1, "poison": True},
    "state on the device": {"state_on_device": 2},
}


def engine(matmul: str, plan: dict[str, Any] | None = None, freeze: tuple[str, ...] = ()) -> Engine:
    return Engine(
        Decoder.from_config(llama(True), precision="bf16", matmul=matmul, freeze=freeze),
        optimizer=AdamW(**OPTIMIZER),
        max_grad_norm=0.5,
        device="cpu",
        seed=3,
        micro_batch=(2, 12),
        micro_batches=3,
        memory={"gpu": "1GiB", "host": "1GiB"},
        plan=plan,
    )


@pytest.mark.parametrize("freeze", [(), ("*.q_proj.*", "*.mlp.*")], ids=["all trained", "part frozen"])
def test_no_plan_shows(freeze: tuple[str, ...]) -> None:
    found = {}
    for name, plan in PLANS.items():
        ours = engine("fp8", plan, freeze)
        for step in range(3):
            ours.step(batches(step, 3))
        found[name] = state(ours)
        ours.close()
    for name in PLANS:
        assert same(found[name], found["kept"]), name


def test_losses_stay_near_those_of_bf16_and_are_not_the_same() -> None:
    """Sixty steps over the same few batches, which the model learns by heart: at no step twice as far from bf16's loss
    as bf16's ever is from fp32's, and at the end within a twentieth of what was learned."""
    losses = {}
    for kind, ours in (("bf16", engine("bf16")), ("fp8", engine("fp8")), ("fp32", started("fp32", True, seed=3))):
        losses[kind] = [ours.step(batches(step % 3, 3)).loss for step in range(60)]
        ours.close()

    def distance(kind: str) -> float:
        return max(abs(a - b) for a, b in zip(losses[kind], losses["bf16"], strict=True))

    learned = losses["bf16"][0] - losses["bf16"][-1]
    assert learned > 1
    assert losses["fp8"] != losses["bf16"]
    assert distance("fp8") < 2 * distance("fp32")
    assert abs(losses["fp8"][-1] - losses["bf16"][-1]) < 0.05 * learned


def test_a_resumed_run_goes_on_bit_for_bit_and_another_matmul_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    straight, first = engine("fp8"), engine("fp8")
    for step in range(4):
        straight.step(batches(step, 3))
        if step < 2:
            first.step(batches(step, 3))
    assert straight.numerics()["matmul"] == "fp8 (e4m3, a scale per row)"
    first.save(tmp_path / "step-2", step=2)
    first.save_pretrained(tmp_path / "out", dtype="fp32")
    weights = dict(first.state_dict())
    first.close()
    second = engine("fp8")
    second.load(tmp_path / "step-2")
    for step in range(2, 4):
        second.step(batches(step, 3))
    assert same(state(second), state(straight))
    second.close()
    straight.close()
    other = engine("bf16")
    assert "matmul" not in other.numerics()
    with caplog.at_level(logging.WARNING):
        other.load(tmp_path / "step-2")
    assert "matmul: 'fp8 (e4m3, a scale per row)' -> None" in caplog.text
    other.close()
    exported = Engine.from_pretrained(str(tmp_path / "out"), device="cpu", precision="fp32", progress=None)
    assert same(dict(exported.state_dict()), weights)
    exported.close()


def test_a_run_does_not_go_on_with_another_matmul() -> None:
    old, new = (
        Config.from_dict({"model": {"config": llama()}, "train": {"precision": "bf16", "matmul": kind}})
        for kind in ("bf16", "fp8")
    )
    identity, course, place = diff(old, new)
    assert [str(change) for change in identity] == ["train.matmul: bf16 → fp8"]
    assert not course
    assert not place


def test_the_command_line_plans_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "qwen2.5-0.5b", "--machine", "h100", "train.matmul=fp8", "data.seq_len=512"]) == 0
    shown = capsys.readouterr().out
    assert "train.matmul: fp8 in 168 linear layers" in shown
    assert main(["plan", "qwen2.5-0.5b", "--machine", "a100-80gb", "train.matmul=fp8"]) == 2
    assert "compute capability 8.0" in capsys.readouterr().err
