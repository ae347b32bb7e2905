"""Rows into sequences: long ones cut, short ones put together, what teaches nothing left out and counted.

A *piece* is a row or a part of one; a *sequence* is what the model is given: with packing a window that holds several
pieces, without it one piece. Both are index arrays over tokens that stay where they are.
"""

import bisect
import dataclasses
from typing import Literal

import numpy as np

from megatrain.data.cache import Tokens
from megatrain.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Dropped:
    """Rows left out for one reason."""

    reason: str
    count: int
    example: int
    """The first such row."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pieces:
    """RunComponents of rows that are trained on."""

    row: np.ndarray
    """(pieces,) int64."""
    start: np.ndarray
    """(pieces,) int64: first token, in `Tokens.tokens`."""
    length: np.ndarray
    """(pieces,) int64, in tokens."""
    dropped: tuple[Dropped, ...]

    def __len__(self) -> int:
        return len(self.row)


@dataclasses.dataclass(frozen=True, slots=True)
class Sequences:
    """Pieces, grouped: sequence s holds pieces order[offsets[s]:offsets[s + 1]]."""

    order: np.ndarray
    """(pieces,) int64."""
    offsets: np.ndarray
    """(sequences + 1,) int64."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def pieces(self, sequence: int) -> np.ndarray:
        """(pieces of the sequence,) int64."""
        return self.order[self.offsets[sequence] : self.offsets[sequence + 1]]


def cut(tokens: Tokens, seq_len: int, long_rows: Literal["split", "truncate", "drop", "error"]) -> Pieces:
    """Cuts rows longer than `seq_len` as asked and leaves out what has no supervised token.

    A row that is split overlaps by one token from part to part: the last token of one is the first of the next, where
    it is context only, so each token is still predicted once. Raises ConfigError naming the row for `error`, by index;
    callers that know names check `longest_row` first.
    """
    lengths = tokens.lengths
    starts = np.asarray(tokens.offsets[:-1])
    rows = np.arange(len(tokens), dtype=np.int64)
    too_long = lengths > seq_len
    excess = np.zeros(0, dtype=np.int64)
    if long_rows == "error" and too_long.any():
        row = int(np.argmax(too_long))
        raise ConfigError(f"row {row} has {int(lengths[row])} tokens, more than data.seq_len ({seq_len})")
    if long_rows == "drop":
        excess = rows[too_long]
        rows, starts, lengths = rows[~too_long], starts[~too_long], lengths[~too_long]
    elif long_rows == "truncate":
        lengths = np.minimum(lengths, seq_len)
    elif too_long.any():
        counts = np.maximum(1, -(-(lengths - 1) // (seq_len - 1)))
        part = np.arange(counts.sum(), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = np.repeat(rows, counts)
        starts = np.repeat(starts, counts) + part * (seq_len - 1)
        lengths = np.minimum(np.repeat(lengths, counts) - part * (seq_len - 1), seq_len)
    teaches = num_supervised(tokens.supervised, starts, lengths) > 0
    kept = np.zeros(len(tokens), dtype=bool)
    kept[rows[teaches]] = True
    silent = np.setdiff1d(np.flatnonzero(~kept), excess)
    empty = silent[tokens.lengths[silent] == 0]
    dropped = []
    for reason, which in (
        ("empty", empty),
        ("no supervised token", np.setdiff1d(silent, empty)),
        (f"longer than {seq_len} tokens", excess),
    ):
        if len(which):
            dropped.append(Dropped(reason, len(which), int(which[0])))
    return Pieces(rows[teaches], starts[teaches], lengths[teaches], tuple(dropped))


def num_supervised(supervised: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """(pieces,) int64. The first token of a piece has nothing before it to be predicted from and never counts."""
    counts = np.zeros(len(starts), dtype=np.int64)
    block = 1 << 12  # pieces at a time, to bound the memory of the sums
    for low in range(0, len(starts), block):
        first, stop = starts[low : low + block] + 1, starts[low : low + block] + lengths[low : low + block]
        some = np.flatnonzero(stop > first)
        if not len(some):
            continue
        base = int(first[some].min())
        sums = np.concatenate([[0], np.cumsum(supervised[base : int(stop[some].max())], dtype=np.int64)])
        counts[low + some] = sums[stop[some] - base] - sums[first[some] - base]
    return counts


def alone(pieces: Pieces) -> Sequences:
    """One piece a sequence."""
    return Sequences(np.arange(len(pieces), dtype=np.int64), np.arange(len(pieces) + 1, dtype=np.int64))


def in_order(pieces: Pieces, seq_len: int) -> Sequences:
    """Windows filled one after the other, rows in the order they come."""
    bounds = [0]
    room = seq_len
    for index, length in enumerate(pieces.length.tolist()):
        if length > room:
            bounds.append(index)
            room = seq_len
        room -= length
    bounds.append(len(pieces))
    return Sequences(np.arange(len(pieces), dtype=np.int64), np.array(bounds, dtype=np.int64))


def best_fit(pieces: Pieces, seq_len: int, rank: np.ndarray) -> Sequences:
    """Windows filled well: longest pieces first, each into the fullest window that it fits in.

    rank: (pieces,) int64, the order among pieces of one length
    """
    windows: list[list[int]] = []
    room_to_windows: dict[int, list[int]] = {}
    rooms: list[int] = []  # those that some window has, sorted
    lengths = pieces.length
    for piece in np.lexsort((rank, -lengths)).tolist():
        length = int(lengths[piece])
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            windows.append([piece])
            window, room = len(windows) - 1, seq_len - length
        else:
            room = rooms[at]
            waiting = room_to_windows[room]
            window = waiting.pop()
            if not waiting:
                del room_to_windows[room], rooms[at]
            windows[window].append(piece)
            room -= length
        if room > 0:
            if room not in room_to_windows:
                room_to_windows[room] = []
                bisect.insort(rooms, room)
            room_to_windows[room].append(window)
    order = np.array([piece for window in windows for piece in window], dtype=np.int64)
    sizes = np.array([len(window) for window in windows], dtype=np.int64)
    return Sequences(order, np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)]))
