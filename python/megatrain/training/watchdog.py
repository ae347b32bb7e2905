"""Reports a step that does not go on: what every thread does, and what every lane of the engine does and waits for.

A stall is not an error that anyone could handle: a disk that hangs, a driver call that never returns, a deadlock. The
run is left as it is, since what hangs may still come back; whoever reads the report decides.
"""

import dataclasses
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

_POLL_S = 5.0
"""Between two looks at the run, or a fourth of the allowed time where that is less."""
_FRAMES = 12
"""Innermost calls that are shown of each thread."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """What a run looks like that does not go on."""

    doing: str
    """What it was about to do, such as `step 12`."""
    seconds: float
    """How long nothing has gone on."""
    lanes: list[dict[str, Any]]
    """The engine's lanes: `lane`, `running`, `next`, `waits_for`; see `_core.Engine.lanes`."""
    threads: dict[str, list[str]]
    """By thread of Python's: its calls, outermost first."""

    def text(self) -> str:
        """The report, for the log."""
        lines = [f"{self.doing} has not gone on for {self.seconds:.0f} s. Nothing is stopped; this is what it does:"]
        for lane in self.lanes:
            running = ", ".join(lane["running"]) or "nothing"
            following = f"; next: {lane['next']}" if lane["next"] else ""
            awaited = f", which waits for {', '.join(lane['waits_for'])}" if lane["waits_for"] else ""
            lines.append(f"  lane {lane['lane']} runs {running}{following}{awaited}")
        for name, calls in self.threads.items():
            lines.append(f"  thread {name}, innermost call last:")
            lines += [f"    {call}" for call in calls]
        return "\n".join(lines)


class Watchdog:
    """A thread that looks at a run until `close`. It starts nothing, stops nothing and waits for no lock of the run."""

    def __init__(
        self,
        limit_s: float,
        mark: Callable[[], object],
        doing: Callable[[], str],
        lanes: Callable[[], list[dict[str, Any]]],
        report: Callable[[Stall | None], None],
    ) -> None:
        """`mark` changes whenever anything goes on. `report` gets a Stall when it has not for `limit_s` seconds, again
        each time that the stall has become twice as long, and None when the run goes on after all."""
        self._limit_s, self._mark, self._doing, self._lanes, self._report = limit_s, mark, doing, lanes, report
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="megatrain-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        pause = min(_POLL_S, self._limit_s / 4)
        before, since, due, looked = self._mark(), time.monotonic(), self._limit_s, time.monotonic()
        while not self._closed.wait(pause):
            now, mark = time.monotonic(), self._mark()
            # A process that was stopped (SIGSTOP) or had no processor did not look either: that is no stall of its own.
            since += max(0.0, now - looked - 2 * pause)
            looked = now
            if mark != before:
                if due > self._limit_s:
                    self._report(None)
                before, since, due = mark, now, self._limit_s
            elif now - since >= due:
                due *= 2
                stalled = Stall(doing=self._doing(), seconds=now - since, lanes=self._lanes(), threads=self._stacks())
                self._report(stalled)

    def _stacks(self) -> dict[str, list[str]]:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks: dict[str, list[str]] = {}
        for number, frame in sys._current_frames().items():
            if number != self._thread.ident:
                name = names.get(number, f"{number}")
                # Each engine has a thread of the same name.
                stacks[name if name not in stacks else f"{name} ({number})"] = _calls(frame)
        return stacks


def _calls(frame: FrameType) -> list[str]:
    """The innermost calls of a thread, as `file:line function: code`."""
    return [
        f"{entry.filename}:{entry.lineno} {entry.name}: {entry.line}"
        for entry in traceback.extract_stack(frame)[-_FRAMES:]
    ]
