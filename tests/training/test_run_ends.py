"""How runs end: on a full disk, without memory, by signals. Exit code, sentence and `status.json` say the same."""

import errno
import logging
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatrain.cli import main
from megatrain.engine.engine import Engine, StepOutput
from megatrain.errors import StorageError
from megatrain.planning import calibrate
from megatrain.system import descriptions, hardware
from megatrain.training import async_save, run_dir, setup
from megatrain.training.run_dir import read_metrics, read_status, state_of
from megatrain.training.stop import RunStopped, Stop
from support.runs import settings
from support.trainer import At, fit

CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.00 GiB is free."
)
CPU = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 2147483648 bytes. Error code 12"


def train(config: dict[str, Any], folder: Path) -> int:
    (folder / "config.yml").write_text(yaml.safe_dump(config))
    return main(["train", str(folder / "config.yml")])


def failing_at(step: int, error: Exception) -> Any:
    """`Engine.step`, which raises `error` at the given step."""
    original, taken = Engine.step, 0

    def broken(self: Engine, *arguments: Any, **more: Any) -> StepOutput:
        nonlocal taken
        taken += 1
        if taken == step:
            raise error
        return original(self, *arguments, **more)

    return broken


@pytest.mark.parametrize("name", ["config.yaml", "plan.json"])
def test_a_disk_that_is_full_before_the_first_step_is_exit_4_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    fsync = os.fsync

    def full(file: int) -> None:
        if Path(f"/proc/self/fd/{file}").readlink().name == f".tmp-{name}":
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(file)

    monkeypatch.setattr(os, "fsync", full)
    assert train(settings(tmp_path), tmp_path) == 4
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("megatrain train:")]
    assert f"before step 1: {tmp_path / 'run' / name} cannot be written: No space left on device" in said
    assert "there is no checkpoint yet" in said
    # Nothing of a run was written yet in the first case, so nothing is left of it.
    assert read_status(tmp_path / "run").get("state") == (None if name == "config.yaml" else "failed")


def test_on_a_full_disk_the_status_still_says_that_the_run_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_whole = run_dir.write_whole

    def fill() -> None:
        def full(path: Path, _: Any) -> None:
            raise StorageError(f"{path} cannot be written: No space left on device")

        monkeypatch.setattr(run_dir, "write_whole", full)
        monkeypatch.setattr(run_dir.MetricsFile, "write", full)

    with pytest.raises(RunStopped, match="No space left on device"):
        fit(settings(tmp_path), display=At(3, fill))
    monkeypatch.setattr(run_dir, "write_whole", write_whole)
    status = read_status(tmp_path / "run")
    assert (status["state"], status["step"]) == ("failed", 3)
    assert "No space left on device" in status["reason"]


def test_the_systems_own_word_for_a_full_disk_ends_a_run_like_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "step", failing_at(3, OSError(errno.ENOSPC, "No space left on device", "/spill/file")))
    config = settings(tmp_path, output={"dir": str(tmp_path / "run"), "save_every": 2, "export": "never"})
    with pytest.raises(RunStopped, match=r"step 3: /spill/file cannot be written: No space left on device.*step-2"):
        fit(config)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(CUDA), RuntimeError(CPU)])
def test_memory_that_runs_out_is_exit_4_with_phase_bytes_and_what_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    monkeypatch.setattr(Engine, "step", failing_at(3, error))
    config = settings(tmp_path, output={"dir": str(tmp_path / "run"), "save_every": 2, "export": "never"})
    assert train(config, tmp_path) == 4
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("megatrain train:")]
    assert "step 3: out of memory (an allocation of 2.00 GiB failed; the plan allows torch " in said
    assert "lower plan.micro_batch (now 2)" in said
    assert "data.seq_len (now 32)" in said
    assert str(tmp_path / "run/checkpoints/step-2") in said
    assert "bug" not in said
    status = read_status(tmp_path / "run")
    assert (status["state"], status["step"], status["checkpoint"]) == ("failed", 2, 2)


def test_memory_that_runs_out_in_an_evaluation_or_while_loading_names_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError(CUDA)

    config = settings(tmp_path, eval={"every": 2, "at_start": False})
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "evaluate_metrics", fail)
        assert train(config, tmp_path) == 4
    assert "the evaluation after step 2: out of memory" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(setup, "build_engine", fail)
        assert train(config, tmp_path) == 4
    assert "loading: out of memory (an allocation of 2.00 GiB failed)" in capsys.readouterr().err
    assert read_status(tmp_path / "run")["state"] == "failed"


def test_a_run_that_is_ended_at_once_says_so_and_nothing_is_written_over_it(tmp_path: Path) -> None:
    stop, run = Stop(), tmp_path / "run"
    fit(
        settings(tmp_path), stop=stop, display=At(3, lambda: stop.abandon("ended at once by a second signal (SIGTERM)"))
    )
    status = read_status(run)
    assert (status["state"], status["step"], status["reason"]) == (
        "killed",
        3,
        "ended at once by a second signal (SIGTERM)",
    )
    assert state_of(run) == "killed"
    assert stop.on_abandon is None
    fit(settings(tmp_path))
    assert read_status(run)["state"] == "done", "the next one is its own"


def test_a_requested_save_is_on_the_disk_before_the_next_step_and_the_run_goes_on(tmp_path: Path) -> None:
    stop = Stop()
    result = fit(settings(tmp_path), stop=stop, display=At(3, stop.request_save))
    assert (result.step, result.stopped) == (6, "")
    assert run_dir.steps_in(tmp_path / "run") == [3, 6]


@pytest.mark.parametrize("measured", [True, False])
def test_a_run_says_at_its_start_how_long_a_stop_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, measured: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
    if measured:
        rates = dict.fromkeys(descriptions.UNITS, 2.0) | {"disk_write_gbs": 1e-6}
        assert calibrate.keep(hardware.read(), "cpu", rates) is not None
    with caplog.at_level(logging.INFO, "megatrain"):
        fit(settings(tmp_path))
    (said,) = [record.message for record in caplog.records if record.message.startswith("a stop (Ctrl-C, SIGTERM)")]
    size = sum(path.stat().st_size for path in (tmp_path / "run/checkpoints/step-6").glob("*.safetensors"))
    if measured:
        seconds = int(re.search(r"needs about (\d+) min", said)[1]) * 60
        assert seconds == pytest.approx(size / 1e3, rel=0.3), "at 1 kB/s"
    else:
        assert said.endswith("`megatrain probe` measures how long they take")
    assert "the present step" in said


FALLING_THEN_RISING = {
    "train": {"steps": 40, "batch_size": 2, "lr": 0.3, "schedule": {"name": "constant", "warmup": 0}},
    "eval": {"at_start": False, "every": 1, "early_stop": 3},
}


@pytest.mark.parametrize("keep_best", [True, False])
def test_the_end_of_a_run_says_which_weights_are_exported_and_where_the_best_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keep_best: bool
) -> None:
    sections = FALLING_THEN_RISING | {"eval": FALLING_THEN_RISING["eval"] | {"keep_best": keep_best}}
    config = settings(tmp_path, **sections, output={"dir": str(tmp_path / "run"), "keep": 1, "export": "auto"})
    assert train(config, tmp_path) == 0
    said, run = capsys.readouterr().out, tmp_path / "run"
    status = read_status(run)
    assert 0 < status["best_step"] < status["step"] < 40
    assert f"export {run / 'export'}: the weights of step {status['step']}, the last\n" in said
    assert f"the lowest held-out loss was measured after step {status['best_step']}" in said
    assert (f"megatrain export {run} OUT --step best" in said) is keep_best
    assert ("eval.keep_best: true keeps them" in said) is not keep_best
    assert f"exported the weights of step {status['step']} to" in (run / "log.txt").read_text()
    if keep_best:
        assert main(["export", str(run), str(tmp_path / "best"), "--step", "best"]) == 0


def test_a_run_whose_last_step_is_its_best_says_nothing_of_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(settings(tmp_path, eval={"at_start": True, "every": 3}), tmp_path) == 0
    assert read_status(tmp_path / "run")["best_step"] == 6
    assert "lowest held-out loss" not in capsys.readouterr().out


def test_a_spike_is_logged_with_its_rows_and_marked_in_the_metrics_after_a_resume_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = Engine.step

    def spiking(self: Engine, *arguments: Any, **more: Any) -> StepOutput:
        out = original(self, *arguments, **more)
        if self.num_steps not in (20, 22):
            return out
        return StepOutput(loss=out.loss * 9, grad_norm=out.grad_norm * 99, num_tokens=out.num_tokens)

    monkeypatch.setattr(Engine, "step", spiking)
    config = settings(tmp_path, train={"steps": 24, "batch_size": 4, "lr": 1e-3})
    stop = Stop()
    with caplog.at_level(logging.WARNING, "megatrain"):
        fit(config, stop=stop, display=At(21, lambda: stop.request("SIGTERM")))
        fit(config)
    records = {record["step"]: record for record in read_metrics(tmp_path / "run")}
    assert [step for step, record in records.items() if "spike" in record] == [20, 22]
    assert records[20]["spike"] == ["loss", "gradient norm"]
    said = [record.message for record in caplog.records if "spike" in record.message]
    assert [line.partition(":")[0] for line in said] == ["step 20", "step 22"]
    rows = list(dict.fromkeys(records[20]["rows"]))
    assert f"; rows {', '.join(map(str, rows))} (row {rows[0]} is {tmp_path / 'rows.jsonl'}:" in said[0]


def test_no_thread_of_a_save_outlives_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_save, "_POLL_S", 0.5)  # longer than the save takes, so that the run itself completes it
    assert train(settings(tmp_path), tmp_path) == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "megatrain-save"]
