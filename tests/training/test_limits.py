"""Limits of the machine are read before a run starts: it is refused with the sum, or fits (acceptance case H06)."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatrain import Engine
from megatrain.cli import main
from megatrain.errors import DoesNotFit
from megatrain.models.decoder import Decoder
from megatrain.system import hardware
from megatrain.system.hardware import GIB
from support.reference import config
from support.runs import MODEL, settings
from support.trainer import fit

V2 = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
GROUPS: dict[str, dict[str, str]] = {
    "version 2": {
        "/proc/self/mountinfo": V2,
        "/proc/self/cgroup": "0::/job\n",
        "/sys/fs/cgroup/job/memory.max": f"{4 * GIB}\n",
        "/sys/fs/cgroup/job/memory.current": "0\n",
    },
    "a parent of version 2": {
        "/proc/self/mountinfo": V2,
        "/proc/self/cgroup": "0::/all/job\n",
        "/sys/fs/cgroup/all/job/memory.max": "max\n",
        "/sys/fs/cgroup/all/memory.max": f"{4 * GIB}\n",
        "/sys/fs/cgroup/all/memory.current": "0\n",
    },
    "version 1": {
        "/proc/self/mountinfo": V1,
        "/proc/self/cgroup": "5:memory:/job\n",
        "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{4 * GIB}\n",
        "/sys/fs/cgroup/memory/job/memory.usage_in_bytes": "0\n",
    },
}


class Limited(hardware.SystemProbe):
    """A machine of 64 GiB in a control group of 4, or in none."""

    def __init__(self, files: dict[str, str]) -> None:
        super().__init__()
        self.files = {"/proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 62914560 kB\n", **files}

    def text(self, path: str) -> str | None:
        return self.files.get(path)

    def sleep(self, seconds: float) -> None:
        del seconds

    def address_limits(self) -> list[tuple[str, int, int]]:
        return []


def sized(folder: Path, layers: int) -> dict[str, Any]:
    """A run whose weights and moments take about 0.17 GiB per layer."""
    wide = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": layers, "num_attention_heads": 8}
    return settings(folder, model={"config": MODEL | wide}, train={"steps": 2})


@pytest.mark.parametrize("group", GROUPS)
def test_what_does_not_fit_into_a_control_group_is_refused_with_the_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], group: str
) -> None:
    monkeypatch.setattr(hardware, "SYSTEM_PROBE", Limited(GROUPS[group]))
    (tmp_path / "config.yml").write_text(yaml.safe_dump(sized(tmp_path, 36)))
    assert main(["train", str(tmp_path / "config.yml")]) == 2
    said = capsys.readouterr().err
    for part in ("weights", "exp_avg", "gradient", "of 4.00 GiB available", "control group", "limit 4.00 GiB"):
        assert part in said, said
    assert not (tmp_path / "run").exists()


def test_without_a_group_the_same_run_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "SYSTEM_PROBE", Limited({}))
    (tmp_path / "config.yml").write_text(yaml.safe_dump(sized(tmp_path, 36)))
    assert main(["plan", str(tmp_path / "config.yml")]) == 0


def test_a_smaller_run_starts_in_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "SYSTEM_PROBE", Limited(GROUPS["version 2"]))
    assert fit(sized(tmp_path, 1)).step == 2


def test_the_budget_of_an_engine_is_the_groups_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "SYSTEM_PROBE", Limited(GROUPS["version 1"]))
    wide = config(hidden_size=1024, intermediate_size=4096, num_hidden_layers=36)
    with pytest.raises(DoesNotFit, match="host"):
        Engine(Decoder.from_config(wide, precision="fp32"), device="cpu", micro_batch=(1, 8), micro_batches=1)
