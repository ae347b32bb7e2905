"""`megatrain doctor`: instant, without torch, and truthful about what is missing."""

import json
import subprocess
import sys
from typing import Any

import pytest

from megatrain.cli import doctor
from megatrain.system import hardware
from megatrain.system.hardware import GIB, Gpu, Machine, SystemProbe


def a_machine(**changes: Any) -> Machine:
    facts: dict[str, Any] = {
        "cpus": 8,
        "memory_total": 64 * GIB,
        "memory_limit": 64 * GIB,
        "memory_available": 60 * GIB,
        "gpu_reason": "no NVIDIA driver: libcuda.so.1 was not found",
    }
    return Machine(**(facts | changes))


def finding(findings: list[doctor.Finding], what: str) -> doctor.Finding:
    return next(one for one in findings if one.what == what)


def test_this_installation_is_usable() -> None:
    findings = doctor.examine()
    assert doctor.usable(findings), findings
    assert finding(findings, "native core").status == "ok"
    assert finding(findings, "optimizer kernels").value in ("avx512", "avx2", "scalar")


def test_without_a_card_it_says_why_and_what_still_works() -> None:
    card = finding(doctor.examine(a_machine()), "GPU")
    assert card.status == "note"
    assert "libcuda" in card.value
    assert "training on the CPU" in card.advice


def test_a_card_without_native_bf16_is_named() -> None:
    old = Gpu(name="Tesla T4", total_bytes=16 * GIB, capability=(7, 5))
    card = finding(doctor.examine(a_machine(gpus=(old,), gpu_reason="")), "GPU 0")
    assert "Tesla T4" in card.value
    assert "8.0" in card.advice


def test_a_control_group_limit_is_shown_beside_the_machine() -> None:
    limited = a_machine(memory_limit=4 * GIB, memory_available=3 * GIB, memory_source="the control group /job")
    memory = finding(doctor.examine(limited), "host memory")
    assert "4.00 GiB" in memory.value
    assert "/job" in memory.value
    assert "64.00 GiB" in memory.value


def test_little_shared_memory_is_named_with_what_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, status in ((64 << 20, "note"), (8 << 30, "ok"), (None, "ok")):
        monkeypatch.setattr(hardware.SYSTEM_PROBE, "disk_free", lambda _, free=free: free)
        shared = finding(doctor.examine(a_machine()), "shared memory")
        assert shared.status == status
        assert ("--shm-size" in shared.advice) == (status == "note")


def test_a_missing_requirement_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "torch" else installed(name))
    findings = doctor.examine(a_machine())
    assert not doctor.usable(findings)
    assert "pip install 'torch>=2.9'" in finding(findings, "torch").advice


@pytest.mark.parametrize("version", ["5.16.9", "6.0.0"])
def test_a_transformers_release_outside_the_range_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    installed = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: version if name == "transformers" else installed(name))
    one = finding(doctor.examine(a_machine()), "transformers")
    assert one.status == "missing"
    assert ">=5.17,<6" in one.advice


def test_a_torch_that_is_too_old_is_refused_with_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: "2.8.0" if name == "torch" else installed(name))
    one = finding(doctor.examine(a_machine()), "torch")
    assert one.status == "missing"
    assert "2.9 or newer" in one.advice


def test_releases_newer_than_the_tests_run_are_named_and_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = {"torch": "2.99.0", "transformers": "5.99.0"}
    installed = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: newer.get(name) or installed(name))
    monkeypatch.setattr(doctor.platform, "python_version", lambda: "3.99.0")
    findings = doctor.examine(a_machine())
    assert doctor.usable(findings)
    for what, newest in (("Python", "3.13"), ("torch", "2.15"), ("transformers", "5.24")):
        one = finding(findings, what)
        assert one.status == "note"
        assert f"newer than {newest}, the newest that the tests run" in one.advice


def test_another_system_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.platform, "machine", lambda: "aarch64")
    findings = doctor.examine(a_machine())
    assert not doctor.usable(findings)
    assert "x86-64; this is Linux on aarch64" in finding(findings, "system").advice


def test_a_driver_status_of_every_kind_becomes_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stub(SystemProbe):
        def cuda_status(self) -> dict[str, Any]:
            return {"available": False, "reason": "the driver has no cuStreamCreate: it is a stub", "devices": []}

    monkeypatch.setattr(hardware, "SYSTEM_PROBE", Stub())
    card = finding(doctor.examine(), "GPU")
    assert "stub" in card.value


def test_it_answers_without_importing_torch() -> None:
    program = (
        "import sys; from megatrain.cli import main; code = main(['doctor', '--json']); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["usable"] is True
