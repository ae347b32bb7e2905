"""From `data` settings and a tokenizer to a data set that is ready to be batched."""

import dataclasses
import datetime as dt
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatrain.config import Config, SourceConfig, shared_rows
from megatrain.data import cache, remarks, shuffle
from megatrain.data import packing as pack
from megatrain.data.cache import Tokens
from megatrain.data.encoded import Encoded
from megatrain.data.packing import Pieces, Sequences
from megatrain.data.readers import Source
from megatrain.data.tokenization import Encoder
from megatrain.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

Progress = Callable[[str, int], None]
"""Called with a source's path and the tokens made so far."""

_PROGRESS_TOKENS = 1 << 16
"""Tokens between two reports of progress."""
_LOOKED_AT = 1 << 14
"""Rows of a source that tell what conversations end with."""
_PACKING = 1
"""Names the use of a random order, so that no two uses share one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One source, tokenized and cut into sequences."""

    source: Source
    tokens: Tokens
    pieces: Pieces
    sequences: Sequences
    first_row: int
    """Id of its first row in the data set."""


class Dataset:
    """All sources of `data.train` or `data.eval`, as sequences of at most `seq_len` tokens."""

    def __init__(self, parts: Sequence[Part], seq_len: int, *, packing: bool, date: dt.date) -> None:
        """`date`: the day that chat templates were given."""
        self.parts: tuple[Part, ...] = tuple(parts)
        self.seq_len = seq_len
        self.packing = packing
        self.date = date

    @property
    def num_rows(self) -> int:
        """Rows read, those left out included."""
        return sum(len(part.tokens) for part in self.parts)

    @property
    def num_sequences(self) -> int:
        """Windows with packing, else pieces of rows."""
        return sum(len(part.sequences) for part in self.parts)

    @property
    def epoch_sequences(self) -> list[int]:
        """Sequences of each part that an epoch takes: its weight times as many as it has, and at least one."""
        return [max(1, round(len(part.sequences) * part.source.config.weight)) for part in self.parts]

    @property
    def num_tokens(self) -> int:
        """Tokens that are given to the model in one pass, padding excluded."""
        return sum(int(part.pieces.length.sum()) for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """Size of the tokenized rows on disk."""
        return sum(part.tokens.num_bytes for part in self.parts)

    @property
    def cached(self) -> bool:
        """Whether every source was found tokenized."""
        return all(part.tokens.cached for part in self.parts)

    def final_tokens(self) -> set[int]:
        """The learnt tokens that conversations end with: what the model will write when it has answered. Looks at the
        first rows of each source."""
        found: set[int] = set()
        for part in self.parts:
            tokens = part.tokens
            if tokens.turn_ends is None or tokens.turn_offsets is None:
                continue
            stops = np.unique(tokens.turn_offsets[1 : _LOOKED_AT + 1])
            at = tokens.turn_ends[stops[stops > 0] - 1] - 1
            found |= set(tokens.tokens[at[tokens.supervised[at] == 1]].tolist())
        return found

    def where(self, row: int) -> str:
        """A row's place in its file, for people."""
        for part in self.parts:
            index = row - part.first_row
            if 0 <= index < len(part.tokens):
                file, number = part.tokens.places[index].tolist()
                return part.source.where(file, number)
        raise IndexError(f"there is no row {row} in {self.num_rows}")

    def dropped(self) -> list[tuple[str, int, str]]:
        """(reason, how many rows, place of one of them) of what was left out."""
        return [
            (dropped.reason, dropped.count, self.where(part.first_row + dropped.example))
            for part in self.parts
            for dropped in part.pieces.dropped
        ]

    def formats(self) -> list[str]:
        """What the rows of each source were read as, a sentence for each."""
        return [
            f"{part.source.config.path}: {count} rows read as {what}"
            for part in self.parts
            for (kind, what), count, _ in part.tokens.remarks
            if kind == "rows"
        ]

    def notes(self) -> list[str]:
        """What a user should know about these rows, a sentence each."""
        notes = [
            f"{count} of {self.num_rows} rows left out: {reason}, for example {where}"
            for reason, count, where in self.dropped()
        ]
        for part in self.parts:
            if short := part.pieces.shortened:
                notes.append(
                    f"{short.count} of {self.num_rows} rows are cut off at {self.seq_len} tokens and lose {short.lost} "
                    f"supervised tokens, for example {self.where(part.first_row + short.example)}"
                )
            notes += [
                remarks.describe(remark, count, len(part.tokens), self.where(part.first_row + first))
                for remark, count, first in part.tokens.remarks
                if remark[0] != "rows"
            ]
            notes += _skipped(part.source)
        endless = sum(part.tokens.endless_turns for part in self.parts)
        if endless:
            notes.append(
                f"{endless} assistant turns end with no end-of-turn token: the chat template writes none, so the "
                "model will not learn to stop"
            )
        return notes


def by_name(held_out: Dataset) -> dict[str, Dataset]:
    """The sets of `data.eval` by their names; empty where they have none. Rows keep their ids."""
    names = dict.fromkeys(part.source.config.name for part in held_out.parts)
    return {
        name: Dataset(
            [part for part in held_out.parts if part.source.config.name == name],
            held_out.seq_len,
            packing=held_out.packing,
            date=held_out.date,
        )
        for name in names
        if name is not None
    }


def prepare(
    config: Config,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    vocab_size: int | None = None,
    progress: Progress | None = None,
    date: dt.date | None = None,
) -> tuple[Dataset, Dataset | None]:
    """Training data and, where there is any, held-out data: tokenized or found in the cache, cut and packed.

    `vocab_size`: rows of the model's embedding; a larger token id is refused. `date`: the day that chat templates are
    given where `data.date` names none; None: today. Raises ConfigError for data that cannot
    be used, naming file and line, and StorageError for a cache folder that cannot be written.
    """
    config.require("data")
    if config.data.date is not None:
        date = dt.date.fromisoformat(config.data.date)
    day = date or dt.date.today()
    trained = [Source(settings) for settings in config.data.train]
    measured = [Source(settings, held_out=True) for settings in config.data.eval]
    shared = shared_rows.check([source.found for source in trained], [source.found for source in measured])
    train = _dataset(config, trained, tokenizer, vocab_size, progress, day, train=True)
    held_out = _dataset(config, measured, tokenizer, vocab_size, progress, day, train=False)
    for path in shared:
        _log.warning("data.eval: %s is trained on too, so its loss is not a held-out one", path)
    for name, dataset in (("data.train", train), ("data.eval", held_out)):
        for note in dataset.notes():
            _log.warning("%s: %s", name, note)
    return train, held_out if config.data.eval else None


def _dataset(
    config: Config,
    sources: Iterable[Source],
    tokenizer: "PreTrainedTokenizerBase",
    vocab_size: int | None,
    progress: Progress | None,
    date: dt.date,
    *,
    train: bool,
) -> Dataset:
    parts: list[Part] = []
    rows = 0
    for index, source in enumerate(sources):
        settings = source.config
        key = f"data.{'train' if train else 'eval'}.{settings.name or index}"
        encoder = Encoder(tokenizer, config.data.supervise, source.form, date)
        tokens = _tokens(config, source, encoder, progress)
        if not len(tokens):
            what = "selects no row" if settings.split is not None else "holds no row"
            raise ConfigError(f"{key}: {settings.path} {what}{_split_hint(settings)}")
        if vocab_size is not None and tokens.largest_id >= vocab_size:
            raise _outside(key, source, tokens, tokenizer, vocab_size)
        _refuse_unused(config, key, source, tokens)
        pieces = _cut(config, source, tokens)
        if not len(pieces):
            raise ConfigError(f"{key}: no row of {settings.path} can be trained on: {_reasons(source, tokens, pieces)}")
        parts.append(Part(source, tokens, pieces, _sequences(config, pieces, index, train=train), rows))
        rows += len(tokens)
    return Dataset(parts, config.data.seq_len, packing=config.data.packing, date=date)


def _tokens(config: Config, source: Source, encoder: Encoder, progress: Progress | None) -> Tokens:
    threads = None if config.data.workers == "auto" else config.data.workers
    settings = source.config
    name = cache.key(encoder.fingerprint(), source.digest(threads or 8), source.selection())
    folder = Path(config.data.cache) if config.data.cache else cache.default_folder()
    if (found := cache.load(folder, name)) is not None:
        return found
    _log.info("tokenizing %s", settings.path)
    try:
        return cache.save(folder, name, _counted(encoder.encode_all(source, threads), settings.path, progress))
    except StorageError as error:
        if config.data.cache is not None:
            raise
        _log.warning("%s. Going on without a cache", error)
    # Mapped files live on after their folder is gone.
    temporary = Path(tempfile.mkdtemp(prefix="megatrain-data-"))
    try:
        return cache.save(temporary, name, _counted(encoder.encode_all(source, threads), settings.path, progress))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _counted(rows: Iterator[Encoded], path: str, progress: Progress | None) -> Iterator[Encoded]:
    count = shown = 0
    for row in rows:
        count += len(row.ids)
        if progress is not None and count - shown >= _PROGRESS_TOKENS:
            progress(path, count)
            shown = count
        yield row


def _outside(
    key: str, source: Source, tokens: Tokens, tokenizer: "PreTrainedTokenizerBase", vocab_size: int
) -> ConfigError:
    """Names the first row that holds a token id which the model has no embedding for."""
    block = 1 << 22
    for low in range(0, len(tokens.tokens), block):
        beyond = np.flatnonzero(tokens.tokens[low : low + block] >= vocab_size)
        if len(beyond):
            at = low + int(beyond[0])
            row = int(np.searchsorted(tokens.offsets, at, side="right")) - 1
            token = int(tokens.tokens[at])
            spelling = tokenizer.convert_ids_to_tokens(token)
            return ConfigError(
                f"{key}: {source.where(*tokens.places[row].tolist())} holds the token id {token} ({spelling!r}), and "
                f"the model's vocabulary has {vocab_size} entries; tokenizer and model do not belong together "
                "(model.tokenizer), or the model has to grow with the tokens that were added"
            )
    raise AssertionError("largest_id is that of one of the tokens")


def _refuse_unused(config: Config, key: str, source: Source, tokens: Tokens) -> None:
    if config.data.unused == "warn":
        return
    for remark, count, first in tokens.remarks:
        if remarks.is_unused(remark):
            what = remarks.describe(remark, count, len(tokens), source.where(*tokens.places[first].tolist()))
            raise ConfigError(f"{key}: {what}, and data.unused is error")


def _skipped(source: Source) -> list[str]:
    """What a folder holds and is not read, a sentence for each reason."""
    groups: dict[str, list[str]] = {}
    for why, name in source.skipped:
        groups.setdefault(why, []).append(name)
    return [
        f"{source.config.path}: not read ({why}): {', '.join(names[:4])}"
        + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        for why, names in groups.items()
    ]


def _cut(config: Config, source: Source, tokens: Tokens) -> Pieces:
    data = config.data
    if data.long_rows == "error":
        row = int(np.argmax(tokens.lengths))
        if tokens.lengths[row] > data.seq_len:
            raise ConfigError(
                f"{source.where(*tokens.places[row].tolist())} has {int(tokens.lengths[row])} tokens, more than "
                f"data.seq_len ({data.seq_len}), and data.long_rows is error; raise the one, or write split or drop"
            )
    return pack.cut(tokens, data.seq_len, data.long_rows)


def _sequences(config: Config, pieces: Pieces, index: int, *, train: bool) -> Sequences:
    data = config.data
    if not data.packing:
        return pack.alone(pieces)
    if train and not data.shuffle:
        return pack.in_order(pieces, data.seq_len)
    # Packed once for the whole run: which rows share a window stays, the order of windows changes with the epoch.
    rank = np.empty(len(pieces), dtype=np.int64)
    rank[shuffle.order(len(pieces), config.train.seed, _PACKING, index)] = np.arange(len(pieces))
    return pack.best_fit(pieces, data.seq_len, rank)


def _split_hint(settings: SourceConfig) -> str:
    if isinstance(settings.split, float):
        return (
            f" with split: {settings.split}; a split takes whole rows, and parts a single text where a line ends. Give "
            "more rows, another fraction, or a file of its own"
        )
    return ""


def _reasons(source: Source, tokens: Tokens, pieces: Pieces) -> str:
    return "; ".join(
        f"{dropped.count} of {len(tokens)} rows: {dropped.reason} (for example "
        f"{source.where(*tokens.places[dropped.example].tolist())})"
        for dropped in pieces.dropped
    )
