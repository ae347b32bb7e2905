"""Ctrl-C between steps, never inside one: what computes runs on a thread of its own.

Python raises KeyboardInterrupt, and whatever another signal's handler raises, on the main thread, after any call that
happens to return then. No `try` closes all the gaps between a native call and the line that notes what it did. So the
main thread waits here, and the work goes on where no signal's exception can reach it. No handler is installed for that:
the exception is caught where the main thread waits, and raised again once the work is where it may end.

The work sees the caller's context variables, CUDA stream, default device and number of threads. What torch keeps for
each thread beyond these (a profiler, a dispatch mode, hooks on saved tensors) stays with the caller. On any thread but
the main one there is nothing to shield from, and the work runs there. Whichever thread it is, one piece of work runs at
a time, and none in a fork of the process, which has the engine's memory and none of its threads.
"""

import atexit
import contextlib
import contextvars
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from megatrain.errors import ConfigError, EngineBroken

log: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")

_GRACE_S = 0.5
"""How long an interrupt waits for work that gives way, before it leaves it to end by itself."""

_EXIT_S = 5.0
"""How long the end of the process waits for such work."""

_LOOK_S = 0.1
"""How long a thread waits before it looks for itself whether the work has ended: an interrupt may have fallen between
the end and the word that passes it on."""


class GivenUp(BaseException):
    """Work gave way to an interrupt. Raised on the shield's thread and seen by nobody else."""


class InterruptGuard:
    """A thread for the work of one engine, and what an interrupt has left on it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._job: _Job | None = None
        """The last one; it may still run when an interrupt did not wait for its end."""
        self.broken = ""
        """Why what ran can no longer be trusted; empty while it can."""
        self._process = os.getpid()
        self._busy = threading.Lock()
        """Held by the work that runs, where no interrupt arrives."""
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name="megatrain-step", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._jobs.put, None).atexit = False
        _SHIELDS.add(self)

    def run(self, body: Callable[[], T], *, finish: bool) -> T:
        """What `body` returns. An interrupt meanwhile is raised when the work has ended. With `finish` that is its
        proper end, and a second interrupt is raised at once and leaves the engine broken; without, the work is asked to
        give way (`check`), and after half a second the interrupt is raised while the work is still about to. Raises
        ConfigError when other work is under way."""
        self.settle()
        body = self._alone(body)
        if threading.current_thread() is not threading.main_thread():
            return body()
        job = self._job = _Job(self._as_the_caller(body))
        try:
            self._jobs.put(job)
            job.wait()
        except BaseException:
            # No call stands between here and the inner `try`, so that no second interrupt gets past it.
            job.given_up = not finish
            try:
                if not job.withdraw():
                    if finish:
                        log.warning("interrupted: finishing the step first; once more leaves the engine unusable")
                    job.wait(None if finish else _GRACE_S)
            except BaseException:
                if finish:
                    self.broken = "a second interrupt cut a step in two, which with update: immediate cannot be undone"
                    job.given_up = True
                raise
            raise
        self._job = None
        try:
            return job.answer()  # type: ignore[no-any-return]
        except GivenUp:
            if not job.given_up:
                raise
            raise EngineBroken("the engine was closed by another thread while it computed") from None

    def check(self) -> None:
        """For the work: raises GivenUp when it shall end here."""
        job = self._job
        if job is not None and job.given_up:
            raise GivenUp

    def settle(self) -> None:
        """Waits for what an interrupt left running. Raises EngineBroken when it cannot be trusted, and in a fork."""
        job = self._job
        if self.is_forked:
            raise EngineBroken(
                f"this engine belongs to process {self._process}, of which this one is a fork without its threads; "
                "make the engine after the fork, or start such processes with spawn"
            )
        if self.broken:
            raise EngineBroken(self.broken)
        if job is not None and threading.current_thread() is not self._thread:
            job.wait()
            if threading.current_thread() is threading.main_thread():
                self._job = None

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the engine's."""
        return os.getpid() != self._process

    def leave(self, seconds: float | None = None) -> None:
        """Waits for what still runs, whatever has become of it; it ends before its next operation."""
        job = self._job
        if job is not None and threading.current_thread() is not self._thread:
            job.given_up = True
            job.wait(seconds)

    def _alone(self, body: Callable[[], T]) -> Callable[[], T]:
        """`body` with nothing else of the engine's beside it."""

        def run() -> T:
            if not self._busy.acquire(blocking=False):
                raise ConfigError(
                    "another pass of this engine is under way (in another thread, or this call came from its loss_fn); "
                    "one ends before the next one begins"
                )
            try:
                return body()
            finally:
                self._busy.release()

        return run

    def _as_the_caller(self, body: Callable[[], T]) -> Callable[[], T]:
        """`body` under what torch and Python keep for the calling thread."""
        threads, context, place = torch.get_num_threads(), contextvars.copy_context(), torch.get_default_device()
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

        def run() -> T:
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            with contextlib.ExitStack() as stack:
                if stream is not None:
                    # Triton launches on the thread's current device. The caller's own thread gets its device back.
                    stack.enter_context(torch.cuda.device(self._device))
                    stack.enter_context(torch.cuda.stream(stream))
                if place.type != "cpu":
                    stack.enter_context(place)
                return context.run(body)

        return run


class _Job:
    """One piece of work, and whether it has begun and ended."""

    def __init__(self, body: Callable[[], Any]) -> None:
        self._body: Callable[[], Any] | None = body
        self._claim = threading.Lock()
        self._over = threading.Lock()
        self._over.acquire()
        self._ended = False
        self._answer: Any = None
        self._error: BaseException | None = None
        self.given_up = False

    def begin(self) -> None:
        """Does the work, unless it was withdrawn."""
        if not self._claim.acquire(blocking=False):
            return
        body, self._body = self._body, None
        assert body is not None
        try:
            self._answer = body()
        except BaseException as error:  # it belongs to the thread that waits
            self._error = error
        finally:
            del body
            self._ended = True
            self._over.release()

    def withdraw(self) -> bool:
        """Whether the work had not begun; it never will then."""
        if not self._ended and self._claim.acquire(blocking=False):
            self._ended = True
        return self._ended

    def wait(self, seconds: float | None = None) -> None:
        """Until the work has ended. Any number of threads may wait. May be interrupted at any instruction, and called
        again: `_ended` is set before the lock is given up, so that it does not matter whether an interrupted wait has
        taken it."""
        limit = None if seconds is None else time.monotonic() + seconds
        while not self._ended:
            left = _LOOK_S if limit is None else min(_LOOK_S, limit - time.monotonic())
            if left <= 0:
                return
            if self._over.acquire(timeout=left):
                self._over.release()  # for whoever else waits

    def answer(self) -> Any:
        """What the work returned. Raises what it raised."""
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # it refers to this frame
        return self._answer


_SHIELDS: "weakref.WeakSet[InterruptGuard]" = weakref.WeakSet()


@atexit.register
def _at_exit() -> None:
    """What computes must not be inside torch any more when the interpreter takes it down."""
    for guard in list(_SHIELDS):
        guard.leave(_EXIT_S)


def _work(jobs: "queue.SimpleQueue[_Job | None]") -> None:
    while (job := jobs.get()) is not None:
        job.begin()
        del job  # what it held must not live until the next one
