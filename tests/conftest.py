"""What every test runs under: one torch thread, so that sums have one order and tests do not fight for cores.

And what tests of interrupts use: a signal whose handler raises."""

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of torch change rounding, so tests fix their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Interrupted(Exception):
    """What the signal handler of `interrupt_after` raises."""


@pytest.fixture
def interrupt_after() -> Iterator[Callable[[float], None]]:
    """Sends this process a signal, whose handler raises `Interrupted`, after so many seconds."""

    def handler(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, handler)
    timers: list[threading.Timer] = []

    def start(seconds: float) -> None:
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGUSR1))
        timers.append(timer)
        timer.start()

    yield start
    for timer in timers:
        timer.cancel()
        timer.join()
    signal.signal(signal.SIGUSR1, before)
