"""A progress line on a terminal."""

import functools
import sys
from collections.abc import Callable
from typing import IO


def on_a_terminal() -> Callable[[str, int, int], None] | None:
    """A moving line on standard error where that is a terminal; None elsewhere, as in pipes and notebooks."""
    stream = sys.stderr
    return functools.partial(moving_line, stream) if stream is not None and stream.isatty() else None


def moving_line(stream: IO[str], what: str, done: int, total: int) -> None:
    """Writes how far something is over what was written last; `total` 0 is unknown. At the end the line is empty."""
    part = f" {100 * done // total} %" if total else f" {done:,}"
    stream.write(f"\r{what}{part}\x1b[K" + ("\r\x1b[K" if total and done >= total else ""))
    stream.flush()
