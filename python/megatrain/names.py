"""Names: which one was meant, which parameters a pattern selects, and how many of them fit into a line of a message."""

import difflib
import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any

from megatrain.errors import ConfigError

_MOST_KNOWN = 8
"""Most names that `suggest` lists."""

_OTHER_NAMES = {"learning_rate": "lr", "wd": "weight_decay", "gradient_clipping": "max_grad_norm"}
"""What arguments are called elsewhere."""


def nearest(name: object, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of `known` that is most like `name`; None where none is (`difflib`: 1 is equal, 0 has nothing in
    common)."""
    known = list(known)
    if (ours := _OTHER_NAMES.get(str(name))) in known:
        return ours
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=cutoff)
    return close[0] if close else None


def suggest(name: object, known: Iterable[str]) -> str:
    """`did you mean …?` where one of `known` looks like `name`, else a list of them."""
    known = list(known)
    meant = nearest(name, known)
    shown = ", ".join(known[:_MOST_KNOWN]) + (", …" if len(known) > _MOST_KNOWN else "")
    return f"did you mean {meant}?" if meant else f"known are {shown}"


def patterns(name: str, given: Any) -> tuple[str, ...]:
    """One pattern of names, or several. Raises ConfigError for anything else."""
    found = (given,) if isinstance(given, str) else given
    if not isinstance(found, tuple | list) or not all(isinstance(one, str) for one in found):
        raise ConfigError(f"{name} must be a pattern of parameter names or a list of them, not {given!r}")
    return tuple(found)


def match(pattern: str, name: str) -> bool:
    """Whether a pattern of `freeze`, `no_decay` or `groups` means the parameter: `*`, `?` and `[…]` as in file names,
    over the whole Hugging Face name."""
    return fnmatch.fnmatchcase(name, pattern)


IGNORED = -100
"""Label of a token that is not supervised, as in `torch.nn.functional.cross_entropy`."""

_MOST_SHOWN = 4
"""Most names or patterns that a message lists."""


def format_names(names: Sequence[str]) -> str:
    """Parameters in a line, however many: those whose names differ in numbers alone are one pattern with its count,
    and while that leaves too many, those whose last components differ are one too."""
    parts = {name: ["*" if part.isdecimal() else part for part in name.split(".")] for name in names}
    longest = max(map(len, parts.values()), default=1)
    alike: dict[str, list[str]] = {}
    for depth in range(longest, min(longest, 2) - 1, -1):
        alike = {}
        for name, own in parts.items():
            alike.setdefault(".".join([*own[:depth], *["*"][: len(own) > depth]]), []).append(name)
        if len(alike) <= _MOST_SHOWN:
            break
    most = sorted(alike.items(), key=lambda group: -len(group[1]))[:_MOST_SHOWN]
    shown = [f"{pattern} ({len(group)})" if len(group) > 1 else group[0] for pattern, group in most]
    rest = len(parts) - sum(len(group) for _, group in most)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")
