"""Safetensors files, read and written in pieces, so that no file and no tensor is ever held whole.

Reading checks every file before its first tensor is used: size, header, offsets, index. Writing plans whole folders of
shards first (names, offsets, sizes are known before the first byte), then fills them in chunks from several threads,
each with one aligned buffer, and returns one CRC32 per chunk.

Format: https://huggingface.co/docs/safetensors. Index of a folder of shards: as transformers' `save_pretrained` writes
it (`metadata.total_size`, `weight_map`). The `safetensors` package maps whole files, which here would count against the
memory limit of a control group; it is used in tests, as the judge of what is written.
"""

import json
import logging
import math
import mmap
import os
import queue
import re
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatrain.system.atomic import CHUNK_BYTES, is_regular, storage_error
from megatrain.units import is_count

log: logging.Logger = logging.getLogger(__name__)

SHARD_BYTES = 5_000_000_000
"""Most bytes of one shard, as the hub has them."""

INDEX_SUFFIX = ".index.json"

_T = TypeVar("_T")
_HEADER_LIMIT = 100_000_000
"""Most bytes of a header, as the format allows, and here of an index too."""
_HEADER_ALIGN = 4096
_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class DamagedFile(Exception):
    """A file is not what its name or index says. The message names file, sizes and likely cause."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int = 0
    """First byte, counted from the start of the file."""

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file: its path, and which bytes of it are which tensor."""

    path: Path
    entries: tuple[Entry, ...]
    header: bytes = field(repr=False)
    """The file's first bytes: length, JSON, padding."""
    size: int = 0
    """Bytes of the whole file."""

    @property
    def stem(self) -> str:
        """The file's name without its number and ending: `model`, `residual`, …"""
        return re.sub(r"(-\d{5}-of-\d{5})?\.safetensors$", "", self.path.name)


# ------------------------------------------------------------------------------------------------------- reading


def read_shard(path: Path) -> Shard:
    """Reads and checks a file's header. Raises DamagedFile unless every byte of the file is accounted for: a file that
    is too short is cut, and bytes beyond the last tensor are refused too, since they say that it is another file."""
    try:
        if not is_regular(path):
            raise DamagedFile(f"{path} is not a file; fetch or copy it again")
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(1024)
            _refuse_pointer(path, start, size)
            if size < 8:
                what = "is empty" if size == 0 else "is cut inside its first number"
                raise DamagedFile(f"{path} {what}: {size} bytes, expected at least 8; fetch or copy it again")
            length = int.from_bytes(start[:8], "little")
            if length > min(_HEADER_LIMIT, size - 8):
                raise DamagedFile(
                    f"{path} is damaged or not a safetensors file: its header claims {length} bytes, so the file needs "
                    f"at least {8 + length}, and it has {size}; fetch or copy it again"
                )
            file.seek(8)
            header = file.read(length)
    except OSError as error:
        raise DamagedFile(f"{path} cannot be read: {error.strerror}") from None
    try:
        described = json.loads(header)
        entries = tuple(_entry(name, value, 8 + length) for name, value in described.items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFile(
            f"{path} is damaged: its header of {length} bytes (of {size}) is not that of a safetensors file ({error}); "
            "fetch or copy it again"
        ) from None
    end = 8 + length
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.nbytes)):
        if entry.begin != end:
            raise DamagedFile(f"{path} is damaged: {entry.name} starts at byte {entry.begin} instead of {end}")
        end += entry.nbytes
    if size < end:
        raise DamagedFile(
            f"{path} is truncated: expected {end} bytes, found {size} ({end - size} missing); most likely a download "
            "or copy that did not finish, so fetch it again"
        )
    if size > end:
        raise DamagedFile(
            f"{path} has {size - end} bytes beyond its last tensor: expected {end} bytes, found {size}; something was "
            "appended to it, and files that are not exactly what their header says are refused, so fetch it again"
        )
    return Shard(path, entries, start[:8] + header, size)


def read_index(path: Path) -> dict[str, str]:
    """`weight_map` of an index: tensor name to file name, in the index's own folder. Raises DamagedFile."""
    try:
        size = path.stat().st_size
        if not is_regular(path) or size > _HEADER_LIMIT:
            raise DamagedFile(f"{path} ({size} bytes) is not an index of shards; fetch or copy it again")
        text = path.read_bytes()
    except OSError as error:
        raise DamagedFile(f"{path} cannot be read: {error.strerror}") from None
    _refuse_pointer(path, text[:1024], len(text))
    try:
        weight_map = json.loads(text)["weight_map"]
        if not isinstance(weight_map, dict) or not weight_map:
            raise TypeError("weight_map is not a mapping of names to files")
        for name, file in weight_map.items():
            # by name, never by real path: hub snapshots are folders of links
            if (
                not isinstance(file, str)
                or file in ("", ".", "..")
                or set(file) & set("/\\\0")
                or len(os.fsencode(file)) > 255
            ):
                raise TypeError(f"{name} is said to be in {file!r}, which is not a file name")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedFile(
            f"{path} ({len(text)} bytes) is not an index of shards ({error}); fetch or copy it again"
        ) from None
    return weight_map


def read_folder(folder: Path, stem: str = "model") -> list[Shard]:
    """The single file `STEM.safetensors`, or the shards that `STEM.safetensors.index.json` names, each checked. Where a
    folder holds both, the single file is read, as transformers does (`_get_resolved_checkpoint_files`), and a warning
    names the index. Raises DamagedFile; FileNotFoundError when there is neither."""
    single = folder / f"{stem}.safetensors"
    index = folder / f"{stem}.safetensors{INDEX_SUFFIX}"
    if single.exists():
        if index.exists() and not _names_only(index, single.name):
            log.warning(
                "%s holds two sets of weights: %s is read, as transformers does, and %s with its shards is ignored; "
                "remove the one that is out of date",
                folder,
                single.name,
                index.name,
            )
        return [read_shard(single)]
    if not index.exists():
        raise FileNotFoundError(f"{folder} holds neither {single.name} nor {index.name}")
    weight_map = read_index(index)
    names = sorted(set(weight_map.values()))
    for name in names:
        if not (folder / name).exists():
            count = sum(file == name for file in weight_map.values())
            raise DamagedFile(
                f"{folder / name} is missing: {index.name} says that it holds {count} tensors, among them "
                f"{next(key for key, file in weight_map.items() if file == name)}; fetch it again"
            )
    shards = [read_shard(folder / name) for name in names]
    held = {(entry.name, shard.path.name) for shard in shards for entry in shard.entries}
    for item in weight_map.items():
        if item not in held:
            raise DamagedFile(
                f"{index} says that {item[0]} is in {item[1]} ({(folder / item[1]).stat().st_size} bytes), which "
                "does not hold it; index and shard are from different models, or one of them is damaged"
            )
    seen: dict[str, str] = {}
    for key, file in sorted(held):
        if seen.setdefault(key, file) != file:
            raise DamagedFile(f"{folder} holds {key} twice, in {seen[key]} and in {file}")
    return shards


def _names_only(index: Path, file: str) -> bool:
    """Whether an index is one of a single file."""
    try:
        return set(read_index(index).values()) == {file}
    except DamagedFile:
        return False


def _refuse_pointer(path: Path, start: bytes, size: int) -> None:
    if start.startswith(b"version https://git-lfs"):
        expected = re.search(rb"\nsize (\d+)", start)
        sizes = f"expected {expected[1].decode()} bytes, found {size}" if expected else f"found {size} bytes"
        raise DamagedFile(
            f"{path} is a Git LFS pointer, not the file it stands for: {sizes}; the repository was cloned without LFS, "
            "so run `git lfs pull` in it"
        )


def _entry(name: str, value: dict[str, Any], base: int) -> Entry:
    begin, end = value["data_offsets"]
    if value["dtype"] not in _DTYPES:
        raise ValueError(f"{name} has the type {value['dtype']}, which is not supported")
    if not all(is_count(number, 0) for number in (begin, end, *value["shape"])):
        raise ValueError(f"{name} has the shape {value['shape']} and the offsets {value['data_offsets']}")
    entry = Entry(name, _DTYPES[value["dtype"]], tuple(value["shape"]), base + begin)
    if end - begin != entry.nbytes:
        raise ValueError(f"{name} of shape {list(entry.shape)} takes {entry.nbytes} bytes, but {end - begin} are given")
    return entry


def read_into(file: int, buffer: memoryview, offset: int, path: Path) -> None:
    """Fills `buffer` from an open file. Raises DamagedFile when the file ends before."""
    done = 0
    while done < len(buffer):
        got = os.preadv(file, [buffer[done:]], offset + done)
        if got == 0:
            raise DamagedFile(
                f"{path} ended at byte {offset + done} while it was read; something truncated it meanwhile"
            )
        done += got


# ------------------------------------------------------------------------------------------------------- writing


def plan_shards(
    folder: Path,
    stem: str,
    tensors: Iterable[Entry],
    limit: int = SHARD_BYTES,
    *,
    by_width: bool = False,
    alone: Collection[str] = (),
) -> list[Shard]:
    """Cuts tensors, in order, into files `STEM.safetensors` or `STEM-0000i-of-0000n.safetensors` of at most `limit`
    bytes of data each (a larger tensor has a file of its own). Wide types come first in a file, so that every tensor
    is aligned to its type; `by_width` gives each width files of its own, whose tensors keep their order. Each of the
    tensors named `alone` has a file of its own, after those of the others."""
    tensors = list(tensors)
    last = [[tensor] for tensor in tensors if tensor.name in alone]
    tensors = [tensor for tensor in tensors if tensor.name not in alone]
    groups: list[list[Entry]] = [[]]
    filled = 0
    for tensor in sorted(tensors, key=_narrowness) if by_width else tensors:
        another_width = by_width and groups[-1] and groups[-1][-1].dtype.itemsize != tensor.dtype.itemsize
        if another_width or (groups[-1] and filled + tensor.nbytes > limit):
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.nbytes
    groups = [*(group for group in groups if group or not last), *last]
    shards = []
    for number, group in enumerate(groups, 1):
        name = f"{stem}.safetensors" if len(groups) == 1 else f"{stem}-{number:05}-of-{len(groups):05}.safetensors"
        shards.append(_plan_shard(folder / name, group))
    return shards


def _narrowness(entry: Entry) -> int:
    return -entry.dtype.itemsize


def _plan_shard(path: Path, group: Sequence[Entry]) -> Shard:
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    placed: list[tuple[Entry, int]] = []
    offset = 0
    for entry in sorted(group, key=_narrowness):
        described[entry.name] = {
            "dtype": _NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.nbytes],
        }
        placed.append((entry, offset))
        offset += entry.nbytes
    text = json.dumps(described, separators=(",", ":")).encode()
    base = -(-(8 + len(text)) // _HEADER_ALIGN) * _HEADER_ALIGN
    text = text.ljust(base - 8)
    entries = tuple(Entry(entry.name, entry.dtype, entry.shape, base + begin) for entry, begin in placed)
    return Shard(path, entries, len(text).to_bytes(8, "little") + text, base + offset)


def index_json(shards: Sequence[Shard]) -> str:
    """The text of the index of `shards`, as the hub has it."""
    weight_map = {entry.name: shard.path.name for shard in shards for entry in shard.entries}
    total = sum(entry.nbytes for shard in shards for entry in shard.entries)
    return (
        json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, indent=2) + "\n"
    )


def write_shards(
    shards: Sequence[Shard],
    read: Callable[[str, Entry, int, Tensor], None],
    *,
    threads: int = 2,
    progress: Callable[[int], None] | None = None,
) -> dict[str, list[int]]:
    """Writes and flushes the files. `read(stem, entry, start, out)` fills `out` with the elements of a tensor from
    `start` on; it is called from several threads. `progress` gets bytes as they are written. Returns a CRC32 per chunk
    of `CHUNK_BYTES` of each file. Raises StorageError; what was written is then the caller's to remove."""
    sums = {shard.path.name: [0] * len(_chunks(shard.size)) for shard in shards}
    left = {shard.path: len(_chunks(shard.size)) for shard in shards}
    needed = sum(shard.size for shard in shards)
    counting = threading.Lock()
    files: dict[Path, int] = {}

    def one(item: tuple[Shard, int], buffer: Tensor) -> None:
        shard, number = item
        begin = number * CHUNK_BYTES
        view = buffer[: min(CHUNK_BYTES, shard.size - begin)]
        _gather(shard, begin, view, read)
        raw = view.numpy().data
        sums[shard.path.name][number] = zlib.crc32(raw)
        try:
            _write_all(files[shard.path], raw, begin)
            with counting:
                left[shard.path] -= 1
                complete = left[shard.path] == 0
            if complete:
                os.fsync(files[shard.path])
                # it will not be read again soon, and its pages should not push out anyone's
                os.posix_fadvise(files[shard.path], 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise storage_error(error, shard.path, needed) from None
        if progress is not None:
            progress(len(raw))

    try:
        for shard in shards:
            files[shard.path] = os.open(shard.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        work = [(shard, number) for shard in shards for number in range(left[shard.path])]
        run_threads(work, one, threads, max((shard.size for shard in shards), default=0))
    except OSError as error:
        raise storage_error(error, Path(error.filename or shards[0].path), needed) from None
    finally:
        for file in files.values():
            os.close(file)
    return sums


def check_sums(path: Path, size: int, sums: Sequence[int]) -> str | None:
    """What is wrong with a file of which size and CRC32 per chunk are known, or None."""
    try:
        if not is_regular(path):
            return f"{path.name} is not a file"
        actual = path.stat().st_size
        if actual != size:
            return f"{path.name} has {actual} bytes instead of {size}"
        with path.open("rb") as file:
            for number, expected in enumerate(sums):
                begin = number * CHUNK_BYTES
                if zlib.crc32(file.read(min(CHUNK_BYTES, size - begin))) != expected:
                    return f"{path.name} is damaged between bytes {begin} and {min(begin + CHUNK_BYTES, size)}"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    return None


def read_checked(
    shards: Sequence[tuple[Shard, Sequence[int]]],
    write: Callable[[str, Entry, int, Tensor], None],
    *,
    threads: int = 2,
    progress: Callable[[int], None] | None = None,
) -> None:
    """The reverse of `write_shards`: reads chunk by chunk, compares each CRC32 before its content is used, and hands
    pieces of tensors to `write(stem, entry, start, piece)`, from several threads. Raises DamagedFile."""
    files: dict[Path, int] = {}
    try:
        for shard, _ in shards:
            files[shard.path] = os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC)
        work = [(shard, number, total) for shard, sums in shards for number, total in enumerate(sums)]

        def one(item: tuple[Shard, int, int], buffer: Tensor) -> None:
            shard, number, expected = item
            begin = number * CHUNK_BYTES
            view = buffer[: min(CHUNK_BYTES, shard.size - begin)]
            raw = view.numpy().data
            read_into(files[shard.path], raw, begin, shard.path)
            if zlib.crc32(raw) != expected:
                raise DamagedFile(f"{shard.path} is damaged between bytes {begin} and {begin + len(raw)}")
            for entry, start, piece in _pieces(shard, begin, view):
                write(shard.stem, entry, start, piece)
            if progress is not None:
                progress(len(raw))

        run_threads(work, one, threads, max((shard.size for shard, _ in shards), default=0))
    except OSError as error:
        raise DamagedFile(f"{error.filename or shards[0][0].path} cannot be read: {error.strerror}") from None
    finally:
        for file in files.values():
            os.close(file)


def aligned_buffer(size: int) -> Tensor:
    """`size` bytes on a page boundary, uint8. Unmapped with the last tensor that looks into it."""
    return torch.frombuffer(mmap.mmap(-1, max(size, mmap.PAGESIZE)), dtype=torch.uint8)


def run_threads(
    work: Iterable[_T], one: Callable[[_T, Tensor], None], threads: int, largest: int, chunk: int = CHUNK_BYTES
) -> None:
    """Runs `one(item, buffer)` over `work` on `threads` threads, each with an aligned buffer of its own. The first
    error stops all of them and is raised; so does an interrupt of the calling thread."""
    pending: queue.SimpleQueue[_T] = queue.SimpleQueue()
    count = 0
    for item in work:
        pending.put(item)
        count += 1
    errors: list[BaseException] = []
    stop = threading.Event()

    def loop() -> None:
        try:
            buffer = aligned_buffer(min(chunk, largest))
            while not stop.is_set():
                one(pending.get_nowait(), buffer)
        except queue.Empty:
            pass
        except BaseException as error:  # handed to the caller, whose thread raises it
            errors.append(error)
            stop.set()

    workers = [threading.Thread(target=loop, name="megatrain-files", daemon=True) for _ in range(min(threads, count))]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            while worker.is_alive():
                worker.join(0.05)
    finally:
        # an interrupt must not leave threads that go on writing into a folder about to be removed
        stop.set()
        for worker in workers:
            worker.join()
    if errors:
        raise errors[0]


def _chunks(size: int) -> range:
    return range(0, size, CHUNK_BYTES)


def _gather(shard: Shard, begin: int, view: Tensor, read: Callable[[str, Entry, int, Tensor], None]) -> None:
    """Fills `view` with the file's bytes from `begin` on: header, then tensors."""
    if begin < len(shard.header):
        part = shard.header[begin : begin + len(view)]
        view[: len(part)] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
    for entry, start, piece in _pieces(shard, begin, view):
        read(shard.stem, entry, start, piece)


def _pieces(shard: Shard, begin: int, view: Tensor) -> Iterator[tuple[Entry, int, Tensor]]:
    """The parts of tensors that lie in the file's bytes from `begin` on, each as (tensor, first element, view)."""
    end = begin + len(view)
    for entry in shard.entries:
        low, high = max(begin, entry.begin), min(end, entry.begin + entry.nbytes)
        if low < high:
            yield entry, (low - entry.begin) // entry.dtype.itemsize, view[low - begin : high - begin].view(entry.dtype)


def _write_all(file: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], offset + done)
