"""A row as tokens, and how the tokens of overlapping pieces of a long text are joined."""

import dataclasses

import numpy as np

from megatrain.data.file_formats import OVERLAP, Piece
from megatrain.data.rows import Remark, Row


@dataclasses.dataclass(frozen=True, slots=True)
class Encoded:
    """One row as tokens."""

    row: Row
    ids: np.ndarray
    """(tokens,) int32."""
    supervised: np.ndarray
    """(tokens,) uint8; 1: the token is learnt."""
    turn_ends: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """(turns,) int64: the token after each turn of the assistant, in a row whose beginning may be kept alone."""
    endless: int = 0
    """Assistant turns that the template ends with no token."""
    remarks: tuple[Remark, ...] = ()
    """What should be said about the row."""
    goes_on: bool = False
    """Whether the row's tokens go on in the next one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPiece(Encoded):
    """A piece of a long text as tokens."""

    piece: Piece
    starts: np.ndarray
    """(tokens,) int64: the character that each token begins with, in the whole text."""

    def sliced(self, start: int, stop: int, *, goes_on: bool) -> "EncodedPiece":
        """Some of its tokens; `goes_on`: more of the row follow."""
        return dataclasses.replace(
            self,
            ids=self.ids[start:stop],
            supervised=self.supervised[start:stop],
            starts=self.starts[start:stop],
            goes_on=goes_on,
        )


_AGREEING = 8
"""Tokens to each side of a place where two pieces of a text are joined that both tokenize alike."""


def agreement(before: EncodedPiece, after: EncodedPiece) -> tuple[int, int] | None:
    """Where two overlapping pieces may be joined: (tokens of the first, first token of the second), at a place as near
    as possible to the middle of what they share, around which they have the same tokens. None where there is none."""
    middle = after.piece.start + OVERLAP // 2
    shared = np.intersect1d(before.starts[before.starts >= after.piece.start], after.starts)
    for place in shared[np.argsort(np.abs(shared - middle), kind="stable")].tolist():
        one = int(np.searchsorted(before.starts, place))
        other = int(np.searchsorted(after.starts, place))
        span = slice(one - _AGREEING, one + _AGREEING), slice(other - _AGREEING, other + _AGREEING)
        if min(one, other) >= _AGREEING and np.array_equal(before.ids[span[0]], after.ids[span[1]]):
            return one, other
    return None
