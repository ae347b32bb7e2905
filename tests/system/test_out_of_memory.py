"""Which errors say that memory ran out, and the bytes that they name."""

import pytest
import torch

from megatrain.system.out_of_memory import is_out_of_memory, wanted_bytes


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 54.50 GiB. GPU 0 has"), 54.5 * 2**30),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 79"), 20 << 20),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes. Error"), 64),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 128 bytes."), 128),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), None),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), None),
        (MemoryError(), None),
    ],
)
def test_memory_that_ran_out_is_recognised(error: Exception, wanted: float | None) -> None:
    assert is_out_of_memory(error)
    assert wanted_bytes(error) == wanted


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), ValueError("out of memory"), OSError("full")])
def test_other_errors_are_not(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_torchs_own_error_on_the_cpu_is_recognised() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)
    assert wanted_bytes(raised.value) == 1 << 60
