"""The loop: batch, step, record, then what is due: evaluation, samples, checkpoint.

    from megatrain import Trainer
    result = Trainer("examples/quickstart.yaml").fit()

A stop request is looked at between steps and between the batches of an evaluation: at each of these points the state is
that of a finished step. Before the first step nothing can be lost, so there a request is obeyed at once.
"""

import concurrent.futures
import contextlib
import dataclasses
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.config import Config
from megatrain.errors import DeviceError, EngineBroken, MegatrainError, StorageError
from megatrain.system.hardware import format_bytes
from megatrain.training import metrics
from megatrain.training.async_save import CheckpointWriter
from megatrain.training.lr_schedule import Schedule
from megatrain.training.metrics import StepRecord, Throughput
from megatrain.training.progress import Display
from megatrain.training.resume import Position, ResumePoint, resolve_resume
from megatrain.training.run_dir import RunFolder
from megatrain.training.stop import RunStopped, Stop

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from megatrain.data import StepBatch
    from megatrain.engine.inputs import StepInputs
    from megatrain.training.setup import RunComponents

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
    """The latest held-out loss; None where a run came to its end and a stop cut off the evaluation there: an earlier
    one is not that of the trained weights."""
    stopped: str
    """Empty when the run came to its end; else what stopped it, such as SIGTERM."""
    checkpoint: Path | None
    """The newest checkpoint."""
    export: Path | None
    """The Hugging Face folder that was written at the end."""


class Trainer:
    """One run. `config` is a path, a mapping or a Config. Raises ConfigError, DoesNotFit, CheckpointError or
    StorageError before the first step, RunStopped when the run has to end itself."""

    def __init__(
        self,
        config: "Config | str | Path | Mapping[str, Any]",
        *,
        stop: Stop | None = None,
        display: Display | None = None,
    ) -> None:
        self.config = Config.of(config)
        self.config.require("data", "output")
        self.stop = stop or Stop()
        self.display = display or Display()

    def fit(self) -> Result:
        """Trains to the end of the schedule, or until asked to stop."""
        assert self.config.output.dir is not None
        folder = RunFolder(Path(self.config.output.dir))
        try:
            with self.display:
                folder.begin_log()
                return self._fit(folder)
        finally:
            folder.discard_if_empty()
            folder.close()

    def _fit(self, folder: RunFolder) -> Result:
        with contextlib.ExitStack() as stack:
            try:
                with self.stop.interruptible():
                    folder.write_status("loading", **folder.facts())
                    origin, parts = resolve_resume(
                        self.config, folder.path, lambda origin: self._assemble(folder, origin)
                    )
                    stack.callback(parts.close)
            except (MegatrainError, KeyboardInterrupt):
                folder.withdraw()
                raise
            except BaseException as error:
                folder.write_status("failed", **folder.facts(), reason=_reason(error))
                raise
            position = origin.position if origin is not None else Position()
            config = self.config.run_plan(parts.run_plan.precision)
            run = _Run(config, self.stop, self.display, folder, parts, position)
            try:
                with self.stop.interruptible():
                    folder.write_config(config.to_yaml())
                    assert parts.engine is not None
                    folder.write_plan(parts.engine.plan)
                    self._tell(parts)
                folder.begin_metrics(position.step)
                return run.train()
            except BaseException as error:
                state = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
                folder.write_status(state, **run.facts(), reason=_reason(error))
                if isinstance(error, StorageError):  # of the files of the run's folder; `train` handles its own
                    raise RunStopped(f"before the first step: {error}; {run.last_good()}") from error
                raise

    def _tell(self, parts: "RunComponents") -> None:
        """The plan in a few lines; `plan.json` has it whole."""
        assert parts.engine is not None
        run_plan, decoder, plan = parts.run_plan, parts.model_setup.decoder, parts.engine.plan
        rows, seq = run_plan.micro_batch
        sizes = ", ".join(f"{format_bytes(size)} of {tier} memory" for tier, size in plan["totals"].items())
        parameters = f"{decoder.num_parameters:,} parameters, {decoder.num_trainable:,} trained"
        log.info("%s in %s on %s: %s", parameters, run_plan.precision, run_plan.device, sizes)
        log.info("%d steps of up to %d micro-batches of %d x %d", parts.total_steps, run_plan.micro_batches, rows, seq)
        log.info("numerics key: %s", ", ".join(f"{key} {value}" for key, value in parts.engine.numerics().items()))
        if self.config.output.save_every is None:
            log.info("output.save_every is not set: only the end or a stop (Ctrl-C) saves, and a kill costs all before")

    def _assemble(self, folder: RunFolder, origin: ResumePoint | None) -> "RunComponents":
        from megatrain.training.setup import assemble

        folder.clear_leftovers()
        return assemble(
            self.config,
            folder=folder.path,
            resume=None if origin is None else origin.folder,
            numerics=None if origin is None else origin.numerics,
            progress=self.display.loading,
        )


class _Run:
    """A run that has all its parts."""

    def __init__(
        self,
        config: Config,
        stop: Stop,
        display: Display,
        folder: RunFolder,
        parts: "RunComponents",
        position: Position,
    ) -> None:
        assert parts.engine is not None
        self.config, self.stop, self.display, self.folder = config, stop, display, folder
        self.parts, self.engine, self.position = parts, parts.engine, position
        self.count = parts.model_setup.count
        self.total = parts.total_steps
        plan = config.train.schedule
        self.schedule = Schedule(
            name=plan.name, warmup=plan.warmup, min_lr=plan.min_lr, decay=plan.decay, total=self.total
        )
        self.throughput = Throughput()
        self.saves = CheckpointWriter(config.output, folder, position.step)
        self.contents = _contents(parts)
        """Fingerprints of what the run is made from."""
        self.loss: float | None = None
        self.earlier_loss = folder.loss(position.step)
        """Of the step that an earlier part of the run ended with."""
        self.pending: StepRecord | None = None
        """The last step's record; written once it is known what followed the step."""
        self.doing = "the first evaluation"
        self.new_best = False
        self.before: dict[str, Any] = {}
        """What was measured before the first step, for the first record."""

    def train(self) -> Result:
        position, folder = self.position, self.folder
        if position.step >= self.total:
            log.info("all %d steps are done already", self.total)
        try:
            self._first_evaluation()
            if position.owed_eval and not self.stop.requested:
                self._evaluate(position.step)
                self.before = {"eval_loss_before": position.eval_loss}
            if position.step < self.total and self._is_stale():
                log.info("the run stopped early after step %d; raise or remove eval.early_stop to go on", position.step)
            self.display.begin(position.step, self.total)
            with contextlib.closing(self._batches()) as batches:
                for step, batch, prepared in batches:
                    self._step(step, batch, prepared)
                    ended = self._after(step)
                    if ended or self.stop.requested:
                        break
            self.display.end()
            stopped = self.stop.reason if self.stop.requested and position.step < self.total else ""
            if position.owed_eval and not stopped:
                log.info(
                    "the evaluation after the last step gave way to %s; the same command makes it", self.stop.reason
                )
            self._finish_saves()
            exported = None if stopped else self._export()
        except (EngineBroken, StorageError, DeviceError) as error:
            raise RunStopped(f"{self.doing}: {error}; {self.last_good()}") from error
        finally:
            self.display.end()
            with contextlib.suppress(MegatrainError):
                self._write_pending()
        steps = folder.steps()
        result = Result(
            step=position.step,
            total_steps=self.total,
            loss=self.loss,
            eval_loss=position.eval_loss if stopped or not position.owed_eval else None,
            stopped=stopped,
            checkpoint=folder.checkpoint(steps[-1]) if steps else None,
            export=exported,
        )
        self._status("stopped" if stopped else "done")
        return result

    # ------------------------------------------------------------------------------------------- a step

    def _batches(self) -> "Generator[tuple[int, StepBatch, StepInputs], None, None]":
        """Steps to do, from 1, with their data; the next one's is read and its masks recorded while one is computed."""
        loader, prepare = self.parts.loader, self.engine.prepare

        def make(step: int) -> "tuple[StepBatch, StepInputs]":
            batch = loader.batch(step - 1)
            return batch, prepare(batch.micro_batches)

        steps = range(self.position.step + 1, self.total + 1)
        if not steps or self.stop.requested or self._is_stale():
            return
        with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="megatrain-batch") as pool:
            coming = pool.submit(make, steps[0])
            for step in steps:
                batch, prepared = coming.result()
                if step < self.total:
                    coming = pool.submit(make, step + 1)
                yield step, batch, prepared

    def _step(self, step: int, batch: "StepBatch", prepared: "StepInputs") -> None:
        position = self.position
        self.doing = f"step {step}"
        lr = self.schedule.lr(step, self.config.train.lr)
        self.engine.set_lr(lr)
        out = self.engine.step(prepared)
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
        self._measure(record, batch)
        self.pending = record
        if unsupervised:
            record.extra["unsupervised"] = True
            log.warning("step %d: %s; nothing was changed", step, self._without_supervision(batch))
        else:
            self.loss = out.loss
        position.nonfinite = position.nonfinite + 1 if record.skipped else 0
        self.display.step(record, (self.total - step) * self.throughput.step_s, self.config.output.log_every)
        if record.skipped:
            log.warning("step %d: a gradient is not finite (norm %s); the update was skipped", step, record.grad_norm)
        if position.nonfinite > self.config.train.max_nonfinite:
            raise RunStopped(
                f"the gradients of {position.nonfinite} steps in a row, up to step {step}, are not finite (allowed: "
                f"train.max_nonfinite, {self.config.train.max_nonfinite}); {self.last_good()}. Lower train.lr, clip "
                "with train.max_grad_norm, or look at the rows of these steps in metrics.jsonl"
            )

    def _without_supervision(self, batch: "StepBatch") -> str:
        where = self.parts.train.where(batch.row_ids[0]) if batch.row_ids else "?"
        return f"none of its {len(batch.row_ids)} rows (the first is {where}) has a supervised token"

    def _measure(self, record: StepRecord, batch: "StepBatch") -> None:
        flops = 0.0
        for micro in batch.micro_batches:
            rows, width = micro["input_ids"].shape
            flops += self.count.flops_per_token(width) * rows * width
        # Padding is computed but is no work of the model's.
        width = sum(micro["input_ids"].numel() for micro in batch.micro_batches)
        flops *= batch.num_tokens / max(1, width)
        record.model_tflops = flops / record.step_s / 1e12 if record.step_s > 0 else 0.0
        stats = self.engine.stats()
        record.lanes = stats.lanes
        record.bound = stats.bound
        record.host_peak_bytes = metrics.host_peak_bytes()
        record.gpu_peak_bytes = metrics.gpu_peak_bytes(self._engine_gpu_bytes())

    def _engine_gpu_bytes(self) -> int:
        if self.parts.run_plan.device != "cuda":
            return 0
        return sum(
            item["bytes"]
            for item in self.engine.plan["items"]
            if item["tier"] == "device" and not item["what"].endswith("(torch)")
        )

    # ------------------------------------------------------------------------------------------- after a step

    def _after(self, step: int) -> bool:
        """What is due after a step; returns whether the run ends early."""
        ended = self.new_best = False
        evaluation, samples = self.config.eval, self.config.eval.samples
        last = step == self.total
        due = evaluation.every is not None and step % evaluation.every == 0
        if self.parts.eval_loader is not None and (due or last):
            ended = self._evaluate(step)
        if samples.every is not None and (step % samples.every == 0 or last) and not self.stop.requested:
            self._sample(step)
        # The record first: a checkpoint never knows of a step that metrics.jsonl does not.
        self._write_pending()
        if self.saves.running is not None and self.saves.running.is_written:
            self._complete_save()
        if self.saves.is_due(step) or (self.new_best and self.config.eval.keep_best):
            self._save()
        if step % 10 == 0 or last:
            self._status("training")
        self.throughput.restart()
        return ended

    def _first_evaluation(self) -> None:
        if self.parts.eval_loader is None or not self.config.eval.at_start or self.position.step > 0:
            return
        self._status("evaluating")
        loss = self._held_out_loss(0)
        if loss is not None:
            self.position.first_eval_loss = self.position.eval_loss = self.position.best_loss = loss
            self.position.best_step = 0
            self.before = {"eval_loss_before": loss}
        self.throughput.restart()

    def _evaluate(self, step: int) -> bool:
        """Held-out loss after a step; returns whether it has stopped falling (early_stop)."""
        position = self.position
        loss = None if self.stop.requested else self._held_out_loss(step)
        position.owed_eval = loss is None
        if loss is None:
            return False
        position.eval_loss = loss
        if position.first_eval_loss is None:
            position.first_eval_loss = loss
        if self.pending is not None:
            self.pending.extra["eval_loss"] = loss
        if position.best_loss is None or loss < position.best_loss:
            position.best_loss, position.best_step, position.stale_evals = loss, step, 0
            self.new_best = True
        else:
            position.stale_evals += 1
        if self._is_stale():
            log.info(
                "held-out loss has not fallen below %.4f (step %s) for %d evaluations: stopping early",
                position.best_loss,
                position.best_step,
                position.stale_evals,
            )
        return self._is_stale()

    def _is_stale(self) -> bool:
        """Whether `eval.early_stop` evaluations in a row have not been better than the best."""
        limit = self.config.eval.early_stop
        return limit is not None and self.position.stale_evals >= limit

    def _held_out_loss(self, step: int) -> float | None:
        """Mean over supervised tokens; None when a stop request came in between."""
        assert self.parts.eval_loader is not None
        loss, tokens = evaluate(self.engine, self.parts.eval_loader, self.stop)
        if loss is not None:
            self.display.evaluation(step, loss, tokens)
        return loss

    def _sample(self, step: int) -> None:
        from megatrain.training.sampling import sample

        settings = self.config.eval.samples
        texts = []
        for prompt in settings.prompts:
            if self.stop.requested:
                return
            assert self.parts.model_setup.tokenizer is not None
            text = sample(
                self.engine,
                self.parts.model_setup.tokenizer,
                prompt,
                settings.max_new_tokens,
                max_length=self.config.data.seq_len,
            )
            texts.append(prompt + text)
            self.display.sample(step, prompt, text)
        if self.pending is not None:
            self.pending.extra["samples"] = texts

    def _write_pending(self) -> None:
        if self.pending is not None:
            record, self.pending = self.pending, None
            self.folder.write_metrics(record)

    # ------------------------------------------------------------------------------------------- saving

    def _finish_saves(self) -> None:
        """Leaves the last step on the disk, and a save that was under way before."""
        if self.position.step > 0:
            self._save()
        if self.saves.running is not None:
            self._status("saving")
            self._complete_save()

    def _complete_save(self) -> None:
        if self.saves.running is not None:
            self.doing = f"the checkpoint of step {self.saves.running.step}"
            self.saves.finish()

    def _save(self) -> None:
        """Begins the checkpoint of the last step; it is written beneath the next ones."""
        step = self.position.step
        if self.saves.has(step):
            return
        self._complete_save()
        self.doing = f"the checkpoint of step {step}"
        state = {
            "position": dataclasses.asdict(self.position),
            "config": self.config.to_dict(),
            "numerics": self.engine.numerics(),
            **self.contents,
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
        log.info("exported to %s", out)
        return out

    def last_good(self) -> str:
        from megatrain.checkpoint import checkpoint

        with contextlib.suppress(MegatrainError):
            self.saves.finish()
        newest = checkpoint.latest_complete(self.folder.path)
        return f"the last good checkpoint is {newest}" if newest is not None else "there is no checkpoint yet"

    def _status(self, state: str) -> None:
        self.folder.write_status(state, **self.facts())

    def facts(self) -> dict[str, Any]:
        """What `status.json` says beside the state."""
        return {
            "step": self.position.step,
            "total_steps": self.total,
            "loss": self.loss if self.loss is not None else self.earlier_loss,
            "eval_loss": self.position.eval_loss,
            "best_step": self.position.best_step,
            "checkpoint": self.saves.saved_step if self.saves.saved_step > 0 else None,
        }


def _contents(parts: "RunComponents") -> dict[str, Any]:
    from megatrain.data import fingerprint

    assert parts.model_setup.tokenizer is not None
    sources = {
        name: [fingerprint.of_source(part.source) for part in dataset.parts] if dataset is not None else []
        for name, dataset in (("train", parts.train), ("eval", parts.held_out))
    }
    return {"data": sources, "tokenizer": fingerprint.of_tokenizer(parts.model_setup.tokenizer)}


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def evaluate(engine: Any, loader: Any, stop: Stop | None = None) -> tuple[float | None, int]:
    """(mean loss per supervised token, supervised tokens) over a loader's held-out batches; the loss is None when a
    stop was asked for before the end."""
    total, tokens = 0.0, 0
    for batch in loader.eval_batches():
        if stop is not None and stop.requested:
            return None, tokens
        if batch.num_supervised:
            total += engine.evaluate(batch.micro_batches) * batch.num_supervised
            tokens += batch.num_supervised
    return (total / tokens if tokens else math.nan), tokens
