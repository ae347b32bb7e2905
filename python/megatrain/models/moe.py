"""The router's auxiliary loss of a mixture of experts: what keeps its experts evenly used.

Stock transformers adds it where the model's configuration says `output_router_logits`: router_aux_loss_coef times
num_experts times the sum over experts of f_e P_e, where f_e is how often a token chose expert e and P_e the mean of its
probability. Both are means over layers and tokens, so the term is no sum over tokens and depends on which tokens it is
taken over. Here the set is *all tokens of the optimizer step*, padding left out, of all layers: the numbers are those
of stock transformers on the step as one batch, however it is split into micro-batches.

That can be streamed because f_e, which counts choices, has no gradient and P_e is linear: each layer sums its
probabilities within its own graph, the counts of all layers are known when forward ends, and the gradient of each such
sum is then one number an expert.
"""

import collections
import dataclasses
import logging
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from megatrain.errors import ConfigError
from megatrain.models.lm_head import HeadShell

if TYPE_CHECKING:
    from megatrain.models.decoder import Decoder

log = logging.getLogger(__name__)

_TOLERANCE = 1e-5
_PROBE = (2, 6)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RouterLoss:
    """The term as one model has it."""

    coefficient: float
    """What it is multiplied with when it is added to the loss."""
    num_experts: int
    top_k: int
    """Experts that a token chooses."""

    def sums(self, logits: Tensor, counted: Tensor | None) -> Tensor:
        """(2, E) fp32 of one router's logits (tokens, E): the sum of probabilities, which has a gradient, and how often
        each expert is chosen. `counted` (tokens, 1) fp32 is 0 for padding."""
        logits = logits.reshape(-1, self.num_experts)
        probabilities = torch.softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)
        chosen = torch.zeros_like(probabilities).scatter_(1, probabilities.detach().topk(self.top_k, -1).indices, 1.0)
        if counted is not None:
            probabilities, chosen = probabilities * counted, chosen * counted
        return torch.stack((probabilities.sum(0), chosen.sum(0)))

    def total(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """The term (0-d, without its coefficient) and the gradient (2, E) of coefficient times term, both fp64, of the
        `sums` (2, E) over all routers and tokens."""
        probabilities, chosen = sums.double()
        rows = chosen.sum() / self.top_k
        slope = self.num_experts * chosen / rows.square()
        return (slope * probabilities).sum(), torch.stack((self.coefficient * slope, torch.zeros_like(slope)))

    def kept_bytes(self, tokens: int) -> int:
        """What a layer keeps for it: fp32 probabilities."""
        return 4 * tokens * self.num_experts


class RoutedLayer(nn.Module):
    """A decoder layer that also returns the sums of its routers."""

    def __init__(self, layer: nn.Module, router: RouterLoss, gates: Iterable[tuple[str, int]]) -> None:
        """`gates` are as `gates_of` gives them; the layer's modules are its own, not shared with another."""
        super().__init__()
        self.layer = layer
        self._router = router
        self._seen: list[Tensor] | None = None
        for path, index in gates:
            gate = layer.get_submodule(path)
            # copies of a module share the dict of its hooks
            object.__setattr__(gate, "_forward_hooks", collections.OrderedDict(gate._forward_hooks))
            gate.register_forward_hook(lambda _m, _a, output, index=index: self._see(output, index))

    def _see(self, output: Any, index: int) -> None:
        if self._seen is not None:
            self._seen.append(output[index] if isinstance(output, tuple) else output)

    def forward(self, hidden: Tensor, counted: Tensor | None, *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
        """The layer's own output, and the (2, E) sums over its tokens."""
        self._seen = []
        output = self.layer(hidden, *args, **kwargs)
        seen, self._seen = self._seen, None
        sums = self._router.sums(seen[0], counted)
        for logits in seen[1:]:
            sums = sums + self._router.sums(logits, counted)
        return output, sums


def gates_of(decoder: "Decoder", layer: int) -> list[tuple[str, int]]:
    """Modules of a layer whose output holds router logits, and where in it: those that stock transformers records."""
    specs: Any = (getattr(decoder.base, "_can_record_outputs", None) or {}).get("router_logits") or []
    found: list[tuple[str, int]] = []
    for spec in specs if isinstance(specs, list) else [specs]:
        plain = isinstance(spec, (str, type))
        target = spec if isinstance(spec, type) else getattr(spec, "target_class", None)
        suffix = spec if isinstance(spec, str) else getattr(spec, "class_name", None)
        within = None if plain else spec.layer_name
        for path, module in decoder.layers[layer].named_modules():
            full = f"{decoder.layers_name}.{layer}.{path}"
            if within is not None and f".{within.strip('.')}." not in f"{full}.":
                continue
            if (target is not None and isinstance(module, target)) or (suffix is not None and full.endswith(suffix)):
                found.append((path, 1 if plain else spec.index))
    return found


def find_router_loss(decoder: "Decoder") -> RouterLoss | None:
    """The term that a model's own forward adds to its loss; None where its configuration does not ask for one.

    Raises ConfigError for a term that is not the one this module trains.
    """
    config = decoder.config
    if not any(getattr(c, "output_router_logits", False) for c in (config, decoder.text_config)):
        return None
    name = type(decoder.model).__name__
    layer, gates = next(((i, gates) for i in range(decoder.num_layers) if (gates := gates_of(decoder, i))), (0, []))
    sizes = {
        size for path, _ in gates for p in decoder.layers[layer].get_submodule(path).parameters() for size in p.shape
    }
    stock = _Stock(decoder)
    for num_experts in sorted(sizes - {1}):
        try:
            plain, hidden = (stock.term(num_experts, masked) for masked in (False, True))
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            continue  # not the number of experts
        if plain is None or hidden is None:
            log.warning("output_router_logits: %s adds no auxiliary loss of its router, so neither is one here", name)
            return None
        for top_k in range(1, num_experts + 1):
            loss = RouterLoss(coefficient=_coefficient(decoder, *plain), num_experts=num_experts, top_k=top_k)
            if stock.agrees(loss, plain[0], masked=False) and stock.agrees(loss, hidden[0], masked=True):
                return loss if loss.coefficient else None
    raise ConfigError(
        f"output_router_logits: the router's auxiliary loss of {name} is not the one that can be taken over a whole "
        "step (experts times the sum of choices times probabilities over all layers); set it to false"
    )


class _Stock:
    """A model's own loss on made-up router logits, its base stubbed."""

    def __init__(self, decoder: "Decoder") -> None:
        self._shell = HeadShell(decoder.model, decoder.base_name)
        # so that the loss is what is added to the cross-entropy, and has a value although the logits have none
        cast("Any", self._shell.model).loss_function = lambda *_args, **_kwargs: torch.zeros((), dtype=torch.float64)
        self._hidden = torch.empty(*_PROBE, decoder.hidden_size, dtype=decoder.dtype, device="meta")
        self._mask = torch.ones(_PROBE, dtype=torch.int64)
        self._mask[0, :2] = 0

    @staticmethod
    def _logits(num_experts: int) -> tuple[Tensor, ...]:
        """Of two layers."""
        generator = torch.Generator().manual_seed(0)
        tokens = math.prod(_PROBE)
        return tuple(torch.randn(tokens, num_experts, generator=generator) * scale for scale in (1.0, 2.0))

    @torch.no_grad()
    def term(self, num_experts: int, masked: bool) -> tuple[float, float] | None:
        """The term, and what it adds to the loss; None where the model has no such term."""
        base, ids = self._shell.base, torch.zeros(_PROBE, dtype=torch.int64)
        base.hidden, base.router_logits = self._hidden, self._logits(num_experts)
        try:
            output = self._shell.model(
                input_ids=ids, labels=ids, attention_mask=self._mask if masked else None, use_cache=False
            )
        finally:
            base.hidden = base.router_logits = None
        term = getattr(output, "aux_loss", None)
        return (float(term), float(output.loss)) if term is not None else None

    def agrees(self, loss: RouterLoss, term: float, *, masked: bool) -> bool:
        """Whether `loss` is what the model computes."""
        counted = self._mask.reshape(-1, 1).float() if masked else None
        parts = [loss.sums(logits, counted) for logits in self._logits(loss.num_experts)]
        return math.isclose(float(loss.total(torch.stack(parts).double().sum(0))[0]), term, rel_tol=_TOLERANCE)


def _coefficient(decoder: "Decoder", term: float, added: float) -> float:
    """What the model multiplies its term with: a number of its own where one is that, to the last digit."""
    found = added / term
    own = [v for holder in (decoder.model, decoder.text_config) for v in vars(holder).values() if isinstance(v, float)]
    return next((value for value in own if math.isclose(value, found, rel_tol=1e-6)), float(f"{found:.6g}"))
