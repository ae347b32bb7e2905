"""transformers' Trainer, and TRL's SFTTrainer, on the engine.

The Trainer keeps what it decides: data, order, schedule, callbacks, logging, when to evaluate, save and stop. The
engine does forward, backward, clipping, the update, evaluation and checkpoints. Method names are those of
`transformers.Trainer` that they replace.
"""

import inspect
import json
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatrain.checkpoint.checkpoint import Checkpoint
from megatrain.engine import options
from megatrain.engine.engine import Engine
from megatrain.engine.optimizer import AdamW
from megatrain.errors import CheckpointError, ConfigError
from megatrain.integrations import hf_refusals as refusals
from megatrain.integrations.hf_optimizer import EngineOptimizer
from megatrain.names import IGNORED

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

log: logging.Logger = logging.getLogger(__name__)

_NOT_FOR_THE_ENGINE = (
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "max_length_k",
    "max_length_q",
    "num_items_in_batch",
    "return_loss",
    "seq_idx",
    "seq_lengths",
    "use_cache",
)
"""What collators add for kernels or for the model's forward; the engine derives it from `position_ids`."""

_STATE = "trainer_state.json"
_ARGUMENTS = "training_args.bin"
_WEIGHTS = re.compile(r"(model.*\.safetensors|pytorch_model.*\.bin)(\.index\.json)?")


class TrainerMixin(_Trainer):
    """Put before a Trainer's class: `class Trainer(TrainerMixin, SFTTrainer): pass`.

    `model` is a `megatrain.Engine`, a model, or the folder, `.gguf` file or hub id of one; from the latter two the
    engine is made with `engine_options`, keywords of `Engine` or `Engine.from_pretrained`. Its precision is bf16 where
    the training arguments say `bf16=True`, and fp32 where they do not; with `use_cpu=True` it is on the CPU. Everything
    else is as for the Trainer.

    The training arguments decide learning rate, schedule, AdamW's numbers, weight decay, clipping and accumulation,
    also for an engine that was made with others. Loss is divided by the supervised tokens of the whole step. Logged
    losses of a step are those of its batches together, so a callback between batches of one step sees none. A column
    `loss_weights` of the data sets, a number from 0 on for each row, weights the rows' losses; they are then divided by
    the sum of the supervised tokens' weights. Checkpoints
    are the engine's, with the Trainer's own state beside it; a stock Trainer can load their weights and cannot resume
    from them. TRL's logs have its token accuracy for evaluations only, and no entropy.

    Raises ConfigError, before anything is trained, for what the engine cannot do.
    """

    engine: Engine
    """The engine that trains."""
    optimizer: Any
    """An `EngineOptimizer` from the beginning of training on."""

    def __init__(
        self,
        model: "Engine | nn.Module | str | os.PathLike[str] | None" = None,
        args: Any = None,
        *more: Any,
        engine_options: Mapping[str, Any] | None = None,
        **keywords: Any,
    ) -> None:
        owner = type(self)
        parameters = inspect.signature(super().__init__).parameters
        named = dict(zip([*parameters][2:], more, strict=False))
        refusals.check_loss(owner)
        refusals.check_overrides(owner, TrainerMixin)
        refusals.check_keywords(owner, parameters, {**named, **keywords})
        if args is not None:
            refusals.check_arguments(args)
        self.engine = _engine(model, args, engine_options)
        self._batches: list[dict[str, Any]] = []
        self._formed = False
        own: Any = self.engine.decoder.model
        sets = [{**named, **keywords}.get(name) for name in ("train_dataset", "eval_dataset")]
        weighted = refusals.check_weights(args, *sets)
        super().__init__(own, args, *more, **keywords)
        if weighted:
            self.data_collator: Any = WeightedCollator(self.data_collator)
        if args is None:
            refusals.check_arguments(self.args)
        refusals.check_engine(self.engine, self.args)
        self.engine.decoder.refuse_other_loss()
        if hasattr(self, "aux_loss_enabled"):
            refusals.check_router(self.engine, self.aux_loss_enabled)
        # the plan decides what is kept; stock would put its own checkpointing around the layers of the model
        for name in ("activation_checkpointing", "gradient_checkpointing"):
            if getattr(self.args, name, None):
                setattr(self.args, name, False)
        self.engine.set_max_grad_norm(self.args.max_grad_norm if self.args.max_grad_norm > 0 else None)
        self.model_accepts_loss_kwargs = True  # so that supervised tokens are counted over a whole step

    # ------------------------------------------------------------------------------------------- placement

    def _build_accelerator_args(self, **keywords: Any) -> dict[str, Any]:
        made = super()._build_accelerator_args(**keywords)
        return {**made, "mixed_precision": "no", "device_placement": False}

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        _ = self.args.device  # finds the cards, of which a Trainer would use all
        self.args._n_gpu = min(self.args._n_gpu, 1)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Placement is the engine's."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:  # noqa: ARG002
        return model

    # -------------------------------------------------------------------------------------------- training

    def _set_signature_columns_if_needed(self) -> None:
        """Keeps a column `loss_weights`, which no model's forward has."""
        super()._set_signature_columns_if_needed()
        columns: Any = self._signature_columns
        if "loss_weights" not in columns:
            columns.append("loss_weights")

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """AdamW of the engine, with weight decay for the parameters that `get_decay_parameter_names` names."""
        if self.optimizer is None:
            module: Any = self.model if model is None else model
            decayed = set(self.get_decay_parameter_names(module))
            parameters = [*module.named_parameters()]
            args = self.args
            groups = [
                {"params": [p for n, p in parameters if n in decayed], "weight_decay": args.weight_decay},
                {"params": [p for n, p in parameters if n not in decayed], "weight_decay": 0.0},
            ]
            self.optimizer = EngineOptimizer(
                self.engine,
                groups,
                lr=args.learning_rate,
                betas=(args.adam_beta1, args.adam_beta2),
                eps=args.adam_epsilon,
            )
        made: torch.optim.Optimizer = self.optimizer
        return made

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._begin_step(list(batches))
        return batches, num_items

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Loss of a whole step at its first batch, 0 at the others: the engine takes all batches of a step at once."""
        model.train()
        if self._formed:
            return torch.zeros((), device=self.args.device)
        batches = self._batches or [inputs]
        prepared: Any = self.create_optimizer()
        optimizer = getattr(prepared, "optimizer", prepared)  # accelerate wraps it
        if not isinstance(optimizer, EngineOptimizer):
            raise refusals.another_optimizer(f"the {type(optimizer).__name__} that create_optimizer made")
        self.engine.set_optimizer(optimizer.settings())
        self.engine.set_max_grad_norm(self.args.max_grad_norm if self.args.max_grad_norm > 0 else None)
        tokens = 0.0 if num_items_in_batch is None else float(num_items_in_batch)
        if any("loss_weights" in batch for batch in batches):
            tokens = 0.0  # divided by the sum of the step's weights instead
        loss = self.engine.forward_backward([_batch(b) for b in batches], normalizer=tokens or None)
        self._formed = True
        self._count_tokens(batches)
        return torch.tensor(loss, device=self.args.device)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:  # noqa: ARG002
        return torch.tensor(self.engine.grad_norm())

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:  # noqa: ARG002
        return self.engine.grad_norm() if grad_norm is None else grad_norm

    def _begin_step(self, batches: list[dict[str, Any]]) -> None:
        """Gradients of a step that a callback or an interrupt has cut off are no part of the next one."""
        self._batches, self._formed = batches, False
        self.engine.zero_grad()

    def _count_tokens(self, batches: list[dict[str, Any]]) -> None:
        """TRL's `num_tokens`."""
        sft: Any = self
        if not hasattr(sft, "_metrics"):
            return
        for batch in batches:
            mask = batch.get("attention_mask")
            sft._total_train_tokens += int(mask.sum()) if mask is not None else batch["input_ids"].numel()
        sft._metrics["train"]["num_tokens"] = [sft._total_train_tokens]

    # ------------------------------------------------------------------------------------------ evaluation

    def prediction_step(
        self,
        model: nn.Module,  # noqa: ARG002
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,  # noqa: ARG002
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Loss (0-d), logits (batch, seq, vocabulary) and labels (batch, seq), as stock; the loss is NaN where no token
        is supervised."""
        batch, labels = _batch(inputs), inputs.get("labels")
        loss = None
        if labels is not None:
            supervised = labels[:, 1:] != IGNORED
            weights = batch.get("loss_weights")
            if weights is not None:
                supervised = supervised & ((weights[:, 1:] if weights.ndim == 2 else weights[:, None]) > 0)
            found = self.engine.evaluate_metrics([batch]) if bool(supervised.any()) else None
            loss = torch.tensor(found.loss if found is not None else math.nan, device=self.args.device)
            self._note_accuracy(found.accuracy if found is not None else 0.0)
        if prediction_loss_only:
            return loss, None, None
        return loss, self.engine.all_logits(batch), labels

    def _note_accuracy(self, accuracy: float) -> None:
        """TRL's `mean_token_accuracy` and `num_tokens` of an evaluation."""
        sft: Any = self
        if hasattr(sft, "_metrics"):
            sft._metrics["eval"]["mean_token_accuracy"].append(accuracy)
            sft._metrics["eval"]["num_tokens"] = [sft._total_train_tokens]

    # ------------------------------------------------------------------------------------ saving, resuming

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The model as a Hugging Face folder, in the engine's precision. Within a checkpoint: the engine's own, from
        which it goes on bit for bit."""
        folder = self._folder(output_dir)
        if _internal_call and not self.args.save_only_model:
            self.engine.save(folder, step=self.state.global_step)
            self._save_beside(folder)
        else:
            self._save(str(folder))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        folder = self._folder(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        # Beside checkpoints and whatever else is in the folder, so not by replacing it.
        with tempfile.TemporaryDirectory(prefix=".tmp-export-", dir=folder) as made:
            self.engine.save_pretrained(Path(made) / "model")
            new = sorted((Path(made) / "model").iterdir())
            for old in folder.iterdir():
                if _WEIGHTS.fullmatch(old.name):
                    old.unlink()
            for path in new:
                target = folder / path.name
                if target.is_dir():
                    shutil.rmtree(target)
                path.replace(target)
        self._save_beside(folder)

    def _folder(self, output_dir: str | None) -> Path:
        return Path(output_dir or self.args.output_dir or ".")

    def _save_beside(self, folder: Path) -> None:
        """Tokenizer and training arguments, as stock."""
        tokenizer: Any = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        torch.save(self.args, folder / _ARGUMENTS)

    def train(self, resume_from_checkpoint: str | bool | None = None, *more: Any, **keywords: Any) -> Any:
        """As stock; with True it resumes from the newest checkpoint that is complete. Raises CheckpointError where
        there is none, or where the one named is not the engine's."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(_newest(self._folder(None)))
        elif resume_from_checkpoint:
            problem = _problem(Path(resume_from_checkpoint))
            if problem:
                raise CheckpointError(problem)
        return super().train(resume_from_checkpoint, *more, **keywords)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:  # noqa: ARG002
        # the Trainer's groups and learning rates follow with its own state
        self.engine.set_optimizer(AdamW(lr=self.args.learning_rate))
        self.engine.load(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        assert best is not None  # asked by the caller
        log.info("loading the best model, %s (%s)", best, self.state.best_metric)
        self._load_from_checkpoint(best)

    def push_to_hub(self, *_: Any, **__: Any) -> Any:
        """Refused: upload what `save_model` wrote."""
        raise ConfigError("push_to_hub: call save_model(folder) and upload the folder with huggingface_hub")

    def hyperparameter_search(self, *_: Any, **__: Any) -> Any:
        """Refused: every trial needs a model of its own."""
        raise ConfigError("hyperparameter_search: make one engine and one Trainer for each trial")


class WeightedCollator:
    """A collator of rows with `loss_weights`, which `collator` does not know: its batch has them as (batch,) fp32."""

    def __init__(self, collator: Any) -> None:
        self._collator = collator

    def __call__(self, rows: list[dict[str, Any]], *more: Any) -> Any:
        """The batch. Raises ConfigError where only some of the rows have weights."""
        weights = [row.get("loss_weights") for row in rows]
        rest = [{key: value for key, value in row.items() if key != "loss_weights"} for row in rows]
        batch = self._collator(rest, *more)
        if None in weights:
            if any(weight is not None for weight in weights):
                raise ConfigError("a batch has rows with loss_weights and rows without; give each row one, such as 1.0")
            return batch
        batch["loss_weights"] = torch.tensor(weights, dtype=torch.float32)
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_collator"], name)


def _engine(model: Any, args: Any, given: Mapping[str, Any] | None) -> Engine:
    """The engine given, or one made of the model given. Raises ConfigError for what is none."""
    options.mapping("engine_options", given)
    if isinstance(model, Engine):
        if given:
            raise ConfigError("engine_options were given with an engine, which has been made already; leave one out")
        if args is not None:
            refusals.check_engine(model, args)
        engine = model
    else:
        keywords = {**_defaults(args), **(given or {})}
        for name in ("optimizer", "max_grad_norm"):
            if name in keywords:
                raise ConfigError(f"engine_options: {name} is decided by the training arguments; leave it out")
        if args is not None:
            refusals.check_device(keywords.get("device"), args)
        if isinstance(model, str | os.PathLike):
            engine = Engine.from_pretrained(model, **keywords)
        elif isinstance(model, nn.Module):
            engine = Engine(model, **keywords)
        else:
            raise ConfigError(
                f"model must be a megatrain.Engine, a model, or the folder or hub id of one, not {type(model).__name__}"
            )
    options.refuse_wrapper(engine.decoder.model)
    return engine


def _defaults(args: Any) -> dict[str, Any]:
    """Options of an engine that follow from the training arguments."""
    if args is None:
        return {}
    found = {
        "precision": "bf16" if args.bf16 else "fp32",
        "seed": args.seed,
        "deterministic": args.full_determinism,
    }
    if args.use_cpu:
        found["device"] = "cpu"
    length = getattr(args, "max_length", None)  # TRL's; planning for it now spares another plan for a longer batch
    if length is not None:
        multiple = getattr(args, "pad_to_multiple_of", None) or 1
        rows = max(args.per_device_train_batch_size, args.per_device_eval_batch_size)
        found["micro_batch"] = (rows, -(-length // multiple) * multiple)
    return found


def _batch(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What the engine reads of a collator's batch. Raises ConfigError for labels shifted otherwise than its own."""
    batch = {key: value for key, value in inputs.items() if key not in _NOT_FOR_THE_ENGINE and value is not None}
    shifted = batch.pop("shift_labels", None)
    if shifted is not None:
        labels = batch.get("labels")
        if labels is None:
            batch["labels"] = torch.cat([torch.full_like(shifted[:, :1], IGNORED), shifted[:, :-1]], 1)
        elif not torch.equal(labels[:, 1:], shifted[:, :-1]):
            raise ConfigError(
                "shift_labels are not labels moved by one token; give labels only, which the engine shifts"
            )
    return batch


def _problem(folder: Path) -> str:
    """Why a run cannot resume from a folder; empty where it can."""
    try:
        Checkpoint.open(folder)
    except CheckpointError as error:
        return (
            f"{folder} is no complete checkpoint of the engine ({error}); weights of another Trainer's checkpoint can "
            "be trained from: give its folder as the model"
        )
    try:
        json.loads((folder / _STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{folder} has no readable {_STATE} ({error}), so its save was cut off; name an earlier checkpoint"
    return ""


def _newest(run: Path) -> Path:
    """The newest complete checkpoint of a run. Raises CheckpointError where there is none."""
    found = {int(path.name.partition("-")[2]): path for path in run.glob("checkpoint-*") if path.name[11:].isdecimal()}
    for number in sorted(found, reverse=True):
        problem = _problem(found[number])
        if not problem:
            return found[number]
        log.warning("%s", problem)
    raise CheckpointError(f"{run} holds no complete checkpoint to resume from; leave resume_from_checkpoint out")
