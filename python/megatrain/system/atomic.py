"""Files and folders that appear whole or not at all, whenever the process or the machine stops.

A folder is written beside its place as `.tmp-NAME`, flushed, and renamed. One that takes another's place lets it stand
aside as `.old-NAME` for the instant between two renames; `recover` undoes that half when a kill fell into it.
"""

import contextlib
import errno
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

from megatrain.errors import StorageError

CHUNK_BYTES = 64 << 20
"""Bytes of a file that one CRC covers and one write takes."""


@contextlib.contextmanager
def staged(folder: Path, needed: int) -> Iterator[Path]:
    """A new, empty folder beside `folder` that takes its place when the block ends, and is removed when it fails. What
    stood there before is untouched until then. `needed` bytes must be free. Raises StorageError; what the block writes
    must have been flushed by it."""
    parent = folder.parent
    temporary = parent / f".tmp-{folder.name}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        recover(folder)
        shutil.rmtree(temporary, ignore_errors=True)
        available = free_bytes(parent)
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
            _take_place(temporary, folder)
        except OSError as error:
            raise storage_error(error, folder, needed) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def recover(folder: Path) -> None:
    """Puts back what `staged` had moved aside when it was killed between its two renames; otherwise does nothing."""
    aux = folder.parent / f".old-{folder.name}"
    if aux.exists():
        if folder.exists():
            shutil.rmtree(aux, ignore_errors=True)
        else:
            aux.rename(folder)
            sync_folder(folder.parent)


def _take_place(temporary: Path, folder: Path) -> None:
    aux = folder.parent / f".old-{folder.name}"
    if folder.exists():
        folder.rename(aux)
    temporary.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(aux, ignore_errors=True)


def write_file(path: Path, data: bytes) -> list[int]:
    """Writes and flushes a small file; its CRC32 per chunk. Raises StorageError."""
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise storage_error(error, path) from None
    return crc_per_chunk(data)


def crc_per_chunk(data: bytes) -> list[int]:
    """A CRC32 for each chunk of `CHUNK_BYTES`."""
    return [zlib.crc32(data[begin : begin + CHUNK_BYTES]) for begin in range(0, len(data), CHUNK_BYTES)]


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


def free_bytes(folder: Path) -> int:
    """What an ordinary user may still write on the disk of `folder`. Raises OSError."""
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize


def storage_error(error: OSError, path: Path, needed: int | None = None) -> StorageError:
    """What went wrong with a file or folder that was to be written, with the bytes needed and free where known."""
    there = path
    while not there.is_dir() and there != there.parent:
        there = there.parent
    sizes = []
    if needed is not None:
        sizes.append(f"{needed} bytes were needed")
    with contextlib.suppress(OSError):
        sizes.append(f"{free_bytes(there)} are free")
    told = f" ({', '.join(sizes)})" if sizes else ""
    return StorageError(f"{path} cannot be written: {error.strerror or error}{told}")
