"""Rows out of files, folders, patterns and the standard library, each with the place it came from.

A row is a text, a conversation, or a prompt with its completion. Files are read line by line where their format allows
it; whatever cannot be read as promised is an error that names file and line.
"""

import dataclasses
import functools
import gzip
import hashlib
import importlib
import io
import itertools
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Literal

from megatrain.config import SourceConfig
from megatrain.config.paths import SUFFIXES, TEXT_SUFFIXES, find, suffix_of
from megatrain.data import stdlib
from megatrain.errors import ConfigError

Kind = Literal["text", "chat", "completion"]

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One row as it was found."""

    kind: Kind
    file: int
    """Index into the source's files."""
    number: int
    """Line or position in the file, from 1; 0: the file is the row."""
    text: str = ""
    """The text; of a completion the prompt."""
    completion: str = ""
    """What follows the prompt."""
    messages: tuple[dict[str, Any], ...] = ()
    """Messages with `role` and `content`."""
    tools: tuple[Any, ...] | None = None
    """Tool descriptions for the chat template."""


class Source:
    """The files behind one entry of `data.train` or `data.eval`, found and not yet read."""

    def __init__(self, config: SourceConfig, *, held_out: bool = False) -> None:
        """`held_out`: it belongs to `data.eval`. Raises ConfigError when there is nothing to read."""
        self.config = config
        self.held_out = held_out
        self.files: tuple[str, ...]
        """Names for messages, in the order of reading."""
        self._documents: tuple[tuple[str, Any], ...] | None = None
        self._digest = ""
        if config.path.startswith("python:"):
            if config.fields or config.format != "auto":
                setting = "fields" if config.fields else "format"
                raise ConfigError(f"{setting} has no effect on {config.path}, whose rows are made here; remove it")
            self._documents = stdlib.documents(config.path)
            self.files = tuple(name for name, _ in self._documents)
        else:
            self.files = find(config)

    def where(self, file: int, number: int) -> str:
        """A row's place, for people: `data/train.jsonl:17`."""
        name = self.files[file]
        return f"{name}:{number}" if number else name

    def selection(self) -> list[Any]:
        """What decides, beside the content of the files, which rows there are."""
        config = self.config
        return [config.format, config.fields, config.split, self.held_out if config.split is not None else None]

    def digest(self, threads: int = 8) -> str:
        """SHA-256 over the content of every file. Reads all of it, once: dates and sizes can lie."""
        if self._digest:
            return self._digest
        total = hashlib.sha256()
        if self._documents is not None:
            total.update(json.dumps(self._documents).encode())
        else:
            with ThreadPoolExecutor(threads) as pool:
                for digest in pool.map(_file_digest, self.files):
                    total.update(digest)
        self._digest = total.hexdigest()
        return self._digest

    def rows(self) -> Iterator[Row]:
        """Every row of the asked split, in order. Raises ConfigError naming file and line."""
        keep = _split_filter(self.config, held_out=self.held_out)
        every = self._every()
        if keep is None:
            yield from every
            return
        first = list(itertools.islice(every, 2))
        if len(first) == 1 and first[0].kind == "text":
            part = keep.part(first[0].text)
            if part.strip():
                yield dataclasses.replace(first[0], text=part)
            return
        yield from filter(keep, itertools.chain(first, every))

    def _every(self) -> Iterator[Row]:
        if self._documents is not None:
            for index, (_, value) in enumerate(self._documents):
                if isinstance(value, str):
                    yield Row(kind="text", file=index, number=0, text=value)
                else:
                    yield Row(kind="chat", file=index, number=0, messages=tuple(value))
            return
        for index, name in enumerate(self.files):
            for number, value in _read(name, self.config.format):
                yield _row(value, self.config, index, number, self.where(index, number))


def _open(file: str) -> BinaryIO:
    if file.endswith(".gz"):
        return io.BufferedReader(gzip.open(file))
    return open(file, "rb")  # noqa: PTH123 - the caller closes it


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


def _read(file: str, form: str) -> Iterator[tuple[int, Any]]:
    """(number, value) of each row: a string for a document, else what the file's format gives."""
    suffix = suffix_of(file)
    try:
        if suffix in TEXT_SUFFIXES or (form == "text" and suffix not in SUFFIXES):
            with _open(file) as stream:
                yield 0, _decode(stream.read(), file)
        elif suffix == ".jsonl":
            yield from _read_lines(file)
        elif suffix == ".json":
            yield from _read_json(file)
        else:
            yield from _read_parquet(file)
    except (OSError, EOFError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None


def _read_lines(file: str) -> Iterator[tuple[int, Any]]:
    with _open(file) as stream:
        for number, line in enumerate(stream, start=1):
            if line.isspace():
                continue
            text = _decode(line, f"{file}:{number}").rstrip("\r\n")  # else a column may be one of the next line
            try:
                value = json.loads(text)
            except (json.JSONDecodeError, RecursionError) as error:
                detail = (
                    f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
                )
                raise ConfigError(f"{file}:{number} is not JSON: {detail}") from None
            yield number, value


def _read_json(file: str) -> Iterator[tuple[int, Any]]:
    with _open(file) as stream:
        text = _decode(stream.read(), file)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # one object a line under the wrong name
            yield from _read_lines(file)
            return
        raise ConfigError(f"{file}:{error.lineno} is not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(value, list):
        raise ConfigError(f"{file} holds a JSON {type(value).__name__}; expected a list of rows")
    yield from enumerate(value, start=1)


def _read_parquet(file: str) -> Iterator[tuple[int, Any]]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ConfigError(f"{file}: reading parquet needs a package: pip install pyarrow") from None
    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=1024):
                for value in batch.to_pylist():
                    number += 1
                    yield number, value
    except ValueError as error:  # pyarrow's errors about content derive from it
        raise ConfigError(f"{file} is not a readable parquet file: {error}") from None


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where} is not UTF-8: {error.reason} at byte {error.start}; convert it, for instance with iconv"
        ) from None


_NO_IMAGES = "images in rows are not read from a config yet: hand them to Engine.step of the Python API as pixel_values"


def _row(value: Any, config: SourceConfig, file: int, number: int, where: str) -> Row:
    if isinstance(value, str) and number == 0:
        return Row(kind="text", file=file, number=number, text=value)
    if not isinstance(value, Mapping):
        raise ConfigError(f'{where} holds a {type(value).__name__}; expected an object such as {{"text": …}}')
    names = {name: config.fields.get(name, name) for name in ("text", "messages", "prompt", "completion")}
    if names["messages"] not in value and "messages" not in config.fields and "conversations" in value:
        names["messages"] = "conversations"
    kind = config.format if config.format != "auto" else _detect(value, names)
    if kind == "text" and names["text"] in value:
        return Row(kind="text", file=file, number=number, text=_string(value, names["text"], where))
    for key in ("images", "image", "videos", "video"):
        if kind in ("chat", "completion") and value.get(key):
            raise ConfigError(f"{where} has {key}; {_NO_IMAGES}, or leave {key} out")
    if kind == "chat" and names["messages"] in value:
        messages = _messages(value[names["messages"]], config, where, names["messages"])
        return Row(kind="chat", file=file, number=number, messages=messages, tools=_tools(value, where))
    if kind in ("chat", "completion") and names["prompt"] in value and names["completion"] in value:
        prompt, completion = value[names["prompt"]], value[names["completion"]]
        if isinstance(prompt, list) and isinstance(completion, list):
            messages = _messages([*prompt, *completion], config, where, names["prompt"])
            return Row(kind="chat", file=file, number=number, messages=messages, tools=_tools(value, where))
        prompt, completion = _string(value, names["prompt"], where), _string(value, names["completion"], where)
        if kind == "chat":
            turns = ({"role": "user", "content": prompt}, {"role": "assistant", "content": completion})
            return Row(kind="chat", file=file, number=number, messages=turns)
        return Row(kind="completion", file=file, number=number, text=prompt, completion=completion)
    wanted = {
        "text": names["text"],
        "chat": names["messages"],
        "completion": f"{names['prompt']} and {names['completion']}",
    }.get(str(kind), "text, messages, or prompt and completion")
    raise ConfigError(
        f"{where} has the keys {', '.join(map(str, value)) or '(none)'}; expected {wanted}. "
        "Name other keys in the source's fields, such as fields: {text: body}"
    )


def _detect(value: Mapping[str, Any], names: Mapping[str, str]) -> str:
    if names["messages"] in value:
        return "chat"
    if names["prompt"] in value and names["completion"] in value:
        return "completion"
    return "text" if names["text"] in value else ""


def _string(value: Mapping[str, Any], name: str, where: str) -> str:
    text = value[name]
    if not isinstance(text, str):
        raise ConfigError(f"{where}: {name} is {_brief(text)}; expected a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where}: {name} holds half a surrogate pair at character {error.start}") from None
    return text


def _messages(value: Any, config: SourceConfig, where: str, name: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where}: {name} is {_brief(value)}; expected a list of messages")
    return tuple(_message(item, config, f"{where}: {name}[{index}]") for index, item in enumerate(value))


def _message(item: Any, config: SourceConfig, where: str) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise ConfigError(f"{where} is {_brief(item)}; expected an object with role and content")
    role_key, content_key = config.fields.get("role", "role"), config.fields.get("content", "content")
    if role_key not in item and "role" not in config.fields and "from" in item:
        role_key, content_key = "from", config.fields.get("content", "value")
    if role_key not in item:
        raise ConfigError(f"{where} has the keys {', '.join(map(str, item)) or '(none)'}; expected role and content")
    role = item[role_key]
    if not isinstance(role, str):
        raise ConfigError(f"{where}: {role_key} is {_brief(role)}; expected a string")
    # Other parts of a message (tool calls, a name) go to the template as they are.
    message = {key: part for key, part in item.items() if key not in (role_key, content_key) and part is not None}
    message["role"] = _ROLES.get(role, role)
    content = item.get(content_key)
    if content is None and message.keys() > {"role"}:
        content = ""
    if content is None:
        raise ConfigError(
            f'{where}, a turn of role {role!r}, has no {content_key}; write its text as a string ("" for none), or '
            "take the row out"
        )
    if isinstance(content, list):
        raise ConfigError(f"{where}: {content_key} is a list of parts; {_NO_IMAGES}, and give plain text as a string")
    message["content"] = _string({content_key: content}, content_key, where)
    return message


def _tools(value: Mapping[str, Any], where: str) -> tuple[Any, ...] | None:
    tools = value.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise ConfigError(f"{where}: tools is {_brief(tools)}; expected a list")
    return tuple(tools) if tools else None


def _brief(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


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
    """A part of all rows, told by their content, so that equal rows and later runs fall on the same side.

    Held-out fractions are taken from the lower end of the hashes, training's from the upper: 0.05 held out and 0.95
    trained on are complements.
    """

    fraction: float
    upper: bool

    def part(self, text: str) -> str:
        """Of a source that is one text: its end is held out, its beginning trained on, parted where a line ends."""
        count = round(self.fraction * 2**32)
        cut = len(text) * (count if self.upper else 2**32 - count) >> 32
        cut = text.find("\n", cut) + 1 or len(text)
        return text[:cut] if self.upper else text[cut:]

    def __call__(self, row: Row) -> bool:
        content = json.dumps([row.text, row.completion, row.messages], sort_keys=True, default=str)
        value = int.from_bytes(hashlib.sha256(content.encode()).digest()[:4], "big")
        count = round(self.fraction * 2**32)
        return value >= 2**32 - count if self.upper else value < count
