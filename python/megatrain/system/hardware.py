"""What this machine offers: memory, processors, cards, disk. No torch, so that a refusal takes milliseconds.

Every fact comes through a `SystemProbe`, which a test (or a plan for a machine one does not have) replaces.
Memory is what the *process* may use: the machine's available memory, cut by the control group that the process is in
and by each of that group's parents (both control-group versions).
"""

import dataclasses
import functools
import json
import logging
import math
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatrain.errors import first_line
from megatrain.system import atomic

log: logging.Logger = logging.getLogger("megatrain")

MIB = 1 << 20
GIB = 1 << 30

# A limit above this is "none": version 1 writes 2^63 rounded down to a page.
_UNLIMITED = 1 << 62


_SETTLING_S, _SETTLED = 0.1, 2
"""Seconds between two looks at memory that is being given back, and how many without a change mean that it is over."""
_RELEASED = 64 * MIB
"""What counts as a change."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One card, as the driver describes it."""

    name: str
    total_bytes: int
    held_bytes: int = 0
    """Taken by other programs, and by tensors and engines of this process; 0 until `Machine.with_free_memory` asks."""
    capability: tuple[int, int] = (0, 0)

    @property
    def context_bytes(self) -> int:
        """Device memory that the CUDA context and the workspaces of its libraries take. 640 MiB were measured on an
        H100; smaller cards have fewer multiprocessors, for which the context reserves less."""
        return min(640 * MIB, max(256 * MIB, self.total_bytes // 120))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The facts that a plan depends on. Sizes in bytes."""

    cpus: int
    """Processors that this process may use: affinity, cut by the control group's quota."""
    memory_total: int
    """Installed memory."""
    memory_limit: int
    """What the process may ever use: installed memory or the tightest control-group limit."""
    memory_available: int
    """What it may use now, on top of what it uses already."""
    memory_source: str = "this machine"
    """Who sets `memory_limit`, in words for a message."""
    memlock: int | None = None
    """Locked-memory limit; None is unlimited."""
    gpus: tuple[Gpu, ...] = ()
    card: int = 0
    """Number of the card that a run uses, among `gpus`."""
    gpu_reason: str = ""
    """Why there is no card, in a sentence; empty when there is one."""
    disk_free: int | None = None
    """Free bytes of the disk of runs; of a described machine, of all its drives together."""
    state_drives: int = 0
    """Drives of a described machine that optimizer state may be spread over; 0 where none were described."""
    kernel: str = ""
    rates: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Measured rates (see `probe`): h2d_gbs, d2h_gbs, matmul_tflops, adamw_gparams, hbm_gbs, …"""
    name: str = ""
    described: bool = False
    """Whether this came from a description rather than from the machine itself."""
    host_reserved: int = 0
    """Host memory that a run takes beside its plan while it reads its weights, which no budget gives out."""
    assumed: str = ""
    """What a preset assumes beside its card, in words; empty for every other machine."""

    @property
    def gpu(self) -> Gpu | None:
        """The card that a run uses."""
        return self.gpus[self.card] if self.card < len(self.gpus) else None

    @property
    def reservation(self) -> str:
        """What `host_reserved` is for, in words for a refusal; empty where nothing is reserved."""
        if not self.host_reserved:
            return ""
        return (
            f"{format_bytes(self.host_reserved)} of host memory are kept for unpacking the GGUF file to fp32; a model "
            "in safetensors files needs none of it"
        )

    def with_free_memory(self, card: int | None = None, probe: "SystemProbe | None" = None) -> "Machine":
        """This machine with `card` (default: torch's current device) as the one that a run uses, and what others hold
        of it; as it is without cards, or where it is only described. May create a CUDA context on the card."""
        if self.described or not self.gpus:
            return self
        probe = probe or SYSTEM_PROBE
        number = probe.current_card() if card is None else card
        if number >= len(self.gpus):
            return dataclasses.replace(self, card=number)
        gpu = self.gpus[number]
        free = probe.gpu_free(number)
        # The context is a line of the plan. Where nothing else runs, it is all that is not free.
        held = 0 if free is None else max(0, gpu.total_bytes - free - gpu.context_bytes)
        cards = [*self.gpus[:number], dataclasses.replace(gpu, held_bytes=held), *self.gpus[number + 1 :]]
        return dataclasses.replace(self, gpus=tuple(cards), card=number)

    def idle(self) -> "Machine":
        """This machine if nothing else ran on it: what decides about numbers must not depend on what is free now."""
        gpus = tuple(dataclasses.replace(gpu, held_bytes=0) for gpu in self.gpus)
        return dataclasses.replace(self, gpus=gpus, memory_available=max(self.memory_available, self.memory_limit))

    def host_budget(self) -> int:
        """`memory.host: auto`: what is available, less head-room for the process itself and for the page cache."""
        return max(0, self.memory_available - max(3 * GIB // 4, self.memory_available // 20))

    def gpu_budget(self) -> int:
        """`memory.gpu: auto`: the card's memory without what others hold of it, less a little for what no plan
        foresees. The context, the libraries' workspaces and fragmentation are part of the plan."""
        if self.gpu is None:
            return 0
        return max(0, self.gpu.total_bytes - self.gpu.held_bytes - max(GIB // 4, self.gpu.total_bytes // 80))

    def budget(self, device: str, gpu: int | None = None, host: int | None = None) -> dict[str, int]:
        """Bytes that a run on `device` (cuda or cpu) may use, by tier: device, host. `gpu` and `host` are given limits;
        None is `auto`; `host_reserved` is left out of either. On the CPU both tiers share the host's memory, so that
        neither may use more than that, and a plan gives it out once (`shared_memory` of its request)."""
        host = max(0, (self.host_budget() if host is None else host) - self.host_reserved)
        if device == "cpu":
            return {"device": host if gpu is None else min(gpu, host), "host": host}
        return {"device": self.gpu_budget() if gpu is None else gpu, "host": host}

    def state_disk(
        self, paths: tuple[str, ...], size: int | None, host: int, probe: "SystemProbe | None" = None
    ) -> int:
        """Bytes that optimizer state may take on the disks of these folders, over which it is spread evenly: `size`,
        and no more than is free there less a margin for whatever else is written. Where one is in host memory, as
        /dev/shm is, no more than `host`, the host's budget, leaves of that either. Of a described machine `size`, or
        what its description says is free."""
        if self.described:
            return _less_margin(self.disk_free or 0) if size is None else size
        probe = probe or SYSTEM_PROBE
        disks = [probe.disk(Path(path)) for path in paths]
        room = min(_less_margin(free) // [d for d, _ in disks].count(disk) for disk, free in disks) * len(paths)
        in_memory = [path for path in paths if probe.file_system(Path(path)) in IN_MEMORY]
        if in_memory:
            _warn_of_memory(in_memory[0])
            room = min(room, max(0, self.memory_available - host))
        return room if size is None else min(size, room)


IN_MEMORY = ("tmpfs", "ramfs")
"""File systems whose files are in host memory, such as that of /dev/shm."""


@functools.cache
def _warn_of_memory(path: str) -> None:
    """Once for each folder."""
    log.warning(
        "memory.nvme.path: %s is in host memory (tmpfs), so state on it saves none; name a folder on a disk", path
    )


class SystemProbe:
    """Where facts are read. A test or a caller replaces what it wants to by overriding it."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root
        """Prefix of `proc` and `sys`."""

    def text(self, path: str) -> str | None:
        """A file below `root`, or None when it cannot be read."""
        try:
            return (self.root / path.lstrip("/")).read_text()
        except OSError:
            return None

    def affinity(self) -> int:
        """Processors in the process's affinity mask."""
        return len(os.sched_getaffinity(0))

    def memlock(self) -> int | None:
        """The soft limit on locked memory; None is unlimited."""
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return None if soft in (resource.RLIM_INFINITY, -1) or soft >= _UNLIMITED else soft

    def address_limits(self) -> list[tuple[str, int, int]]:
        """Limits on what this process may map: (what `ulimit` calls it, bytes, bytes mapped now)."""
        mapped = dict(_meminfo(self.text("/proc/self/status") or ""))
        limits = [("-v", resource.RLIMIT_AS, "VmSize"), ("-d", resource.RLIMIT_DATA, "VmData")]
        soft = [(option, resource.getrlimit(kind)[0], mapped.get(key, 0)) for option, kind, key in limits]
        return [one for one in soft if 0 <= one[1] < _UNLIMITED]

    def file_system(self, path: Path) -> str:
        """The type of file system that `path` is or would be made on; empty where the system does not say."""
        place, found, kind = f"{path.resolve()}/", "", ""
        for line in (self.text("/proc/self/mountinfo") or "").splitlines():
            before, _, after = line.partition(" - ")
            mount = f"{before.split()[4].rstrip('/')}/"
            if place.startswith(mount) and len(mount) >= len(found):  # of two mounts on one folder the later one counts
                found, kind = mount, after.split()[0]
        return kind

    def disk_free(self, path: Path) -> int | None:
        """Free bytes where `path` is or would be made."""
        try:
            return atomic.free_bytes(path)
        except OSError:
            return None

    def disk(self, path: Path) -> tuple[int, int]:
        """A number that tells the disk of `path` from others, and its free bytes; no bytes where it cannot be read."""
        try:
            return path.stat().st_dev, atomic.free_bytes(path)
        except OSError:
            return -1, 0

    def sleep(self, seconds: float) -> None:
        """Waits."""
        time.sleep(seconds)

    def kernel(self) -> str:
        """The kernel's release."""
        return platform.release()

    def current_card(self) -> int:
        """The number of torch's current CUDA device; 0 where torch has not begun to use CUDA."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return 0
        return int(torch.cuda.current_device())

    def gpu_free(self, card: int) -> int | None:
        """Bytes of a card that a plan can count on: those that the driver calls free, and blocks that torch's allocator
        holds without using them, which it is first asked to give back. None where torch is not loaded or has no
        CUDA."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available() or card >= torch.cuda.device_count():
            return None
        try:
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info(card)
            unused = torch.cuda.memory_reserved(card) - torch.cuda.memory_allocated(card)
        except RuntimeError as error:  # not even a context has room, or the card is in exclusive use
            log.warning("cannot ask cuda:%d for its free memory: %s", card, first_line(error))
            return 0
        return int(free) + int(unused)

    def cuda_status(self) -> dict[str, Any]:
        """What the native core says of the driver and its cards: `{available, reason, driver, devices}`."""
        return cuda_status()


def _less_margin(free: int) -> int:
    """Free bytes of a disk without what state leaves to others."""
    return max(0, free - max(GIB, free // 20))


SYSTEM_PROBE = SystemProbe()
"""The readers used when none are passed."""


def no_card(reason: str) -> str:
    """Why `device: cuda` is refused; `reason` is that of `Machine.gpu_reason`."""
    return f"device is cuda and there is no usable card: {reason}. See `megatrain doctor`, or write device: cpu"


def read(folder: Path | None = None, readers: SystemProbe | None = None, gpus: bool = True) -> Machine:
    """Reads this machine. `folder` is where a run would write (for free disk); `gpus=False` does not ask the driver."""
    readers = readers or SYSTEM_PROBE
    meminfo = dict(_meminfo(readers.text("/proc/meminfo") or ""))
    total = meminfo.get("MemTotal", 0)
    limit, available, source = total, meminfo.get("MemAvailable", meminfo.get("MemFree", 0)), "this machine"
    for group in _memory_groups(readers):
        if group.limit < limit:
            limit, source = group.limit, f"the control group {group.path}"
        available = min(available, max(0, group.limit - group.used))
    for option, most, mapped in readers.address_limits():
        if most < limit:
            limit, source = most, f"ulimit {option} of this process"
        available = min(available, max(0, most - mapped))
    status: dict[str, Any] = (
        readers.cuda_status() if gpus else {"available": False, "reason": "not asked", "devices": []}
    )
    return Machine(
        cpus=usable_cpus(readers),
        memory_total=total,
        memory_limit=limit,
        memory_available=available,
        memory_source=source,
        memlock=readers.memlock(),
        gpus=tuple(_gpu(device) for device in status.get("devices") or ()) if status.get("available") else (),
        gpu_reason="" if status.get("available") else str(status.get("reason") or "no usable card"),
        disk_free=readers.disk_free(folder) if folder is not None else None,
        kernel=readers.kernel(),
        name=platform.node(),
    )


def settled(machine: Machine, readers: SystemProbe | None = None) -> Machine | None:
    """The machine once its host memory no longer becomes more: a process that has just ended, such as a killed run,
    gives its memory back over seconds. None where it does not become more, or is only described."""
    readers = readers or SYSTEM_PROBE
    if machine.described:
        return None
    most, unchanged = machine.memory_available, 0
    while unchanged < _SETTLED:
        readers.sleep(_SETTLING_S)
        available = read(readers=readers, gpus=False).memory_available
        unchanged = 0 if available >= most + _RELEASED else unchanged + 1
        most = max(most, available)
    if most < machine.memory_available + _RELEASED:
        return None
    log.info(
        "waited for host memory that another process was giving back: %s instead of %s is available",
        format_bytes(most),
        format_bytes(machine.memory_available),
    )
    return dataclasses.replace(machine, memory_available=most)


def cuda_status() -> dict[str, Any]:
    """What the native core says of the driver and its cards; never raises, with or without a driver."""
    try:
        from megatrain import _core
    except ImportError as error:
        return {"available": False, "reason": f"the native core cannot be loaded: {error}", "devices": []}
    status: dict[str, Any] = json.loads(_core.cuda_status())
    return status


def format_bytes(size: float) -> str:
    """Sizes as people read them; GiB is 1024 MiB."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(size) >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size:.0f} B"


def _gpu(device: Mapping[str, Any]) -> Gpu:
    major, minor = device.get("capability") or (0, 0)
    return Gpu(
        name=str(device.get("name", "GPU")),
        total_bytes=int(device.get("total_bytes") or 0),
        capability=(int(major), int(minor)),
    )


def _meminfo(text: str) -> Iterator[tuple[str, int]]:
    for line in text.splitlines():
        key, _, rest = line.partition(":")
        fields = rest.split()
        if fields and fields[0].isdigit():
            yield key, int(fields[0]) * (1024 if fields[-1] == "kB" else 1)


@dataclasses.dataclass(frozen=True, slots=True)
class _Group:
    path: str
    limit: int
    used: int


def _memory_groups(readers: SystemProbe) -> Iterator[_Group]:
    """Every control group that bounds this process's memory, innermost first."""
    for version, folder in _folders(readers, "memory"):
        stat = _fields(readers.text(f"{folder}/memory.stat"))
        if version == 2:
            limits = [_number(readers.text(f"{folder}/{name}")) for name in ("memory.max", "memory.high")]
            used = _number(readers.text(f"{folder}/memory.current")) or 0
            reclaimable = stat.get("inactive_file", 0) + stat.get("active_file", 0)
        else:
            # `hierarchical_memory_limit` also counts parents that a container cannot see.
            limits = [_number(readers.text(f"{folder}/memory.limit_in_bytes")), stat.get("hierarchical_memory_limit")]
            used = _number(readers.text(f"{folder}/memory.usage_in_bytes")) or 0
            reclaimable = stat.get("total_inactive_file", 0) + stat.get("total_active_file", 0)
        bounds = [limit for limit in limits if limit is not None and limit < _UNLIMITED]
        if bounds:
            yield _Group(folder, min(bounds), max(0, used - reclaimable))


def usable_cpus(readers: SystemProbe = SYSTEM_PROBE) -> int:
    """Processors that this process may use: its affinity, cut by the quotas of its control groups."""
    allowed = float(readers.affinity())
    for version, folder in _folders(readers, "cpu"):
        if version == 2:
            quota, _, period = (readers.text(f"{folder}/cpu.max") or "max").strip().partition(" ")
        else:
            quota = (readers.text(f"{folder}/cpu.cfs_quota_us") or "-1").strip()
            period = (readers.text(f"{folder}/cpu.cfs_period_us") or "").strip()
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            allowed = min(allowed, int(quota) / int(period))
    return max(1, math.floor(allowed))


def _folders(readers: SystemProbe, controller: str) -> Iterator[tuple[int, str]]:
    """The folders of the control groups of this process for one controller, from its own up to the mount's root."""
    memberships: dict[str, str] = {}
    for line in (readers.text("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        for name in controllers.split(",") if controllers else [""]:
            memberships[name] = path
    for line in (readers.text("/proc/self/mountinfo") or "").splitlines():
        # Fields: id, parent, device, ROOT, MOUNT, options …, a dash, TYPE, source, super-options.
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2" and "" in memberships:
            version, path = 2, memberships[""]
        elif kind[0] == "cgroup" and controller in kind[2].split(",") and controller in memberships:
            version, path = 1, memberships[controller]
        else:
            continue
        root, mount = fields[3].rstrip("/"), fields[4]
        # A container may show the host's path while only its own part is mounted: then the mount is its group.
        inside = path[len(root) :] if path.startswith(root + "/") or path == root else ("" if root else path)
        parts = [part for part in inside.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            yield version, "/".join([mount, *parts[:depth]])


def _number(text: str | None) -> int | None:
    stripped = (text or "").strip()
    return int(stripped) if stripped.isdigit() else None


def _fields(text: str | None) -> dict[str, int]:
    pairs = (line.split() for line in (text or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
