"""Rates from the lanes of measured steps, and the plan that follows from them for a card that is described."""

import json
from typing import Any

import pytest

from megatrain import _core
from megatrain.config import Config
from megatrain.models.decoder import Decoder
from megatrain.models.presets import SHAPES
from megatrain.planning import planner, replan
from megatrain.planning.alternatives import decisions
from megatrain.planning.growth import device_memory
from megatrain.system import descriptions
from megatrain.training.setup import prepare_model
from support.plans import H100

CARD = H100 | {"host": {"memory": "128GiB", "cpus": 16}}


def planned(rows: int, **sections: dict[str, Any]) -> tuple[Config, Decoder, planner.RunPlan]:
    """A step of `rows` by 1,024 tokens of a 3B model within 24 GiB of a card."""
    document: dict[str, Any] = {
        "model": {"config": SHAPES["qwen2.5-3b"].config()},
        "data": {"seq_len": 1024},
        "device": "cuda",
        "memory": {"gpu": "24GiB"},
        "train": {"batch_size": rows, "steps": 1},
    }
    config, card = Config.of(document | sections), descriptions.from_description(CARD, "card")
    decoder = prepare_model(config, card, plan_only=True).decoder
    return config, decoder, planner.plan_run(config, decoder, device="cuda", machine=card, rows=rows)


def lanes_of(run_plan: planner.RunPlan) -> dict[str, float]:
    return dict(run_plan.plan["estimate"]["expected_lanes"])


def step_s_of(run_plan: planner.RunPlan) -> float:
    return float(run_plan.plan["estimate"]["expected_step_s"])


def test_lanes_that_take_what_was_expected_change_neither_rates_nor_plan() -> None:
    config, decoder, run_plan = planned(16)
    lanes = lanes_of(run_plan)
    rates = replan.measured_rates(run_plan, step_s_of(run_plan), lanes)
    assert {name: rates[name] for name in run_plan.rates} == pytest.approx(run_plan.rates)
    assert replan.faster_plans(config, decoder, run_plan, step_s_of(run_plan), lanes) == []


def test_at_the_measured_rates_the_plan_takes_what_was_measured() -> None:
    config, decoder, run_plan = planned(16)
    expected = lanes_of(run_plan)
    assert {"compute", "upload", "download", "host"} <= expected.keys()
    lanes = {lane: seconds * {"compute": 0.88, "host": 1.9}.get(lane, 1.1) for lane, seconds in expected.items()}
    rates = replan.measured_rates(run_plan, step_s_of(run_plan), lanes)
    asked = planner.SplitPlanner(config, decoder, "cuda", run_plan.machine, rates, run_plan.options)
    request = asked.fit(run_plan.micro_batch[0], run_plan.micro_batches).request
    found = json.loads(_core.forecast(json.dumps(request), json.dumps(run_plan.plan)))["expected_lanes"]
    for lane in ("compute", "upload", "host"):
        assert found[lane] == pytest.approx(lanes[lane], rel=1e-6), lane
    # the norm of gradients, which the card computes before it sends them, goes with computing
    assert found["download"] == pytest.approx(lanes["download"], rel=0.05)


@pytest.mark.parametrize(
    ("share", "in_place"),
    [(4.0, [False, True]), (0.2, [False, True])],
    ids=["a slow host has layers updated on the card", "a fast host leaves the card to activations"],
)
def test_other_rates_give_plans_of_the_same_numbers_in_the_same_memory(share: float, in_place: list[bool]) -> None:
    config, decoder, run_plan = planned(8)
    lanes = lanes_of(run_plan)
    lanes["host"] *= share
    step_s = max(step_s_of(run_plan), lanes["host"])
    plans = replan.faster_plans(config, decoder, run_plan, step_s, lanes)
    assert [faster.in_place is not None for faster in plans] == in_place
    gains = [faster.gain_s for faster in plans]
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] >= replan.LEAST_GAIN * step_s
    for faster in plans:
        assert faster.step_s == pytest.approx(step_s - faster.gain_s)
        found = faster.run_plan
        for name in ("micro_batch", "micro_batches", "budget", "machine", "precision", "correction"):
            assert getattr(found, name) == getattr(run_plan, name), name
        assert found.options == run_plan.options | (faster.in_place or {})
        on_host = [sum(unit["update"] == "host" for unit in one.plan["units"]) for one in (run_plan, found)]
        assert (on_host[1] - on_host[0]) * (share - 1) < 0
        assert found.plan["totals"]["device"] <= found.budget["device"]
        assert found.plan["totals"]["host"] <= found.budget["host"]
        assert "updated on the device" in faster.changes
        # state and slots are in one piece of memory
        places = [([unit["state"] for unit in one.plan["units"]], one.plan["slots"]) for one in (run_plan, found)]
        assert (places[0] == places[1]) == (faster.in_place is not None)
        # what the engine makes of these rates is the same plan
        engine = planner.SplitPlanner(config, decoder, "cuda", found.machine, found.rates, found.options)
        made = engine.fit(found.micro_batch[0], found.micro_batches).plan
        assert decisions(made) == decisions(found.plan)


def test_what_the_configuration_asks_for_stays() -> None:
    asked = {"updates_on_device": 0, "state_on_device": 0}
    config, decoder, run_plan = planned(16, plan=asked)
    lanes = lanes_of(run_plan)
    lanes["host"] *= 4
    for one in (run_plan, *(f.run_plan for f in replan.faster_plans(config, decoder, run_plan, 1.0, lanes))):
        assert {unit["update"] for unit in one.plan["units"]} == {"host"}


def test_a_lane_that_hardly_works_says_nothing_about_its_rate() -> None:
    _, _, run_plan = planned(16)
    lanes = lanes_of(run_plan) | {"upload": 1e-6, "host": 0.0}
    step_s = 100 * max(lanes_of(run_plan).values())
    rates = replan.measured_rates(run_plan, step_s, lanes)
    assert {name: rates[name] for name in ("h2d_gbs", "adamw_gparams")} == {
        name: run_plan.rates[name] for name in ("h2d_gbs", "adamw_gparams")
    }


def test_a_large_group_is_planned_again_with_its_numbers_for_another_length() -> None:
    asked = {"micro_batch": 4, "group": 1, "large_group": 4, "keep": 36, "large_keep": 5, "inputs": "host"}
    asked |= {"graphs": False}
    config, decoder, run_plan = planned(32, plan=asked, memory={"gpu": "60GiB"})
    plan = run_plan.plan
    assert (plan["group"], plan["large_group"], plan["micro_batches"]) == (1, 4, 8)
    again = [number for number, unit in enumerate(plan["units"]) if unit.get("large_activation") == "recompute"]
    assert again == list(range(1, 32)), "all but the last five are kept in later groups only"
    assert {unit["activation"] for unit in plan["units"]} == {"keep"}
    assert sum(unit["input"] == "host" for unit in plan["units"]) == 31
    growth = device_memory(config, decoder, run_plan)
    assert growth is not None
    longer, _, other = planned(64, plan={**asked, **_same(plan), "micro_batch": 8}, memory={"gpu": "140GiB"})
    assert longer.plan.large_group == other.plan["large_group"] == 4
    needed = growth.constant + growth.per_token * 8 * 1024
    assert needed == pytest.approx(other.plan["totals"]["device"], rel=0.001)


def _same(plan: dict[str, Any]) -> dict[str, Any]:
    """What decides where state is and how many buffers there are."""
    units = plan["units"]
    return {
        "state_on_device": sum(unit["state"] == "device" for unit in units),
        "updates_on_device": sum(unit["state"] == "host" and unit["update"] == "device" for unit in units),
        "slots": plan["slots"],
        "stage_buffers": plan["stage_buffers"],
    }
