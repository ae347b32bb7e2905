"""Files and folders that appear whole or not at all, whenever the process or the machine stops.

This is the only place that writes beside a path, flushes and renames, and the only one that asks a disk for free bytes.

    staged       a folder that one process owns: a checkpoint, an export
    published    a folder that several processes may make at the same time, all with the same content: a cache entry
    write_whole  one file

New content is written beside its path as `.tmp-NAME`, flushed, and renamed. A folder that is replaced is first renamed
to `.old-NAME`; a kill between these two renames leaves only that, which `present` finds for readers and `recover`
undoes for the process that owns the folder. What is removed is first renamed to `.removing-NAME`, so that a folder
removed in part never passes for a whole one. A path that is a symbolic link stays one: its target is what is written.

POSIX makes a rename atomic but not durable: a file's data, and the entries of its folder, reach the disk with an fsync
of each (see fsync(2)).
"""

import contextlib
import errno
import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from megatrain.errors import StorageError

CHUNK_BYTES = 64 << 20
"""Bytes of a file that one CRC covers and one write takes."""

_NEW, _OLD, _REMOVED = ".tmp-", ".old-", ".removing-"


# ------------------------------------------------------------------------------------------------------- folders


@contextlib.contextmanager
def staged(folder: Path, needed: int) -> Iterator[Path]:
    """Yields a new, empty folder that takes the place of `folder` when the block ends, and is removed when the block
    raises. What is at `folder` stays untouched until then. The block flushes the files that it writes (`write_file`,
    `flushing`); folders are flushed here.

    Raises StorageError when fewer than `needed` bytes are free, or when anything cannot be written.
    """
    target = _without_links(folder)
    temporary = target.with_name(_NEW + target.name)
    try:
        make_folders(target.parent)
        recover(target)
        shutil.rmtree(temporary, ignore_errors=True)
        available = free_bytes(target.parent)
        if available < needed:
            raise StorageError(
                f"{folder} needs {needed} bytes and {available} are free on its disk; free {needed - available} more, "
                "keep fewer checkpoints (output.keep) or name another folder"
            )
        temporary.mkdir()
    except OSError as error:
        raise storage_error(error, folder, needed) from None
    try:
        try:
            yield temporary
            for inner, _, _ in os.walk(temporary):
                sync_folder(Path(inner))
            _replace_folder(temporary, target)
        except OSError as error:
            raise storage_error(error, folder, needed) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def published(folder: Path) -> Iterator[Path]:
    """Yields a new folder that is flushed and becomes `folder` when the block ends, and is removed when the block
    raises. Where another process has published `folder` meanwhile, that one is kept: both hold the same. Raises
    OSError."""
    folder = _without_links(folder)
    make_folders(folder.parent)
    temporary = Path(tempfile.mkdtemp(prefix=f"{_NEW}{folder.name[:12]}-", dir=folder.parent))
    try:
        with flushing(temporary):
            yield temporary
        for inner, _, _ in os.walk(temporary):
            sync_folder(Path(inner))
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def make_folders(folder: Path) -> None:
    """Makes a folder and those above it that are missing; each entry is flushed. Raises OSError."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing):
        sync_folder(made.parent)


def _replace_folder(temporary: Path, target: Path) -> None:
    old = target.with_name(_OLD + target.name)
    if target.exists():
        target.rename(old)
    try:
        temporary.rename(target)
    except OSError:
        with contextlib.suppress(OSError):  # also where there was nothing before
            old.rename(target)
        raise
    sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def present(folder: Path) -> Path:
    """Where the content of `folder` is: there, or beside it when `staged` was killed between its two renames. Changes
    nothing, so any process may ask at any time."""
    target = _without_links(folder)
    old = target.with_name(_OLD + target.name)
    try:
        return old if not target.exists() and old.is_dir() else folder
    except OSError:
        return folder  # such as a name that is too long; reading it says so


def recover(folder: Path) -> None:
    """Puts back what `staged` had moved aside when it was killed between its two renames; otherwise does nothing. Only
    for the process that owns the folder: in another one it would undo a save that is going on. Raises OSError."""
    target = _without_links(folder)
    old = target.with_name(_OLD + target.name)
    if not old.exists():
        return
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
    else:
        old.rename(target)  # not flushed: `present` finds it whether or not a power cut takes this back


def original_name(name: str) -> str | None:
    """`NAME` of a folder that `staged` moved aside (`.old-NAME`); None for every other name."""
    return name.removeprefix(_OLD) if name.startswith(_OLD) else None


def remove(folder: Path) -> None:
    """Removes a folder that is never to be seen in part. Of a symbolic link only the link goes: what it points to was
    put there by somebody else. Raises OSError when it cannot be renamed."""
    doomed = folder.with_name(_REMOVED + folder.name)
    _remove(doomed)
    folder.rename(doomed)
    sync_folder(folder.parent)  # or a power cut could bring the old name back for what is left
    _remove(doomed)


def leftovers(parent: Path, *names: str) -> list[Path]:
    """What a killed process left in `parent` of files and folders with one of `names`, or, where a name ends in `*`,
    that begin with what precedes it. Sorted."""
    found = []
    for path in sorted(parent.iterdir()) if parent.is_dir() else []:
        name = next((path.name.removeprefix(mark) for mark in (_NEW, _REMOVED) if path.name.startswith(mark)), None)
        if name is not None and any(
            name.startswith(known[:-1]) if known.endswith("*") else name == known for known in names
        ):
            found.append(path)
    return found


def remove_leftovers(parent: Path, *names: str) -> list[Path]:
    """Removes what `leftovers` finds, and returns it. Only for the process that owns `parent`."""
    found = leftovers(parent, *names)
    for path in found:
        _remove(path)
    return found


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# --------------------------------------------------------------------------------------------------------- files


def write_whole(path: Path, data: bytes | str) -> None:
    """Writes a file that a reader sees either as it was or as it is to be. A device or a pipe is written directly.
    Raises StorageError."""
    data = data.encode() if isinstance(data, str) else data
    target = _without_links(path)
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(data)
            return
        temporary = target.with_name(_NEW + target.name)
        try:
            _write(temporary, data)
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(target.parent)
    except OSError as error:
        raise storage_error(error, path, len(data)) from None


def write_file(path: Path, data: bytes) -> None:
    """Writes and flushes a small file of a folder that is not in its place yet. Raises StorageError."""
    try:
        _write(path, data)
    except OSError as error:
        raise storage_error(error, path) from None


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def flushing(folder: Path) -> Iterator[None]:
    """Flushes every file that the block adds to `folder`, at any depth: for what other libraries write. Raises
    StorageError."""
    before = set(folder.rglob("*"))
    yield
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path not in before:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(file)
            except OSError as error:
                raise storage_error(error, path) from None
            finally:
                os.close(file)


def sync_folder(folder: Path) -> None:
    """Flushes a folder's entries, so that a rename in it outlives a power cut. Raises OSError."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot, and need not
            raise
    finally:
        os.close(file)


def crc_per_chunk(data: bytes) -> list[int]:
    """A CRC32 for each chunk of `CHUNK_BYTES`."""
    return [zlib.crc32(data[begin : begin + CHUNK_BYTES]) for begin in range(0, len(data), CHUNK_BYTES)]


def is_regular(path: Path) -> bool:
    """Whether a path is a file, or a link to one: reading anything else may wait for ever. Raises OSError."""
    return stat.S_ISREG(path.stat().st_mode)


# -------------------------------------------------------------------------------------------------- room and errors


def free_bytes(path: Path) -> int:
    """What an ordinary user may still write on the disk where `path` is, or would be made. Raises OSError."""
    path = _without_links(path)
    there = next((folder for folder in (path, *path.parents) if folder.exists()), path)
    facts = os.statvfs(there)
    return facts.f_bavail * facts.f_frsize


def storage_error(error: OSError, path: Path, needed: int | None = None) -> StorageError:
    """The error for a file or folder that cannot be written, with the bytes needed and free where they are known."""
    sizes = []
    if needed is not None:
        sizes.append(f"{needed} bytes were needed")
    with contextlib.suppress(OSError):
        sizes.append(f"{free_bytes(path)} are free")
    known = f" ({', '.join(sizes)})" if sizes else ""
    return StorageError(f"{path} cannot be written: {error.strerror or error}{known}")


def _without_links(path: Path) -> Path:
    """The path with every symbolic link followed, whether or not something is at its end: a rename would replace the
    link itself."""
    return Path(os.path.realpath(path))
