"""Computing a layer whose experts are spread over several units (`models/expert_groups.py`).

Forward computes what precedes the experts, sorts the tokens by the experts that they are routed to, and has each group
of experts compute its rows; the sum of a token's rows is taken once all are there, as where the experts are one unit.
For backward the half's input is kept, and what its experts returned. The half is computed again with that in the
experts' place. Its backward then runs as far as the experts' result; each group adds the gradients of its weights and
makes those of its rows; and last the half's backward runs as a whole, in which the experts' part is what the groups
have made.

What a group computes depends on its own rows alone, and everything that sums over experts is done with the rows of all
of them, in the order in which one unit has them: so every number is that of one unit.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatrain.engine import expert_grads
from megatrain.engine.device_memory import Region
from megatrain.engine.expert_grads import SummedExperts
from megatrain.engine.saved_tensors import STAGE_ALIGN
from megatrain.engine.template import LayerCall
from megatrain.errors import ConfigError
from megatrain.models.decoder import Decoder
from megatrain.models.expert_groups import Boundary, Called, Experts
from megatrain.models.layer_check import of_zeros
from megatrain.models.types import Unit

NORM_BLOCK = 65536
"""Elements of a block of the gradient norm (the core's). Groups begin with one, so that the norm is that of one
unit."""

Found = tuple[Experts | str, ...]
"""By structure: the experts of its layers, or why these cannot be spread over units."""

_FOUND: weakref.WeakKeyDictionary[Decoder, Found] = weakref.WeakKeyDictionary()
_CUT: weakref.WeakKeyDictionary[Decoder, dict[int, Decoder]] = weakref.WeakKeyDictionary()


def find(decoder: Decoder) -> Found:
    """The experts of a model that is cut into halves."""
    if decoder not in _FOUND:
        _FOUND[decoder] = tuple(_find(decoder))
    return _FOUND[decoder]


def cut(decoder: Decoder, found: Found, groups: int) -> Decoder:
    """A model that is cut into halves with the experts of its layers spread over `groups` units. Made once, since what
    is measured of a model is known by it."""
    made = _CUT.setdefault(decoder, {})
    if groups not in made:
        experts = [None if isinstance(each, str) else each for each in found]
        made[groups] = decoder.in_expert_groups(experts, groups)
    return made[groups]


def _find(decoder: Decoder) -> list[Experts | str]:
    halves = {unit.structure: unit for unit in reversed(decoder.units) if unit.half == "mlp"}
    numbers = range(len(decoder.structures))
    found = [_experts_of(decoder, halves[n]) if n in halves else "it is not split into halves" for n in numbers]
    if all(isinstance(experts, str) for experts in found):
        return found
    record = decoder.recorder.record(torch.zeros(1, 8, dtype=torch.int64))
    hidden = torch.zeros(1, 8, decoder.hidden_size, dtype=decoder.dtype)
    for n, first in enumerate(decoder.structures):
        experts = found[n]
        if isinstance(experts, Experts):
            run = partial(_run, record.args[first], record.kwargs[first], decoder.recorder.tuple_output)
            found[n] = experts.tried(of_zeros(decoder.module_of(halves[n])), run, hidden)
    return found


def _experts_of(decoder: Decoder, unit: Unit) -> Experts | str:
    """The experts of an MLP half, or why they cannot be spread."""
    if unit.layer in decoder.mixing_layers and not decoder.is_tiled(unit):
        return "it gets the documents of packed rows as rows of their own"
    half = decoder.module_of(unit)
    weights = list(expert_grads.expert_weights(half))
    modules = {id(module): module for module, _ in weights}
    if len(modules) != 1:
        return "it has no routed experts that run as grouped matmuls in bf16"
    (module,) = modules.values()
    path = next(name for name, child in half.named_modules() if child is module)
    tensors = {name: module.get_parameter(name) for _, name in weights}
    if len({(tensor.shape[0], tensor.requires_grad) for tensor in tensors.values()}) != 1:
        return "its experts are not all alike"
    return Experts(path, tuple(tensors), next(iter(tensors.values())).shape[0])


def _run(args: tuple[Any, ...], kwargs: dict[str, Any], tuple_output: bool, half: nn.Module, hidden: Tensor) -> Tensor:
    return LayerCall(half, args, kwargs, tuple_output)(hidden)


def group_counts(decoder: Decoder, found: Found) -> list[int]:
    """Numbers of groups into which the experts of every layer that has some can be divided, ascending: each group has
    as many, and whole blocks of the gradient norm."""
    fitting = []
    for first, experts in zip(decoder.structures, found, strict=True):
        if isinstance(experts, str):
            continue
        numels = [decoder.layers[first].get_parameter(name).numel() // experts.count for name in experts.names]
        sizes = [size for size in range(1, experts.count) if experts.count % size == 0]
        fitting.append({experts.count // n for n in sizes if all(n * numel % NORM_BLOCK == 0 for numel in numels)})
    return sorted(set.intersection(*fitting)) if fitting else []


class Routed:
    """One micro-batch on its way through the experts of one layer, forward or backward."""

    def __init__(self, called: Called, others: Mapping[str, Tensor], num_experts: int) -> None:
        """`others` are the parameters of all experts that are not spread over units, by name (biases). They are copied:
        the buffer that holds them may hold another unit when a group is computed."""
        self._states, self._weights = called.hidden_states.detach(), called.weights.detach()
        self._chosen = called.index.shape[-1]
        self._others = {
            name: tensor.detach().clone().requires_grad_(tensor.requires_grad) for name, tensor in others.items()
        }
        self._experts, self._order, counts = expert_grads.sort_by_expert(called.index, num_experts)
        self._ends: list[int] = [0, *torch.cumsum(counts, dim=0).long().tolist()]
        self._weighted = torch.promote_types(self._states.dtype, self._weights.dtype)
        """Type of what experts return once it is multiplied by the weights."""
        self._rows: Tensor | None = None
        """(tokens K, width), ordered by expert: what they return, and in backward the gradients of what they are
        given."""
        self._grad: Tensor | None = None
        self._of_weights = torch.empty_like(self._weights.reshape(-1))
        self._of_others: dict[str, Tensor] = {}

    def wanted(self, group: tuple[int, int]) -> list[bool]:
        """Of each expert of a group whether any token is routed to it."""
        return [self._ends[expert] < self._ends[expert + 1] for expert in range(*group)]

    def compute(self, experts: SummedExperts, group: tuple[int, int]) -> None:
        """Forward of a group of experts: its first one, and the one after its last."""
        begin, end, rows, weights = self._of(group)
        if self._rows is None:
            self._rows = self._room(self._weighted)
        if begin < end:
            self._give_others(experts, group)
            self._rows[begin:end] = experts.compute(rows, *self._owners(group), weights)

    def result(self) -> Tensor:
        """What the experts return, (tokens, width), once all groups have computed."""
        assert self._rows is not None
        return expert_grads.sum_of_chosen(self._rows, self._order, self._states)

    def begin_backward(self, grad: Tensor) -> None:
        """`grad` (tokens, width) is that of the result."""
        self._grad = grad.to(self._weighted)
        self._rows = self._room(self._states.dtype)
        self._of_others = {name: torch.zeros_like(tensor) for name, tensor in self._others.items()}

    def backward(
        self, experts: SummedExperts, group: tuple[int, int], parameters: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """Backward of a group of experts. Returns the gradients of `parameters`, as far as they are not added to their
        sums."""
        assert self._grad is not None
        assert self._rows is not None
        begin, end, rows, weights = self._of(group)
        if begin == end:
            return [torch.zeros_like(parameter) for parameter in parameters]
        rows.requires_grad_()
        weights.requires_grad_()
        others = self._give_others(experts, group)
        wanted = [name for name, tensor in others.items() if tensor.requires_grad]
        with torch.enable_grad():
            made = experts.compute(rows, *self._owners(group), weights)
        grads = torch.autograd.grad(
            made,
            [rows, weights, *(others[name] for name in wanted), *parameters],
            self._grad[self._order[begin:end] // self._chosen],
            allow_unused=True,
        )
        of_rows, of_weights, *rest = grads
        assert of_rows is not None
        assert of_weights is not None
        self._rows[begin:end], self._of_weights[begin:end] = of_rows, of_weights
        for name, grad in zip(wanted, rest, strict=False):
            assert grad is not None
            self._of_others[name][slice(*group)] = grad
        return list(rest[len(wanted) :])

    def gradients(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Of what the experts were called with, hidden states (tokens, width) and weights (tokens, K), and of the
        parameters that are not spread; once all groups have computed."""
        assert self._rows is not None
        of_states = torch.zeros_like(self._states)
        of_states.index_put_((self._order // self._chosen,), self._rows, accumulate=True)
        of_weights = torch.empty_like(self._of_weights)
        of_weights[self._order] = self._of_weights
        return of_states, of_weights.view_as(self._weights), self._of_others

    def _room(self, dtype: torch.dtype) -> Tensor:
        return self._states.new_empty((len(self._order), self._states.shape[1]), dtype=dtype)

    def _of(self, group: tuple[int, int]) -> tuple[int, int, Tensor, Tensor]:
        """Where a group's rows begin and end in the order by experts, the rows, and their weights."""
        begin, end = self._ends[group[0]], self._ends[group[1]]
        order = self._order[begin:end]
        return begin, end, self._states[order // self._chosen], self._weights.reshape(-1)[order]

    def _owners(self, group: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Where the rows of each expert of a group end, among the group's, and which of its experts each row is of."""
        first = self._ends[group[0]]
        ends = [self._ends[expert + 1] - first for expert in range(*group)]
        owners = self._experts[first : self._ends[group[1]]] - group[0]
        return torch.tensor(ends, dtype=torch.int32, device=owners.device), owners

    def _give_others(self, experts: SummedExperts, group: tuple[int, int]) -> dict[str, Tensor]:
        """Gives a group its part of the parameters that are not spread."""
        own = {
            name: tensor.detach()[slice(*group)].requires_grad_(tensor.requires_grad)
            for name, tensor in self._others.items()
        }
        for name, tensor in own.items():
            experts._parameters[name] = cast("Any", tensor)
        return own


class SpreadCall:
    """The MLP half of one layer with one micro-batch, from before its experts until its backward has ended."""

    def __init__(
        self,
        call: Callable[[Tensor], Tensor | tuple[Tensor, Tensor]],  # the half with this micro-batch's arguments
        boundary: Boundary,
        num_experts: int,
        reseed: Callable[[], None],  # puts the random state where the half's forward found it
        name: str = "",  # of the layer, whose experts are sent as they are routed to in forward
    ) -> None:
        self._call, self._boundary, self._num_experts, self._reseed = call, boundary, num_experts, reseed
        self._name = name
        self._wanted: list[bool] | None = None
        """Of each expert whether it was needed in forward, where others may not be on the device in backward."""
        self.aux: Tensor | None = None
        """The second tensor that the half returned, detached."""
        self._hidden: Tensor | None = None
        """The half's input, while its experts compute."""
        self._routed: Routed | None = None
        self._kept: tuple[Tensor, Tensor] | None = None
        """The half's input, and what its experts returned; None where they are on the stage."""
        self._staged: tuple[torch.dtype, tuple[torch.Size, torch.Size]] | None = None
        self._outputs: list[Tensor] = []
        self._result: Tensor | None = None
        self._leaf: Tensor | None = None
        self._grad: Tensor | None = None

    @property
    def routed(self) -> Routed:
        """What is on its way through the experts."""
        assert self._routed is not None
        return self._routed

    def before(self, hidden: Tensor) -> None:
        """Computes what precedes the experts, for `hidden` (batch, seq, width)."""
        self._reseed()
        try:
            self._run(hidden, None)
        except Called as called:
            self._routed = self._route(called)
        self._hidden = hidden
        if self._name:
            self._wanted = self.routed.wanted((0, self._num_experts))

    def after(self) -> Tensor:
        """The half's output, once its experts have computed."""
        assert self._hidden is not None
        hidden, result = self._hidden, self.routed.result()
        self._routed, self._hidden, self._kept = None, None, (hidden, result)
        self._reseed()
        # a copy: what follows may change it in place
        made = self._run(hidden, lambda *_: result.clone())
        output, aux = made if isinstance(made, tuple) else (made, None)
        self.aux = aux
        return output

    def put_on_stage(self, stage: Region, at: int) -> None:
        """Copies what backward needs to `stage` from byte `at` on, and lets go of it."""
        assert self._kept is not None
        hidden, result = self._kept
        self._staged = hidden.dtype, (hidden.shape, result.shape)
        for view, tensor in zip(self._on_stage(stage, at), self._kept, strict=True):
            view.copy_(tensor)
        self._kept = None

    def begin_backward(self, grad: Tensor, stage: Region | None, at: int | None) -> None:
        """Computes the half again, and its backward as far as what the experts returned. `grad` is that of the output;
        what backward needs is at byte `at` of `stage`, if it was put there."""
        if self._kept is None:
            assert stage is not None
            assert at is not None
            # the stage is used again before the half's backward has ended
            hidden, result = (view.clone() for view in self._on_stage(stage, at))
        else:
            (hidden, result), self._kept = self._kept, None

        def answer(states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            routed = self._routed = self._route(Called(states, index, weights))
            self._require_as_before(routed)
            others = [p for p in self._boundary._parameters.values() if p is not None]
            made: Tensor = _Answer.apply(routed, result, states, weights, *others)
            self._result = made
            return made

        self._leaf, self._grad = hidden.detach().requires_grad_(), grad
        self._reseed()
        with torch.enable_grad():
            made = self._run(self._leaf, answer)
        self._outputs = list(made) if isinstance(made, tuple) else [made]
        assert self._result is not None
        (of_result,) = torch.autograd.grad(self._outputs[0], self._result, grad, retain_graph=True)
        self.routed.begin_backward(of_result)

    def backward(self, parameters: Sequence[Tensor], aux: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the input and of each of the half's own parameters, once those of all groups of experts are
        made. `aux` is the gradient of its second output."""
        assert self._leaf is not None
        outputs, grads = self._outputs, [self._grad, aux]
        if aux is None or not outputs[-1].requires_grad:
            outputs, grads = outputs[:1], grads[:1]
        try:
            return torch.autograd.grad(outputs, (self._leaf, *parameters), grads, allow_unused=True)
        finally:
            del outputs
            self.release()

    def release(self) -> None:
        """Lets go of the graph, and so of all that it has saved."""
        self._outputs = []
        self._routed = self._result = self._leaf = self._grad = None

    def _require_as_before(self, routed: Routed) -> None:
        """Raises ConfigError where tokens are routed to experts that they were not routed to in forward, and which may
        not have been sent."""
        if self._wanted is None:
            return
        wanted = zip(routed.wanted((0, self._num_experts)), self._wanted, strict=True)
        if more := [expert for expert, (now, before) in enumerate(wanted) if now and not before]:
            raise ConfigError(
                f"{self._name}: computed again for backward, its router sends tokens to experts {more[:5]}, which it "
                "did not in forward and which were not sent to the device; set plan.sent_experts to all, or "
                "train.deterministic to true"
            )

    def _on_stage(self, stage: Region, at: int) -> list[Tensor]:
        assert self._staged is not None
        views = []
        dtype, shapes = self._staged
        for shape in shapes:
            views.append(stage.view(at, shape, dtype))
            at += -(-views[-1].nbytes // STAGE_ALIGN) * STAGE_ALIGN
        return views

    def _route(self, called: Called) -> Routed:
        others = {name: p for name, p in self._boundary._parameters.items() if p is not None}
        return Routed(called, others, self._num_experts)

    def _run(
        self, hidden: Tensor, answer: Callable[[Tensor, Tensor, Tensor], Tensor] | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        self._boundary.answer = answer
        try:
            return self._call(hidden)
        finally:
            self._boundary.answer = None


class _Answer(torch.autograd.Function):
    """What the experts of a layer have returned, and in backward what their groups have made of its gradient."""

    @staticmethod
    def forward(
        ctx: Any, routed: Routed, result: Tensor, _states: Tensor, _weights: Tensor, *_others: Tensor
    ) -> Tensor:
        ctx.routed = routed
        return result.detach()

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> tuple[Tensor | None, ...]:
        of_states, of_weights, of_others = ctx.routed.gradients()
        return None, None, of_states, of_weights, *of_others.values()
