"""Rows into token ids and a mask of what is supervised, exactly as the stock tokenizer and template give them.

Start token: one, at the front, when either the tokenizer or the template defines it. Text ends with the end token.
Tokenizing runs in the tokenizer library's own threads; no process is forked.
"""

import contextlib
import dataclasses
import datetime as dt
import hashlib
import json
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megatrain.data.chat import assistant_turns, one_of
from megatrain.data.encoded import Encoded, EncodedPiece, agreement
from megatrain.data.file_formats import Piece
from megatrain.data.messages import REASONING, Message
from megatrain.data.readers import Source
from megatrain.data.rows import Remark, Row
from megatrain.data.template_facts import Template, templates_of
from megatrain.data.turns import Turn, supervised_tokens
from megatrain.errors import ConfigError
from megatrain.system.hardware import usable_cpus

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

_CHUNK_ROWS = 256
_CHUNK_CHARACTERS = 1 << 21


_NOTHING = np.zeros(0, dtype=np.int32)


class Encoder:
    """One tokenizer with one rule of supervision. Safe to use from several threads."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        supervise: Literal["assistant", "last", "all"] = "assistant",
        form: str = "auto",
        date: dt.date | None = None,
    ) -> None:
        """`form`: what a row is, as the source's `format` says. `date`: the day that templates which ask for the
        present are given; None: today.

        Raises ConfigError for a tokenizer or a chat template that cannot be used.
        """
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
        self._spelled = one_of(tokenizer.convert_ids_to_tokens(sorted(self._special)))
        self._prefix, self._suffix = _affixes(self._backend, tokenizer)
        self._templates = templates_of(tokenizer, date or dt.date.today())
        self._stock = threading.Lock()

    def fingerprint(self) -> str:
        """SHA-256 of everything here that decides the tokens of a row and which of them are supervised."""
        import tokenizers
        import transformers

        parts = [
            self._state,
            {name: template.text for name, template in self._templates.items()},
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
        done: dict[int, Encoded] = {index: Encoded(row, _NOTHING, _mask(0), remarks=row.remarks)
                                    for index, row in enumerate(rows) if row.skip}  # fmt: skip
        rest = [index for index in range(len(rows)) if index not in done]
        texts = [index for index in rest if rows[index].kind == "text" and rows[index].piece is None]
        for index, encoding in zip(texts, self._plain([rows[index].text for index in texts]), strict=True):
            done[index] = self._text(rows[index], encoding)
        for index in rest:
            if (piece := rows[index].piece) is not None:
                done[index] = self._piece(rows[index], piece)
        rendered = [self._rendered(rows[index], where[index]) for index in rest if rows[index].kind != "text"]
        chats = [index for index in rest if rows[index].kind != "text"]
        ours = [(index, found) for index, found in zip(chats, rendered, strict=True) if found is not None]
        for index, found in zip(chats, rendered, strict=True):
            if found is None:
                done[index] = self._generation(rows[index], where[index])
        encodings = self._backend.encode_batch([found.text for _, found in ours], add_special_tokens=False)
        for (index, found), encoding in zip(ours, encodings, strict=True):
            done[index] = self._spans(rows[index], found, encoding)
        return [done[index] for index in range(len(rows))]

    def _plain(self, texts: Sequence[str]) -> "list[Encoding]":
        return self._backend.encode_batch_fast(list(texts), add_special_tokens=False) if texts else []

    def _text(self, row: Row, encoding: "Encoding") -> Encoded:
        ids = encoding.ids
        remarks = (*row.remarks, *self._no_end())
        if not ids:
            return Encoded(row, _NOTHING, _mask(0), remarks=row.remarks)
        array = np.array(self._closed(self._opened(ids)), dtype=np.int32)
        return Encoded(row, array, np.ones(len(array), dtype=np.uint8), remarks=remarks)

    def _no_end(self) -> tuple[Remark, ...]:
        return () if self._suffix else (("no end", ""),)

    def _piece(self, row: Row, piece: Piece, skip: int = 0) -> EncodedPiece:
        """A piece of a long text without start and end token; `skip` leaves out its first characters."""
        encoding = self._backend.encode(row.text[skip:], add_special_tokens=False)
        starts = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)[:, 0] + piece.start + skip
        ids = np.array(encoding.ids, dtype=np.int32)
        return EncodedPiece(row, ids, np.ones(len(ids), dtype=np.uint8), piece=piece, starts=starts)

    def _joined(self, rows: Iterator[Encoded]) -> Iterator[Encoded]:
        """Rows, with the pieces of long texts cut where each and the next are tokenized alike."""
        held: EncodedPiece | None = None
        for item in rows:
            if not isinstance(item, EncodedPiece):
                yield item
                continue
            piece = item.piece
            if held is None or not piece.overlap:
                item = self._beginning(item)
            else:
                cut = agreement(held, item)
                if cut is None:  # as in a long run of one character
                    cut, item = (len(held.ids), 0), self._piece(item.row, piece, piece.overlap)
                yield held.sliced(0, cut[0], goes_on=True)
                item = item.sliced(cut[1], len(item.ids), goes_on=False)
            held = item
            if piece.last:
                ids = self._closed(item.ids.tolist())
                yield Encoded(
                    item.row, np.array(ids, dtype=np.int32), np.ones(len(ids), np.uint8), remarks=item.remarks
                )
                held = None

    def _beginning(self, item: EncodedPiece) -> EncodedPiece:
        """The first piece of a text, with the start token."""
        ids = self._opened(item.ids.tolist())
        added = np.full(len(ids) - len(item.ids), -1, dtype=np.int64)
        return dataclasses.replace(
            item,
            ids=np.array(ids, dtype=np.int32),
            supervised=np.ones(len(ids), np.uint8),
            starts=np.concatenate([added, item.starts]),
            remarks=(*item.row.remarks, *self._no_end()),
        )

    def _opened(self, ids: list[int]) -> list[int]:
        """With the start token that the tokenizer adds, unless it is there already."""
        return [*self._prefix, *ids] if self._prefix and self._prefix[0] not in ids[: len(self._prefix)] else ids

    def _closed(self, ids: list[int]) -> list[int]:
        return ids if ids[-len(self._suffix) :] == self._suffix else [*ids, *self._suffix]

    def _as_chat(self, row: Row) -> bool:
        return row.kind == "chat" or (self._form == "auto" and bool(self._templates))

    def _template(self, row: Row) -> Template:
        """The template that the stock call takes for a row: of several, `tool_use` where it has tools."""
        return self._templates["tool_use" if row.tools and "tool_use" in self._templates else "default"]

    def _rendered(self, row: Row, where: str) -> "_Rendered | None":
        """The text of a row and what of it is supervised; None where the template marks that itself."""
        if not self._as_chat(row):
            start, stop = len(row.text), len(row.text) + len(row.completion)
            given = {
                "system": bool(row.system),
                "tools": bool(row.tools),
                "documents": "documents" in row.template_arguments,
                "chat_template_kwargs": bool(row.template_arguments.keys() - {"documents"}),
            }
            unused = tuple(("no template", name) for name, there in given.items() if there)
            return _Rendered(row.text + row.completion, [Turn(start, stop, stop)], remarks=(*unused, *self._no_end()))
        if not self._templates:
            raise ConfigError(
                f"{where} is a conversation and the tokenizer has no chat template; set model.chat_template to a file"
            )
        messages, wanted, muted = self._turns(row)
        facts = self._template(row).facts
        if self._supervise != "all" and facts.marks_generation:
            return None
        try:
            text = self._render(messages, row)
        except Exception as error:  # a template raises what it likes
            raise ConfigError(f"{where}: the chat template refused this conversation: {error}") from None

        def render(changed: Sequence[Message], *, prompt: bool = False) -> str:
            # Without the stock call's checks of the messages, which take as long as the template.
            return self._jinja(changed, row, prompt=prompt)[0]

        names = facts.names
        remarks = self._unrendered(row, messages, text)
        if self._supervise == "all":
            assistants = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
            left_out = list(assistant_turns(render, messages, text, muted, names, self._spelled, where).values())
            try:
                found = assistant_turns(render, messages, text, assistants, names, self._spelled, where)
            except ConfigError:
                found = {}  # only a row that is too long needs them
            return _Rendered(text, [Turn(0, len(text), len(text))], left_out, list(found.values()), remarks)
        turns = assistant_turns(render, messages, text, wanted, names, self._spelled, where)
        for index in wanted:
            if index not in turns:
                remarks = (*remarks, ("calls" if messages[index].get("tool_calls") else "no turn", ""))
        return _Rendered(text, list(turns.values()), remarks=remarks)

    def _turns(self, row: Row) -> tuple[tuple[Message, ...], list[int], list[int]]:
        """(messages, those that are learnt, those that are marked as not learnt)."""
        messages, marks = _messages(row)
        wanted = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if self._supervise == "last":
            wanted = wanted[-1:]
        muted = [index for index, mark in enumerate(marks) if mark is False and messages[index]["role"] == "assistant"]
        learnt = [index for index in wanted if index >= row.prompt_turns and marks[index] is not False]
        return messages, learnt, muted

    def _unrendered(self, row: Row, messages: Sequence[Message], text: str) -> tuple[Remark, ...]:
        """What of a conversation is not in its rendering."""
        names = self._template(row).facts.names
        found: set[Remark] = set()
        for message in messages:
            reasoning = message.get("reasoning_content")
            for key, value in message.items():
                known = key in ("role", "content", "tool_calls", *REASONING)
                if value and not known and key not in names:
                    found.add(("message key", key))
            if isinstance(reasoning, str) and reasoning.strip() not in text:
                used = any(name in names for name in REASONING[:2])
                found.add(("reasoning", "of earlier turns" if used else "in a field of its own"))
            if message["role"] == "assistant" and message.get("tool_calls") and "tool_calls" not in names:
                found.add(("calls", ""))
        if row.tools and "tools" not in names:
            found.add(("tools", ""))
        found |= {("argument", key) for key in row.template_arguments if key not in names}
        return tuple(sorted(found))

    def _render(self, messages: Sequence[Message], row: Row, *, prompt: bool = False) -> str:
        text = self._tokenizer.apply_chat_template(
            list(messages),
            tools=_tools(row),
            chat_template=self._template(row).text,
            tokenize=False,
            add_generation_prompt=prompt,
            **row.template_arguments,
        )
        assert isinstance(text, str)
        return text

    def _render_marked(self, messages: Sequence[Message], row: Row) -> tuple[str, list[tuple[int, int]]]:
        """The text, and where in it are the parts that the template marks with `{% generation %}`.

        The stock call returns a mask of tokens, which is wrong where a part ends with the first token or with a blank
        that the tokenizer drops (https://github.com/huggingface/transformers/issues/47325).
        """
        with self._stock:
            return self._jinja(messages, row, marked=True)

    def _jinja(
        self, messages: Sequence[Message], row: Row, *, prompt: bool = False, marked: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """What the stock call renders, by the function that it uses, and the parts that the template marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        arguments: dict[str, Any] = {**self._tokenizer.special_tokens_map, **row.template_arguments}
        rendered: Any = render_jinja_template(
            conversations=[list(messages)],
            tools=_tools(row),
            chat_template=self._template(row).text,
            return_assistant_tokens_mask=marked,
            add_generation_prompt=prompt,
            **arguments,
        )
        return rendered[0][0], rendered[1][0] if marked else []

    def _spans(self, row: Row, found: "_Rendered", encoding: "Encoding") -> Encoded:
        ids = encoding.ids
        remarks = (*row.remarks, *dict.fromkeys(found.remarks))
        if not ids:
            return Encoded(row, _NOTHING, _mask(0), remarks=remarks)
        array = np.array(ids, dtype=np.int32)
        offsets = np.array(encoding.offsets, dtype=np.int64)
        places = array, offsets[:, 0], offsets[:, 1]
        mask, stops, endless = supervised_tokens(*places, found.turns, found.text, self._special)
        if not self._as_chat(row):
            opened, closed = self._opened(ids), self._closed(ids)
            if self._supervise == "all":
                mask[:] = 1
            mask = np.concatenate([_mask(len(opened) - len(ids)), mask, np.ones(len(closed) - len(ids), np.uint8)])
            return Encoded(row, np.array(self._closed(opened), dtype=np.int32), mask, remarks=remarks)
        if self._supervise == "all":
            left_out, _, _ = supervised_tokens(*places, found.left_out, found.text, self._special)
            mask[left_out == 1] = 0
            _, stops, endless = supervised_tokens(*places, found.ends, found.text, self._special)
        return self._started(Encoded(row, array, mask, stops, endless, remarks))

    def _started(self, encoded: Encoded) -> Encoded:
        """A conversation gets the tokenizer's start token only where the template did not write it: not before
        everything else. Elsewhere it may be the end of a turn, or a user's words."""
        first = next((token for token in encoded.ids.tolist() if not self._blank(token)), None)
        if not self._prefix or self._prefix[0] == first:
            return encoded
        return dataclasses.replace(
            encoded,
            ids=np.concatenate([np.array(self._prefix, dtype=np.int32), encoded.ids]),
            supervised=np.concatenate([_mask(len(self._prefix)), encoded.supervised]),
            turn_ends=encoded.turn_ends + len(self._prefix),
        )

    def _generation(self, row: Row, where: str) -> Encoded:
        """Through the stock call, which knows the parts that the template marks."""
        messages, wanted, _ = self._turns(row)
        assistants = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        try:
            text, marked = self._render_marked(messages, row)
        except Exception as error:  # a template raises what it likes
            raise ConfigError(f"{where}: the chat template refused this conversation: {error}") from None
        # As a batch, since that lets other threads run meanwhile, which `encode` does not.
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=False)
        ids = np.array(encoding.ids, dtype=np.int32)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        spans = [Turn(start, stop, stop) for start, stop in marked if stop > start]
        mask, _, _ = supervised_tokens(ids, offsets[:, 0], offsets[:, 1], spans, text, self._special)
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
        runs = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
        if not runs and any(messages[index]["content"] for index in wanted):
            raise ConfigError(f"{where}: the chat template marks no part of this conversation with {{% generation %}}")
        remarks = self._unrendered(row, messages, text)
        silent = [index for index in assistants if not _calls_in(messages[index], text)]
        learnt = [index for index in wanted if index not in silent]
        if silent:
            remarks = tuple(sorted({*remarks, ("calls", "")}))
        if not assistants or assistants[-1] == len(messages) - 1:
            ending = int(ids[runs[-1][1]]) if runs and runs[-1][1] < len(ids) else None
        else:
            ending = self._ending(messages[: assistants[-1] + 1], row)
        endless, stops = self._close_runs(ids, mask, runs, ending)
        # A turn without content of which no call is rendered says nothing that could be marked.
        spoken = [index for index in assistants if messages[index]["content"] or index not in silent]
        if self._supervise == "last" and learnt == spoken[-1:] and runs:
            mask[: runs[-1][0]] = 0
        elif learnt != spoken:
            if len(runs) != len(spoken):
                raise ConfigError(
                    f"{where}: cannot tell which of the {len(runs)} parts that the chat template marks with "
                    f"{{% generation %}} are the {len(learnt)} of {len(assistants)} assistant turns to learn; mark all "
                    "turns alike, or use a template that marks each turn once"
                )
            for index, (start, _), stop in zip(spoken, runs, stops.tolist(), strict=True):
                if index not in learnt:
                    mask[start:stop] = 0
        return self._started(Encoded(row, ids, mask, stops, endless, (*row.remarks, *remarks)))

    def _ending(self, messages: Sequence[Message], row: Row) -> int | None:
        """The token that the template writes after the mark of the turn that ends a conversation."""
        try:
            text, marked = self._render_marked(messages, row)
        except Exception:  # a template raises what it likes
            return None
        after = text[marked[-1][1] :] if marked else ""
        ids = self._backend.encode(after, add_special_tokens=False).ids
        return int(ids[0]) if ids else None

    def _close_runs(
        self, ids: np.ndarray, mask: np.ndarray, runs: Sequence[tuple[int, int]], ending: int | None
    ) -> tuple[int, np.ndarray]:
        """Adds end-of-turn tokens that a template wrote after its mark: `ending`, which follows the turn that ends a
        conversation, since what follows any other may be the next turn's opening. Returns how many turns have none,
        and the token after the end of each."""
        endless, stops = 0, []
        for start, stop in runs:
            stops.append(stop)
            inside = next((int(token) for token in ids[start:stop][::-1] if not self._blank(int(token))), None)
            if inside in self._special:
                continue
            following = int(ids[stop]) if stop < len(ids) else None
            if following in self._special and following == ending:
                mask[stop] = 1
                stops[-1] = stop + 1
            else:
                endless += 1
        return endless, np.array(stops, dtype=np.int64)

    def _blank(self, token: int) -> bool:
        return token not in self._special and not self._backend.decode([token], skip_special_tokens=False).strip()

    def encode_all(self, source: Source, threads: int | None = None) -> Iterator[Encoded]:
        """Every row of a source, in order; a long text in parts, all but the last of which go on.

        `threads`: None for as many as this process may use processors.
        """
        yield from self._joined(self._in_order(source, threads))

    def _in_order(self, source: Source, threads: int | None) -> Iterator[Encoded]:
        workers = threads or usable_cpus()
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Rendered:
    """A row's text, and where in it the supervised parts are."""

    text: str
    turns: list[Turn]
    """What is supervised."""
    left_out: list[Turn] = dataclasses.field(default_factory=list)
    """Of that, what is not."""
    ends: list[Turn] = dataclasses.field(default_factory=list)
    """The assistant's turns, where everything is supervised."""
    remarks: tuple[Remark, ...] = ()


def _mask(count: int) -> np.ndarray:
    return np.zeros(count, dtype=np.uint8)


def _calls_in(message: Message, text: str) -> bool:
    return all(call["function"]["name"] in text for call in message.get("tool_calls") or ())


def _messages(row: Row) -> tuple[tuple[Message, ...], tuple[bool | None, ...]]:
    """A row as messages, with their marks."""
    if row.kind == "chat":
        return row.messages, (*row.marks, *[None] * (len(row.messages) - len(row.marks)))
    system: tuple[Message, ...] = ({"role": "system", "content": row.system},) if row.system else ()
    turns = ({"role": "user", "content": row.text}, {"role": "assistant", "content": row.completion})
    return (*system, *turns), (None,) * (len(system) + 2)


def _tools(row: Row) -> list[Any] | None:
    return list(row.tools) if row.tools else None


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
