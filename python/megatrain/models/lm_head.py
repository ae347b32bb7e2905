"""What a model does with the output of its base: which weight makes the logits, and how they are scaled and capped.

Found by comparing the model's own forward, with its base stubbed, to a plain matmul. A head that is anything else runs
as the model's own forward, under autograd.
"""

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatrain.errors import ConfigError
from megatrain.models.autograd_graph import leaves_of
from megatrain.models.modules import copy_without, renew_parameters, replace_module
from megatrain.models.recorder import EmbeddingCalls
from megatrain.models.state_changes import StateWatch, refusal
from megatrain.models.support import ModelParts

_PROBE_VOCAB = 7


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeadKind:
    """How logits are computed from the output of the base."""

    plain: bool
    """Whether logits are `softcap(logit_scale * (hidden @ weight.T + bias))`; if not, the model's own forward runs."""
    weight: str | None
    """Name of the (V, H) weight; the embedding's where tied. None for a head that is not plain."""
    bias: str | None
    logit_scale: float
    softcap: float | None
    vocab: int
    """Number of logits per token."""
    used: frozenset[str]
    """Parameters that the head reads, tied ones by their first name."""
    trained: frozenset[str]
    """Those of them that get a gradient from the logits."""


class HiddenStates(nn.Module):
    """Stands for the base of a model: returns the hidden states, and the router logits of its layers, that were set."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None
        self.router_logits: tuple[Tensor, ...] | None = None

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        """The base's output, whatever the arguments."""
        output = _base_output()(last_hidden_state=self.hidden)
        if self.router_logits is not None:
            output.router_logits = self.router_logits
        return output


@functools.cache
def _base_output() -> Any:
    """Class of a base's output in which any field other than the hidden states reads as None."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class HiddenOnly(BaseModelOutputWithPast):
        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

    return HiddenOnly


class HeadShell:
    """The model's own forward as a function of hidden states, with its base stubbed. Shares the head's modules with the
    model."""

    def __init__(self, model: nn.Module, base_name: str) -> None:
        self.base: HiddenStates = HiddenStates()
        self.model: nn.Module = copy_without(model, model.get_submodule(base_name))
        replace_module(self.model, base_name, self.base)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits (batch, seq, V) of hidden states (batch, seq, H)."""
        self.base.hidden = hidden
        try:
            logits: Tensor = self.model(
                input_ids=torch.zeros(hidden.shape[:-1], dtype=torch.int64), use_cache=False
            ).logits
            return logits
        finally:
            self.base.hidden = None


def probe_head(parts: ModelParts) -> HeadKind:
    """Finds out what kind of head a model has. Raises ConfigError where it has none, or one that needs more of its base
    than hidden states."""
    model: Any = parts.model
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if output is None:
        raise ConfigError(f"{type(model).__name__} has no language-model head")
    names = {id(p): name for name, p in model.named_parameters()}
    used, trained, vocab = _used(parts, names)
    weight, bias = getattr(output, "weight", None), getattr(output, "bias", None)
    fitted = None
    if isinstance(weight, Tensor) and used <= {names.get(id(weight)), names.get(id(bias))} and used == trained:
        fitted = _fit(parts, output)
    return HeadKind(
        plain=fitted is not None,
        weight=names[id(weight)] if fitted is not None else None,
        bias=names[id(bias)] if fitted is not None and bias is not None else None,
        logit_scale=fitted[0] if fitted is not None else 1.0,
        softcap=fitted[1] if fitted is not None else None,
        vocab=vocab,
        used=used,
        trained=trained,
    )


def _used(parts: ModelParts, names: dict[int, str]) -> tuple[frozenset[str], frozenset[str], int]:
    """Which parameters the head reads, which of those get a gradient, and how many logits it returns. Runs on meta, so
    that its size does not matter."""
    shell = HeadShell(parts.model, parts.base_name)
    fresh = renew_parameters(shell.model)
    names = {id(new): names[old] for old, new in fresh.items()}
    used: set[str] = set()

    def seen(tensor: Tensor) -> None:
        if id(tensor) in names:
            used.add(names[id(tensor)])

    def answer(*_: Any) -> Tensor:
        raise ConfigError(f"{type(parts.model).__name__} looks up an embedding in its head")

    hidden = torch.empty(1, 2, parts.hidden_size, dtype=parts.dtype, device="meta", requires_grad=True)
    watch = StateWatch(shell.model)
    try:
        with torch.enable_grad(), watch, EmbeddingCalls(answer, seen):
            logits = shell(hidden)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        name = type(parts.model).__name__
        raise ConfigError(f"{name} needs more than hidden states from its base model: {error}") from error
    if changed := watch.changed():
        raise ConfigError(refusal(type(parts.model).__name__, changed))
    leaves = leaves_of([logits])
    if id(hidden) not in leaves:
        raise ConfigError(f"the logits of {type(parts.model).__name__} pass no gradient on to its hidden states")
    return frozenset(used), frozenset(n for i, n in names.items() if i in leaves), int(logits.shape[-1])


@torch.no_grad()
def _fit(parts: ModelParts, output: nn.Module) -> tuple[float, float | None] | None:
    """(scale, cap) with which a plain matmul gives the model's own logits; None where none does. In fp64, with a small
    head of random values in the place of the model's."""
    width = parts.hidden_size
    generator = torch.Generator().manual_seed(0)
    small = nn.Linear(width, _PROBE_VOCAB, bias=getattr(output, "bias", None) is not None, dtype=torch.float64)
    for parameter in small.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    name = next(n for n, m in parts.model.named_modules() if m is output)
    shell = HeadShell(parts.model, parts.base_name)
    replace_module(shell.model, name, small)
    hidden = torch.randn(1, 5, width, generator=generator, dtype=torch.float64)

    def logits(factor: float) -> tuple[Tensor, Tensor]:
        x = hidden * factor
        return shell(x).double(), F.linear(x, small.weight, small.bias)

    own, plain = logits(1.0)
    if torch.equal(own, plain):
        return 1.0, None
    # a cap leaves small logits as they are, and determines large ones
    for parameter in small.parameters():
        parameter.mul_(1e-6)
    own, plain = logits(1.0)
    scale = float(f"{float((own / plain).median()):.10g}")
    for parameter in small.parameters():
        parameter.mul_(1e12)
    own, plain = logits(1.0)
    if torch.allclose(own, scale * plain, rtol=1e-6):
        return scale, None
    cap = float(own.abs().max())
    for parameter in small.parameters():
        parameter.mul_(1e-6 * cap / (scale * width**0.5))
    own, plain = logits(1.0)
    if torch.allclose(own, cap * torch.tanh(scale * plain / cap), rtol=1e-5):
        return scale, cap
    return None
