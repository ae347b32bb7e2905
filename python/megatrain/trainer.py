"""The loop: batch, step, log, evaluate, save. What it calls is in `engine`, `data`, `checkpoint`; what it writes, in
`run_folder`.

    from megatrain import Trainer
    result = Trainer("examples/quickstart.yaml").fit()

The order within a step: rate, batch, engine step, record, then what is due after it (evaluation, samples, checkpoint).
A stop request is looked at between steps and between the batches of an evaluation: at each of these points the state is
that of a finished step.
"""

import concurrent.futures
import dataclasses
import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatrain.assembly import Parts, assemble
from megatrain.resume import Position, take_up

from megatrain import metrics
from megatrain.config import Config
from megatrain.errors import EngineBroken, StorageError
from megatrain.metrics import StepRecord, Throughput
from megatrain.progress import Display
from megatrain.run_folder import RunFolder
from megatrain.schedules import Schedule
from megatrain.stop import RunStopped, Stop, StopRequested

log = logging.getLogger("megatrain")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What became of a run."""

    step: int
    """Optimizer steps done, earlier parts of the run included."""
    total_steps: int
    loss: float | None
    """Training loss of the last step; None when no step was taken."""
    eval_loss: float | None
    """Last held-out loss."""
    stopped: str
    """Empty when the run came to its end; else what stopped it, such as SIGTERM."""
    checkpoint: Path | None
    """The newest checkpoint."""
    export: Path | None
    """The Hugging Face folder written at the end."""


class Trainer:
    """One run. `config` is a path, a mapping or a `Config`. Raises ConfigError, DoesNotFit or CheckpointError before
    the first step, RunStopped when the run has to end itself."""

    def __init__(
        self,
        config: "Config | str | Path | dict[str, Any]",
        *,
        stop: Stop | None = None,
        display: Display | None = None,
    ) -> None:
        self.config = Config.of(config)
        self.stop = stop or Stop()
        self.display = display or Display()
        self._parts: Parts | None = None
        self._record: StepRecord | None = None

    def fit(self) -> Result:
        """Trains to the end of the schedule, or until asked to stop."""
        from megatrain.assembly import run_directory

        folder = RunFolder(run_directory(self.config))
        try:
            with self.display:
                folder.begin_log()
                return self._fit(folder)
        except BaseException as error:
            folder.write_status("failed" if not isinstance(error, KeyboardInterrupt) else "stopped", reason=str(error))
            raise
        finally:
            if self._parts is not None:
                self._parts.close()
            folder.discard_if_empty()
            folder.close()

    # Everything up to the first step. Nothing is lost by dropping it, so a stop request does so at once.

    def _fit(self, folder: RunFolder) -> Result:
        with self.stop.interruptible():
            folder.write_status("loading")
            folder.clear_leftovers()
            origin = take_up(self.config, folder)
            self._parts = parts = assemble(self.config, origin=origin, display=self.display)
            self._position = position = origin.position if origin is not None else Position()
            self._total = total = parts.total_steps
            settings = self.config.train.schedule
            self._schedule = Schedule(
                name=settings.name,
                warmup=settings.warmup,
                min_lr=settings.min_lr,
                decay=settings.decay,
                total=max(1, total),
            )
            folder.write_config(self.config.to_yaml())
            folder.write_plan(parts.plan)
            folder.begin_metrics(position.step)
        if position.step >= total:
            log.info("the run has all of its %d steps already", total)
        return self._train(folder, parts)

    def _train(self, folder: RunFolder, parts: Parts) -> Result:
        position, total = self._position, self._total
        self._throughput = Throughput()
        self._saved_at, self._saved_step = time.monotonic(), position.step
        self._pending: dict[str, Any] = {}
        stopped = ""
        loss: float | None = None
        try:
            if self.config.eval.at_start and position.step == 0:
                self._evaluate(folder, parts)
            self.display.begin(position.step, total)
            for step, batch in self._batches(parts, position.step):
                folder.write_status("training", step=step, total_steps=total, loss=loss, checkpoint=self._saved_step)
                self._step(folder, parts, step, batch)
                loss = self._record.loss if self._record is not None else loss
                if self._after_step(folder, parts):
                    break
                if self.stop.requested:
                    break
            stopped = self.stop.reason if self.stop.requested and position.step < total else ""
            self.display.end()
            if position.step > self._saved_step or not folder.steps():
                self._save(folder, parts)
            if not stopped and not self.stop.requested:
                self._finish(folder, parts)
        except StopRequested as error:
            stopped = str(error)
        except (EngineBroken, StorageError) as error:
            raise RunStopped(f"step {position.step + 1}: {error}; {self._last_good(folder)}") from error
        exported = folder.export if folder.export.exists() and not stopped else None
        newest = folder.steps()
        result = Result(
            step=position.step,
            total_steps=total,
            loss=loss,
            eval_loss=position.eval_loss,
            stopped=stopped or (self.stop.reason if self.stop.requested else ""),
            checkpoint=folder.checkpoint(newest[-1]) if newest else None,
            export=exported,
        )
        folder.write_status(
            "stopped" if stopped else "done",
            step=result.step,
            total_steps=total,
            loss=loss,
            eval_loss=result.eval_loss,
            checkpoint=self._saved_step,
        )
        return result

    def _batches(self, parts: Parts, done: int) -> Iterator[tuple[int, Any]]:
        """Steps done+1 … total with their batches; the next batch is made while this one is computed."""
        steps = range(done + 1, self._total + 1)
        if not steps or self.stop.requested:
            return
        with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="megatrain-data") as pool:
            coming = pool.submit(parts.loader.batch, steps[0])
            for step in steps:
                batch = coming.result()
                if step < self._total:
                    coming = pool.submit(parts.loader.batch, step + 1)
                yield step, batch

    def _step(self, folder: RunFolder, parts: Parts, step: int, batch: Any) -> None:
        position = self._position
        factor = self._schedule.lr(step, self.config.train.lr)
        parts.engine.set_lr(factor)
        record = StepRecord(
            step=step, loss=math.nan, grad_norm=math.nan, lr=factor, tokens=batch.tokens, num_tokens=batch.supervised
        )
        self._throughput.resume()
        if batch.supervised == 0:
            log.warning(
                "step %d: none of its %d rows (the first is row %s) has a supervised token; nothing was changed",
                step,
                len(batch.rows),
                batch.rows[0] if batch.rows else "?",
            )
            record.extra["unsupervised"] = True
        else:
            out = parts.engine.step(batch.micro_batches)
            record.loss, record.grad_norm, record.skipped = float(out.loss), float(out.grad_norm), bool(out.skipped)
            record.clip = float(out.clip)
        position.step = step
        position.tokens += batch.tokens
        self._count(record, parts, batch)
        self._record = record
        position.nonfinite = position.nonfinite + 1 if record.skipped else 0
        self.display.step(record, (self._total - step) * self._throughput.step_s, self.config.output.log_every)
        if record.skipped:
            log.warning("step %d: a gradient is not finite (norm %s); the update was skipped", step, record.grad_norm)
        if position.nonfinite > self.config.train.max_nonfinite:
            folder.write_metrics(record)
            raise RunStopped(
                f"the gradients of {position.nonfinite} steps in a row, up to step {step}, are not finite "
                f"(train.max_nonfinite is {self.config.train.max_nonfinite}); {self._last_good(folder)}. "
                "Lower train.lr, clip (train.max_grad_norm) or look at the data of these steps"
            )

    def _count(self, record: StepRecord, parts: Parts, batch: Any) -> None:
        record.step_s = self._throughput.add(record.tokens)
        record.tokens_per_s = self._throughput.tokens_per_s
        flops = sum(parts.count.flops_per_token(length) * length for length in batch.lengths)
        record.model_tflops = flops / record.step_s / 1e12 if record.step_s > 0 else 0.0
        stats = parts.engine.stats()
        record.lanes, record.bound = stats.lanes, stats.bound
        record.host_peak_bytes = metrics.host_peak_bytes()
        record.gpu_peak_bytes = metrics.gpu_peak_bytes(parts.engine_gpu_bytes)
        record.epoch = batch.epoch
        record.rows = list(batch.rows)
