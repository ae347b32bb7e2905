"""Files and folders that appear whole or not at all: through links and on full disks.

What a power cut leaves of them is tried in `checkpoint/test_power_cuts.py`."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain.checkpoint import checkpoint
from megatrain.checkpoint.export import save_pretrained
from megatrain.checkpoint.save import save
from megatrain.errors import StorageError
from megatrain.system import atomic
from megatrain.system.atomic import published, remove, staged, write_whole
from support.fake_core import engine

# ---------------------------------------------------------------------------------------------------- symbolic links


def fill(folder: Path, text: str) -> None:
    with staged(folder, 0) as temporary:
        atomic.write_file(temporary / "file", text.encode())


def checkpoint_into(folder: Path, text: str) -> None:
    save(folder, engine("bf16", seed=1), {"text": text}, step=1)
    assert checkpoint.Checkpoint.open(folder).state().state == {"text": text}


def export_into(folder: Path, text: str) -> None:
    source = engine("bf16", seed=len(text))
    save_pretrained(source.decoder, source.core, folder, overwrite=True)


@pytest.mark.parametrize("write", [fill, checkpoint_into, export_into])
@pytest.mark.parametrize("target", ["there", "missing", "missing, in a missing folder"])
@pytest.mark.parametrize("links", [1, 2])
def test_a_folder_that_is_a_link_is_written_where_it_points_again_and_again(
    tmp_path: Path, write: Callable[[Path, str], None], target: str, links: int
) -> None:
    other_disk = tmp_path / "other" / "disk"
    other_disk.mkdir(parents=True)
    place = other_disk / ("deep/target" if "folder" in target else "target")
    link = tmp_path / "link"
    if links == 2:
        link.symlink_to(tmp_path / "between")
        (tmp_path / "between").symlink_to(place)
    else:
        link.symlink_to(Path("other/disk") / place.relative_to(other_disk))  # a relative one
    if target == "there":
        write(place, "before")
    for text in ("one", "two!", "three"):
        write(link, text)
        assert link.is_symlink()
        assert link.resolve() == place
        assert not place.is_symlink()
        assert [path.name for path in place.parent.iterdir()] == ["target"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["other", "link", "between"][: links + 1])
    if write is fill:
        assert (link / "file").read_text() == "three"


def test_a_file_that_is_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "file")
    for text in ("one", "two"):
        write_whole(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "there" / "file").read_text() == text
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "link", "there"]


def test_a_device_is_written_and_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "null").symlink_to("/dev/null")
    write_whole(tmp_path / "null", "text")
    assert Path("/dev/null").is_char_device()


def test_of_a_linked_folder_only_the_link_is_removed(tmp_path: Path) -> None:
    fill(tmp_path / "elsewhere", "mine")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    remove(tmp_path / "link")
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]
    assert (tmp_path / "elsewhere" / "file").read_text() == "mine"


# ---------------------------------------------------------------------------------------------------------- failures


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "file", "before")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match=r"file cannot be written: No space left.*5 bytes were needed, \d+ are"):
            write_whole(tmp_path / "file", "after")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "before")]


def test_an_entry_that_another_process_published_first_is_kept(tmp_path: Path) -> None:
    entry = tmp_path / "cache" / "entry"
    with published(entry) as first:
        (first / "file").write_text("first")
        with published(entry) as second:
            (second / "file").write_text("second")
    assert [path.name for path in entry.parent.iterdir()] == ["entry"]
    assert (entry / "file").read_text() == "second"
    with pytest.raises(ZeroDivisionError), published(tmp_path / "cache" / "other"):
        raise ZeroDivisionError
    assert [path.name for path in entry.parent.iterdir()] == ["entry"]
