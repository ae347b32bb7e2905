"""Requests to a run that is under way: stop at the next safe point, or save and go on.

The command line turns signals into requests. A loop checks `Stop.requested` between steps. Work that can simply be
dropped (loading, preparing data) runs inside `Stop.interruptible()`, where a request raises `StopRequested` at once.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from megatrain.errors import MegatrainError


class StopRequested(KeyboardInterrupt):
    """The user asked to stop. A KeyboardInterrupt, so that whatever cleans up after Ctrl-C cleans up after this too."""

    checkpoint: Path | None = None
    """The newest checkpoint in the folder of the run that was loading, if there is one."""


class RunStopped(MegatrainError):
    """The run ended itself: its numbers, its disk, its memory or its engine failed. The message names the last good
    checkpoint."""


class Stop:
    """Whether a stop or a save was requested, and whether a stop may interrupt the present work. Requests are made on
    the main thread; `abandon` may be called from any thread."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._save = threading.Event()
        self._depth = 0
        self.reason: str = ""
        """What asked for the stop, such as SIGTERM."""
        self.on_abandon: Callable[[str], None] | None = None
        """Called with a reason when the process is about to end at once, without saving."""

    @property
    def requested(self) -> bool:
        """Whether a stop was requested."""
        return self._event.is_set()

    def request(self, reason: str = "a request") -> None:
        """Requests a stop; raises StopRequested when the present work can be dropped."""
        self.reason = reason
        self._event.set()
        if self._depth and threading.current_thread() is threading.main_thread():
            raise StopRequested(reason)

    def request_save(self) -> None:
        """Requests a checkpoint after the present step; the run goes on."""
        self._save.set()

    def take_save_request(self) -> bool:
        """Whether a checkpoint was requested since the last call."""
        requested = self._save.is_set()
        self._save.clear()
        return requested

    def abandon(self, reason: str, timeout_s: float = 2.0) -> None:
        """Calls `on_abandon`, for at most `timeout_s`: a disk that hangs must not keep the process alive."""
        if self.on_abandon is not None:
            last_words = threading.Thread(target=self.on_abandon, args=(reason,), daemon=True)
            last_words.start()
            last_words.join(timeout_s)

    def on_signal(self, number: int, _frame: object) -> None:
        """Requests a stop; a handler for `signal.signal`."""
        self.request(signal.Signals(number).name)

    def on_save_signal(self, _number: int, _frame: object) -> None:
        """Requests a save; a handler for `signal.signal`."""
        self.request_save()

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Work that a stop request may drop at any instruction.

        Interrupted code can fail while it cleans up (a condition variable left without its lock, for example). Such a
        failure is part of stopping and leaves as StopRequested too.
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
    """Whether `error` was raised while a StopRequested was being handled."""
    before = error.__context__
    return before is not None and (isinstance(before, StopRequested) or _while_stopping(before))
