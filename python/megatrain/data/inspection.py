"""Rows and batches as the model sees them, for people: every token, and whether it is learnt."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from megatrain.data.dataset import Dataset, Part, by_name
from megatrain.data.loader import StepBatch
from megatrain.data.packing import num_supervised
from megatrain.names import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True, slots=True)
class TokenView:
    """One token."""

    id: int
    text: str
    """What it stands for. Of tokens that make a character together the last one has all of the text, and the others
    none; bytes that make no character are in the vocabulary's own spelling."""
    supervised: bool


@dataclasses.dataclass(frozen=True, slots=True)
class RowView:
    """One row, whole or as one of the parts it was cut into."""

    row: int
    where: str
    part: int
    """Which of `parts`, from 1."""
    parts: int
    """How many sequences the row was cut into; 1 for one that was dropped."""
    num_tokens: int
    """Of the whole row."""
    num_supervised: int
    """Of `tokens`; the first token of a sequence never counts."""
    dropped: str | None
    """Why it is not trained on."""
    weight: float
    """Factor of its losses."""
    tokens: tuple[TokenView, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """A data set in numbers."""

    num_rows: int
    num_tokens: int
    """Tokens given to the model in one pass."""
    num_supervised: int
    num_sequences: int
    num_pieces: int
    """Rows, and parts of rows that were cut, dropped ones included: what `rows` goes through."""
    seq_len: int
    padding: float
    """With packing: the part of all windows that holds no token."""
    lengths: dict[str, int]
    """Tokens of a row: min, median, p95, max."""
    histogram: tuple[tuple[int, int, int], ...]
    """(from, below, rows): how many rows have a length in each of some equal ranges."""
    dropped: tuple[tuple[str, int, str], ...]
    """(reason, rows, place of one)."""
    formats: tuple[str, ...]
    """What the rows of each source were read as."""
    notes: tuple[str, ...]
    weights: dict[str, float] | None
    """Factors of the losses of the rows that are trained on: min, mean, max; None where every row counts 1."""
    cached: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)


def summary(dataset: Dataset) -> Summary:
    """Counts over the whole data set."""
    lengths = np.concatenate([part.tokens.lengths for part in dataset.parts])
    supervised = sum(
        int(num_supervised(part.tokens.supervised, part.pieces.start, part.pieces.length).sum())
        for part in dataset.parts
    )
    room = dataset.num_sequences * dataset.seq_len
    return Summary(
        num_rows=dataset.num_rows,
        num_tokens=dataset.num_tokens,
        num_supervised=supervised,
        num_sequences=dataset.num_sequences,
        num_pieces=sum(len(part.pieces.row) + len(_dropped(part)) for part in dataset.parts),
        seq_len=dataset.seq_len,
        padding=1 - dataset.num_tokens / room if dataset.packing else 0.0,
        lengths={
            "min": int(lengths.min()),
            "median": int(np.median(lengths)),
            "p95": int(np.percentile(lengths, 95)),
            "max": int(lengths.max()),
        },
        histogram=_histogram(lengths),
        dropped=tuple(dataset.dropped()),
        formats=tuple(dataset.formats()),
        notes=tuple(dataset.notes()),
        weights=_weights(dataset),
        cached=dataset.cached,
    )


def sets(held_out: Dataset | None) -> dict[str, Any]:
    """`eval_sets`, the held-out sets in numbers by their names; empty where they have none. For JSON."""
    found = {} if held_out is None else {name: summary(one).to_dict() for name, one in by_name(held_out).items()}
    return {"eval_sets": found} if found else {}


def _weights(dataset: Dataset) -> dict[str, float] | None:
    if all(part.tokens.weights is None for part in dataset.parts):
        return None
    found = []
    for part in dataset.parts:
        rows = np.unique(part.pieces.row)
        weights = part.tokens.weights
        found.append(np.ones(len(rows)) if weights is None else np.asarray(weights[rows], dtype=np.float64))
    every = np.concatenate(found)
    return {"min": float(every.min()), "mean": float(every.mean()), "max": float(every.max())}


_BINS = 24
"""Most ranges of a histogram."""


def _histogram(lengths: "np.ndarray[Any, Any]") -> tuple[tuple[int, int, int], ...]:
    """Ranges of 1, 2 or 5 times a power of ten tokens, from the shortest row to the longest."""
    low, high = int(lengths.min()), int(lengths.max()) + 1
    width = next(f * 10**p for p in range(20) for f in (1, 2, 5) if high // (f * 10**p) - low // (f * 10**p) < _BINS)
    edges = np.arange(low // width, -(-high // width) + 1) * width
    counts, _ = np.histogram(lengths, edges)
    return tuple((int(a), int(b), int(n)) for a, b, n in zip(edges, edges[1:], counts, strict=False))


def rows(dataset: Dataset, tokenizer: "PreTrainedTokenizerBase", limit: int | None = None) -> Iterator[RowView]:
    """Rows in the order of the files: one that was split comes part by part, one that was dropped with the reason.
    `limit` counts parts."""
    return itertools.islice(_pieces(dataset, tokenizer), limit)


def _pieces(dataset: Dataset, tokenizer: "PreTrainedTokenizerBase") -> Iterator[RowView]:
    spell = _Speller(tokenizer)
    for part in dataset.parts:
        reasons = _reasons(part)
        for row in range(len(part.tokens)):
            low, high = np.searchsorted(part.pieces.row, [row, row + 1]).tolist()
            spans = [
                (start, start + length)
                for start, length in zip(
                    part.pieces.start[low:high].tolist(), part.pieces.length[low:high].tolist(), strict=True
                )
            ]
            reason = None if spans else reasons[row]
            start, stop = part.tokens.offsets[row : row + 2].tolist()
            for number, (first, last) in enumerate(spans or [(start, stop)], start=1):
                ids = part.tokens.tokens[first:last].tolist()
                learnt = part.tokens.supervised[first:last].tolist()
                tokens = tuple(
                    TokenView(token, text, bool(flag) and at > 0)
                    for at, (token, text, flag) in enumerate(zip(ids, spell(ids), learnt, strict=True))
                )
                yield RowView(
                    row=part.first_row + row,
                    where=dataset.where(part.first_row + row),
                    part=number,
                    parts=max(1, len(spans)),
                    num_tokens=stop - start,
                    num_supervised=sum(token.supervised for token in tokens),
                    dropped=reason,
                    weight=1.0 if part.tokens.weights is None else float(part.tokens.weights[row]),
                    tokens=tokens,
                )


def batch(step: StepBatch, tokenizer: "PreTrainedTokenizerBase") -> list[list[TokenView]]:
    """The first micro-batch of a step, a list of tokens for each of its sequences, padding left out."""
    spell = _Speller(tokenizer)
    first = step.micro_batches[0]
    ids, labels = first["input_ids"].tolist(), first["labels"].tolist()
    if "attention_mask" in first:
        real = first["attention_mask"].tolist()
    else:
        real = [_real(line, positions) for line, positions in zip(ids, first["position_ids"].tolist(), strict=True)]
    return [
        [
            TokenView(token, text, label != IGNORED)
            for token, text, label, keep in zip(ids[line], spell(ids[line]), labels[line], real[line], strict=True)
            if keep
        ]
        for line in range(len(ids))
    ]


def _real(ids: list[int], positions: list[int]) -> list[int]:
    """1 for each token of a window; padding is a last part of one repeated id."""
    last = len(positions) - 1 - positions[::-1].index(0)
    padding = len(set(ids[last:])) == 1 and len(ids) - last > 1
    return [1] * last + [0 if padding else 1] * (len(ids) - last)


_MOST_TOGETHER = 8
"""Most tokens that are tried as the bytes of one character, or of a few."""
_NO_CHARACTER = "\ufffd"
"""What decoders write for bytes that make no character."""


class _Speller:
    """Token ids as text, a text for each."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, ids: list[int]) -> list[str]:
        """The text of each token, which joined are the text of all."""
        texts: list[str] = []
        while len(texts) < len(ids):
            at = len(texts)
            together = self._character(ids[at : at + _MOST_TOGETHER])
            texts += [self._alone(ids[at])] if together is None else together
        return texts

    def _character(self, ids: list[int]) -> list[str] | None:
        """The texts of the first tokens, where these make characters together and not alone; else None."""
        if _NO_CHARACTER not in self._decoded(ids[:1]):
            return None
        for count in range(2, len(ids) + 1):
            text = self._decoded(ids[:count])
            if _NO_CHARACTER not in text:
                return [""] * (count - 1) + [text]
        return None

    def _decoded(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text if isinstance(text, str) else ""

    def _alone(self, token: int) -> str:
        if token not in self._known:
            raw = self._tokenizer.convert_ids_to_tokens(token)
            text = self._decoded([token])
            if not isinstance(raw, str):
                text = f"<{token}>"
            elif not text or _NO_CHARACTER in text:
                text = raw
            elif raw.startswith("▁") and not text.startswith(" "):
                text = f" {text}"
            self._known[token] = text
        return self._known[token]


def _dropped(part: Part) -> np.ndarray:
    """(dropped rows,) int64, in order."""
    return np.setdiff1d(np.arange(len(part.tokens)), part.pieces.row)


def _reasons(part: Part) -> dict[int, str]:
    """Why each row without a piece was dropped."""
    return {row: dropped.reason for dropped in part.pieces.dropped for row in dropped.rows.tolist()}
