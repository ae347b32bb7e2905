"""Protocols: what this folder and `checkpoint/` need from a model, from the core that stores it, and from a source of
weights."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megatrain.system.safetensors_io import Entry
from megatrain.weights.hf_layout import Layout
from megatrain.weights.state_format import StateFormat


class TensorRef(Protocol):
    """Where one tensor of the model is stored."""

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

    @property
    def pieces(self) -> Sequence["TensorRef"]:
        """Where it is stored in pieces, one after the other; empty for one that is not."""


class Unit(Protocol):
    """Tensors that are stored together."""

    @property
    def name(self) -> str: ...
    @property
    def layer(self) -> int | None:
        """The number of the layer that it is, or is a half of; None for embed and head."""


class Decoder(Protocol):
    """The model, as far as its weights go."""

    @property
    def units(self) -> Sequence[Unit]:
        """In forward order."""

    @property
    def layout(self) -> Layout | None:
        """How the model's source stores its tensors, so that an export does the same; None: as models of its kind are
        published."""

    def set_layout(self, layout: Layout | None) -> None:
        """Called once the source is known."""

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
    def tied(self) -> bool:
        """Whether the head's weight is the embedding's."""

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


class Stored(Protocol):
    """A model and the core that stores it; `megatrain.Engine`."""

    @property
    def decoder(self) -> Decoder: ...
    @property
    def core(self) -> Core: ...
    @property
    def state_format(self) -> StateFormat: ...


class Weights(Protocol):
    """Tensors that can be read in pieces."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """By name."""

    @property
    def transposed(self) -> frozenset[str]:
        """Those whose last two dimensions are swapped in the model."""

    @property
    def quantised(self) -> bool:
        """Whether values are dequantized: an export is then laid out as models of its kind are published
        unquantized."""

    def where(self, name: str) -> str:
        """The file a tensor is in, for messages."""

    def read(self, name: str, start: int, count: int, buffer: Tensor) -> Tensor:
        """Elements [start, start + count) of a tensor, flat, in its own dtype; may be a view of `buffer` (uint8)."""
