"""Gradients of a layer's linear weights, added to their fp32 sums by the matmul that makes them.

Autograd returns the weight gradient of an `nn.Linear` in the weight's dtype, so a bf16 layer rounds it in every
micro-batch before it is added up. The matmul has it in fp32, and can add it to the sum at once (cuBLAS: beta = 1): no
rounding, and no pass over memory beside it. As in Megatron-LM's `gradient_accumulation_fusion`.

One opaque operation makes both gradients of a linear layer. It returns the input's, on which the rest of the backward
depends, so no compiler drops it; the weight's never appears in the graph. Where it goes is looked up when the operation
runs, since a compiled layer serves all layers of its structure and each has its sum somewhere else.
"""

import functools
import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatrain.engine.matmul import add_matmul

_OPEN: "weakref.WeakValueDictionary[int, WeightGradients]" = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def sums_in_fp32(precision: str) -> bool:
    """Whether layers of a precision add up the gradients of their linear weights in fp32 as the matmul makes them,
    where a step has several micro-batches or fp32 gradients. In fp32 a layer's own backward loses nothing."""
    return precision == "bf16"


class WeightGradients:
    """Where the gradients of the parameters of one module go, during one backward at a time."""

    def __init__(self, module: nn.Module, parameters: Sequence[Tensor]) -> None:
        """`module` has no child in common with another one: its bf16 `nn.Linear` layers are replaced in place, as far
        as their weight is one of `parameters`. Layers with a forward of their own and subclasses, but for those of
        `SummedLinear`, stay as they are."""
        number = next(_NUMBERS)
        self.handle: Tensor = torch.tensor([number])
        """What an operation of a backward finds it by."""
        self._targets: Sequence[Tensor] = ()
        self._in_fp32 = False
        self._first = False
        self._values: dict[int, Tensor] = {}
        """Gradients that are returned in the weight's dtype, by index of the parameter."""
        self._written: set[int] = set()
        _OPEN[number] = self
        self._index = index = {id(parameter): i for i, parameter in enumerate(parameters)}
        self.indices: set[int] = set()
        """Of the parameters whose gradient a matmul adds to its sum."""
        for child in module.modules():
            plain = type(child) is nn.Linear and "forward" not in child.__dict__
            if not plain and not isinstance(child, SummedLinear):
                continue
            if child.weight.dtype == torch.bfloat16 and id(child.weight) in index:
                if plain:
                    child.__class__ = SummedLinear
                linear = cast("SummedLinear", child)
                linear.sum_index, linear.sum_handle = index[id(child.weight)], self.handle
                self.indices.add(index[id(child.weight)])
        if self.indices:
            _operation()

    def take_over(self, weight: Tensor) -> int | None:
        """Says that the gradient of `weight` will come by `add_parts`. Returns the index of that parameter, or None for
        a weight that is not trained."""
        index = self._index.get(id(weight))
        if index is not None:
            self.indices.add(index)
        return index

    def begin(self, targets: Sequence[Tensor], *, first: bool, in_fp32: bool) -> None:
        """Before a backward. `targets`, per parameter, are where gradients are summed; `first` starts the sums. With
        `in_fp32` the targets are fp32 and matmuls add to them; otherwise each gradient is rounded to its weight's dtype
        before it is added."""
        self._targets, self._first, self._in_fp32 = targets, first, in_fp32
        self._values.clear()
        self._written.clear()

    def add(self, index: int, grad: Tensor, rows: Tensor) -> None:
        """The gradient (O, I) of one use of a weight: grad (N, O)ᵀ @ rows (N, I)."""
        target, first = self._targets[index], self._first and index not in self._written
        if self._in_fp32 or (first and target.dtype == grad.dtype):
            add_matmul(target, grad, rows, first=first)
            self._written.add(index)
            return
        value = grad.t() @ rows
        self._values[index] = self._values[index] + value if index in self._values else value

    def add_parts(self, index: int, parts: Iterable[tuple[slice, Tensor]]) -> None:
        """The gradient of one use of a weight, by slices of its last dimension, in the weight's dtype."""
        target, first = self._targets[index], self._first and index not in self._written
        for columns, part in parts:
            if first:
                target[..., columns].copy_(part)
            else:
                target[..., columns].add_(part)
            del part  # before the next one is made
        self._written.add(index)

    def finish(self, grads: Sequence[Tensor | None]) -> set[int]:
        """After a backward. `grads`, per parameter, are what autograd returned: None where a matmul has already added
        all there is, or where there is nothing to add. Returns the indices of parameters that this backward gave no
        gradient at all."""
        without: set[int] = set()
        into: list[Tensor] = []
        what: list[Tensor] = []
        over: list[Tensor] = []
        new: list[Tensor] = []
        for index, (target, grad) in enumerate(zip(self._targets, grads, strict=True)):
            own = self._values.pop(index, None)
            if own is not None:
                grad = own if grad is None else own + grad
            elif grad is None and index not in self._written:
                without.add(index)
            if self._first and index not in self._written:
                if grad is None:
                    target.zero_()
                else:
                    over.append(target)
                    new.append(grad)
            elif grad is not None:
                into.append(target)
                what.append(grad)
        self._targets = ()
        if over:
            torch._foreach_copy_(over, new)
        if into:
            torch._foreach_add_(into, what)
        return without


def add_gradient(handle: Tensor, index: int, grad: Tensor, rows: Tensor) -> None:
    """`WeightGradients.add` of the one that made the handle."""
    _OPEN[int(handle)].add(index, grad, rows)


def add_parts(handle: Tensor, index: int, parts: Iterable[tuple[slice, Tensor]]) -> None:
    """`WeightGradients.add_parts` of the one that made the handle."""
    _OPEN[int(handle)].add_parts(index, parts)


class SummedLinear(nn.Linear):
    """A linear layer whose weight's gradient is added to its sum by `WeightGradients`, and not returned."""

    sum_index: int
    sum_handle: Tensor | None

    def forward(self, rows: Tensor) -> Tensor:
        """(…, I) to (…, O)."""
        if torch.is_grad_enabled() and rows.requires_grad:
            output: Tensor = _SummedLinear.apply(rows, self.weight, self.bias, self.sum_handle, self.sum_index)
            return output
        return F.linear(rows, self.weight, self.bias)


class _SummedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, handle: Tensor, index: int) -> Tensor:
        ctx.save_for_backward(rows, weight, handle)
        ctx.index = index
        ctx.has_bias = bias is not None
        return F.linear(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, handle = ctx.saved_tensors
        (grad,) = grads
        of_bias = None
        if ctx.has_bias and ctx.needs_input_grad[2]:
            of_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
        of_rows = torch.ops.megatrain.linear_backward(grad, rows, weight, handle, ctx.index)
        return of_rows, None, of_bias, None, None


@functools.cache
def _operation() -> None:
    """Defines the operation, once."""
    name = "megatrain::linear_backward"
    torch.library.define(name, "(Tensor grad, Tensor rows, Tensor weight, Tensor handle, int index) -> Tensor")

    def compute(grad: Tensor, rows: Tensor, weight: Tensor, handle: Tensor, index: int) -> Tensor:
        grad = grad.reshape(-1, grad.shape[-1])
        of_rows = grad @ weight
        add_gradient(handle, index, grad, rows.reshape(-1, rows.shape[-1]))
        return of_rows.view(rows.shape)

    def fake(_grad: Tensor, rows: Tensor, _weight: Tensor, _handle: Tensor, _index: int) -> Tensor:
        return rows.new_empty(rows.shape)

    torch.library.impl(name, "CompositeExplicitAutograd", compute)
    torch.library.register_fake(name, fake)
