"""Answers: JSON for programs, tables for people. rich is loaded only when a table is drawn."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from megatrain.metrics import dumps


def json_line(document: Any) -> None:
    """One JSON document in one line on standard output."""
    sys.stdout.write(dumps(document) + "\n")


def line(text: str = "") -> None:
    """A line of the answer."""
    sys.stdout.write(text + "\n")


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
    console.print(drawn)
