"""Whether the loss that a model's own forward computes is the one that is trained: the cross-entropy of the next token.

A class can add to its loss in its forward: PEFT's AdaLoRA adds a penalty of its adapters, a subclass may add one of
weights or logits. The engine computes the loss itself, from hidden states alone, and would leave such a term out. It is
found by running the model's own forward with labels, its base stubbed. On meta: the loss must read no weight that the
logits do not read. And, for a plain head, with a small head in the place of the model's: the loss must have the value
of the cross-entropy. Of a head that is not plain only what the loss reads is known.
"""

import inspect
import logging
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatrain.models.autograd_graph import leaves_of
from megatrain.models.lm_head import HeadKind, HeadShell, HiddenStates
from megatrain.models.modules import copy_without, renew_parameters, replace_module
from megatrain.models.support import ModelParts
from megatrain.names import format_names

log: logging.Logger = logging.getLogger(__name__)

_TOLERANCE = 1e-5
_WIDTH = 7
"""Logits of the small head, which are repeated up to the size of the vocabulary."""
_TOKENS = 4
_DEFAULT_LOSS = "ForCausalLM"
"""What transformers takes, with a warning, for a class whose name does not say which loss it has (`loss_type`)."""


def find_other_loss(parts: ModelParts, head: HeadKind) -> str | None:
    """In what the loss of the model's own forward differs from the cross-entropy of the next token; None where it does
    not, or where the model computes none. The router's auxiliary loss is left out: `moe.py` has it.

    What could not be tried is a line in the log."""
    model = parts.model
    parameters = inspect.signature(type(model).forward).parameters.values()
    if not any(p.name == "labels" or p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    failure: Exception | None = None
    try:
        if found := _reads_more(parts):
            return found
    except Exception as error:  # a model's own forward may raise anything
        failure = error
    if head.plain:
        try:
            return _has_another_value(parts, head.vocab)
        except Exception as error:
            failure = failure or error
    if failure is not None:
        log.warning(
            "%s: its own forward could not be run with labels on stubs (%s), so it is unknown whether its loss is the "
            "one that is trained, the cross-entropy of the next token",
            type(model).__name__,
            " ".join(str(failure).split()) or type(failure).__name__,
        )
    return None


class _States(HiddenStates):
    """A base that has the hidden states of its layers too."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.hidden_states = (self.hidden, self.hidden)
        return output


class _LossShell(HeadShell):
    """The model's own forward with labels, as in training. Its base is stubbed, but has the modules of the model's."""

    def __init__(self, parts: ModelParts) -> None:
        super().__init__(parts.model, parts.base_name)
        self.base = _States()
        twin = copy_without(parts.base)
        for held in ("_modules", "_parameters", "_buffers"):
            object.__setattr__(self.base, held, getattr(twin, held))
        replace_module(self.model, parts.base_name, self.base)
        routed = any(getattr(c, "output_router_logits", False) for c in (parts.config, parts.text_config))
        self._without_router = {"output_router_logits": False} if routed else {}
        for module in self.model.modules():
            if getattr(module, "loss_type", "") is None:
                module.loss_type = _DEFAULT_LOSS  # type: ignore[assignment]
        self.model.train()

    def loss(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor | None, Tensor]:
        """The loss, None where the model has none, and the logits."""
        self.base.hidden = hidden
        try:
            output = self.model(input_ids=labels.clamp(min=0), labels=labels, use_cache=False, **self._without_router)
        finally:
            self.base.hidden = None
        logits = getattr(output, "logits", None)
        return getattr(output, "loss", None), self(hidden) if logits is None else logits


def _reads_more(parts: ModelParts) -> str | None:
    """On meta, so that sizes do not matter."""
    shell = _LossShell(parts)
    names = {id(parameter): name for name, parameter in parts.model.named_parameters()}
    names = {id(new): names[old] for old, new in renew_parameters(shell.model).items() if old in names}
    hidden = torch.empty(1, 2, parts.hidden_size, dtype=parts.dtype, device="meta", requires_grad=True)
    with torch.enable_grad():
        loss, logits = shell.loss(hidden, torch.zeros(1, 2, dtype=torch.int64, device="meta"))
    if loss is None:
        return None
    more = sorted(names[i] for i in leaves_of([loss]) - leaves_of([logits]) if i in names)
    return f"it reads {format_names(more)}, which the logits do not read" if more else None


class _SmallHead(nn.Linear):
    """Logits of a whole vocabulary, of few values that are repeated."""

    def __init__(self, width: int, vocab: int, bias: bool) -> None:
        super().__init__(width, _WIDTH, bias=bias, dtype=torch.float64)
        self.out_features = vocab

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden)[..., torch.arange(self.out_features) % _WIDTH]


@torch.no_grad()
def _has_another_value(parts: ModelParts, vocab: int) -> str | None:
    model: Any = parts.model
    output = model.get_output_embeddings()
    generator = torch.Generator().manual_seed(0)
    small = _SmallHead(parts.hidden_size, vocab, getattr(output, "bias", None) is not None)
    for parameter in small.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    shell = _LossShell(parts)
    replace_module(shell.model, next(name for name, module in model.named_modules() if module is output), small)
    hidden = torch.randn(1, _TOKENS, parts.hidden_size, generator=generator, dtype=torch.float64)
    labels = torch.randint(min(vocab, _WIDTH), (1, _TOKENS), generator=generator)
    loss, logits = shell.loss(hidden, labels)
    if loss is None:
        return None
    own, trained = float(loss), float(F.cross_entropy(logits[0, :-1].float(), labels[0, 1:]))
    if math.isclose(own, trained, rel_tol=_TOLERANCE):
        return None
    return f"it is {own:.6g} where that is {trained:.6g}, on random hidden states"
