"""Whether a run's disk has room for its checkpoints and its export, before the first step."""

import re
from pathlib import Path

import pytest

from megatrain.errors import StorageError
from megatrain.system import hardware
from megatrain.system.hardware import SystemProbe
from megatrain.training.trainer import Trainer
from support.runs import settings


class Full(SystemProbe):
    """A machine whose disks have one KiB free."""

    def disk_free(self, path: Path) -> int | None:  # noqa: ARG002
        return 1 << 10


def refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **sections: object) -> str:
    with monkeypatch.context() as patch:
        patch.setattr(hardware, "SYSTEM_PROBE", Full())
        with pytest.raises(StorageError) as refused:
            Trainer(settings(tmp_path) | sections).fit()
    assert not (tmp_path / "run").exists()
    return str(refused.value)


def test_disk_that_cannot_hold_the_checkpoints_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.search(r"output\.dir.*1\.00 KiB free", refusal(tmp_path, monkeypatch))


def test_what_a_checkpoint_holds_beside_tensors_is_part_of_what_its_disk_must_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = re.search(r"for 3 checkpoints of ([0-9.]+) KiB", refusal(tmp_path, monkeypatch))
    assert said is not None
    Trainer(settings(tmp_path)).fit()
    (folder,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    written = sum(path.stat().st_size for path in folder.iterdir())
    assert written < float(said[1]) * 1024 < written + (1 << 19)
