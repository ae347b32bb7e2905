"""DLPack both ways: what is lent lives until its borrower ends, and only contiguous host arrays are taken in."""

import ctypes
import gc
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megatrain import _core
from support.hangs import HANG_SECONDS

MIB = 1 << 20
capsule_name = ctypes.pythonapi.PyCapsule_GetName
capsule_name.restype = ctypes.c_char_p
capsule_name.argtypes = [ctypes.py_object]


@pytest.fixture
def device() -> _core.Device:
    """A simulated device of 64 MiB."""
    return _core.Device.cpu(faults=f'{{"memory_bytes": {64 * MIB}}}')


# --- out


@pytest.mark.parametrize("kind", ["allocate", "allocate_host"])
def test_a_buffer_is_one_memory_for_torch_and_numpy(device: _core.Device, kind: str) -> None:
    buffer = getattr(device, kind)(4096)
    assert len(buffer) == 4096
    assert buffer.__dlpack_device__() == (1, 0)
    tensor, array = torch.from_dlpack(buffer), np.from_dlpack(buffer)
    assert (tensor.dtype, tensor.shape) == (torch.uint8, (4096,))
    assert not tensor.any()
    tensor[7] = 9
    if array.flags.writeable:  # NumPy before 2.1 only ever reads what it imports
        array[8] = 10
    else:
        tensor[8] = 10
    assert array[6:10].tolist() == [0, 9, 10, 0]
    assert torch.from_dlpack(buffer)[6:10].tolist() == [0, 9, 10, 0]
    words = tensor.view(torch.bfloat16)
    words.fill_(1.5)
    assert array[:2].tolist() == [0xC0, 0x3F]


def test_a_buffer_is_aligned_for_every_dtype(device: _core.Device) -> None:
    for size in (1, 4095, 70_001):
        assert torch.from_dlpack(device.allocate(size)).data_ptr() % 512 == 0
        assert torch.from_dlpack(device.allocate_host(size)).data_ptr() % 4096 == 0


@pytest.mark.parametrize(
    ("version", "name"),
    [(None, b"dltensor"), ((0, 8), b"dltensor"), ((1, 0), b"dltensor_versioned"), ((1, 9), b"dltensor_versioned")],
)
def test_the_capsule_is_of_the_version_that_the_consumer_asks_for(
    device: _core.Device, version: tuple[int, int] | None, name: bytes
) -> None:
    capsule = device.allocate(64).__dlpack__(max_version=version)
    assert capsule_name(capsule) == name
    assert torch.from_dlpack(capsule).numel() == 64


def test_memory_lives_as_long_as_the_last_array_over_it() -> None:
    device = _core.Device.cpu(faults=f'{{"memory_bytes": {64 * MIB}}}')
    free = device.free_bytes
    buffer = device.allocate(8 * MIB)
    assert device.free_bytes <= free - 8 * MIB
    tensor = torch.from_dlpack(buffer)
    view = tensor[MIB : 2 * MIB]
    del buffer, tensor
    gc.collect()
    assert device.free_bytes <= free - 8 * MIB
    view.fill_(3)
    assert int(view.sum(dtype=torch.int64)) == 3 * MIB
    del view
    gc.collect()
    assert device.free_bytes == free


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_a_capsule_that_nobody_takes_gives_its_memory_back(
    device: _core.Device, version: tuple[int, int] | None
) -> None:
    free = device.free_bytes
    capsule = device.allocate(MIB).__dlpack__(max_version=version)
    assert device.free_bytes < free
    del capsule
    gc.collect()
    assert device.free_bytes == free


def test_an_array_may_end_on_another_thread(device: _core.Device) -> None:
    free = device.free_bytes
    held = [torch.from_dlpack(device.allocate(MIB))]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert device.free_bytes == free


def test_what_cannot_be_honoured_is_refused(device: _core.Device) -> None:
    buffer = device.allocate(64)
    with pytest.raises(BufferError, match="only ever shared"):
        buffer.__dlpack__(copy=True)
    with pytest.raises(BufferError, match=r"\(1, 0\) and is not copied to \(2, 0\)"):
        buffer.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match="no stream"):
        buffer.__dlpack__(stream=1)
    assert buffer.__dlpack__(dl_device=(1, 0), copy=False) is not None


def test_the_interpreter_may_exit_with_arrays_and_capsules_alive() -> None:
    code = """
        import threading
        import numpy as np, torch
        from megatrain import _core

        device = _core.Device.cpu()
        held = [torch.from_dlpack(device.allocate(4096)), np.from_dlpack(device.allocate_host(4096))]
        capsules = [device.allocate(64).__dlpack__(), device.allocate(64).__dlpack__(max_version=(1, 0))]
        torch.keep = torch.from_dlpack(device.allocate(4096))  # outlives this module's globals
        cycle = [torch.from_dlpack(device.allocate(64))]
        cycle.append(cycle)
        grown = torch.from_dlpack(device.allocate(4096)).view(torch.float32).requires_grad_()
        (grown * 2).sum().backward()
        threading.Thread(target=threading.Event().wait, args=(0.2,), daemon=True).start()
        print("leaving", flush=True)
    """
    answer = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code)],
        capture_output=True, text=True, timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "leaving\n", "")


# --- in: capsules of every shape, made by hand


class DlDevice(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("id", ctypes.c_int32)]


class DlDtype(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class DlTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", DlDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", DlDtype),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Managed(ctypes.Structure):
    _fields_ = [("tensor", DlTensor), ("context", ctypes.c_void_p), ("deleter", DELETER)]


class ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", DlTensor),
    ]


class Producer:
    """An array of eight fp32 zeros whose DLPack tensor is as asked, however odd; counts calls of its deleter."""

    def __init__(
        self,
        *,
        kind: int = 1,
        dtype: tuple[int, int, int] = (2, 32, 1),
        shape: tuple[int, ...] = (8,),
        strides: tuple[int, ...] | None = None,
        offset: int = 0,
        null: bool = False,
        version: tuple[int, int] | None = (1, 0),
        flags: int = 0,
    ) -> None:
        self.values = (ctypes.c_float * 16)()
        self.ended = 0
        self._deleter = DELETER(self._end)
        tensor = DlTensor(
            data=None if null else ctypes.addressof(self.values),
            device=DlDevice(kind, 0),
            ndim=len(shape),
            dtype=DlDtype(*dtype),
            shape=(ctypes.c_int64 * max(len(shape), 1))(*shape),
            strides=None if strides is None else (ctypes.c_int64 * max(len(strides), 1))(*strides),
            byte_offset=offset,
        )
        self._managed: Managed | ManagedVersioned
        if version is None:
            self._managed, self._name = Managed(tensor=tensor, deleter=self._deleter), b"dltensor"
        else:
            self._managed = ManagedVersioned(*version, deleter=self._deleter, flags=flags, tensor=tensor)
            self._name = b"dltensor_versioned"
        self._kind = kind

    def _end(self, _: int) -> None:
        self.ended += 1

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self._kind, 0)

    def __dlpack__(self, **_: Any) -> object:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self._managed), self._name, None)


def take(master: Any, length: int = 8) -> torch.Tensor:
    """Gives `master` to a native call; what the call read, as it came out."""
    weights, residual = torch.ones(length, dtype=torch.bfloat16), torch.ones(length, dtype=torch.int16)
    _core.split(master, weights, residual)
    return weights


@pytest.mark.parametrize("version", [None, (1, 0), (1, 7)])
@pytest.mark.parametrize("kind", [1, 3], ids=["kDLCPU", "kDLCUDAHost"])
def test_host_arrays_of_both_kinds_and_versions_are_taken_and_ended_once(
    kind: int, version: tuple[int, int] | None
) -> None:
    producer = Producer(kind=kind, version=version)
    producer.values[:8] = [float(i) for i in range(8)]
    assert take(producer).tolist() == list(range(8))
    assert producer.ended == 1


@pytest.mark.parametrize(
    "same",
    [
        {"shape": (2, 4), "strides": (4, 1)},
        {"shape": (1, 8), "strides": (99, 1)},
        {"shape": (8, 1), "strides": (1, 0)},
        {"shape": (2, 2, 2), "strides": None},
        {"offset": 16},
    ],
    ids=str,
)
def test_contiguous_layouts_are_taken_however_they_are_written(same: dict[str, Any]) -> None:
    producer = Producer(**same)
    producer.values[:] = [float(i) for i in range(16)]
    first = same.get("offset", 0) // 4
    assert take(producer).tolist() == list(range(first, first + 8))


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"strides": (2,)}, r"contiguous array .* strides \[2\]"),
        ({"strides": (0,)}, r"contiguous array .* strides \[0\]"),
        ({"strides": (-1,)}, r"contiguous array .* strides \[-1\]"),
        ({"shape": (2, 4), "strides": (1, 2)}, "contiguous array"),
        ({"shape": (-8,)}, "shape"),
        ({"shape": (2**62, 4)}, "shape"),
        ({"shape": (2**40, 2**40)}, "shape"),
        ({"offset": 2}, "not aligned"),
        ({"null": True}, "not aligned"),
        ({"dtype": (2, 32, 2)}, r"code 2, 32 bits, 2 lanes"),
        ({"dtype": (9, 8, 1)}, r"code 9, 8 bits"),
        ({"dtype": (2, 64, 1)}, "float32 is needed, float64 was given"),
        ({"kind": 2}, r"CUDA device 0; one in host memory"),
        ({"kind": 13}, "device type 13"),
        ({"version": (2, 0)}, r"DLPack 2\.0 was given"),
    ],
    ids=str,
)
def test_odd_arrays_are_refused_with_what_was_got(odd: dict[str, Any], words: str) -> None:
    producer = Producer(**odd)
    with pytest.raises((ValueError, TypeError, BufferError), match=f"master: .*{words}"):
        take(producer)
    # Refused before it was consumed (0), or consumed and ended (1): never twice.
    assert producer.ended <= 1


def test_a_read_only_array_is_read_but_not_written() -> None:
    assert take(Producer(flags=1)).tolist() == [0.0] * 8
    with pytest.raises(ValueError, match="weights: a read-only array"):
        _core.split(torch.zeros(8), Producer(flags=1, dtype=(4, 16, 1)), torch.zeros(8, dtype=torch.int16))
    fixed = np.zeros(8, dtype=np.int16)
    fixed.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        _core.split(torch.zeros(8), torch.zeros(8, dtype=torch.bfloat16), fixed)


def test_a_capsule_is_taken_once() -> None:
    capsule = torch.zeros(8).__dlpack__()
    assert take(capsule).tolist() == [0.0] * 8
    with pytest.raises(BufferError, match="consumed before"):
        take(capsule)


def test_what_is_no_array_is_refused_by_its_type() -> None:
    with pytest.raises(TypeError, match=r"master: an array with __dlpack__ .*, list was given"):
        take([0.0] * 8)


def test_arrays_of_torch_that_cannot_be_lent_keep_torchs_own_words() -> None:
    with pytest.raises(BufferError, match="require"):
        take(torch.zeros(8, requires_grad=True))


def test_an_empty_array_may_lie_nowhere() -> None:
    assert take(Producer(shape=(0,), null=True), length=0).numel() == 0
    assert take(torch.empty(0), length=0).numel() == 0


@pytest.fixture
def adamw() -> Callable[..., None]:
    """AdamW over arrays of eight elements, any of which can be replaced."""

    def run(**replaced: Any) -> None:
        arrays = {name: torch.zeros(8) for name in ("weights", "exp_avg", "exp_avg_sq", "grad")}
        arrays |= replaced
        residual = arrays.pop("residual", None)
        weights, exp_avg, exp_avg_sq, grad = arrays.values()
        _core.adamw(
            weights, residual, exp_avg, exp_avg_sq, grad,
            lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, step=1,
        )  # fmt: skip

    return run


def test_arrays_that_share_memory_are_refused(adamw: Callable[..., None]) -> None:
    both = torch.zeros(12)
    with pytest.raises(ValueError, match="share memory"):
        adamw(exp_avg=both[:8], exp_avg_sq=both[4:])
    twice = torch.zeros(16)
    adamw(exp_avg=twice[:8], exp_avg_sq=twice[8:])


def test_arrays_of_unequal_length_are_refused(adamw: Callable[..., None]) -> None:
    with pytest.raises(ValueError, match="grad has 9 elements, weights has 8"):
        adamw(grad=torch.zeros(9))


def test_wrong_dtypes_are_refused_with_the_right_ones(adamw: Callable[..., None]) -> None:
    with pytest.raises(TypeError, match=r"weights \(without a residual\): float32 is needed, bfloat16"):
        adamw(weights=torch.zeros(8, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match=r"weights \(with a residual\): bfloat16 is needed, float32"):
        adamw(residual=torch.zeros(8, dtype=torch.int16))
    with pytest.raises(TypeError, match="grad: bfloat16 or float32 is needed, float16"):
        adamw(grad=torch.zeros(8, dtype=torch.float16))
