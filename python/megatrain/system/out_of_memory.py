"""Which errors say that memory ran out, and the bytes that they name. Needs no torch."""

import math
import re
import sys

from megatrain.units import parse_size

_MESSAGES = (
    "out of memory",  # "CUDA out of memory", and the driver's "CUDA error: out of memory"
    "can't allocate memory",  # torch's DefaultCPUAllocator
    "not enough memory: you tried to allocate",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
_WANTED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?(?:[KMGT]i?B|bytes))")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out. Does not import torch."""
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _MESSAGES)


def wanted_bytes(error: BaseException) -> int | None:
    """Bytes of the allocation that failed, where the message says; None where it does not."""
    match = _WANTED.search(str(error))
    if match is None:
        return None
    return parse_size(match[1].replace("bytes", "B"), most=math.inf)
