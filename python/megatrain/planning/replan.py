"""A better plan for a run that has measured what its steps take.

Rates that were measured alone, or are those of a usual machine, tell how long a step takes to about a tenth. Once a run
has computed a few steps, it knows for how long each lane was busy. Rates that would have predicted these times make the
planner choose again: for the same split of a step, the same budgets and whatever the configuration asks for, so that
neither the numbers nor the memory of the run change.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatrain.config import Config
from megatrain.errors import ConfigError, DoesNotFit
from megatrain.planning.alternatives import decisions
from megatrain.planning.disk_space import disk_needed
from megatrain.planning.planner import RunPlan, SplitPlanner

if TYPE_CHECKING:
    from megatrain.models.decoder import Decoder

LEAST_GAIN = 0.05
"""Share of a step that another plan has to save: predictions of a plan that has not run are no better."""

_LEAST_SHARE = 0.02
"""Share of a step below which a lane says nothing about its rates: a few short copies take as long as it takes to begin
them."""

_RATES = {
    "compute": ("matmul_tflops", "float8_tflops", "hbm_gbs"),
    "upload": ("h2d_gbs",),
    "download": ("d2h_gbs",),
    "host": ("adamw_gparams", "adamw_bf16_gparams", "adamw_8bit_gparams"),
    "state_read": ("state_read_gbs",),
    "state_write": ("state_write_gbs",),
}
"""The rates that each lane's time follows from. `update`, on the device, goes with `compute`."""

_USUAL_DISK_GBS = 1.0
"""10⁹ bytes a second that a disk reads or writes, where that was not measured."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Faster:
    """A plan that measured times make better than the present one."""

    run_plan: RunPlan
    step_s: float
    """Predicted seconds of a step."""
    gain_s: float
    """Seconds of a step that it saves."""
    changes: str
    """What is decided otherwise, in words."""
    in_place: dict[str, Any] | None
    """Numbers of a plan by which all state stays where it is; None where some of it moves."""


def measured_rates(run_plan: RunPlan, step_s: float, lanes: Mapping[str, float]) -> dict[str, float]:
    """The rates at which the plan's lanes would be busy for as long as was measured (`lanes`, seconds of a step that
    took `step_s`)."""
    from megatrain.engine.profile import LAUNCH_S

    rates = dict(run_plan.rates)
    for lane, names in _RATES.items():
        expected, measured = run_plan.plan["estimate"]["expected_lanes"].get(lane, 0.0), lanes.get(lane, 0.0)
        if min(expected, measured) <= 0 or max(expected, measured) < _LEAST_SHARE * step_s:
            continue
        rates |= {name: rates[name] * expected / measured for name in names if name in rates}
        if lane == "compute":
            rates["launch_s"] = rates.get("launch_s", LAUNCH_S) * measured / expected
    return rates


def faster_plans(
    config: Config, decoder: "Decoder", run_plan: RunPlan, step_s: float, lanes: Mapping[str, float]
) -> list[Faster]:
    """Plans that save `LEAST_GAIN` of a step or more at the measured rates: the fastest one, and where that moves
    state, the fastest that moves none."""
    rates = measured_rates(run_plan, step_s, lanes)
    found = _faster_plan(config, decoder, run_plan, step_s, rates, {})
    if found is None:
        return []
    stays, places = _state_stays(run_plan.plan), _places(run_plan.plan)
    plans = [found] if _places(found.run_plan.plan) != places else []
    other = _faster_plan(config, decoder, run_plan, step_s, rates, stays)
    if other is not None and _places(other.run_plan.plan) == places:
        plans.append(dataclasses.replace(other, in_place=stays))
    return plans


def _faster_plan(
    config: Config,
    decoder: "Decoder",
    run_plan: RunPlan,
    step_s: float,
    rates: dict[str, float],
    numbers: dict[str, Any],
) -> Faster | None:
    from megatrain import _core

    planner = SplitPlanner(config, decoder, run_plan.device, run_plan.machine, rates, run_plan.options | numbers)
    planner.budget = run_plan.budget  # of which this run holds a part now
    try:
        request, plan, _ = planner.fit(run_plan.micro_batch[0], run_plan.micro_batches)
    except (DoesNotFit, ConfigError):  # nothing but rates has changed, so a plan that fits must be there
        return None
    if decisions(plan) == decisions(run_plan.plan):
        return None

    def forecast(asked: dict[str, Any], planned: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(_core.forecast(json.dumps(asked), json.dumps(planned)))
        return found

    present = float(forecast(request, run_plan.plan)["expected_step_s"])
    # What a step waits for besides its lanes stays; where the prediction is too long, so is what it says is saved.
    gain = (present - float(plan["estimate"]["expected_step_s"])) * min(1.0, step_s / present)
    if gain < LEAST_GAIN * step_s:
        return None
    # The least that a step can take still follows from the machine's own rates.
    least = forecast(request | {"rates": run_plan.request["rates"]}, plan)
    plan["estimate"] |= {key: least[key] for key in ("step_s", "lanes")}
    made = dataclasses.replace(run_plan, rates=planner.rates, request=request, plan=plan, options=planner.options)
    return Faster(run_plan=made, step_s=step_s - gain, gain_s=gain, changes=changes(run_plan.plan, plan), in_place=None)


def _state_stays(plan: dict[str, Any]) -> dict[str, Any]:
    """Numbers to ask for, by which another plan leaves all state where it is under this one."""
    states = [unit["state"] for unit in plan["units"]]
    numbers: dict[str, Any] = {"state_on_device": states.count("device")}
    if numbers["state_on_device"]:  # whose weights are in one piece of memory with the slots
        numbers["slots"] = plan["slots"]
    if "disk" in states:
        numbers["state_on_disk"] = states.count("disk")
        numbers["weights_on_disk"] = sum(unit.get("weights_on_disk", False) for unit in plan["units"])
    return numbers


def _places(plan: dict[str, Any]) -> tuple[Any, ...]:
    """Where state and weights are."""
    states = [unit["state"] for unit in plan["units"]]
    weights = [unit.get("weights_on_disk", False) for unit in plan["units"]]
    return states, weights, plan["slots"] if "device" in states else None


def checkpoint_s(config: Config, decoder: "Decoder", run_plan: RunPlan) -> float:
    """Seconds to write a checkpoint and to read it again."""
    size = disk_needed(config, decoder, run_plan.precision)["checkpoint"]
    rates = (run_plan.rates.get(name, _USUAL_DISK_GBS) for name in ("disk_write_gbs", "disk_read_gbs"))
    return sum(size / (rate * 1e9) for rate in rates)


def changes(before: dict[str, Any], after: dict[str, Any]) -> str:
    """The difference of two plans in words, such as "weight slots 2 → 4"."""
    old, new = _in_numbers(before), _in_numbers(after)
    return ", ".join(f"{what} {old[what]} → {new[what]}" for what in old if old[what] != new[what]) or "other buffers"


def _in_numbers(plan: dict[str, Any]) -> dict[str, Any]:
    units = plan["units"]
    activations = [unit["activation"] for unit in units[1:-1]]
    return {
        "units that keep their activations": activations.count("keep"),
        "offload them": activations.count("offload"),
        "recompute them": activations.count("recompute"),
        "inputs of units on the host": sum(unit["input"] == "host" for unit in units),
        "inputs of units on disk": sum(unit["input"] == "disk" for unit in units),
        "units with state on the device": sum(unit["state"] == "device" for unit in units),
        "with state on disk": sum(unit["state"] == "disk" for unit in units),
        "with weights on disk": sum(unit.get("weights_on_disk", False) for unit in units),
        "units updated on the device": sum(unit["update"] == "device" for unit in units),
        "micro-batches in a group": plan["group"],
        "in the large group": max(plan["large_group"], plan["group"]),
        "units that keep their activations in the other groups only": sum("large_activation" in unit for unit in units),
        "weight slots": plan["slots"],
        "gradient slabs": plan["slabs"],
        "gradient buffers": plan["grad_buffers"],
        "staging buffers": plan["stage_buffers"],
        "captured layers": "yes" if plan["graphs"] else "no",
    }
