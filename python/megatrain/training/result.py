"""How a run ended, for whoever started it."""

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """How a run ended."""

    step: int
    """Optimizer steps done, earlier parts of the run included."""
    total_steps: int
    loss: float | None
    """Training loss of the last step; None when no step was taken."""
    eval_loss: float | None
    """The latest held-out loss. None when a stop cut off the evaluation after the last step: an earlier loss is not
    that of the trained weights."""
    stopped: str
    """What stopped the run, such as SIGTERM; empty when it reached its end."""
    checkpoint: Path | None
    """The newest checkpoint."""
    export: Path | None
    """The Hugging Face folder written at the end. It holds the weights of step `step`."""
    best_step: int | None = None
    """The step of the lowest held-out loss (of the set that `eval.best` names), 0 for the untrained model; None when
    nothing was evaluated."""
    eval_sets: dict[str, float] = dataclasses.field(default_factory=dict)
    """The latest loss of each held-out set by its name, where there are several; empty where `eval_loss` is None."""
    best_checkpoint: Path | None = None
    """The checkpoint of `best_step`, where it exists and is not the last step's."""
