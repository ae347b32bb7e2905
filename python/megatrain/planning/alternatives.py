"""Why a plan is as it is: what a step would take if one of its decisions were another, each asked of the planner."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatrain.config import Config
from megatrain.errors import ConfigError
from megatrain.planning.planner import RunPlan, SplitPlanner

if TYPE_CHECKING:
    from megatrain.models.decoder import Decoder


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One plan that was not chosen."""

    change: str
    """The setting that asks for it, such as `plan.group=1`."""
    expected_step_s: float | None
    """Predicted seconds of a step; None where it does not fit."""
    bound: str
    """The lane that it waits for most; empty where it does not fit."""


_CHANGES: tuple[tuple[str, Any], ...] = (
    ("group", 1),  # weights cross the link once per micro-batch
    ("activation", "keep"),
    ("activation", "offload"),
    ("activation", "recompute"),
    ("state_on_device", 0),
    ("updates_on_device", 0),
)


def runners_up(config: Config, decoder: "Decoder", run_plan: RunPlan) -> list[Alternative]:
    """Plans with one decision changed, by their time, those that do not fit last. What the configuration asks for
    itself is not varied, and a change that makes no other plan is left out."""
    found = [_planned(config, decoder, run_plan, change) for change in _wanted(run_plan)]
    kept = [one for one in found if one is not None]
    return sorted(kept, key=lambda one: (one.expected_step_s is None, one.expected_step_s or 0.0))


def _wanted(run_plan: RunPlan) -> Iterator[tuple[str, Any]]:
    for key, value in _CHANGES:
        if key in run_plan.options or (key == "group" and run_plan.micro_batches == 1):
            continue
        yield key, value


def _planned(config: Config, decoder: "Decoder", run_plan: RunPlan, change: tuple[str, Any]) -> Alternative | None:
    key, value = change
    options = run_plan.options | {key: value}
    planner = SplitPlanner(config, decoder, run_plan.device, run_plan.machine, run_plan.rates, options)
    try:
        plan = planner.plan(run_plan.micro_batch[0], run_plan.micro_batches)
    except ConfigError:  # the model does not allow it: a router's loss, for example, needs all micro-batches at once
        return None
    if plan is None:
        return Alternative(change=f"plan.{key}={value}", expected_step_s=None, bound="")
    if decisions(plan) == decisions(run_plan.plan):
        return None
    return Alternative(
        change=f"plan.{key}={value}",
        expected_step_s=float(plan["estimate"]["expected_step_s"]),
        bound=str(plan["estimate"]["bound"]),
    )


def decisions(plan: dict[str, Any]) -> dict[str, Any]:
    """What of a plan was decided, without the sums and times that follow."""
    return {key: value for key, value in plan.items() if key not in ("items", "totals", "estimate")}
