"""Weights of rows, from a column of a file to the batches and the loss of a run."""

import json

import pytest
import torch

from megatrain.cli import main
from megatrain.config import Config, SourceConfig
from megatrain.data import IGNORED, Loader, inspection, prepare
from megatrain.data.readers import Source
from megatrain.errors import ConfigError
from megatrain.training.run_dir import read_metrics
from support.runs import WORDS, settings
from support.tiny_tokenizer import tiny_tokenizer
from support.trainer import assert_bit_equal, fit

COLUMN = {"weight": "w"}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path, *rows, **options):
    return list(Source(SourceConfig(path=str(write(path, rows)), fields=COLUMN, **options)).rows())


def prepared(tmp_path, sources, **data):
    settings = {"train": sources, "seq_len": 16, "cache": str(tmp_path / "cache"), **data}
    config = Config.from_dict({"model": "owner/name", "data": settings, "train": {"batch_size": 2}})
    return prepare(config, tiny_tokenizer())[0], config


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("cached", [False, True])
def test_every_token_of_a_batch_has_the_weight_of_its_row(tmp_path, packing, cached):
    heavy = write(tmp_path / "a.jsonl", [{"text": f"row {n} of a", "w": (n + 1) / 4} for n in range(6)])
    plain = write(tmp_path / "b.jsonl", [{"text": f"row {n} of b"} for n in range(4)])
    sources = [{"path": str(heavy), "fields": COLUMN}, str(plain)]
    for _ in range(1 + cached):
        train, config = prepared(tmp_path, sources, packing=packing)
    assert train.parts[0].tokens.cached == cached
    seen = {}
    with Loader(train, config, micro_batch=1) as loader:
        for step in range(loader.num_steps):
            batch = loader.batch(step)
            ids, pieces = iter(batch.row_ids), []
            for micro in batch.micro_batches:
                weights, labels = micro["loss_weights"], micro["labels"]
                assert weights.shape == labels.shape
                assert weights.dtype == torch.float32
                real = int(micro["attention_mask"].sum()) if "attention_mask" in micro else None
                starts = (micro["position_ids"][0] == 0).nonzero().flatten().tolist() if packing else [0]
                for start, stop in zip(starts, [*starts[1:], labels.shape[1]], strict=True):
                    if packing and not (labels[0, start:stop] != IGNORED).any():
                        continue  # padding
                    values = weights[0, start : real or stop]
                    learnt = labels[0, start : real or stop] != IGNORED
                    pieces.append((next(ids), set(values[learnt].tolist())))
            for row, values in pieces:
                seen.setdefault(row, set()).update(values)
    assert seen == {**{n: {(n + 1) / 4} for n in range(6)}, **{n: {1.0} for n in range(6, 10)}}
    assert inspection.summary(train).weights == {"min": 0.25, "mean": pytest.approx(0.925), "max": 1.5}


def test_each_kind_of_row_may_have_a_weight_and_its_column_is_used(tmp_path):
    ask, answer = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "there", "weight": 0}
    rows = read(
        tmp_path / "a.jsonl",
        {"text": "hello", "w": 2},
        {"messages": [ask, answer], "w": 0.5},
        {"prompt": "a", "completion": "b", "w": 1e-3},
        {"instruction": "a", "output": "b", "w": "0.125"},
    )
    assert [row.weight for row in rows] == [2.0, 0.5, pytest.approx(1e-3), 0.125]
    assert rows[1].marks == (None, False), "the weight of a turn is a mark still"
    assert not [remark for row in rows for remark in row.remarks if remark[0] == "column"]


def test_csv_and_columns_of_nulls(tmp_path):
    (tmp_path / "a.csv").write_text("text,w\nhello,0.5\nthere,3\n")
    rows = list(Source(SourceConfig(path=str(tmp_path / "a.csv"), fields=COLUMN)).rows())
    assert [row.weight for row in rows] == [0.5, 3.0]
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"text": ["a", "b"], "w": [0.5, None]})
    parquet.write_table(table, tmp_path / "a.parquet")
    rows = list(Source(SourceConfig(path=str(tmp_path / "a.parquet"), fields=COLUMN)).rows())
    assert (rows[0].weight, rows[1].skip) == (0.5, "w is null")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (-1, "a.jsonl:1: w is -1; a weight is a number from 0 on"),
        (float("nan"), "w is nan; a weight is a number"),
        (float("inf"), "w is inf; a weight is a number"),
        (1e39, "w is 1e.39; a weight is a number from 0 on that fp32 can hold"),
        (10**400, "w is 1000.*fp32 can hold"),
        (1e-60, "w is 1e-60; a weight is a number from 0 on that fp32 can hold"),
        (True, "w is bool True; expected a number"),
        ("heavy", "w is str 'heavy'; expected a number"),
        (None, "w is null; write a value"),
        ([1], "w is list .1.; expected a number"),
    ],
)
def test_a_weight_that_is_none_is_refused_with_its_row(tmp_path, given, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / "a.jsonl", {"text": "hello", "w": given})


def test_a_row_without_the_column_is_refused_since_weights_are_for_all_rows_or_none(tmp_path):
    with pytest.raises(
        ConfigError, match=r"a.jsonl:2 has no w, the column that fields: \{weight: w\} names; write one"
    ):
        read(tmp_path / "a.jsonl", {"text": "hello", "w": 1}, {"text": "there"})


def test_rows_of_weight_zero_are_left_out_and_counted(tmp_path):
    rows = [{"text": "hello", "w": 0}, {"text": "there", "w": 1}, {"text": "again", "w": 0.0}]
    path = write(tmp_path / "a.jsonl", rows)
    train, _ = prepared(tmp_path, [{"path": str(path), "fields": COLUMN}])
    assert train.dropped() == [("its weight is 0 (w)", 2, f"{path}:1")]
    nothing = write(tmp_path / "b.jsonl", [row | {"w": 0} for row in rows])
    with pytest.raises(ConfigError, match=r"no row of .*b.jsonl can be trained on: 3 of 3 rows: its weight is 0"):
        prepared(tmp_path, [{"path": str(nothing), "fields": COLUMN}])


def test_a_column_called_weight_is_not_read_unasked_and_the_note_says_how(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": "hello", "weight": 0.5}])
    train, config = prepared(tmp_path, str(path))
    assert train.parts[0].tokens.weights is None
    (note,) = [note for note in train.notes() if "weight" in note]
    assert "the column 'weight' is not used (1 of 1 rows" in note
    assert "fields: {weight: weight} multiplies the losses of each row by it" in note
    with Loader(train, config) as loader:
        assert "loss_weights" not in loader.batch(0).micro_batches[0]


def test_fields_of_texts_without_columns_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("hello there")
    with pytest.raises(
        ConfigError, match=r"fields \{weight: w\} of .*a.txt has no effect: .* one text without columns"
    ):
        Source(SourceConfig(path=str(tmp_path / "a.txt"), fields=COLUMN))


def rows_of(weight):
    """Rows of text with a weight each."""
    return [
        {"text": f"{row}: " + " ".join(WORDS[(row * 7 + at) % len(WORDS)] for at in range(14)), "w": weight(row)}
        for row in range(40)
    ]


def run(tmp_path, name, weigh, **fields):
    path = write(tmp_path / f"{name}.jsonl", rows_of(weigh))
    sources = {"train": [{"path": str(path), "fields": fields}], "eval": [{"path": str(path), "fields": fields}]}
    config = settings(tmp_path, data=sources, output={"dir": str(tmp_path / name)})
    fit(config)
    return tmp_path / name


def test_a_run_whose_rows_all_weigh_one_has_the_bits_of_one_without_weights(tmp_path):
    plain, ones = run(tmp_path, "plain", lambda _: 1), run(tmp_path, "ones", lambda _: 1, weight="w")
    assert_bit_equal(plain / "checkpoints" / "step-6", ones / "checkpoints" / "step-6")
    assert all("total_weight" not in record for record in read_metrics(ones))


def test_a_run_says_what_its_losses_are_divided_by_and_learns_what_weighs(tmp_path, capsys):
    plain = run(tmp_path, "plain", lambda _: 1)
    heavy = run(tmp_path, "heavy", lambda row: 8 if row % 2 else 0.125, weight="w")
    records = read_metrics(heavy)
    assert all(0.125 * record["num_tokens"] < record["total_weight"] < 8 * record["num_tokens"] for record in records)
    assert records[-1]["eval_loss"] != read_metrics(plain)[-1]["eval_loss"]
    assert main(["data", str(heavy / "config.yaml"), "--rows", "2"]) == 0
    shown = capsys.readouterr().out
    assert "row weights: 0.125 to 8, mean 4.062" in shown
    assert "supervised, weight 0.125" in shown
