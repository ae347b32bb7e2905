"""The fused part of the loss on CUDA, in Triton: one program a row turns logits into their gradient in place.

The first sweep over a row forms maximum and sum of exponentials together, the second writes the gradient. The gradient
has the head's own type: a row of bf16 gradients takes the first half of its row of fp32 logits. `loss.py` holds the
same arithmetic in plain PyTorch, which is the reference.
"""

from typing import TYPE_CHECKING

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

if TYPE_CHECKING:
    from megatrain.engine.loss import _Terms

_BLOCK = 4096
_NUM_WARPS = 4


def cross_entropy(
    logits: Tensor,  # (R, V) fp32, contiguous; its storage becomes the gradient's
    targets: Tensor,  # (R,) int64
    bias: Tensor | None,  # (V,)
    row_weights: Tensor | None,  # (R,) fp32: factor of each row's loss; None: 1
    terms: "_Terms",
    ignore: int,
    out_dtype: torch.dtype | None,  # type of the gradient; None: no gradient, logits stay
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Losses (R,), log-probabilities (R,), both fp32, and the gradient (R, V) of type `out_dtype` or None."""
    rows, vocab = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    logprobs = torch.empty_like(losses)
    gradient = None
    if out_dtype is not None:
        gradient = logits.view(out_dtype)[:, :vocab]
    target = gradient if gradient is not None else logits
    _cross_entropy_kernel[(rows,)](
        logits,
        target,
        targets,
        bias if bias is not None else logits,
        row_weights if row_weights is not None else logits,
        losses,
        logprobs,
        vocab,
        logits.stride(0),
        target.stride(0),
        terms.scale,
        terms.label_smoothing,
        terms.z_loss,
        terms.logit_scale,
        terms.softcap or 0.0,
        ignore,
        HAS_BIAS=bias is not None,
        HAS_WEIGHTS=row_weights is not None,
        HAS_CAP=terms.softcap is not None,
        HAS_GRADIENT=gradient is not None,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )
    return losses, logprobs, gradient


@triton.jit  # type: ignore[untyped-decorator]
def _logits(
    logits: "tl.tensor",  # pointer to a row, fp32
    bias: "tl.tensor",  # pointer, or anything without HAS_BIAS
    columns: "tl.tensor",
    mask: "tl.tensor",
    logit_scale: "tl.tensor",
    softcap: "tl.tensor",
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
) -> "tl.tensor":
    x = tl.load(logits + columns, mask=mask, other=0.0)
    if HAS_BIAS:
        x += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    x *= logit_scale
    if HAS_CAP:
        # tanh through exp of a negative number: no overflow at either end
        t = x / softcap
        e = tl.exp(-2.0 * tl.abs(t))
        t = tl.where(t < 0, -1.0, 1.0) * (1.0 - e) / (1.0 + e)
        x = t * softcap
    return x


@triton.jit  # type: ignore[untyped-decorator]
def _cross_entropy_kernel(
    logits: "tl.tensor",  # pointers …
    gradient: "tl.tensor",
    targets: "tl.tensor",
    bias: "tl.tensor",
    row_weights: "tl.tensor",
    losses: "tl.tensor",
    logprobs: "tl.tensor",
    vocab: "tl.tensor",  # … and scalars
    logits_stride: "tl.tensor",
    gradient_stride: "tl.tensor",
    scale: "tl.tensor",
    smoothing: "tl.tensor",
    z_loss: "tl.tensor",
    logit_scale: "tl.tensor",
    softcap: "tl.tensor",
    ignore: "tl.tensor",
    HAS_BIAS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    gradient += row * gradient_stride
    target = tl.load(targets + row)
    lanes = tl.arange(0, BLOCK)
    if target == ignore:
        tl.store(losses + row, 0.0)
        tl.store(logprobs + row, 0.0)
        if HAS_GRADIENT:
            for start in range(0, vocab, BLOCK):
                columns = start + lanes
                tl.store(gradient + columns, 0.0, mask=columns < vocab)
        return
    top = -float("inf")
    total = 0.0
    plain_sum = 0.0
    at_target = 0.0
    for start in range(0, vocab, BLOCK):
        columns = start + lanes
        mask = columns < vocab
        x = _logits(logits, bias, columns, mask, logit_scale, softcap, HAS_BIAS, HAS_CAP)
        plain_sum += tl.sum(tl.where(mask, x, 0.0), 0)
        at_target += tl.sum(tl.where(columns == target, x, 0.0), 0)
        x = tl.where(mask, x, -float("inf"))
        new_top = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top), 0)
        top = new_top
    lse = top + tl.log(total)
    loss = (1.0 - smoothing) * (lse - at_target) + smoothing * (lse - plain_sum / vocab) + z_loss * lse * lse
    if HAS_WEIGHTS:
        loss *= tl.load(row_weights + row)
    tl.store(losses + row, loss)
    tl.store(logprobs + row, at_target - lse)
    if HAS_GRADIENT:
        row_scale = scale * logit_scale
        if HAS_WEIGHTS:
            row_scale *= tl.load(row_weights + row)
        factor = row_scale * (1.0 + 2.0 * z_loss * lse) / total
        uniform = row_scale * smoothing / vocab
        for start in range(0, vocab, BLOCK):
            columns = start + lanes
            mask = columns < vocab
            x = _logits(logits, bias, columns, mask, logit_scale, softcap, HAS_BIAS, HAS_CAP)
            g = tl.exp(x - top) * factor - uniform
            g = tl.where(columns == target, g - row_scale * (1.0 - smoothing), g)
            if HAS_CAP:
                g *= 1.0 - (x / softcap) * (x / softcap)
            # a narrower gradient lies over logits of this block: all of them are read before any is overwritten
            tl.debug_barrier()
            tl.store(gradient + columns, g.to(gradient.dtype.element_ty), mask=mask)
