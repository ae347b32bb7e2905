"""How the device memory of a plan grows with the tokens of a micro-batch, while all else of the plan stays."""

from typing import TYPE_CHECKING, Any, NamedTuple

from megatrain.config import Config
from megatrain.errors import ConfigError, DoesNotFit
from megatrain.planning.planner import RunPlan, SplitPlanner

if TYPE_CHECKING:
    from megatrain.models.decoder import Decoder

_BOUNDLESS = 1 << 50
"""Bytes of memory that no plan exceeds."""


class Growth(NamedTuple):
    """Device memory as a sum."""

    constant: int
    """Bytes that do not depend on the length of rows: weights and their gradients, chunks of logits, buffers."""
    per_token: int
    """Bytes for each token of a micro-batch."""


def device_memory(config: Config, decoder: "Decoder", run_plan: RunPlan) -> Growth | None:
    """The device memory of a plan by the tokens of a micro-batch, from a plan with the same numbers for twice as many.
    Between the two, and mostly beyond, the sum is exact; as what is needed at one time is the largest of several sums,
    other plans may need a few per cent more than it says, never less.
    None where that other plan cannot be made."""
    rows, seq = run_plan.micro_batch
    options = run_plan.options | _numbers(run_plan.plan)
    planner = SplitPlanner(config, decoder, run_plan.device, run_plan.machine, run_plan.rates, options)
    planner.budget = dict.fromkeys(run_plan.budget, _BOUNDLESS)
    try:
        once, twice = (planner.fit(times * rows, run_plan.micro_batches).plan["totals"]["device"] for times in (1, 2))
    except (ConfigError, DoesNotFit):
        return None
    per_token = (twice - once) // (rows * seq)
    return Growth(run_plan.plan["totals"]["device"] - per_token * rows * seq, per_token)


def _numbers(plan: dict[str, Any]) -> dict[str, Any]:
    """What to ask for to get this plan again, with other tokens in a micro-batch."""
    units, layers = plan["units"], plan["units"][1:-1]
    kept = sum(unit["activation"] == "keep" for unit in layers)
    left = [unit for unit in layers if unit["activation"] != "keep" or "large_activation" in unit]
    numbers: dict[str, Any] = {
        "group": plan["group"],
        "large_group": plan["large_group"] or None,
        "keep": kept,
        "large_keep": len(layers) - len(left) if plan["large_group"] else None,
        "inputs": "device" if all(unit["input"] == "device" for unit in left) else "host",
        "inputs_on_disk": sum(unit["input"] == "disk" for unit in layers),
        "activation": None,
        "offload": sum("offload" in (unit["activation"], unit.get("large_activation")) for unit in layers) or None,
        "state_on_device": sum(unit["state"] == "device" for unit in units),
        "updates_on_device": sum(unit["state"] == "host" and unit["update"] == "device" for unit in layers),
        "state_on_disk": sum(unit["state"] == "disk" for unit in units),
        "weights_on_disk": sum(unit.get("weights_on_disk", False) for unit in units),
        "graphs": plan["graphs"],
    }
    return numbers | {key: plan[key] for key in ("slots", "stage_buffers") if plan[key]}
