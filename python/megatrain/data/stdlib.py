"""Text that is on every machine with Python: the standard library's sources and documentation.

`python:stdlib`: one document for each top-level module that is Python source, in the order of their names, and one for
each topic of `pydoc_data` (what `help("LISTS")` prints). `python:stdlib-chat`: questions about that documentation with
the documentation as answer. Both depend on nothing but the version of Python.
"""

import ast
import functools
import inspect
import pydoc_data.topics
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatrain.errors import ConfigError

_LONGEST_ANSWER = 2400
"""Characters, so that answers fit into a short context."""
_SHORTEST_ANSWER = 40

_QUESTIONS = (
    "What does the documentation say about {}?",
    "What does the Python documentation say about {}?",
    "Explain {} as the documentation does.",
)


@functools.cache
def documents(path: str) -> tuple[tuple[str, Any], ...]:
    """(name, text) or (name, messages) of every row, in a fixed order. Raises ConfigError for another path."""
    if path == "python:stdlib":
        rows: list[tuple[str, Any]] = [(f"{path}/{name}", text) for name, text in _modules()]
        rows += [(f"{path}/topics/{name}", f"{name}\n\n{text.strip()}\n") for name, text in _topics()]
        return tuple(rows)
    if path == "python:stdlib-chat":
        return tuple((f"{path}/{name}", _conversation(name, answer)) for name, answer in _answers())
    raise ConfigError(f"{path} is not known; use python:stdlib or python:stdlib-chat")


def _modules() -> Iterator[tuple[str, str]]:
    folder = Path(sysconfig.get_path("stdlib"))
    for file in sorted(folder.glob("*.py")):
        # Skips what a distribution or an installer added, which differs from machine to machine.
        if file.stem in sys.stdlib_module_names and not file.stem.startswith("_sysconfigdata"):
            yield file.name, file.read_text(encoding="utf-8")


def _topics() -> list[tuple[str, str]]:
    return sorted(pydoc_data.topics.topics.items())


def _answers() -> Iterator[tuple[str, str]]:
    for name, text in _topics():
        yield f"the topic {name}", _shorten(text)
    for file, source in _modules():
        module = file.removesuffix(".py")
        yield from _docstrings(ast.parse(source), module)


def _docstrings(tree: ast.Module, module: str) -> Iterator[tuple[str, str]]:
    """Documentation of a module, its public functions and classes, and their public methods."""
    if not module.startswith("_") and (text := _answer(tree)):
        yield f"the module {module}", text
    for node in tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("_"):
            continue
        if text := _answer(node):
            yield f"{module}.{node.name}", text
        for inner in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_") and (text := _answer(inner)):
                yield f"{module}.{node.name}.{inner.name}", text


def _answer(node: ast.Module | ast.FunctionDef | ast.ClassDef) -> str | None:
    text = inspect.cleandoc(ast.get_docstring(node) or "")
    return _shorten(text) if len(text) >= _SHORTEST_ANSWER else None


def _shorten(text: str) -> str:
    """The first paragraphs, as many as fit into `_LONGEST_ANSWER`."""
    text = text.strip()
    if len(text) <= _LONGEST_ANSWER:
        return text
    cut = text.rfind("\n\n", 0, _LONGEST_ANSWER)
    return text[: cut if cut > 0 else _LONGEST_ANSWER].rstrip()


def _conversation(name: str, answer: str) -> list[dict[str, str]]:
    question = _QUESTIONS[sum(name.encode()) % len(_QUESTIONS)].format(name)
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
