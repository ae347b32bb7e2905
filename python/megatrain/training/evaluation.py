"""The held-out loss and accuracy of an engine."""

import dataclasses
import math
from typing import TYPE_CHECKING

from megatrain.training.stop import Stop

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from megatrain.data import Loader
    from megatrain.engine.engine import Engine
    from megatrain.engine.transactions import EvalOutput


@dataclasses.dataclass(frozen=True, slots=True)
class HeldOut:
    """Result of evaluating all held-out data of a run."""

    total: "EvalOutput"
    """Over all of it."""
    sets: "Mapping[str, EvalOutput]"
    """Of each set by its name; empty where `data.eval` is one set without a name."""

    def deciding(self, best: str | None) -> float:
        """The loss by which the best step is chosen: that of the set `best`; None: of all."""
        return (self.total if best is None else self.sets[best]).loss


def evaluate_sets(engine: "Engine", loaders: "Mapping[str, Loader]", stop: Stop | None = None) -> HeldOut | None:
    """Means over each set of held-out data and over all of them together; None when a stop request cut the evaluation
    off. `loaders`: by name of the set; the only one may be "", which has no name."""
    found = {}
    for name, loader in loaders.items():
        one = evaluate(engine, loader, stop)
        if one is None:
            return None
        found[name] = one
    return HeldOut(_together([*found.values()]), {name: one for name, one in found.items() if name})


def _together(found: "Sequence[EvalOutput]") -> "EvalOutput":
    """The means over all tokens of several sets."""
    from megatrain.engine.transactions import EvalOutput

    if len(found) == 1:
        return found[0]
    some = [one for one in found if one.num_tokens]
    weights = [one.num_tokens if one.total_weight is None else one.total_weight for one in some]
    tokens, total = sum(one.num_tokens for one in some), math.fsum(weights)
    if not some:
        return EvalOutput(loss=math.nan, accuracy=math.nan, num_tokens=0)
    return EvalOutput(
        loss=math.fsum(one.loss * weight for one, weight in zip(some, weights, strict=True)) / total,
        accuracy=math.fsum(one.accuracy * weight for one, weight in zip(some, weights, strict=True)) / total,
        num_tokens=tokens,
        total_weight=total if any(one.total_weight is not None for one in some) else None,
    )


def evaluate(engine: "Engine", loader: "Loader", stop: Stop | None = None) -> "EvalOutput | None":
    """Means over the supervised tokens of a loader's held-out batches, weighted where their rows have weights; None
    when a stop request cut the evaluation off. NaN where no token is supervised."""
    from megatrain.engine.transactions import EvalOutput

    loss, correct, tokens, total, weighted = 0.0, 0.0, 0, 0.0, False
    for batch in loader.eval_batches():
        if stop is not None and stop.requested:
            return None
        if batch.num_supervised:
            found = engine.evaluate_metrics(batch.micro_batches)
            weight = batch.num_supervised if found.total_weight is None else found.total_weight
            loss += found.loss * weight
            correct += found.accuracy * weight
            tokens += batch.num_supervised
            total += weight
            weighted = weighted or found.total_weight is not None
    if not tokens:
        return EvalOutput(loss=math.nan, accuracy=math.nan, num_tokens=0)
    return EvalOutput(
        loss=loss / total, accuracy=correct / total, num_tokens=tokens, total_weight=total if weighted else None
    )
