"""The CUDA device over a driver written in C for these tests: every call, every failure, and nothing left behind.

What a fake cannot show, order between streams and the kernels' own text, `tests/gpu` shows on a card.
"""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from support.hangs import HANG_SECONDS

SOURCE = Path(__file__).parents[1] / "support" / "fake_driver.c"

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc, to build the fake driver, is not installed")

PRELUDE = """
import ctypes, gc, json
from megatrain import _core

driver = ctypes.CDLL("libcuda.so.1")
driver.cuCtxSetCurrent.argtypes = [ctypes.c_void_p]
KINDS = ["context", "memory", "registration", "stream", "event", "module"]

def live():
    gc.collect()
    return {kind: driver.fake_live(kind.encode()) for kind in KINDS if driver.fake_live(kind.encode())}
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds the fake driver."""
    folder = tmp_path_factory.mktemp("driver")
    options = ["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-O2", "-ffp-contract=off"]
    library = str(folder / "libcuda.so.1")
    subprocess.run(["gcc", *options, "-o", library, str(SOURCE), "-lm", "-lpthread"], check=True)
    return folder


def run(driver: Path, code: str, **environment: str) -> str:
    """Runs code beside the fake driver, in an interpreter of its own; what it printed."""
    answer = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        env=os.environ | {"LD_LIBRARY_PATH": str(driver), "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


def test_the_cuda_device_passes_the_conformance_suite_and_leaves_nothing_behind(driver: Path) -> None:
    code = """
        status = json.loads(_core.cuda_status())
        assert status["available"] and status["driver"] == "12.8" and status["reason"] is None, status
        device = _core.Device.cuda()
        assert (device.kind, device.name, device.capability) == ("cuda", "Fake", (9, 0))
        assert status["devices"] == [{"name": "Fake", "total_bytes": device.total_bytes, "capability": [9, 0]}]
        _core.conformance(device)
        assert {"memory", "registration"} & live().keys() == set()
        assert set(json.loads(_core.probe_device(device, 1 << 22))) == {
            "h2d_gbs", "d2h_gbs", "bidirectional_gbs", "pin_gbs"}
        del device
        print(live())
    """
    assert run(driver, code) == "{}"


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("on_device", [0, 1, 3])
def test_an_engine_on_it_is_bit_equal_to_one_on_the_simulated_device(
    driver: Path, precision: str, on_device: int
) -> None:
    code = f"""
        import torch

        NUMEL, PRECISION, ON_DEVICE = 5003, {precision!r}, {on_device}
        DTYPE = torch.bfloat16 if PRECISION == "bf16" else torch.float32

        def train(kind):
            units = [
                {{"name": name, "role": role, "kept_bytes": 0, "input_bytes": 0, "flops": 1.0, "tensors": [
                    {{"name": name, "shape": [NUMEL], "dtype": "f32", "role": "trainable", "group": 0}}]}}
                for name, role in (("embed", "embed"), ("a", "layer"), ("b", "layer"), ("c", "layer"), ("head", "head"))
            ]
            request = json.dumps({{
                "units": units, "tied": False, "precision": PRECISION, "grad_precision": PRECISION,
                "update": "just_in_time", "micro_batches": 1, "workspace_bytes": 0, "device": kind,
                "budget": {{"device": 1 << 28, "host": 1 << 28}},
                "requests": {{"state_on_device": ON_DEVICE, "slots": 2}}}})
            device = _core.Device.cuda() if kind == "cuda" else _core.Device.cpu(seed=3)
            engine = _core.Engine(device, request, _core.plan(request), '{{"threads": 2}}')
            assert engine.warnings() == []
            generator = torch.Generator().manual_seed(0)
            for unit in range(5):
                engine.write(unit, 0, "master", torch.randn(NUMEL, generator=generator))
            region = engine.region("grads")
            # On the fake device memory is the host's: its address is read from the capsule, as torch would not.
            capsule = region.__dlpack__()
            get = ctypes.pythonapi.PyCapsule_GetPointer
            get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
            base = ctypes.cast(get(capsule, b"dltensor"), ctypes.POINTER(ctypes.c_void_p))[0]
            assert region.__dlpack_device__() == ((2, 0) if kind == "cuda" else (1, 0))
            norms = []
            for step in range(4):
                engine.begin("train", 1)
                while (op := engine.next()) is not None:
                    if op.phase in ("loss", "backward", "embed_backward"):
                        grad = torch.randn(NUMEL, generator=generator).to(DTYPE)
                        ctypes.memmove(base + op.grad, grad.data_ptr(), grad.nbytes)
                    engine.finish(op)
                norms.append(engine.apply([(1e-2, 0.9, 0.99, 1e-8, 0.1)], 1.0).grad_norm)
            planes = []
            for unit in range(5):
                for plane in ("master", "exp_avg", "exp_avg_sq"):
                    out = torch.empty(NUMEL)
                    engine.read(unit, 0, plane, out)
                    planes.append(out.view(torch.int32))
            stats = json.loads(engine.stats())
            assert stats["lanes"]["download"] >= 0
            # Whatever was queued on the fake device is over at once.
            assert (stats["launching_s"] > 0) == (kind == "cuda"), stats
            engine.close()
            return norms, torch.stack(planes)

        fake, simulated = train("cuda"), train("cpu")
        assert fake[0] == simulated[0] or PRECISION == "fp32", (fake[0], simulated[0])
        assert torch.allclose(torch.tensor(fake[0]), torch.tensor(simulated[0]), rtol=1e-12)
        print(torch.equal(fake[1], simulated[1]), live())
    """
    assert run(driver, code) == "True {}"


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        ("cuDeviceGetCount:1=3", "cuDeviceGetCount"),
        ("cuDevicePrimaryCtxRetain:1=2", "cuDevicePrimaryCtxRetain"),
        ("cuStreamCreate:2=2", "cuStreamCreate"),
        ("cuModuleLoadDataEx:2=218", "ptxas fatal: as asked"),
        ("cuModuleGetFunction:3=500", "cuModuleGetFunction"),
        ("cuCtxSetCurrent:1=201", "cuCtxSetCurrent"),
    ],
)
def test_opening_that_fails_names_its_call_leaves_nothing_and_can_be_tried_again(
    driver: Path, failure: str, words: str
) -> None:
    code = """
        try:
            _core.Device.cuda()
        except _core.DeviceError as error:
            print(error)
        print(live())
        _core.conformance(_core.Device.cuda())
        print(live())
    """
    message, after, at_last = run(driver, code, FAKE_FAIL=failure).splitlines()
    assert words in message
    assert after == at_last == "{}"


@pytest.mark.parametrize(
    ("failure", "attempt", "words"),
    [
        ("cuMemAlloc_v2:1=2", "device.allocate(4096)", "out of device memory: 4096 bytes were asked for"),
        ("cuMemsetD8Async:1=719", "device.allocate(4096)", "cuMemsetD8Async"),
        ("cuMemHostRegister_v2:1=304", "device.allocate_host(4096)", "the operating system refused"),
        ("cuMemGetInfo_v2:1=999", "device.free_bytes", "dmesg"),
        ("cuMemcpyHtoDAsync_v2:2=700", "_core.probe_device(device, 1 << 20)", "illegal address"),
        ("cuEventSynchronize:1=719", "_core.probe_device(device, 1 << 20)", "cuEventSynchronize"),
        ("cuEventRecord:1=400", "_core.probe_device(device, 1 << 20)", "invalid handle"),
    ],
)
def test_a_call_that_fails_is_an_error_and_the_next_one_works(
    driver: Path, failure: str, attempt: str, words: str
) -> None:
    code = f"""
        device = _core.Device.cuda()
        try:
            {attempt}
        except _core.DeviceError as error:
            print(error)
        {attempt}
        print({{"memory", "registration"}} & live().keys())
        del device
        print(live())
    """
    message, left, at_last = run(driver, code, FAKE_FAIL=failure).splitlines()
    assert words in message
    assert (left, at_last) == ("set()", "{}")


@pytest.mark.parametrize("call", ["cuMemFree_v2", "cuStreamDestroy_v2", "cuEventDestroy_v2", "cuModuleUnload"])
def test_what_fails_while_something_is_given_back_does_not_surface_in_a_later_call(driver: Path, call: str) -> None:
    code = """
        device = _core.Device.cuda()
        _core.conformance(device)
        del device
        device = _core.Device.cuda()
        _core.conformance(device)
        print("done")
    """
    assert run(driver, code, FAKE_FAIL=f"{call}:1=700") == "done"


def test_more_than_there_is_is_refused_with_both_numbers(driver: Path) -> None:
    code = """
        device = _core.Device.cuda()
        held = device.allocate(1 << 20)
        try:
            device.allocate(1 << 40)
        except _core.DeviceError as error:
            print(error)
    """
    message = run(driver, code)
    assert str(1 << 40) in message
    # The fake's addresses are aligned to 256 bytes and ours to 512, for which half a KiB more is taken.
    assert f"{(1 << 30) - (1 << 20) - 512} are free" in message


@pytest.mark.parametrize(("capability", "allowed"), [("6.1", False), ("7.0", True), ("12.0", True)])
def test_cards_before_volta_are_refused_by_name(driver: Path, capability: str, allowed: bool) -> None:
    code = """
        try:
            print(_core.Device.cuda().capability)
        except _core.DeviceError as error:
            print(error)
    """
    answer = run(driver, code, FAKE_CAPABILITY=capability)
    if allowed:
        assert answer == f"({capability.replace('.', ', ')})"
    else:
        assert "Fake has compute capability 6.1" in answer


def test_the_callers_current_context_comes_back(driver: Path) -> None:
    code = """
        device = _core.Device.cuda()
        other = ctypes.c_void_p(12345)
        driver.cuCtxSetCurrent(other)
        device.free_bytes
        now = ctypes.c_void_p()
        driver.cuCtxGetCurrent(ctypes.byref(now))
        print(now.value)
    """
    assert run(driver, code) == "12345"


def test_memory_lent_by_a_device_outlives_it_and_goes_back_at_last(driver: Path) -> None:
    code = """
        import torch

        device = _core.Device.cuda()
        buffer, host = device.allocate(4096), device.allocate_host(4096)
        capsule = buffer.__dlpack__(stream=1, max_version=(1, 0))
        tensor = torch.from_dlpack(host)
        del device, buffer, host
        print(live())
        del capsule
        tensor.fill_(1)
        del tensor
        print(live())
    """
    held, at_last = run(driver, code).splitlines()
    assert "'memory': 1" in held
    assert "'registration': 1" in held
    assert "'context': 1" in held
    assert at_last == "{}"
