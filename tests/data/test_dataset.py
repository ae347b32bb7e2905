"""Rows out of files, what is refused, and the cache of tokens."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatrain.config import Config, SourceConfig
from megatrain.data import cache, inspection, prepare
from megatrain.data.readers import Source
from megatrain.data.rows import Row
from megatrain.data.tokenization import Encoder
from megatrain.errors import ConfigError, StorageError
from support.tiny_tokenizer import tiny_tokenizer

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def rows(path, held_out=False, **settings):
    return list(Source(SourceConfig(path=str(path), **settings), held_out=held_out).rows())


def write(path, *values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def make(tmp_path, data, tokenizer=None, vocab_size=None, **sections):
    config = Config.from_dict(
        {"model": "owner/name", "data": {"seq_len": 64, "cache": str(tmp_path / "cache"), **data}, **sections}
    )
    return prepare(config, tokenizer or tiny_tokenizer(), vocab_size=vocab_size)


def ids(dataset):
    return [part.tokens.tokens.tolist() for part in dataset.parts]


# Sources


def test_each_format_is_known_by_its_keys(tmp_path):
    text = write(tmp_path / "a.jsonl", {"text": "one"}, {"text": "two", "extra": 1})
    assert [(row.kind, row.text, row.number) for row in rows(text)] == [("text", "one", 1), ("text", "two", 2)]
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    (row,) = rows(write(tmp_path / "b.jsonl", {"messages": turns}))
    assert (row.kind, list(row.messages)) == ("chat", turns)
    shared = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}
    (row,) = rows(write(tmp_path / "c.jsonl", shared))
    assert list(row.messages) == turns
    (row,) = rows(write(tmp_path / "d.jsonl", {"prompt": "hi", "completion": "ho"}))
    assert (row.kind, row.text, row.completion) == ("completion", "hi", "ho")
    (row,) = rows(write(tmp_path / "e.jsonl", {"prompt": turns[:1], "completion": turns[1:]}))
    assert list(row.messages) == turns


def test_a_text_file_is_one_document_and_a_json_file_a_list(tmp_path):
    (tmp_path / "book.txt").write_text("\ufeffline one\nline two\n", encoding="utf-8")
    assert [row.text for row in rows(tmp_path / "book.txt")] == ["line one\nline two\n"]
    (tmp_path / "list.json").write_text(json.dumps([{"text": "a"}, {"text": "b"}]))
    assert [row.text for row in rows(tmp_path / "list.json")] == ["a", "b"]
    write(tmp_path / "lines.json", {"text": "a"}, {"text": "b"})
    assert [row.text for row in rows(tmp_path / "lines.json")] == ["a", "b"]
    with gzip.open(tmp_path / "packed.jsonl.gz", "wt") as file:
        file.write('{"text": "a"}\n')
    assert [row.text for row in rows(tmp_path / "packed.jsonl.gz")] == ["a"]
    (tmp_path / "code.py").write_text("x = 1\n")
    assert [row.text for row in rows(tmp_path / "*.py", format="text")] == ["x = 1\n"]


def test_folders_and_patterns_are_read_in_the_order_of_names(tmp_path):
    (tmp_path / "sub").mkdir()
    write(tmp_path / "b.jsonl", {"text": "b"})
    write(tmp_path / "sub" / "a.jsonl", {"text": "sub"})
    write(tmp_path / "a.jsonl", {"text": "a"})
    (tmp_path / "README").write_text("not data")
    assert [row.text for row in rows(tmp_path)] == ["a", "b", "sub"]
    assert [row.text for row in rows(tmp_path / "*.jsonl")] == ["a", "b"]


def test_fields_name_other_keys(tmp_path):
    path = write(tmp_path / "a.jsonl", {"body": "one"})
    assert rows(path, fields={"text": "body"})[0].text == "one"
    path = write(tmp_path / "b.jsonl", {"dialog": [{"who": "model", "what": "hi"}]})
    (row,) = rows(path, fields={"messages": "dialog", "role": "who", "content": "what"})
    assert row.messages == ({"role": "assistant", "content": "hi"},)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"a\.jsonl is empty"),
        (b'{"text": "a"}\n{"text": \n', r"a\.jsonl:2 is not JSON: Expecting value at column 10"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', r"a\.jsonl:2 is not UTF-8"),
        (b'{"text": "a"}\n["b"]\n', r"a\.jsonl:2 holds a list; expected an object"),
        (b'{"body": "a"}\n', r"a\.jsonl:1 has the keys body; expected text, messages, prompt and completion, or"),
        (b'{"text": 3}\n', r"a\.jsonl:1: text is int 3; expected a string"),
        (b'{"text": null}\n', r"a\.jsonl:1: text is null; write a value"),
        (b'{"text": "\\ud800"}\n', r"a\.jsonl:1: text holds half a surrogate pair"),
        (b'{"messages": []}\n', r"a\.jsonl:1: messages is list \[\]; expected a list of messages"),
        (
            b'{"messages": [{"role": "user"}]}\n',
            r"a\.jsonl:1: messages\[0\], a turn of role 'user', has no content; write its text .*or take the row out",
        ),
        (
            b'{"messages": [{"role": "user", "content": null}]}\n',
            r"messages\[0\], a turn of role 'user', has no content",
        ),
        (b'{"messages": [{"role": "user", "content": 3}]}\n', r"messages\[0\]: content is int 3; expected a string"),
        (b'{"messages": [{"text": "a"}]}\n', r"a\.jsonl:1: messages\[0\] has the keys text; expected role and content"),
        (
            b'{"messages": [{"role": "\\ud800", "content": "a"}]}\n',
            r"messages\[0\]: role holds half a surrogate pair at character 0",
        ),
        (b'{"text": "a"}\n{"text": "a", "n": ' + b"1" * 5000 + b"}\n", r"a\.jsonl:2 is not JSON: .*digits"),
        (b'{"messages": "[' + b"1" * 5000 + b']"}\n', r"a\.jsonl:1: messages is .*, which is not JSON: .*digits"),
        (
            b'{"instruction": "a", "output": "b", "history": 5}\n',
            r"a\.jsonl:1: history is int 5; expected a list of questions and answers",
        ),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}\n',
            r"content\[0\] is of type 'image'; images",
        ),
        (
            b'{"messages": [{"role": "user", "content": "<image> what?"}], "images": ["a.png"]}\n',
            r"has images; images, audio and video in rows are not read .*Engine\.step",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        rows(path)


def test_what_is_not_there_is_named(tmp_path):
    for path, message in [
        (tmp_path / "none.jsonl", r"none\.jsonl: there is no such file or folder"),
        (tmp_path, r"holds no file with a suffix among \.jsonl"),
        (tmp_path / "*.jsonl", r"no file matches"),
        ("python:nothing", r"python:nothing is not known; use python:stdlib"),
    ]:
        with pytest.raises(ConfigError, match=message):
            rows(path)
    for name, advice in (("a.rs", "write format: text"), ("a.xlsx", "save the sheet as CSV"), ("a.zip", "unpack it")):
        (tmp_path / name).write_text("a,b\n")
        with pytest.raises(ConfigError, match=advice):
            rows(tmp_path / name)
    (tmp_path / "a.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(ConfigError, match=r"a\.jsonl\.gz cannot be read"):
        rows(tmp_path / "a.jsonl.gz")


def test_parquet_without_the_package_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r"pip install 'megatrain\[datasets\]'"):
        rows(tmp_path / "a.parquet")


# Splits


def test_fractions_of_the_same_rows_are_complements_and_follow_the_content(tmp_path):
    path = write(tmp_path / "a.jsonl", *({"text": f"row {n}"} for n in range(400)))
    for fraction in (0.1, 0.5, 0.7):
        low, high = rows(path, held_out=True, split=fraction), rows(path, split=1 - fraction)
        assert abs(len(low) - 400 * fraction) < 40
        assert sorted(row.number for row in low + high) == list(range(1, 401))
    # The same rows elsewhere, in another order, fall on the same side.
    other = write(tmp_path / "b.jsonl", *({"text": f"row {n}"} for n in reversed(range(400))))
    assert {row.text for row in rows(other, held_out=True, split=0.7)} == {row.text for row in low}


def test_a_named_split_is_that_of_files_or_folders(tmp_path):
    write(tmp_path / "train-00001.jsonl", {"text": "a"})
    write(tmp_path / "validation.jsonl", {"text": "b"})
    (tmp_path / "test").mkdir()
    write(tmp_path / "test" / "x.jsonl", {"text": "c"})
    assert [[row.text for row in rows(tmp_path, split=name)] for name in ("train", "validation", "test")] == [
        ["a"],
        ["b"],
        ["c"],
    ]
    with pytest.raises(ConfigError, match=r"has no split 'gold': .*There are .*train"):
        rows(tmp_path, split="gold")


def test_the_standard_library_is_the_same_every_time_and_splits():
    everything = rows("python:stdlib")
    assert everything == rows("python:stdlib")
    held_out = rows("python:stdlib", split="eval")
    assert 0 < len(held_out) < len(rows("python:stdlib", split="train")) < len(everything)
    assert {row.text for row in held_out}.isdisjoint(row.text for row in rows("python:stdlib", split=0.95))
    source = Source(SourceConfig(path="python:stdlib"))
    assert source.where(everything[0].file, 0).endswith(".py")
    with pytest.raises(ConfigError, match="has no split 'dev'; write train, eval"):
        rows("python:stdlib", split="dev")


def test_the_standard_library_asks_and_answers():
    talk = rows("python:stdlib-chat")
    assert len(talk) > 500
    assert all([message["role"] for message in row.messages] == ["user", "assistant"] for row in talk)
    assert len({row.messages[0]["content"] for row in talk}) == len(talk)


# Data sets


def test_sources_that_select_nothing_or_teach_nothing_are_refused(tmp_path):
    (tmp_path / "book.txt").write_text("hello there")
    with pytest.raises(
        ConfigError, match=r"data\.\w+\.0: .*book\.txt selects no row with split: 0\.\d+; a split takes"
    ):
        make(tmp_path, {"train": str(tmp_path / "book.txt"), "eval": 0.3})
    path = write(tmp_path / "chat.jsonl", *[{"messages": [{"role": "user", "content": "hello"}]}] * 3)
    tokenizer = tiny_tokenizer(specials=("<|im_start|>", "<|im_end|>"), template=CHATML)
    with pytest.raises(ConfigError, match=r"no row of .* can be trained on: 3 of 3 rows: no supervised token .*:1\)"):
        make(tmp_path, {"train": str(path)}, tokenizer)


def test_a_token_outside_the_vocabulary_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", {"text": "hello there"})
    with pytest.raises(
        ConfigError, match=r"a\.jsonl:1 holds the token id \d+ .*, and the model's vocabulary has 100 entries"
    ):
        make(tmp_path, {"train": str(path)}, vocab_size=100)


def test_of_a_single_text_the_end_is_held_out_and_nothing_is_lost_or_doubled(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"line {n}\n" for n in range(200)))
    (trained,), (held,) = rows(path, split=0.9), rows(path, split=0.1, held_out=True)
    assert trained.text + held.text == path.read_text()
    assert held.text.startswith("line ")
    assert 15 <= held.text.count("\n") <= 20
    train, evaluation = make(tmp_path, {"train": str(path), "eval": 0.1})
    assert train.num_rows == evaluation.num_rows == 1


def test_a_fraction_is_held_out_of_training(tmp_path):
    path = write(tmp_path / "a.jsonl", *({"text": f"row {n}"} for n in range(100)))
    train, held_out = make(tmp_path, {"train": str(path), "eval": 0.2})
    assert held_out is not None
    assert train.num_rows + held_out.num_rows == 100
    assert {train.where(row) for row in range(train.num_rows)}.isdisjoint(
        held_out.where(row) for row in range(held_out.num_rows)
    )


def test_rows_that_are_trained_on_and_measured_are_refused_or_said(tmp_path, caplog):
    path = write(tmp_path / "a.jsonl", *({"text": f"row {number}"} for number in range(9)))
    with pytest.raises(
        ConfigError, match=r"data\.eval: .*a\.jsonl of .* would be trained on too, as a part of .*\*\.jsonl"
    ):
        make(tmp_path, {"train": str(tmp_path / "*.jsonl"), "eval": str(path)})
    said = "is trained on too, so its loss is not a held-out one"
    train, held_out = make(tmp_path, {"train": str(path), "eval": str(path)})
    assert ids(train) == ids(held_out)
    assert f"data.eval: {path} {said}" in caplog.text
    caplog.clear()
    make(tmp_path, {"train": str(path), "eval": [{"path": str(path), "split": 0.5}]})
    assert said not in caplog.text


def test_a_slow_tokenizer_is_refused():
    class Slow:
        pass

    with pytest.raises(ConfigError, match="Slow has no fast form"):
        Encoder(Slow())  # type: ignore[arg-type]


def test_threads_and_chunks_do_not_show(tmp_path, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    monkeypatch.setattr("megatrain.data.tokenization._CHUNK_ROWS", 7)
    path = write(tmp_path / "a.jsonl", *({"text": f"hello {n} there" * (n % 5)} for n in range(100)))
    one, _ = make(tmp_path / "1", {"train": str(path), "workers": 1})
    two, _ = make(tmp_path / "2", {"train": str(path), "workers": 3})
    three, _ = make(tmp_path / "3", {"train": str(path)})
    assert ids(one) == ids(two) == ids(three)
    assert os.environ.get("TOKENIZERS_PARALLELISM") != "false"


def test_an_error_in_a_thread_names_its_row_and_leaves_no_cache(tmp_path):
    good = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 300
    path = write(tmp_path / "a.jsonl", *good, {"messages": [{"role": "odd", "content": "a"}]})
    template = "{% for m in messages %}{% if m.role == 'odd' %}{{ raise_exception('odd role') }}{% endif %}{% endfor %}"
    tokenizer = tiny_tokenizer(specials=("<|im_start|>", "<|im_end|>"), template=template + CHATML)
    with pytest.raises(ConfigError, match=r"a\.jsonl:301: the chat template refused this conversation: odd role"):
        make(tmp_path, {"train": str(path)}, tokenizer)
    assert list((tmp_path / "cache").iterdir()) == []


# Long conversations


@pytest.fixture
def talks(tmp_path):
    """(settings, tokenizer) of a conversation of three exchanges of 20 tokens and more, and of one with a long
    question first."""
    ask, answer = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "how are you?"}
    path = write(
        tmp_path / "talks.jsonl",
        {"messages": [ask, answer] * 3},
        {"messages": [{**ask, "content": "fox " * 90}, answer]},
    )
    return {"train": str(path)}, tiny_tokenizer(specials=("<|im_start|>", "<|im_end|>"), template=CHATML)


@pytest.mark.parametrize("long_rows", ["split", "truncate"])
def test_a_long_conversation_keeps_the_answers_that_fit_whole_and_that_is_said(tmp_path, talks, long_rows):
    data, tokenizer = talks
    (row,) = rows(data["train"])[:1]
    whole = tokenizer.apply_chat_template(list(row.messages), tokenize=True, return_dict=True)["input_ids"]
    exchange = len(whole) // 3
    train, _ = make(tmp_path, data | {"long_rows": long_rows, "seq_len": 2 * exchange + 7}, tokenizer)
    (part,) = train.parts
    kept = part.tokens.tokens[part.pieces.start[0] :][: part.pieces.length[0]]
    assert len(part.pieces) == 1
    assert kept.tolist() == whole[: 2 * exchange - len(tokenizer("\n")["input_ids"])]
    assert tokenizer.decode(kept).endswith("how are you?<|im_end|>")
    notes = train.notes()
    lost = len(tokenizer("how are you?<|im_end|>")["input_ids"])
    assert any(
        f"1 of 2 rows are cut off at {2 * exchange + 7} tokens and lose {lost} supervised" in note for note in notes
    )
    assert any("1 of 2 rows left out: longer than" in note and "no whole answer fits" in note for note in notes)
    assert any("talks.jsonl:2" in note for note in notes)


def test_long_conversations_are_left_out_or_refused_as_asked(tmp_path, talks):
    data, tokenizer = talks
    with pytest.raises(ConfigError, match=r"data\.train\.0: no row .* 2 of 2 rows: longer than 40 tokens"):
        make(tmp_path, data | {"long_rows": "drop", "seq_len": 40}, tokenizer)
    train, _ = make(tmp_path, data | {"long_rows": "drop", "seq_len": 100}, tokenizer)
    assert [(reason, count) for reason, count, _ in train.dropped()] == [("longer than 100 tokens", 1)]
    with pytest.raises(ConfigError, match=r"talks\.jsonl:2 has \d+ tokens, more than data\.seq_len \(100\)"):
        make(tmp_path, data | {"long_rows": "error", "seq_len": 100}, tokenizer)


def test_a_prompt_that_fills_the_sequence_is_not_parted_from_its_completion(tmp_path):
    path = write(
        tmp_path / "a.jsonl", {"prompt": "fox " * 90, "completion": "dog"}, {"prompt": "a", "completion": "dog"}
    )
    train, _ = make(tmp_path, {"train": str(path), "seq_len": 40})
    (dropped,) = train.dropped()
    assert dropped[0] == "longer than 40 tokens, and none of their first 40 tokens is supervised"
    assert train.num_sequences == 1


# Cache


def test_every_change_gives_fresh_ids_and_none_is_a_hit(tmp_path):
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "how are you?"}] * 2
    path = write(tmp_path / "a.jsonl", *[{"messages": talk}] * 3)
    specials = ("<|im_start|>", "<|im_end|>")

    def run(template=CHATML, vocab_size=320, out="one", source=path, **data):
        tokenizer = tiny_tokenizer(specials=specials, template=template, vocab_size=vocab_size)
        return make(tmp_path, {"train": str(source), **data}, tokenizer, output={"dir": str(tmp_path / out)})[0]

    first = run()
    assert not first.cached
    other_tokenizer = run(vocab_size=290)
    other_template = run(template=CHATML.replace("\n", " "))
    other_mask = run(supervise="last")
    shorter = run(seq_len=40)
    for changed in (other_tokenizer, other_template, other_mask):
        assert not changed.cached
    assert ids(other_tokenizer) != ids(first)
    assert ids(other_template) != ids(first)
    assert ids(other_mask) == ids(first)
    assert inspection.summary(other_mask).num_supervised < inspection.summary(first).num_supervised
    assert max(shorter.parts[0].pieces.length) <= 40 < max(first.parts[0].pieces.length)
    again = run(out="two")
    assert again.cached
    assert ids(again) == ids(first)
    # The same size and date, another content.
    stamp = path.stat()
    path.write_text(path.read_text().replace("how are you?", "who are you?"))
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    edited = run()
    assert not edited.cached
    assert ids(edited) != ids(first)


def test_a_half_written_entry_is_never_used(tmp_path, caplog):
    path = write(tmp_path / "a.jsonl", {"text": "hello there"})
    first, _ = make(tmp_path, {"train": str(path)})
    (entry,) = (tmp_path / "cache").iterdir()
    tokens = entry / "tokens.bin"
    whole = tokens.read_bytes()
    for damage in (
        lambda: tokens.write_bytes(whole[:-4]),
        tokens.unlink,
        lambda: (entry / "meta.json").write_text("{"),
    ):
        damage()
        again, _ = make(tmp_path, {"train": str(path)})
        assert not again.cached
        assert ids(again) == ids(first)
    assert "damaged" in caplog.text


def test_a_writer_that_is_killed_leaves_nothing_that_is_found(tmp_path):
    script = f"""
import os
from megatrain.data import cache
from megatrain.data.rows import Row
from megatrain.data.encoded import Encoded
import numpy as np
from pathlib import Path
def rows():
    yield Encoded(Row(kind="text", file=0, number=1), np.ones(5, np.int32), np.ones(5, np.uint8))
    os._exit(9)
cache.save(Path({str(tmp_path)!r}), "entry", rows())
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    assert cache.load(tmp_path, "entry") is None
    row = Row(kind="text", file=0, number=1)
    from megatrain.data.encoded import Encoded

    saved = cache.save(tmp_path, "entry", [Encoded(row, np.ones(5, np.int32), np.ones(5, np.uint8))])
    found = cache.load(tmp_path, "entry")
    assert found is not None
    assert found.cached
    assert found.tokens.tolist() == saved.tokens.tolist() == [1] * 5


def test_a_cache_that_cannot_be_written_is_an_error_only_where_it_was_asked_for(tmp_path, monkeypatch, caplog):
    path = write(tmp_path / "a.jsonl", {"text": "hello there"})
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(StorageError, match=r"name another folder in data\.cache"):
        make(tmp_path, {"train": str(path), "cache": str(blocked / "in")})
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    train, _ = make(tmp_path, {"train": str(path), "cache": None})
    assert train.num_rows == 1
    assert "Going on without a cache" in caplog.text
    assert cache.default_folder() == Path(blocked) / "megatrain" / "data"


# View


def test_the_view_shows_every_token_and_why_rows_are_dropped(tmp_path):
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "how are you?"}]
    path = write(tmp_path / "a.jsonl", {"messages": talk}, {"messages": talk[:1]}, {"messages": [*talk * 20]})
    tokenizer = tiny_tokenizer(specials=("<|im_start|>", "<|im_end|>"), template=CHATML)
    train, _ = make(tmp_path, {"train": str(path), "long_rows": "drop"}, tokenizer)
    first, second, third = inspection.rows(train, tokenizer)
    assert "".join(token.text for token in first.tokens) == tokenizer.apply_chat_template(talk, tokenize=False)
    assert "".join(token.text for token in first.tokens if token.supervised).strip() == "how are you?<|im_end|>"
    assert first.num_supervised == sum(token.supervised for token in first.tokens)
    assert (first.dropped, second.dropped, third.dropped) == (None, "no supervised token", "longer than 64 tokens")
    assert second.where.endswith("a.jsonl:2")
    assert train.notes() == [
        f"1 of 3 rows left out: no supervised token, for example {path}:2",
        f"1 of 3 rows left out: longer than 64 tokens, for example {path}:3",
    ]
    assert len(list(inspection.rows(train, tokenizer, limit=1))) == 1
    assert inspection.summary(train).num_pieces == 3
    assert json.dumps(inspection.summary(train).to_dict())
