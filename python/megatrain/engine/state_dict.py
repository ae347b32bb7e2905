"""An engine's weights, moments and gradients, read as tensors, and the statistics of its last step."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from megatrain.names import suggest
from megatrain.weights.planes import read_plane, step_count

if TYPE_CHECKING:
    from megatrain import _core
    from megatrain.engine.engine import Engine
    from megatrain.models.decoder import Decoder
    from megatrain.models.types import TensorRef
    from megatrain.weights.state_format import StateFormat


Plane = Literal["master", "weights", "residual", "exp_avg", "exp_avg_sq", "gradient"]
"""What the native engine reads and writes of a tensor."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Where the last step's time went."""

    lanes: dict[str, float]
    """Seconds each lane was busy."""
    bound: str
    """The lane that was busy longest; `launching` where the card mostly waited for kernels to be launched."""
    raw: dict[str, Any]
    """Everything the core reports."""

    @classmethod
    def parsed(cls, text: str) -> "Stats":
        """Of the core's JSON."""
        raw = json.loads(text)
        return cls(lanes=raw.get("lanes", {}), bound=raw.get("bound", ""), raw=raw)


class StateDict(Mapping[str, Tensor]):
    """A mapping from Hugging Face names to master weights (fp32; frozen tensors in their stored type), each read when
    it is accessed."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        decoder = engine.decoder
        self._names = {name: name for name in decoder.tensors} | decoder.aliases

    def __getitem__(self, name: str) -> Tensor:
        return self._engine.weight(self._names[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __reduce__(self) -> Any:
        """Refused: pickling this would pickle the engine with everything it holds."""
        raise TypeError(
            "engine.state_dict() reads weights from the engine when asked for them, so it cannot be pickled: save "
            "dict(engine.state_dict()), which copies all of them into memory, or call engine.save_pretrained(folder)"
        )


def find(decoder: "Decoder", name: str, trained: bool) -> "TensorRef":
    """The tensor of a Hugging Face name. Raises KeyError for an unknown name, and with `trained` for a frozen
    tensor."""
    ref = decoder.tensors.get(decoder.aliases.get(name, name))
    if ref is None:
        raise KeyError(f"the model has no parameter {name!r}; {suggest(name, decoder.tensors)}")
    if trained and ref.role != "trainable":
        raise KeyError(f"{name} is frozen, so it has neither moments nor gradient")
    return ref


def weight(core: "_core.Engine", ref: "TensorRef") -> Tensor:
    """A copy of the fp32 master of a trained tensor, or of a frozen one in its own type."""
    trained = ref.role == "trainable"
    return read(core, ref, "master" if trained else "weights", torch.float32 if trained else ref.dtype)


def optimizer_state(core: "_core.Engine", ref: "TensorRef", state_format: "StateFormat") -> dict[str, Any]:
    """Copies of the moments (fp32, whatever they are stored in), and how often the tensor was updated."""
    found: dict[str, Any] = {}
    for plane in ("exp_avg", "exp_avg_sq"):
        stored = torch.empty(state_format.moment_shape(ref.shape), dtype=state_format.moment_dtype)
        read_plane(core, ref, plane, stored.flatten())
        found[plane] = state_format.moment(stored, ref.shape, signed=plane == "exp_avg")
    return {**found, "step": step_count(core, ref)}


def read(core: "_core.Engine", ref: "TensorRef", plane: Plane, dtype: torch.dtype) -> Tensor:
    """A copy of one plane of a tensor, in the tensor's shape."""
    out = torch.empty(torch.Size(ref.shape).numel(), dtype=dtype)
    read_plane(core, ref, plane, out)
    return out.view(ref.shape)
