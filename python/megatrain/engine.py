"""The engine: a model, its optimizer and the core that holds and moves everything.

    engine = Engine.from_pretrained("Qwen/Qwen2.5-7B", optimizer=AdamW(lr=1e-5), max_grad_norm=1.0)
    out = engine.step([{"input_ids": ids, "labels": ids}])

Where things are and in which order they move is the core's plan; what is computed is in `step.py`.
"""

import contextlib
import dataclasses
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatrain import _core, checkpoint, export, numerics, weights
from megatrain.batches import Batch, MicroBatch, Prepared, Preparer
from megatrain.ends import HeadTemplate, LossFn, LossOptions
from megatrain.errors import ConfigError, EngineBroken, MegatrainError
from megatrain.model import PRECISIONS, Decoder
from megatrain.optim import AdamW
from megatrain.runtime import Load, Runtime, choose_precision, open_device
from megatrain.step import Pass, random_key

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What a step came to."""

    loss: float
    """Mean over the supervised tokens of the step, before its update; 0 where there are none."""
    grad_norm: float
    """Norm of all gradients before clipping."""
    num_tokens: int
    """Supervised tokens."""
    skipped: bool = False
    """Whether nothing was updated."""
    clip: float = 1.0
    """What the gradients were multiplied with."""
    reason: str = ""
    """Why nothing was updated."""
    aux_loss: float | None = None
    """The router's auxiliary loss over all tokens of the step, where the model has one; `loss` contains it times its
    coefficient."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Where the last step's time went."""

    lanes: dict[str, float]
    """Seconds each lane was busy."""
    bound: str
    """The longest lane."""
    raw: dict[str, Any]
    """Everything the core reports."""


class StateDict(Mapping[str, Tensor]):
    """Hugging Face names to master weights (fp32; frozen tensors in their own type), each read when asked for."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        decoder = engine.decoder
        self._names = {name: name for name in decoder.tensors} | decoder.aliases

    def __getitem__(self, name: str) -> Tensor:
        return self._engine.weight(self._names[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Engine:
    """A model in training. Not thread-safe, except `prepare`."""

    def __init__(
        self,
        model: "nn.Module | Decoder",
        *,
        optimizer: AdamW | None = None,
        max_grad_norm: float | None = 1.0,
        precision: str = "auto",
        grad_precision: str = "bf16",
        update: str = "just_in_time",
        device: "str | _core.Device" = "auto",
        memory: Mapping[str, Any] | None = None,
        plan: Mapping[str, Any] | None = None,
        micro_batch: tuple[int, int] | None = None,
        micro_batches: int | None = None,
        freeze: Sequence[str] = (),
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        deterministic: bool = False,
        seed: int = 0,
        load: Load | None = None,
        rates: Mapping[str, float] | None = None,
        tokenizer: Any = None,
        tokenizer_dir: str | Path | None = None,
    ) -> None:
        """`model` follows Hugging Face's layout of a decoder and is on meta or real; a real one is moved into the store
        tensor by tensor and left without storage. One on meta is filled by `load`, or drawn at random from `seed`.

        `micro_batch` is the largest (rows, seq) and `micro_batches` the most of a step; with both, everything is
        planned and allocated now. Without, that happens at first use, for what is used first, and again (which needs
        both plans' memory for a moment) whenever a step is larger. `memory` is {"gpu": "70GiB", "host":
        …}; `plan` gives numbers instead of deriving them. `max_grad_norm` None does not clip.

        Raises ConfigError for what cannot be done, DoesNotFit with the sum.
        """
        if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
            raise ConfigError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}: several processes are not supported yet; start one"
            )
        if optimizer is not None and not isinstance(optimizer, AdamW):
            raise ConfigError(f"optimizer must be a megatrain.AdamW, not {type(optimizer).__name__}")
        self.optimizer = optimizer if optimizer is not None else AdamW()
        if grad_precision not in PRECISIONS:
            raise ConfigError(f"grad_precision must be {' or '.join(PRECISIONS)}, not {grad_precision!r}")
        if not 0 <= label_smoothing < 1:
            raise ConfigError(f"label_smoothing must be at least 0 and below 1, not {label_smoothing}")
        if not 0 <= z_loss < math.inf:
            raise ConfigError(f"z_loss must be finite and not negative, not {z_loss}")
        sizes: Any = micro_batch if micro_batch is not None else (1, 1)
        if not isinstance(sizes, tuple | list) or len(sizes) != 2 or min(sizes) < 1:
            raise ConfigError(f"micro_batch must be (rows, seq), both at least 1, not {micro_batch!r}")
        if micro_batches is not None and micro_batches < 1:
            raise ConfigError(f"micro_batches must be at least 1, not {micro_batches}")
        chunk = (plan or {}).get("loss_chunk")
        if chunk is not None and chunk < 1:
            raise ConfigError(f"plan.loss_chunk must be at least 1, not {chunk}")
        if update not in ("just_in_time", "immediate"):
            raise ConfigError(f"update must be just_in_time or immediate, not {update!r}")
        if max_grad_norm is not None and not _positive(max_grad_norm):
            raise ConfigError(f"max_grad_norm must be positive and finite, or None, not {max_grad_norm!r}")
        if update == "immediate" and max_grad_norm is not None:
            raise ConfigError(
                f"update: immediate changes weights before the gradient norm is known, so it cannot honour "
                f"max_grad_norm {max_grad_norm}; set max_grad_norm to null, or update to just_in_time"
            )
        self.max_grad_norm = max_grad_norm
        self.update = update
        core_device, torch_device = open_device(device)
        if isinstance(model, Decoder):
            if freeze:
                raise ConfigError("freeze belongs to the Decoder when one is given")
            self.decoder = model
        else:
            self.decoder = Decoder(model, freeze=freeze, precision=choose_precision(precision, torch_device))
        self._seed = seed
        self._label_smoothing, self._z_loss = label_smoothing, z_loss
        self.deterministic = deterministic
        self._tokenizer, self._tokenizer_dir = tokenizer, tokenizer_dir
        self._preparer = Preparer(self.decoder, torch_device)
        self._step = 0
        self._open_micro_batches = 0
        self._open_loss: float | None = None
        """Loss of the passes since the last update; None where there was none."""
        self._open_tokens = 0
        self._open_aux_loss: float | None = None
        self.optimizer.assign(n for n, t in self.decoder.tensors.items() if t.role == "trainable")
        if deterministic and torch_device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
        self._runtime = Runtime(
            self.decoder,
            self.optimizer,
            core_device,
            torch_device,
            update=update,
            grad_precision=grad_precision,
            memory=memory,
            plan=plan,
            micro_batch=micro_batch,
            micro_batches=micro_batches,
            load=load,
            rates=rates,
            seed=seed,
        )

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        *,
        revision: str | None = None,
        precision: str = "auto",
        freeze: Sequence[str] = (),
        attention: str = "auto",
        trust_remote_code: bool = False,
        device: "str | _core.Device" = "auto",
        **options: Any,
    ) -> "Engine":
        """A model from a local folder, a `.gguf` file or a hub id; `options` as for the constructor. The files are
        checked now, and read straight into the store when it exists."""
        from transformers import AutoConfig

        files = weights.resolve(path, revision)
        source = weights.open_weights(files)
        try:
            config = AutoConfig.from_pretrained(
                str(files.folder), trust_remote_code=trust_remote_code, **files.arguments()
            )
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"{path}: its config.json cannot be used: {error}") from error
        core_device, torch_device = open_device(device)
        decoder = Decoder.from_config(
            config,
            precision=choose_precision(precision, torch_device),
            freeze=freeze,
            attention=attention,
            trust_remote_code=trust_remote_code,
            frozen_dtypes={name: entry.dtype for name, entry in source.entries.items()},
        )
        weights.match(source, decoder)

        def load(decoder: Decoder, core: Any) -> None:
            weights.load(source, decoder, core)

        options.setdefault("tokenizer_dir", files.folder)
        return cls(decoder, device=core_device, load=load, **options)

    # ------------------------------------------------------------------------------------------- training

    def prepare(self, micro_batches: Sequence[Batch], *, with_loss_fn: bool = False) -> Prepared:
        """Checks and records a step's micro-batches on the CPU. `step` does it itself; a loader's thread may do it a
        step ahead. Raises ConfigError, which names the micro-batch."""
        return self._preparer.prepare(micro_batches, need_labels=not with_loss_fn, keep_empty=with_loss_fn)

    def step(
        self,
        micro_batches: "Sequence[Batch] | Prepared",
        *,
        loss_fn: LossFn | None = None,
        normalizer: float | None = None,
    ) -> StepOutput:
        """One optimizer step over micro-batches: dicts of integer tensors (batch, seq) `input_ids`, `labels` (-100 is
        not supervised; shifted inside) and `attention_mask` or `position_ids`.

        The loss is the sum over supervised tokens divided by their number in the whole step (or by `normalizer`); a
        router's auxiliary loss, where the model's configuration asks for one, is taken over all tokens of the step.
        `loss_fn(hidden, head, batch)` gives another sum. Returns when loss and norm are known; updates may still run.
        Raises ConfigError for micro-batches the model cannot take; nothing has changed then.
        """
        if self._open_micro_batches:
            raise ConfigError("forward_backward was called without optimizer_step; call that before step")
        loss, tokens = self._forward_backward(micro_batches, loss_fn, normalizer)
        return self._apply(loss, tokens)

    def forward_backward(
        self,
        micro_batches: "Sequence[Batch] | Prepared",
        *,
        loss_fn: LossFn | None = None,
        normalizer: float | None = None,
    ) -> float:
        """The first half of `step`: gradients are formed, nothing is updated. Returns the loss. Called again before
        `optimizer_step` it adds to them, which needs one `normalizer` for all calls."""
        if self._open_micro_batches and self.update == "immediate":
            raise ConfigError("update: immediate has updated the weights already, so gradients cannot be added up")
        if self._open_micro_batches and not self._runtime.settings.get("accumulate"):
            raise ConfigError(
                "forward_backward was called again before optimizer_step, but no store for such sums was planned; "
                "create the engine with plan={'accumulate': True}"
            )
        if not self._open_micro_batches:
            self._runtime.plan_sums()
        elif self.decoder.router is not None:
            raise ConfigError(
                "the router's auxiliary loss is taken over all tokens of a step, so a step is one call of "
                "forward_backward; give it all micro-batches, or set output_router_logits to false"
            )
        return self._forward_backward(micro_batches, loss_fn, normalizer)[0]

    def optimizer_step(self) -> StepOutput:
        """The second half of `step`. Raises ConfigError when there is no first."""
        if self._open_loss is None:
            raise ConfigError("optimizer_step was called without forward_backward; call that first")
        return self._apply(self._open_loss, self._open_tokens)

    @torch.inference_mode(False)
    def _forward_backward(
        self, micro_batches: "Sequence[Batch] | Prepared", loss_fn: LossFn | None, normalizer: float | None
    ) -> tuple[float, int]:
        if isinstance(micro_batches, Prepared):
            prepared = micro_batches
        else:
            prepared = self.prepare(micro_batches, with_loss_fn=loss_fn is not None)
        if not self._open_micro_batches:
            self._open_loss, self._open_tokens = 0.0, 0
        if normalizer is not None and not _positive(normalizer):
            raise ConfigError(f"normalizer must be positive and finite, not {normalizer!r}")
        divisor = float(prepared.num_tokens if normalizer is None else normalizer)
        if prepared.empty:
            log.warning("micro-batches %s have no supervised token and add nothing", prepared.empty)
        if not prepared.micro_batches:
            return 0.0, 0
        if not divisor:
            raise ConfigError("a step with loss_fn and no labels needs a normalizer")
        core = self._runtime.ready(prepared, not self._open_micro_batches)
        options = LossOptions(
            scale=1.0 / divisor,
            chunk=self._runtime.settings.get("loss_chunk"),
            label_smoothing=self._label_smoothing,
            z_loss=self._z_loss,
            loss_fn=loss_fn,
        )
        run = self._pass(prepared, options, training=True)
        immediate = self.update == "immediate"
        with numerics.arithmetic(self.device, self.deterministic):
            core.begin(
                "train",
                len(prepared.micro_batches),
                self._stream(),
                groups=self.optimizer.core_groups() if immediate else None,
                accumulate=self._open_micro_batches > 0,
                rows=run.looked_up() if immediate else None,
            )
            try:
                self._run(run, core, _refuse_nonfinite if immediate else None)
            except BaseException:
                self._forget_gradients()  # those of earlier passes have gone with this one's
                raise
        total = sum(float(loss) for loss in torch.stack([t for t in run.losses if t is not None]).tolist())
        loss = total / divisor
        if run.aux_loss is not None and self.decoder.router is not None:
            self._open_aux_loss = float(run.aux_loss)
            loss += self.decoder.router.coefficient * self._open_aux_loss
        self._open_micro_batches += len(prepared.micro_batches)
        self._open_loss = (self._open_loss or 0.0) + loss
        self._open_tokens += prepared.num_tokens
        return loss, prepared.num_tokens

    def _apply(self, loss: float, tokens: int) -> StepOutput:
        if not self._open_micro_batches:
            self._forget_gradients()
            reason = "no micro-batch has a supervised token"
            log.warning("%s: nothing was changed", reason)
            return StepOutput(loss=0.0, grad_norm=0.0, num_tokens=0, skipped=True, reason=reason)
        outcome = self.core.apply(self.optimizer.core_groups(), self.max_grad_norm)
        aux_loss = self._open_aux_loss
        self._forget_gradients()
        self._step += 1
        return StepOutput(
            loss=loss,
            grad_norm=outcome.grad_norm,
            num_tokens=tokens,
            skipped=outcome.skipped,
            clip=outcome.clip,
            reason="a gradient is not finite" if outcome.skipped else "",
            aux_loss=aux_loss,
        )

    def _forget_gradients(self) -> None:
        """No gradients wait for an update."""
        self._open_micro_batches, self._open_loss, self._open_tokens, self._open_aux_loss = 0, None, 0, None

    def set_lr(self, lr: float) -> None:
        """Learning rate of the next updates; groups with their own keep their ratio to it."""
        self.optimizer.set_lr(lr)

    # ----------------------------------------------------------------------------------- without training

    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Mean loss per supervised token, without smoothing, router's auxiliary loss or other terms. No update."""
        total, tokens = 0.0, 0
        if not batches:
            raise ConfigError("evaluate needs at least one batch")
        for prepared in self._in_groups(batches, need_labels=True):
            run = self._evaluate(prepared)
            total += sum(torch.stack([t for t in run.losses if t is not None]).tolist())
            tokens += prepared.num_tokens
        if not tokens:
            raise ConfigError("no batch has a supervised token, so there is no loss to take the mean of")
        return total / tokens

    def logprobs(self, batches: Sequence[Batch]) -> list[Tensor]:
        """For each batch (batch, seq - 1) fp32 on the CPU: log-probability of each next token by `labels` (or by
        `input_ids` where there are none), 0 where not supervised. No update."""
        labelled = [b if b.get("labels") is not None else {**b, "labels": b.get("input_ids")} for b in batches]
        found: list[Tensor] = []
        for prepared in self._in_groups(labelled, need_labels=True, keep_empty=True):
            run = self._evaluate(prepared)
            for micro, values in zip(prepared.micro_batches, run.logprobs, strict=True):
                assert values is not None
                found.append(values.view(micro.shape)[:, :-1].float().cpu())
        return found

    def logits(self, input_ids: Tensor) -> Tensor:
        """Logits (1, V), fp32 on the CPU, of the token after `input_ids` (1, length). No update."""
        prepared = self._preparer.prepare([{"input_ids": input_ids}], need_labels=False, keep_empty=True)
        run = self._evaluate(prepared, lambda head, hidden: head.logits(head.tail(hidden)[:, -1:])[:, 0])
        assert run.collected[0] is not None
        return run.collected[0].float().cpu()

    def _in_groups(self, batches: Sequence[Batch], need_labels: bool, keep_empty: bool = False) -> Iterator[Prepared]:
        """Batches in groups of as many as were planned for."""
        most = self._runtime.micro_batches or max(1, len(batches))
        for start in range(0, len(batches), most):
            part = batches[start : start + most]
            prepared = self._preparer.prepare(part, need_labels=need_labels, keep_empty=keep_empty)
            if prepared.micro_batches:
                yield prepared

    @torch.inference_mode(False)
    def _evaluate(self, prepared: Prepared, collect: Callable[[HeadTemplate, Tensor], Tensor] | None = None) -> Pass:
        core = self._runtime.ready(prepared, not self._open_micro_batches)
        options = LossOptions(scale=1.0, chunk=self._runtime.settings.get("loss_chunk"))
        run = self._pass(prepared, options, training=False, collect=collect)
        with numerics.arithmetic(self.device, self.deterministic):
            core.begin("eval", len(prepared.micro_batches), self._stream())
            self._run(run, core)
        return run

    # ------------------------------------------------------------------------------------- reading, saving

    def state_dict(self) -> StateDict:
        """Hugging Face names to master weights, read one by one when asked for."""
        return StateDict(self)

    def weight(self, name: str) -> Tensor:
        """A copy of a parameter: its fp32 master, or a frozen tensor in its own type."""
        ref = self._ref(name)
        plane = "master" if ref.role == "trainable" else "weights"
        return self._read(name, plane, torch.float32 if ref.role == "trainable" else ref.dtype)

    def optimizer_state(self, name: str) -> dict[str, Any]:
        """`exp_avg` and `exp_avg_sq` (fp32 copies) and `step` of a trained parameter."""
        ref = self._ref(name, trained=True)
        return {
            "exp_avg": self._read(name, "exp_avg", torch.float32),
            "exp_avg_sq": self._read(name, "exp_avg_sq", torch.float32),
            "step": self.core.step_count(ref.unit, ref.tensor),
        }

    def gradient(self, name: str) -> Tensor:
        """A copy of a parameter's last gradient, before clipping, widened to fp32. With `update: immediate` the
        landing places are used again within a step, so there is nothing to read."""
        self._ref(name, trained=True)
        if self.update == "immediate":
            raise ConfigError("update: immediate keeps no gradients; read them with update: just_in_time")
        return self._read(name, "gradient", torch.float32)

    def save(self, folder: str | Path, state: Mapping[str, Any] | None = None, *, step: int | None = None) -> None:
        """Writes a checkpoint: weights, residuals, moments and counts, and `state` (JSON) beside the engine's own."""
        own = {"step": self._step, "lr": self.optimizer.lr, "numerics": self.numerics()}
        checkpoint.save(
            folder,
            self,
            {"engine": own, "run": dict(state or {})},
            step=self._step if step is None else step,
            tokenizer=self._tokenizer,
            tokenizer_dir=self._tokenizer_dir,
        )

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Restores a checkpoint bit for bit and returns the `state` it was saved with."""
        saved = checkpoint.load(folder, self)
        own = saved.get("engine", {})
        self._step = int(own.get("step", 0))
        if "lr" in own:
            self.optimizer.set_lr(own["lr"])
        changed = numerics.differences(own.get("numerics", {}), self.numerics())
        if changed:
            log.warning("the numerics key has changed, so results agree closely but not bit for bit: %s", changed)
        return dict(saved.get("run", {}))

    def save_pretrained(
        self, folder: str | Path, *, dtype: Any = "auto", layout: Any = "source", overwrite: bool = False
    ) -> None:
        """Writes the model as a Hugging Face folder, in the layout of its source or in the library's own."""
        export.save_pretrained(
            self.decoder,
            self.core,
            folder,
            dtype=dtype,
            layout=layout,
            tokenizer=self._tokenizer,
            tokenizer_dir=self._tokenizer_dir,
            overwrite=overwrite,
        )

    def numerics(self) -> dict[str, Any]:
        """The numerics key (`numerics.py`)."""
        return numerics.key(
            self.decoder,
            self.device,
            micro_batch=self._runtime.micro_batch,
            micro_batches=self._runtime.micro_batches,
            grad_precision=self.grad_precision,
            loss_chunk=self._runtime.settings.get("loss_chunk"),
            compiled=self._runtime.compiled,
            deterministic=self.deterministic,
        )

    def stats(self) -> Stats:
        """Where the last step's time went."""
        raw = json.loads(self.core.stats())
        return Stats(lanes=raw.get("lanes", {}), bound=raw.get("bound", ""), raw=raw)

    def drain(self) -> None:
        """Waits for pending updates."""
        self.core.drain()

    def close(self) -> None:
        """Gives all memory back. The engine cannot be used any more."""
        self._runtime.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ref(self, name: str, trained: bool = False) -> Any:
        ref = self.decoder.tensors.get(self.decoder.aliases.get(name, name))
        if ref is None:
            raise KeyError(f"the model has no parameter {name!r}")
        if trained and ref.role != "trainable":
            raise KeyError(f"{name} is frozen, so it has neither moments nor gradient")
        return ref

    def _read(self, name: str, plane: Any, dtype: torch.dtype) -> Tensor:
        ref = self._ref(name)
        out = torch.empty(torch.Size(ref.shape).numel(), dtype=dtype)
        self.core.read(ref.unit, ref.tensor, plane, out)
        return out.view(ref.shape)

    @property
    def core(self) -> Any:
        """The native engine; planned and allocated here where it is not yet."""
        return self._runtime.core

    @property
    def plan(self) -> dict[str, Any]:
        """The plan in force."""
        return self._runtime.plan

    @property
    def device(self) -> torch.device:
        """Where layers are computed."""
        return self._runtime.device

    @property
    def grad_precision(self) -> str:
        """What gradients are sent in: bf16 or fp32."""
        return self._runtime.grad_precision

    def request(self, micro_batch: tuple[int, int], micro_batches: int) -> dict[str, Any]:
        """What the planner is asked for steps of this size; see `request.plan_request`."""
        return self._runtime.request(micro_batch, micro_batches)

    # ------------------------------------------------------------------------------------------- a pass

    def _pass(self, prepared: Prepared, options: LossOptions, *, training: bool, **more: Any) -> Pass:
        workshop = self._runtime.workshop
        workshop.train(training)
        # micro-batches of a step that was begun earlier have numbers of their own
        seed = random_key(self._seed, self._open_micro_batches)
        return Pass(workshop, prepared, self._preparer, options, training=training, seed=seed, step=self._step, **more)

    def _run(self, run: Pass, core: Any, on_loss: Callable[[Tensor], None] | None = None) -> None:
        try:
            run.run(core, on_loss)
        except BaseException:
            with contextlib.suppress(MegatrainError):
                core.abandon()
            raise

    def _stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0


def _positive(value: Any) -> bool:
    """Whether `value` is a positive finite number; a 0-d tensor is one, a text that looks like one is not."""
    try:
        return not isinstance(value, str) and math.isfinite(value) and float(value) > 0
    except (TypeError, ValueError):
        return False


def _refuse_nonfinite(loss: Tensor) -> None:
    """Immediate updates cannot be taken back, so a loss that is not finite stops the step before its backward."""
    if not bool(torch.isfinite(loss)):
        raise EngineBroken(
            f"the loss is {float(loss)}; with update: immediate the step cannot be undone, so it stops here"
        )


__all__ = ["Engine", "MicroBatch", "Prepared", "StateDict", "Stats", "StepOutput", "choose_precision"]
