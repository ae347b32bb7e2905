"""Values from files as rows: text, a conversation, or a prompt with its completion.

Which of them a value is follows from its columns, as trainers in common use name them. Columns that nothing
reads are remarked on, so that no part of a row is left out without a word.
"""

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from megatrain.config import SourceConfig
from megatrain.data import messages as chat
from megatrain.data.file_formats import Piece
from megatrain.data.messages import Message, brief, checked
from megatrain.errors import ConfigError
from megatrain.names import suggest

Kind = Literal["text", "chat", "completion"]
Remark = tuple[str, str]
"""(kind, name) of what a user should be told about a row; `remarks.describe` has the sentences."""


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
    system: str = ""
    """Of a completion: what a chat template is given as system message."""
    messages: tuple[Message, ...] = ()
    """Messages with `role` and `content`."""
    marks: tuple[bool | None, ...] = ()
    """For each message whether its turn is learnt, as the row marks it; None, or no entry: not marked."""
    prompt_turns: int = 0
    """How many of the messages are the prompt, and not learnt unless everything is."""
    tools: tuple[Any, ...] | None = None
    """Tool descriptions for the chat template."""
    weight: float = 1.0
    """Factor of its losses, a positive number that fp32 can hold."""
    template_arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What else the chat template is given: `documents`, and what the row has as `chat_template_kwargs`."""
    skip: str = ""
    """Why the row is left out; empty: it is not."""
    remarks: tuple[Remark, ...] = ()
    piece: Piece | None = None
    """Set where `text` is a part of a long text."""


_MEDIA = ("images", "image", "videos", "video", "audios", "audio")
_NAMES = ("text", "messages", "prompt", "completion", "instruction", "input", "output", "history", "system", "tools",
          "chosen", "rejected", "label", "documents")  # fmt: skip


_ANSWERS_BEGIN = re.compile(
    r"\s+"
    r"|(?<=[^\W\d_][:：])"  # the colon after a role
    r"|(?<=[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u2fff\u3001-\u31ff\u3400-\u9fff\uf900-\ufaff\uff00-\uffef])"
)
"""Where an answer may begin in a plain text: with any blank, or after a role's colon or a letter of Thai, Lao, Burmese,
Khmer, Chinese or Japanese, which put no blanks between words."""

_MOST = float(np.finfo(np.float32).max)

_ARGUMENTS = "chat_template_kwargs"
_TAKEN = frozenset(
    "messages conversation conversations tools documents chat_template add_generation_prompt continue_final_message "
    "tokenize padding truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs "
    "strftime_now".split()
)
"""Arguments of `apply_chat_template` that a row does not set."""


_MOST_KEYS = 200
"""Columns that are remembered for a message; data can have any number of them."""


class RowParser:
    """Makes rows of one source's values."""

    def __init__(self, config: SourceConfig, named: Iterable[str] = ()) -> None:
        """`named`: those of `config.fields` whose columns some row must have, which `check` sees to."""
        self._config = config
        self._form = config.format
        self._names = {name: config.fields.get(name, name) for name in (*_NAMES, "weight")}
        # Those that no row had so far; a missing weight is refused with its row.
        self._absent = {name: config.fields[name] for name in named if name in _NAMES and config.fields[name]}
        self._keys: dict[str, None] = {}

    def row(self, value: Any, file: int, number: int, where: str, *, columnar: bool = False) -> Row:
        """`where` names the row in messages. `columnar`: in its file every row has every column, so that null stands
        for what the row does not have. Raises ConfigError for a value that is not as it should be."""
        if not isinstance(value, Mapping):
            raise ConfigError(f'{where} holds a {type(value).__name__}; expected an object such as {{"text": …}}')
        if self._absent:
            self._absent = {name: column for name, column in self._absent.items() if column not in value}
            if len(self._keys) < _MOST_KEYS:
                self._keys |= dict.fromkeys(map(str, value))
        reader = _Reader(value, self._config, self._aliased(value), where)
        kind = self._form if self._form != "auto" else self._detect(reader)
        try:
            row = self._read(kind, reader, file, number)
            row = None if row is None else self._weighted(row, reader)
        except _Null as null:
            if columnar:
                return Row(kind="text", file=file, number=number, skip=f"{null.column} is null")
            raise ConfigError(f"{where}: {null.column} is null; write a value, or take the row out") from None
        if row is None:
            raise self._unknown(kind, value, where)
        if row.kind != "text":
            for key in _MEDIA:
                if value.get(key):
                    raise ConfigError(f"{where} has {key}; {chat.NO_MEDIA}, or leave {key} out")
        unused = [
            ("column", str(key)) for key, part in value.items() if key not in reader.used and part not in (None, "", [])
        ]
        return dataclasses.replace(row, remarks=(("rows", reader.what), *reader.remarks, *unused))

    def check(self) -> None:
        """Once every row was given: raises ConfigError for a column that the source's fields name and no row has, which
        would be left out of all of them."""
        if self._absent and self._keys:
            name, column = next(iter(self._absent.items()))
            raise ConfigError(
                f"fields {{{name}: {column}}} of {self._config.path} has no effect: no row has a column {column} "
                f"({suggest(column, self._keys)}); name one that they have, or remove it"
            )

    def _weighted(self, row: Row, reader: "_Reader") -> Row:
        """The row with the weight in the column that the source's fields name; without one every row weighs 1."""
        if "weight" not in self._config.fields:
            return row
        weight = reader.weight()
        if not weight:
            return dataclasses.replace(row, skip=row.skip or f"its weight is 0 ({reader.names['weight']})")
        return dataclasses.replace(row, weight=weight)

    def _aliased(self, value: Mapping[str, Any]) -> dict[str, str]:
        """Columns by our names, with what else they are usually called."""
        names = dict(self._names)
        for name, other in (("messages", "conversations"), ("messages", "conversation"), ("label", "kto_tag"),
                            ("tools", "functions")):  # fmt: skip
            if name not in self._config.fields and names[name] not in value and other in value:
                names[name] = other
        return names

    def _detect(self, reader: "_Reader") -> str:
        # A column that is null goes for nothing where another tells what the row is.
        return self._kind(reader, reader.has) or self._kind(reader, reader.named)

    def _kind(self, reader: "_Reader", has: Callable[[str], bool]) -> str:
        pair = has("chosen") and has("rejected")
        # Beside a whole conversation they are what it was chosen from.
        if has("messages") and not (pair and reader.asks("messages")):
            return "chat"
        if pair:
            raise ConfigError(
                f"{reader.where} is a preference pair (chosen and rejected), which methods such as DPO learn from and "
                "fine-tuning does not; to train on the chosen answers alone write format: preference"
            )
        if has("prompt") and has("completion"):
            return "completion"
        if has("instruction") and has("output"):
            return "alpaca"
        return "text" if has("text") else ""

    def _read(self, kind: str, reader: "_Reader", file: int, number: int) -> Row | None:
        if kind == "text" and reader.named("text"):
            reader.what = f"text ({reader.names['text']})"
            return Row(kind="text", file=file, number=number, text=reader.string("text"))
        if kind == "preference" and reader.named("chosen"):
            return self._preference(reader, file, number)
        if kind == "alpaca" and reader.named("instruction") and reader.named("output"):
            reader.what = f"Alpaca rows ({reader.names['instruction']}, {reader.names['output']})"
            turns = [*self._alpaca_prompt(reader), {"role": "assistant", "content": reader.string("output")}]
            return reader.conversation(turns, [], file, number)
        if kind == "chat" and reader.named("messages"):
            reader.what = f"conversations ({reader.names['messages']})"
            parsed = reader.messages("messages")
            return reader.conversation(parsed.messages, parsed.marks, file, number)
        if kind in ("chat", "completion") and reader.named("prompt") and reader.named("completion"):
            reader.what = f"prompts with completions ({reader.names['prompt']}, {reader.names['completion']})"
            return self._completion(kind, reader, "completion", file, number)
        return None

    def _completion(self, kind: str, reader: "_Reader", answer: str, file: int, number: int) -> Row:
        """A prompt and what is learnt after it: strings, or lists of messages of which the last are learnt."""
        prompt, completion = reader.value("prompt"), reader.value(answer)
        if isinstance(prompt, str) and isinstance(completion, str) and kind == "completion":
            text, after = reader.string("prompt"), reader.string(answer)
            row = Row(kind="completion", file=file, number=number, text=text, completion=after,
                      system=reader.optional("system"), tools=reader.tools(),
                      template_arguments=reader.template_arguments())  # fmt: skip
            return reader.labelled(row)
        before = reader.turns("prompt", "user")
        after_turns = reader.turns(answer, "assistant")
        turns, marks = [*before.messages, *after_turns.messages], [*before.marks, *after_turns.marks]
        return reader.conversation(turns, marks, file, number, prompt_turns=len(before.messages))

    def _preference(self, reader: "_Reader", file: int, number: int) -> Row:
        reader.what = f"the chosen answers of preference pairs ({reader.names['chosen']})"
        reader.remarks.append(("preference", ""))
        chosen = reader.turns("chosen", "assistant")
        whole = chosen.messages[0]["role"] != "assistant"
        before: chat.Parsed = chat.Parsed((), ())
        if reader.has("prompt"):
            before = reader.turns("prompt", "user")
        elif reader.has("messages"):
            before = reader.messages("messages")
        elif reader.has("instruction"):
            before = chat.Parsed(tuple(self._alpaca_prompt(reader)), ())
        shared = 0
        if whole and reader.has("rejected"):
            # The whole conversation stands in both: what they share is the prompt.
            rejected = reader.turns("rejected", "assistant")
            reader.used.discard(reader.names["rejected"])
            # One that the other begins with ends with the answer all the same.
            shared = min(chat.same(chosen.messages, rejected.messages), len(chosen.messages) - 1)
        if whole and before.messages:
            # The prompt is in the conversation already, as in UltraFeedback; TRL takes it from there too.
            after = chat.end_of(before.messages, chosen.messages)
            if after is None:
                raise ConfigError(
                    f"{reader.where}: {reader.names['chosen']} is a whole conversation, and the prompt beside it is "
                    "not in it; leave one of the two out"
                )
            shared = max(shared, after)
            before = chat.Parsed((), ())
        elif not before.messages and isinstance(reader.value("chosen"), str):
            return self._chosen_text(reader, file, number)
        turns = [*before.messages, *chosen.messages]
        marks = [*before.marks, *[None] * (len(before.messages) - len(before.marks)), *chosen.marks]
        return reader.conversation(turns, marks, file, number, prompt_turns=len(before.messages) + shared)

    def _chosen_text(self, reader: "_Reader", file: int, number: int) -> Row:
        """Plain texts that begin alike: what they share, up to the last place where an answer may begin, is the
        prompt. Without a rejected text the whole is learnt; so is one that shares nothing with it."""
        chosen, rejected = reader.string("chosen"), reader.optional("rejected")
        reader.used.discard(reader.names["rejected"])
        common = os.path.commonprefix([chosen, rejected])  # noqa: RUF071 - characters
        common = common[: max(len(chosen) - 1, 0)]  # of texts of which one goes on, something is the answer
        at = max((found.start() for found in _ANSWERS_BEGIN.finditer(common)), default=0)
        skip = ""
        if chosen == rejected:
            skip = f"{reader.names['chosen']} and {reader.names['rejected']} are the same text"
        elif common and not at:
            skip = (
                f"{reader.names['chosen']} and {reader.names['rejected']} begin alike, and where the answer begins "
                "cannot be told"
            )
        return Row(kind="completion", file=file, number=number, text=chosen[:at], completion=chosen[at:], skip=skip)

    def _alpaca_prompt(self, reader: "_Reader") -> list[Message]:
        """Earlier exchanges, then the instruction with its input on the next line, as LLaMA-Factory joins them."""
        turns: list[Message] = []
        history = reader.value("history") if reader.has("history") else None
        if isinstance(history, str):
            history = chat.decoded(history, f"{reader.where}: {reader.names['history']}") if history.strip() else None
        if not isinstance(history or (), list | tuple):
            raise ConfigError(
                f"{reader.where}: {reader.names['history']} is {brief(history)}; expected a list of questions and "
                "answers"
            )
        for index, pair in enumerate(history or ()):
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise ConfigError(
                    f"{reader.where}: {reader.names['history']}[{index}] is {brief(pair)}; expected a question and "
                    "its answer"
                )
            for role, text in zip(("user", "assistant"), pair, strict=True):
                place = f"{reader.where}: {reader.names['history']}[{index}]"
                turns.append({"role": role, "content": checked(text, place)})
        asked, given = reader.string("instruction"), reader.optional("input")
        turns.append({"role": "user", "content": f"{asked}\n{given}" if given and asked else asked or given})
        return turns

    def _unknown(self, kind: str, value: Mapping[str, Any], where: str) -> ConfigError:
        names = self._names
        wanted = {
            "text": names["text"],
            "chat": names["messages"],
            "completion": f"{names['prompt']} and {names['completion']}",
            "alpaca": f"{names['instruction']} and {names['output']}",
            "preference": names["chosen"],
        }.get(kind, "text, messages, prompt and completion, or instruction and output")
        return ConfigError(
            f"{where} has the keys {', '.join(map(str, value)) or '(none)'}; expected {wanted}. Name other keys in the "
            "source's fields, such as fields: {text: body} or fields: {prompt: question, completion: answer}"
        )


def _is_empty(message: Message) -> bool:
    """Whether a turn of user or assistant says nothing at all."""
    if message["role"] not in ("user", "assistant") or any(message.get(key) for key in ("tool_calls", *chat.REASONING)):
        return False
    content = message.get("content")
    return not (content.strip() if isinstance(content, str) else content)


class _Null(Exception):
    """A column that a row needs is null."""

    def __init__(self, column: str) -> None:
        super().__init__(column)
        self.column = column


class _Reader:
    """Columns of one value, and which of them were read."""

    def __init__(self, value: Mapping[str, Any], config: SourceConfig, names: dict[str, str], where: str) -> None:
        self._value = value
        self._fields = config.fields
        self.names = names
        self.where = where
        self.used: set[str] = set()
        self.remarks: list[Remark] = []
        self.what = ""

    def has(self, name: str) -> bool:
        """Whether the column is there; a null is not."""
        return self.named(name) and self._value[self.names[name]] is not None

    def named(self, name: str) -> bool:
        """Whether the column is there, be it null."""
        return bool(self.names[name]) and self.names[name] in self._value

    def asks(self, name: str) -> bool:
        """Whether a column of messages ends with something else than an answer."""
        turns = chat.parse(self._value[self.names[name]], self._fields, f"{self.where}: {self.names[name]}").messages
        return bool(turns[-1]["role"] != "assistant")

    def value(self, name: str) -> Any:
        """A column as it is. Raises _Null where it is null."""
        self.used.add(self.names[name])
        value = self._value[self.names[name]]
        if value is None:
            raise _Null(self.names[name])
        return value

    def string(self, name: str) -> str:
        """A column of text."""
        return checked(self.value(name), f"{self.where}: {self.names[name]}")

    def optional(self, name: str) -> str:
        """A column of text, empty where the row has none."""
        return self.string(name) if self.has(name) else ""

    def messages(self, name: str) -> chat.Parsed:
        """A column of messages."""
        parsed = chat.parse(self.value(name), self._fields, f"{self.where}: {self.names[name]}")
        self.remarks += parsed.remarks
        return parsed

    def turns(self, name: str, role: str) -> chat.Parsed:
        """A column of messages, or a string or single message that is one turn."""
        value = self.value(name)
        if isinstance(value, Mapping):
            value = [value]
        if isinstance(value, str):
            text = checked(value, f"{self.where}: {self.names[name]}")
            return chat.Parsed(({"role": role, "content": text},), (None,))
        parsed = chat.parse(value, self._fields, f"{self.where}: {self.names[name]}")
        self.remarks += parsed.remarks
        return parsed

    def conversation(
        self,
        turns: Sequence[Message],
        marks: Sequence[bool | None],
        file: int,
        number: int,
        *,
        prompt_turns: int = 0,
    ) -> Row:
        """A row of messages, with the columns that belong to it."""
        turns, marks = list(turns), [*marks, *[None] * (len(turns) - len(marks))]
        system = self.names["system"]
        if self.has("system") and not (turns and turns[0]["role"] == "system"):
            if text := self.string("system"):
                turns, marks = [{"role": "system", "content": text}, *turns], [None, *marks]
                prompt_turns += bool(prompt_turns)
        elif self.has("system") and self._value[system] == turns[0]["content"]:
            self.used.add(system)
        self.remarks += [("marked", message["role"]) for message, mark in zip(turns, marks, strict=True)
                         if mark and message["role"] != "assistant"]  # fmt: skip
        empty = [
            ("empty", message["role"])
            for index, (message, mark) in enumerate(zip(turns, marks, strict=True))
            if _is_empty(message)
            if message["role"] == "user" or (mark is not False and index >= prompt_turns)
        ]
        self.remarks += dict.fromkeys(empty)
        row = Row(
            kind="chat",
            file=file,
            number=number,
            messages=tuple(turns),
            marks=tuple(marks),
            prompt_turns=prompt_turns,
            tools=self.tools(),
            template_arguments=self.template_arguments(),
        )
        return self.labelled(row)

    def weight(self) -> float:
        """The row's weight, rounded to fp32. Raises ConfigError for what is no number from 0 on, and where there is
        none: as in scikit-learn, weights are given for all rows or for none."""
        column = self.names["weight"]
        place = f"{self.where}: {column}"
        if not self.named("weight"):
            raise ConfigError(
                f"{self.where} has no {column}, the column that fields: {{weight: {column}}} names; write one, 1 for a "
                "row that counts like any other"
            )
        given = self.value("weight")
        if isinstance(given, str):  # CSV
            with contextlib.suppress(ValueError):
                given = float(given)
        if isinstance(given, bool) or not isinstance(given, int | float):
            raise ConfigError(f"{place} is {brief(given)}; expected a number from 0 on, such as 0.5")
        with np.errstate(over="ignore", under="ignore"):
            narrow = float(np.float32(given)) if abs(given) < _MOST else math.inf
        if not math.isfinite(narrow) or narrow < 0 or (given and not narrow):
            raise ConfigError(f"{place} is {given}; a weight is a number from 0 on that fp32 can hold, such as 0.5")
        return narrow

    def tools(self) -> tuple[Any, ...] | None:
        """The tools that the row describes, in OpenAI's form."""
        if not self.has("tools"):
            return None
        tools = chat.tools_of(self.value("tools"), self.where)
        if tools and self.names["tools"] == "functions" and "tools" not in self._fields:  # OpenAI's earlier form
            tools = tuple({"type": "function", "function": tool} for tool in tools)
        return tools

    def template_arguments(self) -> dict[str, Any]:
        """`chat_template_kwargs`, as TRL names them, and the documents of templates for retrieval."""
        found: dict[str, Any] = {}
        if self._value.get(_ARGUMENTS) is not None:
            self.used.add(_ARGUMENTS)
            place = f"{self.where}: {_ARGUMENTS}"
            given = chat.decoded(self._value[_ARGUMENTS], place)
            if not isinstance(given, Mapping):
                raise ConfigError(f"{place} is {brief(given)}; expected an object")
            for key in given:
                if not isinstance(key, str) or key in _TAKEN:
                    raise ConfigError(f"{place} has the key {key!r}, which is given by the row itself; leave it out")
            found |= given
        if self.has("documents"):
            place = f"{self.where}: {self.names['documents']}"
            documents = chat.decoded(self.value("documents"), place)
            if not isinstance(documents, list) or not all(isinstance(document, Mapping) for document in documents):
                raise ConfigError(f"{place} is {brief(documents)}; expected a list of objects with title and text")
            found["documents"] = documents
        return found

    def labelled(self, row: Row) -> Row:
        """Leaves out an answer that is labelled as a bad one, as rows for KTO are."""
        label = self._value[self.names["label"]] if self.has("label") else None
        if isinstance(label, str) and label.lower() in ("true", "false"):  # CSV
            label = label.lower() == "true"
        if label in (0, 1) and self.names["label"] != "label":  # a column of that name may hold classes
            label = bool(label)
        if not isinstance(label, bool):
            return row
        self.used.add(self.names["label"])
        return (
            row
            if label
            else dataclasses.replace(row, skip=f"its answer is labelled as a bad one ({self.names['label']}: false)")
        )
