"""Weights of a source into the store: file by file, straight into the planes.

    load(open_weights(resolve(path)), decoder, core)     # bit for bit, in pieces, from several threads

Private memory beyond the store is one buffer per thread: files are read in pieces, and their pages belong to the
kernel.
"""

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.errors import ConfigError
from megatrain.system import safetensors_io
from megatrain.system.safetensors_io import DamagedFile, Entry
from megatrain.weights.hf_layout import Block, Layout, Stored
from megatrain.weights.matching import matched
from megatrain.weights.permute import gather, piece_of
from megatrain.weights.planes import write_plane
from megatrain.weights.types import Core, Decoder, TensorRef, Weights

_PIECE_BYTES = 16 << 20
_TURNED_BYTES = 256 << 10, 64 << 20
"""Least and most of a piece that is brought into another order: whole matrices of it are held in one stretch."""


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
    """A piece's values in the model's order; may be a view of `buffer`."""
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
            write_plane(core, ref, "master", values, start)
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
    write_plane(core, ref, "weights", kept, start)


def _not_finite(ref: TensorRef, where: str) -> ConfigError:
    return ConfigError(f"{ref.name} in {where} holds values that are not finite; training cannot start from them")
