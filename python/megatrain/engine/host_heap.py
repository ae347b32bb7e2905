"""Keeps a process on the CPU within its plan: what torch has freed goes back to the system before it takes more.

There torch allocates activations with malloc, and glibc keeps what is freed in its heap, cut into pieces that often do
not suit the next request, so that a process took 1.2 to 1.4 times what was planned. A fixed M_MMAP_THRESHOLD avoids
that and makes every allocation fault its pages in again: 40 % of a step's time where activations dominate. Trimming
only when the plan is about to be exceeded costs 15 % there, and nothing where the heap stays within it
(mallopt(3), malloc_trim(3)).
"""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

_ALLOWED = 1.02
"""Share of the planned bytes at which the heap is trimmed."""
_PAGE = os.sysconf("SC_PAGESIZE")


def anonymous_bytes() -> int:
    """Resident memory of this process that is no mapped file (proc(5), statm); 0 where the system does not say."""
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_bytes().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * _PAGE


def trim() -> None:
    """Gives free pages of malloc's heaps back to the system; nothing where the C library cannot."""
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if release is not None:
        release(0)


class HeapLimit:
    """Trims the heap whenever the process has grown past its plan."""

    def __init__(
        self,
        base: int,  # bytes that the process had before anything of the plan was allocated
        planned: int,  # bytes of the plan
        measure: Callable[[], int] = anonymous_bytes,
        release: Callable[[], None] = trim,
    ) -> None:
        self._measure, self._release = measure, release
        self._slack = int(planned * (_ALLOWED - 1))
        self.limit: int = base + planned + self._slack
        """Bytes of the process at which its heap is trimmed."""

    def check(self) -> None:
        """Trims where the limit is exceeded. What stays after that is in use, by others than the engine too, so that
        it counts as the new base."""
        if self._measure() > self.limit:
            self._release()
            self.limit = max(self.limit, self._measure() + self._slack)
