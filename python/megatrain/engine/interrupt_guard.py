"""Ctrl-C between steps, never inside one: what computes runs on a thread of its own.

Python raises KeyboardInterrupt, and whatever another signal's handler raises, on the main thread, between any two
instructions. No `try` covers all the gaps between a native call and the line that records what it did, and with
immediate updates a step that has begun must end. So the main thread waits here, and the work runs where no signal's
exception can reach it. No handler is installed for that: the exception is caught where the main thread waits, and
raised again once the work is where it may end.

The work sees the caller's context variables, CUDA stream, default device and number of threads; grad mode, inference
mode and autocast are the step's own (`numerics.arithmetic`). What torch keeps per thread and offers no way to hand over
(`observer`: a profiler, for one) would see nothing of the work, so under one the work runs on the caller's thread. An
interrupt, or any other exception that is not megatrain's own, then leaves an engine that refuses everything. On any
thread but the main one there is nothing to guard against, and the work runs there.

Whichever thread it is, one piece of work runs at a time, and none in a fork of the process, which has the engine's
memory and none of its threads.
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
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from megatrain.errors import ConfigError, EngineBroken, MegatrainError

log: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")

_GRACE_S = 0.5
"""How long an interrupt waits for work that was asked to stop, before it is raised while the work still runs."""

_EXIT_S = 5.0
"""How long the end of the process waits for such work."""

_LOOK_S = 0.1
"""How often a waiting thread checks by itself whether the work has ended: an interrupt may have come between the end of
the work and its notification."""


class GivenUp(BaseException):
    """Work stopped because of an interrupt. Raised on the guard's thread and caught there."""


class InterruptGuard:
    """A thread for the work of one engine, and the work that still runs there after an interrupt."""

    def __init__(self, device: torch.device, busy: "threading.Lock | None" = None) -> None:
        self._device = device
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._job: _Job | None = None
        """The last one; it may still run when an interrupt did not wait for its end."""
        self.broken: str = ""
        """Why what ran can no longer be trusted; empty while it can."""
        self._cut = ""
        """Why what ran on the caller's thread cannot be trusted, unless it still runs."""
        self._process = os.getpid()
        self._busy = busy or threading.Lock()
        """Held by the work that runs, where no interrupt arrives, and by whoever else `busy` was given to."""
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name="megatrain-step", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._jobs.put, None).atexit = False
        _GUARDS.add(self)

    def run(self, body: Callable[[], T], *, finish: bool) -> T:
        """What `body` returns. An interrupt that comes meanwhile is raised when the work has ended. With `finish` the
        work is completed first; a second interrupt is raised at once and leaves the engine broken. Without, the work is
        asked to stop (`check`), and after half a second the interrupt is raised even if it still runs. Raises
        ConfigError when other work is under way."""
        self.settle()
        if threading.current_thread() is not threading.main_thread():
            return self._alone(body)()
        if (watched := observer()) is not None:
            return self._on_the_callers_thread(body, watched)
        job = self._job = _Job(self._as_the_caller(self._alone(body)))
        try:
            self._jobs.put(job)
            job.wait()
        except BaseException:
            # No call stands between here and the inner `try`, so that no second interrupt gets past it.
            job.given_up = not finish
            try:
                if not job.withdraw():
                    if finish:
                        log.warning(
                            "interrupted: finishing the step first; a second interrupt leaves the engine unusable"
                        )
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
        """Called by the work: raises GivenUp when it has been asked to stop."""
        job = self._job
        if job is not None and job.given_up:
            raise GivenUp

    def settle(self) -> None:
        """Waits for work that still runs after an interrupt. Raises EngineBroken when it cannot be trusted, and in a
        fork."""
        job = self._job
        if self.is_forked:
            raise EngineBroken(
                f"this engine belongs to process {self._process}, of which this one is a fork without its threads; "
                "create the engine after the fork, or start such processes with spawn"
            )
        if self.broken:
            raise EngineBroken(self.broken)
        if self._cut and not self._busy.locked():
            raise EngineBroken(self._cut)
        if job is not None and threading.current_thread() is not self._thread:
            job.wait()
            if threading.current_thread() is threading.main_thread():
                self._job = None

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the engine's."""
        return os.getpid() != self._process

    def leave(self, seconds: float | None = None) -> None:
        """Asks work that still runs to stop before its next operation, and waits for it."""
        job = self._job
        if job is not None and threading.current_thread() is not self._thread:
            job.given_up = True
            job.wait(seconds)

    def _alone(self, body: Callable[[], T]) -> Callable[[], T]:
        """`body`, which runs only while no other work of this engine does."""

        def run() -> T:
            if not self._busy.acquire(blocking=False):
                raise under_way()
            try:
                return body()
            finally:
                self._busy.release()

        return run

    def _on_the_callers_thread(self, body: Callable[[], T], watched: str) -> T:
        """What `body` returns. An exception that may be an interrupt's is raised and leaves the engine broken."""

        def marked() -> T:
            self._cut = (
                f"a pass of this engine was cut off under {watched}, where nothing guards it against interrupts, so "
                "its state is not known; create the engine again and load a checkpoint"
            )
            try:
                found = body()
            except MegatrainError:
                self._cut = ""
                raise
            self._cut = ""
            return found

        with torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext():
            return self._alone(marked)()

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


def under_way() -> ConfigError:
    """What a call is told that comes while another one computes or plans."""
    return ConfigError(
        "another pass of this engine is under way (in another thread, or this call came from its loss_fn); wait for "
        "its end"
    )


def observer() -> str | None:
    """What observes or changes the operations of the calling thread alone, for a message; None where nothing does."""
    if torch._C._autograd._profiler_enabled():
        return "a torch profiler"
    functions = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    modes = [mode for mode in functions if not isinstance(mode, DeviceContext)]  # the default device is handed over
    for mode in (*modes, *_get_current_dispatch_mode_stack()):
        return type(mode).__name__
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return "hooks on saved tensors"
    return None


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


_GUARDS: "weakref.WeakSet[InterruptGuard]" = weakref.WeakSet()


@atexit.register
def _at_exit() -> None:
    """No thread may be inside torch when the interpreter shuts it down."""
    for guard in list(_GUARDS):
        guard.leave(_EXIT_S)


def _work(jobs: "queue.SimpleQueue[_Job | None]") -> None:
    while (job := jobs.get()) is not None:
        job.begin()
        del job  # what it held must not live until the next one
