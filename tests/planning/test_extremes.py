"""Machines at the ends of what can be described: plans add up, stay within their budgets, and take a positive time."""

import math

import pytest

from megatrain.config import Config
from megatrain.models.presets import SHAPES
from megatrain.system import descriptions
from megatrain.training import forecast

FASTEST = "rates.matmul_tflops=1e6,rates.h2d_gbs=1e6,rates.d2h_gbs=1e6,rates.adamw_gparams=1e6,rates.hbm_gbs=1e6"
ON_HOST = "gpu.memory=1GiB,host.memory=3GiB"


def planned(layers: int, machine: str) -> forecast.Forecast:
    model = SHAPES["tiny"].config() | {"num_hidden_layers": layers}
    config = Config.from_dict(
        {"model": {"config": model}, "device": "cuda", "data": {"seq_len": 1024}, "train": {"batch_tokens": 4096}}
    )
    return forecast.without_data(config, descriptions.from_words(machine.split(","), None, machine))


@pytest.mark.parametrize("layers", [1, 100])
@pytest.mark.parametrize(
    "machine",
    [
        ON_HOST,
        "gpu.memory=1GiB,host.memory=10TiB",
        f"{ON_HOST},rates.h2d_gbs=1,rates.d2h_gbs=1",
        f"{ON_HOST},rates.h2d_gbs=1e-6",
        f"{ON_HOST},disk.count=1,disk.free=1GB",  # nothing is left of the drive
        f"gpu.memory=1GiB,host.memory=10TiB,{FASTEST}",
    ],
)
def test_a_plan_adds_up_within_its_budgets_and_takes_time(layers: int, machine: str) -> None:
    report = planned(layers, machine)
    plan, budget = report.run_plan.plan, report.run_plan.budget
    for tier in ("device", "host", "disk"):
        items = [item["bytes"] for item in plan["items"] if item["tier"] == tier]
        assert plan["totals"][tier] == sum(items) <= budget.get(tier, 0)
    assert 0 < report.expected_step_s < math.inf
    assert 0 < report.step_s <= report.expected_step_s


def test_more_host_memory_makes_no_step_longer() -> None:
    seconds = [
        planned(100, f"gpu.memory=1GiB,host.memory={size}").expected_step_s for size in ("3GiB", "16GiB", "1TiB")
    ]
    assert seconds == sorted(seconds, reverse=True)
