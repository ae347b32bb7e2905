"""Linear layers that multiply in 8-bit floating point (`train.matmul: fp8`).

Forward and the input's gradient multiply e4m3 numbers; the weight's gradient stays a product of bf16 numbers. Rows
have scales of their own: of activations and gradients one for each token, of a weight one for each output channel. This
is torchao's recipe `rowwise_with_gw_hp` (github.com/pytorch/ao, torchao/float8/config.py) except for the weight in
backward. Here that is the e4m3 weight of forward: its scales are multiplied into the gradient before the gradient is
rounded, so that the input's gradient is that of the function which forward has computed. Gradients are e4m3 too: with a
scale for each row they need the bits of e4m3 more than the range of e5m2.

Scales are powers of two, so dividing by them rounds nothing, and what is lost is what e4m3 itself loses: at most one
part in 16 of a number, and more of what is below 2^-14 of the largest number in its row. A row with an infinity or a
NaN is NaN as a whole, since a conversion to e4m3 may turn an infinity into a number.

Nothing is saved for backward that a bf16 layer does not save, but for the scales of the weight: the e4m3 weight is made
again from the bf16 one. Compiled, the conversions run within the kernels before and after them.
"""

import functools
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from megatrain.engine.weight_grads import SummedLinear, add_gradient

NAME = "fp8 (e4m3, a scale per row)"
"""In the numerics key."""
PRODUCT = "megatrain.float8_matmul"
"""torch's name of the operation that multiplies."""
_E4M3 = torch.float8_e4m3fn
_MULTIPLE = 16
"""Of which both sides of a weight must be multiples for the matmuls of cards (`torch._scaled_mm`)."""
_FEW_ROWS = 64
"""Below this many rows cuBLAS has no kernel that adds a bias to long sums (12.9: 48 rows and 11,008 columns)."""
_LEAST = 2.0**-118
"""A row's largest number is taken to be at least this, so that its scale is a normal number."""
_EXPONENT = 0x7F800000
_EXCESS = 0x1FFFFF
"""Carries into the exponent what is above 1.75: 448, the largest e4m3 number, is 1.75 * 2^8."""
_LARGEST_EXPONENT = 8 << 23
_INVERTED = 254 << 23
"""Bits of a power of two and of its inverse add up to this."""


class Choice(NamedTuple):
    """Which linear layers of a decoder layer multiply in float8."""

    chosen: tuple[str, ...]
    """Their names within the layer."""
    left: dict[str, str]
    """The others, each with the reason."""


def choose(layer: nn.Module) -> Choice:
    """The linear layers within a decoder layer that multiply in float8 where they are asked to."""
    chosen: list[str] = []
    left: dict[str, str] = {}
    for name, child in layer.named_modules():
        if not isinstance(child, nn.Linear):
            continue
        parts = name.split(".")
        if any("expert" in part for part in parts):
            left[name] = "of experts"
        elif any(part in ("gate", "router") for part in parts):
            left[name] = "a router"
        elif type(child) is not nn.Linear or "forward" in child.__dict__:
            left[name] = "not a plain linear layer"
        elif child.in_features % _MULTIPLE or child.out_features % _MULTIPLE:
            left[name] = f"{child.in_features} x {child.out_features}, not multiples of {_MULTIPLE}"
        else:
            chosen.append(name)
    return Choice(tuple(chosen), left)


def convert(layer: nn.Module, matmul: str) -> None:
    """Makes the linear layers within a copy of a decoder layer multiply in `matmul` (`Decoder.matmul`)."""
    if matmul != "fp8":
        return
    define_operations()
    for name in choose(layer).chosen:
        layer.get_submodule(name).__class__ = Float8Linear


_CONVERTED_BYTES = 12
"""For each number, of operations that are not compiled: fp32 copies of it, before and after it is scaled."""


def converting_bytes(module: nn.Module, tokens: int) -> int:
    """Most bytes that a layer which is not compiled allocates to convert the operands of one product."""
    sizes = (
        tokens * max(child.in_features, child.out_features) + child.in_features * child.out_features
        for child in module.modules()
        if isinstance(child, Float8Linear)
    )
    return _CONVERTED_BYTES * max(sizes, default=0)


class Float8Linear(SummedLinear):
    """A linear layer of bf16 weights (O, I) whose products are those of e4m3 numbers; see the module."""

    sum_index: int = -1
    sum_handle: Tensor | None = None

    def forward(self, rows: Tensor) -> Tensor:
        """(…, I) to (…, O), bf16."""
        # where the rows want no gradient a compiler would drop the operation that adds the weight's
        index = self.sum_index if rows.requires_grad else -1
        output: Tensor = _Float8Linear.apply(rows, self.weight, self.bias, self.sum_handle, index)
        return output


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (N, K), bf16 or fp32, as e4m3 numbers and a power of two for each, (N, 1) fp32: rows ≈ numbers * scale."""
    largest = rows.abs().amax(-1, keepdim=True).float()
    bits = largest.clamp(min=_LEAST).view(torch.int32)
    bits = ((bits + _EXCESS) & _EXPONENT) - _LARGEST_EXPONENT
    scale = torch.where(largest.isfinite(), bits.view(torch.float32), torch.nan)
    return divide(rows, scale), scale


def divide(rows: Tensor, scale: Tensor) -> Tensor:
    """rows / scale in e4m3. The inverse is made of the scale's bits, since kernels may divide inexactly."""
    inverse = (_INVERTED - scale.view(torch.int32)).view(torch.float32)
    return (rows.float() * torch.where(scale.isfinite(), inverse, torch.nan)).to(_E4M3)


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, handle: Tensor | None, index: int
    ) -> Tensor:
        numbers, scale = quantize(rows.reshape(-1, rows.shape[-1]))
        weights, weight_scale = quantize(weight)
        ctx.save_for_backward(rows, weight, weight_scale, handle)
        ctx.index = index
        ctx.has_bias = bias is not None
        output = torch.ops.megatrain.float8_matmul(numbers, scale, weights, weight_scale, bias)
        return cast("Tensor", output.view(*rows.shape[:-1], weight.shape[0]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, weight_scale, handle = ctx.saved_tensors
        grad = grads[0].reshape(-1, weight.shape[0])
        flat = rows.reshape(-1, rows.shape[-1])
        of_rows = of_weight = of_bias = None
        if ctx.has_bias and ctx.needs_input_grad[2]:
            of_bias = grad.sum(0)
        if ctx.needs_input_grad[1] and ctx.index < 0:
            of_weight = grad.t() @ flat
        if ctx.needs_input_grad[0]:
            numbers, scale = quantize(grad.float() * weight_scale.t())
            # cards multiply rows by rows, so the weight is turned as it is converted
            weights = divide(weight, weight_scale).t().contiguous()
            if ctx.index < 0:
                of_rows = torch.ops.megatrain.float8_matmul(numbers, scale, weights, None, None)
            else:
                of_rows = torch.ops.megatrain.float8_linear_backward(
                    numbers, scale, weights, grad, flat, handle, ctx.index
                )
            of_rows = of_rows.view(rows.shape)
        return of_rows, of_weight, of_bias, None, None


def multiply(
    rows: Tensor, scale: Tensor, weights: Tensor, weight_scale: Tensor | None, bias: Tensor | None = None
) -> Tensor:
    """rows (N, K) @ weights (M, K)ᵀ, both e4m3, times scales (N, 1) and (M, 1), plus bias (M,): (N, M) bf16."""
    if weight_scale is None:
        weight_scale = scale.new_ones(weights.shape[0], 1)
    if rows.device.type == "cpu":
        # what cards compute but for the order of the sum; products of e4m3 numbers are exact in fp32
        product = (rows.float() @ weights.float().t()) * scale * weight_scale.t()
        return (product if bias is None else product + bias.float()).to(torch.bfloat16)
    count = rows.shape[0]
    if not count:
        return rows.new_empty(0, weights.shape[0], dtype=torch.bfloat16)
    if bias is not None and count < _FEW_ROWS:
        rows, scale = with_rows(rows, _FEW_ROWS), with_rows(scale, _FEW_ROWS)
    # sums have fewer bits than fp32's: with scales for rows torch's kernels are fast in no other way, as torchao notes
    product = torch._scaled_mm(
        rows.contiguous(),
        weights.contiguous().t(),
        scale_a=scale.contiguous(),
        scale_b=weight_scale.contiguous().t(),
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return product[:count]


def with_rows(values: Tensor, count: int) -> Tensor:
    """Rows (N, K) followed by rows of ones up to `count`: (count, K)."""
    padded = torch.ones(count, values.shape[1], device=values.device).to(values.dtype)
    padded[: values.shape[0]] = values
    return padded


@functools.cache
def define_operations() -> None:
    """Defines the operations, once. They are opaque to compilers, which convert and turn tensors around them."""
    product, backward = "megatrain::float8_matmul", "megatrain::float8_linear_backward"
    torch.library.define(
        product, "(Tensor rows, Tensor scale, Tensor weights, Tensor? weight_scale, Tensor? bias) -> Tensor"
    )
    torch.library.define(
        backward,
        "(Tensor numbers, Tensor scale, Tensor weights, Tensor grad, Tensor rows, Tensor handle, int index) -> Tensor",
    )

    def fake(rows: Tensor, _scale: Tensor, weights: Tensor, *_: Any) -> Tensor:
        return rows.new_empty((rows.shape[0], weights.shape[0]), dtype=torch.bfloat16)

    def compute_backward(
        numbers: Tensor, scale: Tensor, weights: Tensor, grad: Tensor, rows: Tensor, handle: Tensor, index: int
    ) -> Tensor:
        of_rows = multiply(numbers, scale, weights, None, None)
        add_gradient(handle, index, grad, rows)
        return of_rows

    torch.library.impl(product, "CompositeExplicitAutograd", multiply)
    torch.library.impl(backward, "CompositeExplicitAutograd", compute_backward)
    torch.library.register_fake(product, fake)
    torch.library.register_fake(backward, fake)

    @register_flop_formula(torch.ops.megatrain.float8_matmul)
    def flops(rows: Any, _scale: Any, weights: Any, *_: Any, **__: Any) -> int:
        return int(2 * rows[0] * rows[1] * weights[0])
