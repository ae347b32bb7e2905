"""One training run, from a configuration to its result.

    from megatrain import Trainer
    result = Trainer("examples/quickstart.yaml").fit()

Loading can be interrupted at any point, since nothing can be lost before the first step. From then on the loop decides
where a stop is safe.
"""

import contextlib
import dataclasses
import gc
import logging
import time
from typing import TYPE_CHECKING, Any

from megatrain.checkpoint.step_folders import newest_written, set_aside
from megatrain.config import Config
from megatrain.data import given_rows
from megatrain.engine.options import known_keywords
from megatrain.errors import DoesNotFit, MegatrainError, StorageError
from megatrain.system.out_of_memory import is_out_of_memory
from megatrain.training import out_of_memory
from megatrain.training.begin_again import BeginAgain
from megatrain.training.callbacks import Callback, Callbacks, check
from megatrain.training.callbacks import configured as callbacks_of
from megatrain.training.loop import TrainingLoop, last_good_checkpoint
from megatrain.training.progress import Display, default_mode
from megatrain.training.replan import FasterPlan
from megatrain.training.result import Result
from megatrain.training.resume import Position, ResumePoint, resolve_resume
from megatrain.training.run_dir import RunFolder, output_folder
from megatrain.training.stop import RunStopped, Stop, StopRequested

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from megatrain.training.setup import RunComponents

log: logging.Logger = logging.getLogger("megatrain")

__all__ = ["Result", "Trainer"]


@known_keywords
class Trainer:
    """One run. `config` is a path, a mapping or a Config; `callbacks` are called while it trains. `rows` are those of
    sources that the configuration calls `rows:NAME`, by name: lists of dicts, or data sets of `datasets`, which are
    read as a file's rows are. Raises ConfigError, DoesNotFit, CheckpointError or StorageError while it loads, and
    RunStopped when the run has to end itself."""

    def __init__(
        self,
        config: "Config | str | Path | Mapping[str, Any]",
        *,
        stop: Stop | None = None,
        display: Display | None = None,
        callbacks: "Sequence[Callback]" = (),
        rows: "Mapping[str, Iterable[Mapping[str, Any]]] | None" = None,
    ) -> None:
        self.config: Config = Config.of(config)
        self.config.require("data", "output")
        self._rows = given_rows.check(rows, self.config)
        self.stop: Stop = stop or Stop()
        self.display: Display = display or Display(default_mode())
        self.callbacks: Callbacks = Callbacks([*callbacks_of(self.config), *check(callbacks)])

    def fit(self) -> Result:
        """Trains to the end of the schedule, or until asked to stop."""
        folder = RunFolder(output_folder(self.config))
        try:
            with self.display, given_rows.given(self._rows):
                folder.begin_log()
                return self._fit(folder)
        except StopRequested as stopped:
            stopped.checkpoint = newest_written(folder.path)
            raise
        finally:
            folder.discard_if_empty()
            folder.close()

    def _fit(self, folder: RunFolder) -> Result:
        before: list[BeginAgain] = []
        try:
            while True:
                try:
                    return self._part(folder, before)
                except BeginAgain as again:
                    before.append(again.with_traceback(None))
                before[-1].__context__ = None  # which refers to what ran out of memory
                gc.collect()
                self._explain(folder, before[-1])
        finally:
            if before:
                self.callbacks.end(None)  # where it has not ended by itself

    def _explain(self, folder: RunFolder, again: BeginAgain) -> None:
        """Says why the run goes on under another plan, and notes what it has to change from now on."""
        if isinstance(again, FasterPlan):
            log.info("%s", again)
            return
        if not isinstance(again, out_of_memory.PlanAgain):
            log.warning("%s", again)
            return
        log.warning("%s. Planning again, once, with %s", again, again.changes())
        try:
            folder.correct_plan(again.correction)
        except StorageError as error:
            folder.write_status("failed", **folder.facts(), reason=f"{again}; {error}")
            raise RunStopped(f"{again}; {error}; {last_good_checkpoint(folder)}") from error

    def _part(self, folder: RunFolder, before: list[BeginAgain]) -> Result:
        """The run from its newest checkpoint; `before`: why it is begun again, the newest reason last."""
        newest, began = before[-1] if before else None, time.monotonic()
        with contextlib.ExitStack() as stack:
            try:
                with self.stop.interruptible():
                    folder.write_status("loading", **folder.facts())
                    origin, parts = resolve_resume(
                        self._resumable(newest), folder.path, lambda origin: self._assemble(folder, origin, newest)
                    )
                    stack.callback(parts.close)
                    if newest is not None and parts.planned.run_plan.micro_batch != newest.micro_batch:
                        raise DoesNotFit(f"micro-batches of {newest.micro_batch[0]} rows do not fit")
            except (MegatrainError, KeyboardInterrupt) as error:
                if newest is None:
                    folder.withdraw()
                    raise
                if isinstance(newest, FasterPlan) and not isinstance(error, KeyboardInterrupt):
                    raise newest.failed(error) from None
                state = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
                folder.write_status(state, **folder.facts(), reason=_reason(error))
                if isinstance(error, KeyboardInterrupt):
                    raise
                raise RunStopped(f"{newest}; no other plan: {error}; {last_good_checkpoint(folder)}") from error
            except BaseException as error:
                if isinstance(newest, FasterPlan) and is_out_of_memory(error):
                    raise newest.failed(error) from None
                folder.write_status("failed", **folder.facts(), reason=_reason(error))
                if is_out_of_memory(error):
                    raise RunStopped(out_of_memory.explain(error, "loading")) from error
                raise
            facts = folder.facts
            try:
                loop = self._begin(folder, parts, origin)
                loop.retried = any(isinstance(one, out_of_memory.PlanAgain) for one in before)
                final = any(one.plan_changed for one in before)
                loop.measure_steps(time.monotonic() - began, final)
                facts = loop.facts
                stack.callback(setattr, self.stop, "on_abandon", None)
                self.stop.on_abandon = lambda reason: folder.write_status("killed", **loop.facts(), reason=reason)
                return loop.train()
            except BeginAgain:
                raise
            except BaseException as error:
                state = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
                folder.write_status(state, **facts(), reason=_reason(error))
                raise

    def _resumable(self, newest: BeginAgain | None) -> Config:
        """The configuration, under which a run that is begun again finds what this process has written."""
        if newest is None or self.config.output.resume != "never":
            return self.config
        return dataclasses.replace(self.config, output=dataclasses.replace(self.config.output, resume="auto"))

    def _begin(self, folder: RunFolder, parts: "RunComponents", origin: ResumePoint | None) -> TrainingLoop:
        """Writes what the folder holds of a run before its first step. Raises RunStopped when the disk has no room."""
        config = self.config.run_plan(parts.planned.run_plan.precision)
        position = origin.position if origin is not None else Position()
        try:
            with self.stop.interruptible():
                folder.write_config(config.to_yaml())
                folder.write_plan(parts.engine.plan, parts.planned.run_plan.correction)
                folder.write_data(_profile(parts))
                self._log_plan(parts, None if origin is None else origin.numerics)
            # A branch, and a run that begins anew, found no whole checkpoint in the folder at all.
            own = origin is not None and not origin.from_elsewhere
            set_aside(folder.path, position.step if own else position.step - 1)
            metrics_file = folder.begin_metrics(position.step)
        except StorageError as error:
            raise RunStopped(f"before step {position.step + 1}: {error}; {last_good_checkpoint(folder)}") from error
        return TrainingLoop(config, self.stop, self.display, self.callbacks, folder, metrics_file, parts, position)

    def _log_plan(self, parts: "RunComponents", saved: dict[str, Any] | None) -> None:
        """The plan in a few lines; `plan.json` has all of it."""
        from megatrain.training import plan_summary
        from megatrain.training.forecast import forecast

        planned, numerics = parts.planned, parts.engine.numerics()
        data = (planned.train, planned.held_out)
        report = forecast(planned.model_setup, planned.run_plan, saved, data, planned.total_steps, numerics)
        for line in plan_summary.lines(report):
            log.info(line)
        log.info(plan_summary.numerics_key(numerics))
        log.info("a stop (Ctrl-C, SIGTERM) needs %s", plan_summary.grace(report))
        if self.config.output.save_every is None:
            log.info(
                "output.save_every is not set: only the end of the run or a stop saves, and a kill loses every step"
            )

    def _assemble(self, folder: RunFolder, origin: ResumePoint | None, newest: BeginAgain | None) -> "RunComponents":
        from megatrain.training.setup import assemble

        folder.clear_leftovers()
        return assemble(
            self.config,
            folder=folder.path,
            resume=None if origin is None else origin.folder,
            numerics=None if origin is None else origin.numerics,
            progress=self.display.loading,
            decided=newest.run_plan if isinstance(newest, FasterPlan) else None,
        )


def _profile(parts: "RunComponents") -> dict[str, Any]:
    """The data sets in numbers, for the report."""
    from megatrain.data import inspection

    planned = parts.planned
    held_out = planned.held_out
    return {
        "train": inspection.summary(planned.train).to_dict(),
        "eval": inspection.summary(held_out).to_dict() if held_out is not None else None,
        **inspection.sets(held_out),
    }


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
