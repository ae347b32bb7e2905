"""A run that does not go on says what it waits for, and is otherwise left alone."""

import itertools
import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from megatrain.engine.step import Pass
from megatrain.training.run_dir import read_status
from megatrain.training.watchdog import Stall, Watchdog
from support.runs import settings
from support.trainer import fit, losses


def test_a_stall_is_reported_again_and_again_and_so_is_its_end() -> None:
    reports: list[Stall | None] = []
    twice, over = threading.Event(), threading.Event()
    mark = [0]

    def report(stall: Stall | None) -> None:
        reports.append(stall)
        (over if stall is None else twice if len(reports) == 2 else threading.Event()).set()

    lane = {"lane": "host", "running": ["update of head, micro-batch 0"], "next": None, "waits_for": []}
    watchdog = Watchdog(0.05, lambda: mark[0], lambda: "step 7", lambda: [lane], report)
    twice.wait()
    mark[0] = 1
    over.wait()
    watchdog.close()
    first, second = reports[:2]
    assert first is not None
    assert second is not None
    assert second.seconds > first.seconds >= 0.05
    text = first.text()
    assert text.startswith("step 7 has not gone on for")
    assert "lane host runs update of head, micro-batch 0" in text
    assert "thread MainThread" in text
    assert "test_watchdog.py" in text
    assert "twice.wait()" in text
    assert "megatrain-watchdog" not in text


def test_threads_of_one_name_are_all_in_a_report() -> None:
    """As those of two engines in one process are."""
    stalls: list[Stall] = []
    reported, over = threading.Event(), threading.Event()

    def first_of_two() -> None:
        over.wait()

    def second_of_two() -> None:
        over.wait()

    threads = [threading.Thread(target=target, name="alike") for target in (first_of_two, second_of_two)]
    for thread in threads:
        thread.start()

    def report(stall: Stall | None) -> None:
        if stall is not None:
            stalls.append(stall)
            reported.set()

    watchdog = Watchdog(0.01, lambda: 0, lambda: "step 1", list, report)
    reported.wait()
    watchdog.close()
    over.set()
    for thread in threads:
        thread.join()
    text = stalls[0].text()
    assert "first_of_two" in text
    assert "second_of_two" in text


def test_what_goes_on_is_not_reported() -> None:
    reports, count, looked = [], itertools.count(), threading.Event()

    def mark() -> int:
        found = next(count)
        if found == 20:
            looked.set()
        return found

    watchdog = Watchdog(1e-3, mark, str, list, reports.append)
    looked.wait()
    watchdog.close()
    assert reports == []


def test_a_stalled_step_is_in_log_and_status_with_lanes_and_threads_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = settings(tmp_path, output={"dir": str(tmp_path / "plain")})
    fit(plain)
    forward, held = Pass._forward, threading.Event()
    seen: dict[str, Any] = {}
    run = tmp_path / "run"

    class Release(logging.Handler):
        """Ends the stall once it has been reported twice: after the first report was written to the status."""

        def emit(self, record: logging.LogRecord) -> None:
            if "has not gone on" in record.getMessage() and (status := read_status(run)).get("stalled"):
                seen.update(status)
                held.set()

    def hanging(self: Pass, op: Any) -> None:
        if self._training and self._step == 2 and op.unit == 2:
            held.wait()
        forward(self, op)

    monkeypatch.setattr(Pass, "_forward", hanging)
    handler = Release()
    logging.getLogger("megatrain").addHandler(handler)
    try:
        fit(settings(tmp_path, output={"report_stall": "0.5s"}))
    finally:
        logging.getLogger("megatrain").removeHandler(handler)
    assert losses(run) == losses(tmp_path / "plain")
    assert (seen["state"], seen["step"], seen["stalled"]["doing"]) == ("training", 2, "step 3")
    lanes = {lane["lane"]: lane for lane in seen["stalled"]["lanes"]}
    assert lanes["compute"]["running"] == ["forward of layers.1, micro-batch 0"]
    assert lanes["caller"]["waits_for"]
    calls = " ".join(itertools.chain(*seen["stalled"]["threads"].values()))
    assert "held.wait()" in calls
    assert {"MainThread", "megatrain-step"} <= seen["stalled"]["threads"].keys()
    log = (run / "log.txt").read_text()
    assert "step 3 has not gone on for" in log
    assert "lane compute runs forward of layers.1, micro-batch 0" in log
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], "stalled" in status) == ("done", False)
