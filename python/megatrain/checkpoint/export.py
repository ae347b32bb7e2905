"""A finished model as the hub expects it: sharded safetensors with index, config, tokenizer and chat template.

    save_pretrained(decoder, core, "out", tokenizer_dir="the/source")     # from the store
    export_checkpoint("run/checkpoints/step-100", "out", dtype="fp32")    # from a checkpoint

Tensors are streamed in pieces; the folder appears whole or not at all. The result loads in stock transformers with no
missing and no unexpected key.
"""

import copy
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from megatrain.config.paths import check_unused
from megatrain.errors import CheckpointError, ConfigError
from megatrain.system import safetensors_io
from megatrain.system.atomic import staged, storage_error, write_file
from megatrain.system.safetensors_io import DamagedFile, Entry, Shard
from megatrain.weights.hf_layout import Layout, fill, library, published, read_layout
from megatrain.weights.loader import Core, Decoder, FileWeights, TensorRef

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatrain.checkpoint.checkpoint import Checkpoint

log = logging.getLogger(__name__)

DtypeName = Literal["auto", "bf16", "fp32"]
LayoutName = Literal["source", "library"]

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

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
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
"""What belongs to a tokenizer or processor in a Hugging Face folder; copied byte for byte."""

_TOKENIZER_BYTES = 32 << 20
_JSON_BYTES = 1 << 20


def save_pretrained(
    decoder: Decoder,
    core: Core,
    out: str | Path,
    *,
    dtype: DtypeName = "auto",  # auto: the run's own precision
    layout: LayoutName = "source",
    tokenizer: "PreTrainedTokenizerBase | None" = None,  # saved unless `tokenizer_dir` has the files
    tokenizer_dir: str | Path | None = None,  # its tokenizer files and generation config are copied unchanged
    overwrite: bool = False,
    threads: int = 2,
    progress: Callable[[int, int], None] | None = None,  # bytes done, bytes in all
) -> None:
    """Writes the model in the store as a Hugging Face folder. Float tensors get the asked type, all others keep theirs;
    a tied weight is written once, unless the source has it twice. `layout` is that of the source, name by name (where
    there is none, that of published checkpoints: every expert apart), or the library's own (experts fused). Raises
    ConfigError when `out` is in use already, StorageError when it cannot be written."""
    out = Path(out)
    target = _target(dtype, decoder.precision)
    _check_layout(layout)
    if not overwrite:
        check_unused(out, "the export's folder")
    layout_of = _layout(decoder, layout)
    entries = _entries({name: ref.dtype for name, ref in decoder.tensors.items()}, layout_of, target)

    def weights(name: str, start: int, out: Tensor) -> None:
        read_weights(core, decoder.tensors[name], DTYPES[decoder.precision], start, out)

    def read(_stem: str, entry: Entry, start: int, piece: Tensor) -> None:
        fill(layout_of[entry.name], start, piece, weights)

    with staged(out, folder_bytes(entries, tokenizer, tokenizer_dir)) as folder:
        files = safetensors_io.plan_shards(folder, "model", entries)
        safetensors_io.write_shards(
            files, read, threads=threads, progress=_of_total(progress, sum(f.size for f in files))
        )
        write_index(folder, files)
        write_model_files(folder, decoder, target, tokenizer, tokenizer_dir)


def export_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    *,
    dtype: DtypeName = "auto",
    layout: LayoutName = "source",
    overwrite: bool = False,
    threads: int = 2,
    progress: Callable[[int, int], None] | None = None,  # bytes done, bytes in all
) -> None:
    """Writes a checkpoint's model as a Hugging Face folder, without any tensor of the model itself: `fp32` from a bf16
    run is its exact master. `layout` as in `save_pretrained`. Raises CheckpointError, before anything is written,
    for a checkpoint that is not whole (what is taken from it is read through first), ConfigError when `out` is in use
    already, StorageError when it cannot be written."""
    from megatrain.checkpoint.checkpoint import Checkpoint

    source, out = Checkpoint.open(Path(checkpoint)), Path(out)
    target = _target(dtype, source.precision)
    _check_layout(layout)
    if not overwrite:
        check_unused(out, "the export's folder")
    source.check("model", *(("residual",) if target == torch.float32 else ()))
    try:
        weights = FileWeights(source.shards("model"))
        residual = FileWeights(source.shards("residual"))
    except DamagedFile as error:
        raise CheckpointError(str(error)) from None
    layout_of = _saved_layout(source, weights, layout)
    entries = _entries({name: entry.dtype for name, entry in weights.entries.items()}, layout_of, target)

    def values(name: str, start: int, out: Tensor) -> None:
        count, size = out.numel(), weights.entries[name].dtype.itemsize
        found = weights.read(name, start, count, torch.empty(count * size, dtype=torch.uint8))
        if out.dtype == torch.float32 and name in residual.entries:
            low = residual.read(name, start, count, torch.empty(count * 2, dtype=torch.uint8))
            found = join(found, low)
        out.copy_(found)

    def read(_stem: str, entry: Entry, start: int, piece: Tensor) -> None:
        try:
            fill(layout_of[entry.name], start, piece, values)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {source.folder} cannot be read any more ({error.strerror}); a run that goes on removes "
                "its older ones (output.keep), so take its newest, or export again"
            ) from None

    with staged(out, folder_bytes(entries, None, source.folder)) as folder:
        files = safetensors_io.plan_shards(folder, "model", entries)
        try:
            safetensors_io.write_shards(
                files, read, threads=threads, progress=_of_total(progress, sum(f.size for f in files))
            )
        except DamagedFile as error:
            raise CheckpointError(str(error)) from None
        write_index(folder, files)
        config = json.loads((source.folder / "config.json").read_text(encoding="utf-8"))
        write_file(folder / "config.json", json_bytes(_with_dtype(config, str(target).removeprefix("torch."))))
        copy_files(source.folder, folder, (*TOKENIZER_FILES, "generation_config.json", "*.py"))


def weight_bytes(decoder: Decoder, dtype: DtypeName = "auto", layout: LayoutName = "source") -> int:
    """Bytes of the weight files that `save_pretrained` writes."""
    dtypes = {name: ref.dtype for name, ref in decoder.tensors.items()}
    entries = _entries(dtypes, _layout(decoder, layout), _target(dtype, decoder.precision))
    return sum(file.size for file in safetensors_io.plan_shards(Path(), "model", entries))


def _entries(dtypes: Mapping[str, torch.dtype], layout: Layout, target: torch.dtype) -> list[Entry]:
    """The tensors of a folder: float ones as `target`, all others in their own type."""
    own = {name: dtypes[stored.names[0]] for name, stored in layout.items()}
    return [
        Entry(name, target if own[name].is_floating_point else own[name], stored.shape)
        for name, stored in layout.items()
    ]


def _layout(decoder: Decoder, layout: LayoutName) -> Layout:
    """Every tensor of the folder by name, and what of the model it holds."""
    shapes = {name: tuple(ref.shape) for name, ref in decoder.tensors.items()}
    if layout == "library":
        return library(shapes)
    return decoder.layout if decoder.layout is not None else published(decoder.model, shapes)


def _saved_layout(source: "Checkpoint", weights: FileWeights, layout: LayoutName) -> Layout:
    """The same for a checkpoint, whose tensors are the library's."""
    shapes = {name: entry.shape for name, entry in weights.entries.items()}
    own = library(shapes)
    if layout == "library":
        return own
    recorded = read_layout(source.state().get("layout"), shapes)
    if recorded is not None:
        return recorded
    from megatrain.models.hf_config import load_config
    from megatrain.models.meta_init import build_without_storage

    try:
        return published(build_without_storage(load_config(source.folder), torch.bfloat16), shapes)
    except ConfigError as error:
        log.warning("the library's own layout is written, since the model's code cannot be loaded: %s", error)
        return own


def read_weights(core: Core, ref: TensorRef, stored: torch.dtype, start: int, out: Tensor) -> None:
    """Fills `out` with elements of a tensor from `start` on, in the type of `out`: for a trainable one from the weights
    that the device computes with where the types agree, else from the master."""
    if ref.role != "trainable":
        stored = ref.dtype
    if out.dtype == stored:
        core.read(ref.unit, ref.tensor, "weights", out, start)
    elif ref.role == "trainable":
        wide = torch.empty(out.shape, dtype=torch.float32)
        core.read(ref.unit, ref.tensor, "master", wide, start)
        out.copy_(wide)
    else:
        own = torch.empty(out.shape, dtype=ref.dtype)
        core.read(ref.unit, ref.tensor, "weights", own, start)
        out.copy_(own)


def join(upper: Tensor, lower: Tensor) -> Tensor:
    """The fp32 master of a bf16 upper plane and its int16 residual, exactly."""
    bits = (upper.view(torch.int16).to(torch.int32) << 16) + lower.to(torch.int32)
    return bits.view(torch.float32)


# -------------------------------------------------------------------------------------------- beside the weights


def folder_bytes(
    entries: Sequence[Entry], tokenizer: "PreTrainedTokenizerBase | None", tokenizer_dir: str | Path | None
) -> int:
    """What a folder with these tensors takes on disk, a little more rather than less."""
    described = sum(256 + len(entry.name) for entry in entries) * 2  # in a header, and in the index
    total = sum(entry.nbytes for entry in entries) + described + _JSON_BYTES
    found: list[Path] = []
    if tokenizer_dir is not None:
        found = [path for pattern in TOKENIZER_FILES for path in Path(tokenizer_dir).glob(pattern)]
        total += sum(path.stat().st_size for path in found)
    saved = tokenizer is not None and not any(path.name.startswith("tokenizer") for path in found)
    return total + (_TOKENIZER_BYTES if saved else 0)


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
    tokenizer: "PreTrainedTokenizerBase | None",
    tokenizer_dir: str | Path | None,
) -> None:
    """Config (saying `dtype`), generation config, tokenizer and chat template. Raises StorageError."""
    config = copy.deepcopy(decoder.config)
    config.architectures = [type(decoder.model).__name__]
    described = json.loads(config.to_json_string(use_diff=True))
    write_file(folder / "config.json", json_bytes(_with_dtype(described, str(dtype).removeprefix("torch."))))
    copied: list[str] = []
    if tokenizer_dir is not None:
        patterns: tuple[str, ...] = (*TOKENIZER_FILES, "generation_config.json")
        if getattr(config, "auto_map", None):
            patterns = (*patterns, "*.py")  # the model's own code, which its configuration names
        copied = copy_files(Path(tokenizer_dir), folder, patterns)
    try:
        if "generation_config.json" not in copied:
            from transformers import GenerationConfig

            own = getattr(decoder.model, "generation_config", None)
            (own or GenerationConfig.from_model_config(config)).save_pretrained(str(folder))
        if tokenizer is not None and not any(name.startswith("tokenizer") for name in copied):
            tokenizer.save_pretrained(str(folder))
    except OSError as error:
        raise storage_error(error, folder) from None
    flush(folder)


def copy_files(source: Path, folder: Path, patterns: Iterable[str]) -> list[str]:
    """Copies what matches, byte for byte, folders too; returns the names. Raises StorageError."""
    copied = []
    for path in sorted({path for pattern in patterns for path in source.glob(pattern)}):
        try:
            if path.is_dir():
                shutil.copytree(path, folder / path.name, copy_function=shutil.copyfile)
            else:
                shutil.copyfile(path, folder / path.name)
        except OSError as error:
            raise storage_error(error, folder / path.name) from None
        copied.append(path.name)
    return copied


def flush(folder: Path) -> None:
    """Flushes every file below `folder`. Raises StorageError."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(file)
            except OSError as error:
                raise storage_error(error, path) from None
            finally:
                os.close(file)


def json_bytes(value: Any) -> bytes:
    """JSON as Hugging Face writes it."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


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


def _of_total(progress: Callable[[int, int], None] | None, total: int) -> Callable[[int], None] | None:
    if progress is None:
        return None
    done = [0]

    def report(size: int) -> None:
        done[0] += size
        progress(min(done[0], total), total)

    return report


def _check_layout(layout: str) -> None:
    if layout not in get_args(LayoutName):
        raise ConfigError(f"layout must be {' or '.join(get_args(LayoutName))}, not {layout!r}")


def _target(dtype: DtypeName, precision: str) -> torch.dtype:
    if dtype != "auto" and dtype not in DTYPES:
        raise ConfigError(f"dtype must be auto, {' or '.join(DTYPES)}, not {dtype!r}")
    return DTYPES[precision if dtype == "auto" else dtype]
