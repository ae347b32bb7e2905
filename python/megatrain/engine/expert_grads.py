"""Gradients of a layer's routed experts, added to their sums a part at a time.

transformers keeps the weights of all experts of a layer in one tensor, and autograd returns the gradient of such a
tensor whole: of a layer of gpt-oss-120b 5.9 GiB, beside the buffer that they are then added to. Here the matmul that
makes them is cut by columns, and each part is added before the next one is made. Every number is the same: a column
depends on no other one.

The products stay those of torch's grouped matmul, whose results are bf16, so each micro-batch's gradient is rounded to
bf16 before it is added, as autograd's is.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatrain.engine.weight_grads import WeightGradients, add_parts

PART_BYTES = 256 * 2**20
"""Of the gradients that are made at one time, unless a part of `_COLUMNS` is larger."""
_COLUMNS = 64
"""A part's width is a multiple of this: grouped matmuls of cards want rows that begin at multiples of 16 bytes."""
_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


def grouped_experts(module: nn.Module) -> Iterator[nn.Module]:
    """Experts within `module` whose forward is the grouped matmuls of transformers, and nobody else's."""
    from transformers.integrations import moe

    if moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"] is not moe.grouped_mm_experts_forward:
        return
    for child in module.modules():
        if getattr(getattr(child, "config", None), "_experts_implementation", None) != "grouped_mm":
            continue
        decorated = getattr(type(child).forward, "__globals__", {}).get("__name__") == moe.__name__
        if isinstance(child, SummedExperts) or (decorated and "forward" not in child.__dict__):
            yield child


def expert_weights(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Experts within `module` whose gradients can be added in parts, with the names of their weights (E, …): those in
    bf16 that run as grouped matmuls."""
    if torch.__version__ < "2.11":  # CPUs and cards run the same grouped matmuls only since
        return
    for child in grouped_experts(module):
        if getattr(child, "_is_expert_parallel", False) or getattr(child, "has_post_expert_norm", False):
            continue
        for name in _WEIGHTS:
            weight = child._parameters.get(name)
            if weight is not None and weight.dim() == 3 and weight.dtype == torch.bfloat16 and _runs_on(weight.device):
                yield child, name


def _runs_on(device: torch.device) -> bool:
    """Whether transformers uses torch's grouped matmul there."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def convert(module: nn.Module, grads: WeightGradients) -> None:
    """Makes the experts within `module`, which has no child in common with another one, add the gradients of the
    weights that are trained to the sums of `grads`."""
    for child, name in list(expert_weights(module)):
        index = grads.take_over(child.get_parameter(name))
        if index is not None:
            _sum(child, name, index, grads.handle)


def as_group(experts: nn.Module) -> "SummedExperts":
    """`experts`, a group of a layer's that `convert` has seen, as what computes the rows that are routed to them."""
    if not isinstance(experts, SummedExperts):  # none of their weights is trained
        experts.__class__ = _summed(cast("Any", type(experts)))
        cast("SummedExperts", experts).sums = {}
    return cast("SummedExperts", experts)


def convert_to_measure(module: nn.Module) -> None:
    """As `convert`, for a module of which only forward and the shapes of backward are wanted: it has no sums."""
    for child, name in list(expert_weights(module)):
        _sum(child, name, -1, None)


def _sum(child: nn.Module, name: str, index: int, handle: Tensor | None) -> None:
    _define_operation()
    experts = cast("SummedExperts", child)
    if not isinstance(child, SummedExperts):
        child.__class__ = _summed(cast("Any", type(child)))
        experts.sums = {}
    experts.sums[name] = index
    experts.sum_handle = handle


def spared_bytes(module: nn.Module) -> int:
    """What of the gradients of a layer's weights is never in memory beside their sums: those of experts, but for one
    part."""
    return sum(w.numel() * w.element_size() for w in _converted(module)) - part_bytes(module)


def part_bytes(module: nn.Module) -> int:
    """The largest part of the gradient of a layer's expert weights; 0 for a layer without."""
    sizes = (w[..., 0].numel() * min(w.shape[-1], _columns(w)) * w.element_size() for w in _converted(module))
    return max(sizes, default=0)


def _converted(module: nn.Module) -> list[Tensor]:
    return [child.get_parameter(name) for child, name in expert_weights(module)]


def _columns(weight: Tensor) -> int:
    fitting = PART_BYTES // (weight[..., 0].numel() * weight.element_size())
    return max(_COLUMNS, fitting // _COLUMNS * _COLUMNS)


def grad_parts(
    weight: Tensor, grad: Tensor, rows: Tensor, ends: Tensor, transposed: bool
) -> Iterator[tuple[slice, Tensor]]:
    """The gradient of expert weights (E, O, I), or (E, I, O) where `transposed`, by slices of its last dimension. grad
    (N, O) and rows (N, I) are ordered by expert, whose last rows are before `ends` (E,)."""
    left, right = (rows, grad) if transposed else (grad, rows)
    step = _columns(weight)
    for start in range(0, weight.shape[-1], step):
        columns = slice(start, min(start + step, weight.shape[-1]))
        yield columns, F.grouped_mm(left.t(), right[:, columns], offs=ends)


@functools.cache
def _summed(kind: Any) -> Any:
    return type(f"Summed{kind.__name__}", (SummedExperts, kind), {})


class SummedExperts(nn.Module):
    """Experts whose weights' gradients are added to their sums by `WeightGradients`, and not returned. What they
    compute is what `grouped_mm` of transformers computes (transformers/integrations/moe.py), operation by operation."""

    sums: dict[str, int]
    """By name of a weight: the number of its parameter."""
    sum_handle: Tensor | None
    # of the class that it is made for
    num_experts: int
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    act_fn: Callable[[Tensor], Tensor]
    _apply_gate: Callable[[Tensor], Tensor]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(N, width) to (N, width); `top_k_index` and `top_k_weights` are (N, K)."""
        experts, order, counts = sort_by_expert(top_k_index, self.num_experts)
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        rows = hidden_states[order // top_k_index.shape[-1]]
        weighted = self.compute(rows, ends, experts, top_k_weights.reshape(-1)[order])
        return sum_of_chosen(weighted, order, hidden_states)

    def compute(self, rows: Tensor, ends: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Rows (M, width), ordered by expert, to (M, width), each multiplied by its weight (M,). `ends` (E,) int32 are
        those of each expert's rows, and `experts` (M,) is whose they are."""
        first = "gate_up_proj" if self.has_gate else "up_proj"
        inner = self._multiply(first, rows, ends, experts)
        inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
        outer = self._multiply("down_proj", inner, ends, experts)
        return outer * weights.unsqueeze(-1)

    def _multiply(self, name: str, rows: Tensor, ends: Tensor, experts: Tensor) -> Tensor:
        """Each row (N, I) times the weight of its expert, to (N, O)."""
        weight: Tensor = getattr(self, name)
        rows = rows.to(weight.dtype)
        if name in self.sums and torch.is_grad_enabled() and rows.requires_grad:
            output: Tensor = _Summed.apply(rows, weight, ends, self.sum_handle, self.sums[name], self.is_transposed)
        else:
            output = F.grouped_mm(rows, weight if self.is_transposed else weight.transpose(-2, -1), offs=ends)
        if self.has_bias:
            output.add_(getattr(self, f"{name}_bias")[experts])
        return output


def sort_by_expert(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of the experts (N, K) that tokens are routed to: all (N K,) in order, where each comes from in the flattened
    input, and how often each expert occurs (E,)."""
    experts, order = torch.sort(top_k_index.reshape(-1))
    # counting integers: of these CPUs take floats alone where algorithms are deterministic, and cards no floats
    counted = experts.float() if experts.device.type == "cpu" else experts.int()
    return experts, order, torch.histc(counted, bins=num_experts, min=0, max=num_experts - 1)


def sum_of_chosen(weighted: Tensor, order: Tensor, hidden_states: Tensor) -> Tensor:
    """Results (N K, width) of the experts, ordered as `sort_by_expert` says, to their sums by token, which are shaped
    and stored as `hidden_states` (N, width)."""
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0], device=order.device)
    tokens, width = hidden_states.shape
    total = weighted[back].view(tokens, order.shape[0] // tokens, width).sum(dim=1)
    return total.to(hidden_states.dtype)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor, handle: Tensor | None, index: int, transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, ends, handle)
        ctx.index, ctx.transposed = index, transposed
        return F.grouped_mm(rows, weight if transposed else weight.transpose(-2, -1), offs=ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, ends, handle = ctx.saved_tensors
        of_rows = torch.ops.megatrain.experts_backward(grads[0], rows, weight, ends, handle, ctx.index, ctx.transposed)
        return of_rows, None, None, None, None, None


@functools.cache
def _define_operation() -> None:
    """Defines the operation that makes both gradients of a product with expert weights, once."""
    name = "megatrain::experts_backward"
    torch.library.define(
        name,
        "(Tensor grad, Tensor rows, Tensor weight, Tensor ends, Tensor? handle, int index, bool transposed) -> Tensor",
    )

    def compute(
        grad: Tensor, rows: Tensor, weight: Tensor, ends: Tensor, handle: Tensor | None, index: int, transposed: bool
    ) -> Tensor:
        grad = grad.contiguous()
        of_rows = F.grouped_mm(grad, weight.transpose(-2, -1) if transposed else weight, offs=ends)
        assert handle is not None
        add_parts(handle, index, grad_parts(weight, grad, rows.contiguous(), ends, transposed))
        return of_rows

    def fake(_grad: Tensor, rows: Tensor, *_: Any) -> Tensor:
        return rows.new_empty(rows.shape)

    torch.library.impl(name, "CompositeExplicitAutograd", compute)
    torch.library.register_fake(name, fake)
