"""Signals to a run. The first SIGINT, SIGTERM or SIGHUP asks it to stop; a second SIGINT or SIGTERM ends the process at
once, with 130 or 143. SIGUSR1 asks it to save and go on.

SIGHUP, which a closed terminal sends (often twice: from the kernel and from the shell), never ends the process at once.
Where it is ignored (`nohup`) it stays ignored.

The second signal must work while the main thread is deep inside native code, where Python-level handlers do not run. So
a thread reads the signal numbers that the interpreter's C handler writes to a pipe (`signal.set_wakeup_fd`).
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

from megatrain.training.stop import Stop

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAVING = signal.SIGUSR1


@contextlib.contextmanager
def stopping(stop: Stop, *, can_save: bool = False) -> Iterator[None]:
    """Turns the signals into requests to `stop` inside the block; SIGUSR1 only where the work `can_save`. Does nothing
    on any thread but the main one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    handled = [one for one in _STOPPING if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop.on_signal) for number in handled}
    if can_save:
        before[_SAVING] = signal.signal(_SAVING, stop.on_save_signal)
    watcher = threading.Thread(target=_watch, args=(reader, stop), name="megatrain-signals", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        for number, handler in before.items():
            # The exit code is settled now. A closed terminal's second SIGHUP must not change it, nor a late SIGUSR1,
            # whose default is to end the process.
            late = number == _SAVING and handler == signal.SIG_DFL
            late |= stop.requested and number == signal.SIGHUP
            signal.signal(number, signal.SIG_IGN if late else handler)
        signal.set_wakeup_fd(before_fd)
        os.close(writer)
        watcher.join(timeout=1)
        os.close(reader)


def _watch(reader: int, stop: Stop) -> None:
    seen = 0
    while True:
        try:
            numbers = os.read(reader, 64)
        except OSError:
            return
        if not numbers:
            return
        for number in numbers:
            if number == _SAVING:
                _say("\nSIGUSR1: saving after this step, then going on\n")
            if number not in _STOPPING or (seen and number == signal.SIGHUP):
                continue
            seen += 1
            name = signal.Signals(number).name
            if seen == 1:
                _say(f"\n{name}: stopping at the next safe point and saving; once more stops at once\n")
            else:
                stop.abandon(f"ended at once by a second signal ({name}), without saving")
                _say(f"{name} again: stopped at once\n" + ("\x1b[?25h" if sys.stderr.isatty() else ""))
                os._exit(128 + number)


def _say(text: str) -> None:
    # Straight to the descriptor: the main thread may never release the lock of sys.stderr.
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
