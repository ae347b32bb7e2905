"""Log-probabilities and entropies of a plain head in token chunks, with a backward that computes each chunk's logits
again: the full logits never exist (chunked linear cross-entropy, as in Liger Kernel, arXiv 2410.10989).

`LossHead` is what a `loss_fn` is given as `head`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatrain.engine.loss import matmul_grad_hidden, matmul_logits, token_logprobs, workspace_bytes
from megatrain.engine.matmul import add_matmul
from megatrain.errors import ConfigError
from megatrain.names import IGNORED


@dataclasses.dataclass(kw_only=True, slots=True)
class PlainHead:
    """The matmul of a plain head, and where the gradients of its weights are summed."""

    weight: Tensor
    """(V, H)"""
    bias: Tensor | None
    """(V,)"""
    logit_scale: float
    softcap: float | None
    chunk: int
    """Rows of logits that exist at a time."""
    grad_weight: Tensor | None
    """(V, H), fp32 or wider: += gradient of the weight; None where it is frozen."""
    grad_bias: Tensor | None
    sums: list[Tensor]
    """Where all gradients of the head are summed, those two among them."""
    starting: bool
    """Whether the sums still hold the last step's gradients."""
    in_backward: bool = False
    """Whether the engine's own backward runs: no other may add to the sums."""

    def logits(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits (R, V) in fp32 or wider of `hidden` (R, H), and the slope of their cap where there is one."""
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logits = torch.empty(hidden.shape[0], self.weight.shape[0], dtype=wide, device=hidden.device)
        matmul_logits(hidden, self.weight, logits)
        if self.bias is not None:
            logits += self.bias
        if self.logit_scale != 1.0:
            logits *= self.logit_scale
        slope = None
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_()
            slope = 1 - logits.square()
            logits.mul_(self.softcap)
        return logits, slope

    def start_sums(self) -> None:
        """Clears the sums before the first gradient of a step is added."""
        if self.starting:
            self.starting = False
            for total in self.sums:
                total.zero_()


def logprobs_bytes(rows: int, vocab: int, hidden: int, chunk: int, dtype: torch.dtype, device: str) -> int:
    """Upper bound of what `LossHead.logprobs` allocates on the device, backward included."""
    chunk = min(chunk, max(rows, 1))
    # in backward: the probabilities beside the logits, and the slope of a cap; rounded for the matmuls
    beside = 2 * max(4, dtype.itemsize) + dtype.itemsize
    return workspace_bytes(rows, vocab, hidden, chunk, dtype, device) + chunk * vocab * beside + 8 * rows * 16


class LossHead:
    """The language-model head as a `loss_fn` sees it. Called with hidden states (…, width) it returns the logits (…, V)
    of all of them, with the model's own scale and cap."""

    def __init__(self, logits: Callable[[Tensor], Tensor], plain: PlainHead | None, vocab: int, chunk: int) -> None:
        self._logits, self._plain, self._vocab, self._chunk = logits, plain, vocab, chunk

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._logits(hidden)

    @overload
    def logprobs(self, hidden: Tensor, labels: Tensor, *, entropy: Literal[False] = False) -> Tensor: ...

    @overload
    def logprobs(self, hidden: Tensor, labels: Tensor, *, entropy: Literal[True]) -> tuple[Tensor, Tensor]: ...

    def logprobs(self, hidden: Tensor, labels: Tensor, *, entropy: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """(batch, seq - 1) fp32: log-probability of each next token by `labels` (batch, seq), 0 where that is -100,
        for `hidden` (batch, seq, width) as `loss_fn` is given it. Shifted inside, like the built-in loss, so that
        position t is the probability of `labels[:, t + 1]`. With `entropy` also the entropy of each such prediction,
        in nats and of the same shape.

        Differentiable once. Logits exist for `plan.loss_chunk` tokens at a time, in forward and in backward, and their
        memory is in the plan. Raises ConfigError for labels that do not belong to `hidden` or to the vocabulary.
        """
        targets = self._targets(hidden, labels)
        flat = hidden.reshape(-1, hidden.shape[-1])
        if self._plain is None:
            found, spread = self._by_autograd(flat, targets, entropy)
        elif entropy:
            found, spread = _LogprobsAndEntropy.apply(flat, targets, self._plain)
        else:
            found, spread = _Logprobs.apply(flat, targets, self._plain), None
        shape = labels.shape
        found = found.view(shape)[:, :-1]
        return found if spread is None else (found, spread.view(shape)[:, :-1])

    def _targets(self, hidden: Tensor, labels: Any) -> Tensor:
        """(batch * seq,): the next token's label, -100 at each row's end."""
        if not isinstance(labels, Tensor) or labels.dtype.is_floating_point or labels.dtype == torch.bool:
            raise ConfigError(f"head.logprobs needs labels as an integer tensor (batch, seq), not {_described(labels)}")
        if hidden.ndim != 3 or labels.shape != hidden.shape[:2]:
            raise ConfigError(
                f"head.logprobs was given hidden {tuple(hidden.shape)} and labels {tuple(labels.shape)}; they must be "
                "(batch, seq, width) and (batch, seq), neither of them shifted"
            )
        weight = self._plain.weight if self._plain is not None else None
        if weight is not None and (hidden.dtype != weight.dtype or hidden.shape[-1] != weight.shape[1]):
            raise ConfigError(
                f"head.logprobs was given hidden of width {hidden.shape[-1]} in {hidden.dtype}, and the head takes "
                f"{weight.shape[1]} in {weight.dtype}, as loss_fn is given it"
            )
        targets = torch.full_like(labels, IGNORED, dtype=torch.int64)
        targets[:, :-1] = labels[:, 1:]
        wrong = (targets != IGNORED) & ((targets < 0) | (targets >= self._vocab))
        if bool(wrong.any()):
            raise ConfigError(
                f"head.logprobs was given the label {int(targets[wrong][0])}, and the model has {self._vocab} tokens; "
                f"a position without a label is {IGNORED}"
            )
        return targets.flatten()

    def _by_autograd(self, flat: Tensor, targets: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """For a head that is no plain matmul: its own forward, computed again in backward chunk by chunk (non-reentrant
        checkpointing)."""

        def of_chunk(hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
            logits = self._logits(hidden.unsqueeze(0))[0]
            logp = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
            supervised = target != IGNORED
            found = logp.gather(1, torch.where(supervised, target, 0).unsqueeze(1)).squeeze(1)
            spread = -(logp.exp() * logp).sum(-1) * supervised if entropy else None
            return torch.where(supervised, found, 0), spread

        found: list[Tensor] = []
        spreads: list[Tensor] = []
        for start in range(0, flat.shape[0], self._chunk):
            part = slice(start, start + self._chunk)
            values, spread = checkpoint(
                of_chunk, flat[part], targets[part], use_reentrant=False, preserve_rng_state=False
            )
            found.append(values)
            if spread is not None:
                spreads.append(spread)
        return torch.cat(found), torch.cat(spreads) if entropy else None


def _described(value: Any) -> str:
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


class _Logprobs(torch.autograd.Function):
    """(N,) log-probabilities of `targets` (N,) by `hidden` (N, H)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, targets: Tensor, head: PlainHead) -> Tensor:
        ctx.save_for_backward(hidden, targets)
        ctx.head = head
        return token_logprobs(
            hidden,
            targets,
            head.weight,
            head.bias,
            chunk=head.chunk,
            logit_scale=head.logit_scale,
            softcap=head.softcap,
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        hidden, targets = ctx.saved_tensors
        return _backward(ctx.head, hidden, targets, grad, None, None), None, None


class _LogprobsAndEntropy(torch.autograd.Function):
    """(N,) log-probabilities of `targets` (N,) by `hidden` (N, H), and (N,) entropies of the predictions."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, targets: Tensor, head: PlainHead) -> tuple[Tensor, Tensor]:
        parts = []
        for start in range(0, hidden.shape[0], head.chunk):
            rows_t = targets[start : start + head.chunk]
            logp, _ = head.logits(hidden[start : start + head.chunk])
            _log_softmax_(logp)
            supervised = rows_t != IGNORED
            found = logp.gather(1, torch.where(supervised, rows_t, 0).unsqueeze(1)).squeeze(1)
            spread = -logp.mul_(logp.exp()).sum(1)
            parts.append((torch.where(supervised, found, 0), torch.where(supervised, spread, 0)))
        found, spread = (torch.cat(values) for values in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, targets, spread)
        ctx.head = head
        return found, spread

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None, None]:
        hidden, targets, spread = ctx.saved_tensors
        return _backward(ctx.head, hidden, targets, grad, grad_entropy, spread), None, None


def _backward(
    head: PlainHead, hidden: Tensor, targets: Tensor, grad: Tensor, grad_entropy: Tensor | None, spread: Tensor | None
) -> Tensor:
    """Gradient of `hidden`; those of weight and bias are added to their sums.

    With p = softmax(z): d logp_t / dz = onehot(t) - p, and dH / dz = -p (log p + H).
    """
    if not head.in_backward:
        raise ConfigError(
            "the gradient of head.logprobs was asked for inside loss_fn (backward or autograd.grad); return the loss "
            "instead, and the engine takes its gradient"
        )
    head.start_sums()
    result = torch.empty_like(hidden)
    for start in range(0, hidden.shape[0], head.chunk):
        part = slice(start, start + head.chunk)
        rows_h, rows_t = hidden[part], targets[part]
        supervised = rows_t != IGNORED
        logp, slope = head.logits(rows_h)
        _log_softmax_(logp)
        weight = torch.where(supervised, grad[part], 0).to(logp.dtype)
        if grad_entropy is None or spread is None:
            dlogits = logp.exp_().mul_(-weight.unsqueeze(1))
        else:
            of_entropy = torch.where(supervised, grad_entropy[part], 0).to(logp.dtype).unsqueeze(1)
            p = logp.exp()
            dlogits = logp.add_(spread[part].unsqueeze(1)).mul_(-of_entropy).sub_(weight.unsqueeze(1)).mul_(p)
            del p
        # one entry a row, so no two additions meet and the order cannot matter
        index = torch.where(supervised, rows_t, 0).unsqueeze(1)
        dlogits.scatter_(1, index, dlogits.gather(1, index) + weight.unsqueeze(1))
        if slope is not None:
            dlogits *= slope
        if head.logit_scale != 1.0:
            dlogits *= head.logit_scale
        if dlogits.dtype != hidden.dtype and hidden.is_cuda:
            dlogits = dlogits.to(hidden.dtype)
        if head.grad_weight is not None:
            add_matmul(head.grad_weight, dlogits, rows_h)
        if head.grad_bias is not None:
            head.grad_bias += dlogits.sum(0, dtype=head.grad_bias.dtype)
        matmul_grad_hidden(dlogits, head.weight, result[part])
    return result


def _log_softmax_(logits: Tensor) -> None:
    """log_softmax over the last dimension, in place; one more tensor of this size exists meanwhile."""
    logits.sub_(logits.amax(1, keepdim=True))
    logits.sub_(logits.exp().sum(1, keepdim=True).log_())
