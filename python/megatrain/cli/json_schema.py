"""A JSON Schema (draft 2020-12) of the configuration, for editors that complete and check YAML.

It is derived from the dataclasses of `config`, their defaults and docstrings, and from the short forms that the loader
accepts. It is looser than the loader: contradictions between keys are only found there.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import sys
import types
import typing
from typing import Any

from megatrain.config import Config, SourceConfig
from megatrain.config.parsing import hints, plain
from megatrain.units import Duration

_STRING = {"type": "string"}
_SIZE = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": r"^\s*[0-9.]+\s*[A-Za-z]*\s*$"}]}
_DURATION = {"type": "string", "pattern": r"^\s*[0-9.]+\s*(s|min|h|d)\s*$"}


def document() -> dict[str, Any]:
    """The schema of a whole configuration file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "megatrain configuration",
        **_section(Config, ""),
        "$defs": {"source": _section(SourceConfig, "source.")},
    }


@functools.cache
def descriptions(section: type) -> dict[str, str]:
    """The docstring under each field of a configuration dataclass, in one line."""
    module = sys.modules[section.__module__]
    tree = ast.parse(inspect.getsource(module))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == section.__name__)
    found = {}
    for field, below in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            text = ast.literal_eval(below.value)
            found[field.target.id] = " ".join(str(text).split())
    return found


_SOURCE = {"anyOf": [_STRING, {"$ref": "#/$defs/source"}]}
_SOURCES = {"type": "array", "items": _SOURCE}
_FRACTION = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
_SETS = {
    "type": "object",
    "propertyNames": {"not": {"enum": [field.name for field in dataclasses.fields(SourceConfig)]}},
    "additionalProperties": {"anyOf": [*_SOURCE["anyOf"], _SOURCES, _FRACTION]},
}
_SHORT_FORMS: dict[str, list[dict[str, Any]]] = {
    "model": [_STRING],
    "data": [_STRING, _SOURCES],
    "data.train": [*_SOURCE["anyOf"], _SOURCES],
    "data.eval": [*_SOURCE["anyOf"], _SOURCES, _SETS, _FRACTION, {"type": "null"}],
    "train.schedule": [_STRING],
    "output.export": [{"const": False}],
}
"""What may be written for a key besides its own form; see `config.loading`."""


def _section(section: type, prefix: str) -> dict[str, Any]:
    properties = {}
    required = []
    for field in dataclasses.fields(section):
        key = prefix + field.name
        schema = _type(hints(section)[field.name], f"{key}.")
        forms = _SHORT_FORMS.get(key, [])
        if not prefix and dataclasses.is_dataclass(hints(section)[field.name]):
            forms = [*forms, {"type": "null"}]  # a section whose keys are all commented out
        if forms:
            schema = {"anyOf": [schema, *forms]}
        schema["description"] = descriptions(section)[field.name]
        if field.default is not dataclasses.MISSING:
            schema["default"] = plain(field.default)
        elif field.default_factory is dataclasses.MISSING:
            required.append(field.name)
        properties[field.name] = schema
    found: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    return found | ({"required": required} if required else {})


def _type(hint: Any, prefix: str) -> dict[str, Any]:
    """The schema of a value of type `hint`; `prefix` is the dotted name of what is below it."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return {"enum": list(parts)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_type(part, prefix) for part in parts]}
    if origin is typing.Annotated:  # `Size`, the only annotated type
        return dict(_SIZE)
    if origin is tuple:
        if parts[-1] is Ellipsis:
            return {"type": "array", "items": _type(parts[0], prefix)}
        return {"type": "array", "items": _type(parts[0], prefix), "minItems": len(parts), "maxItems": len(parts)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type(parts[1], prefix)}
    if hint is Duration:
        return dict(_DURATION)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _section(hint, prefix)
    names = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
    return {"type": names[hint]} if hint in names else {}
