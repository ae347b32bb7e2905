"""What may differ between a run and the request to go on with it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from megatrain.config.config import Config

# Identity: another value would be another run. Longest prefix decides.
_KINDS = {
    "model": "identity",
    "model.freeze": "course",
    "model.trust_remote_code": "place",
    "data": "identity",
    "data.eval": "course",
    "data.unused": "place",  # it refuses rows or lets them pass, and changes none
    "data.workers": "place",
    "data.cache": "place",
    "train": "course",
    "train.batch_tokens": "identity",
    "train.batch_size": "identity",
    "train.precision": "identity",
    "train.grad_precision": "identity",
    "train.matmul": "identity",
    "train.moments": "identity",
    "train.master": "identity",
    "train.seed": "identity",
    "eval": "course",
    "memory": "place",
    "plan": "place",
    "device": "place",
    "output": "place",
}


class Change(NamedTuple):
    """One setting that differs."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {_text(self.old)} → {_text(self.new)}"


def diff(old: Config, new: Config) -> tuple[list[Change], list[Change], list[Change]]:
    """Settings that differ: (identity, course, place).

    Identity settings make a run what it is and may not change; course settings may, from the next step on; place
    settings never show in the numbers.
    """
    changes: dict[str, list[Change]] = {"identity": [], "course": [], "place": []}
    before, after = _flat(old.to_dict()), _flat(new.to_dict())
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            changes[kind(key)].append(Change(key, before.get(key), after.get(key)))
    return changes["identity"], changes["course"], changes["place"]


def kind(key: str) -> str:
    """`identity`, `course` or `place` of a dotted setting."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        if found := _KINDS.get(".".join(parts[:length])):
            return found
    raise KeyError(key)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            for index, item in enumerate(value):
                flat.update(_flat({str(index): item}, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def _text(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
