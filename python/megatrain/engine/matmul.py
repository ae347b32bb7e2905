"""Matmuls of bf16 operands whose fp32 sums are kept rather than rounded to bf16."""

import logging

import torch
from torch import Tensor

log: logging.Logger = logging.getLogger(__name__)

TILE_ROWS = 2048
"""Rows of a bf16 operand that are widened to fp32 at a time where no matmul with fp32 output exists."""


def add_matmul(total: Tensor, grad: Tensor, rows: Tensor, *, first: bool = False) -> None:
    """total (O, I) += grad (N, O)ᵀ @ rows (N, I), summed in the dtype of `total`.

    `first` overwrites, whatever was there. `total` has the dtype of the operands or is fp32.
    """
    if grad.dtype == rows.dtype == total.dtype:
        total.addmm_(grad.t(), rows, beta=0 if first else 1)
    elif grad.dtype == rows.dtype and total.dtype == torch.float32 and mixed_matmul(total.device):
        if first:
            torch.mm(grad.t(), rows, out_dtype=torch.float32, out=total)
        else:
            torch.addmm(total, grad.t(), rows, out_dtype=torch.float32, out=total)
    else:
        wide = rows.to(total.dtype)
        for start in range(0, total.shape[0], TILE_ROWS):
            tile = grad[:, start : start + TILE_ROWS].to(total.dtype)
            total[start : start + TILE_ROWS].addmm_(tile.t(), wide, beta=0 if first else 1)


_MIXED_MATMUL: dict[str, bool] = {}


def mixed_matmul(device: torch.device) -> bool:
    """Whether this torch multiplies bf16 operands into an fp32 result (and adds to one) on this kind of device."""
    if device.type not in _MIXED_MATMUL:
        _MIXED_MATMUL[device.type] = device.type == "cuda" and _try_mixed_matmul(device)
    return _MIXED_MATMUL[device.type]


def _try_mixed_matmul(device: torch.device) -> bool:
    one = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    total = torch.ones(16, 16, dtype=torch.float32, device=device)
    try:
        torch.mm(one, one.t(), out_dtype=torch.float32, out=torch.empty_like(total))
        torch.addmm(total, one.t(), one, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        log.warning("this torch has no matmul of bf16 into fp32 (%s); operands are widened tile by tile", error)
        return False
    return True
