"""Tokenized data on disk, keyed by everything it was made from.

An entry's key covers the tokenizer, the template, the rule of supervision and the bytes of every source file. Sequence
length is not in it: rows are stored whole and cut when they are packed, so another length never sees a stale cut.
An entry is written in a folder of its own beside its place and renamed there when it is complete and flushed, so a
half-written one is never found.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatrain.data.encoded import Encoded
from megatrain.data.rows import Remark
from megatrain.errors import StorageError
from megatrain.system.atomic import published, remove

_log = logging.getLogger(__name__)

_FORMAT = 6
_ARRAYS: dict[str, np.dtype[Any]] = {
    "tokens": np.dtype("<i4"),
    "supervised": np.dtype("u1"),
    "offsets": np.dtype("<i8"),
    "places": np.dtype("<i8"),
    "turn_ends": np.dtype("<i8"),
    "turn_offsets": np.dtype("<i8"),
    "kinds": np.dtype("u1"),
    "skips": np.dtype("u1"),
    "weights": np.dtype("<f4"),
}
KINDS = ("text", "completion", "chat")
"""Kinds of rows; `Tokens.kinds` holds indices into this."""
_MOST_REMARKS = 200
"""Most different remarks kept per source: a remark may contain a column name, of which data can have any number."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tokens:
    """Rows of one source as tokens, on disk or in memory."""

    tokens: np.ndarray
    """(all tokens,) int32."""
    supervised: np.ndarray
    """(all tokens,) uint8."""
    offsets: np.ndarray
    """(rows + 1,) int64: row r is tokens offsets[r] to offsets[r + 1]."""
    places: np.ndarray
    """(rows, 2) int64: file index and line of each row."""
    largest_id: int
    """-1 when there is no token."""
    endless_turns: int
    """Assistant turns that the template ends with no token."""
    cached: bool
    """Whether it was found rather than made."""
    turn_ends: np.ndarray | None = None
    """(assistant turns of all rows,) int64: the token after each, in `tokens`."""
    turn_offsets: np.ndarray | None = None
    """(rows + 1,) int64: row r has the turns turn_offsets[r] to turn_offsets[r + 1]; None if no row has turns."""
    kinds: np.ndarray | None = None
    """(rows,) uint8: an index into KINDS; None where all are text."""
    skips: np.ndarray | None = None
    """(rows,) uint8: an index into `skip_reasons`; None where no row is left out by its own columns."""
    skip_reasons: tuple[str, ...] = ("",)
    weights: np.ndarray | None = None
    """(rows,) float32: the factor of each row's losses; None where every row counts 1."""
    remarks: tuple[tuple[Remark, int, int], ...] = ()
    """(remark, number of rows, the first of them)."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """(rows,) int64, in tokens."""
        return np.diff(self.offsets)

    @property
    def num_bytes(self) -> int:
        """Size of the arrays, on disk as in memory."""
        return sum(array.nbytes for name in _ARRAYS if (array := getattr(self, name)) is not None)


def default_folder() -> Path:
    """The user's cache folder for tokenized data."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "megatrain" / "data"


def key(*parts: Any) -> str:
    """The name of a cache entry: a hash of `parts`."""
    return hashlib.sha256(json.dumps([_FORMAT, *parts], sort_keys=True).encode()).hexdigest()[:40]


def load(folder: Path, name: str) -> Tokens | None:
    """The entry, or None if there is no complete one. An entry that does not match its description counts as absent."""
    entry = folder / name
    try:
        meta = json.loads((entry / "meta.json").read_text(encoding="utf-8"))
        for array, dtype in _ARRAYS.items():
            if (entry / f"{array}.bin").stat().st_size != meta["counts"][array] * dtype.itemsize:
                _log.warning("ignoring the damaged cache entry %s: %s.bin has another size", entry, array)
                return None
        return _open(entry, meta, cached=True)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("ignoring the damaged cache entry %s: %s", entry, error)
        return None


def save(folder: Path, name: str, rows: Iterable[Encoded]) -> Tokens:
    """Writes `rows` as an entry and opens it. Raises StorageError when the folder cannot be written."""
    entry = folder / name
    try:
        with published(entry) as partial:
            meta = _write(partial, rows)
            with contextlib.suppress(FileNotFoundError):
                remove(entry)  # damaged, since `load` did not accept it
        return _open(entry, meta, cached=False)
    except OSError as error:
        raise StorageError(
            f"cannot write tokenized data to {folder}: {error}; free some space, or name another folder in data.cache"
        ) from None


def _write(folder: Path, rows: Iterable[Encoded]) -> dict[str, Any]:
    counts = dict.fromkeys(_ARRAYS, 0)
    largest, endless = -1, 0
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context((folder / f"{name}.bin").open("wb")) for name in _ARRAYS}

        def put(name: str, values: Any) -> None:
            array = np.ascontiguousarray(values, dtype=_ARRAYS[name]).reshape(-1)
            files[name].write(array.tobytes())
            counts[name] += array.size

        put("offsets", [0])
        put("turn_offsets", [0])
        weighted = False
        reasons = {"": 0}
        remarks: dict[Remark, list[int]] = {}
        row = 0
        for encoded in rows:
            put("turn_ends", encoded.turn_ends + counts["tokens"])
            put("tokens", encoded.ids)
            put("supervised", encoded.supervised)
            largest = max(largest, int(encoded.ids.max(initial=-1)))
            endless += encoded.endless
            for remark in encoded.remarks:
                if remark not in remarks and len(remarks) >= _MOST_REMARKS:
                    remark = (remark[0], "…")
                remarks.setdefault(remark, [0, row])[0] += 1
            if encoded.goes_on:
                continue
            put("offsets", [counts["tokens"]])
            put("turn_offsets", [counts["turn_ends"]])
            put("places", [encoded.row.file, encoded.row.number])
            put("kinds", [KINDS.index(encoded.row.kind)])
            put("skips", [reasons.setdefault(encoded.row.skip, len(reasons))])
            if encoded.row.weight != 1 and not weighted:
                weighted = True
                put("weights", np.ones(row))
            if weighted:
                put("weights", [encoded.row.weight])
            row += 1
    meta = {
        "counts": counts,
        "largest_id": largest,
        "endless_turns": endless,
        "skip_reasons": list(reasons),
        "weighted": weighted,
        "remarks": [[*remark, *found] for remark, found in remarks.items()],
    }
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return meta


def _open(entry: Path, meta: dict[str, Any], *, cached: bool) -> Tokens:
    arrays = dict(_map(entry, meta))
    return Tokens(
        tokens=arrays["tokens"],
        supervised=arrays["supervised"],
        offsets=arrays["offsets"],
        places=arrays["places"].reshape(-1, 2),
        largest_id=int(meta["largest_id"]),
        endless_turns=int(meta["endless_turns"]),
        cached=cached,
        turn_ends=arrays["turn_ends"],
        turn_offsets=arrays["turn_offsets"],
        kinds=arrays["kinds"],
        skips=arrays["skips"],
        skip_reasons=tuple(meta["skip_reasons"]),
        weights=arrays["weights"] if meta["weighted"] else None,
        remarks=tuple(((kind, name), count, first) for kind, name, count, first in meta["remarks"]),
    )


def _map(entry: Path, meta: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    for name, dtype in _ARRAYS.items():
        count = int(meta["counts"][name])
        # mmap refuses empty files
        empty = np.zeros(0, dtype=dtype)
        yield name, np.memmap(entry / f"{name}.bin", dtype=dtype, mode="r", shape=(count,)) if count else empty
