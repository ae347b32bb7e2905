"""Whether a half of a layer computes each token by itself, so that it can be computed in tiles of tokens.

Tried on values: a copy of the half on the CPU, with random weights that share most of their memory, must give several
tokens together what it gives them a few at a time.
"""

from typing import Any

import torch
from torch import Tensor, nn

from megatrain.models.layer_check import of_zeros

TOKENS = 8
_TILES = [3, 5]
_APART = 16
"""Elements from one expert's weights to the next one's."""
_TOLERANCE = 0.02
"""Relative error of what rounding alone makes of bf16; a token that sees another one differs by its own size."""


def why_not_token_wise(half: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor) -> str | None:
    """Why a half of a layer does not compute each of `hidden` (1, TOKENS, width) by itself; None where it does. `args`
    and `kwargs` are what its layer is called with besides."""
    module = of_zeros(half).eval()
    generator = torch.Generator().manual_seed(0)

    def run(tokens: Tensor) -> Tensor:
        result = module(tokens, *args, **kwargs)
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return output.float()

    try:
        with torch.no_grad():
            for child in module.modules():
                for name, old in child._parameters.items():
                    if old is not None and old.is_floating_point() and old.ndim:
                        child._parameters[name] = nn.Parameter(_values(old, generator), requires_grad=False)
            together = run(hidden)
            apart = torch.cat([run(part) for part in torch.split(hidden, _TILES, 1)], 1)
    except Exception as error:  # a layer may raise anything for fewer tokens than its arguments are for
        return f"it cannot be computed for some of the tokens ({type(error).__name__})"
    if not bool(together.isfinite().all()):
        return "it could not be tried: its result is not finite"
    if float((together - apart).norm() / together.norm()) > _TOLERANCE:
        return "its tokens depend on each other"
    return None


def _values(like: Tensor, generator: torch.Generator) -> Tensor:
    """Random values in the shape of a parameter, in little memory: a matrix has one number in each row, and the
    matrices of several experts are windows of one vector (grouped matmuls refuse rows that overlap)."""
    if like.ndim == 1:
        return torch.ones_like(like)
    scale = like.shape[-1] ** -0.5
    if like.ndim == 2:
        column: Tensor = torch.randn(like.shape[0], 1, generator=generator) * scale
        return column.to(like.dtype).expand(like.shape)
    vector: Tensor = torch.randn(like[0].numel() + _APART * like.shape[0], generator=generator) * scale
    return vector.to(like.dtype).as_strided(like.shape, (_APART, *like[0].stride()))
