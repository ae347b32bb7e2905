"""The native module: errors, optimizer kernels against PyTorch, starting with, without and beside odd GPU drivers."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from megatrain import _core
from support.hangs import HANG_SECONDS

LENGTHS = [0, 1, 7, 8, 15, 16, 17, 1023, 4097]
GUARD = 64  # elements either side of an array under test, which must not change
ISAS = ["scalar", "avx2", "avx512"]
AVAILABLE_ISAS = ISAS[: ISAS.index(_core.isa()) + 1]
EACH_ISA = [  # one that is missing is reported as skipped
    pytest.param(isa, marks=pytest.mark.skipif(isa not in AVAILABLE_ISAS, reason=f"{isa}: not on this machine"))
    for isa in ISAS
]

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc, to build a small library, is not installed")


def guarded(values: torch.Tensor, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy of `values` that starts `offset` elements off a 64-byte line, and the tensor around it.

    Everything around it holds ones.
    """
    size = values.element_size()
    around = torch.ones(values.numel() + 2 * GUARD + 64, dtype=values.dtype)
    lead = (-(around.data_ptr() // size)) % (64 // size) + offset
    inner = around[GUARD + lead : GUARD + lead + values.numel()]
    assert values.numel() == 0 or (inner.data_ptr() - offset * size) % 64 == 0
    inner.copy_(values)
    return inner, around


def untouched(inner: torch.Tensor, around: torch.Tensor) -> bool:
    """Whether everything around `inner` still holds ones."""
    start = inner.storage_offset()
    return bool((around[:start] == 1).all()) and bool((around[start + inner.numel() :] == 1).all())


def joined(weights: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The fp32 master of a bf16 upper plane and its int16 residual."""
    return ((weights.view(torch.int16).to(torch.int32) << 16) + residual.to(torch.int32)).view(torch.float32)


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bf16 upper plane and the int16 residual of an fp32 master."""
    weights = torch.empty(master.shape, dtype=torch.bfloat16)
    residual = torch.empty(master.shape, dtype=torch.int16)
    _core.split(master, weights, residual)
    return weights, residual


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a fresh interpreter, with the environment's variables changed as asked."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    environment = os.environ | environment
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)


def shared_library(folder: Path, name: str, source: str) -> Path:
    """Builds a C library."""
    text = folder / f"{name}.c"
    text.write_text(textwrap.dedent(source))
    library = folder / name
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(text)], check=True)
    return library


# --- errors


@pytest.mark.parametrize("name", ["DoesNotFit", "DeviceError", "StorageError", "EngineBroken"])
def test_every_error_is_a_megatrain_error(name: str) -> None:
    assert issubclass(getattr(_core, name), _core.MegatrainError)
    assert issubclass(_core.MegatrainError, Exception)


def test_a_refused_device_call_is_a_device_error_that_names_the_call() -> None:
    device = _core.Device.cpu(faults='{"fail": [{"call": "allocate", "nth": 2}]}')
    device.allocate(512)
    with pytest.raises(_core.DeviceError, match="allocate"):
        device.allocate(512)
    device.allocate(512)


def test_more_memory_than_there_is_is_refused_as_an_ordinary_exception() -> None:
    device = _core.Device.cpu(faults='{"memory_bytes": 4096}')
    with pytest.raises(_core.MegatrainError, match=r"8192|memory"):
        device.allocate(8192)
    with pytest.raises(_core.DoesNotFit, match="mmap") as caught:
        _core.Device.cpu().allocate_host(1 << 62)
    assert caught.value.items == [{"what": "mmap", "tier": "host", "bytes": 1 << 62, "pinned": False}]


def test_a_panic_in_the_native_part_is_an_ordinary_exception_of_ours() -> None:
    device = _core.Device.cpu(faults='{"fail": [{"call": "allocate", "nth": 1, "panic": true}]}')
    with pytest.raises(_core.EngineBroken, match="a bug in the native core: call 1 of allocate"):
        device.allocate(512)
    assert not torch.from_dlpack(device.allocate(512)).any()


@pytest.mark.parametrize("size", [0, 4096, 2**63, 2**64 - 1])
def test_probes_refuse_sizes_that_measure_nothing_or_do_not_exist(size: int) -> None:
    device = _core.Device.cpu()
    for probe in (
        lambda: _core.probe_host(size, 1),
        lambda: _core.probe_device(device, size),
        lambda: _core.probe_beside_link(device, size, 1),
    ):
        with pytest.raises(ValueError, match=f"not {size}"):
            probe()


def test_probes_measure_positive_rates() -> None:
    host = json.loads(_core.probe_host(1 << 22, 2))
    link = json.loads(_core.probe_device(_core.Device.cpu(), 1 << 22))
    updates = {"adamw_params_per_s", "adamw_bf16_params_per_s", "adamw_8bit_params_per_s"}
    assert host.keys() == {"touch_gbs", "copy_gbs", *updates}
    assert link.keys() == {"h2d_gbs", "d2h_gbs", "bidirectional_gbs", "pin_gbs"}
    beside = json.loads(_core.probe_beside_link(_core.Device.cpu(), 1 << 22, 1))
    assert beside.keys() == {"adamw_beside_link_params_per_s", "link_beside_adamw_gbs"}
    assert all(rate > 0 for rate in (host | link | beside).values())


def test_a_probe_ends_when_the_link_fails_beside_the_optimizer() -> None:
    device = _core.Device.cpu(faults='{"fail": [{"call": "copy_to_host", "nth": 3}]}')
    with pytest.raises(_core.DeviceError, match="copy_to_host"):
        _core.probe_beside_link(device, 1 << 22, 1)


def test_unknown_faults_are_refused() -> None:
    with pytest.raises(ValueError, match="faults"):
        _core.Device.cpu(faults='{"fial": []}')


# --- the optimizer's arithmetic


@pytest.mark.parametrize("isa", EACH_ISA)
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=["fp32-grad", "bf16-grad"])
@pytest.mark.parametrize("planes", ["split", "fp32"])
def test_adamw_follows_torch_at_every_length_and_alignment(isa: str, grad_dtype: torch.dtype, planes: str) -> None:
    settings = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    for length in LENGTHS:
        for offset in (0, 1, 3):
            generator = torch.Generator().manual_seed(1000 * length + offset)
            start = torch.randn(length, generator=generator)
            grads = [torch.randn(length, generator=generator).to(grad_dtype) for _ in range(3)]

            reference = torch.nn.Parameter(start.clone())
            optimizer = torch.optim.AdamW([reference], **settings)

            upper, lower = split(start)
            arrays = {"exp_avg": torch.zeros(length), "exp_avg_sq": torch.zeros(length)}
            arrays |= {"weights": upper, "residual": lower} if planes == "split" else {"weights": start}
            ours = {name: guarded(value, offset) for name, value in arrays.items()}
            for step, grad in enumerate(grads, start=1):
                reference.grad = grad.float()
                before = reference.detach().clone()
                if step > 1:  # each step from torch's own state, so that the bound is that of one step
                    state = optimizer.state[reference]
                    upper, lower = split(before)
                    start_of = {"weights": upper, "residual": lower} if planes == "split" else {"weights": before}
                    for name, value in start_of.items():
                        ours[name][0].copy_(value)
                    for name in ("exp_avg", "exp_avg_sq"):
                        ours[name][0].copy_(state[name])
                optimizer.step()
                update = (reference.detach() - before).abs()
                inner, around = guarded(grad, offset)
                _core.adamw(
                    ours["weights"][0],
                    ours["residual"][0] if planes == "split" else None,
                    ours["exp_avg"][0],
                    ours["exp_avg_sq"][0],
                    inner,
                    step=step,
                    isa=isa,  # type: ignore[arg-type]
                    **settings,
                )
                assert torch.equal(inner, grad)
                assert untouched(inner, around)
                weights = ours["weights"][0]
                master = joined(weights, ours["residual"][0]) if planes == "split" else weights
                allowed = 2e-6 * torch.maximum(reference.detach().abs(), update)
                assert bool(((master - reference.detach()).abs() <= allowed).all()), (length, offset, step)
                state = optimizer.state[reference]
                torch.testing.assert_close(ours["exp_avg"][0], state["exp_avg"], rtol=1e-6, atol=1e-7)
                torch.testing.assert_close(ours["exp_avg_sq"][0], state["exp_avg_sq"], rtol=1e-6, atol=1e-12)
            for name, (inner, around) in ours.items():
                assert untouched(inner, around), (name, length, offset)


def states_after(isa: str, threads: int, *, length: int = 70_001) -> list[torch.Tensor]:
    """Every plane after three updates whose gradients are absent, tiny and ordinary."""
    generator = torch.Generator().manual_seed(0)
    weights, residual = split(torch.randn(length, generator=generator))
    exp_avg, exp_avg_sq = torch.zeros(length), torch.zeros(length)
    for step in (1, 2, 3):
        grad = torch.randn(length, generator=generator)
        grad[::3] = 0
        grad[1::7] *= 1e-37
        _core.adamw(
            weights, residual, exp_avg, exp_avg_sq, grad.bfloat16(),
            lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01, step=step, grad_scale=0.37,
            isa=isa, threads=threads,  # type: ignore[arg-type]
        )  # fmt: skip
    return [weights.view(torch.int16), residual, exp_avg.view(torch.int32), exp_avg_sq.view(torch.int32)]


@pytest.mark.parametrize("isa", EACH_ISA)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_instruction_sets_and_thread_counts_agree_to_the_bit(isa: str, threads: int) -> None:
    for plane, expected in zip(states_after(isa, threads), states_after("scalar", 1), strict=True):
        assert torch.equal(plane, expected)


def test_a_tiny_update_is_not_lost_in_the_bf16_plane() -> None:
    weights, residual = split(torch.ones(16))
    reference = torch.nn.Parameter(torch.ones(16))
    optimizer = torch.optim.AdamW([reference], lr=1e-4, weight_decay=0.0)
    exp_avg, exp_avg_sq = torch.zeros(16), torch.zeros(16)
    grad = torch.full((16,), 0.5)
    for step in range(1, 101):
        reference.grad = grad.clone()
        optimizer.step()
        _core.adamw(
            weights, residual, exp_avg, exp_avg_sq, grad.bfloat16(),
            lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, step=step,
        )  # fmt: skip
    master = joined(weights, residual)
    moved, expected = 1 - master, 1 - reference.detach()
    assert float((moved - expected).abs().max() / expected.abs().max()) <= 1e-5
    assert torch.equal(weights, master.bfloat16())


def test_split_planes_give_every_kind_of_master_back() -> None:
    edges = torch.tensor(
        [0.0, -0.0, 1.0, -1.0, 2.0**-149, -(2.0**-126), 3.3895e38, -3.3895e38, 1 + 2.0**-9, 1 + 2.0**-8]
    )
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-(2**31), 2**31, (100_000,), generator=generator, dtype=torch.int64).to(torch.int32)
    random = random.view(torch.float32)
    master = torch.cat([edges, random[random.isfinite() & (random.abs() < 3.389e38)]])
    weights, residual = split(master)
    assert torch.equal(joined(weights, residual).view(torch.int32), master.view(torch.int32))
    # The upper plane is the bf16 nearest to the master; only ties may round the other way.
    differs = weights != master.bfloat16()
    assert bool((master.view(torch.int32)[differs] & 0xFFFF == 0x8000).all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": -1.0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\]"),
        ({"eps": -1e-8}, "eps"),
        ({"weight_decay": float("inf")}, "weight_decay"),
        ({"step": 0}, "from 1"),
        ({"threads": 0}, "threads"),
        ({"isa": "sse9"}, "sse9"),
    ],
)
def test_adamw_refuses_settings_outside_torchs(change: dict[str, object], message: str) -> None:
    settings = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "step": 1} | change
    with pytest.raises(ValueError, match=message):
        _core.adamw(torch.ones(8), None, torch.zeros(8), torch.zeros(8), torch.ones(8), **settings)  # type: ignore[arg-type]


# --- the process around it


@needs_gcc
def test_a_library_that_sets_flush_to_zero_changes_nothing(tmp_path: Path) -> None:
    library = shared_library(
        tmp_path,
        "libflush.so",
        """
        #include <xmmintrin.h>
        __attribute__((constructor)) static void flush(void) { _mm_setcsr(_mm_getcsr() | 0x8040); }
        int mode(void) { return _mm_getcsr() & 0x8040; }
        """,
    )
    code = f"""
        import ctypes, torch
        from megatrain import _core

        torch.set_num_threads(1)
        subnormal = torch.full((40,), 1e-39)  # made before anything is flushed

        def run():
            weights, exp_avg, exp_avg_sq = torch.zeros(40), torch.zeros(40), torch.zeros(40)
            for threads in (1, 2):
                for isa in {AVAILABLE_ISAS}:
                    # beta 0 makes exp_avg the gradient itself: scaled from subnormal to normal unless it was flushed
                    _core.adamw(weights, None, exp_avg, exp_avg_sq, subnormal, lr=1e-3, betas=(0.0, 0.0), eps=1e-8,
                                weight_decay=0.0, step=1, grad_scale=1024.0, isa=isa, threads=threads)
                    assert bool((exp_avg.view(torch.int32) != 0).all()), (isa, threads)
            return exp_avg.view(torch.int32).tolist(), weights.view(torch.int32).tolist()

        before = run()
        library = ctypes.CDLL({str(library)!r})
        assert library.mode() == 0x8040, "the library did not set the mode"
        assert run() == before
        assert library.mode() == 0x8040, "the caller's own mode must be left as it was"
        print("done")
    """
    answer = run_python(code)
    assert answer.stdout == "done\n", answer.stderr


@pytest.mark.parametrize("isa", EACH_ISA)
def test_the_environment_selects_the_kernels(isa: str) -> None:
    answer = run_python("from megatrain import _core; print(_core.isa())", MEGATRAIN_ISA=isa)
    assert answer.stdout.strip() == isa, answer.stderr


def test_an_unknown_kernel_in_the_environment_is_refused_by_name() -> None:
    code = "from megatrain import _core\ntry: _core.isa()\nexcept ValueError as error: print(error)"
    assert "MEGATRAIN_ISA" in run_python(code, MEGATRAIN_ISA="mmx").stdout


def test_the_version_is_that_of_the_package() -> None:
    from importlib.metadata import version

    assert _core.__version__ == version("megatrain")


# --- drivers

# Every driver call that the native module looks up.
DRIVER_CALLS = """
    cuInit cuDriverGetVersion cuDeviceGetCount cuDeviceGet cuDeviceGetName cuDeviceTotalMem_v2
    cuDeviceGetAttribute cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRelease_v2 cuCtxGetCurrent cuCtxSetCurrent
    cuCtxSynchronize cuMemGetInfo_v2 cuMemAlloc_v2 cuMemFree_v2 cuMemsetD8Async cuMemHostRegister_v2
    cuMemHostUnregister cuMemcpyHtoDAsync_v2 cuMemcpyDtoHAsync_v2 cuMemcpyDtoDAsync_v2 cuStreamCreate
    cuStreamDestroy_v2 cuStreamSynchronize cuStreamWaitEvent cuEventCreate cuEventDestroy_v2 cuEventRecord
    cuEventQuery cuEventSynchronize cuEventElapsedTime cuModuleLoadDataEx cuModuleUnload cuModuleGetFunction
    cuLaunchKernel
""".split()
STATUS = "from megatrain import _core; print(_core.cuda_status())"
OPEN = "from megatrain import _core\ntry: _core.Device.cuda()\nexcept _core.DeviceError as error: print(error)"


def cuda_answers(**environment: str) -> tuple[dict[str, object], str]:
    """The status, and what opening the device says, each in a fresh interpreter."""
    status, device = run_python(STATUS, **environment), run_python(OPEN, **environment)
    assert status.returncode == 0, status.stderr
    assert device.returncode == 0, device.stderr
    return json.loads(status.stdout), device.stdout.strip()


@pytest.mark.skipif(bool(json.loads(_core.cuda_status())["driver"]), reason="this machine has a CUDA driver")
def test_without_a_driver_the_status_says_what_to_install() -> None:
    status, refusal = cuda_answers()
    assert not status["available"]
    assert status["devices"] == []
    assert "NVIDIA driver" in str(status["reason"])
    assert refusal == status["reason"]


@needs_gcc
@pytest.mark.parametrize("name", ["libcuda.so", "libcuda.so.1"], ids=["plain-name", "versioned-name-only"])
def test_a_toolkits_stub_is_told_from_a_driver(tmp_path: Path, name: str) -> None:
    bodies = "\n".join(f"int {call}() {{ return 34; }}" for call in DRIVER_CALLS)
    shared_library(tmp_path, name, bodies)
    status, refusal = cuda_answers(LD_LIBRARY_PATH=str(tmp_path))
    assert not status["available"]
    assert "stub" in str(status["reason"])
    assert "LD_LIBRARY_PATH" in str(status["reason"])
    assert refusal == status["reason"]


@needs_gcc
def test_a_driver_that_lacks_a_call_is_named_as_too_old(tmp_path: Path) -> None:
    shared_library(tmp_path, "libcuda.so", "int cuInit(unsigned flags) { return 0; }")
    status, refusal = cuda_answers(LD_LIBRARY_PATH=str(tmp_path))
    assert not status["available"]
    assert "lacks cu" in str(status["reason"])
    assert "too old" in str(status["reason"])
    assert refusal == status["reason"]


@needs_gcc
@pytest.mark.parametrize(("code", "words"), [(100, "sees no GPU"), (803, "reboot"), (12345, "12345")])
def test_a_driver_that_does_not_start_says_why(tmp_path: Path, code: int, words: str) -> None:
    bodies = "\n".join(f"int {call}() {{ return {code}; }}" for call in DRIVER_CALLS)
    shared_library(tmp_path, "libcuda.so", bodies)
    status, refusal = cuda_answers(LD_LIBRARY_PATH=str(tmp_path))
    assert not status["available"]
    assert words in str(status["reason"])
    assert refusal == status["reason"]
