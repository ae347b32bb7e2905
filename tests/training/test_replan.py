"""A run whose first steps show that another plan is faster changes to it: once, at a checkpoint, and no bit changes."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.checkpoint.step_folders import step_folder
from megatrain.engine.step import Pass
from megatrain.errors import DoesNotFit
from megatrain.planning import calibrate
from megatrain.planning import replan as planning
from megatrain.training import loop, replan, setup
from megatrain.training.run_dir import read_metrics, read_status
from support.runs import MODEL, settings
from support.trainer import assert_bit_equal, fit, losses, stopped_after_two_steps

STEPS = 14
CHANGED = "micro-batches in a group 4 → 1"
LANES = {"compute": 80.0, "upload": 1e-3, "download": 1e-3, "host": 1e-3}
"""Seconds that the lanes of a step are said to be busy."""


def config(folder: Path, name: str = "run", **sections: Any) -> dict[str, Any]:
    """A run of four micro-batches a step, on a device that keeps the activations of about one of them."""
    base = {
        "model": {"config": MODEL | {"num_hidden_layers": 4}},
        "train": {"batch_size": 8, "steps": STEPS},
        "memory": {"gpu": "1300KiB"},
        "output": {"dir": str(folder / name)},
    }
    merged = {key: base.get(key, {}) | sections.get(key, {}) for key in base | sections}
    return settings(folder, **merged)


@pytest.fixture
def slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that found a link so slow that weights must cross it once a step, and steps that find it fast."""
    monkeypatch.setattr(calibrate, "cached", lambda *_: {"h2d_gbs": 1e-4, "d2h_gbs": 1e-4, "matmul_tflops": 0.1})
    measure = loop.measure

    def measured(record: Any, *rest: Any) -> int:
        tokens = measure(record, *rest)
        record.step_s, record.lanes = 100.0, dict(LANES)
        return tokens

    monkeypatch.setattr(loop, "measure", measured)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Trains with the plan kept as it is, and says how such a run ends: losses and the folder of its last step."""

    def run(**sections: Any) -> tuple[list[Any], Path]:
        with monkeypatch.context() as context:
            context.setattr(planning, "LEAST_GAIN", 2.0)
            fit(config(tmp_path, "kept", **sections))
        assert planned(tmp_path / "kept")["group"] == 4
        return losses(tmp_path / "kept"), step_folder(tmp_path / "kept", STEPS)

    return run


def planned(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "plan.json").read_text())
    return found


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if "The plan is changed" in message]


@pytest.mark.usefixtures("slow_link")
@pytest.mark.parametrize(
    ("train", "resume"),
    [
        ({}, "never"),
        ({"update": "immediate", "max_grad_norm": None}, "auto"),
        ({"moments": "8bit", "max_grad_norm": 0.5}, "auto"),
    ],
    ids=["clipped", "immediate", "8bit"],
)
def test_the_plan_changes_once_and_no_bit_of_the_run_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kept: Any, train: dict[str, Any], resume: str
) -> None:
    wanted, last = kept(train=train)
    with caplog.at_level(logging.INFO):
        result = fit(config(tmp_path, train=train, output={"resume": resume}))
    assert result.step == STEPS
    assert planned(tmp_path / "run")["group"] == 1
    assert losses(tmp_path / "run") == wanted
    assert_bit_equal(step_folder(tmp_path / "run", STEPS), last)
    assert read_status(tmp_path / "run")["state"] == "done"
    (message,) = said(caplog)
    for part in (f"step {replan.WARM_UP + replan.MEASURED}: ", "a step takes 100 s", CHANGED, "6 steps left"):
        assert part in message


@pytest.mark.usefixtures("slow_link")
def test_what_steps_took_is_said_and_recorded_once_for_each_plan(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        fit(config(tmp_path, train={"steps": 20}))
    message, after = [message for message in caplog.messages if "was expected" in message]
    estimate = [record for record in read_metrics(tmp_path / "run") if "expected_step_s" in record]
    assert [(record["step"], record["median_step_s"]) for record in estimate] == [(8, 100.0), (16, 100.0)]
    assert len(said(caplog)) == 1
    assert "steps 12 to 16 took 100 s (median)" in after
    assert "steps 4 to 8 took 100 s (median)" in message
    assert "compute 80 s of " in message
    assert f"{estimate[0]['expected_step_s']:.3g} s was expected" in message


@pytest.mark.usefixtures("slow_link")
def test_a_run_that_saves_on_the_way_changes_its_plan_at_a_checkpoint_that_it_writes_anyway(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kept: Any
) -> None:
    wanted, last = kept()
    with caplog.at_level(logging.INFO):
        fit(config(tmp_path, output={"save_every": 5, "keep": 9}))
    (message,) = said(caplog)
    assert "step 10: " in message
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["step-10", "step-14", "step-5"]
    assert losses(tmp_path / "run") == wanted
    assert_bit_equal(step_folder(tmp_path / "run", STEPS), last)


@pytest.mark.usefixtures("slow_link")
@pytest.mark.parametrize("reason", ["the disk is slow", "too little is saved", "steps are disturbed", "keys are set"])
def test_the_plan_stays_where_a_change_does_not_pay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    more: dict[str, Any] = {}
    if reason == "the disk is slow":
        monkeypatch.setattr(planning, "checkpoint_s", lambda *_: 6 * 100.0)
    elif reason == "too little is saved":
        monkeypatch.setitem(LANES, "compute", 10.0)
    elif reason == "steps are disturbed":
        more = {"eval": {"every": 1}}
    else:
        more = {"plan": {"group": 4}}
    with caplog.at_level(logging.INFO):
        assert fit(config(tmp_path, **more)).step == STEPS
    assert said(caplog) == []
    assert planned(tmp_path / "run")["group"] == 4
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == [f"step-{STEPS}"]


@pytest.mark.usefixtures("slow_link")
def test_a_plan_that_cannot_be_made_is_given_up_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kept: Any
) -> None:
    wanted, last = kept()
    build = setup.build_engine

    def failing(model_setup: Any, run_plan: Any, *rest: Any) -> Any:
        if run_plan.plan["group"] == 1:
            raise DoesNotFit("another program has taken 5 GiB")
        return build(model_setup, run_plan, *rest)

    monkeypatch.setattr(setup, "build_engine", failing)
    with caplog.at_level(logging.INFO):
        assert fit(config(tmp_path)).step == STEPS
    assert "the plan of measured rates cannot be used (another program has taken 5 GiB)" in caplog.text
    assert planned(tmp_path / "run")["group"] == 4
    assert losses(tmp_path / "run") == wanted
    assert_bit_equal(step_folder(tmp_path / "run", STEPS), last)


@pytest.mark.usefixtures("slow_link")
@pytest.mark.parametrize(("step", "changed"), [(2, 0), (12, 1)])
def test_a_run_that_runs_out_of_memory_before_or_after_its_plan_would_change_goes_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kept: Any,
    step: int,
    changed: int,
) -> None:
    wanted, last = kept()
    forward, failed = Pass._forward, []

    def failing(self: Pass, op: Any) -> None:
        forward(self, op)
        if self._training and self._step + 1 == step and not failed:
            failed.append(op)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 KiB. GPU 0")

    monkeypatch.setattr(Pass, "_forward", failing)
    with caplog.at_level(logging.INFO):
        assert fit(config(tmp_path)).step == STEPS
    assert len(failed) == len([message for message in caplog.messages if "Planning again, once" in message]) == 1
    assert len(said(caplog)) == changed  # a safer plan recomputes everything, and is kept
    assert planned(tmp_path / "run")["corrected"]["activation"] == "recompute"
    assert losses(tmp_path / "run") == wanted
    assert_bit_equal(step_folder(tmp_path / "run", STEPS), last)


@pytest.mark.usefixtures("slow_link")
def test_a_resumed_run_measures_its_own_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture, kept: Any) -> None:
    wanted, last = kept()
    stopped_after_two_steps(config(tmp_path))
    with caplog.at_level(logging.INFO):
        assert fit(config(tmp_path)).step == STEPS
    (message,) = said(caplog)
    assert "step 10: " in message
    assert losses(tmp_path / "run") == wanted
    assert_bit_equal(step_folder(tmp_path / "run", STEPS), last)
