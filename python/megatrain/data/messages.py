"""Messages of a conversation in the one form that chat templates read, whatever trainer or service they were made for.

A message becomes `{role, content, …}` with text as content and tool calls as OpenAI's objects with decoded arguments,
and a mark that says whether its turn is learnt. Everything else goes to the template as it is.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatrain.errors import ConfigError

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
_SPELLINGS = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
    "tool_response": "tool",
    "tool_call": "function_call",
} | {role: role for role in (*ROLES, "function_call")}
_MARKS = {
    "weight": True,  # OpenAI
    "train": True,  # axolotl
    "training": True,  # axolotl
    "trainable": True,
    "loss": True,  # ms-swift
    "loss_mask": True,
    "masked": False,  # torchtune
}
"""Keys that say whether a turn is learnt, and the value that says yes."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of reasoning beside the content; templates read the first or the second."""
NO_MEDIA = (
    "images, audio and video in rows are not read from a config yet: pass them to Engine.step of the Python API "
    "(pixel_values), or take the row out"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Parsed:
    """Messages in the form that templates read."""

    messages: tuple[Message, ...]
    marks: tuple[bool | None, ...]
    """For each message whether its turn is to be learnt; None: not marked."""
    remarks: tuple[tuple[str, str], ...] = ()
    """(kind, name) of what should be said about them."""


def parse(value: Any, fields: Mapping[str, str], where: str) -> Parsed:
    """A list of messages, or the same as a JSON string. `where` names them in messages of errors.

    fields: our names (`role`, `content`, `role.user`, …) to the file's
    Raises ConfigError.
    """
    if isinstance(value, str):
        value = decoded(value, where)
    if isinstance(value, Mapping) and value and all(isinstance(part, list) for part in value.values()):
        if len(lengths := {len(part) for part in value.values()}) == 1:  # a Sequence of `datasets`: a list per key
            value = [dict(zip(value, parts, strict=True)) for parts in zip(*value.values(), strict=True)]
        else:
            raise ConfigError(f"{where} holds lists of different lengths ({', '.join(map(str, sorted(lengths)))})")
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where} is {brief(value)}; expected a list of messages")
    parser = _Parser(fields)
    pairs = [parser.message(item, f"{where}[{index}]") for index, item in enumerate(value)]
    return Parsed(
        tuple(message for message, _ in pairs), tuple(mark for _, mark in pairs), tuple(sorted(parser.remarks))
    )


class _Parser:
    def __init__(self, fields: Mapping[str, str]) -> None:
        self._fields = fields
        self._roles = _SPELLINGS | {
            theirs: ours.removeprefix("role.") for ours, theirs in fields.items() if ours.startswith("role.")
        }
        self.remarks: set[tuple[str, str]] = set()

    def message(self, item: Any, where: str) -> tuple[Message, bool | None]:
        if not isinstance(item, Mapping):
            raise ConfigError(f"{where} is {brief(item)}; expected an object with role and content")
        role_key = self._key("role", item, "from")
        content_key = self._key("content", item, "value")
        if role_key not in item:
            raise ConfigError(
                f"{where} has the keys {', '.join(map(str, item)) or '(none)'}; expected role and content. Name other "
                "keys in the source's fields, such as fields: {role: speaker, content: text}"
            )
        role = item[role_key]
        if not isinstance(role, str):
            raise ConfigError(f"{where}: {role_key} is {brief(role)}; expected a string")
        checked(role, f"{where}: {role_key}")
        role = self._roles.get(role, self._roles.get(role.lower(), role))
        others = {key: part for key, part in item.items() if key not in (role_key, content_key) and part is not None}
        mark = _mark(others, where)
        content = item.get(content_key)
        if role == "function_call":  # ShareGPT's turn of calls, written as JSON
            role, others["tool_calls"], content = "assistant", decoded(content, f"{where}: {content_key}"), ""
        elif role not in ROLES:
            self.remarks.add(("role", role))
        if "function_call" in others:  # OpenAI's form before tool_calls
            others.setdefault("tool_calls", [others.pop("function_call")])
        calls = _calls(others.pop("tool_calls", None), where)
        if calls:
            others["tool_calls"] = calls
        thoughts = {key: others[key] for key in REASONING if others.get(key)}
        if isinstance(content, list):
            content, among = _without_thoughts(content, f"{where}: {content_key}")
            thoughts |= {f"parts of {content_key}": among} if among else {}
        for key, thought in thoughts.items():
            if not isinstance(thought, str):
                raise ConfigError(f"{where}: {key} is {brief(thought)}; expected a string")
        if len(set(thoughts.values())) > 1:
            raise ConfigError(f"{where}: {' and '.join(thoughts)} hold different reasoning; leave one")
        reasoning = next(iter(thoughts.values()), "")
        if reasoning:
            # Both of the names that templates read, as transformers does from 5.24 on.
            others |= dict.fromkeys(REASONING[:2], reasoning)
        if content is None and not calls and not reasoning:
            raise ConfigError(
                f'{where}, a turn of role {role!r}, has no {content_key}; write its text as a string ("" for none), '
                "or take the row out"
            )
        text = "" if content is None else self._text(content, f"{where}: {content_key}")
        return {"role": role, "content": text, **others}, mark

    def _key(self, name: str, item: Mapping[str, Any], other: str) -> str:
        """The file's key for `name`: as the source's fields say, else its own name, else ShareGPT's."""
        if name in self._fields:
            return self._fields[name]
        return other if name not in item and other in item else name

    def _text(self, content: Any, where: str) -> str:
        """A string, or the texts of a list of parts, joined as templates for parts write them."""
        if isinstance(content, list):
            texts = []
            for index, part in enumerate(content):
                kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
                if kind not in ("text", "input_text", "output_text"):
                    media = any(word in str(kind) for word in ("image", "audio", "video"))
                    advice = NO_MEDIA if media else "text and thinking can be read; write it as one of these"
                    raise ConfigError(f"{where}[{index}] is of type {kind!r}; {advice}")
                text = part.get("text", part.get("content")) if isinstance(part, Mapping) else part
                texts.append(checked(text, f"{where}[{index}]"))
            return "".join(texts)
        return checked(content, where)


def _without_thoughts(parts: list[Any], where: str) -> tuple[list[Any], str]:
    """The parts of a content that are no reasoning, and the reasoning of the others. Raises ConfigError for reasoning
    after text, since templates render a turn's reasoning before its content."""
    rest: list[Any] = []
    thoughts = []
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("thinking", "reasoning"):
            if rest:
                raise ConfigError(
                    f"{where}[{index}] is of type {kind!r} and follows text; chat templates render a turn's reasoning "
                    "before its text, so move the part to the front, or split the turn"
                )
            text = part.get(kind, part.get("text", part.get("content")))
            thoughts.append(checked(text, f"{where}[{index}]"))
        else:
            rest.append(part)
    return rest, "".join(thoughts)


def _mark(others: dict[str, Any], where: str) -> bool | None:
    """Whether a message is marked as learnt; takes the marks out of its other keys."""
    marks: dict[str, bool] = {}
    for key, yes in _MARKS.items():
        if key not in others:
            continue
        value = others.pop(key)
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise ConfigError(
                f"{where}: {key} is {brief(value)}; a turn is learnt or not, so write "
                f"{key}: {int(yes)} or {int(not yes)}"
            )
        marks[key] = bool(value) == yes
    if others.pop("train_detail", None):
        raise ConfigError(
            f"{where}: train_detail marks parts of a turn, which is not supported; mark whole turns (train)"
        )
    if len(set(marks.values())) > 1:
        raise ConfigError(f"{where}: {' and '.join(marks)} disagree on whether the turn is learnt; leave one")
    return next(iter(marks.values()), None)


def _calls(value: Any, where: str) -> list[Any]:
    """Tool calls with decoded arguments, so that a JSON string and the object that it stands for render alike."""
    if isinstance(value, str):
        value = decoded(value, f"{where}: tool_calls")
    if value is None:
        return []
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        raise ConfigError(f"{where}: tool_calls is {brief(value)}; expected a list")
    calls = []
    for index, item in enumerate(value):
        here = f"{where}: tool_calls[{index}]"
        call = decoded(item, here) if isinstance(item, str) else item
        if not isinstance(call, Mapping):
            raise ConfigError(f"{here} is {brief(call)}; expected an object")
        call = dict(call) if "function" in call else {"type": "function", "function": dict(call)}
        function = call["function"]
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ConfigError(f"{here} has no function name; expected {{function: {{name, arguments}}}}")
        arguments = function.get("arguments", function.get("parameters"))
        if isinstance(arguments, str):
            arguments = decoded(arguments, f"{here}: arguments") if arguments.strip() else {}
        call["function"] = {**function, "arguments": {} if arguments is None else arguments}
        calls.append(call)
    return calls


def tools_of(value: Any, where: str) -> tuple[Any, ...] | None:
    """Tool descriptions: a list, an object, or either as a JSON string."""
    if isinstance(value, str):
        value = decoded(value, f"{where}: tools") if value.strip() else None
    if isinstance(value, Mapping):
        value = [value]
    if value is not None and not isinstance(value, list):
        raise ConfigError(f"{where}: tools is {brief(value)}; expected a list")
    tools = [decoded(tool, f"{where}: tools[{index}]") if isinstance(tool, str) else tool
             for index, tool in enumerate(value or ())]  # fmt: skip
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise ConfigError(f"{where}: tools[{index}] is {brief(tool)}; expected an object")
    return tuple(tools) or None


def decoded(text: Any, where: str) -> Any:
    """The value of a JSON string. Raises ConfigError."""
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is {brief(text)}, which is not JSON: {error}") from None


def checked(text: Any, where: str) -> str:
    """A string that can be written in UTF-8. Raises ConfigError."""
    if not isinstance(text, str):
        raise ConfigError(f"{where} is {brief(text)}; expected a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where} holds half a surrogate pair at character {error.start}") from None
    return text


def same(one: Sequence[Message], other: Sequence[Message]) -> int:
    """How many messages two conversations have in common at their beginning."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))


def end_of(part: Sequence[Message], whole: Sequence[Message]) -> int | None:
    """After how many messages of the whole its first run of messages equal to `part` ends; None without one."""
    starts = range(len(whole) - len(part) + 1)
    return next((at + len(part) for at in starts if list(whole[at : at + len(part)]) == list(part)), None)


def brief(value: Any) -> str:
    """A value and its type in a few words, for messages."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
