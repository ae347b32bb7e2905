"""Smaller optimizer states: the same bits under any plan and after a resume, and losses near those over fp32 state."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatrain import Engine, Trainer
from megatrain.checkpoint.checkpoint import Checkpoint
from megatrain.checkpoint.export import export_checkpoint
from megatrain.errors import CheckpointError, ConfigError
from megatrain.weights.state_format import StateFormat
from support.resume import batches, same, started, state
from support.runs import course, killed_after, settings

STATES: dict[str, dict[str, Any]] = {
    "bf16 moments, fp32 weights": {"precision": "fp32", "moments": "bf16"},
    "8-bit moments, fp32 weights": {"precision": "fp32", "moments": "8bit"},
    "bf16 moments": {"precision": "bf16", "moments": "bf16"},
    "8-bit moments, 24-bit master": {"precision": "bf16", "moments": "8bit", "master": "24bit"},
    "24-bit master": {"precision": "bf16", "master": "24bit"},
}
PLANS: dict[str, dict[str, Any]] = {
    "one thread": {"threads": 1},
    "three threads": {"threads": 3},
    "scalar": {"isa": "scalar"},
    "state on the device": {"state_on_device": 2},
    "groups of one, inputs on the host": {"group": 1, "inputs": "host"},
    "updated on the device": {"updates_on_device": 1, "parts": 2},
    "on disk": {"state_on_disk": 2},
}


def engine(form: dict[str, Any], disk: Path | None = None, plan: dict[str, Any] | None = None, seed: int = 3) -> Engine:
    options = {key: value for key, value in form.items() if key != "precision"}
    memory: dict[str, Any] = {"gpu": "1GiB", "host": "1GiB"}
    if disk is not None:
        memory["nvme"] = {"path": str(disk), "size": "1GiB"}
    return started(form["precision"], True, seed=seed, memory=memory, plan=plan, **options)


@pytest.mark.parametrize("form", STATES.values(), ids=STATES.keys())
def test_no_plan_shows_in_smaller_states(tmp_path: Path, form: dict[str, Any]) -> None:
    def run(plan: dict[str, Any], seed: int = 3) -> dict[str, Any]:
        trained = engine(form, tmp_path if "state_on_disk" in plan else None, plan, seed)
        for step in range(3):
            trained.step(batches(step, 3))
        found = state(trained)
        trained.close()
        return found

    reference = run({})
    for name, plan in PLANS.items():
        assert same(run(plan), reference), name
    assert not same(run({}, seed=4), reference)


@pytest.mark.parametrize("form", STATES.values(), ids=STATES.keys())
def test_a_resumed_run_equals_one_that_never_stopped_and_its_checkpoint_is_smaller(
    tmp_path: Path, form: dict[str, Any]
) -> None:
    straight, first = engine(form), engine(form)
    for step in range(4):
        straight.step(batches(step, 3))
        if step < 2:
            first.step(batches(step, 3))
    first.save(tmp_path / "step-2", step=2)
    saved = Checkpoint.open(tmp_path / "step-2")
    stored = StateFormat(form.get("moments", "fp32"), form.get("master", "32bit"))
    assert saved.state_format() == stored
    tensors = first.decoder.tensors.values()
    expected = sum(stored.bytes(t.shape, form["precision"]) for t in tensors if t.role == "trainable")
    held = [shard for stem, shards in saved.planes().items() if stem != "model" for shard in shards]
    assert sum(shard.size - len(shard.header) for shard in held) == expected
    first.close()
    for plan in ({}, PLANS["on disk"]):
        second = engine(form, tmp_path if plan else None, plan, seed=3)
        second.load(tmp_path / "step-2")
        for step in range(2, 4):
            second.step(batches(step, 3))
        assert same(state(second), state(straight)), plan
        second.close()
    straight.close()


def test_a_checkpoint_of_another_state_is_refused_by_key_and_leaves_the_engine_as_it_was(tmp_path: Path) -> None:
    saved = engine(STATES["8-bit moments, 24-bit master"])
    saved.step(batches(0, 3))
    saved.save(tmp_path / "step-1", step=1)
    masters = {name: value.clone() for name, value in saved.state_dict().items()}
    saved.close()
    for form, message in (
        ({"precision": "bf16"}, r"moments: 8bit, and this run has moments: fp32; go on with train\.moments: 8bit"),
        ({"precision": "bf16", "moments": "8bit"}, r"master: 24bit.* go on with train\.master: 24bit"),
    ):
        other = engine(form)
        before = state(other)
        with pytest.raises(CheckpointError, match=message):
            other.load(tmp_path / "step-1")
        assert same(state(other), before)
        other.close()
    export_checkpoint(tmp_path / "step-1", tmp_path / "out", dtype="fp32")
    again = Engine.from_pretrained(str(tmp_path / "out"), device="cpu", precision="fp32")
    assert same(dict(again.state_dict()), masters)
    again.close()


def test_settings_that_do_not_exist_or_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"moments must be fp32, bf16 or 8bit, not '4bit'"):
        engine({"precision": "fp32", "moments": "4bit"})
    with pytest.raises(ConfigError, match=r"master must be 32bit or 24bit, not 16"):
        engine({"precision": "bf16", "master": 16})
    with pytest.raises(ConfigError, match=r"train\.master: 24bit .* fp32"):
        engine({"precision": "fp32", "master": "24bit"})


def test_losses_stay_near_those_over_fp32_state() -> None:
    """Sixty steps over the same few batches, which the model learns by heart."""

    def losses(form: dict[str, Any]) -> list[float]:
        trained = engine(form)
        found = [trained.step(batches(step % 3, 3)).loss for step in range(60)]
        trained.close()
        return found

    for precision in ("fp32", "bf16"):
        expected = losses({"precision": precision})
        learned = expected[0] - expected[-1]
        assert learned > 1
        for name, form in STATES.items():
            if form["precision"] == precision:
                found = losses(form)
                assert found != expected, name
                assert abs(found[-1] - expected[-1]) < 0.1 * learned, (name, found[-1], expected[-1])


def test_a_killed_run_over_smaller_states_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    def asked(name: str) -> dict[str, Any]:
        return settings(
            tmp_path,
            train={"steps": 30, "precision": "bf16", "moments": "8bit", "master": "24bit"},
            output={"dir": str(tmp_path / name), "export": "never", "save_every": 3},
        )

    killed_after(5, asked("run"), tmp_path)
    command = [sys.executable, "-m", "megatrain", "train", "config.json"]
    again = subprocess.run(
        command, cwd=tmp_path, check=False, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert again.returncode == 0, again.stderr
    assert "resum" in again.stdout + again.stderr
    Trainer(asked("straight")).fit()
    assert course(tmp_path / "run") == course(tmp_path / "straight")
    last = [Checkpoint.open(tmp_path / run / "checkpoints" / "step-30") for run in ("run", "straight")]
    assert last[0].state_format() == StateFormat("8bit", "24bit")
