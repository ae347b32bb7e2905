"""A run's folder on a disk that fills up, after a kill, and behind symbolic links."""

import logging
import os
from pathlib import Path

import pytest

from megatrain.checkpoint import checkpoint
from megatrain.cli import main
from megatrain.errors import StorageError
from megatrain.system import atomic, hardware
from megatrain.training.run_dir import RunFolder
from support.runs import settings
from support.trainer import fit


def test_what_a_kill_left_is_removed_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = settings(tmp_path, train={"steps": 2})
    fit(config)
    checkpoints = tmp_path / "run" / "checkpoints"
    for folder in (checkpoints / ".tmp-step-9", checkpoints / ".removing-step-1", tmp_path / "run" / ".tmp-export"):
        folder.mkdir()
        (folder / "model.safetensors").write_text("half")
    (tmp_path / "run" / ".tmp-plan.json").write_text("{")
    (tmp_path / "run" / ".tmp-mine").write_text("mine")
    (checkpoints / ".tmp-mine").write_text("mine")
    config["train"]["steps"] = 3
    with caplog.at_level(logging.WARNING, "megatrain"):
        fit(config)
    told = next(record.getMessage() for record in caplog.records if "left unfinished" in record.getMessage())
    for name in ("checkpoints/.tmp-step-9", "checkpoints/.removing-step-1", ".tmp-export", ".tmp-plan.json"):
        assert name in told
    assert told in (tmp_path / "run" / "log.txt").read_text()
    left = [*atomic.leftovers(checkpoints, "*"), *atomic.leftovers(tmp_path / "run", "*")]
    assert [path.name for path in left] == [".tmp-mine", ".tmp-mine"]
    assert "mine" not in told


def test_a_folder_moved_aside_is_put_back_by_the_run_that_goes_on(tmp_path: Path) -> None:
    config = settings(tmp_path, train={"steps": 2}, output={"export": "auto"})
    fit(config)
    run = tmp_path / "run"
    os.rename(run / "checkpoints" / "step-2", run / "checkpoints" / ".old-step-2")  # noqa: PTH104
    os.rename(run / "export", run / ".old-export")  # noqa: PTH104
    assert checkpoint.latest_complete(run) == run / "checkpoints" / ".old-step-2"
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    assert not (run / "checkpoints" / "step-2").exists(), "a reader renames nothing"
    folder = RunFolder(run)
    folder.close()
    assert (run / "export").is_dir()
    config["train"]["steps"] = 3
    assert fit(config).step == 3
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-2", "step-3"]


class InMemory(hardware.SystemProbe):
    """Where the run's folder is on a memory file system, and little memory is available."""

    def __init__(self, available: int) -> None:
        super().__init__()
        self.available = available

    def file_system(self, path: Path) -> str:
        del path
        return "tmpfs"

    def text(self, path: str) -> str | None:
        text = super().text(path)
        return f"MemTotal: 67108864 kB\nMemAvailable: {self.available >> 10} kB\n" if path == "/proc/meminfo" else text


def test_checkpoints_in_memory_count_beside_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings(tmp_path, train={"steps": 2}, memory={"gpu": "100MiB", "host": "100MiB"})
    monkeypatch.setattr(hardware, "SYSTEM_PROBE", InMemory(2 << 20))
    with pytest.raises(StorageError, match=r"output\.dir .* is in host memory \(tmpfs\).*name a folder on a disk"):
        fit(config)
    monkeypatch.setattr(hardware, "SYSTEM_PROBE", InMemory(1 << 30))
    assert fit(config).step == 2
    assert "is in host memory (tmpfs): what it holds is lost when the machine stops" in caplog.text


def test_a_plan_is_made_again_once_memory_has_been_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Dying(hardware.SystemProbe):
        waited = 0

        def sleep(self, _: float) -> None:
            self.waited += 1

        def text(self, path: str) -> str | None:
            kib = (768 << 10) if self.waited < 2 else (8 << 20)
            return f"MemTotal: 67108864 kB\nMemAvailable: {kib} kB\n" if path == "/proc/meminfo" else super().text(path)

    monkeypatch.setattr(hardware, "SYSTEM_PROBE", Dying())
    with caplog.at_level(logging.INFO):
        assert fit(settings(tmp_path, train={"steps": 2})).step == 2
    assert "waited for host memory that another process was giving back" in caplog.text


@pytest.mark.parametrize("dangling", [False, True])
def test_a_run_whose_folders_are_links_goes_on_again_and_again(tmp_path: Path, dangling: bool) -> None:
    """On a disk of their own: the run's folder, its checkpoints, one of them, and its export."""
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "run").symlink_to(disk / "run")
    (disk / "run").mkdir()
    links = {"export": disk / "exports" / "newest", "checkpoints": disk / "checkpoints"}
    for name, place in links.items():
        if not dangling or name == "checkpoints":
            place.mkdir(parents=True)
        (disk / "run" / name).symlink_to(place)
    (disk / "checkpoints" / "step-2").symlink_to(disk / "step-2")
    (disk / "run" / "lock").write_text("process 1")  # so that the folder is known for a run's
    for steps in (2, 3, 5):
        config = settings(tmp_path, train={"steps": steps}, output={"save_every": 1, "keep": 2, "export": "auto"})
        assert fit(config).step == steps
        assert checkpoint.verify(tmp_path / "run" / "checkpoints" / f"step-{steps}") == []
        for name, place in links.items():
            assert (disk / "run" / name).is_symlink()
            assert place.is_dir()
        assert (tmp_path / "run" / "export" / "config.json").is_file()
        assert not atomic.leftovers(disk, "*")
        assert not atomic.leftovers(disk / "exports", "*")
    assert sorted(path.name for path in (disk / "checkpoints").iterdir()) == ["step-4", "step-5"]
    assert checkpoint.verify(disk / "step-2") == [], "of a checkpoint behind a link only the link is removed"
