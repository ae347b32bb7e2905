"""Every column, field and key of a row is used, or named as unused."""

import json

import pytest

from megatrain.config import SourceConfig
from megatrain.data import remarks
from megatrain.data.readers import Source
from megatrain.data.tokenization import Encoder
from megatrain.errors import ConfigError
from support.tiny_tokenizer import tiny_tokenizer

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
    "<|im_end|>\n{% endfor %}"
)
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASK, ANSWER = {"role": "user", "content": "hello there"}, {"role": "assistant", "content": "how are you?"}


def read(path, *values, **settings):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return list(Source(SourceConfig(path=str(path), **settings)).rows())


def encode(rows, template=CHATML, supervise="assistant"):
    tokenizer = tiny_tokenizer(specials=("<|im_start|>", "<|im_end|>"), template=template)
    return tokenizer, Encoder(tokenizer, supervise).encode(rows, [f"rows:{row.number}" for row in rows])


def learnt(tokenizer, encoded):
    runs, before = [], 0
    for token, flag in zip(encoded.ids.tolist(), encoded.supervised.tolist(), strict=True):
        if flag:
            runs = [*runs, [token]] if not before else [*runs[:-1], [*runs[-1], token]]
        before = flag
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


@pytest.mark.parametrize(
    "mark", [{"weight": 0}, {"train": False}, {"trainable": False}, {"loss_mask": 0}, {"masked": True}]
)
def test_a_turn_that_is_marked_is_not_learnt(tmp_path, mark):
    second = {"role": "assistant", "content": "paris"}
    rows = read(tmp_path / "a.jsonl", {"messages": [ASK, {**ANSWER, **mark}, ASK, second]})
    tokenizer, (encoded,) = encode(rows)
    assert learnt(tokenizer, encoded) == ["paris<|im_end|>"]


def test_keys_that_no_template_reads_change_nothing_and_are_named(tmp_path):
    turns = [ASK, {**ANSWER, "weight": 1, "id": 7, "timestamp": "now"}]
    rows = read(tmp_path / "a.jsonl", {"messages": turns, "source": "web"}, {"messages": [ASK, ANSWER]})
    _, (keyed, plain) = encode(rows)
    assert keyed.ids.tolist() == plain.ids.tolist()
    assert keyed.supervised.tolist() == plain.supervised.tolist()
    assert {("message key", "id"), ("message key", "timestamp"), ("column", "source")} <= set(keyed.remarks)
    with pytest.raises(ConfigError, match=r"weight is float 0\.5; a turn is learnt or not"):
        read(tmp_path / "b.jsonl", {"messages": [ASK, {**ANSWER, "weight": 0.5}]})


def test_arguments_as_json_string_and_as_object_give_the_same_tokens_and_the_call_is_learnt(tmp_path):
    def talk(arguments):
        call = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "sum", "arguments": arguments}}],
        }
        return {"messages": [ASK, call, {"role": "tool", "content": "four"}, ANSWER]}

    rows = read(tmp_path / "a.jsonl", talk('{"a": 2}'), talk({"a": 2}))
    tokenizer, (one, other) = encode(rows, TOOLS)
    assert one.ids.tolist() == other.ids.tolist()
    assert learnt(tokenizer, one) == ['<call>sum({"a": 2})<|im_end|>', "how are you?<|im_end|>"]


def test_reasoning_in_a_field_is_learnt_where_it_is_rendered_and_said_where_it_is_not(tmp_path):
    rows = read(tmp_path / "a.jsonl", {"messages": [ASK, {**ANSWER, "reasoning_content": "two and two"}]})
    tokenizer, (encoded,) = encode(rows, THINKING)
    assert learnt(tokenizer, encoded) == ["<think>\ntwo and two\n</think>\n\nhow are you?<|im_end|>"]
    tokenizer, (encoded,) = encode(rows)
    assert learnt(tokenizer, encoded) == ["how are you?<|im_end|>"]
    assert ("reasoning", "in a field of its own") in encoded.remarks


def test_the_cost_of_a_long_conversation_grows_with_its_turns(tmp_path):
    turns = [ASK, {"role": "assistant", "content": "<think>\ntwo\n</think>\n\nfour"}]
    strip = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1].lstrip('\n') }}")
    counts = []
    for pairs in (5, 50):
        rows = read(tmp_path / "a.jsonl", {"messages": turns * pairs})
        tokenizer = tiny_tokenizer(specials=("<|im_start|>", "<|im_end|>"), template=strip)
        encoder, calls = Encoder(tokenizer), []
        render = encoder._render
        encoder._render = lambda *args, render=render, calls=calls, **kw: calls.append(1) or render(*args, **kw)
        (encoded,) = encoder.encode(rows, ["rows:1"])
        assert learnt(tokenizer, encoded) == ["four<|im_end|>"] * pairs
        counts.append(len(calls))
    assert counts[0] == counts[1]


def test_answers_labelled_as_bad_are_left_out(tmp_path):
    good, bad = ({"prompt": "a", "completion": "b", "label": label} for label in (True, False))
    assert [row.skip for row in read(tmp_path / "a.jsonl", good, bad)] == [
        "",
        "its answer is labelled as a bad one (label: false)",
    ]


def test_a_system_column_parts_of_text_and_roles_of_their_own(tmp_path):
    shared = {"system": "be kind", "conversations": [{"from": "prompter", "value": [{"type": "text", "text": "hi"}]}]}
    (row,) = read(tmp_path / "a.jsonl", shared, fields={"role.user": "prompter"})
    assert row.messages == ({"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"})


def test_alpaca_rows_and_preference_pairs(tmp_path):
    alpaca = {"instruction": "add", "input": "2 2", "output": "4", "history": [["hi", "ho"]]}
    (row,) = read(tmp_path / "a.jsonl", alpaca)
    assert [message["content"] for message in row.messages] == ["hi", "ho", "add\n2 2", "4"]
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(ConfigError, match=r"DPO.*format: preference"):
        read(tmp_path / "b.jsonl", pair)
    (row,) = read(tmp_path / "b.jsonl", pair, format="preference")
    assert (row.messages[-1]["content"], row.prompt_turns) == ("b", 1)


def test_the_chosen_answer_of_each_form_of_preference_pair(tmp_path):
    question, good, bad = (
        {"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("assistant", "c"))
    )
    for number, pair in enumerate(
        [
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            {"prompt": [question], "chosen": [good], "rejected": [bad]},
            {"chosen": [question, good], "rejected": [question, bad]},
            {"prompt": "a", "chosen": [question, good], "rejected": [question, bad]},
            {"instruction": "a", "chosen": "b", "rejected": "c"},
            {"conversations": [question], "chosen": good, "rejected": bad},
        ]
    ):
        (row,) = read(tmp_path / f"{number}.jsonl", pair, format="preference")
        assert (list(row.messages), row.prompt_turns) == ([question, good], 1)
        assert ("column", "rejected") in row.remarks
        with pytest.raises(ConfigError, match="preference pair"):
            read(tmp_path / f"{number}.jsonl", pair)
    (row,) = read(tmp_path / "text.jsonl", {"chosen": "Q: a A: bc", "rejected": "Q: a A: bd"}, format="preference")
    assert (row.text, row.completion) == ("Q: a A:", " bc")
    with pytest.raises(ConfigError, match="chosen is a whole conversation, and the prompt beside it is not in it"):
        read(tmp_path / "x.jsonl", {"prompt": "z", "chosen": [question, good]}, format="preference")
    # A whole conversation beside what it was chosen from is learnt, and that is named.
    (row,) = read(tmp_path / "y.jsonl", {"messages": [question, good], "chosen": "b", "rejected": "c"})
    assert {("column", "chosen"), ("column", "rejected")} <= set(row.remarks)


@pytest.mark.parametrize(
    ("prompt", "good", "bad"),
    [
        ("Was ist das?", "\nJa", "\nJein"),
        ("Was ist das?", "\n\tJa", "\n\tJein"),
        ("Q: a\u00a0A:", "\u3000bc", "\u3000bd"),
        ("人类：你好吗？\n助手：", "很好", "滚"),
        ("问：你好吗？答：", "好", "滚"),
        ("人类：你好 吗？助手：", "好", "滚"),
        ("Human: hi\n\nAssistant:", "Yes", "No"),
        ("Human: hi\n\nAssistant:", "Yes", "Yesterday"),
        ("Human:hi?Assistant:", "Yes", "No"),
        ("Human: hi\n\nAssistant: I", " do", " do not"),
        ("At 12:30 or", " 12:45?", " 12:50?"),
    ],
)
def test_plain_pairs_are_cut_where_an_answer_may_begin_and_never_in_the_question(tmp_path, prompt, good, bad):
    for one, other in ((good, bad), (bad, good)):
        pair = {"chosen": prompt + one, "rejected": prompt + other}
        (row,) = read(tmp_path / "a.jsonl", pair, format="preference")
        assert not row.skip
        assert (row.text, row.completion) == (prompt, one)


def test_plain_pairs_without_such_a_place_are_left_out(tmp_path):
    same = {"chosen": "a b", "rejected": "a b"}
    glued = {"chosen": "why?yes", "rejected": "why?yesterday"}
    apart = {"chosen": "yes it is", "rejected": "no"}
    rows = read(tmp_path / "a.jsonl", same, glued, apart, {"chosen": "alone"}, format="preference")
    assert [row.skip for row in rows] == [
        "chosen and rejected are the same text",
        "chosen and rejected begin alike, and where the answer begins cannot be told",
        "",
        "",
    ]
    assert [row.completion for row in rows[2:]] == ["yes it is", "alone"]


def test_earlier_answers_of_a_prompt_beside_a_whole_conversation_are_not_learnt(tmp_path):
    end = {"role": "assistant", "content": "paris"}
    system = {"role": "system", "content": "be kind"}
    before, whole = [ASK, ANSWER, ASK], [ASK, ANSWER, ASK, end]
    other = [*before, {"role": "assistant", "content": "rome"}]
    for number, pair in enumerate(
        [
            {"prompt": before, "chosen": whole},
            {"prompt": before, "chosen": [system, *whole]},
            {"messages": before, "chosen": whole, "rejected": [ASK, end]},
            {"chosen": whole, "rejected": other},
            {"chosen": whole, "rejected": whole},
            {"chosen": whole, "rejected": [*whole, ASK, end]},
        ]
    ):
        rows = read(tmp_path / f"{number}.jsonl", pair, format="preference")
        tokenizer, (encoded,) = encode(rows)
        assert learnt(tokenizer, encoded) == ["paris<|im_end|>"], pair
    with pytest.raises(ConfigError, match="the prompt beside it is not in it"):
        read(tmp_path / "x.jsonl", {"prompt": [ANSWER, ASK, ANSWER], "chosen": whole}, format="preference")


def test_tools_are_the_same_as_a_list_as_json_and_as_functions(tmp_path):
    function = {"name": "add", "parameters": {"type": "object", "properties": {}}}
    tool = {"type": "function", "function": function}
    spellings = [
        {"tools": [tool]},
        {"tools": tool},
        {"tools": json.dumps([tool])},
        {"tools": [json.dumps(tool)]},
        {"functions": [function]},
    ]
    rows = read(tmp_path / "a.jsonl", *[{"messages": [ASK, ANSWER], **tools} for tools in spellings])
    tokenizer, found = encode(rows, "{{ tools | tojson }}\n" + CHATML)
    stock = tokenizer.apply_chat_template([ASK, ANSWER], tools=[tool], tokenize=True, return_dict=True)["input_ids"]
    assert [encoded.ids.tolist() for encoded in found] == [stock] * len(spellings)
    for none in ({"tools": None}, {"tools": ""}, {"tools": "[]"}, {"tools": []}):
        assert read(tmp_path / "b.jsonl", {"messages": [ASK, ANSWER], **none})[0].tools is None
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: tools is str 'add', which is not JSON"):
        read(tmp_path / "a.jsonl", {"messages": [ASK, ANSWER], "tools": "add"})


def test_labels_of_numbers_count_where_the_column_is_named(tmp_path):
    rows = [{"prompt": "a", "completion": "b", "good": label} for label in (0, 1, True, False)]
    assert [bool(row.skip) for row in read(tmp_path / "a.jsonl", *rows, fields={"label": "good"})] == [1, 0, 0, 1]
    (row,) = read(tmp_path / "b.jsonl", {"prompt": "a", "completion": "b", "label": 0})
    assert not row.skip
    assert ("column", "label") in row.remarks


def test_thinking_among_the_parts_of_a_content_is_reasoning(tmp_path):
    parts = [{"type": "thinking", "thinking": "two and two"}, {"type": "text", "text": "how are you?"}]
    rows = read(tmp_path / "a.jsonl", {"messages": [ASK, {"role": "assistant", "content": parts}]})
    tokenizer, (encoded,) = encode(rows, THINKING)
    assert learnt(tokenizer, encoded) == ["<think>\ntwo and two\n</think>\n\nhow are you?<|im_end|>"]
    for message, words in (
        ({"content": parts, "reasoning_content": "three"}, "reasoning_content and parts of content hold different"),
        ({"content": "a", "reasoning_content": "b", "thinking": "c"}, "reasoning_content and thinking hold different"),
        ({"content": [parts[1], *parts]}, r"content\[1\] is of type 'thinking' and follows text"),
        ({"content": "a", "thinking": 3}, "thinking is int 3; expected a string"),
    ):
        with pytest.raises(ConfigError, match=words):
            read(tmp_path / "c.jsonl", {"messages": [ASK, {"role": "assistant", **message}]})
    twice = {"role": "assistant", "content": parts, "reasoning_content": "two and two"}
    assert read(tmp_path / "d.jsonl", {"messages": [ASK, twice]})[0].messages == rows[0].messages
    with pytest.raises(ConfigError, match=r"content\[0\] is of type 'file'; text and thinking can be read"):
        read(tmp_path / "b.jsonl", {"messages": [{"role": "user", "content": [{"type": "file"}]}]})


def test_a_list_for_each_key_is_a_list_of_messages(tmp_path):
    talk = {"conversations": {"from": ["human", "gpt"], "value": ["hi", "ho"]}}
    (row,) = read(tmp_path / "a.jsonl", talk)
    assert [message["content"] for message in row.messages] == ["hi", "ho"]
    with pytest.raises(ConfigError, match=r"conversations holds lists of different lengths \(1, 2\)"):
        read(tmp_path / "a.jsonl", {"conversations": {"from": ["human", "gpt"], "value": ["hi"]}})


def test_a_null_column_goes_for_nothing_beside_another(tmp_path):
    nulls = dict.fromkeys(("messages", "prompt", "chosen", "tools", "label", "system"))
    (row,) = read(tmp_path / "a.jsonl", {**nulls, "text": "hello"})
    assert (row.kind, row.text, row.remarks) == ("text", "hello", (("rows", "text (text)"),))
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: text is null; write a value, or take the row out"):
        read(tmp_path / "a.jsonl", {"text": None})


def test_of_a_prompt_of_messages_the_completion_alone_is_learnt(tmp_path):
    rows = read(tmp_path / "a.jsonl", {"prompt": [ASK, ANSWER, ASK], "completion": [{**ANSWER, "content": "paris"}]})
    tokenizer, (encoded,) = encode(rows)
    assert learnt(tokenizer, encoded) == ["paris<|im_end|>"]


def test_a_csv_file_has_rows(tmp_path):
    (tmp_path / "a.csv").write_text('prompt,completion\nhi,"ho, ho"\n')
    (row,) = Source(SourceConfig(path=str(tmp_path / "a.csv"))).rows()
    assert (row.kind, row.text, row.completion, row.number) == ("completion", "hi", "ho, ho", 2)


def test_a_generation_tag_in_a_comment_is_no_mark():
    from megatrain.data.template_facts import template_facts

    assert not template_facts("{# {% generation %} #}" + CHATML).marks_generation
    assert template_facts("{% generation %}a{% endgeneration %}").marks_generation


def test_a_long_text_in_pieces_has_the_tokens_of_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("megatrain.data.file_formats.PIECE", 3000)
    monkeypatch.setattr("megatrain.data.file_formats.OVERLAP", 400)
    monkeypatch.setattr("megatrain.data.encoded.OVERLAP", 400)
    text = "".join(f"line {n}: the capital of france, {n * n} and é日\n" for n in range(900))
    (tmp_path / "a.txt").write_text(text)
    tokenizer = tiny_tokenizer()
    encoder = Encoder(tokenizer)
    parts = list(encoder.encode_all(Source(SourceConfig(path=str(tmp_path / "a.txt"))), 2))
    assert len(parts) > 5
    assert [part.goes_on for part in parts] == [True] * (len(parts) - 1) + [False]
    whole = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert [token for part in parts for token in part.ids.tolist()] == whole


def test_a_folder_skips_cards_and_hidden_files_and_wants_one_split_named(tmp_path):
    for name in ("README.md", "LICENSE", ".ipynb_checkpoints/a.jsonl", "a.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "a"}\n')
    source = Source(SourceConfig(path=str(tmp_path)))
    assert [name.rpartition("/")[2] for name in source.files] == ["a.jsonl"]
    assert {name for _, name in source.skipped} == {"README.md", "LICENSE", ".ipynb_checkpoints/a.jsonl"}
    (tmp_path / "test.jsonl").write_text('{"text": "b"}\n')
    with pytest.raises(ConfigError, match="holds the splits train, test; name one"):
        Source(SourceConfig(path=str(tmp_path)))
    assert len(Source(SourceConfig(path=str(tmp_path), split="train")).files) == 1


def test_turns_without_text_are_named(tmp_path):
    empty = {"role": "assistant", "content": " "}
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    rows = read(
        tmp_path / "a.jsonl",
        {"messages": [ASK, empty, {"role": "user", "content": ""}, ANSWER]},
        {"messages": [ASK, {**empty, "train": False}, ASK, called, ASK, ANSWER]},
        {"messages": [{"role": "system", "content": ""}, ASK, ANSWER]},
    )
    assert [[what for what in row.remarks if what[0] == "empty"] for row in rows] == [
        [("empty", "assistant"), ("empty", "user")],
        [],
        [],
    ]
    said = [remarks.describe(what, 1, 3, "a.jsonl:1") for what in rows[0].remarks if what[0] == "empty"]
    assert said[0].startswith("assistant turns without any text teach the model to answer nothing (1 of 3 rows")
    assert said[1].startswith("messages of role 'user' have no text")


def test_several_rows_that_cannot_be_read_are_named_at_once(tmp_path):
    good = json.dumps({"messages": [ASK, ANSWER]})
    lines = [good, '{"messages": []}', good, '{"messages": [{"content": "no role"}]}', '{"mesages": [', good]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines) + "\n")
    rows = Source(SourceConfig(path=str(path))).rows()
    next(rows)
    with pytest.raises(ConfigError) as raised:
        next(rows)
    first, count, *others = str(raised.value).splitlines()
    assert first.startswith(f"{path}:2: messages is list []; expected a list of messages")
    assert count == "2 more rows of this file cannot be read:"
    assert others[0].startswith(f"  {path}:4: messages[0] has the keys content; expected role and content")
    assert others[1].startswith(f"  {path}:5 is not JSON: ")
    path.write_text('{"messages": []}\n' * 30)
    with pytest.raises(ConfigError) as raised:
        next(Source(SourceConfig(path=str(path))).rows())
    assert str(raised.value).count("messages is") == 10, "enough to see what is wrong"
    csv = tmp_path / "a.csv"
    csv.write_text("text\none\ntwo,2\nthree\nfour,4\n")
    with pytest.raises(ConfigError, match=r"a\.csv:3 has 2 cells(.|\n)*\n1 more row of this file(.|\n)*a\.csv:5 has 2"):
        list(Source(SourceConfig(path=str(csv))).rows())


@pytest.mark.parametrize(
    ("row", "fields", "message"),
    [
        (
            {"prompt": "a", "completion": "b", "is_good": False},
            {"label": "is_godo"},
            r"\(did you mean is_good\?\); name",
        ),
        ({"messages": [ASK, ANSWER], "system": "s"}, {"system": "sytem"}, r"\(did you mean system\?\)"),
        ({"messages": [ASK, ANSWER]}, {"prompt": "question"}, r"\(known are messages\)"),
        (
            {"instruction": "a", "output": "b", "more": "c"},
            {"input": "extra"},
            r"\(known are instruction, output, more\)",
        ),
        ({"messages": [ASK, ANSWER], "functions": "[]"}, {"tools": "function"}, r"did you mean functions"),
        ({"chosen": [ANSWER], "prompt": "a"}, {"rejected": "worse"}, r"\(known are chosen, prompt\)"),
    ],
)
def test_a_column_that_is_named_and_that_no_row_has_is_refused(tmp_path, row, fields, message):
    settings = {"fields": fields} | ({"format": "preference"} if "chosen" in row else {})
    ((name, column),) = fields.items()
    with pytest.raises(
        ConfigError, match=rf"fields \{{{name}: {column}\}} of .*a\.jsonl has no effect: no row has .*{message}"
    ):
        read(tmp_path / "a.jsonl", row, row, **settings)
    assert len(read(tmp_path / "a.jsonl", row, row | {column: None}, **settings)) == 2, "in one of them will do"


def test_a_named_column_may_be_in_any_file_of_a_source(tmp_path):
    row = {"prompt": "a", "completion": "b"}
    for name, value in (("a", row), ("b", row | {"good": False})):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(value) + "\n")
    (tmp_path / "c.txt").write_text("a text has no columns")
    for path in (tmp_path, tmp_path / "*"):
        found = list(Source(SourceConfig(path=str(path), fields={"label": "good"})).rows())
        assert [bool(one.skip) for one in found][:2] == [False, True]
    with pytest.raises(ConfigError, match=r"fields \{label: fine\}"):
        list(Source(SourceConfig(path=str(tmp_path / "*"), fields={"label": "fine"}, split=0.5)).rows())
