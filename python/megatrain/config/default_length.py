"""The default of `data.seq_len` for a model that has positions for fewer tokens: as many as it has."""

import dataclasses
import json
import logging
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatrain.config.schema import DataConfig

log: logging.Logger = logging.getLogger(__name__)

_NAMES = ("max_position_embeddings", "n_positions")
"""Keys of a `config.json` that name a model's positions."""

_ROPE = ("rope_parameters", "rope_scaling")

STRETCHED = ("yarn", "llama3", "longrope")
"""Kinds of rotary positions that read how many positions the model was trained with."""


def shorten(tree: dict[str, Any]) -> None:
    """Sets `data.seq_len` of a configuration that does not state it, where its model is written out or lies in a local
    folder and has positions for fewer tokens than the default; says so in the log."""
    data = tree.get("data", {})
    if not isinstance(data, dict) or "seq_len" in data:
        return
    default = next(field.default for field in dataclasses.fields(DataConfig) if field.name == "seq_len")
    assert isinstance(default, int)
    limit = _positions(tree.get("model"))
    if limit is not None and 2 <= limit < default:
        log.warning("data.seq_len is not given: %d, the positions that the model has, not %d", limit, default)
        tree["data"] = {**data, "seq_len": limit}


def _positions(model: Any) -> int | None:
    described = model.get("config") if isinstance(model, Mapping) else None
    path = model.get("path") if isinstance(model, Mapping) else None
    if isinstance(path, str):
        try:
            own = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None  # what is wrong with it is said when the model is read
        described = _replaced(own, described) if isinstance(own, Mapping) else None
    if not isinstance(described, Mapping):
        return None
    parts = [described, described.get("text_config")]
    for part in (part for part in parts if isinstance(part, Mapping)):
        limit = next((part[name] for name in _NAMES if type(part.get(name)) is int), None)
        if limit is not None:
            rope = part.get("rope_parameters") or part.get("rope_scaling")
            if isinstance(rope, Mapping) and "type" in rope:  # its name in older files
                rope = {"rope_type": rope["type"], **rope}
            try:
                known = types.SimpleNamespace(max_position_embeddings=limit, rope_parameters=rope)
                return max_positions(known)
            except (AttributeError, TypeError, ValueError):
                return None
    return None


def _replaced(own: Mapping[str, Any], given: Any) -> dict[str, Any]:
    """A `config.json` with keys of `model.config` in place of its own."""
    replaced = dict(own)
    for name, value in given.items() if isinstance(given, Mapping) else ():
        part = replaced.get(name)
        if name.endswith("_config") and isinstance(part, Mapping):
            replaced[name] = _replaced(part, value)
            continue
        if name in _ROPE:
            old: Mapping[str, Any] = next(
                (replaced[key] for key in _ROPE if isinstance(replaced.get(key), Mapping)), {}
            )
            replaced = {key: replaced[key] for key in replaced if key not in _ROPE}
            if isinstance(value, Mapping) and not {"type", "rope_type"} & value.keys():
                value = {**old, **value}
            elif isinstance(value, Mapping) and {value.get("type"), value.get("rope_type")} & {*STRETCHED}:
                limit = old.get("original_max_position_embeddings") or own.get("max_position_embeddings")
                value = {"original_max_position_embeddings": limit, **value}
        replaced[name] = value
    return replaced


def max_positions(config: Any) -> int | None:
    """Longest sequence a text configuration has positions for, rotary scaling included."""
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None or limit < 1:  # XLNet has -1
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [v for v in rope.values() if isinstance(v, dict)]
    for kind in kinds:
        original = kind.get("original_max_position_embeddings") or limit
        limit = max(limit, int(original * (kind.get("factor") or 1.0)))
    return int(limit)
