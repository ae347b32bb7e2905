"""Values that YAML has no type for: sizes (`12GiB`) and durations (`30min`)."""

import dataclasses
import re
from typing import Any

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_SIZE_UNITS: dict[str, int] = {"B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}
_DURATION_UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400}


_MOST_BYTES = 1 << 56
"""As the core's planner has it."""


def parse_size(text: str | int, most: float = _MOST_BYTES) -> int:
    """Bytes in `12GiB` (1024³ each), `80GB` (1000³ each), or a plain number of bytes. Raises ValueError, also for more
    than `most`."""
    if isinstance(text, int):
        if text < 0:
            raise ValueError(f"a size cannot be negative: {text}")
        return _size(text, text, most)
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write a number and a unit, such as 12GiB")
    number, unit = match.groups()
    scale = {name.lower(): scale for name, scale in _SIZE_UNITS.items()}.get(unit.lower() or "b")
    if scale is None:
        raise ValueError(f"{text!r}: unknown unit {unit!r}; write one of {', '.join(_SIZE_UNITS)}")
    return _size(float(number) * scale + 0.5, text, most)


def _size(size: float, text: str | int, most: float) -> int:
    if size > most:
        raise ValueError(f"{text!r} is more than any machine has; write at most {most / (1 << 40):g}TiB")
    return int(size)


def format_size(size: int) -> str | int:
    """The shortest form that `parse_size` turns back into exactly the same number of bytes."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % _SIZE_UNITS[unit] == 0:
            return f"{size // _SIZE_UNITS[unit]}{unit}"
    return size


@dataclasses.dataclass(frozen=True, slots=True)
class Duration:
    """A span of wall time, as opposed to a number of steps."""

    seconds: float

    @classmethod
    def parse(cls, text: str) -> "Duration":
        """Reads `90s`, `30min`, `1.5h`, `1d`. Raises ValueError."""
        match = _SIZE.fullmatch(text)
        unit = match and _DURATION_UNITS.get(match[2].lower())
        if match is None or unit is None:
            raise ValueError(f"{text!r} is not a duration; write a number and one of {', '.join(_DURATION_UNITS)}")
        seconds = float(match[1]) * unit
        if seconds <= 0:
            raise ValueError(f"{text!r}: a duration must be longer than 0")
        return cls(seconds)

    def __str__(self) -> str:
        for unit, scale in reversed(_DURATION_UNITS.items()):
            if self.seconds % scale == 0:
                return f"{int(self.seconds // scale)}{unit}"
        return f"{self.seconds!r}s"


def is_count(value: Any, least: int) -> bool:
    """Whether `value` is a whole number, `least` or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
