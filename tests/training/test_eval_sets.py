"""Several held-out sets: each has numbers of its own wherever a run speaks of held-out loss, and one may decide which
step is the best."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest

import megatrain
from megatrain.cli import main, report
from megatrain.config import Config
from megatrain.config.diff import diff
from megatrain.errors import ConfigError
from megatrain.training.callbacks import _scalars
from megatrain.training.evaluation import HeldOut
from megatrain.training.run_dir import read_metrics, read_status
from megatrain.training.stop import Stop
from support.runs import settings, write_rows
from support.trainer import At, assert_bit_equal, fit


def other_rows(path: Path, count: int = 12) -> Path:
    """Rows that are nothing like those trained on."""
    path.write_text("".join(json.dumps({"text": f"{n} zzz qqq xyxy {n * 977} !"}) + "\n" for n in range(count)))
    return path


def two_sets(folder: Path, name: str = "run", **sections: Any) -> dict[str, Any]:
    held_out = {"own": str(write_rows(folder / "own.jsonl", 9)), "other": str(other_rows(folder / "other.jsonl"))}
    asked = {"at_start": True, "every": 2} | sections.pop("eval", {})
    output = {"dir": str(folder / name)} | sections.pop("output", {})
    return settings(folder, data={"eval": held_out}, eval=asked, output=output, **sections)


class Noted(megatrain.Callback):
    def __init__(self) -> None:
        self.evaluations: list[Any] = []

    def on_eval(self, run: Any, metrics: Any) -> None:  # noqa: ARG002
        self.evaluations.append(dict(metrics))


def test_each_set_has_its_numbers_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noted = Noted()
    result = fit(two_sets(tmp_path), callbacks=[noted])
    run = tmp_path / "run"
    assert [one["step"] for one in noted.evaluations] == [0, 2, 4, 6]
    for one in noted.evaluations:
        own, other = one["eval_sets"]["own"], one["eval_sets"]["other"]
        assert own["loss"] != other["loss"]
        assert one["eval_tokens"] == own["tokens"] + other["tokens"]
        for key in ("loss", "accuracy"):
            together = (own[key] * own["tokens"] + other[key] * other["tokens"]) / one["eval_tokens"]
            assert one[f"eval_{key}"] == pytest.approx(together, rel=1e-12), "over all tokens of both"
        assert own["perplexity"] == pytest.approx(math.exp(own["loss"]))
    records = read_metrics(run)
    assert records[0]["eval_sets_before"] == noted.evaluations[0]["eval_sets"]
    assert [r["eval_sets"] for r in records if "eval_sets" in r] == [e["eval_sets"] for e in noted.evaluations[1:]]
    last = {name: numbers["loss"] for name, numbers in records[-1]["eval_sets"].items()}
    assert read_status(run)["eval_sets"] == result.eval_sets == last
    logged = (run / "log.txt").read_text()
    for name, loss in last.items():
        assert f"step 6: held-out loss of {name} {loss:.4f} (perplexity " in logged
    assert f"step 6: held-out loss {records[-1]['eval_loss']:.4f}" in logged
    page = report.page([run])
    for name, loss in last.items():
        assert f"held-out loss of {name}" in page
        assert f"Held-out data: {name}" in page
        assert f"→ {loss:.4f}" in page
    tags = dict(_scalars(noted.evaluations[-1]))
    assert tags["eval_own/loss"] == last["own"]
    assert tags["eval_other/accuracy"] == records[-1]["eval_sets"]["other"]["accuracy"]
    assert tags["eval/eval_loss"] == records[-1]["eval_loss"]

    assert main(["eval", str(run), "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["eval_loss"] == records[-1]["eval_loss"]
    assert {name: one["loss"] for name, one in measured["eval_sets"].items()} == last
    assert main(["eval", str(run)]) == 0
    assert f"held-out loss of own {last['own']:.4f}" in capsys.readouterr().out
    assert main(["data", str(run / "config.yaml"), "--rows", "0"]) == 0
    shown = capsys.readouterr().out
    assert "held-out own: 9 rows" in shown
    assert "held-out other: 12 rows" in shown


def test_a_list_of_sources_is_one_set_and_names_change_no_number(tmp_path: Path) -> None:
    named = two_sets(tmp_path, "named")
    listed = two_sets(tmp_path, "listed")
    listed["data"] = listed["data"] | {"eval": list(listed["data"]["eval"].values())}
    fit(named)
    fit(listed)
    ours, theirs = read_metrics(tmp_path / "named"), read_metrics(tmp_path / "listed")
    assert not any(key.startswith("eval_sets") for record in theirs for key in record)
    assert "eval_sets" not in read_status(tmp_path / "listed")
    assert "eval_sets" not in json.loads((tmp_path / "listed/data.json").read_text())
    for one, other in zip(ours, theirs, strict=True):
        assert one["loss"] == other["loss"]
        assert ("eval_loss" in one) == ("eval_loss" in other)
        if "eval_loss" in one:
            assert one["eval_loss"] == pytest.approx(other["eval_loss"], rel=1e-6)
    assert_bit_equal(tmp_path / "named/checkpoints/step-6", tmp_path / "listed/checkpoints/step-6")


def scripted(monkeypatch: pytest.MonkeyPatch, losses: dict[str, list[float]]) -> None:
    """Evaluations that find these losses, one after the other."""
    found = {name: iter(values) for name, values in losses.items()}

    def evaluate_sets(*_: Any) -> HeldOut:
        sets = {
            name: megatrain.EvalOutput(loss=next(values), accuracy=0.5, num_tokens=10) for name, values in found.items()
        }
        mean = sum(one.loss for one in sets.values()) / len(sets)
        return HeldOut(megatrain.EvalOutput(loss=mean, accuracy=0.5, num_tokens=20), sets)

    monkeypatch.setattr("megatrain.training.loop.evaluate_sets", evaluate_sets)


LOSSES = {"own": [5.0, 4.0, 4.5, 4.6], "other": [5.0, 6.0, 5.0, 4.0]}
"""Before the first step and after steps 2, 4 and 6; over both: 5, 5, 4.75, 4.3."""


@pytest.mark.parametrize(("best", "step"), [(None, 6), ("own", 2), ("other", 6)])
def test_the_set_that_is_named_decides_which_step_is_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, best: str | None, step: int
) -> None:
    scripted(monkeypatch, LOSSES)
    config = two_sets(tmp_path, eval={"best": best, "keep_best": True}, output={"keep": 1})
    result = fit(config)
    assert result.best_step == step
    kept = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert kept == sorted({f"step-{step}", "step-6"})


def test_the_set_that_is_named_stops_the_run_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scripted(monkeypatch, LOSSES)
    with caplog.at_level(logging.INFO, "megatrain"):
        assert fit(two_sets(tmp_path, eval={"best": "own", "early_stop": 1})).step == 4
    assert "held-out loss of own has not fallen below 4.0000 (step 2) for 1 evaluations" in caplog.text


NAN = float("nan")


@pytest.mark.parametrize(
    ("own", "end", "best", "said"),
    [
        ([NAN, 4.0, 3.0, 5.0], 6, 4, ""),
        ([NAN, NAN, 3.0, NAN], 6, 4, ""),
        ([NAN, NAN, NAN, 3.0], 4, None, "held-out loss of own has not been a finite number for 2 evaluations"),
    ],
)
def test_a_loss_that_is_no_finite_number_is_never_the_best(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    own: list[float],
    end: int,
    best: int | None,
    said: str,
) -> None:
    scripted(monkeypatch, {"own": own, "other": [1.0] * 4})
    with caplog.at_level(logging.INFO, "megatrain"):
        result = fit(two_sets(tmp_path, eval={"best": "own", "early_stop": 2}))
    assert (result.step, result.best_step) == (end, best)
    assert said in caplog.text


def test_a_resumed_run_keeps_its_sets_and_its_best(tmp_path: Path) -> None:
    whole = two_sets(tmp_path, "whole", eval={"best": "other"})
    cut = two_sets(tmp_path, "cut", eval={"best": "other"})
    fit(whole)
    stop = Stop()
    fit(cut, stop=stop, display=At(3, lambda: stop.request("SIGINT")))
    assert set(read_status(tmp_path / "cut")["eval_sets"]) == {"own", "other"}
    result = fit(cut)
    keys = ("step", "loss", "eval_loss", "eval_sets", "eval_sets_before")
    ours, theirs = (
        [{key: record.get(key) for key in keys} for record in read_metrics(tmp_path / name)]
        for name in ("cut", "whole")
    )
    assert ours == theirs
    assert result.best_step == read_status(tmp_path / "whole")["best_step"]


def test_the_best_is_looked_for_anew_where_another_set_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scripted(monkeypatch, {"own": [5.0, 1.0], "other": [5.0, 6.0]})
    stop = Stop()
    config = two_sets(tmp_path, eval={"best": "own"})
    fit(config, stop=stop, display=At(3, lambda: stop.request("SIGINT")))
    assert read_status(tmp_path / "run")["best_step"] == 2
    scripted(monkeypatch, {"own": [2.0, 2.0], "other": [5.5, 5.7]})
    with caplog.at_level(logging.INFO, "megatrain"):
        result = fit(two_sets(tmp_path, eval={"best": "other"}))
    assert "from here on, eval.best: own → other" in caplog.text
    assert "step 2 was the best so far by other held-out data or settings; the best is looked for anew" in caplog.text
    assert result.best_step == 4, "5.5, although own had 1.0 before"


def test_sets_are_sources_lists_or_fractions(tmp_path: Path) -> None:
    train, more = write_rows(tmp_path / "a.jsonl"), write_rows(tmp_path / "b.jsonl", 5)
    sets = {"own": 0.25, "files": [str(more), {"path": str(train), "split": 0.1}], "one": {"path": str(more)}}
    config = Config.from_dict({"model": "owner/name", "data": {"train": str(train), "eval": sets}})
    found = [(source.name, Path(source.path).name, source.split) for source in config.data.eval]
    assert found == [
        ("own", "a.jsonl", 0.25),
        ("files", "b.jsonl", None),
        ("files", "a.jsonl", 0.1),
        ("one", "b.jsonl", None),
    ]
    assert config.data.train[0].split == 0.75
    assert Config.from_dict(config.to_dict()) == config
    assert not any(diff(config, Config.from_dict(config.to_dict())))


def test_the_command_line_changes_one_set(tmp_path: Path) -> None:
    rows, other = write_rows(tmp_path / "a.jsonl"), write_rows(tmp_path / "b.jsonl", 5)
    data = {"train": str(rows), "eval": {"one": str(rows), "two": str(rows)}}
    words = [f"data.eval.two={other}", "data.eval.one.split=0.5", "eval.best=two"]
    config = Config.from_dict({"model": "owner/name", "data": data}, words)
    found = [(source.name, Path(source.path).name, source.split) for source in config.data.eval]
    assert found == [("one", "a.jsonl", 0.5), ("two", "b.jsonl", None)]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"eval": {"one": None}}}, r"data\.eval\.one names no source"),
        ({"data": {"eval": {"one": 5}}}, r"data\.eval\.one is 5; a fraction between 0 and 1"),
        ({"data": {"eval": {"one": "a", "a b": "c"}}}, r"is 'a b'; the name of a held-out set has letters"),
        ({"data": {"eval": [{"path": "a", "name": "one"}, "b"]}}, r"data\.eval has sets with names, and .*/b has none"),
        ({"data": {"train": [{"path": "a", "name": "one"}]}}, r"only held-out sets \(data\.eval\) have names"),
        ({"data": {"eval": {"pth": "a", "format": "text"}}}, r"data\.eval\.0\.pth is not .* mean .*path"),
        (
            {"data": {"eval": {"one": "a", "two": "b"}}, "eval": {"best": "too"}},
            r"eval\.best is 'too', .* has one, two",
        ),
        ({"data": {"eval": "a"}, "eval": {"best": "one"}}, r"data\.eval has one set without a name"),
        ({"eval": {"best": "one"}}, r"eval\.best has no effect without data\.eval"),
    ],
)
def test_what_is_wrong_with_sets_is_said_by_name(sections: dict[str, Any], message: str) -> None:
    data = {"train": "rows.jsonl"} | sections.get("data", {})
    with pytest.raises(ConfigError, match=message):
        Config.from_dict({"model": "owner/name", **sections, "data": data})
