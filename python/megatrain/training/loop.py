"""The training loop of one run: batch, step, record, then whatever is due: evaluation, samples, checkpoint.

A stop request is checked between steps, between the batches of an evaluation and between the tokens of a sample. At
each of these points the state is that of a finished step.
"""

import concurrent.futures
import contextlib
import dataclasses
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.config import Config
from megatrain.errors import (
    ConfigError,
    DeviceError,
    DoesNotFit,
    EngineBroken,
    MegatrainError,
    StorageError,
    first_line,
)
from megatrain.system.atomic import storage_error
from megatrain.system.out_of_memory import is_out_of_memory
from megatrain.training import metrics, out_of_memory
from megatrain.training.async_save import CheckpointWriter
from megatrain.training.begin_again import BeginAgain
from megatrain.training.callbacks import Callbacks, Run
from megatrain.training.evaluation import HeldOut, evaluate_sets
from megatrain.training.lr_schedule import Schedule
from megatrain.training.measure import measure
from megatrain.training.metrics import StepRecord, Throughput
from megatrain.training.progress import Display, eval_sets
from megatrain.training.replan import FasterPlan, StepTimes
from megatrain.training.result import Result
from megatrain.training.resume import Position
from megatrain.training.run_dir import DISK_ERRORS, MetricsFile, RunFolder, number_in
from megatrain.training.spikes import StepSpikes
from megatrain.training.stop import RunStopped, Stop
from megatrain.training.watchdog import Stall, Watchdog

if TYPE_CHECKING:
    from collections.abc import Generator

    from megatrain.data import Loader, StepBatch
    from megatrain.engine.engine import Engine
    from megatrain.engine.inputs import StepInputs
    from megatrain.training.setup import PlannedRun, RunComponents

log: logging.Logger = logging.getLogger("megatrain")

_ROWS_SHOWN = 16
"""Most row ids in one line of the log; metrics.jsonl has all of them."""


class TrainingLoop:
    """One run, from its first step to the end of this process's part of it."""

    def __init__(
        self,
        config: Config,
        stop: Stop,
        display: Display,
        callbacks: Callbacks,
        folder: RunFolder,
        metrics_file: MetricsFile,
        parts: "RunComponents",
        position: Position,
    ) -> None:
        from megatrain.data import fingerprint  # which loads torch

        self.config: Config = config
        self.stop: Stop = stop
        self.display: Display = display
        self.folder: RunFolder = folder
        self.callbacks = callbacks
        self.metrics_file = metrics_file
        self.planned: PlannedRun = parts.planned
        self.engine: Engine = parts.engine
        self.position: Position = position
        self.total: int = self.planned.total_steps
        schedule = config.train.schedule
        self.schedule: Schedule = Schedule(
            name=schedule.name, warmup=schedule.warmup, min_lr=schedule.min_lr, decay=schedule.decay, total=self.total
        )
        self.throughput: Throughput = Throughput()
        self.saves: CheckpointWriter = CheckpointWriter(config.output, folder, position.step)
        self._announced = self.saves.saved_step
        """The newest checkpoint that callbacks know of."""
        self.fingerprints: dict[str, Any] = fingerprint.of_run(
            self.planned.train,
            self.planned.held_out,
            self.planned.tokenizer,
            self.planned.model_setup.config.data.train,
        )
        """Of the data and the tokenizer; stored in every checkpoint."""
        self.loss: float | None = None
        self.earlier_loss: float | None = folder.loss(position.step)
        """Of the last step of an earlier part of the run."""
        self.pending: StepRecord | None = None
        """The last step's record; written once it is known what followed the step."""
        self.state: str = "training"
        self.doing: str = "the first evaluation"
        self.new_best: bool = False
        self.retried = False
        """Whether an earlier part of the run ran out of memory, after which it goes on once."""
        self.times: StepTimes | None = None
        """What the first steps take, and the plan that follows from it."""
        self._plan_changed = False
        """Whether it has changed by what steps took."""
        self._undisturbed = True
        """Whether nothing has run beside or between steps since the last one."""
        self.before: dict[str, Any] = {}
        """Measurements from before the first step, for the first record."""
        self.spikes: StepSpikes = StepSpikes()
        for record in folder.metrics()[-metrics.RECENT :]:
            self.spikes.add(number_in(record, "loss"), number_in(record, "grad_norm"))

    def measure_steps(self, start_s: float, final: bool) -> None:
        """Measures the first steps and, where the plan is not `final`, changes it where that pays. `start_s`: seconds
        that loading took."""
        self.times = StepTimes(self.planned, self.total, start_s, final=final)

    def train(self) -> Result:
        """Trains to the end of the schedule, or until asked to stop. Raises RunStopped."""
        position = self.position
        self.callbacks.begin(
            Run(
                config=self.config,
                folder=self.folder.path,
                engine=self.engine,
                first_step=position.step,
                total_steps=self.total,
                stop=self.stop.request,
            )
        )
        try:
            result = self._train()
        except BeginAgain as again:  # the run has not ended
            again.plan_changed |= self._plan_changed
            raise
        except BaseException:
            self.callbacks.end(None)
            raise
        self.callbacks.end(result)
        if self.callbacks.failure:
            raise RunStopped(f"{self.callbacks.failure}; {self._last_good()}") from self.callbacks.error
        return result

    @property
    def _stopping(self) -> bool:
        """Whether the run ends after the present step: somebody asked for it, or a callback failed."""
        return self.stop.requested or bool(self.callbacks.failure)

    def _train(self) -> Result:
        position, watched = self.position, self._watched()
        if position.step >= self.total:
            log.warning("all %d steps are done already", self.total)
        try:
            self._status("training")
            self._first_evaluation()
            if position.owed_eval and self._eval_loaders and not self._stopping:
                self._evaluate(position.step)
                self.throughput.restart()
            if position.step < self.total and self._is_stale():
                log.info("the run stopped early after step %d; raise or remove eval.early_stop to go on", position.step)
            self.display.begin(position.step, self.total)
            with contextlib.closing(self._batches()) as batches:
                for step, batch, prepared in batches:
                    self._step(step, batch, prepared)
                    ended = self._after(step)
                    if ended or self._stopping:
                        break
            self.display.end()
            stopped = self.stop.reason if self.stop.requested and position.step < self.total else ""
            if position.owed_eval and not stopped and not self.callbacks.failure:
                log.info(
                    "%s cut off the evaluation after the last step; the same command makes up for it", self.stop.reason
                )
            self._finish_saves()
            if self.callbacks.failure:
                raise RunStopped(f"{self.callbacks.failure}; {self._last_good()}") from self.callbacks.error
            watched.close()  # an export is one long write
            exported = None if stopped else self._export()
        except BeginAgain:
            raise
        except (EngineBroken, StorageError, DeviceError) as error:
            raise RunStopped(f"{self.doing}: {error}; {self._last_good()}") from error
        except Exception as error:
            if isinstance(error, OSError) and error.errno in DISK_ERRORS:
                path = Path(error.filename) if isinstance(error.filename, str) else self.folder.path
                sentence = f"{self.doing}: {storage_error(error, path)}"
            elif is_out_of_memory(error):
                decoder = self.planned.model_setup.decoder
                sentence = out_of_memory.explain(error, self.doing, self.planned.run_plan, decoder)
                if (correction := self._safer_plan(error)) is not None:
                    raise out_of_memory.PlanAgain(correction, sentence, self.planned.run_plan.micro_batch) from None
            else:
                raise
            raise RunStopped(f"{sentence}; {self._last_good()}") from error
        finally:
            watched.close()
            self.display.end()
            with contextlib.suppress(MegatrainError):
                self._write_pending()
        self._status("stopped" if stopped else "done")
        return self._result(stopped, exported)

    def _safer_plan(self, error: Exception) -> dict[str, Any] | None:
        """What to change in the plan under which `error` ran out of memory, with the last finished step on the disk;
        None where nothing would help, or that has been tried."""
        shortfall = getattr(error, "shortfall", None)
        if self.retried or shortfall is None:
            return None
        from megatrain.planning import planner

        out_of_memory.release(error)
        decoder, run_plan = self.planned.model_setup.decoder, self.planned.run_plan
        correction = planner.safer(self.config, decoder, run_plan, shortfall)
        if correction is not None:
            self._write_pending()
            try:
                self._finish_saves()
            except MegatrainError as unsaved:  # a broken engine has nothing to go on with, a full disk no room for it
                log.warning("the run cannot begin again under a safer plan: %s", unsaved)
                return None
        return correction

    def _watched(self) -> contextlib.ExitStack:
        """Reports a stall of the run until it is closed (`output.report_stall`)."""
        watched, limit = contextlib.ExitStack(), self.config.output.report_stall
        if limit is not None:
            watchdog = Watchdog(
                limit.seconds,
                mark=lambda: (self.engine.lanes()["completed"], self.position.step, self.doing),
                doing=lambda: self.doing,
                lanes=lambda: list(self.engine.lanes()["lanes"]),
                report=self._report_stall,
            )
            watched.callback(watchdog.close)
        return watched

    def _report_stall(self, stall: Stall | None) -> None:
        """From the watchdog's thread: `status.json` keeps its state, and has the stall while it lasts."""
        if stall is None:
            log.warning("%s goes on", self.doing)
        else:
            log.warning("%s", stall.text())
        stalled = {} if stall is None else {"stalled": dataclasses.asdict(stall)}
        self.folder.write_status(self.state, **self.facts(), **stalled)

    def _result(self, stopped: str, exported: Path | None) -> Result:
        position, folder = self.position, self.folder
        steps, best = folder.steps(), position.best_step
        kept = best is not None and best != position.step and best in steps
        measured = bool(stopped) or not position.owed_eval
        return Result(
            step=position.step,
            total_steps=self.total,
            loss=self.loss,
            eval_loss=position.eval_loss if measured else None,
            eval_sets=dict(position.eval_sets) if measured else {},
            stopped=stopped,
            checkpoint=folder.checkpoint(steps[-1]) if steps else None,
            export=exported,
            best_step=best,
            best_checkpoint=folder.checkpoint(best) if kept and best is not None else None,
        )

    @property
    def _eval_loaders(self) -> "dict[str, Loader]":
        return self.planned.eval_loaders

    # ------------------------------------------------------------------------------------------- a step

    def _batches(self) -> "Generator[tuple[int, StepBatch, StepInputs], None, None]":
        """(step from 1, its batch, its prepared inputs) of every step still to do. The next step's batch is read and
        prepared while the present one is computed."""
        loader, prepare = self.planned.loader, self.engine.prepare

        def make(step: int) -> "tuple[StepBatch, StepInputs]":
            batch = loader.batch(step - 1)
            return batch, prepare(batch.micro_batches)

        steps = range(self.position.step + 1, self.total + 1)
        if not steps or self._stopping or self._is_stale():
            return
        with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="megatrain-batch") as pool:
            following = pool.submit(make, steps[0])
            for step in steps:
                batch, prepared = following.result()
                if step < self.total:
                    following = pool.submit(make, step + 1)
                yield step, batch, prepared

    def _step(self, step: int, batch: "StepBatch", prepared: "StepInputs") -> None:
        position = self.position
        self.doing = f"step {step}"
        lr = self.schedule.lr(step, self.config.train.lr)
        self.engine.set_lr(lr)
        every = self.config.train.check_every
        check = every is not None and step % every == 0
        undisturbed, self._undisturbed = self._undisturbed and self.saves.running is None and not check, True
        out = self.engine.step(prepared, check=check)
        seconds = self.throughput.add(batch.num_tokens)
        position.step = step
        position.tokens += batch.num_tokens
        position.seconds += seconds
        unsupervised = batch.num_supervised == 0
        record = StepRecord(
            step=step,
            loss=math.nan if unsupervised else out.loss,
            grad_norm=out.grad_norm,
            lr=lr,
            tokens=batch.num_tokens,
            num_tokens=out.num_tokens,
            clip=out.clip,
            skipped=out.skipped and not unsupervised,
            step_s=seconds,
            tokens_per_s=self.throughput.tokens_per_s,
            epoch=batch.epoch,
            rows=list(batch.row_ids),
            extra=self.before,
        )
        self.before = {}
        if out.aux_loss is not None:
            record.extra = {**record.extra, "aux_loss": out.aux_loss}
        if out.total_weight is not None:
            record.extra = {**record.extra, "total_weight": out.total_weight}
        tokens = measure(record, batch, self.engine, self.planned)
        if self.times is not None and not unsupervised:
            self.times.add(record, tokens, undisturbed)
        self._flag_spikes(record)
        self.pending = record
        if unsupervised:
            record.extra["unsupervised"] = True
            log.warning("step %d: %s; nothing was updated", step, self._without_supervision(batch))
        else:
            self.loss = out.loss
        position.nonfinite = position.nonfinite + 1 if record.skipped else 0
        self.display.step(record, (self.total - step) * self.throughput.step_s, self.config.output.log_every)
        self.callbacks.step(record.as_dict())
        if record.skipped:
            log.warning("step %d: %s (norm %s); the update was skipped", step, out.reason, record.grad_norm)
        if position.nonfinite > self.config.train.max_nonfinite:
            raise RunStopped(
                f"the loss or gradients of {position.nonfinite} steps in a row, up to step {step}, are not finite "
                f"(allowed: train.max_nonfinite, {self.config.train.max_nonfinite}); {self._last_good()}. Lower "
                "train.lr, clip with train.max_grad_norm, or look at the rows of these steps in metrics.jsonl"
            )

    def _without_supervision(self, batch: "StepBatch") -> str:
        where = self.planned.train.where(batch.row_ids[0]) if batch.row_ids else "?"
        return f"none of its {len(batch.row_ids)} rows (the first is {where}) has a supervised token"

    def _flag_spikes(self, record: StepRecord) -> None:
        """Logs a jump of loss or gradient norm with the rows of the step, and marks the record."""
        found = self.spikes.add(None if record.extra.get("unsupervised") else record.loss, record.grad_norm)
        if not found:
            return
        record.extra = {**record.extra, "spike": [name for name, _, _ in found]}
        what = " and ".join(f"{name} {value:.4g} (median of recent steps: {usual:.4g})" for name, value, usual in found)
        rows = list(dict.fromkeys(record.rows))
        shown = ", ".join(map(str, rows[:_ROWS_SHOWN])) + (
            f" and {len(rows) - _ROWS_SHOWN} more" if len(rows) > _ROWS_SHOWN else ""
        )
        where = f" (row {rows[0]} is {self.planned.train.where(rows[0])})" if rows else ""
        log.warning("step %d: spike of %s; rows %s%s", record.step, what, shown, where)

    # ------------------------------------------------------------------------------------------- after a step

    def _after(self, step: int) -> bool:
        """Evaluation, samples, record and checkpoint after a step; returns whether the run ends early."""
        ended = self.new_best = False
        evaluation, samples = self.config.eval, self.config.eval.samples
        last = step == self.total
        due = evaluation.every is not None and step % evaluation.every == 0
        if self._eval_loaders and (due or last):
            ended = self._evaluate(step)
        if samples.every is not None and (step % samples.every == 0 or last) and not self._stopping:
            self._sample(step)
        # The record first: a checkpoint never knows of a step that metrics.jsonl does not.
        self._write_pending()
        self._announce_save()
        if self.saves.running is not None and self.saves.running.is_written:
            self._complete_save()
        asked = self.stop.take_save_request()
        due = asked or self.saves.is_due(step) or (self.new_best and self.config.eval.keep_best)
        if due:
            self._save()
        if asked:
            # Whoever sent the signal waits for a checkpoint that is on the disk, not for one that has begun.
            self._status("saving")
            self._complete_save()
            self._status("training")
        if step % 10 == 0 or last:
            self._status("training")
        if not (ended or last or self._stopping):
            self._change_plan(step, due)
        self.throughput.restart()
        return ended

    def _change_plan(self, step: int, saved: bool) -> None:
        """Changes to another plan where that pays: at once where all state stays where it is, else by FasterPlan, at a
        checkpoint that is written anyway, or at once in a run that writes none before its end."""
        times = self.times
        faster = times.best(step) if times is not None else None
        if times is None or faster is None:
            return
        at_once = faster.in_place is not None
        if not (at_once or saved or self.config.output.save_every is None):
            return
        try:
            if not at_once:
                self._status("saving")
                self._save()
            self._complete_save()
        except StorageError as error:
            if saved or at_once:
                raise
            log.warning("the plan stays as it is: %s", error)
            self.times = None
            return
        if not at_once:
            raise FasterPlan(faster.run_plan, times.explain(faster, step))
        self.doing = f"the change of plan after step {step}"
        try:
            self.engine.change_plan(faster.run_plan.rates, faster.in_place or {})
        except (ConfigError, DoesNotFit, DeviceError) as error:
            self.engine.drain()  # raises where it is broken
            log.warning("the plan stays as it is: %s", first_line(error))
            self.times = None
            return
        log.info("%s", times.explain(faster, step))
        self.planned.run_plan, self._plan_changed = faster.run_plan, True
        self.folder.write_plan(self.engine.plan, faster.run_plan.correction)
        self.times = StepTimes(self.planned, self.total, 0.0, final=True)

    def _first_evaluation(self) -> None:
        if not self._eval_loaders or not self.config.eval.at_start or self.position.step > 0:
            return
        found = self._held_out(0)
        if found is not None:
            self._note_losses(found)
            self._is_best(found.deciding(self.config.eval.best), 0)
            self._note_before(found)
        self.throughput.restart()

    def _note_losses(self, found: HeldOut) -> None:
        position = self.position
        position.eval_loss = found.total.loss
        position.eval_sets = {name: one.loss for name, one in found.sets.items()}
        if position.first_eval_loss is None:
            position.first_eval_loss = found.total.loss

    def _note_before(self, found: HeldOut) -> None:
        """For the next step's record: what was measured before it."""
        self.before = {"eval_loss_before": found.total.loss}
        if sets := eval_sets(found):
            self.before["eval_sets_before"] = sets

    def _evaluate(self, step: int) -> bool:
        """Measures the held-out loss after a step; returns whether it has stopped falling (`eval.early_stop`)."""
        position = self.position
        position.owed_eval = True  # also where it fails
        found = None if self._stopping else self._held_out(step)
        position.owed_eval = found is None
        if found is None:
            return False
        self._note_losses(found)
        if self.pending is not None:
            self.pending.extra |= {"eval_loss": found.total.loss, "eval_accuracy": found.total.accuracy}
            if sets := eval_sets(found):
                self.pending.extra["eval_sets"] = sets
        else:
            self._note_before(found)
        self.new_best = self._is_best(found.deciding(self.config.eval.best), step)
        if not self.new_best:
            position.stale_evals += 1
        if self._is_stale():
            log.info(
                "held-out loss%s %s for %d evaluations: stopping early",
                f" of {self.config.eval.best}" if self.config.eval.best is not None else "",
                "has not been a finite number"
                if position.best_loss is None
                else f"has not fallen below {position.best_loss:.4f} (step {position.best_step})",
                position.stale_evals,
            )
        return self._is_stale()

    def _is_best(self, loss: float, step: int) -> bool:
        """Whether a held-out loss is the least so far, which it then counts as. One that is not a finite number is not:
        nothing is less than NaN."""
        position = self.position
        best = math.isfinite(loss) and (position.best_loss is None or loss < position.best_loss)
        if best:
            position.best_loss, position.best_step, position.stale_evals = loss, step, 0
        return best

    def _is_stale(self) -> bool:
        """Whether `eval.early_stop` evaluations in a row did not improve on the best."""
        limit = self.config.eval.early_stop
        return limit is not None and self.position.stale_evals >= limit

    def _held_out(self, step: int) -> HeldOut | None:
        """Over the held-out data; None when a stop request cut the evaluation off."""
        self._undisturbed = False
        self.doing = f"the evaluation after step {step}" if step else "the first evaluation"
        self._status("evaluating")
        found = evaluate_sets(self.engine, self._eval_loaders, self.stop)
        self._status("training")
        if found is not None:
            self.display.evaluation(step, found)
            self.callbacks.evaluation(step, found)
        return found

    def _sample(self, step: int) -> None:
        from megatrain.training.sampling import sample
        from megatrain.training.setup import end_tokens

        settings = self.config.eval.samples
        self.doing, self._undisturbed = f"the samples after step {step}", False
        texts = []
        for prompt in settings.prompts:
            try:
                text = sample(
                    self.engine,
                    self.planned.tokenizer,
                    prompt,
                    settings.max_new_tokens,
                    max_length=self.config.data.seq_len,
                    ends=end_tokens(self.planned.model_setup)[0],
                    stopped=lambda: self.stop.requested,
                )
            except Exception as error:
                if is_out_of_memory(error):
                    log.warning("step %d: its samples are left out", step)
                raise
            if self.stop.requested:
                return
            texts.append(prompt + text)
            self.display.sample(step, prompt, text)
        if self.pending is not None:
            self.pending.extra["samples"] = texts

    def _write_pending(self) -> None:
        if self.pending is not None:
            record, self.pending = self.pending, None
            self.metrics_file.write(record)

    # ------------------------------------------------------------------------------------------- saving

    def _finish_saves(self) -> None:
        """Saves the last step, and waits until everything is on the disk."""
        if self.position.step > 0:
            self._save()
        if self.saves.running is not None:
            self._status("saving")
            self._complete_save()

    def _complete_save(self) -> None:
        if self.saves.running is not None:
            self.doing = f"the checkpoint of step {self.saves.running.step}"
            self.saves.finish()
        self._announce_save()

    def _announce_save(self) -> None:
        """Calls back once a checkpoint is complete, which the thread that writes it may have found out."""
        step = self.saves.saved_step
        if step > self._announced:
            self._announced = step
            self.callbacks.save(step, self.folder.checkpoint(step))

    def _save(self) -> None:
        """Begins the checkpoint of the last step; it is written in the background while later steps run."""
        step = self.position.step
        if self.saves.has(step):
            return
        self._undisturbed = False
        self._complete_save()
        self.doing = f"the checkpoint of step {step}"
        state = {
            "position": dataclasses.asdict(self.position),
            "config": self.config.to_dict(),
            "numerics": self.engine.numerics(),
            **self.fingerprints,
        }
        self.saves.begin(self.engine, state, step, self.position.best_step if self.config.eval.keep_best else None)

    def _export(self) -> Path | None:
        wanted = self.config.output.export
        if wanted == "never":
            return None
        self._status("exporting")
        self.doing = "the export"
        out = self.folder.export
        self.engine.save_pretrained(out, dtype=wanted, overwrite=True)
        log.info("exported the weights of step %d to %s", self.position.step, out)
        return out

    def _last_good(self) -> str:
        with contextlib.suppress(MegatrainError):
            self.saves.finish()
        return last_good_checkpoint(self.folder)

    def _status(self, state: str) -> None:
        self.state = state
        self.folder.write_status(state, **self.facts())

    def facts(self) -> dict[str, Any]:
        """What `status.json` says besides the state."""
        sets = {"eval_sets": dict(self.position.eval_sets)} if self.position.eval_sets else {}
        return {
            "step": self.position.step,
            "total_steps": self.total,
            "loss": self.loss if self.loss is not None else self.earlier_loss,
            "eval_loss": self.position.eval_loss,
            **sets,
            "best_step": self.position.best_step,
            "checkpoint": self.saves.saved_step if self.saves.saved_step > 0 else None,
        }


def last_good_checkpoint(folder: RunFolder) -> str:
    """The newest complete checkpoint of a run, as the end of a sentence."""
    from megatrain.checkpoint import checkpoint

    newest = checkpoint.latest_complete(folder.path)
    return f"the last good checkpoint is {newest}" if newest is not None else "there is no checkpoint yet"
