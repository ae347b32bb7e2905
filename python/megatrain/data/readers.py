"""The rows of one entry of `data.train` or `data.eval`, each with the place it came from."""

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatrain.config import SourceConfig, shared_rows
from megatrain.config.data_files import ROWS, DataFiles, find, is_columnar, is_document, is_hub_id
from megatrain.data import stdlib
from megatrain.data.file_formats import Piece, count_characters, line_end_after, read_text, read_values
from megatrain.data.given_rows import GivenRows
from megatrain.data.hub import hub_files
from megatrain.data.rows import Row, RowParser
from megatrain.errors import ConfigError

_MOST_FAULTS = 10
"""Rows that a refusal names."""
_LOOKED_THROUGH = 100_000
"""Rows after the first that cannot be read among which others are looked for."""


class Source:
    """The files behind one entry of `data.train` or `data.eval`, found and not yet read."""

    def __init__(self, config: SourceConfig, *, held_out: bool = False) -> None:
        """`held_out`: it belongs to `data.eval`. Raises ConfigError when there is nothing to read."""
        self.config = config
        self.held_out = held_out
        self.files: tuple[str, ...]
        """Names for messages, in the order of reading."""
        self.skipped: tuple[tuple[str, str], ...] = ()
        """(why, file) of what the folder holds and is not read."""
        self._documents: tuple[tuple[str, Any], ...] | None = None
        self._given: GivenRows | None = None
        self._digest = ""
        self._settings = config
        self._named: frozenset[str] = frozenset(config.fields)
        if config.path.startswith("python:"):
            if config.fields or config.format != "auto":
                setting = "fields" if config.fields else "format"
                raise ConfigError(f"{setting} has no effect on {config.path}, whose rows are made here; remove it")
            self._documents = stdlib.documents(config.path)
            self.files = tuple(name for name, _ in self._documents)
        elif config.path.startswith(ROWS):
            if isinstance(config.split, str):
                raise ConfigError(
                    f"{config.path} has no split {config.split!r}; hand those rows over under a name of their own"
                )
            self._given, self.files = GivenRows(config.path), (config.path,)
        elif is_hub_id(config.path):
            self.files = hub_files(config)
        else:
            found = find(config)
            self.files, self.skipped, self._settings = found.files, found.skipped, found.settings
            self._named |= found.named
            if self._settings.fields and all(map(is_document, self.files)):
                named = ", ".join(f"{name}: {column}" for name, column in self._settings.fields.items())
                raise ConfigError(
                    f"fields {{{named}}} of {config.path} has no effect: {self.files[0]} is one text without columns; "
                    "remove it, or write the texts as rows of JSON lines"
                )

    def where(self, file: int, number: int) -> str:
        """A row's place, for people: `data/train.jsonl:17`."""
        name = self.files[file]
        return f"{name}:{number}" if number else name

    @property
    def found(self) -> shared_rows.Found:
        """The settings as they were written, and the files with what their folder adds to the settings."""
        return self.config, DataFiles(self.files, self._settings, self.skipped, self._named)

    @property
    def form(self) -> str:
        """What a row is, as the settings say: `auto`, or one of the formats."""
        return self._settings.format

    def selection(self) -> list[Any]:
        """What decides, beside the content of the files, which rows there are."""
        config = self._settings
        return [config.format, config.fields, self.config.split, self.held_out if config.split is not None else None]

    def digest(self, threads: int = 8) -> str:
        """SHA-256 over the content of every file. Reads all of it, once: dates and sizes can lie."""
        if self._digest:
            return self._digest
        total = hashlib.sha256()
        if self._documents is not None:
            total.update(json.dumps(self._documents).encode())
        elif self._given is not None:
            total.update(self._given.digest().encode())
        else:
            with ThreadPoolExecutor(threads) as pool:
                for digest in pool.map(_file_digest, self.files):
                    total.update(digest)
        self._digest = total.hexdigest()
        return self._digest

    def rows(self) -> Iterator[Row]:
        """Every row of the asked split, in order; a long text comes as several rows with `piece` set.

        Raises ConfigError naming file and line.
        """
        keep = _split_filter(self._settings, held_out=self.held_out)
        if keep is None:
            yield from self._every()
        elif self._from_files and len(self.files) == 1 and is_document(self.files[0]):
            yield from self._part_of_document(keep)
        else:
            every = self._every(keep)
            first = list(itertools.islice(every, 2))
            if len(first) == 1 and first[0].kind == "text":
                part = keep.part(first[0].text)
                if part.strip():
                    yield dataclasses.replace(first[0], text=part)
                return
            yield from (row for row in itertools.chain(first, every) if row.piece is not None or keep(row))

    @property
    def _from_files(self) -> bool:
        return self._documents is None and self._given is None

    def _part_of_document(self, keep: "_Split") -> Iterator[Row]:
        """Of the only text its end, or its beginning."""
        name = self.files[0]
        cut = line_end_after(name, keep.position(count_characters(name)))
        bounds = (0, cut) if keep.upper else (cut, None)
        for row in _document_rows(0, read_text(name, *bounds)):
            if row.piece is not None or row.text.strip():
                yield row

    def _every(self, keep: "_Split | None" = None) -> Iterator[Row]:
        """All rows; `keep` decides on long texts only, whose rows are no whole texts."""
        if self._documents is not None:
            for index, (_, value) in enumerate(self._documents):
                if isinstance(value, str):
                    yield Row(kind="text", file=index, number=0, text=value)
                else:
                    yield Row(kind="chat", file=index, number=0, messages=tuple(value))
            return
        parser, faults = RowParser(self._settings, self._named), _Faults()
        if self._given is not None:
            yield from self._parsed(parser, faults, self._given.values(), 0, self._given.columnar)
            faults.check()
            parser.check()
            return
        for index, name in enumerate(self.files):
            if is_document(name):
                rows = _document_rows(index, read_text(name))
                first = next(rows)
                if first.piece is None or keep is None or keep.takes(_file_digest(name)):
                    yield first
                    yield from rows
                continue
            yield from self._parsed(parser, faults, read_values(name, faults.add), index, is_columnar(name))
            faults.check()
        parser.check()

    def _parsed(
        self, parser: RowParser, faults: "_Faults", values: Iterator[tuple[int, Any]], file: int, columnar: bool
    ) -> Iterator[Row]:
        """The rows of a file up to the first that cannot be read; what follows it is only looked through."""
        for number, value in values:
            try:
                row = parser.row(value, file, number, self.where(file, number), columnar=columnar)
            except ConfigError as error:
                faults.add(error)
                continue
            if not faults:
                yield row
            else:
                faults.passed()


class _Faults:
    """What is wrong with rows of one file, so that several can be mended at once."""

    def __init__(self) -> None:
        self._found: list[ConfigError] = []
        self._passed = 0

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, error: ConfigError) -> None:
        """Notes one; raises ConfigError with all where that is enough of them."""
        self._found.append(error)
        if len(self._found) == _MOST_FAULTS:
            self.check()

    def passed(self) -> None:
        """Notes a row in order; raises ConfigError where enough were looked at."""
        self._passed += 1
        if self._passed == _LOOKED_THROUGH:
            self.check()

    def check(self) -> None:
        """Raises ConfigError with everything that was found."""
        if not self._found:
            return
        first, *others = map(str, self._found)
        if others:
            count = f"{len(others)} more row{'s' * (len(others) > 1)}"
            first += f"\n{count} of this file cannot be read:" + "".join(f"\n  {other}" for other in others)
        raise ConfigError(first) from self._found[0]


def _document_rows(file: int, pieces: Iterator[Piece]) -> Iterator[Row]:
    for piece in pieces:
        whole = piece.last and piece.start == 0
        yield Row(kind="text", file=file, number=0, text=piece.text, piece=None if whole else piece)


def _file_digest(file: str) -> bytes:
    facts = Path(file).stat()
    return _digest_of(file, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)


@functools.lru_cache(maxsize=1 << 16)
def _digest_of(file: str, *_facts: int) -> bytes:
    # A run looks at its files for the checkpoint, the tokenizer and the tokens; within one process it reads them once.
    digest = hashlib.sha256(f"{Path(file).name}\0".encode())
    with Path(file).open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.digest()


def _split_filter(config: SourceConfig, *, held_out: bool) -> "_Split | None":
    fraction, name = config.split, config.path
    if name.startswith("python:") and isinstance(fraction, str):
        if fraction not in ("train", "eval"):
            raise ConfigError(f"{name} has no split {fraction!r}; write train, eval, or a fraction such as 0.05")
        return _Split(0.95 if fraction == "train" else 0.05, upper=fraction == "train")
    if not isinstance(fraction, float):
        return None
    return _Split(fraction, upper=not held_out)


@dataclasses.dataclass(frozen=True, slots=True)
class _Split:
    """A part of all rows, chosen by their content, so that equal rows and later runs fall on the same side.

    Held-out fractions are taken from the lower end of the hashes, training's from the upper: 0.05 held out and 0.95
    trained on are complements.
    """

    fraction: float
    upper: bool

    def position(self, length: int) -> int:
        """Of a source that is one text of `length` characters: where the part that is held out begins, before it is
        moved to the next line."""
        count = round(self.fraction * 2**32)
        return length * (count if self.upper else 2**32 - count) >> 32

    def part(self, text: str) -> str:
        """Of a source that is one text: its end is held out, its beginning trained on, parted where a line ends."""
        cut = text.find("\n", self.position(len(text))) + 1 or len(text)
        return text[:cut] if self.upper else text[cut:]

    def __call__(self, row: Row) -> bool:
        content = json.dumps([row.text, row.completion, row.messages], sort_keys=True, default=str)
        return self.takes(hashlib.sha256(content.encode()).digest())

    def takes(self, digest: bytes) -> bool:
        """Whether content with this SHA-256 is in the part."""
        value = int.from_bytes(digest[:4], "big")
        count = round(self.fraction * 2**32)
        return value >= 2**32 - count if self.upper else value < count


def texts(sources: Iterable[Source]) -> Iterator[str]:
    """Every text that tokens are made of, in order: of a conversation, what its messages say."""
    for source in sources:
        for row in source.rows():
            if row.skip:
                continue
            own = row.text[row.piece.overlap :] if row.piece else row.text
            yield from (text for text in (own, row.completion) if text)
            for message in row.messages:
                yield message["content"]
