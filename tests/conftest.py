"""What every test runs under: one torch thread, so that sums have one order and tests do not fight for cores.

And what tests of interrupts use: a signal whose handler raises."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from support.interrupts import Interrupted

# Below `nohup`, or in the background of a shell script, these are ignored, and so they would be in what tests start.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _handler)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of torch change rounding, so tests fix their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def no_users_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What was measured of this machine, or tokenized on it, shows in no test; and no test leaves anything there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A test that the table of architectures is made of and that does not run has failed: its row would not be true."""
    from support.architectures import TESTS, test_of

    report: Any = yield
    if report.outcome == "skipped" and test_of(item) in TESTS:
        report.outcome = "failed"
    return report


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
