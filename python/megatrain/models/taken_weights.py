"""Taking the weights out of a model: what is left are parameters on meta, which any copy of a module can share."""

import dataclasses
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from megatrain.errors import ConfigError

if TYPE_CHECKING:
    from megatrain.weights.hf_layout import Layout

_TAKEN = "_megatrain_has_taken_the_weights"
"""Marks a model whose weights were moved out, which would otherwise look like one on meta and be drawn at random."""


@dataclasses.dataclass(slots=True)
class TakenWeights:
    """Tensors that were a model's own. Changes as the engine takes them."""

    model: nn.Module
    values: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    """Real parameters and persistent buffers by name, until the engine has taken them."""
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)
    """Further names of tied parameters, each to its first name."""
    layout: "Layout | None" = None
    """How the source of the weights stores them; set by whoever opens it."""
    _places: list[tuple[dict[str, Any], str, str]] = dataclasses.field(default_factory=list)
    """Where the tensors were: the dict of their module, the name in it, and the name in `values`."""
    _marked: bool = False
    """Whether the model was marked as taken here, and not by an earlier engine."""

    def give_back(self) -> None:
        """Puts the model's own tensors back where they were, unless one has been taken already: for a caller whose
        model could not be used."""
        if all(name in self.values for *_, name in self._places):
            for holder, attribute, name in self._places:
                holder[attribute] = self.values[name]
            if self._marked:
                self.model.__dict__.pop(_TAKEN, None)
        self._places = []

    def take(self, dtype: torch.dtype) -> None:
        """Moves real parameters and persistent buffers into `values`, and leaves parameters on meta: of `dtype` where
        they have the dtype of the embedding, else of their own.

        Raises ConfigError for a model that has been taken before, or a buffer without values.
        """
        if getattr(self.model, _TAKEN, False):
            raise ConfigError(
                f"the weights of this {type(self.model).__name__} were moved into an earlier engine, and none are left "
                "in it; load or build the model again"
            )
        first = self._find()
        for name, parameter in list(self.model.named_parameters()):
            if parameter.device.type != "meta":
                self.values[name] = parameter
                self._marked = True
                setattr(self.model, _TAKEN, True)
        common = cast("Any", self.model).get_input_embeddings().weight.dtype
        replaced: dict[int, nn.Parameter] = {}
        for module in self.model.modules():
            for name, own in module._parameters.items():
                if own is not None:
                    if own.device.type != "meta":
                        self._places.append((module._parameters, name, first[id(own)]))
                    if id(own) not in replaced:
                        kept = dtype if own.dtype == common else own.dtype
                        replaced[id(own)] = nn.Parameter(
                            torch.empty(own.shape, dtype=kept, device="meta"),
                            requires_grad=own.requires_grad and own.is_floating_point(),
                        )
                    module._parameters[name] = replaced[id(own)]
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type not in ("cpu", "meta"):
                    module._buffers[name] = buffer.cpu()

    def _find(self) -> dict[int, str]:
        """Names of parameters by their `id`; notes aliases, and persistent buffers with values."""
        first: dict[int, str] = {}
        for module_name, module in self.model.named_modules():
            prefix = f"{module_name}." if module_name else ""
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                canonical = first.setdefault(id(parameter), prefix + name)
                if canonical != prefix + name:
                    self.aliases[prefix + name] = canonical
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                persistent = name not in module._non_persistent_buffers_set
                if buffer.device.type != "meta":
                    if persistent:
                        self.values[prefix + name] = buffer
                        self._places.append((module._buffers, name, prefix + name))
                elif not persistent:
                    raise ConfigError(
                        f"buffer {prefix}{name} has no values: build the model on the CPU or let megatrain build it"
                    )
        return first
