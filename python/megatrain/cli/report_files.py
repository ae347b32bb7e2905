"""The files of a run that a report is drawn from, each value checked for its type: another program, or somebody by
hand, may have changed them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatrain.errors import ConfigError
from megatrain.training import run_dir

NUMBER = "a number"
NUMBER_OR_NULL = "a number or null"
WHOLE = "a whole number from 0 on"
TEXT = "text"

Kind = str | list[Any] | tuple[Any, ...] | dict[str, Any]
"""What a value must be: one of the words above; a list of one kind, for any number of it; a tuple, for as many as it
has; a mapping, of kinds by key, for those of its keys that are there (`*`: any other key)."""

_SCORES: Kind = {"*": {"loss": NUMBER_OR_NULL}}
_RECORD: Kind = {
    "step": WHOLE,
    **dict.fromkeys(("loss", "grad_norm", "lr", "tokens", "step_s", "tokens_per_s"), NUMBER_OR_NULL),
    **dict.fromkeys(("eval_loss", "eval_loss_before", "host_peak_bytes", "gpu_peak_bytes"), NUMBER_OR_NULL),
    "eval_sets": _SCORES,
    "eval_sets_before": _SCORES,
    "lanes": {"*": NUMBER},
    "samples": [TEXT],
}
_PLAN: Kind = {"items": [{"what": TEXT, "tier": TEXT, "bytes": NUMBER}]}
_SET: Kind = {
    **dict.fromkeys(("num_rows", "num_tokens", "num_supervised", "num_sequences", "seq_len", "padding"), NUMBER),
    "lengths": {"*": NUMBER},
    "weights": {"*": NUMBER},
    "histogram": [(WHOLE, WHOLE, WHOLE)],
    "dropped": [(TEXT, NUMBER, TEXT)],
    "formats": [TEXT],
    "notes": [TEXT],
}
_DATA: Kind = {"train": _SET, "eval": _SET, "eval_sets": {"*": _SET}}

_LARGEST = 1e300
"""No number of a run is larger; an infinite one or NaN is written as null."""


def records(folder: Path) -> list[dict[str, Any]]:
    """The steps of a run in `metrics.jsonl`; empty where there is none. Raises ConfigError for a value of a wrong
    type, with its line."""
    found = []
    for number, record in run_dir.numbered_metrics(folder):
        record = {key: value for key, value in record.items() if value is not None or key not in _HOLDERS}
        path = folder / run_dir.METRICS
        if "step" not in record:
            raise ConfigError(f"{path}, line {number} has no step; remove the line")
        _check(record, _RECORD, f"{path}, line {number}: ", "", "remove the line")
        found.append(record)
    return found


_HOLDERS = ("eval_sets", "eval_sets_before", "lanes", "samples")
"""Keys of a record that null leaves out."""


def plan(folder: Path) -> dict[str, Any]:
    """`plan.json` of a run; empty where there is none. Raises ConfigError for a value of a wrong type."""
    return _file(folder / run_dir.PLAN, _PLAN)


def data(folder: Path) -> dict[str, Any]:
    """`data.json` of a run; the rest as for `plan`."""
    return _file(folder / run_dir.DATA, _DATA)


def text(path: Path) -> str:
    """What is in a file; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _file(path: Path, kind: Kind) -> dict[str, Any]:
    try:
        found = json.loads(text(path) or "{}")
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    known = _without_null(found)
    _check(known, kind, f"{path}: ", "", "remove the file, and the report is without it")
    return known


def _without_null(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_null(value) if isinstance(value, dict) else value
        for key, value in tree.items()
        if value is not None
    }


def _check(value: Any, kind: Kind, where: str, key: str, remedy: str) -> None:
    """Raises ConfigError for a value of another kind, or for the first one in it that is."""
    if isinstance(kind, str):
        fits, words = _is(value, kind), kind
    elif isinstance(kind, dict):
        fits, words = isinstance(value, Mapping), "a mapping"
    else:
        fits, words = isinstance(value, list), "a list"
        if fits and isinstance(kind, tuple):
            fits, words = len(value) == len(kind), f"a list of {len(kind)}"
    if not fits:
        shown = repr(value)
        raise ConfigError(
            f"{where}{key or 'what it holds'} is {shown if len(shown) <= _SHOWN else shown[:_SHOWN] + '…'}, not "
            f"{words}; {remedy}"
        )
    if isinstance(kind, dict):
        for name, part in value.items():
            if (of := kind.get(name, kind.get("*"))) is not None:
                _check(part, of, where, f"{key}.{name}" if key else name, remedy)
    elif not isinstance(kind, str):
        kinds = [kind[0]] * len(value) if isinstance(kind, list) else kind
        for index, (part, of) in enumerate(zip(value, kinds, strict=True)):
            _check(part, of, where, f"{key}[{index}]", remedy)


_SHOWN = 60
"""Characters of a value in a message."""


def _is(value: Any, kind: str) -> bool:
    if kind == TEXT:
        return isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value is None and kind == NUMBER_OR_NULL
    return -_LARGEST < value < _LARGEST and (kind != WHOLE or (isinstance(value, int) and value >= 0))
