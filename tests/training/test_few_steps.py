"""A batch that is too large for the data is said before the run: after a step or two nothing is learnt."""

import logging
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import Config
from megatrain.training import plan_summary
from megatrain.training.forecast import Forecast, forecast
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


def test_a_step_that_the_data_do_not_fill_is_timed_as_large_as_it_is(tmp_path: Path) -> None:
    def forecast_of(train: dict[str, Any], data: dict[str, Any] | None = None) -> Forecast:
        asked = settings(tmp_path, data=data or {})
        asked["train"] = {"lr": 1e-3, "schedule": "constant"} | train
        planned = prepare_run(Config.from_dict(asked), folder=None)
        planned.close()
        data_sets = (planned.train, planned.held_out)
        return forecast(planned.model_setup, planned.run_plan, None, data_sets, planned.total_steps)

    whole = forecast_of({"batch_tokens": 64 * 32})  # an epoch has 64 windows of 32 tokens
    larger = forecast_of({"batch_tokens": 1 << 20})
    assert whole.total_steps == larger.total_steps == 1
    assert larger.step_tokens == whole.step_tokens == larger.run_tokens == 64 * 32
    assert larger.expected_step_s == whole.expected_step_s
    assert larger.run_s == whole.run_s
    said = plan_summary.lines(larger)
    assert "step: 2,048 tokens in 32 micro-batches of up to 2 x 32" in said
    assert not any("more tokens per step" in line for line in said), "there are no more"
    rows = forecast_of({"batch_size": 1000}, {"packing": False})
    assert rows.step_tokens == 90 * 32, "as many rows as there are, each as long as it may be"
    unpacked = forecast_of({"batch_tokens": 1 << 20}, {"packing": False})
    assert unpacked.step_tokens == 64 * 32, "the tokens of all rows, as full rows"
