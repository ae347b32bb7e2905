"""Machines in writing: what `plan --machine` reads, as a file or as `key=value`, and `probe --out` writes.

Every key of a description is in `KEYS` and every rate in `UNITS`, each with its unit. A number that no machine can have
is refused by its key.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from megatrain.names import suggest
from megatrain.system.hardware import GIB, Gpu, Machine
from megatrain.units import parse_size

UNITS = {
    "h2d_gbs": "GB/s, host to device",
    "d2h_gbs": "GB/s, device to host",
    "bidirectional_gbs": "GB/s, both ways at once",
    "pin_gbs": "GB/s of host memory registered with the card",
    "hbm_gbs": "GB/s, device memory read and written",
    "matmul_tflops": "TFLOP/s, large matrix product in the training precision",
    "float8_tflops": "TFLOP/s, large product of float8 matrices with a scale for each row (train.matmul: fp8)",
    "adamw_gparams": "10⁹ parameters/s, host AdamW over fp32 moments",
    "adamw_bf16_gparams": "10⁹ parameters/s, host AdamW over bf16 moments",
    "adamw_8bit_gparams": "10⁹ parameters/s, host AdamW over 8-bit moments",
    "adamw_beside_link_gparams": "10⁹ parameters/s, host AdamW over fp32 moments while the link is busy both ways",
    "link_beside_adamw_gbs": "GB/s, both ways at once while the host's AdamW runs",
    "touch_gbs": "GB/s, host memory mapped and touched for the first time",
    "copy_gbs": "GB/s, host memory copied",
    "disk_write_gbs": "GB/s, file written and flushed",
    "disk_read_gbs": "GB/s, file read back",
    "state_read_gbs": "GB/s, optimizer state read from disk while other state is written",
    "state_write_gbs": "GB/s, optimizer state written to disk while other state is read",
}
"""Every rate, with what it counts. GB is 10⁹ bytes."""

KEYS: dict[str, dict[str, str]] = {
    "host": {
        "memory": "host memory that a run may use, such as 256GiB",
        "total": "installed host memory, such as 256GiB (default: host.memory)",
        "cpus": "processors (default 8)",
    },
    "gpu": {
        "name": "the card's name, by which its rates are assumed where none are given, such as RTX 4090",
        "memory": "the card's memory, such as 24GiB",
        "capability": "compute capability, such as 8.9 (default 9.0)",
        "count": "cards; a run uses one (default 1)",
    },
    "disk": {
        "free": "free bytes of each drive, such as 4TB",
        "count": "drives that optimizer state may be spread over (default: those that memory.nvme.path names)",
        "read_gbs": "GB/s that each drive is read at while it is written",
        "write_gbs": "GB/s that each drive is written at while it is read",
    },
}
"""Sections of a description beside `name` and `rates`: keys with what they are, in which unit."""

_T = TypeVar("_T")

_MOST_BYTES = 1 << 60
"""Larger sizes are typing errors, and sums of them would not fit the planner's numbers."""
_RATES_BETWEEN = (1e-6, 1e6)
_MOST_COUNT = 1 << 16


def key_help() -> str:
    """All keys that `--machine` takes, a line each, with their units."""
    lines = [f"  {section}.{key}: {what}" for section, keys in KEYS.items() for key, what in keys.items()]
    lines += [f"  rates.{key}: {what}" for key, what in UNITS.items()]
    return "\n".join(["keys of a machine (--machine); GiB is 1024³ bytes, GB is 10⁹:", *lines])


def describe(machine: Machine) -> dict[str, Any]:
    """The written description of a machine: what `--machine` reads and `probe --out` writes."""
    gpu, disk, drives = machine.gpu, machine.disk_free, machine.state_drives
    return {
        "name": machine.name,
        "host": {
            "memory": _written(machine.memory_available),
            "total": _written(machine.memory_total),
            "cpus": machine.cpus,
        },
        "gpu": None
        if gpu is None
        else {
            "name": gpu.name,
            "memory": _written(gpu.total_bytes),
            "capability": list(gpu.capability),
            "count": len(machine.gpus),
        },
        "disk": {"free": None if disk is None else _written(disk // max(1, drives))}
        | ({"count": drives} if drives else {}),
        "rates": dict(machine.rates),
    }


def _written(size: int) -> str:
    """A size that `parse_size` reads back, to a thousandth of a GiB."""
    return f"{size / GIB:.3f}GiB"


def from_words(words: list[str], base: Machine | None, where: str) -> Machine:
    """A machine by `key=value` words, such as `gpu.memory=24GiB`, which change `base` where there is one. Raises
    ValueError naming the key."""
    document: dict[str, Any] = {"name": where} if base is None else describe(base) | {"name": where}
    for word in words:
        key, sign, value = word.partition("=")
        section, dot, name = key.strip().partition(".")
        if not sign or not value.strip():
            raise ValueError(f"{where}: {word!r} is no key=value, such as gpu.memory=24GiB")
        if not dot:
            if section not in ("gpu", "name"):
                raise ValueError(f"{where}: unknown key {section!r}; {suggest(section, _dotted())}")
            document[section] = None if value in ("null", "none") else value
            continue
        part = document.get(section) or {}
        if not isinstance(part, dict):
            raise ValueError(f"{where}: {key} contradicts {section}={part}")
        document[section] = part | {name: _scalar(value.strip())}
    return from_description(document, where)


def _scalar(text: str) -> int | float | str:
    for read in (int, float):
        with contextlib.suppress(ValueError):
            return read(text)
    return text


def _dotted() -> list[str]:
    keys = [f"{section}.{key}" for section, keys in KEYS.items() for key in keys]
    return [*keys, *(f"rates.{key}" for key in UNITS)]


def from_description(document: Any, where: str) -> Machine:
    """Reads a written description: the sections of `KEYS`, of which `gpu` may be null, `rates: {…}` with the keys of
    `UNITS`, and `name`. Sizes as `12GiB`. Raises ValueError naming the key."""
    sections: dict[str, Mapping[str, str]] = {**KEYS, "rates": UNITS}
    if not isinstance(document, dict):
        raise ValueError(f"{where}: a machine description is a mapping with the keys {', '.join(sections)}, name")
    for section, part in document.items():
        if section == "name" or (part is None and section in sections):
            continue
        if section not in sections:
            raise ValueError(f"{where}: unknown key {section!r}; a machine description has {', '.join(sections)}, name")
        if not isinstance(part, dict):
            raise ValueError(f"{where}: {section} must be a mapping with {', '.join(sections[section])}, not {part!r}")
        for key in part:
            if key not in sections[section]:
                known = [f"{section}.{name}" for name in sections[section]]
                raise ValueError(f"{where}: unknown key {section}.{key}; {suggest(f'{section}.{key}', known)}")

    host, disk = document.get("host") or {}, document.get("disk") or {}
    if host.get("memory") is None:
        raise ValueError(f"{where}: host.memory is missing; write the host memory a run may use, like 128GiB")
    memory = _bytes(where, "host.memory", host["memory"])
    gpus = _cards(document.get("gpu"), where)
    total = _bytes(where, "host.total", host["total"]) if host.get("total") is not None else memory
    drives = _optional(_whole, where, "disk.count", disk.get("count")) or 0
    free = _optional(_bytes, where, "disk.free", disk.get("free"))
    if drives and free is None:
        raise ValueError(
            f"{where}: disk.free is missing; write the free bytes of each of the {drives} drives, like 4TB"
        )
    return Machine(
        cpus=_whole(where, "host.cpus", host.get("cpus", 8)),
        memory_total=max(memory, total),
        memory_limit=memory,
        memory_available=memory,
        memory_source=f"the description {where}",
        gpus=gpus,
        gpu_reason="" if gpus else f"the description {where} has no gpu",
        disk_free=None if free is None else free * max(1, drives),
        state_drives=drives,
        rates=_rates(document.get("rates") or {}, disk, drives, where),
        name=str(document.get("name") or where),
        described=True,
    )


def _cards(gpu: dict[str, Any] | None, where: str) -> tuple[Gpu, ...]:
    if gpu is None:
        return ()
    if gpu.get("memory") is None:
        raise ValueError(f"{where}: gpu.memory is missing; write the card's memory, like 80GiB, or gpu: null")
    card = Gpu(
        name=str(gpu.get("name") or "GPU"),
        total_bytes=_bytes(where, "gpu.memory", gpu["memory"]),
        capability=_capability(where, gpu.get("capability", [9, 0])),
    )
    return (card,) * _whole(where, "gpu.count", gpu.get("count", 1))


def _capability(where: str, value: Any) -> tuple[int, int]:
    """From `[8, 9]`, or `8.9` as the command line has it."""
    parts = str(value).split(".") if isinstance(value, float) else value
    if isinstance(parts, list) and len(parts) == 2:
        numbers = [int(part) for part in parts if str(part).isdigit()]
        if len(numbers) == 2:
            return numbers[0], numbers[1]
    raise ValueError(f"{where}: gpu.capability must be two numbers, like [9, 0] or 9.0, not {value!r}")


def _rates(given: dict[str, Any], disk: dict[str, Any], drives: int, where: str) -> dict[str, float]:
    found = {key: _rate(where, f"rates.{key}", value) for key, value in given.items()}
    for rate, key in (("state_read_gbs", "read_gbs"), ("state_write_gbs", "write_gbs")):
        each = _optional(_rate, where, f"disk.{key}", disk.get(key))
        if each is None:
            continue
        if rate in found:
            raise ValueError(f"{where}: disk.{key} and rates.{rate} are both given; write one of the two")
        found[rate] = each * max(1, drives)
    return found


def _rate(where: str, key: str, value: Any) -> float:
    least, most = _RATES_BETWEEN
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"{where}: {key} must be a positive number from {least:g} to {most:g}, not {value!r}")
    return float(value)


def _bytes(where: str, key: str, value: Any) -> int:
    try:
        size = parse_size(value)
    except TypeError:
        raise ValueError(f"{where}: {key} is {value!r}; write a size, such as 64GiB") from None
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{where}: {key}: {error}") from None
    if isinstance(value, bool) or size > _MOST_BYTES:
        raise ValueError(f"{where}: {key} must be a size of at most {_MOST_BYTES >> 40} TiB, not {value!r}")
    return size


def _whole(where: str, key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_COUNT:
        raise ValueError(f"{where}: {key} must be a positive whole number up to {_MOST_COUNT}, not {value!r}")
    return value


def _optional(read: Callable[[str, str, Any], _T], where: str, key: str, value: Any) -> _T | None:
    return None if value is None else read(where, key, value)
