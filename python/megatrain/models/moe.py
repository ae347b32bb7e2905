"""The router's auxiliary loss of a mixture of experts, which keeps its experts evenly used (Switch Transformer,
arXiv 2101.03961, equations 4 to 6).

Stock transformers adds it where the model's configuration has `output_router_logits`: router_aux_loss_coef times
num_experts times the sum over experts of f_e P_e, where f_e is how often a token chose expert e and P_e the mean of its
probability (`load_balancing_loss_func`). Both are means over layers and tokens, so the term is not a sum over tokens
and depends on the set of tokens. Here the set is *all tokens of the optimizer step*, without padding, over all layers:
the numbers are those of stock transformers on the step as one batch, however it is split into micro-batches.

It can be streamed because f_e, which counts choices, has no gradient, and P_e is linear: each layer sums its
probabilities within its own graph, the counts of all layers are known when forward ends, and the gradient of each such
sum is then one number per expert.
"""

import collections
import dataclasses
import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatrain.errors import ConfigError
from megatrain.models.lm_head import HeadShell
from megatrain.models.support import ModelParts

log: logging.Logger = logging.getLogger(__name__)

_TOLERANCE = 1e-5
_PROBE = (2, 6)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RouterLoss:
    """The auxiliary loss of one model."""

    coefficient: float
    """Factor with which the term is added to the loss."""
    num_experts: int
    top_k: int
    """Experts chosen per token."""

    def sums(self, logits: Tensor, counted: Tensor | None) -> Tensor:
        """(2, E) fp32 of one router's logits (tokens, E): the sum of probabilities, which has a gradient, and how often
        each expert is chosen. `counted` (tokens, 1) fp32 is 0 for padding and 1 elsewhere."""
        logits = logits.reshape(-1, self.num_experts)
        probabilities = torch.softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)
        chosen = torch.zeros_like(probabilities).scatter_(1, probabilities.detach().topk(self.top_k, -1).indices, 1.0)
        if counted is not None:
            probabilities, chosen = probabilities * counted, chosen * counted
        return torch.stack((probabilities.sum(0), chosen.sum(0)))

    def total(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """The term (0-d, without its coefficient), and the gradient (2, E) of coefficient times term with respect to
        `sums` (2, E), the sums over all routers and tokens. Both are fp64."""
        probabilities, chosen = sums.double()
        rows = chosen.sum() / self.top_k
        slope = self.num_experts * chosen / rows.square()
        return (slope * probabilities).sum(), torch.stack((self.coefficient * slope, torch.zeros_like(slope)))

    def kept_bytes(self, tokens: int) -> int:
        """Bytes that a layer keeps for its backward: fp32 probabilities."""
        return 4 * tokens * self.num_experts


class RoutedLayer(nn.Module):
    """A decoder layer that also returns the sums of its routers."""

    def __init__(self, layer: nn.Module, router: RouterLoss, gates: Iterable[tuple[str, int]]) -> None:
        """`gates` are those of `find_gates` for the layer, whose modules must not be shared with another layer."""
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
        """The layer's own output, and the (2, E) sums over its tokens. `counted` is as for `RouterLoss.sums`."""
        self._seen = []
        output = self.layer(hidden, *args, **kwargs)
        seen, self._seen = self._seen, None
        sums = self._router.sums(seen[0], counted)
        for logits in seen[1:]:
            sums = sums + self._router.sums(logits, counted)
        return output, sums


Gates = tuple[tuple[str, int], ...]
"""Modules of a layer, by name, whose output holds router logits, and the index of the logits in that output."""


def find_gates(parts: ModelParts, layer: int) -> Gates:
    """The routers of a layer, as stock transformers records them (`_can_record_outputs`)."""
    specs: Any = (getattr(parts.base, "_can_record_outputs", None) or {}).get("router_logits") or []
    found: list[tuple[str, int]] = []
    for spec in specs if isinstance(specs, list) else [specs]:
        plain = isinstance(spec, (str, type))
        target = spec if isinstance(spec, type) else getattr(spec, "target_class", None)
        suffix = spec if isinstance(spec, str) else getattr(spec, "class_name", None)
        within = None if plain else spec.layer_name
        for path, module in parts.layers[layer].named_modules():
            full = f"{parts.layers_name}.{layer}.{path}"
            if within is not None and f".{within.strip('.')}." not in f"{full}.":
                continue
            if (target is not None and isinstance(module, target)) or (suffix is not None and full.endswith(suffix)):
                found.append((path, 1 if plain else spec.index))
    return tuple(found)


def find_router_loss(parts: ModelParts) -> tuple[RouterLoss | None, tuple[Gates, ...]]:
    """The term that a model's own forward adds to its loss, and the routers of each layer; None, and no routers, where
    its configuration does not ask for one.

    Raises ConfigError for a term that is not the one this module trains.
    """
    none: tuple[Gates, ...] = ((),) * len(parts.layers)
    if not any(getattr(c, "output_router_logits", False) for c in (parts.config, parts.text_config)):
        return None, none
    gates = tuple(find_gates(parts, layer) for layer in range(len(parts.layers)))
    loss = _fit(parts, gates)
    return (loss, gates) if loss is not None else (None, none)


def _fit(parts: ModelParts, gates: Sequence[Gates]) -> RouterLoss | None:
    name = type(parts.model).__name__
    layer = next((index for index, found in enumerate(gates) if found), 0)
    sizes = {
        size
        for path, _ in gates[layer]
        for p in parts.layers[layer].get_submodule(path).parameters()
        for size in p.shape
    }
    stock = _Stock(parts)
    for num_experts in sorted(sizes - {1}):
        try:
            plain, masked = (stock.term(num_experts, masked) for masked in (False, True))
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            continue  # not the number of experts
        if plain is None or masked is None:
            log.warning(
                "output_router_logits: %s adds no auxiliary loss of its router, so megatrain adds none either", name
            )
            return None
        for top_k in range(1, num_experts + 1):
            loss = RouterLoss(coefficient=_coefficient(parts, *plain), num_experts=num_experts, top_k=top_k)
            if stock.agrees(loss, plain[0], masked=False) and stock.agrees(loss, masked[0], masked=True):
                return loss if loss.coefficient else None
    raise ConfigError(
        f"output_router_logits: the router's auxiliary loss of {name} is not the one that can be taken over a whole "
        "step (experts times the sum of choices times probabilities over all layers); set it to false"
    )


class _Stock:
    """A model's own loss on random router logits, its base stubbed."""

    def __init__(self, parts: ModelParts) -> None:
        self._shell = HeadShell(parts.model, parts.base_name)
        # the loss is then what is added to the cross-entropy, and has a value although the logits are on meta
        cast("Any", self._shell.model).loss_function = lambda *_args, **_kwargs: torch.zeros((), dtype=torch.float64)
        self._hidden = torch.empty(*_PROBE, parts.hidden_size, dtype=parts.dtype, device="meta")
        self._mask = torch.ones(_PROBE, dtype=torch.int64)
        self._mask[0, :2] = 0

    @staticmethod
    def _logits(num_experts: int) -> tuple[Tensor, ...]:
        """Random router logits of two layers, (tokens, E) per layer."""
        generator = torch.Generator().manual_seed(0)
        tokens = math.prod(_PROBE)
        return tuple(torch.randn(tokens, num_experts, generator=generator) * scale for scale in (1.0, 2.0))

    @torch.no_grad()
    def term(self, num_experts: int, masked: bool) -> tuple[float, float] | None:
        """The term, and what is added to the loss for it; None where the model has no such term."""
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
        """Whether `loss` computes the model's own `term`."""
        counted = self._mask.reshape(-1, 1).float() if masked else None
        parts = [loss.sums(logits, counted) for logits in self._logits(loss.num_experts)]
        return math.isclose(float(loss.total(torch.stack(parts).double().sum(0))[0]), term, rel_tol=_TOLERANCE)


def _coefficient(parts: ModelParts, term: float, added: float) -> float:
    """The factor of the term: a float of the model or its configuration that equals it, since that is exact to the last
    digit, or the measured one."""
    found = added / term
    own = [v for holder in (parts.model, parts.text_config) for v in vars(holder).values() if isinstance(v, float)]
    return next((value for value in own if math.isclose(value, found, rel_tol=1e-6)), float(f"{found:.6g}"))
