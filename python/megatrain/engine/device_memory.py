"""The engine's device memory, as torch tensors over the same bytes."""

import torch
from torch import Tensor


class Region:
    """One of the engine's device regions as flat tensors of any dtype over the same memory."""

    def __init__(self, memory: Tensor) -> None:
        """`memory` is uint8 and contiguous."""
        self._bytes = memory[: memory.numel() // 8 * 8]
        self._typed: dict[torch.dtype, Tensor] = {torch.uint8: self._bytes}
        self.storage = memory.untyped_storage()._cdata
        """Identifies the memory: what a tensor's storage must be to lie in this region."""
        self.device = memory.device

    def view(
        self, byte: int, shape: tuple[int, ...], dtype: torch.dtype, stride: tuple[int, ...] | None = None
    ) -> Tensor:
        """A tensor at `byte`, contiguous unless strides (in elements) are given."""
        flat = self._typed.get(dtype)
        if flat is None:
            flat = self._typed[dtype] = self._bytes.view(dtype)
        return flat.as_strided(shape, stride if stride is not None else _contiguous(shape), byte // dtype.itemsize)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))
