"""A progress line that is written over itself: on a terminal, or below a notebook's cell."""

import functools
import importlib
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, Any

_REDRAW_S = 0.2
"""A notebook's line is sent to its browser at most this often."""


def progress_line() -> Callable[[str, int, int], None] | None:
    """A moving line on standard error where that is a terminal, or below the cell of a notebook; None elsewhere."""
    if in_notebook():
        line = NotebookLine()
        return lambda what, done, total: line.show(_described(what, done, total), last=bool(total and done >= total))
    stream = sys.stderr
    return functools.partial(moving_line, stream) if stream is not None and stream.isatty() else None


def moving_line(stream: IO[str], what: str, done: int, total: int) -> None:
    """Writes how far something is over what was written last; `total` 0 is unknown. At the end the line is empty."""
    stream.write(f"\r{_described(what, done, total)}\x1b[K" + ("\r\x1b[K" if total and done >= total else ""))
    stream.flush()


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, whose cells show more than text streams do."""
    ipython: Any = sys.modules.get("IPython")  # a kernel has imported it
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookLine:
    """A line below the cell that runs, replaced by each text that is shown. May be used from several threads."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._drawn = 0.0
        self._lock = threading.Lock()

    def show(self, text: str, *, last: bool = False) -> None:
        """Shows `text` in place of the one before, unless that was a moment ago; the `last` one always."""
        shown: Any = importlib.import_module("IPython.display")
        with self._lock:
            if self._handle is None:
                self._handle = shown.display(shown.Pretty(text), display_id=True)
            elif last or time.monotonic() - self._drawn >= _REDRAW_S:
                self._handle.update(shown.Pretty(text))
            else:
                return
            self._drawn = time.monotonic()


def _described(what: str, done: int, total: int) -> str:
    return what + (f" {100 * done // total} %" if total else f" {done:,}")
