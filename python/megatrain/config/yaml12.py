"""YAML as people expect it: the safe loader with the scalars of YAML 1.2, and no key twice.

PyYAML follows YAML 1.1, where `1e-5` is a string, `on` is true and `1:30` is 90. Here a plain scalar is null, a
boolean (`true`, `false`), an integer, a float or else a string, and nothing in a file can build anything but those,
lists and mappings.
"""

import re
from collections.abc import Hashable
from typing import Any

import yaml

_NULL = re.compile(r"(?:~|null|Null|NULL|)")
_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)")
_INT = re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)")
_FLOAT = re.compile(
    r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))"
)


class _Loader(yaml.SafeLoader):
    pass


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, _data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002 - lists are indented everywhere
        super().increase_indent(flow, False)


def _bool(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> bool:
    text = loader.construct_scalar(node)
    if not _BOOL.fullmatch(text):
        raise yaml.constructor.ConstructorError(None, None, f"{text!r} is not true or false", node.start_mark)
    return text.lower() == "true"


def _int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    try:
        return int(text, 0) if text.startswith(("0o", "0x")) else int(text)
    except ValueError as error:  # by its tag, or of thousands of digits
        raise yaml.constructor.ConstructorError(None, None, f"not a whole number: {error}", node.start_mark) from None


def _float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    text = loader.construct_scalar(node).lower()
    try:
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))
    except ValueError as error:
        raise yaml.constructor.ConstructorError(None, None, f"not a number: {error}", node.start_mark) from None


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Hashable, Any]:
    mapping: dict[Hashable, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, Hashable):
            raise yaml.constructor.ConstructorError(None, None, "a key must be a plain value", key_node.start_mark)
        if key in mapping:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} appears a second time; keep one of the two", key_node.start_mark
            )
        mapping[key] = loader.construct_object(value_node, deep=True)
    return mapping


def _refuse(_loader: yaml.SafeLoader, node: yaml.Node) -> None:
    raise yaml.constructor.ConstructorError(None, None, f"the tag {node.tag!r} is not supported", node.start_mark)


for _class in (_Loader, _Dumper):
    # An empty table of its own; otherwise the additions below would join the rules of YAML 1.1.
    _class.yaml_implicit_resolvers = {}
    for _tag, _pattern, _first in (
        ("null", _NULL, "~nN"),
        ("bool", _BOOL, "tTfF"),
        ("int", _INT, "-+0123456789"),
        ("float", _FLOAT, "-+.0123456789"),
    ):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"{_pattern.pattern}\\Z"), list(_first))
    _class.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"\Z"), [""])

_Loader.add_constructor("tag:yaml.org,2002:bool", _bool)
_Loader.add_constructor("tag:yaml.org,2002:int", _int)
_Loader.add_constructor("tag:yaml.org,2002:float", _float)
_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
for _tag in ("binary", "timestamp", "omap", "pairs", "set"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _refuse)


def number(text: str) -> int | float | None:
    """What a plain scalar that is a number stands for; None for any other."""
    if not (_INT.fullmatch(text) or _FLOAT.fullmatch(text)):
        return None
    value: int | float = load(text)
    return value


def load(text: str, name: str = "<text>") -> Any:
    """Parses one document. Raises ValueError with `name`, line and column."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise ValueError(f"{where}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{name}: {error}") from None
    except RecursionError:
        raise ValueError(f"{name}: it is nested too deeply to be read") from None


def lines(text: str, name: str) -> dict[str, str]:
    """`name:line` of every key of a document that `load` has read; keys inside others are dotted, items of lists
    numbered."""
    found: dict[str, str] = {}
    todo: list[tuple[str, yaml.Node | None]] = [("", yaml.compose(text, Loader=_Loader))]
    while todo:
        prefix, node = todo.pop()
        inner: list[tuple[str, yaml.Node, yaml.Node]] = []
        if isinstance(node, yaml.MappingNode):
            inner = [(str(key.value), key, value) for key, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            inner = [(str(index), item, item) for index, item in enumerate(node.value)]
        for own, place, value in inner:
            found[prefix + own] = f"{name}:{place.start_mark.line + 1}"
            todo.append((f"{prefix}{own}.", value))
    return found


def dump(value: Any) -> str:
    """Writes what `load` reads back as an equal value."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text
