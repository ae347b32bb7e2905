"""The routed experts of a layer spread over several units, so that the device holds a group of them at a time.

The MLP half of such a layer becomes a row of units. The first one computes what precedes the experts (norm, router) and
notes what they are called with; then each group of experts computes the rows that are routed to it; the last one,
which has no weights of its own, computes the half with the first one's and what the experts have returned. So nothing
here knows how an architecture writes its MLP: the module is its own, but for the experts, in whose place a `Boundary`
stands.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.models.autograd_graph import nodes_between
from megatrain.models.modules import replace_module, shallow_copy
from megatrain.models.types import TensorRef, Unit


class Called(Exception):
    """Ends a computation at the call of a layer's experts, with what they are called with."""

    def __init__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> None:
        super().__init__()
        self.hidden_states = hidden_states
        """(tokens, width)."""
        self.index = top_k_index
        """(tokens, K): which experts a token is routed to."""
        self.weights = top_k_weights
        """(tokens, K): by what the results of those are multiplied."""


class Boundary(nn.Module):
    """Stands for a layer's experts: holds what of their parameters is not spread over units (biases)."""

    def __init__(self, experts: nn.Module, spread: frozenset[str]) -> None:
        """`spread`: names of the parameters that are."""
        super().__init__()
        for name, parameter in experts._parameters.items():
            if name not in spread:
                self._parameters[name] = parameter
        self._buffers = dict(experts._buffers)
        self._non_persistent_buffers_set = set(experts._non_persistent_buffers_set)
        self.answer: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
        """What is returned instead of what experts would compute; None: `Called` is raised."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As of the experts: (tokens, width)."""
        if self.answer is None:
            raise Called(hidden_states, top_k_index, top_k_weights)
        return self.answer(hidden_states, top_k_index, top_k_weights)


@dataclasses.dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of an MLP half."""

    path: str
    """Name of their module in the layer."""
    weights: tuple[str, ...]
    """Names in that module of the weights that hold one matrix an expert, (E, ., .)."""
    count: int
    """How many experts there are."""
    chosen: int = 0
    """To how many of them a token is routed (K); 0 where that has not been tried."""

    @property
    def names(self) -> frozenset[str]:
        """Names of those weights in the layer."""
        return frozenset(f"{self.path}.{name}" for name in self.weights)

    def module(self, half: nn.Module, unit: Unit) -> nn.Module:
        """`half`, a copy of the MLP half that nobody else has, made to be the module of `unit`."""
        experts = half.get_submodule(self.path)
        if unit.experts is None:
            replace_module(half, self.path, Boundary(experts, frozenset(self.weights)))
            return half
        own = shallow_copy(experts)
        begin, end = unit.experts
        for name in self.weights:
            weight = experts.get_parameter(name)
            own._parameters[name] = nn.Parameter(weight.detach()[begin:end], requires_grad=weight.requires_grad)
        replace_module(half, self.path, own)
        return half

    def share(self, tokens: int) -> float:
        """The share of the experts that `tokens` tokens need, if each is routed to any of them alike."""
        return 1 - (1 - self.chosen / self.count) ** tokens

    def tried(self, half: nn.Module, run: Callable[[nn.Module, Tensor], Tensor], hidden: Tensor) -> "Experts | str":
        """These, or why a layer cannot be computed in such units. `half` is a copy of its MLP half that nobody else
        has, and `run` computes one for `hidden` (batch, seq, width)."""
        boundary = Boundary(half.get_submodule(self.path), frozenset(self.weights))
        replace_module(half, self.path, boundary)
        returned: list[Tensor] = []
        chosen = 0

        def answer(hidden_states: Tensor, index: Tensor, _weights: Tensor) -> Tensor:
            nonlocal chosen
            chosen = index.shape[-1]
            returned.append(torch.zeros_like(hidden_states).requires_grad_())
            return returned[-1] * 1

        boundary.answer = answer
        try:
            output = run(half, hidden)
        except Exception as error:  # a module may raise anything for what stands in its experts' place
            return f"its MLP cannot be computed around its experts ({type(error).__name__})"
        if len(returned) != 1:
            return f"its MLP calls its experts {len(returned)} times"
        between = nodes_between(output, returned[0])
        # what multiplies by a matrix would add to the sum of that matrix's gradient twice
        if any(kind in node.name() for node in between for kind in ("mm", "Mm", "Linear")):
            return "its MLP multiplies what its experts return by a matrix"
        return dataclasses.replace(self, chosen=chosen)


def boundary_of(module: nn.Module) -> Boundary:
    """The one in a module."""
    return next(child for child in module.modules() if isinstance(child, Boundary))


def spread(unit: Unit, experts: Experts, groups: int, skipped: int) -> list[Unit]:
    """The units that an MLP half becomes; `skipped` are the characters of its tensors' names before those in the layer.
    Tensors and `weights_of` are numbered later."""
    split = [t for t in unit.tensors if t.name[skipped:] in experts.names]
    size = experts.count // groups

    def piece(whole: TensorRef, group: int) -> TensorRef:
        numel = torch.Size(whole.shape).numel() // experts.count
        return dataclasses.replace(whole, shape=(size, *whole.shape[1:]), begin=group * size * numel)

    return [
        dataclasses.replace(unit, part="before", tensors=tuple(t for t in unit.tensors if t not in split)),
        *(
            dataclasses.replace(
                unit,
                name=f"{unit.name}.experts.{group * size}-{(group + 1) * size - 1}",
                part="experts",
                experts=(group * size, (group + 1) * size),
                tensors=tuple(piece(t, group) for t in split),
            )
            for group in range(groups)
        ),
        dataclasses.replace(unit, name=f"{unit.name}.after", part="after", tensors=()),
    ]


def numbered(units: Sequence[Unit], whole: Mapping[str, TensorRef]) -> tuple[tuple[Unit, ...], dict[str, TensorRef]]:
    """`units` with their tensors numbered, and every tensor of `whole` by its name, as it is stored now."""
    made: list[Unit] = []
    places: dict[str, list[TensorRef]] = {}
    before = 0
    for number, unit in enumerate(units):
        tensors = tuple(dataclasses.replace(t, unit=number, tensor=i) for i, t in enumerate(unit.tensors))
        before = number if unit.part == "before" else before
        made.append(dataclasses.replace(unit, tensors=tensors, weights_of=before if unit.part == "after" else None))
        for tensor in tensors:
            places.setdefault(tensor.name, []).append(tensor)
    found: dict[str, Any] = {}
    for name, ref in whole.items():
        first, *more = places[name]
        if more:
            first = dataclasses.replace(first, shape=ref.shape, pieces=tuple(places[name]))
        found[name] = first
    return tuple(made), found
