"""Which tokens of a conversation are the assistant's, found in the template's own rendering.

The text is what the stock template call renders. Where in it an assistant's content lies is learnt by rendering once
more with a marker before and behind each content: if taking the markers out again gives the same text, they sit where
the content begins and ends. No prefix of a conversation is ever rendered for that, since a template may write a prefix
otherwise than the beginning of the whole (one that leaves out earlier reasoning, for instance). Where a template marks
the assistant's part itself (`{% generation %}`), its word is taken.

The end of a turn is what the template writes behind every assistant content, the last one included, through the first
special token: `<|im_end|>` but not the line break after it.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megatrain.errors import ConfigError

Message = dict[str, Any]
Render = Callable[[Sequence[Message]], str]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """Character positions of one assistant turn in the rendered text."""

    start: int
    """Where its content begins."""
    end: int
    """Where its content ends."""
    closing: int
    """Where what the template writes behind every content ends; at least `end`."""


def marks_generation(template: str) -> bool:
    """Whether a template says itself which part is the assistant's."""
    return _GENERATION.search(template) is not None


def assistant_turns(render: Render, messages: Sequence[Message], text: str, where: str) -> list[Turn]:
    """The assistant's turns in `text`, which is `render(messages)`. Raises ConfigError naming the row at `where`."""
    indices = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    for index in indices:
        extra = [key for key, value in messages[index].items() if key not in ("role", "content", "name") and value]
        if extra:
            raise ConfigError(
                f"{where}: message {index} has {', '.join(extra)} beside its content, and the chat template does not "
                "mark what the assistant says; use a template with {% generation %} (model.chat_template)"
            )
    if not indices:
        return []
    markers = _Markers(messages, text)
    spans = _mark_all(render, messages, indices, text, markers, strip=False)
    if spans is None and any(messages[index]["content"] != messages[index]["content"].strip() for index in indices):
        spans = _mark_all(render, messages, indices, text, markers, strip=True)
    if spans is None:
        spans = [_mark_one(render, messages, index, text, markers, where) for index in indices]
    closing = _closing(render, messages, indices[-1], text, spans[-1][1], markers)
    return with_closing(text, spans, closing)


def with_closing(text: str, spans: Sequence[tuple[int, int]], closing: str) -> list[Turn]:
    """Extends (start, end) of contents by as much of `closing` as follows each."""
    return [Turn(start, end, end + _shared(text[end:], closing)) for start, end in spans]


def _shared(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginning."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))


class _Markers:
    """Words that occur in none of a conversation's texts. Letters and digits, so that no template changes them."""

    def __init__(self, messages: Sequence[Message], text: str) -> None:
        known = text + "\0".join(str(message["content"]) for message in messages)
        salt = 0
        while f"Xq{salt}zK" in known:
            salt += 1
        self._stem = f"Xq{salt}zK"

    def __getitem__(self, index: int) -> str:
        return f"{self._stem}{index:06d}"

    def remove(self, text: str) -> str:
        return re.sub(f"{self._stem}[0-9]{{6}}", "", text)


def _attempt(render: Render, messages: Sequence[Message]) -> str | None:
    """A template may refuse what a marker does to a content; then the marker sits in a wrong place."""
    try:
        return render(messages)
    except Exception:
        return None


def _replaced(messages: Sequence[Message], index: int, content: str) -> list[Message]:
    changed = list(messages)
    changed[index] = {**messages[index], "content": content}
    return changed


def _mark_all(
    render: Render, messages: Sequence[Message], indices: Sequence[int], text: str, markers: _Markers, *, strip: bool
) -> list[tuple[int, int]] | None:
    """All contents at once; None when a marker changed more than its place.

    `strip`: markers stand inside surrounding blanks, for templates that take these away.
    """
    marked = list(messages)
    for count, index in enumerate(indices):
        content = messages[index]["content"]
        lead = len(content) - len(content.lstrip()) if strip else 0
        tail = max(lead, len(content.rstrip()) if strip else len(content))
        marked[index] = {
            **messages[index],
            "content": content[:lead]
            + markers[2 * count]
            + content[lead:tail]
            + markers[2 * count + 1]
            + content[tail:],
        }
    out = _attempt(render, marked)
    if out is None or markers.remove(out) != text:
        return None
    width = len(markers[0])
    positions: list[int] = []
    for count in range(2 * len(indices)):
        if out.count(markers[count]) != 1:
            return None
        positions.append(out.index(markers[count]) - count * width)
    if positions != sorted(positions):
        return None
    return list(zip(positions[::2], positions[1::2], strict=True))


def _mark_one(
    render: Render, messages: Sequence[Message], index: int, text: str, markers: _Markers, where: str
) -> tuple[int, int]:
    content = messages[index]["content"]

    def position(offset: int) -> int | None:
        """Where in `text` the character at `offset` of the content stands."""
        out = _attempt(render, _replaced(messages, index, content[:offset] + markers[0] + content[offset:]))
        if out is None or out.count(markers[0]) != 1 or out.replace(markers[0], "") != text:
            return None
        return out.index(markers[0])

    words = [match.start() for match in re.finditer(r"\S+", content)]
    ends = (len(content), len(content.rstrip()))
    starts = (0, words[0]) if words else (0,)
    end = next((at for offset in ends if (at := position(offset)) is not None), None)
    start = next((at for offset in starts if (at := position(offset)) is not None), None)
    if words and end is not None and start is None and position(words[-1]) is not None:
        # The template treats the beginning (a reasoning block) in a way of its own: the first word that stays in place
        # tells where the rest is, and what stands before it in content and text alike belongs to the content too.
        low, high = 0, len(words) - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if position(words[middle]) is not None else (middle, high)
        anchor = position(words[high])
        assert anchor is not None
        start = _walk_back(content[: words[high]], text, anchor)
    if start is None or end is None:
        raise ConfigError(
            f"{where}: cannot tell where the content of message {index} lies in what the chat template renders; use a "
            "template with {% generation %} (model.chat_template), or supervise: all"
        )
    return start, end


def _walk_back(before: str, text: str, anchor: int) -> int:
    """How far the end of `before` and the text that ends at `anchor` agree, blanks aside."""
    start = at = anchor
    for char in reversed(before):
        if char.isspace():
            continue
        while at > 0 and text[at - 1].isspace():
            at -= 1
        if at == 0 or text[at - 1] != char:
            break
        at -= 1
        start = at
    return start


def _closing(render: Render, messages: Sequence[Message], last: int, text: str, end: int, markers: _Markers) -> str:
    """What the template writes behind the assistant content that ends a conversation."""
    if last == len(messages) - 1:
        return text[end:]
    content = messages[last]["content"].rstrip()
    out = _attempt(render, _replaced(messages[: last + 1], last, content + markers[0]))
    if out is None or out.count(markers[0]) != 1:
        return ""
    return out[out.index(markers[0]) + len(markers[0]) :]


def supervised_tokens(
    ids: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    turns: Sequence[Turn],
    text: str,
    special: frozenset[int],
) -> tuple[np.ndarray, int]:
    """The mask over tokens, and how many turns end without an end-of-turn token.

    ids: (tokens,) int32
    starts, ends: (tokens,) int64, the characters of `text` that each token covers
    """
    mask = np.zeros(len(ids), dtype=np.uint8)
    endless = 0
    for turn in turns:
        # A token belongs to the content when it covers a part of it. Blank tokens may cover nothing (their offsets are
        # trimmed), so only the two borders are searched and what lies between is taken whole.
        first = int(np.searchsorted(ends, turn.start, side="right"))
        stop = max(first, int(np.searchsorted(starts, turn.end, side="left")))
        border = int(np.searchsorted(starts, turn.closing, side="left"))
        closers = [at for at in range(stop, border) if int(ids[at]) in special]
        if closers:
            stop = closers[0] + 1
        elif closing := text[turn.end : turn.closing].rstrip():
            # Written with ordinary tokens, as when a base model's tokenizer lacks the template's special ones.
            stop = int(np.searchsorted(starts, turn.end + len(closing), side="left"))
        else:
            endless += 1
        mask[first:stop] = 1
    return mask, endless
