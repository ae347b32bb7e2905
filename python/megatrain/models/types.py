"""The parts of a model that everything else refers to: tensors, units, dtypes."""

import dataclasses
from typing import Literal

import torch

Role = Literal["trainable", "frozen"]


CORE_DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}
"""Element types by the core's names."""


PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""Compute types by the configuration's names."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorRef:
    """One tensor of the model and where it lives."""

    name: str
    """Hugging Face state-dict name."""
    unit: int
    """0 is embed, 1..L the layers, L+1 the head."""
    tensor: int
    """Index in the unit."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    """What it is stored as: the precision's for a trainable tensor, its own for a frozen one."""
    role: Role
    is_buffer: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What is sent to the device in one piece."""

    name: str
    role: Literal["embed", "layer", "head"]
    tensors: tuple[TensorRef, ...]
    structure: int | None
    """Index of the layer's structure; None for embed and head."""
