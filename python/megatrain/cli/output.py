"""Prints answers: JSON for programs, lines and tables for people. rich is imported only when a table is drawn."""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

from megatrain.errors import StorageError
from megatrain.training.metrics import dumps


def json_line(document: Any) -> None:
    """Prints one JSON document in one line."""
    line(dumps(document))


def line(text: str = "") -> None:
    """Prints one line of the answer."""
    with _written():
        sys.stdout.write(text + "\n")


def flush() -> None:
    """Flushes the answer. Raises StorageError when it cannot be written, and BrokenPipeError when nobody reads it."""
    with _written():
        sys.stdout.flush()


def discard(stream: IO[str]) -> None:
    """Drops what `stream` still buffers, and all that is written to it later."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextlib.contextmanager
def _written() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StorageError(f"standard output cannot be written: {error.strerror or error}") from None


def table(
    columns: Sequence[str],  # a leading ">" aligns to the right
    rows: Iterable[Sequence[str]],
    title: str | None = None,
) -> None:
    """Prints a table. Without a terminal it is as wide as it needs to be, so that nothing is cut off."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    drawn = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for column in columns:
        drawn.add_column(
            column.removeprefix(">"), justify="right" if column.startswith(">") else "left", overflow="fold"
        )
    for row in rows:
        drawn.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 160, markup=False, highlight=False, emoji=False)
    with _written():
        console.print(drawn)
