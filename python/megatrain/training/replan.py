"""What a run's first steps took, beside what was expected, and the better plan that this may lead to (once a run).

A plan says where things are, and changing it moves them, so a run changes it where all of it is on the disk: at a
checkpoint, from which it goes on under the new plan as it would after a stop. Plans do not show in the numbers, so
neither does this.
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


class FasterPlan(BeginAgain):
    """The measured steps make another plan faster, and every step so far is on the disk."""

    def __init__(self, run_plan: "RunPlan", explanation: str) -> None:
        super().__init__(explanation, run_plan.micro_batch)
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
        self.faster: replan.Faster | None = None
        """The plan to change to where that pays; None before the steps are measured, and where there is none."""
        self._start_s = start_s
        """Seconds that it takes to begin a part of the run: to load, and to compile in its first step."""
        self._first_s = 0.0

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
        self._start_s += max(0.0, self._first_s - step_s)
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
            self._smaller(),
            shown,
        )
        if not self._final:
            setup = self._planned.model_setup
            self.faster = replan.faster_plan(setup.config, setup.decoder, run_plan, step_s, lanes)

    def _smaller(self) -> str:
        """For the message, where the steps were smaller than those that were planned for."""
        run_plan = self._planned.run_plan
        rows, seq = run_plan.micro_batch
        planned, computed = rows * seq * run_plan.micro_batches, statistics.median(tokens for _, tokens in self._steps)
        return f" for {planned:,} tokens ({computed:,.0f} were computed)" if computed < 0.95 * planned else ""

    def pays(self, step: int) -> bool:
        """Whether the steps after this one save more than it takes to change the plan: to write a checkpoint, to read
        it, and to begin as this part of the run began."""
        if self.faster is None:
            return False
        setup = self._planned.model_setup
        cost = self._start_s + replan.checkpoint_s(setup.config, setup.decoder, self._planned.run_plan)
        if (self._total - step) * self.faster.gain_s <= cost:
            self.faster = None  # fewer steps save less
        return self.faster is not None

    def change(self, step: int) -> FasterPlan:
        """To be raised once the checkpoint of `step` is complete."""
        assert self.faster is not None
        faster, left = self.faster, self._total - step
        return FasterPlan(
            faster.run_plan,
            f"step {step}: a step takes {_seconds(faster.step_s + faster.gain_s)}, and with another plan at the "
            f"measured rates {_seconds(faster.step_s)}: {faster.changes}. The plan is changed, once in a run: it goes "
            "on from the checkpoint of this step, with the same numbers, and should save "
            f"{duration(left * faster.gain_s)} in the {left:,} steps left",
        )


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s"
