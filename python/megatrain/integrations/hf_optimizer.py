"""The optimizer that transformers' Trainer, its schedulers and its callbacks see: torch's interface to the engine's."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatrain.engine.engine import Engine
from megatrain.engine.optimizer import AdamW
from megatrain.errors import ConfigError

log: logging.Logger = logging.getLogger(__name__)


class EngineOptimizer(torch.optim.Optimizer):
    """`param_groups` as in `torch.optim.AdamW`, read at every step, so that whatever changes them (a scheduler, a
    callback) changes the next update. It has no state of its own: moments and counts are in the engine's checkpoints.

    `groups`: dicts with `params`, parameters of the engine's model, and `weight_decay`. Frozen parameters are left out.
    """

    def __init__(
        self,
        engine: Engine,
        groups: Sequence[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        self.engine = engine
        self._parameters = dict(engine.decoder.model.named_parameters())
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        trained = {name for name, tensor in engine.decoder.tensors.items() if tensor.role == "trainable"}
        self._names: list[list[str]] = []
        kept = []
        for group in groups:
            params = [p for p in group["params"] if names[id(p)] in trained]
            if params:
                kept.append({**group, "params": params})
                self._names.append([names[id(p)] for p in params])
        super().__init__(kept, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    def settings(self) -> AdamW:
        """The groups as they are now, in the engine's words. Raises ConfigError for parameters that were frozen, or
        made trainable, after the engine had been made."""
        self._check_frozen()
        groups: list[dict[str, Any]] = [
            {
                "params": names,
                "lr": float(group["lr"]),
                "betas": tuple(group["betas"]),
                "eps": float(group["eps"]),
                "weight_decay": float(group["weight_decay"]),
            }
            for names, group in zip(self._names, self.param_groups, strict=True)
        ]
        return AdamW(lr=groups[0]["lr"] if groups else 0.0, groups=groups)

    def _check_frozen(self) -> None:
        tensors = self.engine.decoder.tensors
        for wanted, done, instead in (
            (
                False,
                "frozen",
                "freeze before the Trainer and its engine are made, or name them in freeze of engine_options",
            ),
            (True, "made trainable", "set requires_grad before the Trainer and its engine are made"),
        ):
            changed = [
                name
                for name, parameter in self._parameters.items()
                if name in tensors
                and parameter.requires_grad == wanted
                and (tensors[name].role == "trainable") != wanted
            ]
            if changed:
                shown = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
                raise ConfigError(
                    f"requires_grad is {wanted} for {shown}: {done} after the engine had decided what it trains; "
                    f"{instead}"
                )

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Applies the gradients that wait in the engine. Raises ConfigError where none do, and for a closure."""
        if closure is not None:
            raise ConfigError(
                "the engine's optimizer takes no closure: gradients are formed by engine.forward_backward"
            )
        self.engine.set_optimizer(self.settings())
        out = self.engine.optimizer_step()
        if out.skipped:
            log.warning("step %d changed nothing: %s", self.engine.num_steps, out.reason)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002 (torch's signature)
        """Drops the gradients that wait in the engine."""
        self.engine.zero_grad()
