"""Files and folders that appear whole or not at all: through links, on full disks, and flushed in the right order."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain.checkpoint import checkpoint
from megatrain.checkpoint.export import export_checkpoint, save_pretrained
from megatrain.checkpoint.save import save
from megatrain.errors import StorageError
from megatrain.system import atomic
from megatrain.system.atomic import published, remove, staged, write_whole
from support.fake_core import engine
from support.tiny_tokenizer import tiny_tokenizer

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


# ------------------------------------------------------------------------------------------- what reaches the disk when


class Disk:
    """Watches a process write, and tells at every rename and removal what a power cut would lose then."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.flushed: dict[str, Any] = {}
        """Path to what was there when it was last flushed: a file's size and time, a folder's entries."""
        self.lost: list[str] = []
        self.renames: list[str] = []
        self.pending: list[Path] = []
        """Folders in which something was renamed since they were flushed."""
        real = SimpleNamespace(fsync=os.fsync, rename=Path.rename, open=Path.open, rmtree=atomic.shutil.rmtree)

        def fsync(file: int) -> None:
            real.fsync(file)
            path = Path(f"/proc/self/fd/{file}").readlink()
            self.flushed[str(path)] = self.state(path)
            self.pending = [folder for folder in self.pending if folder != path]

        def rename(path: Path, target: Path) -> Path:
            if self.pending and self.renames[-1] != f"{target.name} -> .old-{target.name}":
                self.lost.append(f"{self.renames[-1]} is not flushed before {path.name} -> {target.name}")
            if path.name.startswith(".tmp-"):
                self.check(path)
            moved = real.rename(path, target)
            self.flushed = {name: what for name, what in self.flushed.items() if not name.startswith(str(path))}
            self.pending.append(target.parent)
            self.renames.append(f"{path.name} -> {target.name}")
            return moved

        def rmtree(path: Path, **options: Any) -> None:
            if str(path).rpartition("/")[2].startswith(".old-") and Path(path).exists() and self.pending:
                self.lost.append(f"{path} is removed before the rename that replaces it is flushed")
            real.rmtree(path, **options)

        def opened(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
            if path.name == "manifest.json" and "w" in mode:  # whoever finds it believes that the rest is there
                self.check(path.parent)
            return real.open(path, mode, *args, **options)

        patch.setattr(os, "fsync", fsync)
        patch.setattr(Path, "open", opened)
        patch.setattr(Path, "rename", rename)
        patch.setattr(Path, "replace", rename)
        patch.setattr(atomic.shutil, "rmtree", rmtree)

    @staticmethod
    def state(path: Path) -> Any:
        if path.is_dir():
            return sorted(entry.name for entry in path.iterdir())
        return path.stat().st_size, path.stat().st_mtime_ns

    def check(self, root: Path) -> None:
        self.lost += [str(path) for path in [root, *root.rglob("*")] if self.flushed.get(str(path)) != self.state(path)]

    def done(self) -> None:
        """At the end: nothing is lost, and no rename waits for its folder to be flushed."""
        assert not self.lost
        assert not self.pending


def save_one(folder: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder / "tokenizer")
    for state in ({}, {"again": 1}):
        save(folder / "step-1", engine("bf16", seed=1), state, step=1, tokenizer_dir=folder / "tokenizer")


def export(folder: Path) -> None:
    tokenizer = tiny_tokenizer(template="{{ messages }}")
    source = engine("bf16", seed=1)
    for _ in range(2):
        save_pretrained(source.decoder, source.core, folder / "out", tokenizer=tokenizer, overwrite=True)


def export_saved(folder: Path) -> None:
    save_one(folder)
    export_checkpoint(folder / "step-1", folder / "out")


def publish(folder: Path) -> None:
    with published(folder / "entry") as temporary:
        (temporary / "inner").mkdir()
        (temporary / "inner" / "file").write_text("text")


def small_file(folder: Path) -> None:
    write_whole(folder / "status.json", "{}")


def recovered(folder: Path) -> None:
    fill(folder / "target", "text")
    os.rename(folder / "target", folder / ".old-target")  # noqa: PTH104 - unwatched, as by a process that was killed
    atomic.recover(folder / "target")


WRITERS = [save_one, export, export_saved, publish, small_file, recovered]


@pytest.mark.parametrize("write", WRITERS)
def test_everything_is_flushed_before_it_is_renamed_and_the_rename_before_what_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None]
) -> None:
    disk = Disk(monkeypatch)
    write(tmp_path)
    disk.done()
    assert disk.renames


@pytest.mark.parametrize("write", WRITERS)
def test_every_flush_is_needed(tmp_path: Path, write: Callable[[Path], None]) -> None:
    """Leaving out any one flush is noticed by the test above, so none is there in vain and none can be lost."""

    def without(number: int | None, folder: Path) -> tuple[int, Disk]:
        folder.mkdir()
        calls = [0]
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(patch)
            watched = os.fsync

            def fsync(file: int) -> None:
                calls[0] += 1
                if calls[0] - 1 != number:
                    watched(file)

            patch.setattr(os, "fsync", fsync)
            write(folder)
        return calls[0], disk

    total, disk = without(None, tmp_path / "all")
    disk.done()
    for number in range(total):
        _, disk = without(number, tmp_path / str(number))
        assert disk.lost or disk.pending, f"flush {number} of {total} is not needed"
