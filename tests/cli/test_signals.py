"""Signals to a run in a process of its own: the first saves the last finished step, the second ends it. And a reader of
its output that leaves, with a signal or without."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from megatrain.checkpoint import checkpoint
from megatrain.cli import main
from megatrain.training.run_dir import read_metrics, read_status, state_of
from megatrain.training.stop import Stop, StopRequested
from support.hangs import HANG_SECONDS
from support.runs import settings
from support.trainer import stopped_after_two_steps

SLOW = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}


@contextmanager
def running(folder: Path, **sections: Any) -> Iterator[subprocess.Popen[str]]:
    """`megatrain train` with both outputs in one pipe, line by line."""
    config = settings(folder, **sections)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "megatrain", "train", str(folder / "config.yaml")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(process: subprocess.Popen[str], words: str) -> str:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if words in line:
            return line
    raise AssertionError(f"{words!r} was never said: {''.join(seen)}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_finishes_the_step_saves_and_leaves_with_3(tmp_path: Path, number: signal.Signals) -> None:
    with running(tmp_path, train={"steps": 1_000_000, "batch_size": 4, "lr": 1e-3}) as process:
        wait_for(process, "step 3/")
        process.send_signal(number)
        out, _ = process.communicate(timeout=HANG_SECONDS)
        assert process.returncode == 3, out
    assert "the same command goes on" in out
    run = tmp_path / "run"
    last = read_metrics(run)[-1]["step"]
    assert read_status(run)["state"] == "stopped"
    newest = checkpoint.latest_complete(run)
    assert newest == run / "checkpoints" / f"step-{last}"
    assert checkpoint.verify(newest) == []


def test_interrupted_together_with_the_reader_of_its_output_it_saves_all_the_same(tmp_path: Path) -> None:
    # What Ctrl-C does to `megatrain train … 2>&1 | tee log`: both are sent SIGINT, and tee is gone at once.
    with running(tmp_path, train={"steps": 1_000_000, "batch_size": 4, "lr": 1e-3}) as process:
        wait_for(process, "step 3/")
        assert process.stdout is not None
        process.stdout.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=HANG_SECONDS) == 3
    run = tmp_path / "run"
    assert read_status(run)["state"] == "stopped"
    assert checkpoint.latest_complete(run) == run / "checkpoints" / f"step-{read_metrics(run)[-1]['step']}"


def test_a_reader_that_leaves_does_not_end_the_run_and_the_log_has_every_line(tmp_path: Path) -> None:
    with running(tmp_path, train={"steps": 30, "batch_size": 4, "lr": 1e-3}) as process:
        wait_for(process, "step 1/")
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(timeout=HANG_SECONDS) == 0
    run = tmp_path / "run"
    assert read_status(run)["state"] == "done"
    said = (run / "log.txt").read_text()
    assert said.count("standard output cannot be written (Broken pipe); the run goes on") == 1
    assert "step 30/30" in said


def test_hangups_save_however_many_and_where_they_are_ignored_the_run_goes_on(tmp_path: Path) -> None:
    with running(tmp_path, train={"steps": 1_000_000, "batch_size": 4, "lr": 1e-3}) as process:
        wait_for(process, "step 3/")
        for _ in range(2):
            process.send_signal(signal.SIGHUP)
            time.sleep(0.02)
        out, _ = process.communicate(timeout=HANG_SECONDS)
        assert process.returncode == 3, out
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what nohup does; children inherit it
    try:
        ignoring = tmp_path / "ignoring"
        ignoring.mkdir()
        with running(ignoring, train={"steps": 1_000_000, "batch_size": 4, "lr": 1e-3}) as process:
            wait_for(process, "step 1/")
            process.send_signal(signal.SIGHUP)
            wait_for(process, "step 200/")
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=HANG_SECONDS)
            assert "stopped by SIGTERM" in out
    finally:
        signal.signal(signal.SIGHUP, before)


def test_sigusr1_saves_and_the_run_goes_on(tmp_path: Path) -> None:
    with running(tmp_path, train={"steps": 1_000_000, "batch_size": 4, "lr": 1e-3}) as process:
        wait_for(process, "step 3/")
        process.send_signal(signal.SIGUSR1)
        saved = int(wait_for(process, "checkpoint saved").partition(":")[0].removeprefix("step "))
        assert checkpoint.verify(tmp_path / "run" / "checkpoints" / f"step-{saved}") == []
        wait_for(process, f"step {saved + 5}/")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=HANG_SECONDS)
        assert process.returncode == 3


def test_a_killed_run_leaves_no_process_behind(tmp_path: Path) -> None:
    with running(tmp_path, train={"steps": 1_000_000, "batch_size": 4, "lr": 1e-3}) as process:
        wait_for(process, "step 3/")
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.communicate(timeout=HANG_SECONDS)
    _, alive = psutil.wait_procs(children, timeout=HANG_SECONDS)
    assert alive == []
    assert state_of(tmp_path / "run") == "killed (while training)"


def test_a_hangup_after_all_is_saved_does_not_change_the_exit_code() -> None:
    program = """
import os, signal, sys
from megatrain.cli.signals import stopping
from megatrain.training.stop import Stop
stop = Stop()
with stopping(stop):
    os.kill(os.getpid(), signal.SIGHUP)
    while not stop.requested:
        pass
os.kill(os.getpid(), signal.SIGHUP)
sys.exit(3)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=HANG_SECONDS).returncode == 3


def test_a_signal_while_loading_stops_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    with running(tmp_path, model={"config": {**settings(tmp_path)["model"]["config"], **SLOW}}) as process:
        wait_for(process, "tokenizing")
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=HANG_SECONDS)
        assert process.returncode == 3, out
    assert not (tmp_path / "run").exists() or checkpoint.latest_complete(tmp_path / "run") is not None


def test_what_is_stopped_while_it_loads_says_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise StopRequested("SIGTERM")

    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings(tmp_path)))
    monkeypatch.setattr("megatrain.training.setup.assemble", interrupted)

    def said(verb: str) -> str:
        assert main([verb, str(tmp_path / "config.yaml")]) == 3
        return capsys.readouterr().err

    nothing = "megatrain train: stopped by SIGTERM before a step was taken, so there is nothing to save\n"
    assert said("train") == nothing
    assert said("eval") == "megatrain eval: stopped by SIGTERM before it ended, so there is no result\n"
    assert not (tmp_path / "run").exists()
    (tmp_path / "run/checkpoints/step-2").mkdir(parents=True)  # half of one
    (tmp_path / "run/lock").write_text("process 1")
    assert said("train").endswith(nothing)
    monkeypatch.undo()
    stopped_after_two_steps(settings(tmp_path))
    capsys.readouterr()
    monkeypatch.setattr("megatrain.training.setup.assemble", interrupted)
    assert said("train").endswith(f"the newest checkpoint is {tmp_path / 'run/checkpoints/step-2'}\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_the_process_at_once_and_harms_no_checkpoint(
    tmp_path: Path, number: signal.Signals
) -> None:
    model = {"config": {**settings(tmp_path)["model"]["config"], **SLOW}}
    with running(
        tmp_path,
        model=model,
        train={"steps": 1_000_000, "batch_size": 128, "lr": 1e-3},
        plan={"micro_batch": 128},
        output={"dir": str(tmp_path / "run"), "save_every": 1, "export": "never"},
    ) as process:
        wait_for(process, "step 2/")
        process.send_signal(number)
        wait_for(process, "once more stops at once")
        process.send_signal(number)
        process.communicate(timeout=HANG_SECONDS)
        assert process.returncode in (128 + number, 3)
        if process.returncode != 3:  # the step was not over yet
            assert state_of(tmp_path / "run").startswith("killed")
    newest = checkpoint.latest_complete(tmp_path / "run")
    assert newest is not None
    assert checkpoint.verify(newest) == []


def test_a_request_inside_interruptible_work_raises_and_outside_waits() -> None:
    stop = Stop()
    with pytest.raises(StopRequested, match="SIGTERM"), stop.interruptible():
        stop.request("SIGTERM")
    assert stop.requested
    stop.request("SIGTERM")
    with pytest.raises(StopRequested), stop.interruptible():
        raise AssertionError("never begun")


def test_what_fails_while_it_is_cut_short_is_a_stop_and_what_fails_by_itself_is_not() -> None:
    stop = Stop()

    def cut_short() -> None:
        with stop.interruptible():
            try:
                stop.request("SIGINT")
            finally:
                raise RuntimeError("release unlocked lock")

    with pytest.raises(StopRequested, match="SIGINT") as raised:
        cut_short()
    assert isinstance(raised.value.__cause__, RuntimeError)
    with pytest.raises(RuntimeError, match="no connection"), Stop().interruptible():
        raise RuntimeError("no connection")
