"""`train.check_every`: only its log lines show, and a step that does not agree with itself ends the run."""

import logging
from pathlib import Path
from typing import Any

import pytest

from megatrain.checkpoint.step_folders import step_folder
from megatrain.engine import repeat_check
from megatrain.training.stop import RunStopped
from support.runs import settings
from support.trainer import assert_bit_equal, fit, losses


def test_a_checked_run_has_the_bits_of_a_plain_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = settings(tmp_path)
    checked = settings(tmp_path, train={"check_every": 2}, output={"dir": str(tmp_path / "checked")})
    fit(plain)
    with caplog.at_level(logging.INFO):
        fit(checked)
    assert losses(tmp_path / "run") == losses(tmp_path / "checked")
    assert_bit_equal(step_folder(tmp_path / "run", 6), step_folder(tmp_path / "checked", 6))
    said = [message for message in caplog.messages if "agree bit for bit" in message]
    assert [message.split(":")[0] for message in said] == ["step 2", "step 4", "step 6"]
    assert any("train.check_every: one step in 2 takes about" in message for message in caplog.messages)


def test_passes_that_differ_stop_the_run_with_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, found = repeat_check.record, []

    def flipped(*args: Any) -> repeat_check.PassRecord:
        one = record(*args)
        found.append(one)
        if len(found) == 4:  # the second pass of step 4
            bits, norm = one.gradients["model.norm.weight"]
            one.gradients["model.norm.weight"] = bytes(len(bits)), norm
        return one

    monkeypatch.setattr(repeat_check, "record", flipped)
    config = settings(tmp_path, train={"check_every": 2}, output={"save_every": 2})
    with pytest.raises(RunStopped, match=r"step 4 do not agree.*model\.norm\.weight \(unit .*step-2"):
        fit(config)
    assert [step for step, *_ in losses(tmp_path / "run")] == [1, 2, 3]
