"""What a run shows: a bar with the history of the loss above it on a terminal, lines elsewhere."""

import io
import os
import pty
import re
import threading

import pytest

from megatrain.training.metrics import StepRecord
from megatrain.training.progress import Display


def record(step: int, of_limit: float | None = 0.71) -> StepRecord:
    return StepRecord(
        step=step, loss=8.0 / step, grad_norm=1.25, lr=1e-3, tokens=100, num_tokens=100, tokens_per_s=12345.0,
        bound="compute", of_limit=of_limit,
    )  # fmt: skip


def on_a_terminal(steps: int, every: int = 1) -> list[str]:
    """Every line that was drawn on a terminal of COLUMNS, as it was when the next one began."""
    ours, theirs = pty.openpty()
    seen: list[bytes] = []

    def drain() -> None:
        while True:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:
                return
            if not part:
                return
            seen.append(part)

    reader = threading.Thread(target=drain)
    reader.start()
    with os.fdopen(theirs, "w") as terminal, Display("bar", err=terminal, out=terminal) as display:
        display.begin(0, steps)
        for step in range(1, steps + 1):
            display.step(record(step), 90.0, every)
        display.end()
    reader.join(10)
    os.close(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(seen).decode())
    return [line for line in re.split(r"[\r\n]+", text) if line.strip()]


@pytest.fixture(autouse=True)
def _a_capable_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "CI", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("columns", [60, 150])
def test_the_history_of_the_loss_stays_above_the_bar_and_nothing_is_wider_than_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = on_a_terminal(steps=400)
    history = [line for line in lines if re.match(r"step \d+/400: loss ", line)]
    assert [int(line.split("/")[0].removeprefix("step ")) for line in history] == [1, *range(10, 401, 10)]
    assert history[1] == "step 10/400: loss 0.8000, norm 1.25, lr 0.001"
    assert max(map(len, lines)) <= columns
    bar = next(line for line in reversed(lines) if "━" in line)
    assert "step 400/400" in bar
    assert "loss 0.0200  12,345 tok/s" in bar
    assert ("bound by compute, 71% of its measured rate" in bar) == (columns == 150)


def test_lines_are_as_far_apart_as_asked_for() -> None:
    lines = on_a_terminal(steps=50, every=20)
    assert [line.split(":")[0] for line in lines if ": loss" in line] == [
        "step 1/50",
        "step 20/50",
        "step 40/50",
        "step 50/50",
    ]


@pytest.mark.parametrize(
    ("of_limit", "words"), [(0.71, ", bound by compute, 71% of its measured rate"), (None, ", bound by compute")]
)
def test_without_a_terminal_there_are_plain_lines(of_limit: float | None, words: str) -> None:
    out, err = io.StringIO(), io.StringIO()
    with Display("lines", out=out, err=err) as display:
        display.begin(0, 3)
        for step in (1, 2, 3):
            display.step(record(step, of_limit), 90.0, 1)
        display.end()
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[1] == f"step 2/3: loss 4.0000, norm 1.25, lr 0.001, 12,345 tokens/s, 1 min 30 s left{words}"
    assert "\x1b" not in out.getvalue() + err.getvalue()
