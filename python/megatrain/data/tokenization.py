"""Rows into token ids and a mask of what is supervised, exactly as the stock tokenizer and template give them.

Start token: one, at the front, when either the tokenizer or the template defines it. Text ends with the end token.
Tokenizing runs in the tokenizer library's own threads; no process is forked.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megatrain.data.chat import Turn, assistant_turns, marks_generation, supervised_tokens
from megatrain.data.readers import Row, Source
from megatrain.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

_CHUNK_ROWS = 256
_CHUNK_CHARACTERS = 1 << 21


@dataclasses.dataclass(frozen=True, slots=True)
class Encoded:
    """One row as tokens."""

    row: Row
    ids: np.ndarray
    """(tokens,) int32."""
    supervised: np.ndarray
    """(tokens,) uint8; 1: the token is learnt."""
    endless: int = 0
    """Assistant turns that the template ends with no token."""


class Encoder:
    """One tokenizer with one rule of supervision. Safe to use from several threads."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        supervise: Literal["assistant", "last", "all"] = "assistant",
        form: Literal["auto", "text", "chat", "completion"] = "auto",
    ) -> None:
        """Raises ConfigError for a tokenizer that cannot be used."""
        from tokenizers import Tokenizer

        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(
                f"the tokenizer {type(tokenizer).__name__} has no fast form (tokenizer.json), which data needs; "
                "convert it with transformers, or set model.tokenizer"
            )
        self._tokenizer = tokenizer
        self._supervise = supervise
        self._form = form
        self._state = backend.to_str()
        # A copy of our own: calls of the stock tokenizer set truncation and padding on theirs, thread or no thread.
        self._backend = Tokenizer.from_str(self._state)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._special = frozenset(tokenizer.all_special_ids) | frozenset(tokenizer.added_tokens_decoder)
        self._prefix, self._suffix = _affixes(self._backend, tokenizer)
        self._template = _template(tokenizer)
        self._stock = threading.Lock()

    def fingerprint(self) -> str:
        """SHA-256 of everything here that decides the tokens of a row and which of them are supervised."""
        import tokenizers
        import transformers

        parts = [
            self._state,
            self._template,
            self._supervise,
            self._form,
            self._prefix,
            self._suffix,
            sorted(self._special),
            {key: str(value) for key, value in self._tokenizer.special_tokens_map.items()},
            tokenizers.__version__,
            transformers.__version__,
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def encode(self, rows: Sequence[Row], where: Sequence[str]) -> list[Encoded]:
        """`where`: a name of each row for messages. Raises ConfigError naming the row."""
        done: dict[int, Encoded] = {}
        texts = [index for index, row in enumerate(rows) if row.kind == "text"]
        for index, encoding in zip(texts, self._plain([rows[index].text for index in texts]), strict=True):
            done[index] = self._text(rows[index], encoding)
        located = [
            (index, *self._rendered(rows[index], where[index]))
            for index in range(len(rows))
            if rows[index].kind != "text"
        ]
        stock = [item for item in located if item[2] is None]
        for index, _, _ in stock:
            done[index] = self._generation(rows[index], where[index])
        ours = [(index, text, turns) for index, text, turns in located if turns is not None]
        encodings = self._backend.encode_batch([text for _, text, _ in ours], add_special_tokens=False)
        for (index, text, turns), encoding in zip(ours, encodings, strict=True):
            done[index] = self._spans(rows[index], text, turns, encoding)
        return [done[index] for index in range(len(rows))]

    def _plain(self, texts: Sequence[str]) -> "list[Encoding]":
        return self._backend.encode_batch_fast(list(texts), add_special_tokens=False) if texts else []

    def _text(self, row: Row, encoding: "Encoding") -> Encoded:
        ids = encoding.ids
        if not ids:
            return Encoded(row, np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.uint8))
        array = np.array(self._closed(self._opened(ids)), dtype=np.int32)
        return Encoded(row, array, np.ones(len(array), dtype=np.uint8))

    def _opened(self, ids: list[int]) -> list[int]:
        """With the start token that the tokenizer adds, unless it is there already."""
        return [*self._prefix, *ids] if self._prefix and self._prefix[0] not in ids[: len(self._prefix)] else ids

    def _closed(self, ids: list[int]) -> list[int]:
        return ids if ids[-len(self._suffix) :] == self._suffix else [*ids, *self._suffix]

    def _as_chat(self, row: Row) -> bool:
        return row.kind == "chat" or (self._form == "auto" and self._template is not None)

    def _rendered(self, row: Row, where: str) -> tuple[str, list[Turn] | None]:
        """The text of a row and the spans to supervise; None for those: the template marks them itself."""
        if not self._as_chat(row):
            return row.text + row.completion, [Turn(len(row.text), *[len(row.text) + len(row.completion)] * 2)]
        if self._template is None:
            raise ConfigError(
                f"{where} is a conversation and the tokenizer has no chat template; set model.chat_template to a file"
            )
        messages = _messages(row)
        if self._supervise != "all" and marks_generation(self._template):
            return "", None
        try:
            text = self._render(messages, row)
        except Exception as error:  # a template raises what it likes
            raise ConfigError(f"{where}: the chat template refused this conversation: {error}") from None
        if self._supervise == "all":
            return text, [Turn(0, len(text), len(text))]
        turns = assistant_turns(lambda changed: self._render(changed, row), messages, text, where)
        return text, turns[-1:] if self._supervise == "last" else turns

    def _render(self, messages: Sequence[dict[str, Any]], row: Row) -> str:
        text = self._tokenizer.apply_chat_template(list(messages), tools=_tools(row), tokenize=False)
        assert isinstance(text, str)
        return text

    def _spans(self, row: Row, text: str, turns: Sequence[Turn], encoding: "Encoding") -> Encoded:
        ids = encoding.ids
        if not ids:
            return Encoded(row, np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.uint8))
        array = np.array(ids, dtype=np.int32)
        offsets = np.array(encoding.offsets, dtype=np.int64)
        mask, endless = supervised_tokens(array, offsets[:, 0], offsets[:, 1], turns, text, self._special)
        if not self._as_chat(row):
            opened, closed = self._opened(ids), self._closed(ids)
            if self._supervise == "all":
                mask[:] = 1
            mask = np.concatenate(
                [np.zeros(len(opened) - len(ids), np.uint8), mask, np.ones(len(closed) - len(ids), np.uint8)]
            )
            return Encoded(row, np.array(self._closed(opened), dtype=np.int32), mask)
        return self._started(row, array, mask, 0 if self._supervise == "all" else endless)

    def _started(self, row: Row, ids: np.ndarray, mask: np.ndarray, endless: int) -> Encoded:
        """A conversation gets the tokenizer's start token only where the template did not write it."""
        if self._prefix and not np.isin(self._prefix[0], ids):
            ids = np.concatenate([np.array(self._prefix, dtype=np.int32), ids])
            mask = np.concatenate([np.zeros(len(self._prefix), np.uint8), mask])
        return Encoded(row, ids, mask, endless)

    def _generation(self, row: Row, where: str) -> Encoded:
        """Through the stock call, which knows the parts that the template marks."""
        messages = _messages(row)
        try:
            with self._stock:
                out: Any = self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=_tools(row),
                    tokenize=True,
                    return_dict=True,
                    return_assistant_tokens_mask=True,
                )
        except Exception as error:  # a template raises what it likes
            raise ConfigError(f"{where}: the chat template refused this conversation: {error}") from None
        ids = np.array(out["input_ids"], dtype=np.int32)
        mask = np.array(out["assistant_masks"], dtype=np.uint8)
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
        runs = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
        if not runs and any(message["role"] == "assistant" and message["content"] for message in messages):
            raise ConfigError(f"{where}: the chat template marks no part of this conversation with {{% generation %}}")
        if self._supervise == "last" and runs:
            mask[: runs[-1][0]] = 0
            runs = runs[-1:]
        endless = self._close_runs(ids, mask, runs, ends_with_assistant=messages[-1]["role"] == "assistant")
        return self._started(row, ids, mask, endless)

    def _close_runs(
        self, ids: np.ndarray, mask: np.ndarray, runs: Sequence[tuple[int, int]], *, ends_with_assistant: bool
    ) -> int:
        """Adds end-of-turn tokens that a template wrote behind its mark; how many turns have none."""
        final = runs[-1][1] if runs else 0
        # What follows a turn in the middle may be the next turn's opening; what follows the last one cannot be.
        expected = int(ids[final]) if ends_with_assistant and final < len(ids) else None
        endless = 0
        for start, stop in runs:
            inside = next((int(token) for token in ids[start:stop][::-1] if not self._blank(int(token))), None)
            if inside in self._special:
                continue
            following = int(ids[stop]) if stop < len(ids) else None
            if following in self._special and (following == expected or not ends_with_assistant):
                mask[stop] = 1
            else:
                endless += 1
        return endless

    def _blank(self, token: int) -> bool:
        return token not in self._special and not self._backend.decode([token], skip_special_tokens=False).strip()

    def encode_all(self, source: Source, threads: int | None = None) -> Iterator[Encoded]:
        """Every row of a source, in order. `threads`: None for all permitted cores."""
        workers = threads or len(os.sched_getaffinity(0))
        pending: deque[Future[list[Encoded]]] = deque()
        with _one_thread_each(threads is not None), ThreadPoolExecutor(workers) as pool:
            try:
                for rows in _chunks(source.rows()):
                    where = [source.where(row.file, row.number) for row in rows]
                    pending.append(pool.submit(self.encode, rows, where))
                    if len(pending) > 2 * workers:
                        yield from pending.popleft().result()
                while pending:
                    yield from pending.popleft().result()
            finally:
                for future in pending:
                    future.cancel()


@contextlib.contextmanager
def _one_thread_each(wanted: bool) -> Iterator[None]:
    """Keeps the tokenizer library from spreading each call over all cores, so that our threads are all there are."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    if wanted:
        os.environ[name] = "false"
    try:
        yield
    finally:
        if wanted:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


def _chunks(rows: Iterator[Row]) -> Iterator[list[Row]]:
    chunk: list[Row] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += len(row.text) + len(row.completion) + sum(len(message["content"]) for message in row.messages)
        if len(chunk) >= _CHUNK_ROWS or size >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _messages(row: Row) -> tuple[dict[str, Any], ...]:
    if row.kind == "chat":
        return row.messages
    return ({"role": "user", "content": row.text}, {"role": "assistant", "content": row.completion})


def _tools(row: Row) -> list[Any] | None:
    return list(row.tools) if row.tools else None


def _template(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    if not tokenizer.chat_template:
        return None
    template = tokenizer.get_chat_template()
    assert isinstance(template, str)
    return template


def _affixes(backend: Any, tokenizer: "PreTrainedTokenizerBase") -> tuple[list[int], list[int]]:
    """What the tokenizer puts before a text, and what ends one: its own suffix or else the end token."""
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    extra = len(full) - len(bare)
    at = next((at for at in range(extra + 1) if full[at : at + len(bare)] == bare), 0)
    prefix, suffix = full[:at], full[at + len(bare) :]
    if not suffix and tokenizer.eos_token_id is not None:
        suffix = [int(tokenizer.eos_token_id)]
    return prefix, suffix
