"""What of transformers' Trainer and of TRL's the engine cannot do: refused by name, before anything is trained."""

import inspect
from collections.abc import Mapping
from typing import Any

from megatrain.engine.engine import Engine
from megatrain.errors import ConfigError
from megatrain.names import suggest

_LOSSES = ("nll", "chunked_nll")
"""SFTConfig's names, of several releases of TRL, for the loss of the next token."""

_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")

_PLANNED = (
    "what is kept and what is computed again is the engine's plan: see plan={'activation': …} of megatrain.Engine"
)
_ONE_CARD = "the engine trains on one device, from host memory"

_ARGUMENTS: dict[str, str] = {
    "fp16": "the engine computes in bf16 or fp32; set bf16=True, or neither for fp32",
    "fp16_full_eval": "evaluation computes as training does; leave it out",
    "bf16_full_eval": "evaluation computes as training does; leave it out",
    "tf32": "fp32 is computed in fp32; set bf16=True for speed",
    "deepspeed": f"{_ONE_CARD}, and keeps the optimizer's state there itself; leave it out",
    "fsdp": f"{_ONE_CARD}; leave it out",
    "parallelism_config": f"{_ONE_CARD}; leave it out",
    "torch_compile": "layers are compiled by the engine itself, on CUDA; leave it out",
    "torch_compile_backend": "layers are compiled by the engine itself, on CUDA; leave it out",
    "torch_compile_mode": "layers are compiled by the engine itself, on CUDA; leave it out",
    "use_liger_kernel": "layers run as transformers writes them, and the loss in chunks of the engine's; leave it out",
    "gradient_checkpointing_kwargs": f"{_PLANNED}; leave it out",
    "activation_checkpointing_kwargs": f"{_PLANNED}; leave it out",
    "activation_offloading": f"{_PLANNED}; leave it out",
    "torch_empty_cache_steps": "the plan has room for what torch keeps in its cache; leave it out",
    "auto_find_batch_size": "the engine plans its memory before the first step; choose the batch size yourself",
    "neftune_noise_alpha": "the engine adds no noise to embeddings; leave it out",
    "label_smoothing_factor": "the engine's evaluation has no smoothing, so losses could not be compared; set it to 0",
    "optim_args": "the engine's optimizer is AdamW, with adam_beta1, adam_beta2, adam_epsilon and weight_decay",
    "optim_target_modules": "the engine's optimizer is AdamW over all trained parameters",
    "push_to_hub": "call trainer.save_model(folder) after training and upload the folder with huggingface_hub",
    "model_init_kwargs": "the model is made by the engine; give what it needs in engine_options",
    "debug": "hooks of its kind would see modules without weights; leave it out",
}
"""Training arguments by name, and what to do instead; each is refused where it is set to anything."""

_NOT_CALLED = (
    "_prepare_context_parallel_inputs",
    "_prepare_input",
    "_prepare_inputs",
    "autocast_smart_context_manager",
    "compute_loss_context_manager",
    "get_optimizer_cls_and_kwargs",
)
"""Methods of transformers' Trainer that only methods call which the mixin replaces."""

_LIBRARIES = ("transformers", "trl")

_KEYWORDS: dict[str, str] = {
    "model_init": "give the model, or an engine, itself",
    "compute_loss_func": "the engine computes the loss of the next token in chunks and never has all logits",
    "peft_config": "make the engine of a PEFT model in a loop of your own, with megatrain.Engine",
    "quantization_config": "the engine trains weights in full precision",
    "optimizer_cls_and_kwargs": "the engine's optimizer is AdamW",
}
"""Arguments of a Trainer by name, and why."""


def check_keywords(owner: type, parameters: Mapping[str, inspect.Parameter], given: Mapping[str, Any]) -> None:
    """Raises TypeError, naming the nearest word, for what a Trainer's constructor does not take, and ConfigError for
    what the engine cannot do."""
    known = [name for name, parameter in parameters.items() if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    if len(known) == len(parameters):
        for name in given:
            if name not in known:
                hint = suggest(name, [*known, "engine_options"])
                raise TypeError(f"{owner.__qualname__} has no argument {name!r}; {hint}")
    for name, why in _KEYWORDS.items():
        if given.get(name) is not None:
            raise ConfigError(f"{name} cannot be used on the engine: {why}")
    optimizer, schedule = given.get("optimizers") or (None, None)
    if optimizer is not None or schedule is not None:
        raise another_optimizer("optimizers")


def another_optimizer(what: str) -> ConfigError:
    """The refusal of any optimizer but the engine's, which `what` would have brought."""
    return ConfigError(
        f"{what} cannot be used on the engine: its AdamW takes learning_rate, adam_beta1, adam_beta2, adam_epsilon and "
        "weight_decay from the training arguments, and lr_scheduler_type names the schedule; for another schedule "
        "override create_scheduler"
    )


def check_loss(owner: type) -> None:
    """Raises ConfigError for a Trainer whose loss is not that of the next token, such as DPO's with its second
    model."""
    computing = next((c for c in owner.__mro__ if "compute_loss" in vars(c)), None)
    if computing is None:
        raise ConfigError(
            f"{owner.__qualname__} is no Trainer: write class {owner.__qualname__}(TrainerMixin, SFTTrainer) or "
            "(TrainerMixin, transformers.Trainer), with the mixin first"
        )
    if (computing.__module__.partition(".")[0], computing.__name__) in (
        ("transformers", "Trainer"),
        ("trl", "SFTTrainer"),
    ):
        return
    second = [name for name in ("ref_model", "teacher_model", "reward_funcs") if name in _parameters(computing)]
    needs = f", and with {second[0]} a second model," if second else ""
    raise ConfigError(
        f"{computing.__qualname__}.compute_loss calls the model{needs} itself, and the engine's model has no weights "
        "of its own: only the loss of the next token can be trained through a Trainer. For another loss write the loop "
        "with engine.step(batches, loss_fn=…), and use engine.logprobs of an engine on the reference beforehand"
    )


def check_overrides(owner: type, mixin: type) -> None:
    """Raises ConfigError for a method of a user's own class that would never run: one that the mixin, which comes
    before the class, replaces without calling it, or one that only such methods of transformers call."""
    # A function that calls super() has the cell __class__.
    replaced = [
        name
        for name, method in vars(mixin).items()
        if inspect.isfunction(method) and "__class__" not in method.__code__.co_freevars
    ]
    after = owner.__mro__.index(mixin)
    for at, cls in enumerate(owner.__mro__):
        if cls in (mixin, object) or cls.__module__.partition(".")[0] in _LIBRARIES:
            continue
        for name in (*_NOT_CALLED, *(replaced if at > after else ())):
            if name in vars(cls):
                raise ConfigError(
                    f"{cls.__qualname__}.{name} would never be called on the engine, which does that part of a step "
                    "itself; change batches in the data collator and the data set, or write the loop with engine.step"
                    + (
                        f", or define {name} in a class before TrainerMixin if it is meant to replace the engine's"
                        if name in replaced
                        else ""
                    )
                )


def check_arguments(args: Any) -> None:
    """Raises ConfigError for the first training argument that the engine cannot follow."""
    for name, why in _ARGUMENTS.items():
        value = getattr(args, name, None)
        if value:
            raise ConfigError(f"{name} is {_short(value)}: {why}")
    if str(getattr(args.optim, "value", args.optim)) not in _OPTIMIZERS:
        smaller = ", and engine_options={'moments': '8bit'} for 8-bit moments" if "8bit" in str(args.optim) else ""
        raise ConfigError(
            f"optim is {str(args.optim)!r}: the engine's optimizer is AdamW; write optim='adamw_torch'{smaller}"
        )
    if getattr(args, "loss_type", "nll") not in _LOSSES:
        raise ConfigError(f"loss_type is {args.loss_type!r}: the engine computes the loss of the next token, 'nll'")
    template = getattr(args, "chat_template_path", None)
    if template is not None and not str(template).endswith((".jinja", ".j2")):
        raise ConfigError(
            f"chat_template_path is {template!r}: taking over another model's template changes the size of the "
            "embedding, which the engine has fixed; name a .jinja file"
        )
    if args.save_only_model and args.load_best_model_at_end:
        raise ConfigError(
            "save_only_model and load_best_model_at_end are both set: the best model is read back from an engine's "
            "checkpoint; leave save_only_model out"
        )


def check_weights(args: Any, train: Any, evaluation: Any) -> bool:
    """Whether a data set has a column of weights, `loss_weights`. Raises ConfigError where TRL would drop it, or put
    rows together that have different ones."""
    sets = [train, *(evaluation.values() if isinstance(evaluation, Mapping) else (evaluation,))]
    if not any("loss_weights" in (getattr(rows, "column_names", None) or ()) for rows in sets):
        return False
    for name in ("packing", "eval_packing", "padding_free"):
        if getattr(args, name, None):
            raise ConfigError(
                f"{name} is True and the data set has loss_weights: TRL puts rows together without their weights; set "
                f"it to False, or train from a configuration (fields: {{weight: COLUMN}}), which packs weighted rows"
            )
    return True


def check_engine(engine: Engine, args: Any) -> None:
    """Raises ConfigError where an engine and the training arguments contradict each other."""
    if args.bf16 and engine.decoder.precision != "bf16":
        raise ConfigError(
            f"bf16 is True, but the engine computes in {engine.decoder.precision}; set bf16=False (SFTConfig sets it "
            "where it is left out), or make the engine with precision='bf16'"
        )
    if args.full_determinism and not engine.deterministic:
        raise ConfigError("full_determinism is True, but the engine was made without deterministic=True")
    check_device(engine.device, args)


def check_device(device: Any, args: Any) -> None:
    """Raises ConfigError where an engine's device, by name or torch's, is a card and the training arguments forbid
    one."""
    if args.use_cpu and str(device).partition(":")[0] == "cuda":
        raise ConfigError(
            f"use_cpu is True, but the engine's device is {device}; leave use_cpu out, or make the engine with "
            "device='cpu'"
        )


def check_router(engine: Engine, enabled: bool) -> None:
    """Raises ConfigError where a Trainer and the engine disagree about the router's auxiliary loss."""
    if enabled != (engine.decoder.router is not None):
        ours, theirs = ("without", "with") if enabled else ("with", "without")
        raise ConfigError(
            f"the engine was made {ours} the router's auxiliary loss and SFTConfig asks for training {theirs} it; set "
            "output_router_logits in the model's configuration before the engine is made, or router_aux_loss_coef=0.0"
        )


def _parameters(owner: type) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(owner).parameters


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "…"
