"""The report: one page, whole, without outside parts, from a run in any state, or from several."""

import json
import math
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
    operation = {"ph": "X", "name": "embed x", "ts": 1.0, "dur": 2.0, "tid": 1, "args": {"micro_batch": 0}}
    for wrong in ({"ts": math.nan}, {"ts": 10**400}, {"dur": -1.0}, {"dur": math.inf}, {"args": [1]}, {"ts": "x"}):
        trace.write_text(json.dumps([operation | wrong]))
        with pytest.raises(ConfigError, match="is no trace of `megatrain bench --trace`"):
            report.page([run], trace)
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


WRONG: list[tuple[str, Any, str]] = [
    ("loss", "abc", "loss is 'abc', not a number or null"),
    ("loss", [1], r"loss is \[1\], not a number or null"),
    ("loss", True, "loss is True, not a number or null"),
    ("grad_norm", True, "grad_norm is True"),
    ("eval_loss", {}, r"eval_loss is \{\}, not"),
    ("tokens", "9", "tokens is '9'"),
    ("tokens", 10**400, "tokens is 10{59}…, not a number"),
    ("host_peak_bytes", "1GiB", "host_peak_bytes is '1GiB'"),
    ("step", "x", "step is 'x', not a whole number from 0 on"),
    ("step", None, "step is None, not a whole number"),
    ("step", 1.5, "step is 1.5, not a whole number"),
    ("lanes", 5, "lanes is 5, not a mapping"),
    ("lanes", {"compute": None}, "lanes.compute is None, not a number"),
    ("eval_sets", [1], r"eval_sets is \[1\], not a mapping"),
    ("eval_sets", {"a": 3}, "eval_sets.a is 3, not a mapping"),
    ("eval_sets_before", {"a": {"loss": "x"}}, "eval_sets_before.a.loss is 'x'"),
    ("samples", 3, "samples is 3, not a list"),
    ("samples", ["x", 3], r"samples\[1\] is 3, not text"),
]


@pytest.mark.parametrize(("key", "value", "words"), WRONG, ids=[f"{key}-{value!r:.9}" for key, value, _ in WRONG])
def test_a_metric_of_a_wrong_type_is_refused_with_its_line(
    tmp_path: Path, key: str, value: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path / "run", 3)
    metrics = run / "metrics.jsonl"
    good = metrics.read_text()
    metrics.write_text(good + json.dumps(json.loads(good.splitlines()[-1]) | {key: value}) + "\n")
    with pytest.raises(ConfigError, match=rf"metrics\.jsonl, line 4: {words}.*; remove the line"):
        report.page([run])
    assert main(["report", str(run)]) == 2
    assert "metrics.jsonl, line 4" in capsys.readouterr().err


def test_a_damaged_line_is_passed_over_and_null_says_nothing(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", 3)
    metrics = run / "metrics.jsonl"
    empty = dict.fromkeys(("loss", "grad_norm", "lanes", "eval_sets", "eval_sets_before", "samples", "tokens"))
    lines = [b"\xff\xfe", b"[" * 100_000, b"[1]", json.dumps({"step": 4, **empty}).encode()]
    metrics.write_bytes(metrics.read_bytes() + b"\n".join(lines) + b"\n")
    assert "<td>4 of 100</td>" in report.page([run])
    metrics.write_bytes(metrics.read_bytes() + b'{"loss": 3.0}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 8 has no step; remove the line"):
        report.page([run])


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("plan.json", {"items": 5}, "items is 5, not a list"),
        ("plan.json", {"items": ["x"]}, r"items\[0\] is 'x', not a mapping"),
        ("plan.json", {"items": [{"what": "a", "tier": [], "bytes": 1}]}, r"items\[0\]\.tier is \[\], not text"),
        ("plan.json", {"items": [{"what": "a", "tier": "host", "bytes": "1"}]}, r"items\[0\]\.bytes is '1', not a num"),
        ("data.json", {"train": 5}, "train is 5, not a mapping"),
        ("data.json", {"eval_sets": {"a": [1]}}, r"eval_sets\.a is \[1\], not a mapping"),
        ("data.json", {"train": {"num_tokens": "many"}}, "train.num_tokens is 'many', not a number"),
        ("data.json", {"eval": {"lengths": {"min": "x"}}}, "eval.lengths.min is 'x', not a number"),
        ("data.json", {"train": {"histogram": [[1, 2]]}}, r"train\.histogram\[0\] is \[1, 2\], not a list of 3"),
        ("data.json", {"train": {"dropped": [["a", "b", "c"]]}}, r"dropped\[0\]\[1\] is 'b', not a number"),
        ("data.json", {"train": {"notes": "x"}}, "notes is 'x', not a list"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_else_is_of_a_wrong_type_is_refused_with_its_file(
    tmp_path: Path, file: str, content: Any, words: str
) -> None:
    run = a_run(tmp_path / "run", 3)
    (run / file).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=rf"{re.escape(file)}: .*{words}.*; remove the file"):
        report.page([run])
    for harmless in ("[1]", "{", "[" * 100_000, "{}", '{"items": null, "train": null, "eval_sets": null}'):
        (run / file).write_text(harmless)
        assert "</html>" in report.page([run])
