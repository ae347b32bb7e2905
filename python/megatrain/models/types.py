"""What the rest of the package refers to: tensors and units of a model, dtypes, and a layer as a function."""

import dataclasses
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Role = Literal["trainable", "frozen"]
Half = Literal["attention", "mlp"]
"""A half of a decoder layer that is split into two units (`halves.py`): what mixes tokens, and what follows."""


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
"""Element types that the core stores, by torch's dtype."""


PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""Compute dtypes by their names in the configuration."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorRef:
    """One tensor of the model and where it is stored."""

    name: str
    """Hugging Face state-dict name."""
    unit: int
    """0 is embed; then the layers, or halves of them; the last one is the head."""
    tensor: int
    """Index in the unit."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    """Stored dtype: the compute precision for a trainable tensor, its own for a frozen one."""
    role: Role
    is_buffer: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """The tensors that are sent to the device together."""

    name: str
    role: Literal["embed", "layer", "head"]
    tensors: tuple[TensorRef, ...]
    structure: int | None
    """Index of the layer's structure; None for embed and head."""
    layer: int | None = None
    """Number of the layer, from 0; None for embed and head."""
    half: Half | None = None
    """Which half of the layer it is; None for a whole layer, embed and head."""

    @property
    def ends_layer(self) -> bool:
        """Whether the layer's output is this unit's."""
        return self.layer is not None and self.half != "attention"


class LayerFunctions(Protocol):
    """A layer with its weights bound, from which functions of the hidden states are made."""

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, compiled: bool = True) -> Any:
        """hidden -> hidden, both (batch, seq, width)."""

    def training_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], counted: Tensor | None, *, compiled: bool = True
    ) -> Any:
        """hidden -> hidden, or (hidden, router sums) where the layer has a router; `counted` (tokens, 1) fp32."""
