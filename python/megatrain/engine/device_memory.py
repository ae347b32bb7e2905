"""The engine's device memory, as torch tensors over the same bytes."""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor


class Region:
    """One of the engine's device regions as flat tensors of any dtype over the same memory."""

    def __init__(self, memory: Tensor) -> None:
        """`memory` is uint8 and contiguous."""
        self._bytes = memory[: memory.numel() // 8 * 8]
        self._typed: dict[torch.dtype, Tensor] = {torch.uint8: self._bytes}
        self.storage: Any = memory.untyped_storage()._cdata
        """Identifies the memory: what a tensor's storage must be to lie in this region."""
        self.device: torch.device = memory.device

    def view(
        self, byte: int, shape: tuple[int, ...], dtype: torch.dtype, stride: tuple[int, ...] | None = None
    ) -> Tensor:
        """A tensor at `byte`, contiguous unless strides (in elements) are given."""
        flat = self._typed.get(dtype)
        if flat is None:
            flat = self._typed[dtype] = self._bytes.view(dtype)
        return flat.as_strided(shape, stride if stride is not None else _contiguous(shape), byte // dtype.itemsize)


class CastBuffer:
    """Memory for the copies of one unit's weights that are computed in another type than they are stored in: frozen
    ones of a checkpoint in another precision, say.

    One unit's copies are in it at a time, made when the unit is bound and again in its backward, so that nothing holds
    them in between. They count in the plan: torch's allocator has this one block of it for as long as the engine lives.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """`size` in bytes: `template.cast_bytes`."""
        self.region: Region = Region(torch.empty(-(-size // 8) * 8, dtype=torch.uint8, device=device))
        self._owner: Hashable = None

    def fill(self, owner: Hashable, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copies each (target, source), unless `owner`'s copies are there already: micro-batches that pass through a
        unit one after the other share them."""
        if owner == self._owner:
            return
        self._owner = None  # until all are made: what is cut off here must not pass for made
        with torch.no_grad():
            for target, source in copies:
                target.copy_(source)
        self._owner = owner

    def clear(self) -> None:
        """To be called before each pass: weights may have changed since the last one."""
        self._owner = None


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))
