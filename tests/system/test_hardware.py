"""Machine facts: what a process may use, under both control-group versions, and written descriptions."""

import dataclasses
import resource
from pathlib import Path
from typing import Any

import pytest

from megatrain.system import descriptions, hardware
from megatrain.system.hardware import GIB, MIB, SystemProbe, format_bytes

MEMINFO = "MemTotal:       67108864 kB\nMemFree:        1048576 kB\nMemAvailable:   62914560 kB\n"


class Fake(SystemProbe):
    """A machine of 64 GiB with 60 GiB available, in a folder."""

    def __init__(self, root: Path, files: dict[str, str]) -> None:
        super().__init__(root)
        for path, text in {"proc/meminfo": MEMINFO, **files}.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)

    def affinity(self) -> int:
        return 16

    def memlock(self) -> int | None:
        return 64 << 10

    def cuda_status(self) -> dict[str, Any]:
        return {"available": False, "reason": "libcuda.so.1 is not there", "devices": []}

    def address_limits(self) -> list[tuple[str, int, int]]:
        return []


V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1_MOUNT = (
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
)


def test_without_control_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    found = hardware.read(readers=Fake(tmp_path, {}))
    assert (found.memory_limit, found.memory_available, found.cpus) == (64 * GIB, 60 * GIB, 16)
    assert found.memory_source == "this machine"
    assert found.gpu is None
    assert "libcuda" in found.gpu_reason


def test_a_version_2_limit_is_the_budget_and_file_pages_do_not_count_as_used(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/user/job"
    files = {
        "proc/self/mountinfo": V2_MOUNT,
        "proc/self/cgroup": "0::/user/job\n",
        f"{group}/memory.max": f"{4 * GIB}\n",
        f"{group}/memory.high": "max\n",
        f"{group}/memory.current": f"{3 * GIB}\n",
        f"{group}/memory.stat": f"anon {GIB}\ninactive_file {GIB}\nactive_file {GIB}\n",
        f"{group}/cpu.max": "250000 100000\n",
    }
    found = hardware.read(readers=Fake(tmp_path, files))
    assert (found.memory_limit, found.memory_available, found.cpus) == (4 * GIB, 3 * GIB, 2)
    assert "/user/job" in found.memory_source


def test_a_version_2_limit_set_only_on_a_parent_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/mountinfo": V2_MOUNT,
        "proc/self/cgroup": "0::/user/job\n",
        "sys/fs/cgroup/user/job/memory.max": "max\n",
        "sys/fs/cgroup/user/job/cpu.max": "max 100000\n",
        "sys/fs/cgroup/user/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/user/memory.current": "0\n",
        "sys/fs/cgroup/user/cpu.max": "50000 100000\n",
    }
    found = hardware.read(readers=Fake(tmp_path, files))
    assert (found.memory_limit, found.memory_available, found.cpus) == (4 * GIB, 4 * GIB, 1)


def test_a_version_1_limit_is_the_budget(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/job"
    files = {
        "proc/self/mountinfo": V1_MOUNT,
        "proc/self/cgroup": "4:memory:/job\n1:cpu,cpuacct:/job\n0::/\n",
        f"{group}/memory.limit_in_bytes": f"{4 * GIB}\n",
        f"{group}/memory.usage_in_bytes": f"{2 * GIB}\n",
        f"{group}/memory.stat": f"total_inactive_file {GIB}\nhierarchical_memory_limit {4 * GIB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "400000\n",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
    }
    found = hardware.read(readers=Fake(tmp_path, files))
    assert (found.memory_limit, found.memory_available, found.cpus) == (4 * GIB, 3 * GIB, 4)


def test_a_version_1_limit_of_a_parent_outside_the_container_counts(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory"
    files = {
        "proc/self/mountinfo": V1_MOUNT.replace(" / /sys/fs/cgroup/memory", " /docker/ab12 /sys/fs/cgroup/memory"),
        "proc/self/cgroup": "4:memory:/docker/ab12\n",
        f"{group}/memory.limit_in_bytes": "9223372036854771712\n",
        f"{group}/memory.usage_in_bytes": "0\n",
        f"{group}/memory.stat": f"hierarchical_memory_limit {4 * GIB}\n",
    }
    found = hardware.read(readers=Fake(tmp_path, files))
    assert found.memory_limit == 4 * GIB


def test_a_limit_on_addresses_is_the_budget_and_what_is_mapped_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {resource.RLIMIT_AS: 8 * GIB, resource.RLIMIT_DATA: -1}
    monkeypatch.setattr(hardware.resource, "getrlimit", lambda kind: (limits.get(kind, -1), -1))
    files = {"proc/meminfo": MEMINFO, "proc/self/status": "Name:\tpython\nVmSize:\t 2097152 kB\nVmData:\t 5 kB\n"}
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    probe = SystemProbe(tmp_path)
    assert probe.address_limits() == [("-v", 8 * GIB, 2 * GIB)]
    found = hardware.read(readers=probe, gpus=False)
    assert (found.memory_limit, found.memory_available) == (8 * GIB, 6 * GIB)
    assert found.memory_source == "ulimit -v of this process"


class Releasing(Fake):
    """A machine where another process gives back 1 GiB per look at `seen`, until nothing of it is left."""

    def __init__(self, root: Path, gib: list[int]) -> None:
        super().__init__(root, {})
        self.gib, self.looks = gib, 0

    def sleep(self, seconds: float) -> None:
        del seconds
        self.looks += 1

    def text(self, path: str) -> str | None:
        if path != "/proc/meminfo":
            return super().text(path)
        available = self.gib[min(self.looks, len(self.gib) - 1)]
        return f"MemTotal: {64 << 20} kB\nMemAvailable: {available << 20} kB\n"


def test_memory_that_a_dying_process_gives_back_is_waited_for(tmp_path: Path) -> None:
    probe = Releasing(tmp_path, [10, 20, 20, 30, 40, 40, 39, 40])
    machine = hardware.read(readers=probe, gpus=False)
    assert machine.memory_available == 10 * GIB
    settled = hardware.settled(machine, probe)
    assert settled is not None
    assert settled.memory_available == 40 * GIB
    assert probe.looks == 6  # the last two without a change


def test_memory_that_does_not_become_more_is_not_waited_for(tmp_path: Path) -> None:
    probe = Releasing(tmp_path, [10, 10, 9, 10])
    assert hardware.settled(hardware.read(readers=probe, gpus=False), probe) is None
    assert probe.looks == 2
    described = descriptions.from_description({"host": {"memory": "1GiB"}}, "a file")
    assert hardware.settled(described, probe) is None


def test_the_file_system_of_a_folder_that_is_not_there_yet_is_that_of_its_mount(tmp_path: Path) -> None:
    mounts = (
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:5 / /dev rw - devtmpfs udev rw\n"
        "3 2 0:6 / /dev/shm rw - tmpfs tmpfs rw\n4 1 0:7 / /mnt/run rw - ext4 /dev/sdb rw\n"
        "5 1 0:8 / /mnt/run rw - xfs /dev/sdc rw\n"
    )
    probe = Fake(tmp_path, {"proc/self/mountinfo": mounts})
    for path, kind in {
        "/dev/shm/run/a": "tmpfs",
        "/dev/shmem": "devtmpfs",
        "/mnt/run": "xfs",
        "/mnt/runs/b": "ext4",
    }.items():
        assert probe.file_system(Path(path)) == kind, path


def test_auto_budgets_leave_head_room(tmp_path: Path) -> None:
    found = hardware.read(readers=Fake(tmp_path, {}))
    assert 0.9 * found.memory_available < found.host_budget() < found.memory_available
    assert found.gpu_budget() == 0


def test_this_very_machine_can_be_read(tmp_path: Path) -> None:
    found = hardware.read(tmp_path)
    assert 0 < found.memory_available <= found.memory_limit <= found.memory_total
    assert found.cpus >= 1
    assert found.disk_free is not None


class Cards(Fake):
    """Two cards, of which `free` bytes are free; torch's current device is the second."""

    def __init__(self, root: Path, free: dict[int, int | None]) -> None:
        super().__init__(root, {})
        self.free, self.asked = free, []

    def cuda_status(self) -> dict[str, Any]:
        cards = [("H100", 80, [9, 0]), ("RTX 3060", 8, [8, 6])]
        devices = [{"name": n, "total_bytes": g * GIB, "capability": c} for n, g, c in cards]
        return {"available": True, "reason": None, "devices": devices}

    def current_card(self) -> int:
        return 1

    def gpu_free(self, card: int) -> int | None:
        self.asked.append(card)
        return self.free[card]


def test_the_budget_of_a_card_is_what_others_leave_of_it(tmp_path: Path) -> None:
    probe = Cards(tmp_path, {0: 80 * GIB - 640 * MIB, 1: 3 * GIB})
    machine = hardware.read(readers=probe)
    assert probe.asked == [], "reading a machine opens no context on a card"
    idle, used = machine.with_free_memory(0, probe), machine.with_free_memory(None, probe)
    # Nothing but the context, which is a line of the plan, is missing from the first card.
    assert idle.gpu is not None
    assert (idle.gpu.name, idle.gpu.held_bytes, idle.gpu_budget()) == ("H100", 0, 79 * GIB)
    # `cuda` is torch's current device: the second. Its own memory counts, and what a desktop holds of it does not.
    assert used.gpu is not None
    held = 5 * GIB - 256 * MIB
    assert (used.gpu.name, used.gpu.held_bytes, used.gpu_budget()) == ("RTX 3060", held, 8 * GIB - held - 256 * MIB)
    assert probe.asked == [0, 1]
    assert used.idle().gpu_budget() == 8 * GIB - 256 * MIB, "what decides about numbers does not depend on it"
    # A card that has no room for a context has no room for a plan.
    assert machine.with_free_memory(1, Cards(tmp_path, {1: 0})).gpu_budget() == 0
    # Where nobody can say, all of it counts.
    assert machine.with_free_memory(1, Cards(tmp_path, {1: None})).gpu_budget() == 8 * GIB - 256 * MIB
    assert machine.with_free_memory(7, probe).gpu is None


def test_what_the_allocator_of_torch_holds_without_using_it_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    calls: list[str] = []
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: 2)
    monkeypatch.setattr(cuda, "current_device", lambda: 1)
    monkeypatch.setattr(cuda, "empty_cache", lambda: calls.append("empty_cache"))
    monkeypatch.setattr(cuda, "mem_get_info", lambda card: calls.append(f"free {card}") or (10 * GIB, 80 * GIB))
    monkeypatch.setattr(cuda, "memory_reserved", lambda _: 7 * GIB)
    monkeypatch.setattr(cuda, "memory_allocated", lambda _: 5 * GIB)
    probe = SystemProbe()
    assert (probe.current_card(), probe.gpu_free(1), probe.gpu_free(2)) == (1, 12 * GIB, None)
    assert calls == ["empty_cache", "free 1"], "the cache is given back before the driver is asked"

    def no_context(_: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cuda, "mem_get_info", no_context)
    assert probe.gpu_free(1) == 0


def test_on_the_cpu_both_tiers_share_one_memory(tmp_path: Path) -> None:
    machine = hardware.read(readers=Fake(tmp_path, {}))
    host = machine.host_budget()
    assert machine.budget("cpu") == {"device": host, "host": host}
    assert machine.budget("cpu", gpu=2 * GIB, host=GIB) == {"device": GIB, "host": GIB}
    assert machine.budget("cpu", gpu=GIB, host=2 * GIB) == {"device": GIB, "host": 2 * GIB}
    assert machine.budget("cuda", gpu=GIB) == {"device": GIB, "host": host}


def test_sizes_are_shown_in_units_of_1024() -> None:
    assert format_bytes(3 * GIB // 2) == "1.50 GiB"
    assert format_bytes(100) == "100 B"


def test_state_on_a_disk_that_is_host_memory_is_counted_as_host_memory(caplog: pytest.LogCaptureFixture) -> None:
    class Memory(SystemProbe):
        kind = "ext4"

        def disk(self, path: Path) -> tuple[int, int]:  # noqa: ARG002
            return 1, 100 * GIB

        def file_system(self, path: Path) -> str:  # noqa: ARG002
            return self.kind

    probe, machine = Memory(), dataclasses.replace(hardware.read(gpus=False), memory_available=64 * GIB)
    paths = ("/state/one",)
    assert machine.state_disk(paths, None, 60 * GIB, probe) == 95 * GIB
    probe.kind = "tmpfs"
    assert machine.state_disk(paths, None, 60 * GIB, probe) == 4 * GIB
    assert machine.state_disk(paths, 3 * GIB, 60 * GIB, probe) == 3 * GIB
    assert machine.state_disk(paths, None, 80 * GIB, probe) == 0
    (said,) = [message for message in caplog.messages if "is in host memory (tmpfs)" in message]
    assert "/state/one" in said
