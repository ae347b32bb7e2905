"""SIGINT, SIGTERM and SIGHUP: the first asks the run to stop, a second ends the process at once with 130 or 143.

SIGHUP, which a terminal that is closed sends (often twice: from the kernel and from the shell), never ends it at once,
and where it is ignored (`nohup`) it stays so.

The second must work while the main thread is deep inside native code, where Python-level handlers do not run. So a
thread reads the signal numbers that the interpreter's C handler writes to a pipe (`signal.set_wakeup_fd`).
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

from megatrain.training.stop import Stop

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def stopping(stop: Stop) -> Iterator[None]:
    """Routes the signals to `stop` while inside. Only on the main thread; elsewhere it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    routed = [one for one in _SIGNALS if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop.on_signal) for number in routed}
    watcher = threading.Thread(target=_watch, args=(reader,), name="megatrain-signals", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        for number, handler in before.items():
            # what has saved is about to leave with 3, which the second hangup of a closed terminal must not change
            leaving = stop.requested and number == signal.SIGHUP
            signal.signal(number, signal.SIG_IGN if leaving else handler)
        signal.set_wakeup_fd(before_fd)
        os.close(writer)
        watcher.join(timeout=1)
        os.close(reader)


def _watch(reader: int) -> None:
    seen = 0
    while True:
        try:
            numbers = os.read(reader, 64)
        except OSError:
            return
        if not numbers:
            return
        for number in numbers:
            if number not in _SIGNALS or (seen and number == signal.SIGHUP):
                continue
            seen += 1
            name = signal.Signals(number).name
            if seen == 1:
                _say(f"\n{name}: stopping at the next safe point and saving; once more stops at once\n")
            else:
                _say(f"{name} again: stopped at once\n" + ("\x1b[?25h" if sys.stderr.isatty() else ""))
                os._exit(128 + number)


def _say(text: str) -> None:
    # Straight to the descriptor: the main thread may hold the lock of sys.stderr for good.
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
