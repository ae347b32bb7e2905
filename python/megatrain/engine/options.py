"""An engine's arguments, checked before anything is opened, allocated or moved."""

import contextlib
import functools
import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from megatrain.config import NvmeConfig, constraints
from megatrain.config.paths import check_state_folder
from megatrain.errors import ConfigError
from megatrain.names import suggest
from megatrain.units import is_count, parse_size
from megatrain.weights.state_format import StateFormat

UPDATES = ("just_in_time", "immediate")
_MOST_TOKENS = 2**31 - 1
"""Of a micro-batch, and micro-batches of a step, as of the numbers of a plan."""
MEMORY_KEYS = ("gpu", "host")
"""What `memory` of an engine may limit."""


def check(
    *,
    max_grad_norm: Any,
    grad_precision: Any,
    update: Any,
    memory: Any,
    plan: Any,
    micro_batch: Any,
    micro_batches: Any,
    label_smoothing: Any,
    z_loss: Any,
    seed: Any,
    moments: Any,
    master: Any,
    deterministic: Any,
    precisions: Iterable[str],
) -> None:
    """Raises ConfigError for the first argument that cannot be used."""
    constraints.refuse_processes()
    if grad_precision not in tuple(precisions):
        raise ConfigError(f"grad_precision must be {' or '.join(precisions)}, not {grad_precision!r}")
    StateFormat(moments, master)
    if not isinstance(deterministic, bool):
        raise ConfigError(f"deterministic must be True or False, not {deterministic!r}")
    if not _is_number(label_smoothing) or not 0 <= label_smoothing < 1:
        raise ConfigError(f"label_smoothing must be at least 0 and below 1, not {label_smoothing!r}")
    if not _is_number(z_loss) or not 0 <= z_loss < math.inf:
        raise ConfigError(f"z_loss must be finite and not negative, not {z_loss!r}")
    if not is_count(seed, 0):
        raise ConfigError(f"seed must be a whole number and not negative, not {seed!r}")
    if seed > constraints.MOST_SEED:
        raise ConfigError(f"seed is {seed}; it must be below 2**64")
    check_sizes(micro_batch, micro_batches)
    for name, given in (("memory", memory), ("plan", plan)):
        mapping(name, given)
    memory_limits(memory)
    for name in ("state_on_disk", "weights_on_disk", "inputs_on_disk"):
        if (plan or {}).get(name) and state_disk(memory) is None:
            raise ConfigError(
                f"plan.{name} is {(plan or {})[name]!r}, and no disk is named; give memory={{'nvme': {{'path': …}}}}, "
                "a folder on a fast disk"
            )
    constraints.check_plan(plan or {})
    workspace = (plan or {}).get("loss_workspace")
    if workspace is not None:
        _size("plan.loss_workspace", workspace)
    more = (plan or {}).get("more_workspace")
    if more is not None and not is_count(more, 0):
        raise ConfigError(f"plan.more_workspace must be a whole number of bytes and not negative, not {more!r}")
    if more is not None:
        _size("plan.more_workspace", more)
    if update not in UPDATES:
        raise ConfigError(f"update must be {' or '.join(UPDATES)}, not {update!r}")
    constraints.refuse_slabs((plan or {}).get("slabs"), update)
    check_max_grad_norm(max_grad_norm, update)


def check_sizes(micro_batch: Any, micro_batches: Any, positions: int | None = None) -> None:
    """Raises ConfigError for sizes of a step that no step can have; None is one that is not known yet. `positions`:
    those of the model."""
    sizes = micro_batch if micro_batch is not None else (1, 1)
    if not isinstance(sizes, tuple | list) or len(sizes) != 2 or not all(is_count(size, 1) for size in sizes):
        raise ConfigError(f"micro_batch must be (rows, seq), both at least 1, not {micro_batch!r}")
    if math.prod(sizes) > _MOST_TOKENS:
        raise ConfigError(f"micro_batch is {micro_batch!r}; it must be at most {_MOST_TOKENS} tokens")
    if micro_batches is not None and not is_count(micro_batches, 1):
        raise ConfigError(f"micro_batches must be at least 1, not {micro_batches!r}")
    if micro_batches is not None and micro_batches > _MOST_TOKENS:
        raise ConfigError(f"micro_batches is {micro_batches}; it must be at most {_MOST_TOKENS}")
    check_length(micro_batch, positions)


def check_rates(rates: Any, known: Iterable[str]) -> None:
    """Raises ConfigError for what is no mapping, and for a rate of those `known` that is no finite number."""
    mapping("rates", rates)
    for name in known:
        if name in (rates or {}) and not (_is_number(rates[name]) and math.isfinite(rates[name])):
            raise ConfigError(f"rates.{name} must be a finite number, not {rates[name]!r}")


def check_change(numbers: Any, known: Iterable[str]) -> None:
    """Raises ConfigError for what a plan cannot be changed by: anything but the numbers `known`."""
    mapping("numbers", numbers)
    for name in numbers or {}:
        if name not in known:
            raise ConfigError(
                f"numbers has {name!r}, which is no number of a plan that may change between steps; "
                f"{suggest(name, sorted(known))}"
            )
    constraints.check_plan(numbers or {})


def check_saved(tokenizer: Any, tokenizer_dir: Any, model_dir: Any) -> None:
    """Raises ConfigError for a tokenizer that cannot be saved with a model, and for folders that are not there: found
    out after training, that would be too late."""
    if tokenizer is not None and not callable(getattr(tokenizer, "save_pretrained", None)):
        raise ConfigError(
            f"tokenizer is {tokenizer!r}, which is no tokenizer of transformers; give "
            "AutoTokenizer.from_pretrained(...), or name its folder as tokenizer_dir"
        )
    for name, given in (("tokenizer_dir", tokenizer_dir), ("model_dir", model_dir)):
        if given is not None and not folder(given).is_dir():
            raise ConfigError(f"{name} is {str(given)!r}, and there is no such folder")


def check_max_grad_norm(max_grad_norm: Any, update: str) -> None:
    """Raises ConfigError for a norm that cannot be clipped to, or not with these updates."""
    if max_grad_norm is not None and not positive(max_grad_norm):
        raise ConfigError(f"max_grad_norm must be positive and finite, or None, not {max_grad_norm!r}")
    constraints.refuse_clipped_immediate(update, max_grad_norm)


def mapping(name: str, given: Any) -> None:
    """Raises ConfigError unless `given` is a mapping or None."""
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"{name} must be a dict, not {type(given).__name__}")


def memory_limits(memory: Mapping[str, Any] | None) -> dict[str, int]:
    """Bytes by `gpu` and `host`, where `memory` gives any. Raises ConfigError for another key or no size."""
    limits = {}
    for key, given in (memory or {}).items():
        if key not in (*MEMORY_KEYS, "nvme"):
            raise ConfigError(f"memory: unknown key {key!r}; {suggest(key, (*MEMORY_KEYS, 'nvme'))}")
        if key == "nvme" or given is None or given == "auto":
            continue
        limits[key] = _size(f"memory.{key}", given)
        constraints.check_memory(limits[key], f"memory.{key}")
    return limits


def state_disk(memory: Mapping[str, Any] | None) -> NvmeConfig | None:
    """Where `memory` lets optimizer state be kept on disk; None for nowhere. Raises ConfigError for what is no such
    place, or no folder that can be written."""
    given = (memory or {}).get("nvme")
    if given is None:
        return None
    if not isinstance(given, Mapping) or "path" not in given:
        raise ConfigError(f"memory.nvme must be a dict with a path, such as {{'path': '/nvme'}}, not {given!r}")
    for key in given:
        if key not in ("path", "size"):
            raise ConfigError(f"memory.nvme: unknown key {key!r}; {suggest(key, ('path', 'size'))}")
    paths = given["path"] if isinstance(given["path"], list | tuple) else [given["path"]]
    if not all(isinstance(path, str | os.PathLike) for path in paths):
        raise ConfigError(f"memory.nvme.path must be a folder, or a list of folders, not {given['path']!r}")
    size = given.get("size")
    disk = NvmeConfig(
        path=tuple(str(Path(path).absolute()) for path in paths),
        size=None if size is None else _size("memory.nvme.size", size),
    )
    for path in disk.paths:
        check_state_folder(Path(path))
    return disk


def _size(name: str, given: Any) -> int:
    """Bytes of a size. Raises ConfigError for anything that is not a size."""
    if isinstance(given, bool) or not isinstance(given, int | str):
        raise ConfigError(f"{name} is {given!r}; write bytes as a whole number, or a size such as '12GiB'")
    try:
        return parse_size(given)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


def check_length(micro_batch: tuple[int, int] | None, positions: int | None) -> None:
    """Raises ConfigError when micro-batches are longer than the model's positions."""
    if micro_batch is not None and positions is not None and micro_batch[1] > positions:
        raise ConfigError(
            f"micro_batch is {tuple(micro_batch)} and the model has positions for {positions} tokens; lower its second "
            "number. Rows of several documents, whose position_ids restart, may be longer: they are planned by their "
            f"tokens, as {(-(-micro_batch[0] * micro_batch[1] // positions), positions)} here"
        )


def refuse_wrapper(model: Any) -> None:
    """Raises ConfigError for a module that wraps a whole transformers model: its tensors have the wrapper's names."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        return
    for name, module in model.named_modules():
        head = module.get_output_embeddings() if isinstance(module, PreTrainedModel) else None  # type: ignore[no-untyped-call]
        if head is not None:
            raise ConfigError(
                f"{type(model).__name__} wraps {type(module).__name__} ({name}), so its weights have names such as "
                f"{next(iter(dict(model.named_parameters())), name)}, which transformers cannot load. Of a PEFT model "
                "save the adapter: model.save_pretrained(folder, state_dict=dict(engine.state_dict())); of another "
                "wrapper read engine.state_dict() and save it under the names you need"
            )


def model_path(given: Any) -> str:
    """A model's folder, file or hub id. Raises ConfigError for what is neither text nor a path."""
    if not isinstance(given, str | os.PathLike):
        raise ConfigError(f"a model is named by a folder, a .gguf file or a hub id, not {given!r}")
    return os.fspath(given)


def folder(given: Any) -> Path:
    """A folder's path. Raises ConfigError for anything else, or for a path that no file system can have."""
    try:
        path = Path(given)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
    except (TypeError, ValueError, OSError) as error:
        raise ConfigError(f"{str(given)[:200]!r} cannot be a folder: {error}") from None
    return path


def positive(value: Any) -> bool:
    """Whether `value` is a positive finite number; a 0-d tensor is one, a text that looks like one is not."""
    try:
        return not isinstance(value, str | bool) and math.isfinite(value) and float(value) > 0
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False


P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound=type)


def known_keywords(owner: C) -> C:
    """A class whose constructor and public methods answer a misspelt keyword with a TypeError that names the nearest
    one."""
    for name, member in list(vars(owner).items()):
        if name.startswith("_") and name != "__init__":
            continue
        if inspect.isfunction(member):
            setattr(owner, name, _known_keywords(member))
        elif isinstance(member, classmethod):
            setattr(owner, name, classmethod(_known_keywords(member.__func__)))
    return owner


def _known_keywords(function: Callable[P, T]) -> Callable[P, T]:
    parameters = inspect.signature(function).parameters
    names = [name for name in parameters if name not in ("self", "cls")]
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return function

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs:
            if name not in names:
                hint = suggest(name, names) if names else "it takes none"
                raise TypeError(f"{function.__qualname__} has no argument {name!r}; {hint}")
        return function(*args, **kwargs)

    return call


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not value > constraints.MOST_FP32
