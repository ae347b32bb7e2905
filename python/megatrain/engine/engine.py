"""The engine: a model, its optimizer and the core that holds and moves everything.

    engine = Engine.from_pretrained("Qwen/Qwen2.5-7B", optimizer=AdamW(lr=1e-5), max_grad_norm=1.0)
    out = engine.step([{"input_ids": ids, "labels": ids}])

Where things are and in which order they move is the core's plan; what is computed is in `step.py`.
"""

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from megatrain.checkpoint import export
from megatrain.checkpoint.hf_folder import check_model_files
from megatrain.checkpoint.save import PendingCheckpoint
from megatrain.config.constraints import refuse_unrepeatable
from megatrain.engine import options as arguments
from megatrain.engine import state_dict as state
from megatrain.engine.checkpoints import Checkpoints
from megatrain.engine.default_device import on_cpu
from megatrain.engine.devices import as_decoder, choose_matmul, choose_precision, open_device
from megatrain.engine.embed_head import LossFn
from megatrain.engine.evaluation import Evaluation
from megatrain.engine.inputs import Batch, InputPreprocessor, MicroBatch, StepInputs
from megatrain.engine.optimizer import AdamW, check_adamw
from megatrain.engine.pretrained import ProgressFn, open_pretrained
from megatrain.engine.runtime import Load, Runtime
from megatrain.engine.state_dict import StateDict, Stats
from megatrain.engine.transactions import EvalOutput, Passes, StepOutput
from megatrain.errors import ConfigError
from megatrain.models.decoder import Decoder
from megatrain.models.types import PRECISIONS, TensorRef
from megatrain.weights.state_format import StateFormat

if TYPE_CHECKING:
    from megatrain import _core


@arguments.known_keywords
class Engine:
    """A model in training. One thread at a time may call it, except for `prepare`."""

    @on_cpu()
    def __init__(
        self,
        model: "nn.Module | Decoder",
        *,
        optimizer: AdamW | None = None,
        max_grad_norm: float | None = 1.0,
        precision: str = "auto",
        matmul: str = "bf16",
        grad_precision: str = "bf16",
        moments: str = "fp32",
        master: str = "32bit",
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
        model_dir: str | Path | None = None,
    ) -> None:
        """`model` follows Hugging Face's layout of a decoder. If it has storage, its tensors are moved into the
        engine's store one by one and it is left without. If it is on meta, `load` fills the store, or the weights are
        drawn at random from `seed`. When this raises before the first tensor was moved (as it does when the plan does
        not fit), the model is unchanged.

        `micro_batch` is the largest (rows, seq) and `micro_batches` the largest number of them in a step. With both,
        everything is planned and allocated now. Otherwise that happens at first use, for the sizes that are used
        first, and again whenever a step is larger; for a moment both plans' memory is needed then.

        - `optimizer`: AdamW's settings; default: torch's.
        - `max_grad_norm`: gradients are scaled down to this global norm; None does not clip.
        - `precision`: of weights and activations in compute, bf16 or fp32; `auto` is bf16 on CUDA, fp32 on the CPU.
        - `matmul`: in what the linear layers within decoder layers multiply where compute is bf16: bf16, or fp8 (e4m3
          numbers with a scale for each token and each output channel), which needs a card of compute capability 8.9.
        - `grad_precision`: bf16 or fp32, in which gradients are sent to the host; with fp32 compute always fp32.
        - `moments`: how AdamW's moments are stored between updates, fp32, bf16 or 8bit; the last two are rounded
          stochastically.
        - `master`: 32bit or 24bit, how much of the fp32 masters is kept where compute is bf16.
        - `update`: `just_in_time` (once the norm is known) or `immediate` (as gradients arrive; without clipping).
        - `device`: auto, cuda, cuda:N or cpu.
        - `memory`: limits in bytes or as text, such as {"gpu": "70GiB", "host": "200GiB"}.
        - `plan`: values to use instead of the planner's own, such as {"slots": 3}. `loss_workspace` is the most that a
          `loss_fn` allocates on the device beside `head.logprobs`; give it when the loss is not a cross-entropy of all
          logits at once. `more_workspace` adds bytes that torch was found to need beyond the planned ones.
          `hold_torch` refuses torch, all of it in this process, what goes beyond the limit of device memory.
        - `freeze`: patterns of parameter names that are not trained.
        - `label_smoothing`, `z_loss`: terms of the built-in loss.
        - `deterministic`: the same bits on every run on CUDA, at some cost in speed.
        - `seed`: of random initial weights, of dropout and of stochastic rounding.
        - `load`: called once with the decoder and the native engine to fill the store; None: with the model's values.
        - `rates`: this machine's measured rates, for the planner.
        - `tokenizer`, `tokenizer_dir`: saved with checkpoints and exports; of the folder the tokenizer's files.
        - `model_dir`: a folder whose generation config, processor and code are saved too; None: `tokenizer_dir`.

        Raises ConfigError for settings or models that cannot be used, and DoesNotFit, with the sum, for a plan that
        needs more memory than there is.
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
            moments=moments,
            master=master,
            deterministic=deterministic,
            precisions=PRECISIONS,
        )
        arguments.check_saved(tokenizer, tokenizer_dir, model_dir)
        if optimizer is not None:
            check_adamw(optimizer)
        # of its own: another engine may be given the same one, and each moves its rate
        self.optimizer: AdamW = copy.deepcopy(optimizer) if optimizer is not None else AdamW()
        self.update = update
        check_model_files(tokenizer_dir if model_dir is None else model_dir)
        core_device, torch_device = open_device(device)
        decoder = as_decoder(model, freeze, precision, matmul, torch_device)
        self.deterministic = deterministic
        self._tokenizer, self._tokenizer_dir, self._model_dir = tokenizer, tokenizer_dir, model_dir
        self._preparer = InputPreprocessor(decoder, torch_device)
        if deterministic and torch_device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
        try:
            arguments.check_length(micro_batch, decoder.max_positions)
            self._runtime = Runtime(
                decoder,
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
                state_format=StateFormat(moments, master),
            )
        except BaseException:
            decoder.give_back()
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
            router=decoder.router,
        )
        self._evaluation = Evaluation(self._runtime, self._preparer, self._passes)
        self._checkpoints = Checkpoints(
            self._runtime, self._passes, tokenizer=tokenizer, tokenizer_dir=tokenizer_dir, model_dir=model_dir
        )

    @classmethod
    @on_cpu()
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        revision: str | None = None,
        precision: str = "auto",
        matmul: str = "bf16",
        freeze: Sequence[str] = (),
        attention: str = "auto",
        trust_remote_code: bool = False,
        device: "str | torch.device | _core.Device" = "auto",
        progress: ProgressFn | Literal["auto"] | None = "auto",
        optimizer: AdamW | None = None,
        max_grad_norm: float | None = 1.0,
        grad_precision: str = "bf16",
        moments: str = "fp32",
        master: str = "32bit",
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
        model_dir: str | Path | None = None,
    ) -> "Engine":
        """A model from a local folder, a `.gguf` file or a hub id (of which `revision` is a branch, tag or commit). The
        files are checked now, and read directly into the store once it is allocated. A `.gguf` file is unpacked to fp32
        as a whole then: 4 bytes per parameter of host memory are left out of the plan until it has been read.

        `attention` is sdpa, eager or auto. `trust_remote_code` runs code from the model's folder. `progress(what, done,
        total)` is called with the bytes read so far; `auto` shows a line on a terminal's standard error or below a
        notebook's cell, None shows nothing. `tokenizer_dir` and `model_dir` default to the model's folder. Everything
        else is as for the constructor, errors included.
        """
        core_device, torch_device = open_device(device)
        chosen = choose_precision(precision, torch_device)
        decoder, load, folder = open_pretrained(
            arguments.model_path(path),
            revision,
            precision=chosen,
            matmul=choose_matmul(matmul, chosen, torch_device),
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
            moments=moments,
            master=master,
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
            model_dir=folder if model_dir is None else model_dir,
        )

    # ------------------------------------------------------------------------------------------- training

    @on_cpu()
    def prepare(self, micro_batches: Sequence[Batch], *, with_loss_fn: bool = False) -> StepInputs:
        """Checks a step's micro-batches and precomputes masks and positions on the CPU. `step` does this itself; a data
        loader's thread may do it one step ahead, with `with_loss_fn` where the step will have a `loss_fn`. The result
        is for this engine and that kind of step alone. Raises ConfigError, which names the micro-batch."""
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
        `loss_fn`, which receives the whole dict.

        The loss is the sum over supervised tokens divided by their number in the whole step (or by `normalizer`). With
        `loss_weights`, numbers from 0 on for each row (batch,) or for each label (batch, seq), every token's loss is
        multiplied by its weight and the sum divided by the sum of the weights, as torch's cross-entropy with class
        weights does; a weight of 0 is as a label of -100. That sum, or `normalizer`, is 1e-30 to 1e30. A `loss_fn` may
        read them and is divided as without. A router's auxiliary loss, where the model's configuration asks for one, is
        taken over all tokens of the step.
        `loss_fn(hidden, head, batch)` returns another sum to use instead: `head(hidden)` are all logits,
        `head.logprobs(hidden, labels, entropy=False)` log-probabilities in chunks (`LossHead` in `engine/logprobs.py`).
        Returns when loss and norm are known; updates may still run. Where one of them is not finite, nothing is updated
        (`skipped`); with `update: immediate`, which cannot be undone, a loss that is not finite stops the step before
        its backward, and a gradient that is not finite after some updates: both raise EngineBroken.

        With `check` forward and backward run twice from the same weights and random state, the second time one
        operation at a time, and gradients and losses are compared bit for bit before the update: about twice the time
        of forward and backward, and all gradients are read twice. It needs just-in-time updates, and on CUDA
        `deterministic`. Raises EngineBroken with unit, tensor and both norms where they differ; nothing was updated.

        `prepare` may have made the micro-batches ready beforehand: of this engine, and with `with_loss_fn` exactly if
        there is a `loss_fn` here. Raises ConfigError for others, and for micro-batches the model cannot take; nothing
        has changed then.
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
        """The first half of `step`: computes gradients without updating anything, and returns the loss. When called
        again before `optimizer_step`, it adds to the gradients. That needs the same `normalizer` in all calls, and
        `plan={"accumulate": True}` if the engine was created with `micro_batch` and `micro_batches`; otherwise the call
        raises ConfigError and the earlier gradients are kept."""
        self._usable()
        self._passes.refuse_more()
        loss = self._passes.train(self._prepared(micro_batches, loss_fn), loss_fn, normalizer, apply=False)
        assert isinstance(loss, float)
        return loss

    def optimizer_step(self) -> StepOutput:
        """The second half of `step`. Raises ConfigError unless `forward_backward` was called."""
        self._usable()
        self._passes.require("optimizer_step")
        return self._passes.apply()

    def _prepared(self, micro_batches: "Sequence[Batch] | StepInputs", loss_fn: LossFn | None) -> StepInputs:
        if isinstance(micro_batches, StepInputs):
            micro_batches.check_step(self._preparer, loss_fn is not None)
            return micro_batches
        return self.prepare(micro_batches, with_loss_fn=loss_fn is not None)

    @property
    def num_steps(self) -> int:
        """Optimizer steps done, including those of a loaded checkpoint. After an interrupt it shows whether the
        interrupted step was finished or dropped."""
        self._usable()
        return self._passes.num_steps

    def grad_norm(self) -> float:
        """Norm, before clipping, of the gradients that `forward_backward` has formed and `optimizer_step` has not
        applied yet; waits for them. Raises ConfigError where there are none."""
        self._usable()
        self._passes.require("grad_norm")
        return self._runtime.core.gradient_norm() if self._passes.num_waiting else 0.0

    def zero_grad(self) -> None:
        """Drops the gradients that `forward_backward` has formed and `optimizer_step` has not applied yet, if there are
        any. With `update: immediate` they have been applied already."""
        self._usable()
        self._passes.discard()

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of the next updates. Groups with a rate of their own keep their ratio to it."""
        self._usable()
        self.optimizer.set_lr(lr)

    def set_optimizer(self, optimizer: AdamW) -> None:
        """AdamW's settings of the next updates, with groups that may be others than before. Moments and counts of
        updates stay. Raises ConfigError for groups that do not fit the model; nothing has changed then."""
        self._usable()
        check_adamw(optimizer)
        own = copy.deepcopy(optimizer)
        self._runtime.set_optimizer(own)
        self.optimizer = own

    def set_max_grad_norm(self, max_grad_norm: float | None) -> None:
        """Global norm that gradients of the next updates are scaled down to; None does not clip."""
        self._usable()
        arguments.check_max_grad_norm(max_grad_norm, self.update)
        self._passes.max_grad_norm = max_grad_norm

    # ----------------------------------------------------------------------------------- without training

    @on_cpu()
    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Mean loss per supervised token, without label smoothing, router loss or other terms. Updates nothing.

        Computes as many batches at a time as a step was planned for, or one if nothing has been planned yet.
        """
        return self.evaluate_metrics(batches).loss

    @on_cpu()
    def evaluate_metrics(self, batches: Sequence[Batch]) -> EvalOutput:
        """As `evaluate`, with perplexity and the share of supervised tokens that the model finds the likeliest."""
        self._usable()
        return self._evaluation.metrics(batches)

    @on_cpu()
    def logprobs(self, batches: Sequence[Batch]) -> list[Tensor]:
        """For each batch (batch, seq - 1) fp32 on the CPU: log-probability of each next token by `labels` (or by
        `input_ids` where there are none), 0 where not supervised. Updates nothing."""
        self._usable()
        return self._evaluation.logprobs(batches)

    @on_cpu()
    def logits(self, input_ids: Tensor) -> Tensor:
        """Logits (1, V), fp32 on the CPU, of the token after `input_ids` (1, length). Updates nothing."""
        self._usable()
        return self._evaluation.logits(input_ids)

    @on_cpu()
    def all_logits(self, batch: Batch) -> Tensor:
        """Logits (batch, seq, V) of every token of a batch, fp32 on the CPU, computed a few rows at a time: for metrics
        that need the whole distribution. Those of padding, where `attention_mask` is 0, are undefined: they may be
        others than the model's own forward returns there. Updates nothing."""
        self._usable()
        return self._evaluation.all_logits(batch)

    # ------------------------------------------------------------------------------------- reading, saving

    def state_dict(self) -> StateDict:
        """A mapping from Hugging Face names to master weights, each read when it is accessed."""
        self._usable()
        return StateDict(self)

    @on_cpu()
    def weight(self, name: str) -> Tensor:
        """A copy of a parameter: its fp32 master, or a frozen tensor in its stored type. Raises KeyError for a name
        that the model does not have."""
        return state.weight(self.core, self._ref(name))

    @on_cpu()
    def optimizer_state(self, name: str) -> dict[str, Any]:
        """`exp_avg` and `exp_avg_sq` (fp32 copies) and `step` of a trained parameter."""
        return state.optimizer_state(self.core, self._ref(name, trained=True), self._runtime.state_format)

    @on_cpu()
    def gradient(self, name: str) -> Tensor:
        """A copy of a parameter's last gradient, before clipping, widened to fp32. Raises ConfigError with
        `update: immediate`, where the buffers of gradients are reused within a step."""
        core, ref = self.core, self._ref(name, trained=True)  # in this order: the core's plan decides where tensors are
        if self.update == "immediate":
            raise ConfigError("update: immediate keeps no gradients; read them with update: just_in_time")
        return state.read(core, ref, "gradient", torch.float32)

    @on_cpu()
    def save(self, folder: str | Path, state: Mapping[str, Any] | None = None, *, step: int | None = None) -> None:
        """Writes a checkpoint: weights, residuals, moments, step counts and the engine's own state, and `state`, which
        must be JSON. Raises StorageError when the disk is too full or fails; nothing is left of it then."""
        self.begin_save(folder, state, step=step).finish()

    @on_cpu()
    def begin_save(
        self, folder: str | Path, state: Mapping[str, Any] | None = None, *, step: int | None = None
    ) -> PendingCheckpoint:
        """Like `save`, but returns at once: the checkpoint is written in the background while later steps run, and is
        complete when its `finish` returns. If gradients wait for `optimizer_step`, it is complete on return and does
        not contain them."""
        self._usable()
        return self._checkpoints.begin_save(folder, state, step)

    @on_cpu()
    def load(self, folder: str | Path) -> dict[str, Any]:
        """Restores a checkpoint bit for bit and returns the `state` it was saved with. Drops gradients that wait for
        `optimizer_step`. An interrupt or a damaged file after the first value was replaced leaves an engine that
        refuses everything but another load; before that, the engine is unchanged.

        The learning rate becomes that of the checkpoint, and groups with a rate of their own keep their ratio to it: an
        engine made with lr 2e-5 and a group's 1e-4 goes on from a checkpoint saved at 1e-5 with 1e-5 and 5e-5. A line
        of the log says so where it changes; for another rate call `set_lr` afterwards. AdamW's other settings stay the
        engine's own. Raises CheckpointError; ConfigError where the optimizer cannot take that learning rate."""
        return self._checkpoints.load(folder)

    @on_cpu()
    def save_pretrained(
        self, folder: str | Path, *, dtype: Any = "auto", layout: Any = "source", overwrite: bool = False
    ) -> None:
        """Writes the model as a Hugging Face folder. `dtype` is auto (the compute precision), bf16 or fp32; `layout` is
        `source` (tensor names and shapes as in the model's own files) or `library` (as transformers has them). Raises
        ConfigError for a model inside a wrapper (such as PEFT's), whose tensor names nothing else can load."""
        self._usable()
        arguments.refuse_wrapper(self.decoder.model)
        core = self.core
        export.save_pretrained(
            self.decoder,
            core,
            arguments.folder(folder),
            dtype=dtype,
            layout=layout,
            tokenizer=self._tokenizer,
            tokenizer_dir=self._tokenizer_dir,
            model_dir=self._model_dir,
            overwrite=overwrite,
        )

    def numerics(self) -> dict[str, Any]:
        """The numerics key (`numerics.py`)."""
        self._usable()
        return self._passes.numerics()

    def stats(self) -> Stats:
        """Where the last step's time went."""
        return Stats.parsed(self.core.stats())

    def lanes(self) -> dict[str, Any]:
        """Where the engine's lanes stand: `completed` operations so far, and for each of `lanes` what it runs, what is
        next and what that waits for. From any thread, at any time; waits for nothing."""
        return self._runtime.lanes()

    @on_cpu()
    def change_plan(self, rates: Mapping[str, float], numbers: Mapping[str, Any]) -> None:
        """Plans again for the same steps at other `rates`, with `numbers` of a plan asked for besides, by which all
        state stays where it is: activations, gradients, buffers and the order of micro-batches may change, and no
        result does. Raises ConfigError or DoesNotFit where that cannot be, with the plan as it was."""
        self._usable()
        if self._passes.waiting is not None:
            raise ConfigError("gradients wait for optimizer_step; call that before the plan is changed")
        self._checkpoints.release()
        self._runtime.change_plan(rates, numbers)

    def drain(self) -> None:
        """Waits for pending updates."""
        self.core.drain()

    def close(self) -> None:
        """Frees all memory; the engine cannot be used any more. A checkpoint that is still being written is cancelled
        and removed. Does nothing in a forked child of the engine's process."""
        if self._passes.guard.is_forked:
            return
        self._passes.guard.leave()
        self._checkpoints.cancel()
        self._runtime.close()

    def __repr__(self) -> str:
        """Model, parameters, precision, device and planned sizes."""
        decoder = self.decoder
        split = self._runtime.micro_batch
        planned = f"{self._runtime.micro_batches} micro-batches of {split}" if split is not None else "not planned yet"
        return (
            f"<Engine {type(decoder.model).__name__}, {decoder.num_parameters:,} parameters, {decoder.num_trainable:,} "
            f"trained in {decoder.precision} on {self.device}, {planned}>"
        )

    def __reduce__(self) -> Any:
        """Refused: an engine consists of this process's memory and threads, which cannot be copied."""
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
    def decoder(self) -> Decoder:
        """The model, cut into units as the present plan has it."""
        return self._runtime.decoder

    @property
    @on_cpu()
    def core(self) -> "_core.Engine":
        """The native engine. The first access plans and allocates it if no step has done so."""
        self._usable()
        return self._runtime.core

    @property
    @on_cpu()
    def plan(self) -> dict[str, Any]:
        """The current plan, as `megatrain._core.plan` returned it."""
        self._usable()
        return self._runtime.plan

    @property
    def device(self) -> torch.device:
        """Where layers are computed."""
        return self._runtime.device

    @property
    def grad_precision(self) -> str:
        """In which precision gradients are sent to the host: bf16 or fp32."""
        return self._runtime.grad_precision

    @on_cpu()
    def request(self, micro_batch: tuple[int, int], micro_batches: int) -> dict[str, Any]:
        """The planner's input for steps of this size; see `profile.plan_request`."""
        self._usable()
        arguments.check_sizes(micro_batch, micro_batches, self.decoder.max_positions)
        return self._runtime.request(self._runtime.cut, micro_batch, micro_batches)

    def _usable(self) -> None:
        """Raises EngineBroken, with the cause, after `close` and once something has failed. First waits for a step that
        still runs after an interrupt."""
        self._passes.check()


__all__ = ["Engine", "EvalOutput", "MicroBatch", "StateDict", "Stats", "StepInputs", "StepOutput", "choose_precision"]
