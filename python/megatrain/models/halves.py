"""Splitting a decoder layer into two units: the half that mixes tokens (attention), and the MLP or experts after it.

A half is the layer's own forward, with every child of the other half replaced by one that contributes nothing: it
returns -0.0, which leaves every number that it is added to as it is, to the bit (x + -0.0 is x for both zeros: IEEE
754, section 6.3). So nothing here knows how an architecture writes its forward, and whatever a layer passes to its
attention still reaches it.

That the two halves compute what the whole layer computes is proved for each structure of layers before anything is
loaded: the layer and the two halves run on meta with every operation recorded, and the operations, their operands and
their order must be the same, apart from additions of nothing.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from megatrain.models.layer_check import of_zeros
from megatrain.models.modules import copy_without, on_meta, to_meta
from megatrain.models.random_draws import draws
from megatrain.models.recorder import Record, Recorder
from megatrain.models.structure import content
from megatrain.models.support import ModelParts
from megatrain.models.types import Half

log: logging.Logger = logging.getLogger(__name__)

HALVES: tuple[Half, Half] = ("attention", "mlp")

_aten = torch.ops.aten
_MOVES = {
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.reshape.default,
    _aten.unsqueeze.default,
    _aten.squeeze.dim,
    _aten.t.default,
    _aten.transpose.int,
    _aten.expand.default,
    _aten.clone.default,
    _aten._to_copy.default,
    _aten.detach.default,
    _aten.alias.default,
}
"""Operations that move values without changing them: of nothing they make nothing."""
_SCALES = {_aten.mul.Tensor, _aten.mul.Scalar, _aten.div.Tensor, _aten.div.Scalar}
"""Operations that leave -0.0 as it is when the other operand is a positive number."""


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """How a layer calls one of its children, and what that returns."""

    given: int | str
    """The positional index or the keyword of the child's hidden states."""
    output: int | None
    """Index of the new hidden states in the tuple that it returns; None where it returns them alone."""
    length: int
    """Length of that tuple."""
    flat: bool
    """Whether it returns them as (tokens, width), although it was given (batch, seq, width)."""


class Nothing(nn.Module):
    """Stands for a child of a layer that belongs to the other half: adds nothing to the hidden states."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self._form = form

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """-0.0 in the shape and dtype of the child's input, in whatever the child itself returns."""
        form = self._form
        hidden: Tensor = args[form.given] if isinstance(form.given, int) else kwargs[form.given]
        shape = (hidden.shape[:-1].numel(), hidden.shape[-1]) if form.flat else hidden.shape
        nothing = hidden.new_full((), -0.0).expand(shape)
        if form.output is None:
            return nothing
        return tuple(nothing if index == form.output else None for index in range(form.length))


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """The two halves of a layer."""

    children: tuple[frozenset[str], frozenset[str]]
    """Names of the layer's children, by half."""
    forms: Mapping[str, Form]
    """By child that the layer calls."""

    def half_of(self, name: str) -> int:
        """0 or 1: the half that a tensor or module of the layer belongs to, by its name in the layer."""
        return 1 if name.partition(".")[0] in self.children[1] else 0

    def module(self, layer: nn.Module, half: Half) -> nn.Module:
        """A copy of `layer`, which shares its tensors, that computes one half only."""
        made = copy_without(layer)
        for name in self.children[1 - HALVES.index(half)] & self.forms.keys():
            made._modules[name] = Nothing(self.forms[name])
        return made


class _Refused(Exception):
    """Why a layer cannot be split, or not here."""


def find_splits(
    parts: ModelParts,
    recorder: Recorder,
    firsts: Sequence[int],  # the first layer of each structure
) -> tuple[Split | str, ...]:
    """For each structure of layers its two halves, or why it has none."""
    record = recorder.record(torch.zeros(1, 2, dtype=torch.int64))
    return tuple(_find(parts, recorder, record, first) for first in firsts)


def _find(parts: ModelParts, recorder: Recorder, record: Record, index: int) -> Split | str:
    layer, args, kwargs = parts.layers[index], record.args[index], record.kwargs[index]
    shape = (1, 2, parts.hidden_size)
    if any(isinstance(child, nn.modules.dropout._DropoutNd) and child.p > 0 for child in layer.modules()):
        return "it draws random numbers (dropout), whose order would change"
    for without_values in (True, False):
        try:
            module = on_meta(layer) if without_values else of_zeros(layer)
            given_args, given_kwargs = (to_meta(args), to_meta(kwargs)) if without_values else (args, kwargs)
            return _Trial(module, given_args, given_kwargs, shape, parts.dtype, recorder.tuple_output).split()
        except _Refused as refused:
            return str(refused)
        except Exception as error:  # a layer may raise anything for tensors without values
            log.debug("%s cannot be traced there: %s", parts.layer_name(index), error)
    return "its forward cannot be run without its weights"


@dataclasses.dataclass(slots=True)
class _Call:
    """One call of a child of a layer."""

    name: str
    begins: int
    """How many operations were recorded before it."""
    form: Form | None


class _Trial:
    """A copy of a layer on which halves are tried."""

    def __init__(
        self,
        layer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        tuple_output: bool,
    ) -> None:
        self._layer = layer.train()
        self._args, self._kwargs, self._tuple = args, kwargs, tuple_output
        device = next(iter(layer.parameters())).device
        self._hidden = torch.ones(shape, dtype=dtype, device=device)

    def _run(self, module: nn.Module, hidden: Tensor) -> Tensor:
        with torch.inference_mode(), torch.random.fork_rng(devices=[]):
            result = module(hidden, *self._args, **self._kwargs)
        output = result[0] if self._tuple else result
        assert isinstance(output, Tensor)
        return output

    def split(self) -> Split:
        """The halves of the layer. Raises _Refused."""
        calls: list[_Call] = []
        whole = _Trace()
        hooks = [
            child.register_forward_pre_hook(lambda _m, _a, name=name: calls.append(_Call(name, whole.count, None)))
            for name, child in self._layer.named_children()
        ]
        hooks += [
            child.register_forward_hook(
                lambda _m, args, kwargs, out, name=name: self._note(calls, name, args, kwargs, out), with_kwargs=True
            )
            for name, child in self._layer.named_children()
        ]
        try:
            with whole:
                output = whole.label(self._run(self._layer, self._hidden))
        finally:
            for hook in hooks:
                hook.remove()
        if whole.draws:
            raise _Refused("it draws random numbers (dropout), whose order would change")
        places = [n for n in range(1, len(calls)) if whole.passes_one(calls[n].begins)]
        found = [split for n in places if (split := self._checked(calls, n, whole, output)) is not None]
        if not found:
            raise _Refused("it does not add its attention and then its MLP to the hidden states")
        return min(found, key=lambda split: max(self._sizes(split)))

    @staticmethod
    def _note(calls: list[_Call], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        call = next(call for call in reversed(calls) if call.name == name)
        everything: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        given, hidden = next(((key, value) for key, value in everything if isinstance(value, Tensor)), (None, None))
        if given is None or hidden is None:
            return
        outputs = output if isinstance(output, tuple) else (output,)
        flat = hidden.shape[:-1].numel(), hidden.shape[-1]
        shapes = [tuple(value.shape) if isinstance(value, Tensor) else None for value in outputs]
        for shape in (tuple(hidden.shape), flat):
            if shape in shapes:
                place = shapes.index(shape) if isinstance(output, tuple) else None
                call.form = Form(given, place, len(outputs), shape != tuple(hidden.shape))
                return

    def _checked(self, calls: list[_Call], border: int, whole: "_Trace", output: Any) -> Split | None:
        """The split before the call number `border`, if it computes what the layer computes."""
        later = frozenset(call.name for call in calls[border:])
        earlier = frozenset(name for name, _ in self._layer.named_children()) - later
        forms = {call.name: call.form for call in calls if call.form is not None}
        split = Split((earlier, later), forms)
        if not all(self._sizes(split)) or any(call.name in later or call.form is None for call in calls[:border]):
            return None
        if any(call.form is None for call in calls[border:]):
            return None
        both = _Trace()
        hidden = self._hidden
        try:
            for half in HALVES:
                module = split.module(self._layer, half).train()
                own = {id(t) for n, t in self._tensors() if split.half_of(n) == HALVES.index(half)}
                others = {id(t) for _, t in self._tensors()} - own
                both.read.clear()
                hooks = [both.skip(child) for child in module.children() if isinstance(child, Nothing)]
                with both:
                    hidden = self._run(module, hidden)
                for hook in (hook for pair in hooks for hook in pair):
                    hook.remove()
                if both.read & others:
                    return None
        except Exception as error:  # of whatever the layer does with nothing beside adding it
            log.debug("%s is not split before %s: %s", type(self._layer).__name__, calls[border].name, error)
            return None
        return split if both.operations == whole.operations and both.label(hidden) == output else None

    def _tensors(self) -> list[tuple[str, Tensor]]:
        return [*self._layer.named_parameters(), *self._layer.named_buffers()]

    def _sizes(self, split: Split) -> tuple[int, int]:
        sizes = [0, 0]
        for name, parameter in self._layer.named_parameters():
            sizes[split.half_of(name)] += parameter.numel() * parameter.element_size()
        return sizes[0], sizes[1]


class _Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operation that runs within, with its operands and where those came from. Additions of nothing are left
    out. Needs inference mode, where a tensor stays the same object between operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[tuple[Any, ...]] = []
        self.draws = False
        """Whether any of them draws random numbers."""
        self.read: set[int] = set()
        """`id` of every tensor from outside that was read."""
        self._labels: dict[int, Any] = {}
        self._alive: list[Tensor] = []
        self._nothing: set[int] = set()
        self._skipping = False

    @property
    def count(self) -> int:
        """Operations so far."""
        return len(self.operations)

    def label(self, tensor: Tensor) -> Any:
        """Where a tensor came from: an operation, by its number, or from outside."""
        if id(tensor) not in self._labels:
            self._alive.append(tensor)
            self._labels[id(tensor)] = "outside", id(tensor)
        label = self._labels[id(tensor)]
        if label[0] == "outside":
            self.read.add(id(tensor))
        return label

    def passes_one(self, border: int) -> bool:
        """Whether the operations from number `border` on read exactly one tensor that those before have made or were
        given beside weights and the layer's arguments."""
        crossing = {
            leaf
            for operation in self.operations[border:]
            for leaf in operation[1]
            if isinstance(leaf, tuple) and leaf[0] == "made" and leaf[1] < border
        }
        return len(crossing) == 1

    def skip(self, stand_in: nn.Module) -> tuple[Any, Any]:
        """Leaves out what a `Nothing` computes, and marks what it returns. Returns the hooks that do it."""

        def begin(*_: Any) -> None:
            self._skipping = True

        def end(_module: Any, _args: Any, output: Any) -> None:
            self._skipping = False
            for tensor in output if isinstance(output, tuple) else (output,):
                if tensor is not None:
                    self._mark(tensor)

        return stand_in.register_forward_pre_hook(begin), stand_in.register_forward_hook(end)

    def _mark(self, tensor: Tensor) -> None:
        self._alive.append(tensor)
        self._nothing.add(id(tensor))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs and records one operation."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if self._skipping:
            return output
        leaves, spec = tree_flatten((args, kwargs))
        if any(isinstance(leaf, Tensor) and id(leaf) in self._nothing for leaf in leaves):
            self._of_nothing(func, args, leaves, output)
            return output
        self.draws = self.draws or draws(func, args, kwargs)
        operands = tuple(self.label(leaf) if isinstance(leaf, Tensor) else content(leaf) for leaf in leaves)
        number = len(self.operations)
        made = [tensor for tensor in tree_flatten(output)[0] if isinstance(tensor, Tensor)]
        self.operations.append((func, operands, str(spec), tuple((tuple(t.shape), t.dtype) for t in made)))
        for index, tensor in enumerate(made):
            self._alive.append(tensor)
            self._labels[id(tensor)] = "made", number, index
        return output

    def _of_nothing(self, func: Any, args: tuple[Any, ...], leaves: list[Any], output: Any) -> None:
        """Follows nothing through an operation. Raises _Refused for one whose result depends on it."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        something = [tensor for tensor in tensors if id(tensor) not in self._nothing]
        if func in _MOVES and not something:
            self._mark(output)
            return
        if func in _SCALES and not something and isinstance(args[1], (int, float)) and args[1] > 0:
            self._mark(output)
            return
        if func is _aten.add.Tensor and len(something) == 1 and len(args) == 2:
            (left,) = something
            if output.shape == left.shape and output.dtype == left.dtype:
                self._alive.append(output)
                self._labels[id(output)] = self.label(left)
                return
        raise _Refused(f"{func} of nothing")
