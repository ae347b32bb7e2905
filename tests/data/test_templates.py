"""What a chat template is given besides messages: the day, its name among several, documents, arguments of its own."""

import datetime as dt
import json

import pytest

from megatrain.config import Config, SourceConfig
from megatrain.data.readers import Source
from megatrain.data.remarks import is_unused
from megatrain.data.template_facts import with_date
from megatrain.data.tokenization import Encoder
from megatrain.data.train_tokenizer import build_tokenizer
from megatrain.errors import ConfigError
from support.tiny_tokenizer import tiny_tokenizer

TALK = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "how are you?"}]
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
MOMENT = dt.datetime(2024, 7, 4)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


class Clock(dt.datetime):
    @classmethod
    def now(cls):
        return MOMENT


def rows(path, *values, **settings):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return list(Source(SourceConfig(path=str(path), **settings)).rows())


def encoder(template, **settings):
    return Encoder(tiny_tokenizer(specials=("<|im_start|>", "<|im_end|>"), template=template), **settings)


def text_of(found, encoded):
    return found._tokenizer.decode(encoded.ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    "template",
    [
        "{{ strftime_now('%d %b %Y') }}",
        "\n  {% if strftime_now is defined %}\n [{{ strftime_now('%A %-d %B, %j %F 100%% %%d %H:%M') }}]{% endif %}\n",
        "{% macro day() %}{{ strftime_now('%Y-%m-%d') }}{% endmacro %}{% set d = day() %}{{ d }}{{ d | length }}",
        "{%- set day = strftime_now('%d') | int + 1 %}{{ day }}",
        "{%- set format = ['%d', '%%m', '%Y'] | join('·') %}{{ strftime_now(format) }}",
    ],
)
def test_a_template_that_is_given_a_day_renders_as_it_would_have_on_that_day(template, monkeypatch):
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)
    tokenizer = tiny_tokenizer(template=template + TURNS)
    stock = tokenizer.apply_chat_template(TALK, tokenize=False)
    monkeypatch.undo()
    dated = with_date(template + TURNS, MOMENT.date())
    assert tokenizer.apply_chat_template(TALK, tokenize=False, chat_template=dated) == stock


def test_the_day_is_part_of_what_tokens_are_made_from_where_the_template_reads_it(tmp_path):
    days = [dt.date(2024, 7, 4), dt.date(2024, 7, 5)]
    dated = [encoder("{{ strftime_now('%d %b %Y') }}" + TURNS, date=day) for day in days]
    assert len({found.fingerprint() for found in dated}) == 2
    assert len({encoder(TURNS, date=day).fingerprint() for day in days}) == 1
    (row,) = rows(tmp_path / "a.jsonl", {"messages": TALK})
    (encoded,) = dated[0].encode([row], ["a"])
    assert text_of(dated[0], encoded).startswith("04 Jul 2024<|im_start|>user")


def test_a_row_with_tools_is_rendered_by_the_template_for_tools_as_the_stock_call_does(tmp_path):
    several = {"default": TURNS, "tool_use": "{{ tools | tojson }}" + TURNS, "rag": "{{ documents | tojson }}" + TURNS}
    found = encoder(several)
    plain, tooled = rows(tmp_path / "a.jsonl", {"messages": TALK}, {"messages": TALK, "tools": [TOOL]})
    for row, tools in ((plain, None), (tooled, [TOOL])):
        (encoded,) = found.encode([row], ["a"])
        stock = found._tokenizer.apply_chat_template(TALK, tools=tools, tokenize=True, return_dict=True)["input_ids"]
        assert encoded.ids.tolist() == stock
        assert ("tools", "") not in encoded.remarks


def test_one_of_several_templates_is_named_and_gets_the_documents_of_a_row(tmp_path):
    several = {"default": TURNS, "rag": "{{ documents[0].title }}: {{ documents[0].text }}\n" + TURNS}
    tokenizer = tiny_tokenizer(specials=("<|im_start|>", "<|im_end|>"), template=several)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    model = {"config": {"model_type": "llama"}, "tokenizer": str(tmp_path / "tokenizer")}

    def build(name):
        return build_tokenizer(Config.from_dict({"model": {**model, "chat_template": name}, "data": "python:stdlib"}))

    found = Encoder(build("rag"))
    documents = [{"title": "paris", "text": "a capital"}]
    (row,) = rows(tmp_path / "a.jsonl", {"messages": TALK, "documents": documents})
    (encoded,) = found.encode([row], ["a"])
    assert text_of(found, encoded).startswith("paris: a capital\n<|im_start|>user")
    (encoded,) = Encoder(build("default")).encode([row], ["a"])
    assert ("argument", "documents") in encoded.remarks
    with pytest.raises(ConfigError, match=r"no template of the name 'tool_use'; the tokenizer has default, rag"):
        build("tool_use")
    with pytest.raises(ConfigError, match=r"templates rag, tool_use and none called default; name one as model\.chat"):
        encoder({"rag": TURNS, "tool_use": TURNS})


def test_arguments_of_a_row_reach_the_template_and_those_it_does_not_read_are_named(tmp_path):
    found = encoder("{% if effort is defined %}effort: {{ effort }}\n{% endif %}" + TURNS)
    given = {"messages": TALK, "chat_template_kwargs": {"effort": "high", "color": "red"}}
    (row,) = rows(tmp_path / "a.jsonl", given)
    (encoded,) = found.encode([row], ["a"])
    assert text_of(found, encoded).startswith("effort: high\n<|im_start|>")
    assert ("argument", "color") in encoded.remarks
    assert not [name for kind, name in encoded.remarks if kind == "column"]
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: chat_template_kwargs has the key 'tools'"):
        rows(tmp_path / "a.jsonl", {"messages": TALK, "chat_template_kwargs": {"tools": []}})


def test_a_prompt_of_plain_strings_is_rendered_with_its_tools_documents_and_arguments(tmp_path):
    read = "{{ tools | tojson }} {{ documents[0].title }} {{ effort }}\n" + TURNS
    given = {
        "prompt": "hello there",
        "completion": "how are you?",
        "tools": [TOOL],
        "documents": [{"title": "paris", "text": "a capital"}],
        "chat_template_kwargs": {"effort": "high"},
    }
    (row,) = rows(tmp_path / "a.jsonl", given)
    found = encoder(read)
    (encoded,) = found.encode([row], ["a"])
    stock = found._tokenizer.apply_chat_template(
        TALK, tools=[TOOL], documents=given["documents"], effort="high", tokenize=True, return_dict=True
    )
    assert encoded.ids.tolist() == stock["input_ids"]
    assert not [remark for remark in encoded.remarks if is_unused(remark)]
    # Without a template nothing reads them, which is said of each.
    (row,) = rows(tmp_path / "a.jsonl", given, format="completion")
    (encoded,) = Encoder(found._tokenizer, form="completion").encode([row], ["a"])
    unused = [remark for remark in encoded.remarks if is_unused(remark)]
    assert unused == [("no template", name) for name in ("tools", "documents", "chat_template_kwargs")]
