"""The report: one page, whole, without outside parts, from a run in any state."""

from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatrain.cli import report
from megatrain.errors import ConfigError
from megatrain.training.metrics import StepRecord
from megatrain.training.run_dir import RunFolder


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "line", "circle", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.open and tag not in ("line", "circle", "polyline"):
            assert self.open.pop() == tag


def a_run(path: Path, steps: int) -> Path:
    folder = RunFolder(path)
    folder.write_config("model: <tiny> & more\n")
    folder.write_plan({"items": [{"what": "weights", "tier": "host", "bytes": 1 << 30}]})
    metrics = folder.begin_metrics(0)
    for step in range(1, steps + 1):
        record = StepRecord(step=step, loss=8.0 / step, grad_norm=1.0, lr=1e-3, tokens=100, num_tokens=100, step_s=0.1)
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
    page = report.page(a_run(tmp_path / "run", steps))
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert not tags.links
    assert "script" not in tags.seen
    assert tags.seen.count("svg") >= 5
    assert "1.00 GiB" in page
    assert "&lt;tiny&gt; &amp; more" in page
    assert len(page) < 400_000


def test_a_run_that_was_killed_is_not_reported_as_training(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", 3)
    assert ">killed (while training)<" in report.page(run)
    folder = RunFolder(run)  # as the run that goes on would
    assert ">training<" in report.page(run)
    folder.write_status("done")
    folder.close()
    assert ">done<" in report.page(run)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        report.page(tmp_path)
