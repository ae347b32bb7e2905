"""`megatrain doctor`: what is installed, what is missing, and how to get it. Instant, since torch is not imported.

megatrain doctor         checks this machine and installation
megatrain doctor RUN     checks every checkpoint of a run against its checksums
"""

import dataclasses
import importlib.metadata
import importlib.util
import platform
import re
from pathlib import Path
from typing import Literal

from megatrain import compat
from megatrain.system import hardware as facts
from megatrain.system.hardware import Machine, format_bytes

Status = Literal["ok", "note", "missing"]

_OPTIONAL = {
    "gguf": "reading GGUF models, with accelerate",
}
# CUDA 13 libraries need driver branch 580; CUDA 12.8 ones 570. `cuda_status` gives the driver's own CUDA version.
_OLDEST_CUDA_DRIVER = (12, 0)
_LITTLE_SHARED = 128 << 20
"""Bytes free in /dev/shm below which workers of a torch DataLoader soon fail. Containers have 64 MiB by default."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One line of the answer."""

    what: str
    status: Status
    value: str
    advice: str = ""
    """What to do about it; empty when there is nothing to do."""


def examine(machine: Machine | None = None, folder: Path | None = None) -> list[Finding]:
    """Examines the installation and the machine. `folder` is where runs would be written."""
    machine = machine or facts.read(folder or Path.cwd())
    return [*_system(), *_packages(), *_core(), *_card(machine), *_memory(machine), *_disk(machine)]


def usable(findings: list[Finding]) -> bool:
    """Whether everything is there that planning and training on the CPU need."""
    return all(finding.status != "missing" for finding in findings)


def _system() -> list[Finding]:
    version = platform.python_version()
    newer = compat.untried(version, compat.PYTHON)
    libc = " ".join(platform.libc_ver()) or "unknown C library"
    system = f"{platform.system()} {platform.release()}, {platform.machine()}, {libc}"
    refused = compat.refusal(compat.this_platform())
    return [
        Finding("Python", "note" if newer else "ok", version, newer),
        Finding("system", "missing" if refused else "ok", system, refused),
    ]


def _packages() -> list[Finding]:
    findings = []
    for package, span in compat.PACKAGES.items():
        version = _version(package)
        if version is None:
            findings.append(Finding(package, "missing", "not installed", _how_to_get(package)))
            continue
        note = f" (built for CUDA {cuda})" if package == "torch" and (cuda := _torch_cuda()) else ""
        note = note or (" (CPU only)" if package == "torch" else "")
        refused, newer = compat.package_refusal(package, version), compat.untried(version, span)
        status: Status = "missing" if refused else "note" if newer else "ok"
        findings.append(Finding(package, status, version + note, refused or newer))
    for package, purpose in _OPTIONAL.items():
        version = _version(package)
        advice = "" if version else f"optional, for {purpose}: pip install {package}"
        findings.append(Finding(package, "ok" if version else "note", version or "not installed", advice))
    return findings


def _core() -> list[Finding]:
    try:
        from megatrain import _core
    except ImportError as error:
        return [
            Finding("native core", "missing", str(error), "reinstall with: pip install . (needs Rust 1.89 or newer)")
        ]
    isa = _core.isa()
    advice = (
        ""
        if isa != "scalar"
        else "this processor has neither AVX2 nor AVX-512, so the optimizer runs many times slower"
    )
    return [
        Finding("native core", "ok", _core.__version__),
        Finding("optimizer kernels", "ok" if isa != "scalar" else "note", isa, advice),
    ]


def _card(machine: Machine) -> list[Finding]:
    findings = []
    for index, gpu in enumerate(machine.gpus):
        capability = ".".join(map(str, gpu.capability))
        value = f"{gpu.name}, {format_bytes(gpu.total_bytes)}, compute capability {capability}"
        native = gpu.capability >= (8, 0)
        advice = (
            ""
            if native
            else "no native bf16 (compute capability 8.0 is needed): it trains with train.precision: fp32 only"
        )
        findings.append(Finding(f"GPU {index}", "ok" if native else "note", value, advice))
    if not machine.gpus:
        advice = "planning, data preparation, training on the CPU and export work without one"
        findings.append(Finding("GPU", "note", machine.gpu_reason, advice))
    driver = facts.SYSTEM_PROBE.cuda_status().get("driver") if machine.gpus else None
    if driver:
        numbers = compat.numbers(str(driver))
        old = bool(numbers) and numbers < _OLDEST_CUDA_DRIVER
        findings.append(
            Finding("CUDA driver", "note" if old else "ok", str(driver), "update the NVIDIA driver" if old else "")
        )
    if machine.gpus and _version("torch") and not _torch_cuda():
        findings.append(
            Finding(
                "torch for CUDA",
                "note",
                "this torch is a CPU build",
                "to use the card, install PyTorch's CUDA build with the command from pytorch.org",
            )
        )
    return findings


def _memory(machine: Machine) -> list[Finding]:
    value = f"{format_bytes(machine.memory_available)} available of {format_bytes(machine.memory_total)}"
    if machine.memory_limit < machine.memory_total:
        value += f"; {machine.memory_source} limits it to {format_bytes(machine.memory_limit)}"
    lock, advice = machine.memlock, ""
    # Memory registered with the card does not count against this limit; a ring for direct file reads does.
    if lock is not None and lock < (64 << 20):
        advice = "this limits only the registered buffers of file reads; raise it with: ulimit -l unlimited"
    shared = facts.SYSTEM_PROBE.disk_free(Path("/dev/shm"))
    pages = (facts.SYSTEM_PROBE.text("/sys/kernel/mm/transparent_hugepage/enabled") or "").strip()
    chosen = (re.search(r"\[(\w+)\]", pages) or [None, "unknown"])[1]
    return [
        Finding("host memory", "ok", value),
        Finding("processors", "ok" if machine.cpus > 1 else "note", str(machine.cpus), _few(machine.cpus)),
        Finding(
            "locked memory", "note" if advice else "ok", "unlimited" if lock is None else format_bytes(lock), advice
        ),
        Finding(
            "shared memory",
            "note" if shared is not None and shared < _LITTLE_SHARED else "ok",
            "no /dev/shm" if shared is None else f"{format_bytes(shared)} free in /dev/shm",
            ""
            if shared is None or shared >= _LITTLE_SHARED
            else "a run needs none; a torch DataLoader of your own with workers does: docker run --shm-size=8g",
        ),
        Finding(
            "huge pages",
            "ok" if chosen in ("always", "madvise") else "note",
            str(chosen),
            ""
            if chosen in ("always", "madvise")
            else "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled makes the optimizer faster",
        ),
    ]


def _few(cpus: int) -> str:
    return "" if cpus > 1 else "with one processor, the optimizer and the thread that launches kernels share it"


def _disk(machine: Machine) -> list[Finding]:
    if machine.disk_free is None:
        return []
    return [Finding("free disk here", "ok", format_bytes(machine.disk_free))]


def _how_to_get(package: str) -> str:
    smaller = (
        " (for a machine without a card, take the smaller CPU build: see the README)" if package == "torch" else ""
    )
    return f"pip install '{compat.requirement(package)}'{smaller}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_cuda() -> str | None:
    """The CUDA version that the installed torch was built for, read from its file: importing it takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=]*=\s*'([\d.]+)'", text, re.MULTILINE)
    return match[1] if match else None
