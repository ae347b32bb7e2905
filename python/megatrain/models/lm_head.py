"""What a model does with the output of its base: which weight the logits come from, how they are scaled and capped.

Found by comparing the model's own forward, its base stubbed, with a plain matmul; a head that is something else keeps
its own forward and autograd.
"""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatrain.errors import ConfigError
from megatrain.models.recorder import EmbeddingCalls, copy_without, replace_module

if TYPE_CHECKING:
    from megatrain.models.decoder import Decoder

_PROBE_VOCAB = 7
_TOLERANCE = 1e-9


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeadKind:
    """How logits are made from the base's output."""

    plain: bool
    """Whether logits are `softcap(logit_scale * (hidden @ weight.T + bias))`; else the model's own forward runs."""
    weight: str | None
    """Name of the (V, H) weight; the embedding's where tied. None for a head that is not plain."""
    bias: str | None
    logit_scale: float
    softcap: float | None
    vocab: int
    """Logits a token."""
    used: frozenset[str]
    """Parameters outside the base that the head uses, tied ones by their first name."""


class HiddenStates(nn.Module):
    """Stands for a model's base: returns the hidden states, and the router logits of its layers, that it was given."""

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
    """The output of a base of which only the hidden states exist; any other field reads as None."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class HiddenOnly(BaseModelOutputWithPast):
        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

    return HiddenOnly


class HeadShell:
    """The model's own forward on hidden states, its base stubbed. Shares the head's modules with `model`."""

    def __init__(self, model: nn.Module, base_name: str) -> None:
        self.base = HiddenStates()
        self.model = copy_without(model, model.get_submodule(base_name))
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


def probe_head(decoder: "Decoder") -> HeadKind:
    """Tells what kind of head a model has. Raises ConfigError when it has none."""
    model: Any = decoder.model
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if output is None:
        raise ConfigError(f"{type(model).__name__} has no language-model head")
    names = {id(p): name for name, p in model.named_parameters()}
    used, vocab = _used(decoder, names)
    weight, bias = getattr(output, "weight", None), getattr(output, "bias", None)
    fitted = None
    if isinstance(weight, Tensor) and used <= {names.get(id(weight)), names.get(id(bias))}:
        fitted = _fit(decoder, output)
    if fitted is None:
        return HeadKind(plain=False, weight=None, bias=None, logit_scale=1.0, softcap=None, vocab=vocab, used=used)
    return HeadKind(
        plain=True,
        weight=names[id(weight)],
        bias=names[id(bias)] if bias is not None else None,
        logit_scale=fitted[0],
        softcap=fitted[1],
        vocab=vocab,
        used=used,
    )


def _used(decoder: "Decoder", names: dict[int, str]) -> tuple[frozenset[str], int]:
    """Which parameters the head touches, and how many logits it makes; on meta, so that size does not matter."""
    used: set[str] = set()

    def seen(tensor: Tensor) -> None:
        if id(tensor) in names:
            used.add(names[id(tensor)])

    def answer(*_: Any) -> Tensor:
        raise ConfigError(f"{type(decoder.model).__name__} looks up an embedding in its head")

    hidden = torch.empty(1, 2, decoder.hidden_size, dtype=decoder.dtype, device="meta")
    try:
        with torch.no_grad(), EmbeddingCalls(answer, seen):
            logits = HeadShell(decoder.model, decoder.base_name)(hidden)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        name = type(decoder.model).__name__
        raise ConfigError(f"{name} asks more of its base than hidden states: {error}") from error
    return frozenset(used), int(logits.shape[-1])


@torch.no_grad()
def _fit(decoder: "Decoder", output: nn.Module) -> tuple[float, float | None] | None:
    """Scale and cap with which a plain matmul gives the model's own logits; None where nothing does."""
    width = decoder.hidden_size
    generator = torch.Generator().manual_seed(0)
    small = nn.Linear(width, _PROBE_VOCAB, bias=getattr(output, "bias", None) is not None, dtype=torch.float64)
    for parameter in small.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    name = next(n for n, m in decoder.model.named_modules() if m is output)
    shell = HeadShell(decoder.model, decoder.base_name)
    replace_module(shell.model, name, small)
    hidden = torch.randn(1, 5, width, generator=generator, dtype=torch.float64)

    def logits(factor: float) -> tuple[Tensor, Tensor]:
        x = hidden * factor
        return shell(x).double(), F.linear(x, small.weight, small.bias)

    own, plain = logits(1.0)
    if torch.equal(own, plain):
        return 1.0, None
    # a cap does nothing to small logits, and everything to large ones
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
