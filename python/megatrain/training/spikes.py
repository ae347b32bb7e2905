"""Flags steps whose loss or gradient norm jumps far above those of the steps before it.

The rule is the modified z-score of Iglewicz and Hoaglin (How to Detect and Handle Outliers, 1993): the distance from
the median in units of the median absolute deviation, which a few outliers do not move.
"""

import collections
import math
import statistics

from megatrain.training.metrics import RECENT

_LEAST = 16
"""Steps before the first comparison."""
_SCORE = 10.0
"""Modified z-scores above this are spikes. 3.5 is the textbook's; losses of small batches often pass it."""
_RATIO = 1.2
"""A spike is also this many times the median, so that a nearly constant series does not flag its own noise."""


class SpikeDetector:
    """Compares each value of one series with the median of its last `metrics.RECENT`."""

    def __init__(self) -> None:
        self._values: collections.deque[float] = collections.deque(maxlen=RECENT)

    def add(self, value: float | None) -> float | None:
        """Adds a step's value. Returns the median of the steps before it when the value is a spike, else None. Values
        that are not finite, or None, are left out."""
        if value is None or not math.isfinite(value):
            return None
        median = self._spike_over(value)
        self._values.append(value)
        return median

    def _spike_over(self, value: float) -> float | None:
        if len(self._values) < _LEAST:
            return None
        median = statistics.median(self._values)
        deviation = statistics.median(abs(other - median) for other in self._values)
        # 0.6745: the median absolute deviation of a normal distribution in standard deviations.
        far = 0.6745 * (value - median) > _SCORE * deviation
        return median if far and value > _RATIO * median else None


class StepSpikes:
    """The two series of a run that are watched: loss and gradient norm."""

    def __init__(self) -> None:
        self._series = {"loss": SpikeDetector(), "gradient norm": SpikeDetector()}

    def add(self, loss: float | None, norm: float | None) -> list[tuple[str, float, float]]:
        """Adds a step. Returns (name, value, median before) of each series that spikes."""
        values = {"loss": loss, "gradient norm": norm}
        found = [(name, value, self._series[name].add(value)) for name, value in values.items()]
        return [(name, value, usual) for name, value, usual in found if value is not None and usual is not None]
