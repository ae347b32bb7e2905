"""Answers: JSON for programs, tables for people. rich is loaded only when a table is drawn."""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

from megatrain.errors import StorageError
from megatrain.training.metrics import dumps


def json_line(document: Any) -> None:
    """One JSON document in one line on standard output."""
    line(dumps(document))


def line(text: str = "") -> None:
    """A line of the answer."""
    with _written():
        sys.stdout.write(text + "\n")


def flush() -> None:
    """Hands over what was answered. Raises StorageError where it cannot be written, BrokenPipeError unread."""
    with _written():
        sys.stdout.flush()


def discard(stream: IO[str]) -> None:
    """Sends what `stream` still holds, and all that follows, nowhere."""
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
    """A table; without a terminal it is as wide as it needs to be, so that nothing is cut."""
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
