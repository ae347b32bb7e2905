"""Rows into sequences: long ones cut, short ones put together, what teaches nothing left out and counted.

A *piece* is a row or a part of one; a *sequence* is what the model is given: with packing a window that holds several
pieces, without it one piece. Both are index arrays over tokens that stay where they are.
"""

import bisect
import dataclasses
from typing import Literal

import numpy as np

from megatrain.data.cache import KINDS, Tokens
from megatrain.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Dropped:
    """Rows left out for one reason."""

    reason: str
    rows: np.ndarray
    """(rows,) int64, in order."""

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.rows)

    @property
    def example(self) -> int:
        """The first such row."""
        return int(self.rows[0])


@dataclasses.dataclass(frozen=True, slots=True)
class Shortened:
    """Rows of which only the beginning is trained on."""

    count: int
    example: int
    """The first such row."""
    lost: int
    """Supervised tokens that were cut off."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pieces:
    """Parts of rows that are trained on."""

    row: np.ndarray
    """(pieces,) int64."""
    start: np.ndarray
    """(pieces,) int64: first token, in `Tokens.tokens`."""
    length: np.ndarray
    """(pieces,) int64, in tokens."""
    dropped: tuple[Dropped, ...]
    shortened: Shortened | None = None

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

    Text that is split overlaps by one token from part to part: the last token of one is the first of the next, where it
    is context only, so each token is still predicted once. A conversation is never cut inside a turn: split or
    truncated, it keeps the turns up to the last answer that fits whole. A prompt is never parted from its completion:
    split or truncated, the row keeps its first `seq_len` tokens.
    Raises ConfigError naming the row for `error`, by index; `dataset` knows names and looks first.
    """
    lengths = tokens.lengths
    starts = np.asarray(tokens.offsets[:-1])
    rows = np.arange(len(tokens), dtype=np.int64)
    kinds = np.zeros(len(tokens), dtype=np.uint8) if tokens.kinds is None else np.asarray(tokens.kinds)
    skips = np.zeros(len(tokens), dtype=np.uint8) if tokens.skips is None else np.asarray(tokens.skips)
    too_long = lengths > seq_len
    dropped = [
        Dropped(reason, np.flatnonzero(skips == number))
        for number, reason in enumerate(tokens.skip_reasons)
        if number and (skips == number).any()
    ]
    gone = skips > 0
    if long_rows == "error" and too_long.any():
        row = int(np.argmax(too_long))
        raise ConfigError(f"row {row} has {int(lengths[row])} tokens, more than data.seq_len ({seq_len})")
    excess = too_long & (long_rows == "drop")
    reason = f"longer than {seq_len} tokens"
    kept = np.minimum(lengths, seq_len)
    if long_rows in ("split", "truncate"):
        for row in np.flatnonzero(too_long & (kinds == KINDS.index("chat"))).tolist():
            kept[row] = _whole_turns(tokens, row, seq_len)
    counts = np.ones(len(tokens), dtype=np.int64)
    if long_rows == "split":
        text = kinds == KINDS.index("text")
        counts[text] = np.maximum(1, -(-(lengths[text] - 1) // (seq_len - 1)))
        kept = np.where(counts > 1, lengths, kept)
    whole = np.array(kept)
    part = np.arange(counts.sum(), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = np.repeat(rows, counts)
    piece_starts = np.repeat(starts, counts) + part * (seq_len - 1)
    piece_lengths = np.minimum(np.repeat(whole, counts) - part * (seq_len - 1), seq_len)
    teaches = (num_supervised(tokens.supervised, piece_starts, piece_lengths) > 0) & ~(gone | excess)[rows]
    taught = np.zeros(len(tokens), dtype=bool)
    taught[rows[teaches]] = True
    silent = ~taught & ~gone & ~excess
    cut_off = silent & too_long & (num_supervised(tokens.supervised, starts, lengths) > 0)
    fits = f"none of their first {seq_len} tokens is supervised"
    for why, which in (
        ("empty", silent & (lengths == 0)),
        ("no supervised token", silent & (lengths > 0) & ~cut_off),
        (f"{reason}, and no whole answer fits", cut_off & (kinds == KINDS.index("chat"))),
        (f"{reason}, and {fits}", cut_off & (kinds != KINDS.index("chat"))),
        (reason, excess & ~gone),
    ):
        if which.any():
            dropped.append(Dropped(why, np.flatnonzero(which)))
    short = np.flatnonzero(taught & (whole < lengths))
    shortened = None
    if len(short):
        before = num_supervised(tokens.supervised, starts[short], lengths[short])
        lost = before - num_supervised(tokens.supervised, starts[short], whole[short])
        shortened = Shortened(len(short), int(short[0]), int(lost.sum()))
    return Pieces(rows[teaches], piece_starts[teaches], piece_lengths[teaches], tuple(dropped), shortened)


def _whole_turns(tokens: Tokens, row: int, seq_len: int) -> int:
    """Tokens of a conversation up to the end of the last answer that is within `seq_len`; 0 where none is."""
    if tokens.turn_ends is None or tokens.turn_offsets is None:
        return 0
    first, stop = tokens.turn_offsets[row : row + 2].tolist()
    ends = tokens.turn_ends[first:stop] - tokens.offsets[row]
    fitting = ends[ends <= seq_len]
    return int(fitting.max()) if len(fitting) else 0


_COUNTED = 1 << 18
"""Tokens whose marks are summed at a time, to bound the memory of the sums."""


def num_supervised(supervised: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """(pieces,) int64. The first token of a piece has nothing before it to be predicted from and never counts."""
    places = np.concatenate([starts + np.minimum(lengths, 1), starts + lengths])
    order = np.argsort(places, kind="stable")
    asked = places[order]
    before = np.zeros(len(places), dtype=np.int64)  # supervised tokens before each place, in order
    total = 0
    for base in range(0, int(asked[-1]) + 1 if len(asked) else 0, _COUNTED):
        flags = supervised[base : base + _COUNTED] != 0
        low, high = np.searchsorted(asked, [base, base + _COUNTED]).tolist()
        if low < high:
            sums = np.concatenate([[0], np.cumsum(flags, dtype=np.int64)])
            before[low:high] = total + sums[asked[low:high] - base]
        total += int(np.count_nonzero(flags))
    found = np.empty_like(before)
    found[order] = before
    counts: np.ndarray = found[len(starts) :] - found[: len(starts)]
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
    """Windows filled well: longest pieces first, each into the fullest window that it fits in (best-fit packing,
    arXiv 2404.10830).

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
