"""The planes of a tensor in the core, wherever it is: in one unit, or in pieces in several."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatrain.weights.state_format import stored_elements
from megatrain.weights.types import Core, TensorRef


def read_plane(core: Core, ref: TensorRef, plane: Any, out: Tensor, start: int = 0) -> None:
    """Fills `out`, flat, with what is stored of a plane of a tensor from its `start`-th value on."""
    for piece, at, begin, end in _pieces(ref, plane, out, start):
        core.read(piece.unit, piece.tensor, plane, out[begin:end], at)


def write_plane(core: Core, ref: TensorRef, plane: Any, source: Tensor, start: int = 0) -> None:
    """Writes `source`, flat, to a plane of a tensor from its `start`-th value on. Raises ValueError for values that are
    not finite."""
    for piece, at, begin, end in _pieces(ref, plane, source, start):
        core.write(piece.unit, piece.tensor, plane, source[begin:end], at)


def step_count(core: Core, ref: TensorRef) -> int:
    """How often a tensor was updated."""
    return core.step_count(ref.unit, ref.tensor)


def set_step_count(core: Core, ref: TensorRef, count: int) -> None:
    """Sets how often it was."""
    for piece in pieces_of(ref):
        core.set_step_count(piece.unit, piece.tensor, count)


def pieces_of(ref: TensorRef) -> Sequence[TensorRef]:
    """Where a tensor is stored: in one piece that is all of it, or in several."""
    return ref.pieces or (ref,)


def _pieces(ref: TensorRef, plane: Any, values: Tensor, start: int) -> Iterator[tuple[TensorRef, int, int, int]]:
    """The pieces of a tensor that `values` from its `start`-th on touch, each with the first one in it and the range of
    `values`."""
    if not ref.pieces:
        yield ref, start, 0, values.numel()
        return
    first = 0
    for piece in ref.pieces:
        size = stored_elements(torch.Size(piece.shape).numel(), plane, values.dtype)
        begin, end = max(start, first), min(start + values.numel(), first + size)
        if begin < end:
            yield piece, begin - first, begin - start, end - start
        first += size
