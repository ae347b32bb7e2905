"""Learning-rate schedules: a factor of the base rate for each step, counted from 1. Pure arithmetic, no torch.

Cosine: SGDR (Loshchilov and Hutter, arXiv 1608.03983), without restarts. `wsd`, warm-up, stable, decay: MiniCPM
(arXiv 2404.06395).
"""

import dataclasses
import math

NAMES = ("cosine", "linear", "constant", "wsd")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """`factor(k)` for step k in 1…total: it rises as k/W over W warm-up steps, then falls as `name` says."""

    name: str = "cosine"
    warmup: float = 0.03
    """Below 1: a fraction of all steps. From 1 on: a number of steps."""
    min_lr: float = 0.0
    """The rate at the end of the decay: absolute, like `train.lr`, not a factor."""
    total: int = 1
    decay: float = 0.2
    """`wsd` only: over how much of the end the rate falls; below 1 a fraction of all steps, from 1 on a number."""

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"schedule.name is {self.name!r}; it must be one of {', '.join(NAMES)}")
        if self.total < 1:
            raise ValueError(f"a schedule needs at least 1 step, not {self.total}")
        for key in ("warmup", "decay", "min_lr"):
            value = getattr(self, key)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"schedule.{key} is {value}; it must be 0 or more")

    @property
    def warmup_steps(self) -> int:
        """W. A fraction is rounded up, so that a warm-up above 0 is at least one step."""
        return min(self.total, _steps(self.warmup, self.total))

    def factor(self, step: int) -> float:
        """In 0…1. During warm-up a factor of the base rate, later of the range from `min_lr` to the base rate."""
        warm = self.warmup_steps
        if step <= warm:
            return step / warm
        # The last step of a decaying schedule ends one notch above the floor: it still trains.
        progress = min(1.0, (step - warm - 1) / max(1, self.total - warm))
        if self.name == "constant":
            return 1.0
        if self.name == "linear":
            return 1.0 - progress
        if self.name == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        falling = max(1, min(self.total - warm, _steps(self.decay, self.total)))
        return min(1.0, max(0.0, (self.total - step + 1) / falling))

    def lr(self, step: int, base: float) -> float:
        """The rate at `step` (from 1) for a base rate: base·k/W during warm-up, never below `min_lr` after it."""
        factor = self.factor(step)
        if step <= self.warmup_steps:
            return base * factor
        floor = min(self.min_lr, base)
        return floor + (base - floor) * factor


def _steps(amount: float, total: int) -> int:
    # 0.07 of 100 are 7, though their product is a little more in floating point
    return math.ceil(amount * total * (1 - 1e-12)) if amount < 1 else round(amount)
