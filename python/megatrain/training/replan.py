"""What a run's first steps took, beside what was expected, and the better plan that this may lead to (once a run).

Where the better plan leaves all state where it is, the engine changes to it between two steps. Where it moves state,
the run changes where all of that is on the disk: at a checkpoint, from which it goes on as it would after a stop. Plans
do not show in the numbers, so neither does this.
"""

import logging
import statistics
from typing import TYPE_CHECKING

from megatrain.errors import first_line
from megatrain.planning import replan
from megatrain.training.begin_again import BeginAgain
from megatrain.training.metrics import duration

if TYPE_CHECKING:
    from megatrain.planning.planner import RunPlan
    from megatrain.training.metrics import StepRecord
    from megatrain.training.setup import PlannedRun

log: logging.Logger = logging.getLogger("megatrain")

WARM_UP = 3
"""Steps that are not measured: layers are compiled and captured in them, and the updates of none overlap with them."""
MEASURED = 5
"""Steps that are; of each of their numbers the median counts."""
IN_PLACE = frozenset({"cpu"})
"""Devices on which a plan may change between two steps. On a card that allocates beside torch what the engine has just
freed. `tests/gpu/check_replan.py` shows it where the card has room to spare; where it is full, it is not proven yet."""


class FasterPlan(BeginAgain):
    """The measured steps make another plan faster, and every step so far is on the disk."""

    def __init__(self, run_plan: "RunPlan", explanation: str) -> None:
        super().__init__(explanation, run_plan.micro_batch)
        self.plan_changed = True
        self.run_plan = run_plan
        """The plan to go on with."""

    def failed(self, error: BaseException) -> BeginAgain:
        """Why the run goes on under a plan that is made as at its start."""
        return BeginAgain(f"the plan of measured rates cannot be used ({first_line(error)})", self.micro_batch)


class StepTimes:
    """The first steps of a part of a run, and the plan that follows from them."""

    def __init__(self, planned: "PlannedRun", total_steps: int, start_s: float, *, final: bool) -> None:
        self._planned, self._total, self._final = planned, total_steps, final
        self._seen = 0
        self._steps: list[tuple[StepRecord, int]] = []
        self._plans: list[replan.Faster] = []
        """Plans to change to where that pays; none before the steps are measured."""
        self._start_s = start_s
        """Seconds that it takes to load."""
        self._checkpoint_s = 0.0
        """Seconds to write a checkpoint and to read it."""
        self._first_s = 0.0
        """Seconds that a first step takes longer than others: what is compiled and allocated in it."""

    def add(self, record: "StepRecord", tokens: int, undisturbed: bool) -> None:
        """Counts a step that computed `tokens` tokens, padding included. `undisturbed`: nothing but the step itself was
        computed, read or written. With the last one that is measured, says how long they took and plans again."""
        self._seen += 1
        if self._seen == 1:
            self._first_s = record.step_s
        if self._seen <= WARM_UP or not undisturbed or len(self._steps) == MEASURED:
            return
        self._steps.append((record, tokens))
        if len(self._steps) == MEASURED:
            self._compare(record)

    def _compare(self, last: "StepRecord") -> None:
        records, run_plan = [record for record, _ in self._steps], self._planned.run_plan
        step_s = statistics.median(record.step_s for record in records)
        self._first_s = max(0.0, self._first_s - step_s)
        lanes = {
            lane: statistics.median(record.lanes.get(lane, 0.0) for record in records)
            for lane in set().union(*(record.lanes for record in records))
        }
        estimate = run_plan.plan["estimate"]
        last.extra = {**last.extra, "expected_step_s": estimate["expected_step_s"], "median_step_s": step_s}
        shown = ", ".join(
            f"{lane} {_seconds(lanes.get(lane, 0.0))} of {_seconds(expected)}"
            for lane, expected in estimate["expected_lanes"].items()
            if expected > 0 or lanes.get(lane, 0.0) > 0
        )
        log.info(
            "steps %d to %d took %s (median), %s was expected%s; measured of expected by lane: %s",
            records[0].step,
            last.step,
            _seconds(step_s),
            _seconds(estimate["expected_step_s"]),
            self._usual() + self._smaller(),
            shown,
        )
        if not self._final:
            setup = self._planned.model_setup
            found = replan.faster_plans(setup.config, setup.decoder, run_plan, step_s, lanes)
            self._plans = [one for one in found if one.in_place is None or run_plan.device in IN_PLACE]
            self._checkpoint_s = replan.checkpoint_s(setup.config, setup.decoder, run_plan)

    def _usual(self) -> str:
        """For the message, where nothing was measured before."""
        return "" if self._final or self._planned.run_plan.measured else " by the rates of a usual machine"

    def _smaller(self) -> str:
        """For the message, where the steps were smaller than those that were planned for."""
        run_plan = self._planned.run_plan
        rows, seq = run_plan.micro_batch
        planned, computed = rows * seq * run_plan.micro_batches, statistics.median(tokens for _, tokens in self._steps)
        return f" for {planned:,} tokens ({computed:,.0f} were computed)" if computed < 0.95 * planned else ""

    def best(self, step: int) -> replan.Faster | None:
        """The plan by which the steps after this one are over first, if that is before they would be otherwise: with
        the time that it takes to compile again and, where state moves, to write a checkpoint and to begin from it."""
        left = self._total - step
        found = max(self._plans, key=lambda one: left * one.gain_s - self._cost_s(one), default=None)
        if found is None or left * found.gain_s <= self._cost_s(found):
            self._plans = []  # fewer steps save less
            return None
        return found

    def _cost_s(self, faster: replan.Faster) -> float:
        if faster.in_place is not None:
            return self._first_s
        return self._first_s + self._start_s + self._checkpoint_s

    def explain(self, faster: replan.Faster, step: int) -> str:
        """The change of plan after `step` in one line."""
        left = self._total - step
        how = (
            "all state stays where it is"
            if faster.in_place is not None
            else "state moves, so it goes on from the checkpoint of this step"
        )
        return (
            f"step {step}: a step takes {_seconds(faster.step_s + faster.gain_s)}, and with another plan at the "
            f"measured rates {_seconds(faster.step_s)}: {faster.changes}. The run changes its plan, once, with the "
            f"same numbers ({how}), and should save {duration(left * faster.gain_s)} in the {left:,} steps left"
        )


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s"
