"""Stands for fused attention on meta tensors, to measure what a layer saves for its backward.

On meta, `F.scaled_dot_product_attention` runs its math fallback, which saves a matrix of seq x seq that no fused kernel
saves (FlashAttention-2, arXiv 2307.08691).
"""

from typing import Any

import torch
from torch import Tensor


class FusedAttention(torch.autograd.Function):
    """Saves what the fused kernels save: queries, keys, values, output, and one fp32 number (log-sum-exp) per query."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """An output without values."""
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:
        """Gradients without values."""
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
