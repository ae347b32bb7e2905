"""What a checkpoint and an export share: a folder as transformers' `from_pretrained` reads it, beside its weights."""

import contextlib
import copy
import json
import logging
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatrain.errors import ConfigError, StorageError
from megatrain.system import safetensors_io
from megatrain.system.atomic import flushing, storage_error, write_file
from megatrain.system.safetensors_io import Entry, Shard
from megatrain.weights.types import Decoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log: logging.Logger = logging.getLogger(__name__)

TOKENIZER_FILES = (
    "tokenizer*.json",
    "tokenizer*.model",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece*.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates",
)
"""What belongs to a tokenizer in a Hugging Face folder; copied byte for byte."""

MODEL_FILES = (
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
"""What belongs to a model in a Hugging Face folder, beside its weights and config; copied byte for byte."""

CODE_FILES = "*.py"

_TOKEN_BYTES = 128
"""What a saved tokenizer takes for an entry of its vocabulary, merges included: those of public models 40 to 90."""
_JSON_BYTES = 64 << 10


def join(upper: Tensor, lower: Tensor) -> Tensor:
    """The fp32 masters of a bf16 plane of weights and its plane of residuals, exactly: the bits of a master are
    `(upper << 16) + lower`, `lower` sign-extended, and 8 bits higher where it is int8 (`docs/checkpoints.md`)."""
    low = lower.to(torch.int32) << (8 if lower.dtype == torch.int8 else 0)
    bits = (upper.view(torch.int16).to(torch.int32) << 16) + low
    return bits.view(torch.float32)


def library_types(model: Any, target: torch.dtype) -> dict[str, torch.dtype]:
    """Types of the float tensors of a model, built in `target`, that `from_pretrained(dtype=target)` gives another type
    than `target`: those that the class builds in a type of their own (DeepSeek-V3's `e_score_correction_bias`), and
    those it names to be kept in fp32 (`_keep_in_fp32_modules_strict`; see `convert_and_load_state_dict_in_model` in
    transformers' core_model_loading.py)."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    types = {name: t.dtype for name, t in tensors if t.is_floating_point() and t.dtype != target}
    kept = (getattr(model, "_keep_in_fp32_modules_strict", None) or ()) if target.itemsize == 2 else ()
    for pattern in kept:
        # as transformers matches them: regular expressions, but for a star
        wanted = re.compile(pattern.replace("*", ".*"))
        types |= {name: torch.float32 for name, t in tensors if t.is_floating_point() and wanted.search(name)}
    return types


def folder_bytes(
    entries: Sequence[Entry],
    tokenizer: "PreTrainedTokenizerBase | None",
    tokenizer_dir: str | Path | None,
    model_dir: str | Path | None = None,
) -> int:
    """What a folder with these tensors takes on disk, a little more rather than less; the rest as for
    `write_model_files`."""
    total = sum(entry.nbytes for entry in entries) + _described(entry.name for entry in entries) + _JSON_BYTES
    found: list[Path] = []
    if tokenizer_dir is not None:
        found = [path for pattern in TOKENIZER_FILES for path in Path(tokenizer_dir).glob(pattern)]
        total += sum(path.stat().st_size for path in found)
    saved = tokenizer is not None and not any(path.name.startswith("tokenizer") for path in found)
    of_model = tokenizer_dir if model_dir is None else model_dir
    if of_model is not None:
        total += sum(path.stat().st_size for pattern in MODEL_FILES for path in Path(of_model).glob(pattern))
    return total + (tokenizer_bytes(tokenizer) if saved and tokenizer is not None else 0)


def tokenizer_bytes(tokenizer: "PreTrainedTokenizerBase") -> int:
    """What a saved tokenizer takes on disk, a little more rather than less."""
    return _TOKEN_BYTES * len(tokenizer) + len(str(tokenizer.chat_template or "")) + _JSON_BYTES


def beside_tensors(decoder: Decoder, tokenizer: "PreTrainedTokenizerBase | None") -> int:
    """What a folder with a model and its optimizer state takes on disk beside its tensors, a little more rather than
    less."""
    planes = 4  # weights, residuals and two moments
    total = planes * _described(decoder.tensors) + _JSON_BYTES
    if tokenizer is not None:
        total += tokenizer_bytes(tokenizer)
    return total


def _described(names: Iterable[str]) -> int:
    """What tensors of these names take in the header of a file, and in the index."""
    return sum(2 * (256 + len(name)) for name in names)


def write_index(folder: Path, files: list[Shard]) -> list[Path]:
    """The index of the model's shards, where there are several. Returns what was written."""
    if len(files) < 2:
        return []
    path = folder / f"{files[0].stem}.safetensors{safetensors_io.INDEX_SUFFIX}"
    write_file(path, safetensors_io.index_json(files).encode())
    return [path]


def write_model_files(
    folder: Path,
    decoder: Decoder,
    dtype: torch.dtype,
    tokenizer: "PreTrainedTokenizerBase | None",  # saved unless `tokenizer_dir` has the files
    tokenizer_dir: str | Path | None,
    model_dir: str | Path | None,  # None: what it would have is taken from `tokenizer_dir`
) -> None:
    """Config (saying `dtype`), generation config, tokenizer and chat template, processor, and the code that they name.
    Raises StorageError."""
    config = copy.deepcopy(decoder.config)
    config.architectures = [type(decoder.model).__name__]
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        if getattr(part, "tie_word_embeddings", decoder.tied) != decoder.tied:
            part.tie_word_embeddings = decoder.tied  # tied or untied by hand; what is written must say so
    write_config(folder, json.loads(config.to_json_string(use_diff=True)), dtype)
    with flushing(folder):
        copied: list[str] = []
        if tokenizer_dir is not None:
            code = (CODE_FILES,) if _names_code(Path(tokenizer_dir)) else ()
            copied += copy_files(Path(tokenizer_dir), folder, (*TOKENIZER_FILES, *code))
        of_model = tokenizer_dir if model_dir is None else model_dir
        if of_model is not None:  # last: of two files of code with the same name its own is kept
            code = (CODE_FILES,) if getattr(config, "auto_map", None) or _names_code(Path(of_model)) else ()
            copied += copy_files(Path(of_model), folder, (*MODEL_FILES, *code))
        try:
            if "generation_config.json" not in copied:
                from transformers import GenerationConfig

                own = getattr(decoder.model, "generation_config", None)
                (own or GenerationConfig.from_model_config(config)).save_pretrained(str(folder))
            if tokenizer is not None and not any(
                name.startswith("tokenizer") and not name.endswith(".py") for name in copied
            ):
                tokenizer.save_pretrained(str(folder))
        except OSError as error:
            raise storage_error(error, folder) from None


def check_model_files(folder: str | Path | None) -> None:
    """Raises ConfigError for a file of `MODEL_FILES` in a folder that cannot be read or is no JSON object: its copy in
    a checkpoint or an export could not be loaded. Nothing is copied from a folder of None."""
    if folder is None:
        return
    remedy = "it is copied into every checkpoint and export, so fetch it again, or remove it"
    for path in (Path(folder) / name for name in MODEL_FILES):
        if not path.exists():
            continue
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error.strerror}); {remedy}") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not JSON ({error}); {remedy}") from None
        if not isinstance(found, dict):
            raise ConfigError(f"{path} holds no JSON object but a {type(found).__name__}; {remedy}")


def _names_code(folder: Path) -> bool:
    """Whether a tokenizer or processor in a Hugging Face folder comes with code of its own."""
    for name in ("tokenizer_config.json", "preprocessor_config.json", "processor_config.json"):
        with contextlib.suppress(OSError, ValueError, RecursionError):
            found = json.loads((folder / name).read_text(encoding="utf-8"))
            if isinstance(found, dict) and found.get("auto_map"):
                return True
    return False


def copy_files(source: Path, folder: Path, patterns: Iterable[str]) -> list[str]:
    """Copies what matches, byte for byte, folders too; returns the names. Raises StorageError."""
    copied = []
    for path in sorted({path for pattern in patterns for path in source.glob(pattern)}):
        try:
            if path.is_dir():
                shutil.copytree(path, folder / path.name, copy_function=_copy_file)
            else:
                _copy_file(path, folder / path.name)
        except OSError as error:
            raise storage_error(error, folder / path.name) from None
        copied.append(path.name)
    return copied


def _copy_file(source: str | Path, target: str | Path) -> None:
    try:
        data = Path(source).read_bytes()
    except OSError as error:  # of the other disk than the one that is written
        raise StorageError(f"{source} cannot be read: {error.strerror}") from None
    Path(target).write_bytes(data)


def json_bytes(value: Any) -> bytes:
    """JSON as Hugging Face writes it."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def write_config(folder: Path, described: dict[str, Any], dtype: torch.dtype) -> None:
    """Writes `config.json`, with `dtype` as the type of weights. Raises StorageError."""
    described = _with_older_rope_keys(_with_dtype(described, str(dtype).removeprefix("torch.")))
    write_file(folder / "config.json", json_bytes(described))


def _with_older_rope_keys(described: dict[str, Any]) -> dict[str, Any]:
    """A configuration that says its rotary positions in both forms: `rope_parameters`, and for readers from before
    transformers 5, which would silently assume a base of 10,000, `rope_theta` and `rope_scaling`. Only where the
    installed transformers makes the same configuration of both."""
    plain = {
        key: _with_older_rope_keys(value) if key.endswith("_config") and isinstance(value, dict) else value
        for key, value in described.items()
    }
    for keys in _older_rope_keys(described.get("rope_parameters")):
        if _same_config(plain | keys, described):
            return plain | keys
    return plain if plain == described or _same_config(plain, described) else described


def _older_rope_keys(rope: Any) -> list[dict[str, Any]]:
    """What older readers look at, in the order to be tried. Never a part of the positions alone."""
    if not isinstance(rope, dict):
        return []
    local = {}
    if isinstance(rope.get("full_attention"), dict) and isinstance(rope.get("sliding_attention"), dict):
        # per kind of layer; only the global ones were ever scaled
        if rope["sliding_attention"].get("rope_type", "default") != "default":
            return []
        if rope["sliding_attention"].get("rope_theta") != rope["full_attention"].get("rope_theta"):
            local = {"rope_local_base_freq": rope["sliding_attention"].get("rope_theta")}
        rope = rope["full_attention"]
    if "rope_theta" not in rope:
        return []
    share = {key: rope[key] for key in ("partial_rotary_factor",) if key in rope}
    keys = {"rope_theta": rope["rope_theta"], **local}
    if rope.get("rope_type", "default") != "default":
        keys["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta" and key not in share}
    # some kinds of model, all of whose dimensions rotate, do not take the share as a key
    return [keys | share, keys] if share == {"partial_rotary_factor": 1.0} else [keys | share]


def _same_config(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether transformers reads two descriptions as the same configuration; False for a kind that it does not know."""
    from transformers import CONFIG_MAPPING

    kind = str(one.get("model_type"))
    if kind not in CONFIG_MAPPING:
        return False
    try:
        read, expected = (CONFIG_MAPPING[kind].from_dict(copy.deepcopy(each)).to_dict() for each in (one, other))
    except Exception as error:  # a configuration's class may raise anything for keys that it does not have
        log.debug("config.json of %s keeps one form of its rotary positions: %s", kind, error)
        return False
    return read == expected


def _with_dtype(config: dict[str, Any], name: str) -> dict[str, Any]:
    """A configuration that names `name` wherever it names a type, text and vision parts included."""
    changed = {
        key: _with_dtype(value, name) if key.endswith("_config") and isinstance(value, dict) else value
        for key, value in config.items()
    }
    changed.pop("torch_dtype", None)
    if "dtype" in config or "torch_dtype" in config or "model_type" in config:
        changed["dtype"] = name
    return changed
