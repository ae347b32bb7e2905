"""How tokens, rates and peaks are counted, here and in every published figure.

Tokens a second are real tokens, padding excluded. GiB is 1024 MiB. Peak host memory is the process's measured maximum,
pinned pages included. Model FLOPs are counted in `models/flops.py`.
"""

import collections
import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any


@dataclasses.dataclass(kw_only=True, slots=True)
class StepRecord:
    """One line of `metrics.jsonl`."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    """Real tokens of this step, padding excluded."""
    num_tokens: int
    """Supervised tokens of this step: what the loss is divided by, where `extra` has no `total_weight`."""
    step_s: float = 0.0
    tokens_per_s: float = 0.0
    model_tflops: float = 0.0
    clip: float = 1.0
    skipped: bool = False
    lanes: dict[str, float] = dataclasses.field(default_factory=dict)
    """Seconds each lane was busy."""
    bound: str = ""
    """The lane that was busy longest, or `launching` (see `Stats`)."""
    of_limit: float | None = None
    """What part of the step that lane would take at the machine's measured rates; None where none were measured."""
    host_peak_bytes: int = 0
    gpu_peak_bytes: int = 0
    epoch: float = 0.0
    rows: list[Any] = dataclasses.field(default_factory=list)
    """Ids of the rows in this step, where the loader gives them."""
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """What is known of the step, without what is empty."""
        fields = dataclasses.asdict(self)
        extra = fields.pop("extra")
        return {key: value for key, value in {**fields, **extra}.items() if value not in ("", [], {}, None)}

    @property
    def bound_by(self) -> str:
        """What bounds the step, in words; empty where nothing was measured."""
        share = f", {self.of_limit:.0%} of its measured rate" if self.of_limit is not None else ""
        return f"bound by {self.bound}{share}" if self.bound else ""

    def as_json(self) -> str:
        """One line of JSON. Numbers that JSON cannot express (NaN, infinity) are written as null."""
        return dumps(self.as_dict())


RECENT = 64
"""Steps that a new step's loss and gradient norm are compared with (see `spikes`)."""

_LAST_PART = 10
"""The end of a run is its last tenth of steps,"""
_LAST_MOST = 20
"""and at most this many steps."""


def without_progress(losses: list[float | None]) -> str:
    """A sentence when a run has learnt nothing, else empty. It has learnt nothing when the mean loss of its last tenth
    of steps (20 at most) is not below the loss of its first step, which is that of the initial weights. A loss of None
    was not finite."""
    known = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    if len(losses) < 2 or not known:
        return ""
    last = known[1:][-min(_LAST_MOST, max(1, len(losses) // _LAST_PART)) :]
    end = sum(last) / len(last) if last else math.inf
    if end < known[0]:
        return ""
    shown = f"{end:.4f} in the last {len(last)} steps" if len(last) > 1 else f"{end:.4f} in the last step"
    return f"the loss has not fallen: {known[0]:.4f} in the first step, {shown}; train.lr may be too high, or too low"


def dumps(document: Any) -> str:
    """JSON in one line, with numbers that are not finite as null (strict readers refuse NaN)."""
    return json.dumps(_finite(document), separators=(", ", ": "))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return value


class Throughput:
    """Tokens per second, averaged over the last few steps so that one slow step does not dominate."""

    def __init__(self, window: int = 10) -> None:
        self._steps: collections.deque[tuple[int, float]] = collections.deque(maxlen=window)
        self._last = time.perf_counter()

    def restart(self) -> None:
        """Leaves out the time since the last step (an evaluation, a save)."""
        self._last = time.perf_counter()

    def add(self, tokens: int) -> float:
        """Counts a finished step; returns its seconds."""
        now = time.perf_counter()
        seconds = now - self._last
        self._last = now
        self._steps.append((tokens, seconds))
        return seconds

    @property
    def tokens_per_s(self) -> float:
        """Mean over the window."""
        seconds = sum(seconds for _, seconds in self._steps)
        return sum(tokens for tokens, _ in self._steps) / seconds if seconds > 0 else 0.0

    @property
    def step_s(self) -> float:
        """Mean seconds per step over the window."""
        return sum(seconds for _, seconds in self._steps) / len(self._steps) if self._steps else 0.0


def host_peak_bytes(proc: Path = Path("/proc")) -> int:
    """The most resident memory this process has had, locked and registered pages included (VmHWM)."""
    return _status_bytes(proc, ("VmHWM",))


def host_anonymous_bytes(proc: Path = Path("/proc")) -> int:
    """Resident memory of this process that is not a mapped file, registered pages included (RssAnon and RssShmem)."""
    return _status_bytes(proc, ("RssAnon", "RssShmem"))


def _status_bytes(proc: Path, keys: tuple[str, ...]) -> int:
    """The sum of some lines of this process's /proc status; 0 where there is none."""
    try:
        lines = [line.split() for line in (proc / "self/status").read_text().splitlines()]
    except OSError:
        return 0
    return sum(int(words[1]) * 1024 for words in lines if words and words[0].rstrip(":") in keys)


def gpu_peak_bytes(engine_bytes: int = 0) -> int:
    """The most device memory used: torch's peak, plus what the engine allocated at the start."""
    import sys

    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.max_memory_allocated()) + engine_bytes


def duration(seconds: float) -> str:
    """Seconds as `3 h 05 min`, `4 min 10 s` or `12 s`."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
