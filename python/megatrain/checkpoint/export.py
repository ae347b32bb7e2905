"""A trained model as the hub expects it: sharded safetensors with index, config, tokenizer and chat template.

    save_pretrained(decoder, core, "out", model_dir="the/source", tokenizer_dir="the/source")   # from the store
    export_checkpoint("run/checkpoints/step-100", "out", dtype="fp32")    # from a checkpoint

Tensors are streamed in pieces; the folder appears whole or not at all. Stock transformers loads it with no missing and
no unexpected key.

Types: `auto` and the precision of the run give trained tensors in that precision, as the device computed with them;
`fp32` gives the exact masters. A frozen tensor or buffer keeps the type that it is stored in under `auto`, and gets the
named type otherwise. In every case a tensor has at least the type that transformers itself keeps it in
(`library_types`).
"""

import copy
import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from megatrain.checkpoint.checkpoint import Checkpoint
from megatrain.checkpoint.hf_folder import (
    CODE_FILES,
    MODEL_FILES,
    TOKENIZER_FILES,
    folder_bytes,
    join,
    library_types,
    write_config,
    write_index,
    write_model_files,
)
from megatrain.config.paths import check_unused
from megatrain.errors import CheckpointError, ConfigError
from megatrain.models.hf_config import load_config
from megatrain.models.meta_init import build_without_storage
from megatrain.models.types import PRECISIONS
from megatrain.system import safetensors_io
from megatrain.system.atomic import flushing, staged
from megatrain.system.safetensors_io import DamagedFile, Entry
from megatrain.weights.hf_layout import Layout, fill, library, published, read_layout
from megatrain.weights.planes import read_plane
from megatrain.weights.source import FileWeights
from megatrain.weights.types import Core, Decoder, TensorRef

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log: logging.Logger = logging.getLogger(__name__)

DtypeName = Literal["auto", "bf16", "fp32"]
LayoutName = Literal["source", "library"]


def save_pretrained(
    decoder: Decoder,
    core: Core,
    out: str | Path,
    *,
    dtype: DtypeName = "auto",  # auto: the run's own precision
    layout: LayoutName = "source",
    tokenizer: "PreTrainedTokenizerBase | None" = None,  # saved unless `tokenizer_dir` has the files
    tokenizer_dir: str | Path | None = None,  # its tokenizer files are copied unchanged
    model_dir: str | Path | None = None,  # so are its generation config, processor and code; None: of `tokenizer_dir`
    overwrite: bool = False,
    threads: int = 2,
    progress: Callable[[int, int], None] | None = None,  # bytes done, bytes in all
) -> None:
    """Writes the model in the store as a Hugging Face folder, in the types that the module's docstring gives. A tied
    weight is written once, unless the source has it twice. `layout` is that of the source, name by name (where there
    is none, that of published checkpoints: one tensor per expert), or the library's own (experts fused).

    Raises ConfigError when `out` is in use already, StorageError when it cannot be written."""
    out = Path(out)
    target = _target(dtype, decoder.precision)
    _check_layout(layout)
    if not overwrite:
        check_unused(out, "the export's folder")
    layout_of = _layout(decoder, layout)
    entries = _entries(layout_of, _types(decoder, dtype))
    exact = target == torch.float32

    def weights(name: str, start: int, out: Tensor) -> None:
        read_weights(core, decoder.tensors[name], start, out, exact=exact)

    def read(_stem: str, entry: Entry, start: int, piece: Tensor) -> None:
        fill(layout_of[entry.name], start, piece, weights)

    with staged(out, folder_bytes(entries, tokenizer, tokenizer_dir, model_dir)) as folder:
        files = safetensors_io.plan_shards(folder, "model", entries)
        safetensors_io.write_shards(
            files, read, threads=threads, progress=_of_total(progress, sum(f.size for f in files))
        )
        write_index(folder, files)
        write_model_files(folder, decoder, target, tokenizer, tokenizer_dir, model_dir)


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
    """Writes a checkpoint's model as a Hugging Face folder, without an engine. `dtype` and `layout` as in
    `save_pretrained`.

    Raises CheckpointError, before anything is written, for a checkpoint that is not whole (what is taken from it is
    read through first), ConfigError when `out` is in use already, StorageError when it cannot be written."""
    source, out = Checkpoint.open(Path(checkpoint)), Path(out)
    target = _target(dtype, source.precision)
    _check_layout(layout)
    if not overwrite:
        check_unused(out, "the export's folder")
    exact = target == torch.float32
    source.check("model", *(("residual",) if exact else ()))
    saved, planes = source.state(), source.planes()
    weights, residual = FileWeights(planes["model"]), FileWeights(planes["residual"])
    shapes = {name: entry.shape for name, entry in weights.entries.items()}
    model = _LibraryModel(source.folder, target)
    layout_of = _saved_layout(saved.layout, shapes, layout, model)
    own = {name: entry.dtype for name, entry in weights.entries.items()}
    entries = _entries(layout_of, _chosen_types(own, set(saved.step_counts), dtype, source.precision, model.types()))

    def values(name: str, start: int, out: Tensor) -> None:
        count, size = out.numel(), weights.entries[name].dtype.itemsize
        found = weights.read(name, start, count, torch.empty(count * size, dtype=torch.uint8))
        if exact and name in residual.entries:
            size = residual.entries[name].dtype.itemsize
            low = residual.read(name, start, count, torch.empty(count * size, dtype=torch.uint8))
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
        write_config(folder, source.config(), target)
        with flushing(folder):
            source.copy_files(folder, (*TOKENIZER_FILES, *MODEL_FILES, CODE_FILES))


def weight_bytes(decoder: Decoder, dtype: DtypeName = "auto", layout: LayoutName = "source") -> int:
    """Bytes of the weight files that `save_pretrained` writes."""
    entries = _entries(_layout(decoder, layout), _types(decoder, dtype))
    return sum(file.size for file in safetensors_io.plan_shards(Path(), "model", entries))


# --------------------------------------------------------------------------------------------------------- types


def _types(decoder: Decoder, dtype: DtypeName) -> dict[str, torch.dtype]:
    """The type that each tensor of the model is written in."""
    target = _target(dtype, decoder.precision)
    model = decoder.model
    if target != PRECISIONS[decoder.precision] and target.itemsize == 2:
        # Which tensors the class itself builds in fp32 cannot be seen in a model that is fp32 anyway.
        try:
            model = build_without_storage(copy.deepcopy(decoder.config), target)
        except ConfigError as error:
            log.debug("the types in which %s keeps its tensors are unknown: %s", type(model).__name__, error)
    return _chosen_types(
        {name: ref.dtype for name, ref in decoder.tensors.items()},
        {name for name, ref in decoder.tensors.items() if ref.role == "trainable"},
        dtype,
        decoder.precision,
        library_types(model, target),
    )


def _chosen_types(
    own: Mapping[str, torch.dtype],  # that each tensor is stored in
    trained: set[str],
    dtype: DtypeName,
    precision: str,
    library: Mapping[str, torch.dtype],  # see `library_types`
) -> dict[str, torch.dtype]:
    target = _target(dtype, precision)
    types = {}
    for name, stored in own.items():
        chosen = target if stored.is_floating_point and (name in trained or dtype != "auto") else stored
        if stored.is_floating_point and name in library:
            chosen = torch.promote_types(chosen, library[name])
        types[name] = chosen
    return types


def _entries(layout: Layout, types: Mapping[str, torch.dtype]) -> list[Entry]:
    """The tensors of a folder. One that holds several of the model has the type that holds all of theirs."""
    return [
        Entry(name, functools.reduce(torch.promote_types, (types[own] for own in stored.names)), stored.shape)
        for name, stored in layout.items()
    ]


class _LibraryModel:
    """The model of a checkpoint's configuration, without storage, built when it is first asked for."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._folder, self._dtype = folder, dtype

    @functools.cached_property
    def model(self) -> Any:
        """None where its code cannot be loaded. Raises CheckpointError when its configuration cannot be read."""
        try:
            return build_without_storage(load_config(self._folder), self._dtype)
        except ConfigError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno is not None:
                raise CheckpointError(
                    f"{self._folder / 'config.json'} cannot be read: {error.__cause__.strerror}"
                ) from None
            log.warning(
                "the model's code cannot be loaded, so it is unknown what transformers stores in another type: %s",
                error,
            )
            return None

    def types(self) -> dict[str, torch.dtype]:
        return {} if self.model is None else library_types(self.model, self._dtype)


# -------------------------------------------------------------------------------------------------------- layouts


def _layout(decoder: Decoder, layout: LayoutName) -> Layout:
    """Every tensor of the folder by name, and what of the model it holds."""
    shapes = {name: tuple(ref.shape) for name, ref in decoder.tensors.items()}
    if layout == "library":
        return library(shapes)
    return decoder.layout if decoder.layout is not None else published(decoder.model, shapes)


def _saved_layout(
    recorded: Any, shapes: dict[str, tuple[int, ...]], layout: LayoutName, model: _LibraryModel
) -> Layout:
    """The same for a checkpoint, whose tensors are the library's, of `shapes`."""
    if layout == "library":
        return library(shapes)
    found = read_layout(recorded, shapes)
    if found is not None:
        return found
    return library(shapes) if model.model is None else published(model.model, shapes)


def read_weights(core: Core, ref: TensorRef, start: int, out: Tensor, *, exact: bool) -> None:
    """Fills `out`, flat and of any float type, with elements of a tensor from `start` on: of a trained one the fp32
    master where `exact`, else the weights that the device computes with; of any other what is stored."""
    if ref.role == "trainable" and exact and ref.dtype != torch.float32:
        plane, dtype = "master", torch.float32
    else:
        plane, dtype = "weights", ref.dtype
    if out.dtype == dtype:
        read_plane(core, ref, plane, out, start)
    else:
        values = torch.empty(out.shape, dtype=dtype)
        read_plane(core, ref, plane, values, start)
        out.copy_(values)


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
    if dtype != "auto" and dtype not in tuple(PRECISIONS):
        raise ConfigError(f"dtype must be auto, {' or '.join(PRECISIONS)}, not {dtype!r}")
    return PRECISIONS[precision if dtype == "auto" else dtype]
