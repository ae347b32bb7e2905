"""Which parts of a rendered conversation are the assistant's.

The text is what the stock template call renders. Where in it an assistant's content is follows from rendering again
with markers at the beginning and end of every content: if taking the markers out gives the same text, they stand where
the content begins and ends. Prefixes of a conversation are not rendered for that, since a template may write a prefix
otherwise than the beginning of the whole (one that leaves out earlier reasoning, for instance). All turns are marked in
one rendering, so that the cost grows with the length of a conversation and not with its square.

A turn that says more than its content (tool calls, reasoning) is found by rendering once more with a marker in place of
all that it says: what the two renderings do not share is the turn.

Where a template marks the assistant's part itself (`{% generation %}`), those marks are used; see `tokenization`.

The end of a turn is what the template writes after every assistant content, the last one included, through the first
special token: `<|im_end|>` but not the line break after it.
"""

import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from megatrain.data.messages import REASONING, Message
from megatrain.data.turns import Turn
from megatrain.errors import ConfigError

Render = Callable[..., str]
"""(messages, *, prompt=False) -> text; `prompt`: with the template's generation prompt at the end."""


def assistant_turns(
    render: Render,
    messages: Sequence[Message],
    text: str,
    wanted: Sequence[int],
    reads: Collection[str],
    specials: re.Pattern[str],
    where: str,
) -> dict[int, Turn]:
    """The turns of messages `wanted` in `text`, which is `render(messages)`; a turn that is not rendered has no entry.

    reads: names that the template reads. Keys of a message beyond them change nothing.
    specials: the tokenizer's special tokens, as they are spelled: what `one_of` makes of them
    Raises ConfigError naming the row at `where`.
    """
    if not wanted:
        return {}
    finder = _Finder(render, messages, text, where)
    more = [index for index in wanted if says_more(messages[index], reads)]
    spans = finder.whole_turns(more)
    spans |= finder.contents([index for index in wanted if index not in set(more)])
    last = max((index for index, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    closing = finder.closing(last, spans.get(last))
    return {
        index: Turn(start, end, finder.closed(index, end, closing, specials))
        for index, (start, end) in sorted(spans.items())
    }


def one_of(words: Collection[str]) -> re.Pattern[str]:
    """Matches any of the words, of several that fit the longest."""
    return re.compile("|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)) or "(?!)")


def says_more(message: Message, reads: Collection[str]) -> bool:
    """Whether a template that reads these names may render more of a message than its content."""
    return any(
        value and (key in reads or key == "tool_calls")
        for key, value in message.items()
        if key not in ("role", "content", "name")
    )


def _shared(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginning."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))


class _Finder:
    """Looks for the turns of one conversation in its rendering."""

    def __init__(self, render: Render, messages: Sequence[Message], text: str, where: str) -> None:
        self._render = render
        self._messages = messages
        self._text = text
        self._where = where
        # Words that occur in none of the texts. Letters and digits, so that no template changes them.
        known = text + "\0".join(str(message) for message in messages)
        salt = 0
        while f"Xq{salt}zK" in known:
            salt += 1
        self._stem = f"Xq{salt}zK"

    def _marker(self, index: int, end: bool = False) -> str:
        return f"{self._stem}{2 * index + end:07d}"

    def _unmarked(self, text: str) -> str:
        return re.sub(f"{self._stem}[0-9]{{7}}", "", text)

    def _attempt(self, messages: Sequence[Message]) -> str | None:
        """A template may refuse what a marker makes of a message; then the marker is in a wrong place."""
        try:
            return self._render(messages)
        except Exception:
            return None

    def _with(self, changes: Mapping[int, Message]) -> list[Message]:
        return [changes.get(index, message) for index, message in enumerate(self._messages)]

    def _lost(self, index: int) -> ConfigError:
        keys = [key for key, value in self._messages[index].items() if key not in ("role", "content") and value]
        what = (
            f"the turn of message {index}, which has {', '.join(keys)}," if keys else f"the content of message {index}"
        )
        return ConfigError(
            f"{self._where}: cannot tell where {what} is in what the chat template renders; use a template with "
            "{% generation %} (model.chat_template), mark the turn as not learnt (train: false), or write "
            "supervise: all"
        )

    # Contents

    def contents(self, indices: Sequence[int]) -> dict[int, tuple[int, int]]:
        """(start, end) of the contents of these messages. An empty one that is not rendered has no entry."""
        spans: dict[int, tuple[int, int]] = {}
        filled = [index for index in indices if self._content(index).strip()]
        for index in indices:
            if not self._content(index).strip() and (at := self._alone(index, 0)) is not None:
                spans[index] = (at, at)
        marked = None
        if filled:
            marked = self._marked(filled, trimmed=False) or self._marked(filled, trimmed=True)
        if marked is not None:
            spans |= marked
        elif filled:
            ends = self._ends(filled)
            starts = self._starts(filled, ends)
            spans |= {index: (starts[index], end) for index, end in self._with_blanks(ends).items()}
        return spans

    def _content(self, index: int) -> str:
        content: str = self._messages[index]["content"]
        return content

    def _marked(self, indices: Sequence[int], *, trimmed: bool) -> dict[int, tuple[int, int]] | None:
        """The spans of contents, with or without the blanks at their ends, if all of them are written so: what most
        templates do, in one rendering. None where it takes a closer look."""
        changes, blanks = {}, {}
        for index in indices:
            content = self._content(index)
            body = content.strip() if trimmed else content
            lead, _, trail = content.partition(body)
            marked = f"{lead}{self._marker(index)}{body}{self._marker(index, end=True)}{trail}"
            changes[index], blanks[index] = {**self._messages[index], "content": marked}, (lead, trail)
        out = self._attempt(self._with(changes))
        if out is None or out.count(self._stem) != 2 * len(indices) or self._unmarked(out) != self._text:
            return None
        spans, position, width = {}, 0, len(self._marker(0))
        for count, index in enumerate(indices):
            start, end = out.find(self._marker(index), position), out.find(self._marker(index, end=True), position)
            if start < 0 or end < start:
                return None
            position, (lead, trail) = end, blanks[index]
            start, end = start - 2 * count * width, end - (2 * count + 1) * width
            if (lead and self._text.endswith(lead, 0, start)) or (trail and self._text.startswith(trail, end)):
                return None  # the template may keep the blanks of one end
            spans[index] = start, end
        return spans

    def _alone(self, index: int, offset: int) -> int | None:
        """Where in the text the character at `offset` of one content is."""
        content, marker = self._content(index), self._marker(index)
        out = self._attempt(
            self._with({index: {**self._messages[index], "content": content[:offset] + marker + content[offset:]}})
        )
        if out is None or out.count(marker) != 1 or out.replace(marker, "") != self._text:
            return None
        return out.index(marker)

    def _ends(self, indices: Sequence[int]) -> dict[int, int]:
        """Where the last word of each content ends."""
        changes = {}
        for index in indices:
            content = self._content(index)
            at = len(content.rstrip())
            marked = content[:at] + self._marker(index, end=True) + content[at:]
            changes[index] = {**self._messages[index], "content": marked}
        out = self._attempt(self._with(changes))
        if out is not None and self._unmarked(out) == self._text:
            width = len(self._marker(0))
            found = [out.find(self._marker(index, end=True)) for index in indices]
            if min(found) >= 0 and found == sorted(found) and out.count(self._stem) == len(indices):
                return {index: at - count * width for count, (index, at) in enumerate(zip(indices, found, strict=True))}
        ends = {}
        for index in indices:
            place = self._alone(index, len(self._content(index).rstrip()))
            if place is None:
                raise self._lost(index)
            ends[index] = place
        return ends

    def _with_blanks(self, ends: Mapping[int, int]) -> Mapping[int, int]:
        """The ends with the blanks that contents end with, where the template keeps them."""
        blanks = {index: self._content(index)[len(self._content(index).rstrip()) :] for index in ends}
        if not any(blanks.values()):
            return ends
        changes = {
            index: {**self._messages[index], "content": self._content(index) + self._marker(index, end=True)}
            for index in ends
        }
        out = self._attempt(self._with(changes))
        longer = {index: end + len(blanks[index]) for index, end in ends.items()}
        if out is None or self._unmarked(out) != self._text:
            return ends
        width = len(self._marker(0))
        found = [out.find(self._marker(index, end=True)) - count * width for count, index in enumerate(sorted(ends))]
        return longer if found == [longer[index] for index in sorted(ends)] else ends

    def _starts(self, indices: Sequence[int], ends: Mapping[int, int]) -> dict[int, int]:
        """Where each content begins."""
        starts = self._placed(dict.fromkeys(indices, 0), ends)
        words = {
            index: [match.start() for match in re.finditer(r"\S+", self._content(index))]
            for index in indices
            if index not in starts
        }
        starts |= self._placed({index: found[0] for index, found in words.items()}, ends)
        # Where the template treats the beginning (a reasoning block) in a way of its own, the first word that stays in
        # place tells where the rest is; what precedes it in content and text alike belongs to the content too.
        low = {index: 0 for index in words if index not in starts}
        high = {index: len(words[index]) - 1 for index in low}
        anchors = self._placed({index: words[index][-1] for index in low}, ends)
        for index in low:
            if index not in anchors:
                raise self._lost(index)
        while open_ones := [index for index in low if high[index] - low[index] > 1]:
            middle = {index: (low[index] + high[index]) // 2 for index in open_ones}
            found_now = self._placed({index: words[index][at] for index, at in middle.items()}, ends)
            for index, at in middle.items():
                if index in found_now:
                    high[index], anchors[index] = at, found_now[index]
                else:
                    low[index] = at
        for index, anchor in anchors.items():
            starts[index] = _walk_back(self._content(index)[: words[index][high[index]]], self._text, anchor)
        return starts

    def _placed(self, offsets: Mapping[int, int], ends: Mapping[int, int]) -> dict[int, int]:
        """Where in the text the characters at these offsets of contents are; those that a marker moves are left out.

        The ends of all contents are marked as well: they part the text, so that one marker in a wrong place does not
        spoil the others.
        """
        if not offsets:
            return {}
        changes = {}
        for index in ends:
            content, at = self._content(index), offsets.get(index)
            stop = len(content.rstrip())
            marked = content[:stop] + self._marker(index, end=True) + content[stop:]
            if at is not None:
                marked = marked[:at] + self._marker(index) + marked[at:]
            changes[index] = {**self._messages[index], "content": marked}
        out = self._attempt(self._with(changes))
        if out is None:
            alone = {index: self._alone(index, offset) for index, offset in offsets.items()}
            return {index: at for index, at in alone.items() if at is not None}
        placed = {}
        position = before = 0
        for index in sorted(ends):
            found = out.find(self._marker(index, end=True), position)
            if found < 0:
                break
            segment = out[position:found]
            if index in offsets:
                marker = self._marker(index)
                if segment.count(marker) == 1 and segment.replace(marker, "") == self._text[before : ends[index]]:
                    placed[index] = before + segment.index(marker)
            position, before = found + len(self._marker(0)), ends[index]
        return placed

    # Whole turns

    def whole_turns(self, indices: Sequence[int]) -> dict[int, tuple[int, int]]:
        """(start, end) of all that these messages say. One of which nothing is rendered has no entry, and neither has
        one whose tool calls are not."""
        spans: dict[int, tuple[int, int]] = {}
        calls = [index for index in indices if self._messages[index].get("tool_calls")]
        # Apart, since templates that check the order of roles refuse another turn in place of a call.
        for group in ([index for index in indices if index not in set(calls)], calls):
            if not group:
                continue
            found = self._exchanged(group) or self._after_anchors(group)
            for index in group:
                one = {} if index in found else self._exchanged([index])
                if one is None:
                    raise self._lost(index)
                found |= one
            spans |= found
        return {index: span for index, span in spans.items() if self._rendered(index, *span)}

    def _rendered(self, index: int, start: int, end: int) -> bool:
        said = self._text[start:end]
        calls = self._messages[index].get("tool_calls") or ()
        return bool(said.strip()) and all(call["function"]["name"] in said for call in calls)

    def _exchanged(self, indices: Sequence[int]) -> dict[int, tuple[int, int]] | None:
        """Found with markers in place of these turns, in one rendering; None where the rest of the text changes."""
        plain, reasoned = {}, {}
        for index in indices:
            plain[index] = {"role": "assistant", "content": self._marker(index)}
            reasoned[index] = plain[index]
            if any(self._messages[index].get(key) for key in REASONING):
                first = self._marker(index)
                reasoned[index] = {"role": "assistant", "content": self._marker(index, end=True)} | dict.fromkeys(
                    REASONING[:2], first
                )
        spans = self._gaps(self._attempt(self._with(plain)), indices)
        if spans is None and reasoned != plain:
            out = self._attempt(self._with(reasoned))
            spans = self._gaps(out, indices)
            if out is not None and spans is not None:
                shown = {index: span for index, span in spans.items()
                         if reasoned[index] != plain[index] and self._marker(index) in out}  # fmt: skip
                spans |= self._after_prompt(shown)
        return spans

    def _gaps(self, out: str | None, indices: Sequence[int]) -> dict[int, tuple[int, int]] | None:
        """The text between the parts that it shares with `out`, in which markers stand for the turns."""
        if out is None:
            return None
        parts: list[str] = []
        position = 0
        for index in indices:
            first, second = out.find(self._marker(index), position), out.find(self._marker(index, end=True), position)
            if first < 0 and second < 0:
                return None
            begin = min(at for at in (first, second) if at >= 0)
            parts.append(out[position:begin])
            position = max(first, second) + len(self._marker(0))
        parts.append(out[position:])
        if self._stem in "".join(parts) or not self._text.startswith(parts[0]) or not self._text.endswith(parts[-1]):
            return None
        first, last = len(parts[0]), len(self._text) - len(parts[-1])
        places = _places(self._text[:last], parts[1:-1], first)
        if last < first or places is None:
            return None
        starts = [first, *(at + len(part) for at, part in zip(places, parts[1:-1], strict=True))]
        return dict(zip(indices, zip(starts, [*places, last], strict=True), strict=True))

    def _after_prompt(self, spans: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
        """With what opens the reasoning, where that follows the generation prompt: the model writes it itself."""
        opening = self._prompt
        places = self._anchors(spans) if opening and spans else {}
        moved = {}
        for index, (start, end) in spans.items():
            found = self._text.find(opening, places.get(index, len(self._text))) + len(opening)
            # Not found, it is -1.
            moved[index] = (found if len(opening) <= found <= start else start, end)
        return moved

    def _anchors(self, indices: Collection[int]) -> dict[int, int]:
        """Where in the text the content of the message before each of these ends, for those where that can be told."""
        before = sorted({index - 1 for index in indices if index})
        filled = [at for at in before if self._content(at).strip()]
        # An empty result of a tool is usually written like any other; an answer without content is not.
        empty = [at for at in before if at not in set(filled) and self._messages[at]["role"] != "assistant"]
        for anchors in (sorted([*filled, *empty]), filled):
            out = self._attempt(self._with({at: self._anchored(at) for at in anchors}))
            if out is not None and self._unmarked(out) == self._text:
                break
        else:
            return {}
        width = len(self._marker(0))
        found = {}
        for count, at in enumerate(anchors):
            if out.count(self._marker(at)) == 1:
                found[at + 1] = out.index(self._marker(at)) - count * width
        return {index: found[index] for index in indices if index in found}

    def _anchored(self, index: int) -> Message:
        """The message with a marker where its content ends."""
        content = self._content(index)
        at = len(content.rstrip())
        return {**self._messages[index], "content": content[:at] + self._marker(index) + content[at:]}

    @functools.cached_property
    def _prompt(self) -> str:
        """The template's generation prompt; empty where it has none."""
        first = next((at for at, message in enumerate(self._messages) if message["role"] == "assistant"), 0)
        try:
            before = self._render(self._messages[:first])
            prompt = self._render(self._messages[:first], prompt=True)
        except Exception:
            return ""
        return prompt[len(before) :] if prompt.startswith(before) else ""

    def _after_anchors(self, indices: Sequence[int]) -> dict[int, tuple[int, int]]:
        """For templates that check the order of roles: between the generation prompt after the message before a turn
        and the end of the turn. Both are rendered in a short conversation that ends with them; what follows the content
        of the message before has to be the same in the text. Turns that cannot be found so have no entry."""
        spans = {}
        for index, start in self._anchors(indices).items():
            for opening, turn in self._turns_after(index):
                if self._text.startswith(opening + turn, start):
                    spans[index] = (start + len(opening), start + len(opening) + len(turn.rstrip()))
                    break
        return spans

    def _turns_after(self, index: int) -> Iterator[tuple[str, str]]:
        """What may stand between the content of the message before a turn and the turn, and the turn with its end."""
        anchor, plain = self._marker(index - 1), self._marker(index)
        message = self._messages[index]
        silent = {key: value for key, value in message.items() if key not in REASONING}
        for before in self._beginnings(index):
            before = [*before[:-1], self._anchored(index - 1)]
            try:
                bare, opening = (self._render(before, prompt=prompt).partition(anchor)[2] for prompt in (False, True))
            except Exception:
                continue
            if bare == opening:  # the template has no generation prompt: what stands before a content is none of it
                out = self._attempt([*before, {"role": "assistant", "content": plain}]) or ""
                header = out.partition(anchor)[2].partition(plain)[0]
            else:
                header = opening
            for turn in (message, silent):  # reasoning may be left out of a turn that others follow
                whole = (self._attempt([*before, turn]) or "").partition(anchor)[2]
                for before_turn in (header, opening):
                    if before_turn and whole.startswith(before_turn):
                        yield before_turn, whole[len(before_turn) :]
                        break

    def _beginnings(self, index: int) -> Iterator[list[Message]]:
        """Conversations before a turn: the last question with the messages from the exchange before it on, and all."""
        asked = max((at for at in range(index) if self._messages[at]["role"] == "user"), default=0)
        near = max(asked + 1, index - 2)
        yield [*self._messages[asked : asked + 1], *self._messages[near:index]]
        yield list(self._messages[:index])

    def closing(self, last: int, span: tuple[int, int] | None) -> str:
        """What the template writes after the assistant turn that ends a conversation."""
        if span is not None and last == len(self._messages) - 1:
            return self._text[span[1] :]
        content, marker = self._content(last).rstrip(), self._marker(last)
        message: Message = {key: self._messages[last][key] for key in ("role", "name") if key in self._messages[last]}
        out = self._attempt([*self._messages[:last], {**message, "content": content + marker}])
        if out is None or out.count(marker) != 1:
            return ""
        return out[out.index(marker) + len(marker) :]

    def closed(self, index: int, end: int, closing: str, specials: re.Pattern[str]) -> int:
        """Where what closes the turn of a message, which ends at `end`, ends. `closing` closes the last turn."""
        after = self._text[end : end + len(closing) + _LONGEST_OPENING]
        shared = _shared(after, closing)
        for found in specials.finditer(after):
            if found.start() < shared < found.end():
                shared = found.start()
        if not closing[:shared].strip() and specials.match(closing.lstrip()):
            # The last turn may end with a token of its own, as in gpt-oss. What opens the next turn ends none.
            blanks = len(after) - len(after.lstrip())
            found_here, opens = specials.match(after, blanks), specials.match(self._prompt)
            if found_here and opens and found_here.group() != opens.group():
                stop = end + found_here.end()
                if self._another_opens(index, stop, specials):
                    return stop
        return end + shared

    def _another_opens(self, index: int, at: int, specials: re.Pattern[str]) -> bool:
        """Whether a special token stands between `at` and the content of the message after this one. Without one, the
        token before `at` is what opens that message, as where each role has an opening token of its own."""
        content = self._content(index + 1).strip() if index + 1 < len(self._messages) else ""
        until = self._text.find(content, at) if content else -1
        found = specials.search(self._text, at)
        if found is None:
            return False
        return found.end() <= until if until >= 0 else not self._text[at : found.start()].strip()


_LONGEST_OPENING = 64
"""Characters of what opens a reasoning block, such as `<think>` and a line break."""


def _places(text: str, parts: Sequence[str], start: int) -> list[int] | None:
    """Where the parts, one after the other, are in `text` from `start` on; None where that can be in several ways."""
    earliest, at = [], start
    for part in parts:
        found = text.find(part, at)
        if not part or found < 0:
            return None
        earliest.append(found)
        at = found + len(part)
    latest, at = [], len(text)
    for part in reversed(parts):
        at = text.rfind(part, start, at)
        latest.append(at)
    return earliest if earliest == latest[::-1] else None


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
