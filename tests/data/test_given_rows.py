"""Rows that a Python program hands over get the treatment of rows from a file: the same tokens, marks, remarks, errors
with their place, and the same run."""

import json
import logging

import pytest

from megatrain.cli import main
from megatrain.config import Config, SourceConfig
from megatrain.data import prepare
from megatrain.data.given_rows import check, given
from megatrain.data.readers import Source
from megatrain.errors import ConfigError
from megatrain.training.run_dir import read_metrics
from megatrain.training.stop import Stop
from megatrain.training.trainer import Trainer
from support.runs import settings, write_rows
from support.tiny_tokenizer import tiny_tokenizer
from support.trainer import At, assert_bit_equal, fit

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ASK, ANSWER = {"role": "user", "content": "hello there"}, {"role": "assistant", "content": "how are you?"}
ROWS = [
    {"messages": [ASK, ANSWER | {"weight": 0}, ASK, ANSWER], "source": "web"},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}], "system": "be kind"},
    {"prompt": "a", "completion": "b"},
    {"prompt": "a", "completion": "c", "label": False},
    {"instruction": "add", "input": "2 2", "output": "4"},
    {"text": "plain"},
]


def prepared(tmp_path, train, **source):
    data = {"train": {"path": train, **source}, "seq_len": 64, "cache": str(tmp_path / "cache")}
    config = Config.from_dict({"model": "owner/name", "data": data})
    return prepare(config, tiny_tokenizer(specials=("<|im_start|>", "<|im_end|>"), template=CHATML))[0]


def test_rows_are_read_as_those_of_a_file(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    theirs = prepared(tmp_path, str(file))
    with given({"mine": ROWS}):
        ours = prepared(tmp_path, "rows:mine")
    one, other = ours.parts[0].tokens, theirs.parts[0].tokens
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.supervised.tolist() == other.supervised.tolist()
    assert one.remarks == other.remarks
    assert [(kind, name) for (kind, name), _, _ in one.remarks if kind == "column"] == [("column", "source")]
    place = "rows:mine:4"
    assert ours.dropped() == [("its answer is labelled as a bad one (label: false)", 1, place)]
    assert [note.replace("rows:mine", str(file)) for note in ours.notes()] == theirs.notes()


def test_fields_weights_and_fractions_work_as_for_files(tmp_path):
    rows = [{"body": f"row {n}", "rating": n / 4 + 0.25} for n in range(40)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    how = {"fields": {"text": "body", "weight": "rating"}, "split": 0.5}
    for held_out in (False, True):
        theirs = [
            (row.text, row.weight) for row in Source(SourceConfig(path=str(file), **how), held_out=held_out).rows()
        ]
        with given({"mine": rows}):
            ours = Source(SourceConfig(path="rows:mine", **how), held_out=held_out)
            assert [(row.text, row.weight) for row in ours.rows()] == theirs
        assert 5 < len(theirs) < 35


def test_numbers_and_nulls_of_a_data_set_are_those_of_a_columnar_file():
    datasets, numpy = pytest.importorskip("datasets"), pytest.importorskip("numpy")
    columns = {"text": ["a", None], "messages": [None, [ASK, ANSWER]]}
    with given({"mine": datasets.Dataset.from_dict(columns), "own": [{"text": "a", "w": numpy.float32(0.5)}]}):
        rows = list(Source(SourceConfig(path="rows:mine")).rows())
        assert [row.kind for row in rows] == ["text", "chat"]
        (row,) = Source(SourceConfig(path="rows:own", fields={"weight": "w"})).rows()
        assert row.weight == 0.5
        with pytest.raises(
            ConfigError, match=r"fields \{system: s\} of rows:own has no effect: no row has a column s "
        ):
            list(Source(SourceConfig(path="rows:own", fields={"system": "s"})).rows())


def test_what_is_wrong_with_a_row_is_said_with_its_place():
    with given({"mine": [{"text": "a"}, {"messages": [{"role": "user"}]}]}):
        with pytest.raises(ConfigError, match=r"rows:mine:2: messages\[0\], a turn of role 'user', has no content"):
            list(Source(SourceConfig(path="rows:mine")).rows())
        with pytest.raises(ConfigError, match="rows:mine has no split 'train'; hand those rows over under a name"):
            Source(SourceConfig(path="rows:mine", split="train"))
    with pytest.raises(ConfigError, match=r"rows:mine are rows that a Python program hands over: megatrain\.Trainer"):
        Source(SourceConfig(path="rows:mine"))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"chats": [], "chat": []}, r"rows\['chat'\] is not used: no source of data\.train or data\.eval is rows:chat"),
        ({}, r"rows:chats are rows that a Python program hands over: .*rows=\{'chats': …\}"),
        (None, r"rows:chats are rows that a Python program hands over"),
        ([{"text": "a"}], r"rows is list; give a mapping of names to rows"),
        ({"chats": iter([])}, r"rows\['chats'\] is list_iterator; give a list of dicts or a datasets\.Dataset"),
        ({"chats": {"text": ["a"]}}, r"rows\['chats'\] is dict; give a list of dicts"),
        ({"chats": "rows.jsonl"}, r"rows\['chats'\] is str; give a list of dicts"),
    ],
)
def test_rows_that_do_not_belong_to_the_configuration_are_refused(rows, message):
    config = Config.from_dict({"model": "owner/name", "data": {"train": "rows:chats"}})
    with pytest.raises(ConfigError, match=message):
        check(rows, config)


def test_a_run_on_rows_is_that_of_the_file_and_resumes_with_the_same_rows_only(tmp_path, caplog, capsys):
    file = write_rows(tmp_path / "rows.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    held_out = rows[:8]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    data = {"train": str(file), "eval": str(tmp_path / "held_out.jsonl")}
    fit(settings(tmp_path, data=data, output={"dir": str(tmp_path / "file")}))

    config = settings(
        tmp_path, data={"train": "rows:mine", "eval": "rows:held_out"}, output={"dir": str(tmp_path / "given")}
    )
    stop = Stop()
    ours = {"mine": rows, "held_out": held_out}
    Trainer(config, rows=ours, stop=stop, display=At(3, lambda: stop.request("SIGINT"))).fit()
    with pytest.raises(ConfigError, match=r"data\.train\[0\]: its content changed since step 3: rows:mine"):
        Trainer(config, rows=ours | {"mine": rows[:-1]}).fit()
    with caplog.at_level(logging.INFO, "megatrain"):
        assert Trainer(config, rows=ours).fit().step == 6
    assert_bit_equal(tmp_path / "given/checkpoints/step-6", tmp_path / "file/checkpoints/step-6")
    assert read_metrics(tmp_path / "given")[-1]["eval_loss"] == read_metrics(tmp_path / "file")[-1]["eval_loss"]
    assert main(["eval", str(tmp_path / "given")]) == 2
    assert "rows:mine are rows that a Python program hands over" in capsys.readouterr().err
