"""A batch that is too large for the data is said before the run: after a step or two nothing is learnt."""

import logging
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import Config
from megatrain.training.setup import prepare_run
from support.runs import settings


@pytest.mark.parametrize(
    ("train", "data", "said"),
    [
        (
            {"batch_tokens": 4096},
            {},
            "the run has only 1 optimizer step: an epoch has 2,024 tokens in 64 windows,",
        ),
        ({"batch_tokens": 4096}, {}, "and a step takes up to 4,096 tokens. Lower train.batch_tokens (a multiple of"),
        ({"batch_size": 30}, {"packing": False}, "and a step takes up to 30 rows. Lower train.batch_size or raise"),
        ({"batch_size": 2}, {}, ""),
        ({"batch_tokens": 4096, "steps": 3}, {}, ""),
    ],
)
def test_a_run_of_a_few_steps_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, train: dict[str, Any], data: dict[str, Any], said: str
) -> None:
    asked = settings(tmp_path, data=data)
    asked["train"] = {"lr": 1e-3, "schedule": "constant"} | train
    with caplog.at_level(logging.WARNING, "megatrain"):
        planned = prepare_run(Config.from_dict(asked), folder=None)
    planned.close()
    found = [record.getMessage() for record in caplog.records if "optimizer step" in record.getMessage()]
    assert bool(found) == bool(said)
    assert said in "".join(found)
