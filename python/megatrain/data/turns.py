"""Where the assistant's turns are in a rendered conversation, and which tokens they are."""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """Character positions of one assistant turn in the rendered text."""

    start: int
    """Where what the assistant says begins."""
    end: int
    """Where it ends."""
    closing: int
    """Where what the template writes after every turn ends; at least `end`."""


def supervised_tokens(
    ids: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    turns: Sequence[Turn],
    text: str,
    special: frozenset[int],
) -> tuple[np.ndarray, np.ndarray, int]:
    """The mask over tokens, the token after the end of each turn, and how many turns end without an end-of-turn token.

    ids: (tokens,) int32
    starts, ends: (tokens,) int64, the characters of `text` that each token covers
    """
    mask = np.zeros(len(ids), dtype=np.uint8)
    stops = []
    endless = 0
    for turn in turns:
        # A token belongs to the content when it covers a part of it. Blank tokens may cover nothing (their offsets are
        # trimmed), so only the two borders are searched and what is between them is taken whole.
        first = int(np.searchsorted(ends, turn.start, side="right"))
        stop = max(first, int(np.searchsorted(starts, turn.end, side="left")))
        border = int(np.searchsorted(starts, turn.closing, side="left"))
        closer = next((at for at in range(stop, border) if int(ids[at]) in special), None)
        if closer is not None:
            stop = closer + 1
        elif closing := text[turn.end : turn.closing].rstrip():
            # Written with ordinary tokens, as when a base model's tokenizer lacks the template's special ones.
            stop = int(np.searchsorted(starts, turn.end + len(closing), side="left"))
        elif not (stop > first and int(ids[stop - 1]) in special):
            endless += 1
        mask[first:stop] = 1
        stops.append(stop)
    return mask, np.array(stops, dtype=np.int64), endless
