"""Over random conversations and templates in the styles of well-known families: the ids are those of the stock call,
and supervised is exactly what the assistant writes."""

import datetime as dt
import itertools
import random

import numpy as np
import pytest

from megatrain.config import SourceConfig
from megatrain.data.rows import RowParser
from megatrain.data.tokenization import Encoder
from support.chat_styles import BOS, EOS, STYLES
from support.tiny_tokenizer import tiny_tokenizer

DAY = dt.datetime(2026, 11, 28, 12, 30)
PARTS = [
    *("hello there", "how are you?", "  paris \n", "the capital of france", "4", "日本 héllo", "🦊", "a b a b a"),
    *("assistant", "user\nassistant\n", "final", "model", "analysis", "think", "<think>", "<im_x>", "[INST]x[/INST]"),
    *("{{ m.content }}", "{% if %}", "line\n\nline", "\ttab", "\\n", "'quoted' \"text\"", "<b>&amp;"),
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


class _Day(dt.datetime):
    @classmethod
    def now(cls):
        return DAY


@pytest.fixture(autouse=True)
def _fixed_clock(monkeypatch):
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", _Day)


def text_of(draw):
    return draw.choice(("", " ", "\n")).join(draw.choices(PARTS, k=draw.randint(1, 4)))


def answer_of(draw, style):
    message = {"role": "assistant", "content": text_of(draw)}
    if style.reasoning and draw.random() < 0.4:
        message["reasoning_content"] = draw.choice(("two and two", "so:\n1. a\n2. b", "paris"))
    return message


def conversation(draw, style):
    """(messages, tools)"""
    messages = []
    if style.system and draw.random() < 0.5:
        messages.append({"role": "system", "content": text_of(draw)})
    tools = TOOLS if style.tools and draw.random() < 0.5 else None
    for _ in range(draw.randint(1, 5)):
        messages.append({"role": "user", "content": text_of(draw)})
        while tools and draw.random() < 0.4:
            message = answer_of(draw, style) | {"content": ""}
            call = {"name": "add", "arguments": {"a": draw.randint(0, 99), "of": draw.choice(PARTS)}}
            messages.append({**message, "tool_calls": [{"type": "function", "function": call}]})
            result = text_of(draw) if draw.random() < 0.8 else ""
            messages.append({"role": "tool", "name": "add", "content": result})
        messages.append(answer_of(draw, style))
    if draw.random() < 0.2:
        messages.append({"role": "user", "content": text_of(draw)})
    return messages, tools


def tokenizer_of(style):
    return tiny_tokenizer(specials=style.specials, bos=BOS, eos=EOS, template=style.template)


def expected_mask(tokenizer, segments, ids):
    """A token is supervised where it covers a character that the assistant writes."""
    text = "".join(part for part, _ in segments)
    encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    assert encoding.ids == ids
    learnt = np.concatenate([np.full(len(part), flag) for part, flag in segments if part])
    return [int(learnt[start:stop].any()) for start, stop in encoding.offsets]


def parts(tokenizer, ids, mask):
    """(text, whether it is supervised) of each run of tokens."""
    spans = [
        (flag, [token for token, _ in run])
        for flag, run in itertools.groupby(zip(ids, mask, strict=True), lambda at: at[1])
    ]
    return [(tokenizer.decode(run, skip_special_tokens=False), bool(flag)) for flag, run in spans]


def only(segments, turns):
    """The same text with these of the assistant's turns learnt, by number; a turn ends where others write again."""
    kept, turn, before = [], -1, False
    for part, flag in segments:
        if not part:
            continue
        turn += flag and not before
        kept.append((part, flag and turn in turns))
        before = flag
    return kept


def encoded(encoder, messages, tools):
    row = RowParser(SourceConfig(path="rows")).row({"messages": messages, "tools": tools}, 0, 1, "row 1")
    return encoder.encode([row], ["row 1"])[0]


@pytest.mark.parametrize("name", STYLES)
def test_ids_are_those_of_the_stock_call_and_the_mask_is_what_the_assistant_writes(name):
    style, draw = STYLES[name], random.Random(name)
    tokenizer = tokenizer_of(style)
    encoders = {rule: Encoder(tokenizer, rule, date=DAY.date()) for rule in ("assistant", "last", "all")}
    for _ in range(60):
        messages, tools = conversation(draw, style)
        stock = tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=True)["input_ids"]
        segments = style.segments(messages, tools)
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        learnt = {turn for turn in range(len(answers)) if draw.random() < 0.5}
        marked = [dict(message) for message in messages]
        for turn, index in enumerate(answers):
            if turn not in learnt:
                marked[index]["train"] = False
        wanted = {
            "assistant": (messages, segments),
            "last": (messages, only(segments, {len(answers) - 1})),
            "marked": (marked, only(segments, learnt)),
            "all": (messages, [(part, True) for part, _ in segments]),
        }
        for rule, (rows, expected) in wanted.items():
            found = encoded(encoders.get(rule, encoders["assistant"]), rows, tools)
            assert found.ids.tolist() == stock, messages
            assert parts(tokenizer, found.ids, found.supervised) == parts(
                tokenizer, stock, expected_mask(tokenizer, expected, stock)
            ), (rule, rows)


@pytest.mark.parametrize("name", STYLES)
def test_the_work_grows_with_the_number_of_turns(name):
    style = STYLES[name]
    exchange = [{"role": "user", "content": "hello there"}]
    if style.tools:
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
        exchange.append({"role": "assistant", "content": "", "tool_calls": [call]})
        exchange.append({"role": "tool", "name": "add", "content": "4"})
    exchange.append({"role": "assistant", "content": "how are you?"})
    if style.reasoning:
        exchange[-1]["reasoning_content"] = "two and two"
    rendered = []
    for count in (10, 80):
        encoder, characters = Encoder(tokenizer_of(style), date=DAY.date()), []
        render = encoder._jinja

        def counted(*args, render=render, characters=characters, **settings):
            text, marked = render(*args, **settings)
            characters.append(text)
            return text, marked

        encoder._jinja = counted
        encoded(encoder, exchange * count, TOOLS if style.tools else None)
        rendered.append(sum(map(len, characters)))
    assert rendered[1] < 8 * 1.25 * rendered[0]
