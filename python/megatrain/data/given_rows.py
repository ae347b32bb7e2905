"""Rows that a Python program hands over, as sources of a configuration: `data: {train: rows:chats}` with
`Trainer(config, rows={"chats": rows})`.

They are read like the rows of a file. A configuration holds their name alone; a checkpoint knows their content.
"""

import contextlib
import contextvars
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megatrain.config import Config
from megatrain.config.data_files import ROWS
from megatrain.errors import ConfigError
from megatrain.names import suggest

_given: contextvars.ContextVar[Mapping[str, Iterable[Any]]] = contextvars.ContextVar("rows")


@contextlib.contextmanager
def given(rows: Mapping[str, Iterable[Any]]) -> Iterator[None]:
    """Sources that are made in the meantime find these rows by their names."""
    token = _given.set(rows)
    try:
        yield
    finally:
        _given.reset(token)


def check(rows: Any, config: Config) -> dict[str, Iterable[Any]]:
    """The rows by their names. Raises ConfigError for what is no set of rows, for names that the configuration does not
    use, and for those that it uses and are not there."""
    if rows is None:
        rows = {}
    if not isinstance(rows, Mapping):
        raise ConfigError(
            f"rows is {type(rows).__name__}; give a mapping of names to rows, such as rows={{'chats': rows}}, and name "
            f"them in the configuration: data.train: {ROWS}chats"
        )
    named = [source.path for source in (*config.data.train, *config.data.eval)]
    wanted = list(dict.fromkeys(path.removeprefix(ROWS) for path in named if path.startswith(ROWS)))
    for name, values in rows.items():
        if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable) or iter(values) is values:
            raise ConfigError(
                f"rows[{name!r}] is {type(values).__name__}; give a list of dicts or a datasets.Dataset, which can be "
                "gone through more than once"
            )
        if name not in wanted:
            raise ConfigError(f"rows[{name!r}] is not used: no source of data.train or data.eval is {ROWS}{name}")
    for name in wanted:
        if name not in rows:
            raise missing(name, rows)
    return dict(rows)


def missing(name: str, rows: Iterable[str]) -> ConfigError:
    """The error about rows that a configuration names and nobody has handed over."""
    known = [*rows]
    hint = f"; {suggest(name, known)}" if known else ""
    return ConfigError(
        f"{ROWS}{name} are rows that a Python program hands over: megatrain.Trainer(config, rows={{{name!r}: …}}){hint}"
    )


class GivenRows:
    """One set of rows, found by its source's path."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError where no such rows were handed over."""
        rows, name = _given.get({}), path.removeprefix(ROWS)
        if name not in rows:
            raise missing(name, rows)
        self._values = rows[name]
        self.columnar: bool = hasattr(self._values, "column_names")
        """Whether every row has every column, as in a datasets.Dataset, so that null stands for none."""

    def values(self) -> Iterator[tuple[int, Any]]:
        """(number from 1, row) of each, with numbers and lists of numpy as Python's."""
        for number, value in enumerate(self._values, start=1):
            yield number, _plain(value)

    def digest(self) -> str:
        """SHA-256 over the content of all rows."""
        total = hashlib.sha256()
        for _, value in self.values():
            total.update(json.dumps(value, sort_keys=True, default=repr).encode() + b"\n")
        return total.hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return _plain(value.tolist()) if hasattr(value, "tolist") else value  # numpy's, and torch's
