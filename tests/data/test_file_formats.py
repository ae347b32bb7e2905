"""Files of every kind as rows: CSV, compressed, columnar, folders that `datasets` saved, LLaMA-Factory's list."""

import gzip
import json

import pytest

from megatrain.config import Config, SourceConfig
from megatrain.data import prepare
from megatrain.data.readers import Source
from megatrain.errors import ConfigError
from support.tiny_tokenizer import tiny_tokenizer

ASK, ANSWER = {"role": "user", "content": "hello there"}, {"role": "assistant", "content": "how are you?"}
CALL = {"type": "function", "function": {"name": "add", "arguments": json.dumps({"a": 1})}}


def rows(path, **settings):
    return list(Source(SourceConfig(path=str(path), **settings)).rows())


def texts(path, **settings):
    return [row.text for row in rows(path, **settings)]


# CSV


def test_cells_of_csv_may_hold_separators_line_breaks_and_quotes(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbftext,x\r\n"a,\r\n""b""",1\r\nc,2\r\n')
    assert [(row.text, row.number) for row in rows(tmp_path / "a.csv")] == [('a,\r\n"b"', 2), ("c", 4)]
    (tmp_path / "a.tsv").write_text('text\tx\na, "b"\t1\n')
    assert texts(tmp_path / "a.tsv") == ['a, "b"']


def test_conversations_in_a_cell_are_json(tmp_path):
    cell = json.dumps([ASK, ANSWER]).replace('"', '""')
    (tmp_path / "a.csv").write_text(f'messages\n"{cell}"\n')
    (row,) = rows(tmp_path / "a.csv")
    assert list(row.messages) == [ASK, ANSWER]


def test_the_index_that_pandas_writes_is_a_column_that_is_not_used(tmp_path):
    (tmp_path / "a.csv").write_text(",text\n0,hello\n")
    (row,) = rows(tmp_path / "a.csv")
    assert (row.text, ("column", "Unnamed: 0") in row.remarks) == ("hello", True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"prompt;completion\na;b\n", r"a\.csv:1 names one column, 'prompt;completion'; cells are separated by ','"),
        (b"text,text\na,b\n", r"a\.csv:1: the first line has to name each column once"),
        (b"text,x\na\n", r"a\.csv:2 has 1 cells, and the first line names 2 columns"),
        (b'text\n"a\n', r"a\.csv:2 is not CSV"),
        (b"text\ncaf\xe9\n", r"a\.csv is not UTF-8: .* at byte 8"),
    ],
)
def test_what_is_wrong_with_a_csv_file_is_named(tmp_path, content, message):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        rows(tmp_path / "a.csv")


def test_bad_answers_of_csv_are_left_out_and_counted(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,completion,label\nhello,how,False\nhello,are,True\n")
    config = {"model": "owner/name", "data": {"train": str(tmp_path / "a.csv"), "cache": str(tmp_path / "cache")}}
    dataset, _ = prepare(Config.from_dict(config), tiny_tokenizer())
    assert [(count, reason) for reason, count, _ in dataset.dropped()] == [
        (1, "its answer is labelled as a bad one (label: false)")
    ]


# Compressed


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
@pytest.mark.parametrize("row", ['{"text": "a", "text": "b"}', '{"text": "a", "meta": {"role": 1, "role": 2}}'])
def test_a_key_that_a_row_has_twice_is_refused(tmp_path, name, row):
    text = f'{{"text": "c"}}\n{row}\n' if name == "rows.jsonl" else f'[{{"text": "c"}},\n{row}]'
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=rf"{name}:2 has the key '(text|role)' twice"):
        rows(tmp_path / name)


def test_gzip_is_read_through_and_a_cut_file_is_named(tmp_path):
    lines = b'{"text": "hello"}\n' * 2000
    for name, content in (("a.jsonl.gz", lines), ("a.json.gz", b'[{"text": "hello"}]'), ("a.csv.gz", b"text\nhello\n")):
        (tmp_path / name).write_bytes(gzip.compress(content))
        assert set(texts(tmp_path / name)) == {"hello"}
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines)[:-20])
    with pytest.raises(ConfigError, match=r"a\.jsonl\.gz cannot be read: .*ended before"):
        rows(tmp_path / "a.jsonl.gz")
    (tmp_path / "a.parquet.gz").write_bytes(gzip.compress(b"PAR1"))
    with pytest.raises(ConfigError, match=r"a\.parquet\.gz: \.parquet files are compressed inside.*unpack it"):
        rows(tmp_path / "a.parquet.gz")


def test_a_damaged_gzip_file_is_named(tmp_path):
    content = bytearray(gzip.compress(b"".join(b'{"text": "%d"}\n' % number for number in range(2000))))
    for place in range(60, 64):
        content[place] ^= 0xFF
    for name in ("a.jsonl.gz", "a.txt.gz"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=rf"{name} cannot be read"):
            rows(tmp_path / name)


@pytest.mark.parametrize("row", ["%s", '[{"text": "a"}, %s]'])
def test_a_number_of_thousands_of_digits_is_named(tmp_path, row):
    (tmp_path / "a.json").write_text(row % ('{"text": "a", "n": ' + "1" * 5000 + "}"))
    with pytest.raises(ConfigError, match=r"a\.json(:1)? is not JSON: .*digits"):
        rows(tmp_path / "a.json")


def test_zstd_is_read_through(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    for name, content in (("a.jsonl.zst", b'{"text": "hello"}\n' * 3), ("a.txt.zst", b"hello")):
        with arrow.output_stream(str(tmp_path / name), compression="zstd") as stream:
            stream.write(content)
        assert set(texts(tmp_path / name)) == {"hello"}
    (tmp_path / "b.jsonl.zst").write_bytes(b"no frame")
    with pytest.raises(ConfigError, match=r"b\.jsonl\.zst cannot be read"):
        rows(tmp_path / "b.jsonl.zst")


# Columnar


def columnar(tmp_path, table, kind):
    import pyarrow as pa
    import pyarrow.parquet

    file = tmp_path / f"a.{'parquet' if kind == 'parquet' else 'arrow'}"
    if kind == "parquet":
        pa.parquet.write_table(table, file, row_group_size=2)
    else:
        new = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
        with new(str(file), table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return file


@pytest.mark.parametrize("kind", ["parquet", "stream", "file"])
def test_what_a_row_of_a_columnar_file_never_had_is_absent(tmp_path, kind):
    arrow = pytest.importorskip("pyarrow")
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    values = [
        {"messages": [ASK, ANSWER], "source": "web"},
        {"messages": [ASK, called, {"role": "tool", "content": "4", "name": "add"}, ANSWER]},
        {"text": "hello"},
        {"source": "web"},
    ]
    names = ("messages", "text", "source")
    table = arrow.Table.from_pylist([{name: value.get(name) for name in names} for value in values])
    found = rows(columnar(tmp_path, table, kind))
    assert list(found[0].messages) == [ASK, ANSWER]
    assert [sorted(message) for message in found[1].messages] == [
        ["content", "role"],
        ["content", "role", "tool_calls"],
        ["content", "name", "role"],
        ["content", "role"],
    ]
    assert found[1].messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert (found[2].kind, found[2].text) == ("text", "hello")
    assert [row.skip for row in found] == ["", "", "", "messages is null"]
    assert [row.number for row in found] == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["parquet", "stream"])
def test_a_damaged_columnar_file_is_named(tmp_path, kind):
    arrow = pytest.importorskip("pyarrow")
    file = columnar(tmp_path, arrow.table({"text": ["hello"] * 100}), kind)
    content = file.read_bytes()
    for cut in (content[:-40], content[:60], b"no table" * 20):
        file.write_bytes(cut)
        with pytest.raises(ConfigError, match=rf"{file.name} (is not a readable|cannot be read)"):
            rows(file)


@pytest.mark.parametrize("kind", ["parquet", "stream", "file"])
def test_a_column_that_is_there_twice_is_refused(tmp_path, kind):
    arrow = pytest.importorskip("pyarrow")
    table = arrow.Table.from_arrays([arrow.array(["one"]), arrow.array(["two"])], names=["text", "text"])
    with pytest.raises(ConfigError, match=r"has two columns 'text'; rename one of them"):
        rows(columnar(tmp_path, table, kind))


@pytest.mark.parametrize("kind", ["parquet", "stream"])
def test_a_date_that_python_does_not_have_is_named(tmp_path, kind):
    arrow = pytest.importorskip("pyarrow")
    dates = arrow.array([2**61], type=arrow.timestamp("ms"))
    file = columnar(tmp_path, arrow.table({"text": ["hello"], "at": dates}), kind)
    with pytest.raises(ConfigError, match=rf"{file.name} is not a readable"):
        rows(file)


def test_an_older_pyarrow_is_refused_by_its_release(tmp_path, monkeypatch):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": ["one"]}), tmp_path / "a.parquet")
    monkeypatch.setattr(arrow, "__version__", "19.0.1")
    with pytest.raises(ConfigError, match=r"a\.parquet: reading Parquet needs pyarrow 20 or newer, and 19\.0\.1 is"):
        rows(tmp_path / "a.parquet")


# Folders that `datasets` saved. The files are what `save_to_disk` of datasets 5.2 writes.


def save(folder, table, split=None):
    import pyarrow as pa

    folder.mkdir(parents=True)
    with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as writer:
        writer.write_table(table)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_fingerprint": "f", "_split": split}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {"text": {"dtype": "string", "_type": "Value"}}}))
    return folder


def test_a_saved_data_set_is_read_and_its_split_is_named(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    one = save(tmp_path / "one", arrow.table({"text": ["hello"]}))
    assert texts(one) == ["hello"]
    with pytest.raises(ConfigError, match="one, a saved dataset, has no splits; leave split: train out"):
        rows(one, split="train")
    both = tmp_path / "both"
    for split, text in (("train", "there"), ("test", "paris")):
        save(both / split, arrow.table({"text": [text]}), split)
    (both / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    assert texts(both, split="train") == ["there"]
    assert texts(both / "test", split="test") == ["paris"]
    with pytest.raises(ConfigError, match=r"a saved dataset with the splits train, test; name one"):
        rows(both)
    with pytest.raises(ConfigError, match=r"has no split 'dev'; there are train, test"):
        rows(both, split="dev")
    (one / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(ConfigError, match=r"data-00000-of-00001\.arrow is missing.*copy the whole folder"):
        rows(one)


def test_what_datasets_saves_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"text": f"row {row}"}) + "\n" for row in range(5)))
    whole = datasets.load_dataset("json", data_files=str(lines), split="train", cache_dir=str(tmp_path / "cache"))
    shuffled = whole.shuffle(seed=1)
    shuffled.save_to_disk(str(tmp_path / "saved"), num_shards=2)
    assert texts(tmp_path / "saved") == list(shuffled["text"])
    datasets.DatasetDict({"train": whole, "test": whole.select([3])}).save_to_disk(str(tmp_path / "both"))
    assert texts(tmp_path / "both", split="test") == ["row 3"]


# LLaMA-Factory


def entry(tmp_path, values, **settings):
    (tmp_path / "a.json").write_text(json.dumps(values))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"mine": {"file_name": "a.json", **settings}}))
    return f"{tmp_path / 'dataset_info.json'}#mine"


def said(row):
    return [(message["role"], message["content"]) for message in row.messages]


def test_an_entry_of_dataset_info_is_read_as_llama_factory_reads_it(tmp_path):
    columns = {"prompt": "q", "query": "more", "response": "a", "system": "s", "history": "h"}
    value = {"q": "add", "more": "2 2", "a": "4", "s": "be kind", "h": [["hi", "ho"]]}
    (row,) = rows(entry(tmp_path, [value], columns=columns))
    assert said(row) == [
        ("system", "be kind"), ("user", "hi"), ("assistant", "ho"), ("user", "add\n2 2"), ("assistant", "4"),
    ]  # fmt: skip
    talk = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]
    talks = {"messages": "conversations", "system": "system"}
    (row,) = rows(entry(tmp_path, [{"conversations": talk, "system": "s"}], formatting="sharegpt", columns=talks))
    assert said(row) == [("system", "s"), ("user", "hi"), ("assistant", "ho")]
    tags = {"role_tag": "who", "content_tag": "what", "user_tag": "me", "assistant_tag": "you"}
    talk = [{"who": "me", "what": "hi"}, {"who": "you", "what": "ho"}]
    (row,) = rows(entry(tmp_path, [{"turns": talk}], formatting="sharegpt", columns={"messages": "turns"}, tags=tags))
    assert said(row) == [("user", "hi"), ("assistant", "ho")]
    columns = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    (row,) = rows(entry(tmp_path, [{"q": "hi", "good": "ho", "bad": "no"}], ranking=True, columns=columns))
    assert said(row) == [("user", "hi"), ("assistant", "ho")]
    (row,) = rows(
        entry(tmp_path, [{"q": "hi", "a": "ho", "ok": 0}], columns={"prompt": "q", "response": "a", "kto_tag": "ok"})
    )
    assert row.skip == "its answer is labelled as a bad one (ok: false)"
    assert texts(entry(tmp_path, [{"content": "hello"}], columns={"prompt": "content"})) == ["hello"]


def test_columns_that_an_entry_does_not_name_are_not_read_and_said(tmp_path):
    talk = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]
    (row,) = rows(entry(tmp_path, [{"conversations": talk, "system": "s", "tools": "[]"}], formatting="sharegpt"))
    assert said(row) == [("user", "hi"), ("assistant", "ho")]
    assert ("column", "system") in row.remarks
    value = {"instruction": "add", "input": "2 2", "output": "4", "system": "s", "history": [["hi", "ho"]]}
    (row,) = rows(entry(tmp_path, [value]))
    assert said(row) == [("user", "add\n2 2"), ("assistant", "4")], "those with a default are read"
    (row,) = rows(entry(tmp_path, [value], columns={"prompt": "instruction", "response": "output"}))
    assert said(row) == [("user", "add"), ("assistant", "4")], "an entry with columns names all that are read"
    assert [name for kind, name in row.remarks if kind == "column"] == ["input", "system", "history"]
    (row,) = rows(entry(tmp_path, [value]), fields={"system": "system"})
    assert said(row)[0] == ("system", "s"), "the source's own fields come before the entry's"


def test_a_column_that_an_entry_names_and_no_row_has_is_refused(tmp_path):
    talk = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]
    columns = {"messages": "conversations", "system": "sytem"}
    path = entry(tmp_path, [{"conversations": talk, "system": "s"}], formatting="sharegpt", columns=columns)
    with pytest.raises(ConfigError, match=r"fields \{system: sytem\} of .*did you mean system"):
        rows(path)
    assert said(rows(path, fields={"system": "system"})[0])[0] == ("system", "s")


def test_a_column_is_left_unread_where_its_name_is_empty(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "hi", "completion": "ho", "system": "s"}) + "\n")
    (row,) = rows(tmp_path / "a.jsonl", fields={"system": ""})
    assert (row.system, ("column", "system") in row.remarks) == ("", True)
    (tmp_path / "a.csv").write_text(",text\n0,hello\n")  # an index without a name, as pandas writes it
    (row,) = rows(tmp_path / "a.csv", fields={"system": "", "label": ""})
    assert (row.text, row.skip) == ("hello", "")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"columns": {"images": "pictures"}}, r"#mine: images cannot be read"),
        ({"formatting": "chatml"}, r"#mine: formatting is 'chatml'; it must be alpaca or sharegpt"),
        ({"num_samples": 5}, r"#mine: num_samples is not supported; write a fraction as the source's split"),
        ({"shuffle": True}, r"#mine: shuffle cannot be read"),
    ],
)
def test_what_is_not_read_of_an_entry_is_refused_by_name(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        rows(entry(tmp_path, [{"instruction": "a", "output": "b"}], **settings))


# Folders


def test_a_folder_as_on_a_hub_wants_its_split_named(tmp_path):
    for name in ("data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl", "README.md", ".gitattributes"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    with pytest.raises(
        ConfigError, match=r"holds the splits train, test; name one, such as \{path: .*, split: train\}"
    ):
        rows(tmp_path)
    assert texts(tmp_path, split="train") == ["data/train-00000-of-00001.jsonl"]
    with pytest.raises(ConfigError, match=r"has no split 'validation'"):
        rows(tmp_path, split="validation")


def test_words_in_which_a_split_is_spelled_are_no_splits(tmp_path):
    for name in ("latest.jsonl", "contest.jsonl", "evaluate_me.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    assert len(texts(tmp_path)) == 3


def test_a_folder_of_two_kinds_of_rows_is_refused_where_none_is_the_most_frequent(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "b.csv").write_text("text\na\n")
    with pytest.raises(ConfigError, match=r"files of several kinds \(1 \.csv, 1 \.jsonl\)|\(1 \.jsonl, 1 \.csv\)"):
        rows(tmp_path)
    (tmp_path / "c.csv").write_text("text\nb\n")
    source = Source(SourceConfig(path=str(tmp_path)))
    assert [row.text for row in source.rows()] == ["a", "b"]
    assert source.skipped == (("files of another kind", "a.jsonl"),)
