"""Values out of files: JSON, JSON lines, CSV, Parquet, Arrow and text, plain or compressed, read piece by piece.

Memory stays bounded whatever a file's size: lines, the elements of a JSON list and batches of columnar files come one
after the other, and a long text comes in pieces that overlap. Whatever cannot be read is an error that names file and
line.
"""

import codecs
import csv
import dataclasses
import gzip
import importlib
import io
import json
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

from megatrain.compat import numbers
from megatrain.config.data_files import INSTALL, is_document, suffix_of
from megatrain.errors import ConfigError

PIECE = 1 << 18
"""Characters of a long text that are read at a time."""
OVERLAP = 1 << 12
"""Characters at the end of a piece that the next one repeats, so that both can be tokenized in context."""
_BLOCK = 1 << 20
"""Bytes read from a file at a time."""
_LONGEST_WORD = 16
"""Characters, and more than any word or escape of JSON has."""
_PYARROW = 20
"""The first release whose record batches return the keys of a map as those of a dict (`maps_as_pydicts`);
pyproject.toml asks for it too."""


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A part of a text that is too long to be held at once."""

    text: str
    start: int
    """Where it begins in the whole text, in characters."""
    overlap: int
    """How many of its first characters the piece before ended with."""
    last: bool


OnFault = Callable[[ConfigError], None]
"""Called with what is wrong with one line of a file."""


def _raised(error: ConfigError) -> None:
    raise error


def read_values(file: str, on_fault: OnFault = _raised) -> Iterator[tuple[int, Any]]:
    """(number, value) of each row; the number is the line, or the position of a file without lines, from 1. Where
    `on_fault` returns, the line that it was called about is left out.

    Raises ConfigError for a file that is not what its suffix says, or whose package is not installed.
    """
    suffix = suffix_of(file)
    try:
        if suffix in (".jsonl", ".ndjson"):
            yield from _json_lines(file, on_fault)
        elif suffix == ".json":
            yield from _json(file)
        elif suffix in (".csv", ".tsv"):
            yield from _csv(file, "," if suffix == ".csv" else "\t", on_fault)
        elif suffix == ".parquet":
            yield from _parquet(file)
        else:
            assert not is_document(file)
            yield from _arrow(file)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None


def read_text(file: str, start: int = 0, stop: int | None = None) -> Iterator[Piece]:
    """A document from character `start` to `stop`, in pieces that end with a line where one ends late enough."""
    try:
        yield from _pieces(_between(_characters(file), start, stop))
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None


def _pieces(blocks: Iterator[str]) -> Iterator[Piece]:
    held, start, overlap = "", 0, 0
    for block in blocks:
        held += block
        while len(held) > overlap + 2 * PIECE:
            end = held.rfind("\n", overlap + PIECE // 2, overlap + PIECE) + 1 or overlap + PIECE
            yield Piece(held[:end], start, overlap, last=False)
            start, held, overlap = start + end - OVERLAP, held[end - OVERLAP :], OVERLAP
    if held or start == 0:
        yield Piece(held, start, overlap, last=True)


def _between(blocks: Iterator[str], start: int, stop: int | None) -> Iterator[str]:
    at = 0
    for block in blocks:
        low, high = max(0, start - at), len(block) if stop is None else max(0, stop - at)
        at += len(block)
        if part := block[low:high]:
            yield part


def line_end_after(file: str, position: int) -> int:
    """The character after the first line break at or after `position`; the length of the text where there is none."""
    at = 0
    for block in _characters(file):
        found = block.find("\n", max(0, position - at))
        if at + len(block) > position and found >= 0:
            return at + found + 1
        at += len(block)
    return at


def count_characters(file: str) -> int:
    """The length of a document, without holding it."""
    return sum(len(block) for block in _characters(file))


def _characters(file: str) -> Iterator[str]:
    """A file's text, block by block. Raises ConfigError naming the byte that is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    done = 0
    with _open(file) as stream:
        while True:
            data = stream.read(_BLOCK)
            waiting = len(decoder.getstate()[0])
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                raise _not_utf8(file, error, done - waiting) from None
            done += len(data)
            if text:
                yield text
            if not data:
                return


def _not_utf8(where: str, error: UnicodeDecodeError, before: int = 0) -> ConfigError:
    return ConfigError(
        f"{where} is not UTF-8: {error.reason} at byte {before + error.start}; convert it, for instance with iconv"
    )


def _open(file: str) -> BinaryIO:
    if file.lower().endswith(".gz"):
        return io.BufferedReader(gzip.open(file))
    if file.lower().endswith(".zst"):
        arrow = _package("pyarrow", file, "zstd")
        stream: BinaryIO = io.BufferedReader(arrow.input_stream(file, compression="zstd"))
        return stream
    return open(file, "rb")  # noqa: PTH123 - the caller closes it


def _package(name: str, file: str, what: str) -> Any:
    try:
        package = importlib.import_module(name)
        installed = importlib.import_module("pyarrow").__version__
    except ImportError:
        raise ConfigError(f"{file}: reading {what} needs a package that is not installed: {INSTALL}") from None
    if numbers(installed) < (_PYARROW,):
        raise ConfigError(
            f"{file}: reading {what} needs pyarrow {_PYARROW} or newer, and {installed} is installed: {INSTALL}"
        )
    return package


def _json_lines(file: str, on_fault: OnFault = _raised) -> Iterator[tuple[int, Any]]:
    with _open(file) as stream:
        for number, line in enumerate(stream, start=1):
            if line.isspace():
                continue
            try:
                value = _json_line(f"{file}:{number}", line, "utf-8-sig" if number == 1 else "utf-8")
            except ConfigError as error:
                on_fault(error)
            else:
                yield number, value


def _json_line(where: str, line: bytes, encoding: str) -> Any:
    try:
        # Without the line break, lest a column of a message is that of the next line.
        return json.loads(line.decode(encoding).rstrip("\r\n"), object_pairs_hook=_object)
    except _Repeated as error:
        raise ConfigError(f"{where} {error}") from None
    except UnicodeDecodeError as error:
        raise _not_utf8(where, error) from None
    except json.JSONDecodeError as error:
        raise _not_json(where, error.msg, error.colno) from None
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number of too many digits
        raise ConfigError(f"{where} is not JSON: {error}") from None


class _Repeated(Exception):
    """A key that an object has twice, of which Python's parser would drop the first value."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _Repeated(f"has the key {twice!r} twice; which of the values is meant is not known: remove one")
    return found


def _not_json(where: str, why: str, column: int) -> ConfigError:
    return ConfigError(f"{where} is not JSON: {why.removesuffix(' at')} at column {column}")


def _json(file: str) -> Iterator[tuple[int, Any]]:
    """A list of rows, element by element; also one object a line under the wrong name."""
    blocks = _characters(file)
    held = ""
    for block in blocks:
        held += block
        if held.strip():
            break
    if held.lstrip().startswith("["):
        yield from enumerate(_json_list(file, held, blocks), start=1)
        return
    rows = iter(_json_lines(file))
    try:
        first = [next(rows), next(rows)]
    except (ConfigError, StopIteration):
        raise _no_list(file) from None
    yield from first
    yield from rows


def _no_list(file: str) -> ConfigError:
    """What is wrong with a JSON file that is neither a list nor one object a line."""
    try:
        value = json.loads("".join(_characters(file)))
    except json.JSONDecodeError as error:
        return _not_json(f"{file}:{error.lineno}", error.msg, error.colno)
    except (RecursionError, ValueError) as error:
        return ConfigError(f"{file} is not JSON: {error}")
    return ConfigError(f"{file} holds a JSON {type(value).__name__}; expected a list of rows")


def _json_list(file: str, held: str, blocks: Iterator[str]) -> Iterator[Any]:
    decoder = json.JSONDecoder(object_pairs_hook=_object)
    at = held.index("[") + 1
    lines = 1 + held.count("\n", 0, at)
    column = at - (held.rfind("\n", 0, at) + 1)
    ended, wanted, expected = False, 0, "]"  # `expected`: what may stand here instead of a value
    while True:
        while not ended and (at >= len(held) or wanted > len(held) - at):
            block = next(blocks, None)
            ended = block is None
            held, at = held[at:] + (block or ""), 0
        text = held[at:].lstrip() if at < len(held) and held[at].isspace() else None
        if text is not None:
            blank = len(held) - at - len(text)
            lines, column = _moved(lines, column, held[at : at + blank])
            at += blank
            if at >= len(held) and not ended:
                continue
        char = held[at : at + 1]
        if char == "]" and expected in ("]", ",]"):
            rest = held[at + 1 :] + "".join(blocks)
            if rest.strip():
                raise ConfigError(f"{file}:{lines} is not JSON: extra data after the list")
            return
        if expected == ",]":
            if char != ",":
                what = f"expected , or ] and found {char!r}" if char else "the list does not end; the file is cut off"
                raise ConfigError(f"{file}:{lines} is not JSON: {what} at column {column + 1}")
            at, column, expected = at + 1, column + 1, "value"
            continue
        try:
            value, stop = decoder.raw_decode(held, at)
        except _Repeated as error:
            raise ConfigError(f"{file}:{lines} {error}") from None
        except (ValueError, RecursionError) as error:
            if not isinstance(error, json.JSONDecodeError):
                raise ConfigError(f"{file}:{lines} is not JSON: {error}") from None
            cut_off = error.msg.startswith("Unterminated") or error.pos >= len(held) - _LONGEST_WORD
            if cut_off and not ended:
                wanted = 2 * max(len(held) - at, 1)  # the row may go on in the next block
                continue
            line, position = _moved(lines, column, held[at : error.pos])
            raise _not_json(f"{file}:{line}", error.msg, position + 1) from None
        if stop == len(held) and not ended:  # a number may go on
            wanted = len(held) - at + 1
            continue
        wanted = 0
        lines, column = _moved(lines, column, held[at:stop])
        at, expected = stop, ",]"
        yield value


def _moved(line: int, column: int, text: str) -> tuple[int, int]:
    breaks = text.count("\n")
    return line + breaks, len(text) - text.rfind("\n") - 1 if breaks else column + len(text)


def _csv(file: str, separator: str, on_fault: OnFault) -> Iterator[tuple[int, Any]]:
    """Rows by the names of the first line; every cell is a string."""
    csv.field_size_limit(sys.maxsize)
    lines = _lines(file)
    reader = csv.reader(lines, delimiter=separator, strict=True)
    try:
        names = next(reader, None)
        if names is None:
            return
        if len(names) == 1 and (other := next((mark for mark in ";\t" if mark in names[0]), "")):
            raise ConfigError(
                f"{file}:1 names one column, {names[0]!r}; cells are separated by {separator!r} here, so convert "
                f"{other!r} to it" + (", or call the file .tsv" if other == "\t" else "")
            )
        # Unnamed columns, such as the index that pandas writes, get the names that pandas gives them.
        names = [name or f"Unnamed: {index}" for index, name in enumerate(names)]
        if len(set(names)) < len(names):
            raise ConfigError(f"{file}:1: the first line has to name each column once; it is {separator.join(names)}")
        before = reader.line_num
        for cells in reader:
            number, before = before + 1, reader.line_num
            if not cells:
                continue
            if len(cells) == len(names):
                yield number, dict(zip(names, cells, strict=True))
                continue
            on_fault(
                ConfigError(
                    f"{file}:{number} has {len(cells)} cells, and the first line names {len(names)} columns; put "
                    'cells with separators or line breaks in "quotes"'
                )
            )
    except csv.Error as error:
        raise ConfigError(f"{file}:{reader.line_num} is not CSV: {error}") from None


def _lines(file: str) -> Iterator[str]:
    held = ""
    for block in _characters(file):
        *lines, held = (held + block).split("\n")
        yield from (line + "\n" for line in lines)
    if held:
        yield held


def _parquet(file: str) -> Iterator[tuple[int, Any]]:
    parquet = _package("pyarrow.parquet", file, "Parquet")
    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            _refuse_double_columns(file, table.schema_arrow.names)
            for batch in table.iter_batches(batch_size=1024):
                yield from enumerate(_values(batch), start=number + 1)
                number += batch.num_rows
    except (ValueError, OverflowError) as error:  # pyarrow's errors about content, and dates that Python has not
        raise ConfigError(f"{file} is not a readable Parquet file: {error}") from None


def _arrow(file: str) -> Iterator[tuple[int, Any]]:
    """Arrow's stream format, as `datasets` saves it, or its file format."""
    arrow = _package("pyarrow", file, "Arrow")
    number = 0
    try:
        with arrow.memory_map(file) as stream:
            try:
                batches: Any = arrow.ipc.open_stream(stream)
            except arrow.ArrowInvalid:
                stream.seek(0)
                reader = arrow.ipc.open_file(stream)
                batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
            for batch in batches:
                _refuse_double_columns(file, batch.schema.names)
                for low in range(0, batch.num_rows, 1024):
                    yield from enumerate(_values(batch.slice(low, 1024)), start=number + low + 1)
                number += batch.num_rows
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{file} is not a readable Arrow file: {error}") from None


def _refuse_double_columns(file: str, names: Sequence[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ConfigError(f"{file} has two columns {twice[0]!r}; rename one of them")


def _values(batch: Any) -> Iterator[dict[str, Any]]:
    """The rows of a record batch, with nulls in their columns left out."""
    for row in batch.to_pylist(maps_as_pydicts="lossy"):
        yield {name: _present(value) for name, value in row.items()}


def _present(value: Any) -> Any:
    """A value without its nulls: in columnar files every row has every column, and a null stands for "not there"."""
    if isinstance(value, dict):
        return {key: _present(part) for key, part in value.items() if part is not None}
    return [_present(part) for part in value] if isinstance(value, list) else value
