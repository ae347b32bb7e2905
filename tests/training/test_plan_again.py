"""A run whose plan does not hold goes on under a safer one: once, with the same numbers, and from then on."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import megatrain
from megatrain.checkpoint.step_folders import step_folder
from megatrain.cli import main
from megatrain.engine.step import Pass
from megatrain.errors import StorageError
from megatrain.training.run_dir import RunFolder, read_status
from megatrain.training.stop import RunStopped
from megatrain.training.trainer import Trainer
from support.runs import settings
from support.trainer import assert_bit_equal, fit, losses, stopped_after_two_steps

WORDS = "CUDA out of memory. Tried to allocate 64.00 KiB. GPU 0 has a total capacity of 79.10 GiB"


def limit(monkeypatch: pytest.MonkeyPatch, step: int, allowed: tuple[str, ...] = ("offload", "recompute")) -> list[str]:
    """From a step on, memory suffices only for layers whose activations are treated in an `allowed` way. Returns the
    list of those that failed."""
    forward, failed = Pass._forward, []

    def limited(self: Pass, op: Any) -> None:
        forward(self, op)
        if self._training and self._step + 1 >= step and op.activation not in allowed:
            failed.append(op.activation)
            raise torch.OutOfMemoryError(WORDS)

    monkeypatch.setattr(Pass, "_forward", limited)
    return failed


class Ends(megatrain.Callback):
    """Keeps how the run ended, each time that it is said."""

    def __init__(self) -> None:
        self.results: list[Any] = []

    def on_end(self, run: Any, result: Any) -> None:  # noqa: ARG002
        self.results.append(result)


def corrected(run: Path) -> Any:
    return json.loads((run / "plan.json").read_text()).get("corrected")


@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_step_that_runs_out_of_memory_is_made_up_for_under_a_safer_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: int, resume: str
) -> None:
    plain = settings(tmp_path, output={"dir": str(tmp_path / "plain")}, eval={"every": 2, "at_start": True})
    config = settings(tmp_path, output={"resume": resume}, eval={"every": 2, "at_start": True})
    fit(plain)
    failed = limit(monkeypatch, step)
    ends = Ends()
    with caplog.at_level(logging.INFO):
        result = fit(config, callbacks=[ends])
    assert (result.step, failed) == (6, ["keep"])
    assert ends.results == [result]
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")
    assert_bit_equal(step_folder(tmp_path / "run", 6), step_folder(tmp_path / "plain", 6))
    assert read_status(tmp_path / "run")["state"] == "done"
    (said,) = [message for message in caplog.messages if "Planning again, once" in message]
    for part in (f"step {step}: forward of ", "out of memory (an allocation of 64.00 KiB failed", "plan.activation"):
        assert part in said
    assert corrected(tmp_path / "run")["activation"] == "recompute"
    assert corrected(tmp_path / "run")["more_workspace"] == 64 << 10


def test_layers_that_do_not_run_whole_are_halved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Activations are recomputed already, one micro-batch at a time, as the configuration asks."""
    asked = {"activation": "recompute", "group": 1}
    fit(settings(tmp_path, output={"dir": str(tmp_path / "plain")}, plan=asked))
    forward, failed = Pass._forward, []

    def limited(self: Pass, op: Any) -> None:
        forward(self, op)
        if self._training and self._step + 1 >= 3 and self._templates.decoder.units[op.unit].half is None:
            failed.append(op.unit)
            raise torch.OutOfMemoryError(WORDS)

    monkeypatch.setattr(Pass, "_forward", limited)
    with caplog.at_level(logging.INFO):
        assert fit(settings(tmp_path, plan=asked)).step == 6
    assert failed == [1]
    assert "plan.fragments: halves" in caplog.text
    assert corrected(tmp_path / "run")["fragments"] == "halves"
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")
    assert_bit_equal(step_folder(tmp_path / "run", 6), step_folder(tmp_path / "plain", 6))


def test_a_resumed_run_is_planned_with_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings(tmp_path)
    failed = limit(monkeypatch, 1)
    stopped_after_two_steps(config)
    assert failed == ["keep"]
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert fit(config).step == 6
    assert failed == ["keep"]
    assert not [message for message in caplog.messages if "Planning again" in message]
    plan = json.loads((tmp_path / "run/plan.json").read_text())
    assert [unit["activation"] for unit in plan["units"][1:-1]] == ["recompute", "recompute"]


def test_a_second_failure_ends_the_run_with_its_last_step_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = limit(monkeypatch, 3, allowed=())
    ends = Ends()
    with pytest.raises(RunStopped, match=r"step 3: forward of .*out of memory.*the last good checkpoint is .*step-2"):
        fit(settings(tmp_path), callbacks=[ends])
    assert (failed, ends.results) == (["keep", "recompute"], [None])
    status = read_status(tmp_path / "run")
    assert (status["state"], status["step"]) == ("failed", 2)


def test_a_stop_while_it_is_planned_again_names_the_checkpoint_of_the_steps_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limit(monkeypatch, 4)
    explain = Trainer._explain

    def interrupted(self: Trainer, *arguments: Any) -> None:
        explain(self, *arguments)
        self.stop.request("SIGTERM")

    monkeypatch.setattr(Trainer, "_explain", interrupted)
    (tmp_path / "config.json").write_text(json.dumps(settings(tmp_path)))
    assert main(["train", str(tmp_path / "config.json")]) == 3
    newest = step_folder(tmp_path / "run", 3)
    said = f"while it loaded, so there is nothing new to save; the newest checkpoint is {newest}\n"
    assert capsys.readouterr().err.endswith(f"megatrain train: stopped by SIGTERM {said}")
    assert read_status(tmp_path / "run")["state"] == "stopped"


def test_an_evaluation_that_runs_out_of_memory_is_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = settings(tmp_path, output={"dir": str(tmp_path / "plain")}, eval={"every": 2, "at_start": False})
    wanted = fit(plain)
    score, failed = Pass._loss, []

    def failing(self: Pass, op: Any) -> None:
        score(self, op)
        if not self._training and not failed:
            failed.append(op)
            raise torch.OutOfMemoryError(WORDS)

    monkeypatch.setattr(Pass, "_loss", failing)
    found = fit(settings(tmp_path, eval={"every": 2, "at_start": False}))
    assert len(failed) == 1
    assert (found.eval_loss, found.best_step) == (wanted.eval_loss, wanted.best_step)
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    evaluated = [json.loads(line) for line in (tmp_path / "plain/metrics.jsonl").read_text().splitlines()]
    assert records[2]["eval_loss_before"] == evaluated[1]["eval_loss"]


def test_samples_that_run_out_of_memory_are_left_out_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward, failed = Pass._forward, []

    def failing(self: Pass, op: Any) -> None:
        forward(self, op)
        if not self._training and not failed:
            failed.append(op)
            raise torch.OutOfMemoryError(WORDS)

    monkeypatch.setattr(Pass, "_forward", failing)
    fit(settings(tmp_path, eval={"samples": {"every": 3, "prompts": ["a"], "max_new_tokens": 2}}))
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record.get("samples")] == [6]
    assert "step 3: its samples are left out" in caplog.text


def test_a_disk_without_room_for_the_correction_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, 3)

    def full(*_: Any) -> None:
        raise StorageError("plan.json cannot be written: No space left on device")

    monkeypatch.setattr(RunFolder, "correct_plan", full)
    ends = Ends()
    with pytest.raises(RunStopped, match=r"step 3: .*out of memory.*plan\.json cannot be written.*step-2"):
        fit(settings(tmp_path), callbacks=[ends])
    assert ends.results == [None]
    status = read_status(tmp_path / "run")
    assert (status["state"], status["step"]) == ("failed", 2)
    assert "No space left on device" in status["reason"]


def test_immediate_updates_that_cannot_be_taken_back_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backward, failed = Pass._embed_backward, []

    def failing(self: Pass, op: Any) -> None:
        backward(self, op)
        if self._step == 2:
            failed.append(op)
            raise torch.OutOfMemoryError(WORDS)

    monkeypatch.setattr(Pass, "_embed_backward", failing)
    config = settings(tmp_path, train={"update": "immediate", "max_grad_norm": None})
    with pytest.raises(RunStopped, match=r"step 3: embed backward of .*out of memory.*there is no checkpoint yet"):
        fit(config)
    assert len(failed) == 1
    assert "the run cannot begin again under a safer plan: " in caplog.text


def test_what_the_configuration_asks_for_is_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = limit(monkeypatch, 3)
    asked = {"micro_batch": 2, "activation": "keep", "group": 1}
    with pytest.raises(RunStopped, match="out of memory"):
        fit(settings(tmp_path, plan=asked))
    assert failed == ["keep"]
    assert corrected(tmp_path / "run") is None
