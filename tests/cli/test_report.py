"""The report: one page, whole, without outside parts, from a run in any state, or from several."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megatrain.cli import main, report
from megatrain.cli.charts import log_ticks, number, round_ticks
from megatrain.errors import ConfigError
from megatrain.training.metrics import StepRecord
from megatrain.training.run_dir import RunFolder


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.links: list[str] = []
        self.charts: list[dict[str, Any]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "line", "circle", "polyline"):
            self.open.append(tag)
        self.charts += [json.loads(value or "") for name, value in attrs if name == "data-chart"]

    def handle_endtag(self, tag: str) -> None:
        if self.open and tag not in ("line", "circle", "polyline"):
            assert self.open.pop() == tag


def a_run(path: Path, steps: int, loss: float = 8.0) -> Path:
    folder = RunFolder(path)
    folder.write_config(f"model: <tiny> & more\ntrain: {{lr: {loss}}}\n")
    lengths = {"min": 3, "median": 4, "p95": 9, "max": 9}
    bins = ((3, 6, 20), (6, 10, 4))
    folder.write_data({"train": {"num_rows": 24, "num_tokens": 100, "num_supervised": 40, "lengths": lengths,
                                 "num_sequences": 5, "seq_len": 32, "histogram": bins, "notes": ["2 rows <left> out"],
                                 "dropped": [["empty", 2, "row 7"]]}, "eval": None})  # fmt: skip
    folder.write_plan({"items": [{"what": "weights", "tier": "host", "bytes": 1 << 30}]})
    metrics = folder.begin_metrics(0)
    for step in range(1, steps + 1):
        record = StepRecord(step=step, loss=loss / step, grad_norm=1.0, lr=1e-3, tokens=100, num_tokens=100, step_s=0.1)
        record.lanes = {"compute": 0.09, "upload": 0.01}
        if step == 1:
            record.extra["eval_loss_before"] = 8.3
        if step % 3 == 0:
            record.extra["eval_loss"] = 8.1 / step
            record.extra["samples"] = ["<script>alert(1)</script>"]
        metrics.write(record)
    folder.write_status("training", step=steps, total_steps=100)
    folder.close()
    return path


@pytest.mark.parametrize("steps", [1, 7, 2000])
def test_the_page_is_whole_and_needs_nothing_from_outside(tmp_path: Path, steps: int) -> None:
    page = report.page([a_run(tmp_path / "run", steps)])
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert not tags.links
    assert tags.seen.count("script") == 1  # the page's own, none of the samples'
    assert "http" not in page
    assert tags.seen.count("svg") >= 5
    assert "1.00 GiB" in page
    assert "&lt;tiny&gt; &amp; more" in page
    assert len(page) < 400_000
    for words in ("40 (40%)", "2: empty, such as row 7", "2 rows &lt;left&gt; out", "3 to 5: 20"):
        assert words in page, words


def test_the_values_under_the_pointer_are_those_of_the_metrics(tmp_path: Path) -> None:
    tags = Tags()
    tags.feed(report.page([a_run(tmp_path / "run", 7)]))
    training, held_out = tags.charts[0]["series"]
    assert training == [[step, number(8.0 / step)] for step in range(1, 8)]
    assert held_out == [[0, "8.3"], [3, "2.7"], [6, "1.35"]]


def test_several_runs_are_side_by_side_with_the_settings_that_differ(tmp_path: Path) -> None:
    first, second = a_run(tmp_path / "a" / "run", 7), a_run(tmp_path / "b" / "run", 4, loss=6.0)
    page = report.page([first, second])
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert len(tags.charts[0]["series"]) == 4  # training and held-out of both
    assert [points[-1][0] for points in tags.charts[0]["series"]] == [7, 6, 4, 3]
    assert re.search(r"<th>train.lr</th><td>8.0</td><td>6.0</td>", page)
    for name in ("a/run", "b/run"):
        assert f"<th>{name}</th>" in page
    with pytest.raises(ConfigError, match="named twice"):
        report.page([first, first])


def test_a_measured_step_is_drawn_lane_by_lane(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, trace = a_run(tmp_path / "run", 3), tmp_path / "trace.json"
    assert main(["bench", "--model", "tiny", "--batch", "4", "--seq", "16", "--micro-batch", "2", "--steps", "1",
                 "--warmup", "1", "--device", "cpu", "--trace", str(trace)]) == 0  # fmt: skip
    assert main(["report", str(run), "--trace", str(trace)]) == 0
    page = (run / "report.html").read_text()
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    timeline = page.partition("Timeline of a step")[2]
    assert timeline.count("<title>backward layers.0, micro-batch") == 2  # of one step, though three were traced
    assert "compute" in timeline
    assert "busy" in timeline
    trace.write_text("{}")
    assert main(["report", str(run), "--trace", str(trace)]) == 2
    assert "is no trace of `megatrain bench --trace`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0.647, 6760, [2000, 4000, 6000]), (0, 1e-5, [0, 2e-6, 4e-6, 6e-6, 8e-6, 1e-5]), (3, 3, [3])],
)
def test_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    assert round_ticks(low, high) == pytest.approx(ticks)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0.3, 11, [0.5, 1, 2, 5, 10]), (1e-3, 200, [1e-3, 1e-2, 0.1, 1, 10, 100]), (2.1, 2.9, [2.2, 2.4, 2.6, 2.8])],
)
def test_ticks_of_a_logarithmic_axis_are_round(low: float, high: float, ticks: list[float]) -> None:
    assert log_ticks(low, high) == pytest.approx(ticks)


def test_numbers_are_written_as_people_read_them() -> None:
    values = (0, 4e-5, 0.002, 2.7, 999.5, 2150, 5000, 37948, 1.2e6, 3e9)
    shown = ["0", "4e-05", "0.002", "2.7", "999.5", "2150", "5k", "37.95k", "1.2M", "3G"]
    assert [number(value) for value in values] == shown


def test_a_run_that_was_killed_is_not_reported_as_training(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", 3)
    assert ">killed (while training)<" in report.page([run])
    folder = RunFolder(run)  # as the run that goes on would
    assert ">training<" in report.page([run])
    folder.write_status("done")
    folder.close()
    assert ">done<" in report.page([run])


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        report.page([tmp_path])
