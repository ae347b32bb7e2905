"""Cross-entropy of the head in token chunks, with its own backward: the full logits never exist.

For every chunk of rows: logits in fp32 (a bf16 head multiplies bf16 operands and keeps the fp32 sums), one pass that
turns them into their own gradient in place, then the two matmuls of the backward. Peak memory is one chunk of logits,
whatever the number of tokens (chunked linear cross-entropy, as in Liger Kernel, arXiv 2410.10989). `chunked_loss` is
the training path, `token_logprobs` the one that only scores.
"""

import importlib.util
import logging
from typing import NamedTuple

import torch
from torch import Tensor

from megatrain.engine.matmul import TILE_ROWS, add_matmul, mixed_matmul
from megatrain.names import IGNORED

log: logging.Logger = logging.getLogger(__name__)

_CHUNK_BYTES = {"cuda": 5 << 28, "cpu": 32 << 20}
_CHUNK_SHARE = 32
"""Logits take at most this part of a card's memory: the whole chunk from 40 GiB on."""
_CHUNK_ROWS = {"cuda": (256, 8192), "cpu": (64, 2048)}
_CHUNK_ROUND = {"cuda": 256, "cpu": 32}


class LossResult(NamedTuple):
    """Result of a head's loss."""

    loss_sum: Tensor
    """0-d, fp64: sum over supervised rows, each times its weight, not scaled."""
    grad_hidden: Tensor | None
    """(N, H), dtype of `hidden`: gradient of `scale * loss_sum`."""
    logprobs: Tensor | None
    """(N,), fp32 or better: log-probability of each target, 0 where not supervised; only when asked for."""
    correct: Tensor | None
    """(N,), bool: whether no other token has a larger logit than the target; with `logprobs` only."""


def default_chunk(vocab: int, device: str, card_bytes: int | None = None) -> int:
    """Rows of logits that exist at a time. A rule of vocabulary and kind of card alone, since it is part of the
    numerics key: it must not follow free memory or measured rates. `card_bytes`: memory of the card; None: enough."""
    kind = "cuda" if device.startswith("cuda") else "cpu"
    low, high = _CHUNK_ROWS[kind]
    size = _CHUNK_BYTES[kind]
    while card_bytes is not None and size > card_bytes // _CHUNK_SHARE:
        size //= 2
    rows = size // (4 * vocab) // _CHUNK_ROUND[kind] * _CHUNK_ROUND[kind]
    return max(low, min(high, rows))


def workspace_bytes(rows: int, vocab: int, hidden: int, chunk: int, dtype: torch.dtype, device: str) -> int:
    """Upper bound of what `chunked_loss` allocates beyond its arguments, its result `grad_hidden` included."""
    chunk = min(chunk, max(rows, 1))
    total = rows * hidden * dtype.itemsize + chunk * vocab * max(4, dtype.itemsize) + rows * 16
    if device.startswith("cuda"):
        # the eager path rounds the gradient of the logits into a second buffer; the kernel does it in place
        return total if dtype == torch.float32 or _kernel_available() else total + chunk * vocab * dtype.itemsize
    if dtype.itemsize < 4:
        # of the widened weight two tiles: the next is made before the last is freed
        total += 2 * TILE_ROWS * hidden * 4 + chunk * TILE_ROWS * 4 + 2 * chunk * hidden * 4
    return total


@torch.no_grad()
def chunked_loss(
    hidden: Tensor,  # (N, H), bf16, fp16, fp32 or fp64
    targets: Tensor,  # (N,), int64, token ids already shifted; IGNORED where not supervised
    weight: Tensor,  # (V, H), dtype of `hidden`
    bias: Tensor | None = None,  # (V,)
    *,
    row_weights: Tensor | None = None,  # (N,), fp32 or wider: factor of each row's loss; None: 1
    scale: float = 1.0,  # gradients are those of scale * loss_sum
    chunk: int | None = None,  # rows of logits at a time; None: `default_chunk`
    label_smoothing: float = 0.0,  # as torch.nn.functional.cross_entropy
    z_loss: float = 0.0,  # coefficient of logsumexp(logits)**2 (PaLM, arXiv 2204.02311, section 5)
    logit_scale: float = 1.0,  # logits are multiplied with it (Cohere, Granite)
    softcap: float | None = None,  # logits become softcap * tanh(logits / softcap) (Gemma 2)
    grad_weight: Tensor | None = None,  # (V, H), fp32 or the dtype of the arithmetic: += gradient of the weight
    grad_bias: Tensor | None = None,  # (V,), likewise
    grad_hidden: Tensor | None = None,  # (N, H): where to write it; may be `hidden` itself; None: allocated
    need_grad: bool = True,  # False: no gradient at all, `grad_weight` and `grad_bias` are left alone
    need_logprobs: bool = False,
) -> LossResult:
    """Weighted sum of the cross-entropy over supervised rows, and its gradients.

    Deterministic: chunks in order, fp64 sum of per-row losses over each chunk. Raises ValueError for shapes or types
    that do not belong together.
    """
    _check(hidden, targets, weight, bias, row_weights, grad_weight, grad_bias, label_smoothing, softcap)
    rows, _ = hidden.shape
    vocab = weight.shape[0]
    arithmetic = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    chunk = min(chunk or default_chunk(vocab, hidden.device.type), max(rows, 1))
    loss_sum = torch.zeros((), dtype=torch.float64, device=hidden.device)
    logprobs = torch.empty(rows, dtype=arithmetic, device=hidden.device) if need_logprobs else None
    correct = torch.empty(rows, dtype=torch.bool, device=hidden.device) if need_logprobs else None
    if need_grad and grad_hidden is None:
        grad_hidden = torch.empty_like(hidden)
    elif not need_grad:
        grad_hidden = None
    logits_buffer = torch.empty(chunk, vocab, dtype=arithmetic, device=hidden.device)
    terms = _Terms(scale, label_smoothing, z_loss, logit_scale, softcap)
    in_kernel = hidden.is_cuda and arithmetic == torch.float32 and _kernel_available()
    for start in range(0, rows, chunk):
        rows_h = hidden[start : start + chunk]
        rows_t = targets[start : start + chunk]
        rows_w = None if row_weights is None else row_weights[start : start + chunk]
        logits = logits_buffer[: rows_h.shape[0]]
        matmul_logits(rows_h, weight, logits)
        if correct is not None:
            correct[start : start + chunk] = is_largest(logits, rows_t, bias)
        if in_kernel:
            from megatrain.engine import loss_triton

            losses, logp, dlogits = loss_triton.cross_entropy(
                logits, rows_t, bias, rows_w, terms, IGNORED, out_dtype=hidden.dtype if need_grad else None
            )
        else:
            losses, logp, dlogits = _cross_entropy(logits, rows_t, bias, rows_w, terms, need_grad)
        loss_sum += losses.sum(dtype=torch.float64)
        if logprobs is not None:
            logprobs[start : start + chunk] = logp
        if dlogits is None or grad_hidden is None:
            continue
        if dlogits.dtype != hidden.dtype and hidden.is_cuda:
            dlogits = dlogits.to(hidden.dtype)
        if grad_weight is not None:
            add_matmul(grad_weight, dlogits, rows_h)
        if grad_bias is not None:
            grad_bias += dlogits.sum(0, dtype=grad_bias.dtype)
        # last, because the caller may let it overwrite `hidden`
        matmul_grad_hidden(dlogits, weight, grad_hidden[start : start + chunk])
    return LossResult(loss_sum, grad_hidden, logprobs, correct)


def token_logprobs(
    hidden: Tensor,  # (N, H)
    targets: Tensor,  # (N,), int64; IGNORED gives 0
    weight: Tensor,  # (V, H)
    bias: Tensor | None = None,  # (V,)
    *,
    chunk: int | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """(N,) log-probabilities of the targets, fp32 or better; 0 where the target is IGNORED."""
    result = chunked_loss(
        hidden,
        targets,
        weight,
        bias,
        chunk=chunk,
        logit_scale=logit_scale,
        softcap=softcap,
        need_grad=False,
        need_logprobs=True,
    )
    assert result.logprobs is not None
    return result.logprobs


class _Terms(NamedTuple):
    """Scalars of the loss; see `chunked_loss`."""

    scale: float
    label_smoothing: float
    z_loss: float
    logit_scale: float
    softcap: float | None


def _check(
    hidden: Tensor,
    targets: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    row_weights: Tensor | None,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
    label_smoothing: float,
    softcap: float | None,
) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} must be (N, H) and (V, H)")
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(f"targets must be int64 of shape ({hidden.shape[0]},), not {targets.dtype} {targets.shape}")
    if row_weights is not None and row_weights.shape != targets.shape:
        raise ValueError(f"row_weights must have shape ({hidden.shape[0]},), not {tuple(row_weights.shape)}")
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype} and weight {weight.dtype}; they must agree")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape ({weight.shape[0]},), not {tuple(bias.shape)}")
    if grad_weight is not None and grad_weight.shape != weight.shape:
        raise ValueError(f"grad_weight must have shape {tuple(weight.shape)}, not {tuple(grad_weight.shape)}")
    if grad_bias is not None and grad_bias.shape != weight.shape[:1]:
        raise ValueError(f"grad_bias must have shape ({weight.shape[0]},), not {tuple(grad_bias.shape)}")
    for name, out in (("grad_weight", grad_weight), ("grad_bias", grad_bias)):
        if out is not None and out.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{name} is summed in fp32, so it cannot be {out.dtype}")
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1), not {label_smoothing}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be positive, not {softcap}")


def _cross_entropy(
    logits: Tensor, targets: Tensor, bias: Tensor | None, row_weights: Tensor | None, terms: _Terms, need_grad: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Losses (R,), log-probabilities (R,) and, in the storage of `logits` (R, V), the gradient. The reference of the
    kernel, and what runs where there is none."""
    vocab = logits.shape[1]
    smoothing = terms.label_smoothing
    supervised = targets != IGNORED
    index = torch.where(supervised, targets, 0).unsqueeze(1)
    if bias is not None:
        logits += bias
    if terms.logit_scale != 1.0:
        logits *= terms.logit_scale
    slope = None
    if terms.softcap is not None:
        logits.div_(terms.softcap).tanh_()
        if need_grad:
            slope = 1 - logits.square()  # of the cap, where the logits stand
        logits.mul_(terms.softcap)
    at_target = logits.gather(1, index).squeeze(1)
    mean = logits.mean(1) if smoothing else None
    top = logits.amax(1)
    weights = logits.sub_(top.unsqueeze(1)).exp_()
    total = weights.sum(1)
    lse = top + total.log()
    logp = torch.where(supervised, at_target - lse, 0)
    losses = lse - at_target
    if mean is not None:
        losses = (1 - smoothing) * losses + smoothing * (lse - mean)
    if terms.z_loss:
        losses = losses + terms.z_loss * lse.square()
    losses = torch.where(supervised, losses, 0)
    if row_weights is not None:
        losses = losses * row_weights
    if not need_grad:
        return losses, logp, None
    row_scale = supervised.to(logits.dtype) * (terms.scale * terms.logit_scale)
    if row_weights is not None:
        row_scale = row_scale * row_weights.to(logits.dtype)
    weights *= (row_scale * (1 + 2 * terms.z_loss * lse) / total).unsqueeze(1)
    if smoothing:
        weights -= (row_scale * (smoothing / vocab)).unsqueeze(1)
    # one entry a row, so no two additions meet and the order cannot matter
    weights.scatter_(1, index, weights.gather(1, index) - (row_scale * (1 - smoothing)).unsqueeze(1))
    if slope is not None:
        weights *= slope
    return losses, logp, weights


def is_largest(logits: Tensor, targets: Tensor, bias: Tensor | None = None) -> Tensor:
    """(R,) bool: whether a supervised target has the largest logit of its row (R, V), the first of equal ones as
    for argmax. Neither scale nor cap changes that."""
    index = torch.where(targets != IGNORED, targets, 0).unsqueeze(1)
    found = []
    for rows, wanted in zip(torch.split(logits, TILE_ROWS), torch.split(index, TILE_ROWS), strict=True):
        summed = rows if bias is None else rows + bias
        found.append(summed.argmax(1) == wanted.squeeze(1))
    return torch.cat(found) & (targets != IGNORED)


def matmul_logits(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    """out (R, V) = hidden (R, H) @ weight (V, H)ᵀ, in the dtype of `out`."""
    if hidden.dtype == out.dtype:
        torch.mm(hidden, weight.t(), out=out)
    elif mixed_matmul(hidden.device):
        torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)
    else:
        # widened tile by tile: a product in bf16 would put the loss on bf16's grid
        wide = hidden.to(out.dtype)
        for start in range(0, weight.shape[0], TILE_ROWS):
            tile = weight[start : start + TILE_ROWS].to(out.dtype)
            out[:, start : start + TILE_ROWS] = wide @ tile.t()


def matmul_grad_hidden(dlogits: Tensor, weight: Tensor, out: Tensor) -> None:
    """out (R, H) = dlogits (R, V) @ weight (V, H)."""
    if dlogits.dtype == weight.dtype:
        torch.mm(dlogits, weight, out=out)
        return
    total = torch.zeros(out.shape, dtype=dlogits.dtype, device=out.device)
    for start in range(0, weight.shape[0], TILE_ROWS):
        tile = weight[start : start + TILE_ROWS].to(dlogits.dtype)
        total.addmm_(dlogits[:, start : start + TILE_ROWS], tile)
    out.copy_(total)


_KERNEL: list[bool] = []


def _kernel_available() -> bool:
    """Whether the fused kernel can be compiled here; said once when it cannot."""
    if not _KERNEL:
        found = importlib.util.find_spec("triton") is not None
        if not found and torch.cuda.is_available():
            log.warning("triton is not installed, so the loss runs without its fused kernel, more slowly")
        _KERNEL.append(found)
    return _KERNEL[0]
