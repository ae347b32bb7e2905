"""A run whose first steps show that another plan is faster changes to it, once, and no bit of its numbers changes."""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain import _core
from megatrain.checkpoint.step_folders import step_folder
from megatrain.engine.engine import Engine
from megatrain.engine.runtime import Runtime
from megatrain.engine.step import Pass
from megatrain.errors import DeviceError, DoesNotFit
from megatrain.planning import calibrate
from megatrain.planning import replan as planning
from megatrain.training import loop, replan, setup
from megatrain.training.run_dir import read_metrics, read_status
from megatrain.training.stop import RunStopped
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
def moving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other plan is said to move state, which on the CPU none does."""
    monkeypatch.setattr(planning, "_places", lambda plan: plan["group"])


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
    return [message for message in caplog.messages if "The run changes its plan" in message]


IMMEDIATE = {"update": "immediate", "max_grad_norm": None}


@pytest.mark.usefixtures("slow_link")
@pytest.mark.parametrize(
    ("train", "resume", "moves"),
    [
        ({}, "never", True),
        (IMMEDIATE, "auto", True),
        ({"moments": "8bit", "max_grad_norm": 0.5}, "auto", True),
        ({}, "never", False),
        (IMMEDIATE, "auto", False),
        ({"moments": "8bit", "max_grad_norm": 0.5}, "auto", False),
    ],
)
def test_the_plan_changes_once_and_no_bit_of_the_run_does(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
    kept: Any,
    train: dict[str, Any],
    resume: str,
    moves: bool,
) -> None:
    wanted, last = kept(train=train)
    if moves:
        request.getfixturevalue("moving")
    with caplog.at_level(logging.INFO):
        result = fit(config(tmp_path, train=train, output={"resume": resume, "keep": 9}))
    assert result.step == STEPS
    assert planned(tmp_path / "run")["group"] == 1
    assert losses(tmp_path / "run") == wanted
    assert_bit_equal(step_folder(tmp_path / "run", STEPS), last)
    assert read_status(tmp_path / "run")["state"] == "done"
    saved = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert saved == (["step-14", "step-8"] if moves else ["step-14"])
    (message,) = said(caplog)
    for part in (f"step {replan.WARM_UP + replan.MEASURED}: ", "a step takes 100 s", CHANGED, "6 steps left"):
        assert part in message
    assert ("all state stays where it is" in message) == (not moves)


@pytest.mark.usefixtures("slow_link")
def test_nothing_of_the_plan_before_stays_in_memory_where_state_stays_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, left = Engine.change_plan, []

    def watched(self: Engine, *rest: Any) -> None:
        core, mappings = self.core, _core.mappings_made()
        state = [self.weight(name) for name in self.decoder.tensors]
        change(self, *rest)
        assert core is not self.core
        left.append([sys.getrefcount(core) - 2, _core.mappings_made() - mappings])
        assert all(torch.equal(self.weight(name), one) for name, one in zip(self.decoder.tensors, state, strict=True))

    monkeypatch.setattr(Engine, "change_plan", watched)
    fit(config(tmp_path, output={"save_every": 8}))
    ((references, mappings),) = left
    assert references == 0, "something refers to the core of the plan before"
    assert mappings > 0


@pytest.mark.usefixtures("slow_link")
@pytest.mark.parametrize("failures", [1, 2])
def test_a_change_that_fails_leaves_the_plan_as_it_was_or_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kept: Any, failures: int
) -> None:
    wanted, last = kept()
    make, failed = Runtime._make, []

    def failing(self: Runtime, *rest: Any) -> Any:
        if len(rest) == 4 and len(failed) < failures:
            failed.append(rest)
            raise DeviceError("the card is out of memory")
        return make(self, *rest)

    monkeypatch.setattr(Runtime, "_make", failing)
    if failures == 2:
        stopped_after_two_steps(config(tmp_path))
        with pytest.raises(
            RunStopped, match=r"change of plan after step 10: .*neither to another one nor back.*step-2"
        ):
            fit(config(tmp_path))
        monkeypatch.setattr(Runtime, "_make", make)
        fit(config(tmp_path))
    else:
        fit(config(tmp_path))
        assert "the plan stays as it is: the card is out of memory" in caplog.text
        assert planned(tmp_path / "run")["group"] == 4
        assert said(caplog) == []
    assert losses(tmp_path / "run") == wanted
    assert_bit_equal(step_folder(tmp_path / "run", STEPS), last)


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
    assert f"{estimate[0]['expected_step_s']:.3g} s was expected; measured" in message


def test_rates_that_nobody_measured_are_named_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calibrate, "cached", lambda *_: {})
    with caplog.at_level(logging.INFO):
        fit(config(tmp_path, train={"steps": 9}))
    (message,) = [message for message in caplog.messages if "was expected" in message]
    assert "s was expected by the rates of a usual machine" in message


@pytest.mark.usefixtures("slow_link", "moving")
def test_a_run_that_saves_on_the_way_changes_its_plan_at_a_checkpoint_that_it_writes_anyway(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kept: Any
) -> None:
    wanted, last = kept()
    with caplog.at_level(logging.INFO):
        fit(config(tmp_path, output={"save_every": 9, "keep": 9}))
    (message,) = said(caplog)
    assert "step 9: " in message
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["step-14", "step-9"]
    assert losses(tmp_path / "run") == wanted
    assert_bit_equal(step_folder(tmp_path / "run", STEPS), last)


@pytest.mark.usefixtures("slow_link", "moving")
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


@pytest.mark.usefixtures("slow_link", "moving")
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
@pytest.mark.parametrize(("step", "changed", "moves"), [(2, 0, False), (12, 1, False), (12, 1, True)])
def test_a_run_that_runs_out_of_memory_before_or_after_its_plan_would_change_goes_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
    kept: Any,
    step: int,
    changed: int,
    moves: bool,
) -> None:
    wanted, last = kept()
    if moves:
        request.getfixturevalue("moving")
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
