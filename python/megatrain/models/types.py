"""What the rest of the package refers to: tensors and units of a model, dtypes, and a layer as a function."""

import dataclasses
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Role = Literal["trainable", "frozen"]
Half = Literal["attention", "mlp"]
"""A half of a decoder layer that is split into two units (`halves.py`): what mixes tokens, and what follows."""

Part = Literal["before", "experts", "after"]
"""What of an MLP half is a unit where its experts are spread over several (`expert_groups.py`): what precedes the
experts, a group of them, and what follows."""


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
    begin: int = 0
    """Of a piece of a tensor that is spread over several units: its first element in the whole."""
    pieces: tuple["TensorRef", ...] = ()
    """Of such a tensor, whose shape is that of the whole: where it is stored, in order; `unit` and `tensor` are those
    of its first piece."""


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
    part: Part | None = None
    """Which part of the MLP half it is; None for a whole half, and wherever layers are not cut as far."""
    experts: tuple[int, int] | None = None
    """Of a group of experts: its first one, and the one after its last."""
    weights_of: int | None = None
    """The unit with whose weights it is computed, where it has none of its own: that `before` the experts, for what is
    `after` them."""

    @property
    def ends_layer(self) -> bool:
        """Whether the layer's output is this unit's."""
        return self.layer is not None and self.half != "attention" and self.part in (None, "after")


class LayerFunctions(Protocol):
    """A layer with its weights bound, from which functions of the hidden states are made."""

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, compiled: bool = True) -> Any:
        """hidden -> hidden, both (batch, seq, width)."""

    def training_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], counted: Tensor | None, *, compiled: bool = True
    ) -> Any:
        """hidden -> hidden, or (hidden, router sums) where the layer has a router; `counted` (tokens, 1) fp32."""
