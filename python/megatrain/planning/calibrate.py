"""Measures this machine: link, host memory, disk, matmul, optimizer. Kept per machine under the user's cache folder.

    megatrain probe [--out machine.yaml]

The rates feed the planner. Where nothing was measured it takes those of a usual machine, and `plan` says so.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatrain.config import constraints
from megatrain.errors import StorageError
from megatrain.system import hardware as facts
from megatrain.system.atomic import write_whole
from megatrain.system.descriptions import UNITS, describe
from megatrain.system.hardware import GIB, Machine

log: logging.Logger = logging.getLogger("megatrain")

# Where nothing was measured: of the data sheets, dense bf16 products with fp32 sums and device memory. The share of the
# products is the one that fits steps of a 7B model measured on an H200: within 3 % where activations are kept, and 9 %
# where they are recomputed or moments have 8 bits. A copy reaches three quarters. A word of the card's name decides,
# the first that fits.
_CARDS = {
    # word: (TFLOP/s, GB/s of device memory, GB/s of the link one way)
    "B200": (2250, 8000, 50.0),
    "H200": (989, 4800, 55.0),
    "H100 PCIe": (756, 2000, 50.0),
    "H100": (989, 3350, 55.0),
    "A100": (312, 1555, 25.0),
    "L40": (362, 864, 25.0),
    "RTX 6000 Ada": (364, 960, 25.0),
    "A6000": (155, 768, 25.0),
    "5090": (210, 1792, 50.0),
    "4090": (165, 1008, 25.0),
    "3090": (71, 936, 25.0),
}
_OTHER_CARD = (80, 600, 12.0)
"""Of a card whose name says nothing: a present consumer's."""
_MATMUL_SHARE, _HBM_SHARE = 0.74, 0.75


def _usual_cuda(machine: Machine) -> dict[str, float]:
    """Rates of a usual machine with this card."""
    name = machine.gpu.name if machine.gpu is not None else "H100"
    known = (rates for word, rates in _CARDS.items() if word.lower() in name.lower())
    tflops, hbm, link = next(known, _OTHER_CARD)
    rates = {"h2d_gbs": link, "d2h_gbs": link}
    return rates | {"matmul_tflops": _MATMUL_SHARE * tflops, "hbm_gbs": _HBM_SHARE * hbm}


_USUAL_ADAMW_A_CPU, _USUAL_ADAMW = 0.4, 4.8  # host memory is the bound from about ten processors on
_UPDATES = {
    # rate: (bytes that an update of a parameter moves, most 10⁹ parameters/s that one processor computes)
    "adamw_gparams": (26, 2.0),
    "adamw_bf16_gparams": (18, 1.4),
    "adamw_8bit_gparams": (14.1, 0.15),
}
"""The host's AdamW by the format of its moments, with masters of 32 bits. One core of an AVX-512 machine computes 3.7,
2.3 and 0.6 without waiting for memory, and by 256-bit vectors 2.1, 1.4 and 0.37. Two processors usually share one core:
16 of an H200's host reached 4.9, 5.7 and 2.3 together, one of them alone 1.0, 0.72 and 0.28."""
_USUAL_CPU_TFLOPS = 0.06
_USUAL_STATE_DISK = {"state_read_gbs": 2.5, "state_write_gbs": 2.0}  # one PCIe 4 drive that reads and writes at once
# Faster than any: for a step time that must stay a lower bound.
_FASTEST_CUDA = {
    "h2d_gbs": 64.0,
    "d2h_gbs": 64.0,
    "matmul_tflops": 2500.0,
    "hbm_gbs": 8000.0,
    "adamw_gparams": 20.0,
    "adamw_bf16_gparams": 30.0,
    "adamw_8bit_gparams": 40.0,
    "state_read_gbs": 120.0,  # eight PCIe 5 drives
    "state_write_gbs": 120.0,
}
_FASTEST_CPU_TFLOPS = 0.2  # a core with two 512-bit FMA units at 3 GHz


def nominal(machine: Machine, device: str) -> dict[str, float]:
    """Rates of a usual machine with this card and as many processors, whatever was measured here."""
    drives = max(1, machine.state_drives)
    usual = _usual_cuda(machine) | {rate: drives * each for rate, each in _USUAL_STATE_DISK.items()}
    if device == "cpu":
        # Weights and gradients of a CPU run are copied within host memory.
        usual |= {"h2d_gbs": 10.0, "d2h_gbs": 10.0, "matmul_tflops": _USUAL_CPU_TFLOPS * machine.cpus}
    return usual | _update_rates(_USUAL_ADAMW, _USUAL_ADAMW_A_CPU, machine.cpus)


def _update_rates(most: float, a_cpu: float, cpus: int) -> dict[str, float]:
    """Rates of the host's AdamW by format, where those over fp32 moments are what memory carries: `most` for all
    processors together, `a_cpu` for one."""
    found = {}
    for rate, (moved, computed) in _UPDATES.items():
        more = _UPDATES["adamw_gparams"][0] / moved
        found[rate] = min(most * more, min(a_cpu * more, computed) * cpus)
    return found


def of_state(rates: dict[str, float], moments: str) -> dict[str, float]:
    """The rates with `adamw_gparams` that of AdamW over these moments: `fp32`, `bf16` or `8bit`."""
    own = rates.get(f"adamw_{moments}_gparams")
    return rates if own is None else rates | {"adamw_gparams": own}


def rates(machine: Machine, device: str) -> tuple[dict[str, float], bool]:
    """The rates to plan with and whether they were measured; else they are those of usual machines."""
    usual = nominal(machine, device)
    known = dict(machine.rates)
    if not machine.described:
        known |= cached(machine, device)
    if "adamw_gparams" in known:  # measured over fp32 moments alone: the others as usual machines relate them
        share = known["adamw_gparams"] / usual["adamw_gparams"]
        usual |= {rate: share * usual[rate] for rate in _UPDATES}
    found = usual | {key: value for key, value in known.items() if key in UNITS}
    return found | _link_cost(known), "matmul_tflops" in known


def _link_cost(known: Mapping[str, float]) -> dict[str, float]:
    """`link_cost` of the core's rates, where the host's AdamW was measured with and without the link beside it: bytes
    of its own traffic that it loses for each byte that crosses."""
    try:
        lost = known["adamw_gparams"] - known["adamw_beside_link_gparams"]
        return {"link_cost": max(0.0, lost) * _UPDATES["adamw_gparams"][0] / known["link_beside_adamw_gbs"]}
    except KeyError:
        return {}


def fastest(machine: Machine, device: str) -> dict[str, float]:
    """Rates that no machine passes, for a lower bound where nothing was measured."""
    if device == "cpu":
        return _FASTEST_CUDA | {
            "h2d_gbs": 200.0,
            "d2h_gbs": 200.0,
            "matmul_tflops": _FASTEST_CPU_TFLOPS * machine.cpus,
        }
    return dict(_FASTEST_CUDA)


def cache_file(machine: Machine, device: str) -> Path:
    """Where the rates of this machine are kept."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cards = [(gpu.name, gpu.total_bytes) for gpu in machine.gpus]
    who = [machine.name, machine.kernel, machine.cpus, machine.memory_total, cards]
    digest = hashlib.sha256(json.dumps(who).encode()).hexdigest()[:16]
    return base / "megatrain" / "machines" / f"{digest}-{device}.json"


def cached(machine: Machine, device: str) -> dict[str, float]:
    """Rates measured earlier on this machine; empty when there are none."""
    try:
        kept = json.loads(cache_file(machine, device).read_text(encoding="utf-8"))["rates"]
        return {str(key): float(value) for key, value in kept.items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return {}


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """What a probe found."""

    rates: dict[str, float]
    """In `UNITS`."""
    busy: str | None
    """Why they are those of a machine that did something else meanwhile; None where nothing speaks for that."""
    state_io: str | None = None
    """By what optimizer state was read and written: `io_uring with registered buffers`, `io_uring` or `threads`; None
    where that was not measured."""


_BUSY_LOAD = 0.75
"""Load average a processor, above which a probe's threads wait for others."""
_BUSY_SPREAD = 0.25
"""How much slower than the fastest the median of equal runs is on a machine that others use."""


def measure(
    machine: Machine,
    device: str,
    folder: Path,  # on the disk of runs
    say: Callable[[str], None] = log.info,
    state: Sequence[Path] = (),  # folders for optimizer state; `folder` where none are given
) -> Measured:
    """Measures every rate that `device` has; about half a minute."""
    from megatrain import _core

    load = _load()
    found: dict[str, float] = {}
    size = int(min(GIB, max(machine.memory_available // 8, 16 << 20)))
    say("host memory and optimizer")
    host = json.loads(_core.probe_host(size, max(1, machine.cpus)))
    found |= {key: float(host[key]) for key in ("touch_gbs", "copy_gbs") if key in host}
    for rate in _UPDATES:
        counted = rate.replace("gparams", "params_per_s")
        if counted in host:
            found[rate] = float(host[counted]) / 1e9
    if device == "cuda":
        say("link")
        card = _core.Device.cuda(machine.card)
        found |= {
            key: float(value) for key, value in json.loads(_core.probe_device(card, size)).items() if key in UNITS
        }
        beside = json.loads(_core.probe_beside_link(card, size, max(1, machine.cpus)))
        found["adamw_beside_link_gparams"] = float(beside["adamw_beside_link_params_per_s"]) / 1e9
        found["link_beside_adamw_gbs"] = float(beside["link_beside_adamw_gbs"])
    elif "copy_gbs" in found:
        found |= {"h2d_gbs": found["copy_gbs"], "d2h_gbs": found["copy_gbs"]}
    say("matrix products")
    arithmetic, spread = _arithmetic(device)
    found |= arithmetic
    say("disk")
    found |= _disk(folder)
    of_state, state_io = _state_disk(state or (folder,))
    return Measured(found | of_state, _busy(load, os.cpu_count() or machine.cpus, spread), state_io)


def _load() -> float | None:
    """Processes that ran or waited for a processor, averaged over the last minute; the whole machine's."""
    words = (facts.SYSTEM_PROBE.text("/proc/loadavg") or "").split()
    try:
        return float(words[0])
    except (IndexError, ValueError):
        return None


def _busy(load: float | None, processors: int, spread: float) -> str | None:
    """Why the machine seems to have been busy. `load`: before anything was measured; `spread`: see `_repeat`."""
    reasons = []
    if load is not None and load > _BUSY_LOAD * processors:
        reasons.append(f"the load average was {load:.1f} on {processors} processors")
    if spread > _BUSY_SPREAD:
        reasons.append(f"half of the matrix products took {spread:.0%} longer than the fastest, or more")
    return " and ".join(reasons) or None


def kept_busy(machine: Machine, device: str) -> str | None:
    """Why the rates that `cached` finds are those of a busy machine; None where nothing says so."""
    try:
        busy = json.loads(cache_file(machine, device).read_text(encoding="utf-8")).get("busy")
    except (OSError, ValueError, AttributeError):
        return None
    return busy if isinstance(busy, str) else None


def keep(machine: Machine, device: str, found: dict[str, float], busy: str | None = None) -> Path | None:
    """Writes the rates where `cached` finds them; None when the cache folder cannot be written."""
    path = cache_file(machine, device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {"machine": machine.name, "rates": found, "busy": busy}
        write_whole(path, json.dumps(document, indent=1) + "\n")
    except (OSError, StorageError) as error:
        log.warning("the measured rates cannot be kept: %s", error)
        return None
    return path


def write_description(machine: Machine, found: dict[str, float], path: Path) -> None:
    """The description that `plan --machine` reads. Raises StorageError."""
    import yaml

    document = describe(dataclasses.replace(machine, rates={key: round(value, 4) for key, value in found.items()}))
    try:
        path.write_text(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"--out {path} cannot be written: {error.strerror}") from None


def _arithmetic(device: str) -> tuple[dict[str, float], float]:
    """Rates of arithmetic, and how far the runs of the matrix product lie apart (see `_repeat`)."""
    import torch

    if device == "cpu":
        size, dtype = 1024, torch.float32
    else:
        size, dtype = 8192, torch.bfloat16
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds, spread = _repeat(lambda: torch.mm(left, right), device)
    found = {"matmul_tflops": 2 * size**3 / seconds / 1e12}
    if device == "cuda" and torch.cuda.get_device_capability() >= constraints.FLOAT8_CAPABILITY:
        from megatrain.engine import float8

        numbers, scale = left.to(torch.float8_e4m3fn), torch.ones(size, 1, device=device)
        product = functools.partial(float8.multiply, numbers, scale, numbers, scale)
        found["float8_tflops"] = 2 * size**3 / _repeat(product, device)[0] / 1e12
    if device == "cuda":
        source = torch.empty(GIB, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        found["hbm_gbs"] = 2 * GIB / _repeat(lambda: target.copy_(source), device)[0] / 1e9
    return found, spread


def _repeat(run: Callable[[], Any], device: str, count: int = 10) -> tuple[float, float]:
    """Seconds of the fastest run, since what is planned from it is a lower bound; and by what part of that the median
    is slower."""
    import torch

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    for _ in range(3):
        run()
    wait()
    times = []
    for _ in range(count):
        start = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - start)
    best = max(min(times), 1e-9)
    return best, statistics.median(times) / best - 1


def _state_disk(folders: Sequence[Path], size: int = 1 << 30) -> tuple[dict[str, float], str | None]:
    """Reads and writes blocks as optimizer state on disk is: both at once, past the page cache, over all folders.
    Returns the rates, and by what (`Measured.state_io`)."""
    from megatrain import _core

    try:
        found = json.loads(_core.probe_state_disk([str(folder) for folder in folders], size))
    except StorageError as error:
        log.warning("the disk was not measured as a place for optimizer state: %s", error)
        return {}, None
    by: str = found.pop("state_io")
    return found, by


def _disk(folder: Path, size: int = 256 << 20) -> dict[str, float]:
    """Writes and reads one file beside where runs go; the page cache is emptied of it in between."""
    block = os.urandom(1 << 20) * 8
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            number = file.fileno()
            start = time.perf_counter()
            for _ in range(size // len(block)):
                os.write(number, block)
            os.fsync(number)
            written = time.perf_counter() - start
            with contextlib.suppress(OSError):
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            os.lseek(number, 0, os.SEEK_SET)
            start = time.perf_counter()
            while os.read(number, len(block)):
                pass
            return {"disk_write_gbs": size / written / 1e9, "disk_read_gbs": size / (time.perf_counter() - start) / 1e9}
    except OSError as error:
        log.warning("the disk under %s was not measured: %s", folder, error.strerror)
        return {}
