"""The engine: a model, its optimizer and the core that holds and moves everything.

    engine = Engine.from_pretrained("Qwen/Qwen2.5-7B", optimizer=AdamW(lr=1e-5), max_grad_norm=1.0)
    out = engine.step([{"input_ids": ids, "labels": ids}])

Where things are and in which order they move is the core's plan; what is computed is in `step.py`.
"""

import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from megatrain.checkpoint import checkpoint, export
from megatrain.config.constraints import refuse_unrepeatable
from megatrain.engine import numerics
from megatrain.engine import options as arguments
from megatrain.engine import state_dict as state
from megatrain.engine.embed_head import HeadTemplate, LossFn
from megatrain.engine.inputs import (
    Batch,
    InputPreprocessor,
    MicroBatch,
    StepInputs,
    check_list_of_batches,
    largest_shape,
)
from megatrain.engine.loss import default_chunk
from megatrain.engine.optimizer import AdamW, check_adamw
from megatrain.engine.pretrained import ProgressFn, open_pretrained
from megatrain.engine.runtime import Load, Runtime, choose_precision, open_device
from megatrain.engine.state_dict import StateDict, Stats
from megatrain.engine.transactions import EvalOutput, Passes, StepOutput
from megatrain.errors import CheckpointError, ConfigError
from megatrain.models.decoder import Decoder
from megatrain.models.types import PRECISIONS, TensorRef

if TYPE_CHECKING:
    from megatrain import _core

log: logging.Logger = logging.getLogger(__name__)


@arguments.known_keywords
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
        device: "str | torch.device | _core.Device" = "auto",
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
        A model is left as it was when this raises before the first tensor was moved, as it does for what does not fit.

        `micro_batch` is the largest (rows, seq) and `micro_batches` the most of a step; with both, everything is
        planned and allocated now. Without, that happens at first use, for what is used first, and again (which needs
        both plans' memory for a moment) whenever a step is larger.

        - `optimizer`: AdamW's settings; torch's defaults where it is left out.
        - `max_grad_norm`: gradients are scaled down to this global norm; None does not clip.
        - `precision`: of weights and activations in compute, bf16 or fp32; `auto` is bf16 on CUDA, fp32 on the CPU.
        - `grad_precision`: what gradients are sent to the host in, bf16 or fp32; with fp32 compute always fp32.
        - `update`: `just_in_time` (once the norm is known) or `immediate` (as gradients arrive; without clipping).
        - `device`: auto, cuda, cuda:N or cpu.
        - `memory`: bytes that may be used, such as {"gpu": "70GiB", "host": "200GiB"}.
        - `plan`: numbers and switches of the plan instead of derived ones, such as {"slots": 3}; `loss_workspace` is
          what a `loss_fn` allocates on the device at most beside `head.logprobs`, where it does not form the
          cross-entropy of all logits at once, and `more_workspace` bytes that torch was found to need beyond what is
          planned for it.
        - `freeze`: patterns of parameter names that are not trained.
        - `label_smoothing`, `z_loss`: terms of the built-in loss.
        - `deterministic`: the same bits on every run on CUDA, at some cost in speed.
        - `seed`: of random initial weights and of dropout.
        - `load`: fills the store, called once with the decoder and the core; None: from the model's own values.
        - `rates`: the machine's measured rates, for the planner.
        - `tokenizer`, `tokenizer_dir`: saved with checkpoints and exports.

        Raises ConfigError for what cannot be done, DoesNotFit with the sum.
        """
        arguments.check(
            max_grad_norm=max_grad_norm,
            grad_precision=grad_precision,
            update=update,
            memory=memory,
            plan=plan,
            micro_batch=micro_batch,
            micro_batches=micro_batches,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            seed=seed,
            precisions=PRECISIONS,
        )
        self.optimizer = optimizer if optimizer is not None else AdamW()
        check_adamw(self.optimizer)
        self.update = update
        core_device, torch_device = open_device(device)
        if isinstance(model, Decoder):
            if freeze:
                raise ConfigError("freeze belongs to the Decoder when one is given")
            self.decoder = model
        else:
            self.decoder = Decoder(model, freeze=freeze, precision=choose_precision(precision, torch_device))
        self.deterministic = deterministic
        self._tokenizer, self._tokenizer_dir = tokenizer, tokenizer_dir
        self._preparer = InputPreprocessor(self.decoder, torch_device)
        self._saving: checkpoint.PendingCheckpoint | None = None
        if deterministic and torch_device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
        try:
            arguments.check_length(micro_batch, self.decoder.max_positions)
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
        except BaseException:
            self.decoder.give_back()
            raise
        self._passes = Passes(
            self._runtime,
            self._preparer,
            max_grad_norm=max_grad_norm,
            immediate=update == "immediate",
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            deterministic=deterministic,
            seed=seed,
            router=self.decoder.router,
        )

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        revision: str | None = None,
        precision: str = "auto",
        freeze: Sequence[str] = (),
        attention: str = "auto",
        trust_remote_code: bool = False,
        device: "str | torch.device | _core.Device" = "auto",
        progress: ProgressFn | Literal["auto"] | None = "auto",
        optimizer: AdamW | None = None,
        max_grad_norm: float | None = 1.0,
        grad_precision: str = "bf16",
        update: str = "just_in_time",
        memory: Mapping[str, Any] | None = None,
        plan: Mapping[str, Any] | None = None,
        micro_batch: tuple[int, int] | None = None,
        micro_batches: int | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        deterministic: bool = False,
        seed: int = 0,
        rates: Mapping[str, float] | None = None,
        tokenizer: Any = None,
        tokenizer_dir: str | Path | None = None,
    ) -> "Engine":
        """A model from a local folder, a `.gguf` file or a hub id (of which `revision` is a branch, tag or commit). The
        files are checked now, and read straight into the store when it exists.

        `attention` is sdpa, eager or auto. `trust_remote_code` runs code that the folder brings with it.
        `progress(what, done, total)` is called with the bytes read so far; `auto` is a line on standard error where
        that is a terminal, or below a notebook's cell, None nothing. `tokenizer_dir` is the model's folder where it is
        not given. Everything else is as for the constructor. Raises what that raises.
        """
        core_device, torch_device = open_device(device)
        decoder, load, folder = open_pretrained(
            arguments.model_path(path),
            revision,
            precision=choose_precision(precision, torch_device),
            freeze=freeze,
            attention=attention,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
        return cls(
            decoder,
            optimizer=optimizer,
            max_grad_norm=max_grad_norm,
            grad_precision=grad_precision,
            update=update,
            device=core_device,
            memory=memory,
            plan=plan,
            micro_batch=micro_batch,
            micro_batches=micro_batches,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            deterministic=deterministic,
            seed=seed,
            load=load,
            rates=rates,
            tokenizer=tokenizer,
            tokenizer_dir=folder if tokenizer_dir is None else tokenizer_dir,
        )

    # ------------------------------------------------------------------------------------------- training

    def prepare(self, micro_batches: Sequence[Batch], *, with_loss_fn: bool = False) -> StepInputs:
        """Checks and records a step's micro-batches on the CPU. `step` does it itself; a loader's thread may do it a
        step ahead. Raises ConfigError, which names the micro-batch."""
        self._runtime.check()
        return self._preparer.prepare(
            micro_batches, need_labels=not with_loss_fn, keep_empty=with_loss_fn, more_keys=with_loss_fn
        )

    def step(
        self,
        micro_batches: "Sequence[Batch] | StepInputs",
        *,
        loss_fn: LossFn | None = None,
        normalizer: float | None = None,
        check: bool = False,
    ) -> StepOutput:
        """One optimizer step over micro-batches: dicts of integer tensors (batch, seq) `input_ids`, `labels` (-100 is
        not supervised; shifted inside) and `attention_mask` or `position_ids`. Another key is refused, except with
        `loss_fn`, which is given the whole dict.

        The loss is the sum over supervised tokens divided by their number in the whole step (or by `normalizer`); a
        router's auxiliary loss, where the model's configuration asks for one, is taken over all tokens of the step.
        `loss_fn(hidden, head, batch)` gives another sum: `head(hidden)` are all logits, `head.logprobs(hidden, labels,
        entropy=False)` log-probabilities in chunks (`LossHead` in `engine/logprobs.py`). Returns when loss and norm are
        known; updates may still run.
        With `check` forward and backward run twice from the same weights and random state, the second time one
        operation at a time, and gradients and losses are compared bit for bit before the update: about twice the time
        of forward and backward, and all gradients are read twice. It needs just-in-time updates, and on CUDA
        `deterministic`. Raises EngineBroken with unit, tensor and both norms where they differ; nothing was updated.

        Raises ConfigError for micro-batches the model cannot take; nothing has changed then.
        """
        self._usable()
        if check:
            refuse_unrepeatable(self.update, self.device.type, self.deterministic, "check")
        if self._passes.num_waiting:
            raise ConfigError("forward_backward was called without optimizer_step; call that before step")
        out = self._passes.train(self._prepared(micro_batches, loss_fn), loss_fn, normalizer, apply=True, check=check)
        assert isinstance(out, StepOutput)
        return out

    def forward_backward(
        self,
        micro_batches: "Sequence[Batch] | StepInputs",
        *,
        loss_fn: LossFn | None = None,
        normalizer: float | None = None,
    ) -> float:
        """The first half of `step`: gradients are formed, nothing is updated. Returns the loss. Called again before
        `optimizer_step` it adds to them, which needs one `normalizer` for all calls, and an engine that was made with
        `micro_batch` and `micro_batches` needs `plan={"accumulate": True}` for it: else the call is refused, and the
        gradients that were there wait on."""
        self._usable()
        if self._passes.num_waiting and self.update == "immediate":
            raise ConfigError("update: immediate has updated the weights already, so gradients cannot be added up")
        if self._passes.num_waiting and not self._runtime.settings.get("accumulate"):
            raise ConfigError(
                "forward_backward was called again before optimizer_step, but no store for such sums was planned; "
                "create the engine with plan={'accumulate': True}"
            )
        prepared = self._prepared(micro_batches, loss_fn)
        if not self._passes.num_waiting:
            self._runtime.plan_sums()
        elif self.decoder.router is not None:
            raise ConfigError(
                "the router's auxiliary loss is taken over all tokens of a step, so a step is one call of "
                "forward_backward; give it all micro-batches, or set output_router_logits to false"
            )
        loss = self._passes.train(prepared, loss_fn, normalizer, apply=False)
        assert isinstance(loss, float)
        return loss

    def optimizer_step(self) -> StepOutput:
        """The second half of `step`. Raises ConfigError when there is no first."""
        self._usable()
        if self._passes.waiting is None:
            raise ConfigError("optimizer_step was called without forward_backward; call that first")
        return self._passes.apply()

    def _prepared(self, micro_batches: "Sequence[Batch] | StepInputs", loss_fn: LossFn | None) -> StepInputs:
        if isinstance(micro_batches, StepInputs):
            return micro_batches
        return self.prepare(micro_batches, with_loss_fn=loss_fn is not None)

    @property
    def num_steps(self) -> int:
        """Optimizer steps done, those before a `load` included. After an interrupt it tells whether the step that the
        interrupt met is among them."""
        self._usable()
        return self._passes.num_steps

    def grad_norm(self) -> float:
        """Norm, before clipping, of the gradients that `forward_backward` has formed and `optimizer_step` has not
        applied yet; waits for them. Raises ConfigError where there are none."""
        self._usable()
        if self._passes.waiting is None:
            raise ConfigError("grad_norm was called without forward_backward; call that first")
        return self._runtime.core.gradient_norm() if self._passes.num_waiting else 0.0

    def zero_grad(self) -> None:
        """Drops the gradients that `forward_backward` has formed and `optimizer_step` has not applied yet, if there are
        any. With `update: immediate` they have been applied already."""
        self._usable()
        self._passes.discard()

    def set_lr(self, lr: float) -> None:
        """Learning rate of the next updates; groups with their own keep their ratio to it."""
        self._usable()
        self.optimizer.set_lr(lr)

    def set_optimizer(self, optimizer: AdamW) -> None:
        """AdamW's settings of the next updates, with groups that may be others than before. Moments and counts of
        updates stay. Raises ConfigError for groups that do not fit the model; nothing has changed then."""
        self._usable()
        check_adamw(optimizer)
        self._runtime.set_optimizer(optimizer)
        self.optimizer = optimizer

    def set_max_grad_norm(self, max_grad_norm: float | None) -> None:
        """Global norm that gradients of the next updates are scaled down to; None does not clip."""
        self._usable()
        arguments.check_max_grad_norm(max_grad_norm, self.update)
        self._passes.max_grad_norm = max_grad_norm

    # ----------------------------------------------------------------------------------- without training

    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Mean loss per supervised token, without smoothing, router's auxiliary loss or other terms. No update.

        As many batches pass through the model at a time as a step was planned for; one, where nothing was planned yet.
        """
        return self.evaluate_metrics(batches).loss

    def evaluate_metrics(self, batches: Sequence[Batch]) -> EvalOutput:
        """As `evaluate`, with perplexity and the share of supervised tokens that the model finds the likeliest."""
        self._usable()
        total, correct, tokens = 0.0, 0, 0
        check_list_of_batches(batches)
        if not batches:
            raise ConfigError("evaluate needs at least one batch")
        for prepared in self._preparer.in_groups(batches, self._runtime.micro_batches or 1):
            run = self._passes.evaluate(prepared, largest=largest_shape(batches))
            total += sum(torch.stack([t for t in run.losses if t is not None]).tolist())
            correct += sum(torch.stack([t for t in run.correct if t is not None]).tolist())
            tokens += prepared.num_tokens
        if not tokens:
            raise ConfigError("no batch has a supervised token, so there is no loss to take the mean of")
        return EvalOutput(loss=total / tokens, accuracy=correct / tokens, num_tokens=tokens)

    def logprobs(self, batches: Sequence[Batch]) -> list[Tensor]:
        """For each batch (batch, seq - 1) fp32 on the CPU: log-probability of each next token by `labels` (or by
        `input_ids` where there are none), 0 where not supervised. No update."""
        self._usable()
        check_list_of_batches(batches)
        given: Sequence[Any] = batches  # whether each is a dict is said when it is prepared
        labelled = [
            {**b, "labels": b.get("input_ids")} if isinstance(b, Mapping) and b.get("labels") is None else b
            for b in given
        ]
        found: list[Tensor] = []
        for prepared in self._preparer.in_groups(labelled, self._runtime.micro_batches or 1, keep_empty=True):
            run = self._passes.evaluate(prepared, largest=largest_shape(labelled))
            for micro, values in zip(prepared.micro_batches, run.logprobs, strict=True):
                assert values is not None
                found.append(values.view(micro.shape)[:, :-1].float().cpu())
        return found

    def logits(self, input_ids: Tensor) -> Tensor:
        """Logits (1, V), fp32 on the CPU, of the token after `input_ids` (1, length). No update."""
        self._usable()
        prepared = self._preparer.prepare([{"input_ids": input_ids}], need_labels=False, keep_empty=True)
        run = self._passes.evaluate(prepared, lambda head, hidden: head.logits(head.tail(hidden)[:, -1:])[:, 0])
        assert run.collected[0] is not None
        return run.collected[0].float().cpu()

    def all_logits(self, batch: Batch) -> Tensor:
        """Logits (batch, seq, V) of every token of a batch, fp32 on the CPU, computed a few rows at a time: for metrics
        over a vocabulary, for which losses and `logprobs` do not suffice. No update."""
        self._usable()
        prepared = self._preparer.prepare([batch], need_labels=False, keep_empty=True)

        def collect(head: HeadTemplate, hidden: Tensor) -> Tensor:
            rows = default_chunk(self.decoder.vocab_size, self.device.type)
            flat = head.tail(hidden).flatten(0, 1)
            found = [head.logits(part.unsqueeze(0))[0].float().cpu() for part in torch.split(flat, rows)]
            return torch.cat(found).view(*hidden.shape[:2], -1)

        run = self._passes.evaluate(prepared, collect)
        assert run.collected[0] is not None
        return run.collected[0]

    # ------------------------------------------------------------------------------------- reading, saving

    def state_dict(self) -> StateDict:
        """Hugging Face names to master weights, read one by one when asked for."""
        self._usable()
        return StateDict(self)

    def weight(self, name: str) -> Tensor:
        """A copy of a parameter: its fp32 master, or a frozen tensor in its own type."""
        return state.weight(self.core, self._ref(name))

    def optimizer_state(self, name: str) -> dict[str, Any]:
        """`exp_avg` and `exp_avg_sq` (fp32 copies) and `step` of a trained parameter."""
        return state.optimizer_state(self.core, self._ref(name, trained=True))

    def gradient(self, name: str) -> Tensor:
        """A copy of a parameter's last gradient, before clipping, widened to fp32. With `update: immediate` the
        landing places are used again within a step, so there is nothing to read."""
        ref = self._ref(name, trained=True)
        if self.update == "immediate":
            raise ConfigError("update: immediate keeps no gradients; read them with update: just_in_time")
        return state.read(self.core, ref, "gradient", torch.float32)

    def save(self, folder: str | Path, state: Mapping[str, Any] | None = None, *, step: int | None = None) -> None:
        """Writes a checkpoint: weights, residuals, moments and counts, and `state` (JSON) beside the engine's own."""
        self.begin_save(folder, state, step=step).finish()

    def begin_save(
        self, folder: str | Path, state: Mapping[str, Any] | None = None, *, step: int | None = None
    ) -> checkpoint.PendingCheckpoint:
        """Begins such a checkpoint and returns: it is written beneath the steps that follow, until its `finish`. While
        gradients wait for `optimizer_step` it is complete on return, without them."""
        self._usable()
        if self._passes.num_waiting and self.update == "immediate":
            raise ConfigError("update: immediate has updated the weights already; call optimizer_step before a save")
        if self._saving is not None and not self._saving.over:
            raise ConfigError(f"{self._saving.folder} is still being written; finish it, or give it up, first")
        arguments.mapping("state", state)
        own = {"step": self._passes.num_steps, "lr": self.optimizer.lr, "numerics": self.numerics()}
        self._saving = checkpoint.begin_save(
            arguments.folder(folder),
            self,
            {"engine": own, "run": dict(state or {})},
            step=self._passes.num_steps if step is None else step,
            tokenizer=self._tokenizer,
            tokenizer_dir=self._tokenizer_dir,
        )
        if self._passes.num_waiting:
            self._saving.finish()  # the pass that would carry it begins after their update
        return self._saving

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Restores a checkpoint bit for bit and returns the `state` it was saved with. Gradients that wait for
        `optimizer_step` are dropped. Once the first value is replaced, an interrupt or a damaged file leaves an engine
        that refuses everything but another load; until then one that goes on as before."""
        runtime = self._runtime
        before, runtime.undefined = runtime.undefined, ""
        begun = threading.Event()
        try:
            self._usable()
            saved = checkpoint.load(arguments.folder(folder), self, begin=begun.set)
            self._passes.discard()
            own = saved.get("engine", {})
            if "lr" in own:
                self.optimizer.set_lr(own["lr"])
            self._passes.num_steps = int(own.get("step", 0))
        except BaseException as error:
            why = "found it damaged" if isinstance(error, CheckpointError) else "was cut off"
            mixed = f"loading {folder} {why}, so weights of two states are mixed; load a checkpoint"
            runtime.undefined = mixed if begun.is_set() else before
            raise
        changed = numerics.differences(own.get("numerics", {}), self.numerics())
        if changed:
            log.warning("the numerics key has changed, so results agree closely but not bit for bit: %s", changed)
        return dict(saved.get("run", {}))

    def save_pretrained(
        self, folder: str | Path, *, dtype: Any = "auto", layout: Any = "source", overwrite: bool = False
    ) -> None:
        """Writes the model as a Hugging Face folder, in the layout of its source or in the library's own. Raises
        ConfigError for a model in a wrapper (PEFT's, say), whose names for its tensors nothing else can load."""
        self._usable()
        arguments.refuse_wrapper(self.decoder.model)
        export.save_pretrained(
            self.decoder,
            self.core,
            arguments.folder(folder),
            dtype=dtype,
            layout=layout,
            tokenizer=self._tokenizer,
            tokenizer_dir=self._tokenizer_dir,
            overwrite=overwrite,
        )

    def numerics(self) -> dict[str, Any]:
        """The numerics key (`numerics.py`)."""
        self._usable()
        return numerics.key(
            self.decoder,
            self.device,
            micro_batch=self._runtime.nominal[0],
            micro_batches=self._runtime.nominal[1],
            grad_precision=self.grad_precision,
            loss_chunk=self._runtime.settings.get("loss_chunk"),
            compiled=self._runtime.compiled,
            deterministic=self.deterministic,
        )

    def stats(self) -> Stats:
        """Where the last step's time went."""
        raw = json.loads(self.core.stats())
        return Stats(lanes=raw.get("lanes", {}), bound=raw.get("bound", ""), raw=raw)

    def lanes(self) -> dict[str, Any]:
        """Where the engine's lanes stand: `completed` operations so far, and for each of `lanes` what it runs, what is
        next and what that waits for. From any thread, at any time; waits for nothing."""
        return self._runtime.lanes()

    def drain(self) -> None:
        """Waits for pending updates."""
        self.core.drain()

    def close(self) -> None:
        """Gives all memory back. The engine cannot be used any more; what it was still writing is removed. In a fork
        of its process there is nothing to do."""
        if self._passes.guard.is_forked:
            return
        self._passes.guard.leave()
        if self._saving is not None:
            self._saving.cancel()
        self._runtime.close()

    def __repr__(self) -> str:
        decoder = self.decoder
        split = self._runtime.micro_batch
        planned = f"{self._runtime.micro_batches} micro-batches of {split}" if split is not None else "not planned yet"
        return (
            f"<Engine {type(decoder.model).__name__}, {decoder.num_parameters:,} parameters, {decoder.num_trainable:,} "
            f"trained in {decoder.precision} on {self.device}, {planned}>"
        )

    def __reduce__(self) -> Any:
        """Refused: an engine is memory and threads of this process, so that a copy of it would be none."""
        raise TypeError("an engine cannot be pickled or copied; use engine.save(folder) and engine.load(folder)")

    def __enter__(self) -> "Engine":
        self._usable()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ref(self, name: str, trained: bool = False) -> TensorRef:
        self._usable()
        return state.find(self.decoder, name, trained)

    @property
    def core(self) -> "_core.Engine":
        """The native engine; planned and allocated here where it is not yet."""
        self._usable()
        return self._runtime.core

    @property
    def plan(self) -> dict[str, Any]:
        """The plan in force."""
        self._usable()
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
        self._usable()
        return self._runtime.request(micro_batch, micro_batches)

    def _usable(self) -> None:
        """Raises EngineBroken, with the cause, after `close` and once something has failed. Waits for a step that an
        interrupt has left behind."""
        self._passes.guard.settle()
        self._runtime.check()


__all__ = ["Engine", "EvalOutput", "MicroBatch", "StateDict", "Stats", "StepInputs", "StepOutput", "choose_precision"]
