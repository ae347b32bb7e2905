"""A run that is asked to stop within its last step."""

from pathlib import Path
from typing import Any

import pytest

from megatrain import Trainer
from megatrain.training.loop import TrainingLoop
from megatrain.training.stop import Stop
from support.runs import settings


def test_a_held_out_loss_of_earlier_weights_is_not_given_as_that_of_the_last_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(tmp_path, eval={"every": 2}, train={"steps": 3})
    stop, step = Stop(), TrainingLoop._step

    def asked_within_the_last(self: Any, number: int, *rest: Any) -> None:
        step(self, number, *rest)
        if number == 3:
            stop.request("SIGTERM")

    monkeypatch.setattr(TrainingLoop, "_step", asked_within_the_last)
    result = Trainer(config, stop=stop).fit()
    assert (result.step, result.stopped) == (3, "")
    assert result.eval_loss is None, "the one after step 2 is of other weights"
    monkeypatch.undo()
    again = Trainer(config).fit()
    assert again.eval_loss is not None
    whole = Trainer(config | {"output": {**config["output"], "dir": str(tmp_path / "whole")}}).fit()
    assert again.eval_loss == whole.eval_loss
