"""Counting, against hand-made sums of public shapes."""

import json
import math

import pytest

from megatrain.training.metrics import (
    StepRecord,
    Throughput,
    dumps,
    duration,
    host_peak_bytes,
    without_progress,
)


def test_a_record_is_one_line_and_never_holds_nan() -> None:
    record = StepRecord(step=3, loss=math.nan, grad_norm=math.inf, lr=1e-3, tokens=8, num_tokens=7)
    line = record.as_json()
    assert "\n" not in line
    read = json.loads(line)
    assert read["loss"] is None
    assert read["grad_norm"] is None
    assert (read["step"], read["tokens"], read["num_tokens"]) == (3, 8, 7)
    assert dumps({"a": [math.nan, 1.0]}) == '{"a": [null, 1.0]}'


def test_throughput_is_over_a_window() -> None:
    throughput = Throughput(window=2)
    assert throughput.tokens_per_s == 0.0
    for _ in range(5):
        throughput.add(100)
    assert throughput.tokens_per_s > 0
    assert throughput.step_s > 0


def test_durations_read_like_speech() -> None:
    assert duration(5.2) == "5 s"
    assert duration(65) == "1 min 05 s"
    assert duration(3 * 3600 + 300) == "3 h 05 min"
    assert duration(math.inf) == "?"


def test_peak_host_memory_is_that_of_this_process() -> None:
    assert host_peak_bytes() > 1 << 20


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([5.0, 4.0], ""),
        ([5.0], ""),
        ([], ""),
        ([5.0, 5.0], "5.0000 in the first step, 5.0000 in the last step"),
        ([5.0, None], "5.0000 in the first step, inf"),
        ([5.0, *[9.0] * 97, 4.0, 4.5], "5.0000 in the first step, 8.0500 in the last 10 steps"),
        ([5.0, *[9.0] * 380, *[4.9] * 20], ""),
    ],
)
def test_no_progress_is_the_last_tenth_not_below_the_first_step(losses: list[float | None], words: str) -> None:
    said = without_progress(losses)
    assert (words in said) if words else said == ""
