"""Being asked to stop: once politely, at a point where nothing is lost. Signals are the command line's business.

A loop looks at `Stop.requested` between steps. Work that may simply be dropped (loading, preparing data) runs inside
`Stop.interruptible()`, where a request raises `StopRequested` at once.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator

from megatrain.errors import MegatrainError


class StopRequested(KeyboardInterrupt):
    """The user asked to stop. A KeyboardInterrupt, so that cleaning up after Ctrl-C cleans up after this too."""


class RunStopped(MegatrainError):
    """The run ended itself: its numbers, its disk or its engine failed. The message names the last good checkpoint."""


class Stop:
    """Whether a stop was asked for, and whether it may interrupt what runs now. Requests come on the main thread."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._depth = 0
        self.reason = ""
        """What asked, such as SIGTERM."""

    @property
    def requested(self) -> bool:
        """Whether a stop was asked for."""
        return self._event.is_set()

    def request(self, reason: str = "a request") -> None:
        """Asks for a stop; raises StopRequested when what runs now may be dropped."""
        self.reason = reason
        self._event.set()
        if self._depth and threading.current_thread() is threading.main_thread():
            raise StopRequested(reason)

    def on_signal(self, number: int, _frame: object) -> None:
        """A handler for `signal.signal`."""
        self.request(signal.Signals(number).name)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Work that a request may drop at any instruction.

        What the request cut short may fail in its own cleaning up (a condition that was to be left without its lock):
        that failure is part of stopping, and leaves as StopRequested too.
        """
        if self.requested:
            raise StopRequested(self.reason)
        self._depth += 1
        try:
            yield
        except Exception as error:
            if _while_stopping(error):
                raise StopRequested(self.reason) from error
            raise
        finally:
            self._depth -= 1


def _while_stopping(error: BaseException) -> bool:
    """Whether `error` was raised while a StopRequested was on its way out."""
    before = error.__context__
    return before is not None and (isinstance(before, StopRequested) or _while_stopping(before))
