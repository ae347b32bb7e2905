"""What stands in for the native engine has its calls: the tests' fake and the protocol that files are written through
agree with the stub, which `make lint` compares with the binary."""

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

import megatrain
from megatrain.weights.types import Core
from support.fake_core import MemoryCore

HELPERS = {"equals", "fill", "master"}
"""Methods of the fake that only tests call."""

STUB = Path(megatrain.__file__).parent / "_core.pyi"


def parameters(function: ast.FunctionDef) -> list[tuple[str, str, bool]]:
    """Name, kind and whether it may be left out, of each parameter."""
    of = function.args
    positional = [*of.posonlyargs, *of.args]
    required = len(positional) - len(of.defaults)
    found = [(arg.arg, "positional", i >= required) for i, arg in enumerate(positional)]
    return found + [(arg.arg, "keyword", d is not None) for arg, d in zip(of.kwonlyargs, of.kw_defaults, strict=True)]


def stubbed() -> dict[str, list[tuple[str, str, bool]]]:
    """Parameters of each method of the native engine, by name."""
    tree = ast.parse(STUB.read_text())
    (engine,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Engine"]
    return {node.name: parameters(node) for node in engine.body if isinstance(node, ast.FunctionDef)}


def defined(kind: type) -> dict[str, list[tuple[str, str, bool]]]:
    """The same of a class in Python, without what begins with an underscore."""
    found: dict[str, list[tuple[str, str, bool]]] = {}
    for name, function in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_"):
            found[name] = [
                (p.name, "keyword" if p.kind is p.KEYWORD_ONLY else "positional", p.default is not p.empty)
                for p in inspect.signature(function).parameters.values()
            ]
    return found


@pytest.mark.parametrize(("kind", "helpers"), [(MemoryCore, HELPERS), (Core, set())], ids=["fake", "protocol"])
def test_every_call_exists_in_the_stub_with_the_same_parameters(kind: type, helpers: set[str]) -> None:
    native, ours = stubbed(), defined(kind)
    assert helpers <= ours.keys()
    assert not helpers & native.keys()
    for name in ours.keys() - helpers:
        assert name in native, f"{kind.__name__}.{name} is no method of the native engine"
        assert ours[name] == native[name], f"{kind.__name__}.{name}"


def test_the_fake_has_every_call_of_the_protocol() -> None:
    assert defined(Core).keys() <= defined(MemoryCore).keys()


def fewer(self: Any, unit: int) -> int:
    raise NotImplementedError


def more(self: Any, unit: int, tensor: int, extra: int = 1) -> int:
    raise NotImplementedError


def swapped(self: Any, tensor: int, unit: int) -> int:
    raise NotImplementedError


@pytest.mark.parametrize("wrong", [fewer, more, swapped])
def test_another_signature_is_found(wrong: Any) -> None:
    kind = type("Changed", (MemoryCore,), {"step_count": wrong})
    with pytest.raises(AssertionError, match=r"Changed\.step_count"):
        test_every_call_exists_in_the_stub_with_the_same_parameters(kind, HELPERS)
