"""The held-out loss and accuracy of an engine."""

import math
from typing import TYPE_CHECKING

from megatrain.training.stop import Stop

if TYPE_CHECKING:
    from megatrain.data import Loader
    from megatrain.engine.engine import Engine
    from megatrain.engine.transactions import EvalOutput


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
