"""Keys of a model's own configuration that a run replaces: `model.config` beside `model.path`.

Rotary positions are one setting of several spellings (`rope_theta`, `rope_scaling`, `rope_parameters`), and what is
given replaces that part of them and nothing else. Nothing is built here but by `check_shapes`.
"""

import copy
import logging
from collections.abc import Callable, Mapping
from typing import Any

from megatrain.config.default_length import STRETCHED
from megatrain.errors import ConfigError
from megatrain.names import nearest

log: logging.Logger = logging.getLogger(__name__)

_LOOSE = ("rope_theta", "partial_rotary_factor")
"""Keys of rotary positions that are also written beside `rope_scaling`."""

_ROPE = ("rope_theta", "partial_rotary_factor", "rope_scaling", "rope_parameters")

_ROPE_KEYS = frozenset(
    "rope_type rope_theta factor original_max_position_embeddings partial_rotary_factor attention_factor beta_fast "
    "beta_slow mscale mscale_all_dim truncate short_factor long_factor low_freq_factor high_freq_factor".split()
)
"""What transformers' kinds of rotary positions read (`modeling_rope_utils.py`)."""

_FIXED = {
    "model_type": "which makes it another model; write the whole model in model.config, without model.path",
    "architectures": "which follows from the model",
    "auto_map": "which names the model's code",
    "transformers_version": "which nothing reads",
    "dtype": "which train.precision says",
    "torch_dtype": "which train.precision says",
    "quantization_config": "which belongs to the files of the weights",
}
"""Keys of a `config.json` that cannot be replaced, and why."""


def merge(config: Any, described: Mapping[str, Any], given: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The `config.json` of a model, `described`, with the keys of `given` in place of its own. `config`: the same as
    transformers reads it; `prefix` goes before a key in messages. Raises ConfigError."""
    from transformers import PretrainedConfig

    merged = _without_derived(config, described)
    rope = getattr(config, "rope_parameters", None)
    positional = {}
    if isinstance(rope, dict) and rope:
        positional = {key: given[key] for key in _ROPE if key in given and (key not in _LOOSE or _has(rope, key))}
        for key in _ROPE:
            if key not in _LOOSE or _has(rope, key):
                merged.pop(key, None)
        # written out also where it is not replaced, or a default would follow the new max_position_embeddings
        merged["rope_parameters"] = _rope(config, rope, positional, prefix)
    for key, value in given.items():
        if key in positional:
            continue
        if key in _FIXED:
            raise ConfigError(f"{prefix}{key} cannot replace that of model.path, {_FIXED[key]}; remove it")
        part = getattr(config, key, None)
        if isinstance(part, PretrainedConfig):
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{prefix}{key} is {value!r}; write the keys that are replaced, such as {{KEY: VALUE}}"
                )
            # older files of models with images have the keys of the text part beside the others
            merged[key] = merge(part, described.get(key) or part.to_dict(), value, f"{prefix}{key}.")
            continue
        _refuse_of_text(config, key, prefix)
        name = config.attribute_map.get(key, key)
        for other in (name, *(old for old, new in config.attribute_map.items() if new == name)):
            merged.pop(other, None)
        merged[name] = copy.deepcopy(value)
    return merged


def _refuse_of_text(config: Any, key: str, prefix: str) -> None:
    """Raises ConfigError for a key of the text part, which would be stored, and read by nothing, outside of it."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    owner = type(config)
    declared = key in getattr(owner, "__dataclass_fields__", ()) or (key not in _ROPE and hasattr(owner, key))
    if text is config or declared:
        return
    if hasattr(text, key) or key in _ROPE:
        name = next((name for name, part in vars(config).items() if part is text), "text_config")
        raise ConfigError(f"{prefix}{key} is a key of the text part of {config.model_type}; write {prefix}{name}.{key}")


def check_effect(config: Any, given: Mapping[str, Any], prefix: str) -> None:
    """Raises ConfigError for a key that the configuration's own rules have set to something else: Qwen2's
    `sliding_window` is null while `use_sliding_window` is false."""
    from transformers import PretrainedConfig

    for key, value in given.items():
        found = getattr(config, key, None)
        if isinstance(found, PretrainedConfig):
            check_effect(found, value, f"{prefix}{key}.")
        elif key in _ROPE and isinstance(getattr(config, "rope_parameters", None), dict):
            wanted = {key: value} if key in _LOOSE else value or {}
            _check_rope(config, config.rope_parameters, wanted, prefix if key in _LOOSE else f"{prefix}{key}.")
        elif _plain(found) != _plain(value):
            raise ConfigError(_no_effect(config, f"{prefix}{key}", value, found))


def _check_rope(config: Any, rope: Mapping[str, Any], given: Mapping[str, Any], prefix: str) -> None:
    for key, value in _spelled(given).items():
        found = rope.get(key)
        if isinstance(value, Mapping) and isinstance(found, Mapping):
            _check_rope(config, found, value, f"{prefix}{key}.")
        elif _plain(found) != _plain(value):
            raise ConfigError(_no_effect(config, f"{prefix}{key}", value, found))


def check_shapes(load: Callable[[Mapping[str, Any]], Any], given: Mapping[str, Any], trust_remote_code: bool) -> None:
    """Raises ConfigError for a key with which the weights of the model's files would not fit. `load` makes the
    configuration with keys of `given` replaced."""
    own = load({})
    before = _shapes(own, trust_remote_code)
    if _shapes(load(given), trust_remote_code) == before:
        return
    for key, value in given.items():
        try:
            same = _shapes(load({key: value}), trust_remote_code) == before
        except ConfigError:  # with this key alone, it is no model
            continue
        if not same:
            _refuse_shapes(own, key, value)
    key = next(iter(given))
    _refuse_shapes(own, key, given[key])


def _refuse_shapes(own: Any, key: str, value: Any) -> None:
    raise ConfigError(
        f"model.config.{key} is {value!r} and the model's own {getattr(own, key, None)!r}: its weights have other "
        "shapes, or are others. Remove it, or write model.init: random to train such a model from nothing"
    )


def _shapes(config: Any, trust_remote_code: bool) -> dict[str, tuple[int, ...]]:
    import torch

    from megatrain.models.meta_init import build_without_storage

    model = build_without_storage(copy.deepcopy(config), torch.float32, trust_remote_code=trust_remote_code)
    return {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}  # a tied one once


def _without_derived(config: Any, described: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `described` without `layer_types` where they follow from the other keys, as they then do from new
    ones."""
    merged = copy.deepcopy(dict(described))
    if merged.get("layer_types") is None:
        return merged
    rest = {key: value for key, value in merged.items() if key != "layer_types"}
    try:
        follows = type(config).from_dict(copy.deepcopy(rest)).layer_types == config.layer_types
    except Exception as error:  # a configuration's class may raise anything
        log.debug("layer_types of %s are kept as they are: %s", config.model_type, error)
        return merged
    return rest if follows else merged


def _rope(config: Any, own: dict[str, Any], given: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Rotary positions, as `rope_parameters` has them, with what is given in place of the model's own."""
    if "rope_scaling" in given and "rope_parameters" in given:
        raise ConfigError(
            f"{prefix}rope_scaling and {prefix}rope_parameters are both given, two spellings of one setting; keep one"
        )
    name = "rope_scaling" if "rope_scaling" in given else "rope_parameters"
    dictionary = given.get(name)
    if dictionary is not None and not isinstance(dictionary, Mapping):
        raise ConfigError(f"{prefix}{name} is {dictionary!r}; write its keys, such as {{rope_type: yarn, factor: 4.0}}")
    loose = {key: given[key] for key in _LOOSE if key in given}
    if "rope_type" not in own:
        return _by_kind(config, own, given, prefix)
    for key in loose:
        if key in (dictionary or {}):
            raise ConfigError(f"{prefix}{key} and {prefix}{name}.{key} are both given; keep one of the two")
    if name in given and dictionary is None:
        dictionary = {"rope_type": "default"}
    return _one_rope(config, own, {**loose, **_spelled(dictionary or {})}, f"{prefix}{name}.")


def _by_kind(config: Any, own: dict[str, Any], given: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The same for a model whose kinds of layers have positions of their own."""
    kinds = given.get("rope_parameters") or {}
    wrong = next((key for key in given if key != "rope_parameters"), None)
    strange = next((kind for kind in kinds if kind not in own or not isinstance(kinds[kind], Mapping)), None)
    if wrong or strange:
        raise ConfigError(
            f"{prefix}{wrong or f'rope_parameters.{strange}'}: {config.model_type} has rotary positions of their own "
            f"for {' and '.join(own)}; write {prefix}rope_parameters: {{{next(iter(own))}: {{…}}}}"
        )
    return {
        kind: _one_rope(config, rope, _spelled(kinds[kind]), f"{prefix}rope_parameters.{kind}.")
        if kind in kinds
        else copy.deepcopy(rope)
        for kind, rope in own.items()
    }


def _one_rope(config: Any, own: dict[str, Any], given: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    known = _ROPE_KEYS | set(own)
    for key in given:
        if key not in known:
            close = nearest(key, sorted(known))
            hint = f"did you mean {prefix}{close}?" if close else "remove it"
            raise ConfigError(f"{prefix}{key} is not a key of rotary positions; {hint}")
    # another kind has other keys, of which none of the model's own may be left
    kept = {key: own[key] for key in own if key in _LOOSE or key.startswith("mrope")} if "rope_type" in given else own
    rope = copy.deepcopy({**kept, **given})
    if rope.get("rope_type") in STRETCHED and "original_max_position_embeddings" not in rope:
        trained = own.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None)
        if trained is not None:
            log.info("%soriginal_max_position_embeddings is not given: %d, the model's own positions", prefix, trained)
            rope["original_max_position_embeddings"] = trained
    return rope


def _spelled(rope: Mapping[str, Any]) -> dict[str, Any]:
    """With `type`, the name of `rope_type` in older files, by its present name."""
    return {"rope_type" if key == "type" else key: value for key, value in rope.items()}


def _has(rope: Mapping[str, Any], key: str) -> bool:
    return any(key in part for part in (rope, *rope.values()) if isinstance(part, Mapping))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value


def _no_effect(config: Any, key: str, value: Any, found: Any) -> str:
    return (
        f"{key}: {value!r} has no effect: {config.model_type} makes {found!r} of it, by its other keys; remove it, or "
        "write the key that it follows too"
    )
