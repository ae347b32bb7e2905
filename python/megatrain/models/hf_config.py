"""What kind of model is asked for: a Hugging Face configuration, read, its keys checked, and refused by name where no
causal language model of that kind can be trained. Nothing is built here.
"""

import dataclasses
import difflib
import functools
import importlib.util
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatrain.errors import ConfigError

log = logging.getLogger(__name__)

_EVERY_MODEL = frozenset(
    "model_type architectures auto_map transformers_version dtype torch_dtype quantization_config tokenizer_class "
    "vocab_size bos_token_id eos_token_id pad_token_id tie_word_embeddings".split()
)
"""Keys that a `config.json` of any model may have, whether its class names them or not."""


def load_config(source: Any, trust_remote_code: bool = False, **arguments: Any) -> Any:
    """A Hugging Face configuration from itself, from a dict that names `model_type`, or from a folder or hub id;
    `arguments` go to `from_pretrained`. A key that the model does not have is refused in a dict, which somebody wrote
    by hand, and told in the log for a folder; that a folder's weights are quantised is left out, since they are
    not when they are in the store. Raises ConfigError, for whatever transformers refuses too."""
    from transformers import AutoConfig

    if isinstance(source, dict):
        keys = dict(source)
        kind = keys.pop("model_type", None)
        if kind is None:
            raise ConfigError("model.config names no model_type, such as llama")
        _check_kind(kind)
        try:
            config = AutoConfig.for_model(kind, **keys)
        except Exception as error:  # a configuration's class may raise anything for values it cannot have
            raise ConfigError(f"model.config: {kind}: {_reason(error)}") from error
        _refuse_unknown(config, source, "model.config.")
        return config
    if isinstance(source, (str, Path)):
        try:
            config = AutoConfig.from_pretrained(str(source), trust_remote_code=trust_remote_code, **arguments)
        except Exception as error:  # the same, and whatever the model's own code may raise
            raise ConfigError(f"model.path: no configuration of a model in {source}: {_reason(error)}") from error
        if extra := _unknown(config, vars(config)):
            log.info("%s: its configuration has keys that %s does not know: %s", source, config.model_type, extra)
        from megatrain.weights import dequantize  # which loads torch, as a refused request must not

        return dequantize.without(config, source)
    return source


def check(config: Any) -> None:
    """Raises ConfigError for a kind of model that cannot be trained, before anything of it is built."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{kind} is an encoder-decoder; only decoders can be trained")
    refuse_parts(config, kind)
    if not getattr(config, "auto_map", None) and not _has_class(config):
        raise ConfigError(f"{kind} is no causal language model: the installed transformers has none of this kind")
    if getattr(text_config(config), "num_attention_heads", None) is None:
        raise ConfigError(
            f"{kind} has no attention heads; models whose layers all carry a state from token to token are not "
            "supported"
        )


def text_config(config: Any) -> Any:
    """The configuration of the language part. Raises ConfigError where there are several."""
    try:
        return config.get_text_config() if hasattr(config, "get_text_config") else config
    except ValueError as error:
        raise ConfigError(f"{config.model_type} has several language parts: {_reason(error)}") from None


def refuse_parts(config: Any, name: str) -> None:
    """Refuses what is more than a language model that may see."""
    if getattr(config, "audio_config", None) is not None:
        raise ConfigError(f"{name} also has an audio part, which is not supported; name a model of its text part alone")


def sees(config: Any) -> bool:
    """Whether a model takes images."""
    return getattr(config, "vision_config", None) is not None


def _has_class(config: Any) -> bool:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    return type(config) in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if sees(config) else MODEL_FOR_CAUSAL_LM_MAPPING)


def _check_kind(kind: Any) -> None:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as DECODERS

    if kind in CONFIG_MAPPING:
        return
    message = f"model.config.model_type is {kind!r}, which the installed transformers does not know"
    close = difflib.get_close_matches(str(kind), list(DECODERS), n=1) or difflib.get_close_matches(
        str(kind), list(CONFIG_MAPPING.keys()), n=1
    )
    raise ConfigError(f"{message}; did you mean {close[0]}?" if close else f"{message}; write one such as llama")


def _refuse_unknown(config: Any, given: Mapping[str, Any], prefix: str) -> None:
    """Raises ConfigError for the first key of `given` that neither the configuration's class nor the model's code
    reads, parts of it included."""
    from transformers import PretrainedConfig

    for name in _unknown(config, given):
        known = {field.name for field in dataclasses.fields(type(config))} | set(config.attribute_map)
        close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
        hint = f"did you mean {prefix}{close[0]}?" if close else "remove it"
        raise ConfigError(f"{prefix}{name} is not a key of {config.model_type}; {hint}")
    for name, value in given.items():
        part = vars(config).get(name)
        if isinstance(value, Mapping) and isinstance(part, PretrainedConfig):
            _refuse_unknown(part, value, f"{prefix}{name}.")


def _unknown(config: Any, given: Mapping[str, Any]) -> list[str]:
    """Keys that the class of a configuration has no place for. It keeps every key that it did not take for something
    else (such as an old name of another key), so a key that nobody knows is found again as an attribute."""
    owner: Any = type(config)
    if not dataclasses.is_dataclass(owner):
        return []  # of the model's own code
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
    """What a configuration of this class has by itself."""
    try:
        return frozenset(vars(owner()))
    except Exception:  # some cannot be without values
        return frozenset()


@functools.cache
def _words_of_model(module: str) -> frozenset[str]:
    """Words in the code of the model that belongs to a configuration's module: some read keys that the class does not
    name."""
    name = module.replace(".configuration_", ".modeling_")
    found = importlib.util.find_spec(name) if name != module else None
    if found is None or found.origin is None:
        return frozenset()
    return frozenset(re.findall(r"\w+", Path(found.origin).read_text(encoding="utf-8")))


def _reason(error: BaseException) -> str:
    """What an exception of transformers says, in one paragraph; its validators put the reason behind."""
    text = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " …"


_LONGEST = 300
"""Characters of another library's message: some list every model that there is."""
