"""Reading a Hugging Face configuration: its keys are checked, and a kind of model that cannot be trained is refused by
name. Nothing is built here, and torch is not imported.
"""

import dataclasses
import functools
import importlib.util
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatrain.compat import numbers
from megatrain.errors import ConfigError
from megatrain.models import config_overrides
from megatrain.names import nearest

log: logging.Logger = logging.getLogger(__name__)

_EVERY_MODEL = frozenset(
    "model_type architectures auto_map transformers_version dtype torch_dtype quantization_config tokenizer_class "
    "vocab_size bos_token_id eos_token_id pad_token_id tie_word_embeddings".split()
)
"""Keys that the `config.json` of any model may have, whether or not its class declares them."""


_COMPUTES_NOTHING = frozenset(
    "architectures auto_map transformers_version dtype torch_dtype quantization_config tokenizer_class bos_token_id "
    "eos_token_id tie_word_embeddings use_cache id2label label2id".split()
)
"""Keys in which two configurations of a model that computes the same may differ, or whose difference shows in its
tensors."""


def differences(config: Any, written: Mapping[str, Any]) -> list[str]:
    """What of a model's configuration is another than in a `config.json` that was written of one of its class, as
    `key: before → now`. Both are read by the installed transformers, whose defaults may be others than the writer's."""
    now, before = config.to_dict(), type(config).from_dict(dict(written)).to_dict()
    # compared as a file holds them: a list and a tuple are the same there
    now, before = (json.loads(json.dumps(found, default=str)) for found in (now, before))
    return [line for key in sorted({*now, *before}) for line in _changes(key, before.get(key), now.get(key))]


def _changes(key: str, before: Any, now: Any) -> list[str]:
    name = key.rpartition(".")[2]
    if before == now or name in _COMPUTES_NOTHING or name.startswith("_"):
        return []
    if isinstance(before, dict) and isinstance(now, dict):
        parts = sorted({*before, *now})
        return [line for part in parts for line in _changes(f"{key}.{part}", before.get(part), now.get(part))]
    return [f"{key}: {before!r} → {now!r}"]


def load_config(
    source: Any, trust_remote_code: bool = False, overrides: Mapping[str, Any] | None = None, **arguments: Any
) -> Any:
    """A Hugging Face configuration from itself, from a dict with `model_type`, or from a folder or hub id, for which
    `arguments` go to `from_pretrained`. A key that the model does not have is an error in a dict, which somebody wrote
    by hand, and a line in the log for a folder. A folder's `quantization_config` is dropped, since weights are
    dequantised when they are loaded. `overrides`: keys that replace a folder's own. Raises ConfigError, also for
    whatever transformers refuses."""
    from transformers import AutoConfig

    if isinstance(source, dict):
        keys = dict(source)
        kind = keys.pop("model_type", None)
        if kind is None:
            raise ConfigError("model.config names no model_type, such as llama")
        if not isinstance(kind, str):
            raise ConfigError(f"model.config.model_type is {kind!r}, not the name of a kind of model such as llama")
        of_newer = _of_newer(keys.get("transformers_version"))
        _check_kind(kind, of_newer)
        _refuse_sizes(keys, "model.config.")
        try:
            config = AutoConfig.for_model(kind, **keys)
        except Exception as error:  # a configuration class may raise anything for a value it refuses
            raise ConfigError(f"model.config: {kind}: {_reason(error)}") from error
        _refuse_unknown(config, source, "model.config.", of_newer)
        return config
    if isinstance(source, (str, Path)):
        _refuse_sizes(_written(Path(source)), f"{Path(source) / 'config.json'}: ")
        _refuse_sizes(overrides or {}, "model.config.")
        try:
            config = AutoConfig.from_pretrained(str(source), trust_remote_code=trust_remote_code, **arguments)
        except Exception as error:  # the same, and whatever remote code raises
            reason = f"{_reason(error)}{_of_newer(_written(Path(source)).get('transformers_version'))}"
            raise ConfigError(f"model.path: no configuration of a model in {source}: {reason}") from error
        if extra := _unknown(config, vars(config)):
            log.info(
                "%s: its configuration has keys that %s does not know: %s; they have no effect%s",
                source,
                config.model_type,
                extra,
                _of_newer(getattr(config, "transformers_version", None)),
            )
        if overrides:
            config = _overridden(config, source, overrides, arguments)
        from megatrain.weights import dequantize  # which loads torch, as a refused request must not

        return dequantize.without(config, source)
    return source


def _overridden(config: Any, source: str | Path, overrides: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
    described = type(config).get_config_dict(str(source), **arguments)[0]
    merged = config_overrides.merge(config, described, overrides, "model.config.")
    try:
        replaced = type(config).from_dict(merged)
    except Exception as error:  # a configuration class may raise anything for a value it refuses
        raise ConfigError(f"model.config: {config.model_type}: {_reason(error)}") from error
    replaced.name_or_path = config.name_or_path  # where a model's own code is looked up
    _refuse_unknown(replaced, overrides, "model.config.")
    config_overrides.check_effect(replaced, overrides, "model.config.")
    return replaced


def check(config: Any) -> None:
    """Raises ConfigError for a kind of model that cannot be trained, before anything of it is built."""
    kind = config.model_type
    refuse_kind(config, kind)
    if not getattr(config, "auto_map", None) and not _has_class(config):
        _refuse_no_part(config, "vision_config")
        raise ConfigError(f"{kind} is not a causal language model in the installed transformers")
    if getattr(text_config(config), "num_attention_heads", None) is None:
        raise ConfigError(
            f"{kind} has no attention heads; models whose layers all carry a state from token to token are not "
            "supported"
        )


def text_config(config: Any) -> Any:
    """The configuration of the language part. Raises ConfigError where there are several, and where what stands in its
    place is none."""
    try:
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
    except ValueError as error:
        raise ConfigError(f"{config.model_type} has several language parts: {_reason(error)}") from None
    if text is not config:
        _refuse_no_part(config, next((key for key, part in vars(config).items() if part is text), "text_config"))
    return text


def _refuse_no_part(config: Any, key: str) -> None:
    """Raises ConfigError where the configuration of a part of a model was not read as one, as for a class that does not
    have the part."""
    from transformers import PretrainedConfig

    part = getattr(config, key, None)
    if part is not None and not isinstance(part, PretrainedConfig):
        raise ConfigError(
            f"{config.model_type}: {key} is {_shortened(repr(part))}, which {type(config).__name__} does not read as "
            "the configuration of a part; remove it from config.json, or name the model_type that has such a part"
        )


def refuse_kind(config: Any, name: str) -> None:
    """Raises ConfigError for a kind of model, or a value in its configuration, that cannot be trained; `name` is what
    the message calls the model."""
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{name} is an encoder-decoder; only decoders can be trained")
    if getattr(config, "audio_config", None) is not None:
        raise ConfigError(f"{name} also has an audio part, which is not supported; name a model of its text part alone")
    text = text_config(config)
    pad, size = getattr(text, "pad_token_id", None), getattr(text, "vocab_size", None)
    if isinstance(pad, int) and isinstance(size, int) and not -size <= pad < size:
        raise ConfigError(
            f"{name}: pad_token_id is {pad}, and the vocabulary has {size} entries (vocab_size); write one of them, or "
            "null for none"
        )
    _refuse_numbers(text, name)
    kinds = getattr(text, "layer_types", None)
    for key, word in (("sliding_window", "sliding"), ("attention_chunk_size", "chunked")):
        used = key == "sliding_window" if kinds is None else any(word in str(kind) for kind in kinds)
        value = getattr(text, key, None)
        # transformers masks every key under a window of 0; its attention back ends then differ in what a token sees
        if used and value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(
                f"{name}: {key} is {value!r}, under which a token does not see itself; write a number of tokens, 1 or "
                "more, or null for full attention"
            )


def _refuse_numbers(text: Any, name: str) -> None:
    """Raises ConfigError for numbers with which a model can be built, but not run."""

    def count(key: str) -> int | None:
        value = getattr(text, key, None)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    _refuse_sizes(text.to_dict(), f"{name}: ")
    for key in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"):
        if (value := count(key)) is not None and value < 1:
            raise ConfigError(f"{name}: {key} is {value}; it must be at least 1")
    heads, shared = count("num_attention_heads"), count("num_key_value_heads")
    latent = getattr(text, "kv_lora_rank", None) is not None  # whose heads are not shared, whatever the number says
    if heads and shared and not latent and heads % shared and heads > shared:
        raise ConfigError(
            f"{name}: num_key_value_heads is {shared}, which does not divide the {heads} attention heads "
            "(num_attention_heads)"
        )
    for key, value in text.to_dict().items():
        dropout = key.endswith(("dropout", "_pdrop")) and isinstance(value, (int, float))
        if dropout and not isinstance(value, bool) and not 0 <= value < 1:
            raise ConfigError(f"{name}: {key} is {value}; it is a probability, from 0 to below 1")


_LARGEST = (
    (re.compile(r"(num_|n_)?(hidden_|encoder_|decoder_)?layers?|depth"), 4096),
    (
        re.compile(
            r"\w*(hidden_size|head_dim|embed_dim|image_size|patch_size|state_size|_rank|_heads?|experts?|channels)"
            r"|n_embd|d_model"
        ),
        1 << 20,
    ),
)
"""Keys of a configuration by which a constructor makes so many modules, or buffers of so many numbers, and the most
that they may be: more than any model has."""
_LONGEST_INTEGER = (1 << 63) - 1
"""That torch takes."""


def _refuse_sizes(described: Mapping[str, Any], prefix: str) -> None:
    """Raises ConfigError for a size, nested parts included, that is larger than that of any model."""
    for key, value in described.items():
        if isinstance(value, Mapping):
            _refuse_sizes(value, f"{prefix}{key}.")
        elif isinstance(value, int):
            most = next((most for keys, most in _LARGEST if keys.fullmatch(str(key))), _LONGEST_INTEGER)
            if value > most:
                raise ConfigError(
                    f"{prefix}{key} is {value}, more than the {most:,} that a model may have; write its number"
                )


def sees(config: Any) -> bool:
    """Whether a model takes images; False for a configuration of None."""
    return getattr(config, "vision_config", None) is not None


def _has_class(config: Any) -> bool:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    return type(config) in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if sees(config) else MODEL_FOR_CAUSAL_LM_MAPPING)


def _written(folder: Path) -> dict[str, Any]:
    """The `config.json` of a folder; empty for whatever is not there, or is no configuration. Raises ConfigError for
    what cannot be read."""
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); copy it again") from error
    return found if isinstance(found, dict) else {}


def _of_newer(version: Any) -> str:
    """What is added to messages about a `config.json` that a newer transformers than the installed one has written;
    empty for any other."""
    from transformers import __version__ as installed

    if numbers(str(version)) <= numbers(installed):
        return ""
    return f" (transformers {version} has written it, and {installed} is installed: upgrade that)"


def _check_kind(kind: Any, of_newer: str) -> None:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as DECODERS

    if kind in CONFIG_MAPPING:
        return
    message = f"model.config.model_type is {kind!r}, which the installed transformers does not know"
    close = nearest(kind, DECODERS) or nearest(kind, CONFIG_MAPPING.keys())
    hint = f"did you mean {close}?" if close else "write one such as llama"
    raise ConfigError(f"{message}{of_newer}; {hint}")


def _refuse_unknown(config: Any, given: Mapping[str, Any], prefix: str, of_newer: str = "") -> None:
    """Raises ConfigError for the first key of `given`, nested parts included, that neither the configuration's class
    nor the model's code reads. `of_newer`: see `_of_newer`."""
    from transformers import PretrainedConfig

    for name in _unknown(config, given):
        known = {field.name for field in dataclasses.fields(type(config))} | set(config.attribute_map)
        if "rope_parameters" in known:
            known |= {"rope_theta", "rope_scaling"}  # its parts in older files
        close = nearest(name, sorted(known))
        hint = f"did you mean {prefix}{close}?" if close else "remove it"
        raise ConfigError(f"{prefix}{name} is not a key of {config.model_type}{of_newer}; {hint}")
    for name, value in given.items():
        part = vars(config).get(name)
        if isinstance(value, Mapping) and isinstance(part, PretrainedConfig):
            _refuse_unknown(part, value, f"{prefix}{name}.", of_newer)


def _unknown(config: Any, given: Mapping[str, Any]) -> list[str]:
    """Keys that the class of a configuration does not declare. The class stores every key that it does not interpret
    (as it does old names of other keys), so an unknown key is found again as an attribute."""
    owner: Any = type(config)
    if not dataclasses.is_dataclass(owner):
        return []  # remote code, which need not be a dataclass
    names = {field.name for field in dataclasses.fields(owner)}
    known = names | set(config.attribute_map) | _EVERY_MODEL
    left = [
        name
        for name in given
        if name in vars(config) and name not in known and not name.startswith("_") and not hasattr(owner, name)
    ]
    if left:
        left = [name for name in left if name not in _own_attributes(type(config))]
    words = _words_of_model(owner.__module__) if left else frozenset()
    return [name for name in left if name not in words]


def _own_attributes(owner: type) -> frozenset[str]:
    """Attributes that a configuration of this class has by default."""
    try:
        return frozenset(vars(owner()))
    except Exception:  # some classes have no defaults
        return frozenset()


@functools.cache
def _words_of_model(module: str) -> frozenset[str]:
    """Every word in the modeling file that belongs to a configuration's module: some models read keys that their
    configuration class does not declare."""
    name = module.replace(".configuration_", ".modeling_")
    found = importlib.util.find_spec(name) if name != module else None
    if found is None or found.origin is None:
        return frozenset()
    return frozenset(re.findall(r"\w+", Path(found.origin).read_text(encoding="utf-8")))


def _reason(error: BaseException) -> str:
    """The message of an exception of transformers in one paragraph; its validators put the reason into the cause."""
    text = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
    return _shortened(text)


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " …"


_LONGEST = 300
"""Characters kept of a value, or of another library's message: some list every model that exists."""
