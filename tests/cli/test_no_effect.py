"""A setting or option that would have no effect is refused, never dropped."""

from pathlib import Path
from typing import Any

import pytest

from megatrain.cli import main
from megatrain.config import Config
from megatrain.errors import ConfigError

BASE: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "rows.jsonl"}, "output": {"dir": "run"}}


@pytest.mark.parametrize(
    ("section", "settings", "words"),
    [
        ("train", {"schedule": {"name": "cosine", "decay": 0.5}}, "decay .0.5. has no effect on a cosine schedule"),
        ("train", {"schedule": {"name": "constant", "min_lr": 1e-6}}, "min_lr .1e-06. has no effect on a constant"),
        ("train", {"lr": 0, "groups": [{"params": ["*norm*"], "lr": 1e-3}]}, "train.lr is 0 and train.groups.0.lr"),
    ],
)
def test_a_setting_that_nothing_looks_at_is_refused(section: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Config.from_dict({**BASE, section: settings})


def test_the_same_settings_are_taken_where_they_have_one() -> None:
    groups = [{"params": ["*norm*"], "lr": 1e-3}]
    for train in (
        {"schedule": {"name": "wsd", "decay": 0.5, "min_lr": 1e-6}},
        {"lr": 0, "groups": groups, "schedule": {"name": "constant", "warmup": 0}},
        {"lr": 1e-4, "groups": groups},
    ):
        Config.from_dict({**BASE, "train": train})


def test_a_step_is_asked_for_of_a_run_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    assert main(["export", str(tmp_path), str(tmp_path / "out"), "--step", "3"]) == 2
    assert "is one checkpoint, not a run, so it has no step 3" in capsys.readouterr().err


@pytest.mark.parametrize("temperature", ["nan", "inf", "-1"])
def test_a_temperature_is_a_number(tmp_path: Path, temperature: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tmp_path), "x", "--temperature", temperature]) == 2
    assert "temperature not negative" in capsys.readouterr().err
