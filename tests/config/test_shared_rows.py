"""A file that is held out and trained on is found however it is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import Config, SourceConfig, paths, shared_rows
from megatrain.config.data_files import DataFiles, find
from megatrain.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    for name in ("a", "b", "test"):
        rows = [{"text": f"row {number} of {name}"} for number in range(5)]
        (tmp_path / f"data/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "entry").mkdir()
    (tmp_path / "entry/dataset_info.json").write_text(json.dumps({"one": {"file_name": "../data/a.jsonl"}}))
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/c.jsonl").symlink_to(tmp_path / "data/a.jsonl")
    (tmp_path / "same").symlink_to(tmp_path / "data")
    (tmp_path / "texts").mkdir()
    for name in ("one", "two"):
        (tmp_path / f"texts/{name}.txt").write_text("a line\n" * 20)
    return tmp_path


def checked(folder: Path, train: Any, held_out: Any) -> list[str]:
    """The paths that are measured although they are trained on, relative to the folder."""
    config = Config.from_dict({"model": "owner/name", "data": {"train": train, "eval": held_out}}, base=folder)
    sources = ([(source, find(source)) for source in of] for of in (config.data.train, config.data.eval))
    return [str(Path(path).relative_to(folder)) for path in shared_rows.check(*sources)]


REST = r"Name the same path in both, so that only the rest of its rows is trained on"


@pytest.mark.parametrize(
    ("train", "held_out", "message"),
    [
        (
            "data/*.jsonl",
            "data/a.jsonl",
            r"data/a\.jsonl of .* a part of .*data/\*\.jsonl in data\.train.*name other rows",
        ),
        ("data/*.jsonl", [{"path": "data/a.jsonl", "split": 0.1}], REST),
        (["data/b.jsonl", "data/[ab].jsonl"], {"one": "data/test.jsonl", "two": "data/b.jsonl"}, r"data/b\.jsonl of"),
        ("data/*.jsonl", "data/[ab].jsonl", r"a\.jsonl and 1 more of"),
        ("data/a.jsonl", "linked", r"linked/c\.jsonl of"),
        ("data/a.jsonl", "same/a.jsonl", "would be trained on too"),
        ("entry/dataset_info.json#one", "data/a.jsonl", "would be trained on too"),
        ([{"path": "data", "split": "train"}], "data/a.jsonl", "would be trained on too"),
        ([{"path": "data/*.jsonl", "split": 0.9}], "data/a.jsonl", "would be trained on too"),
        ([{"path": "data/*.jsonl", "split": 0.95}], [{"path": "data/a.jsonl", "split": 0.1}], REST),
        (
            [{"path": "data/*.jsonl", "split": 0.9}],
            [{"path": "data/a.jsonl", "split": 0.1, "fields": {"system": "s"}}],
            REST,
        ),
        ([{"path": "texts", "split": 0.9}], [{"path": "texts/one.txt", "split": 0.1}], REST),
    ],
)
def test_a_file_that_is_trained_on_by_another_path_is_refused(
    folder: Path, train: Any, held_out: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(folder, train, held_out)


@pytest.mark.parametrize(
    ("train", "held_out"),
    [
        ("data/[ab].jsonl", "data/test.jsonl"),
        ([{"path": "data", "split": "train"}], [{"path": "data", "split": "test"}]),
        ("data/*.jsonl", 0.1),
        ("data/*.jsonl", [{"path": "data/*.jsonl", "split": 0.1}]),
        ([{"path": "data/*.jsonl", "split": 0.9}], [{"path": "data/a.jsonl", "split": 0.1}]),
        ([{"path": "texts/one.txt", "split": 0.9}], [{"path": "linked/text.txt", "split": 0.1}]),
    ],
)
def test_other_files_and_fractions_from_opposite_ends_are_held_out(folder: Path, train: Any, held_out: Any) -> None:
    (folder / "linked/text.txt").symlink_to(folder / "texts/one.txt")
    assert checked(folder, train, held_out) == []


@pytest.mark.parametrize(
    ("train", "held_out"),
    [
        ("data/a.jsonl", "data/a.jsonl"),
        ([{"path": "data", "split": "train"}], [{"path": "data", "split": "train"}]),
        ("data/*.jsonl", [{"path": "data/*.jsonl", "split": "test"}]),
    ],
)
def test_rows_that_both_name_by_the_same_path_are_measured_with_a_warning(
    folder: Path, train: Any, held_out: Any
) -> None:
    assert len(checked(folder, train, held_out)) == 1


@pytest.mark.parametrize(
    ("train", "held_out", "shared"),
    [
        ("train", "eval", False),
        ("train", 0.05, False),
        (None, "eval", True),
        ("train", 0.1, True),
        (0.9, "eval", False),
    ],
)
def test_splits_of_the_standard_library_are_fractions(train: Any, held_out: Any, shared: bool) -> None:
    sources = [SourceConfig(path="python:stdlib", split=split) for split in (train, held_out)]
    found = [(source, DataFiles(("python:stdlib/abc.py",), source)) for source in sources]
    assert shared_rows.check(found[:1], found[1:]) == ["python:stdlib"] * shared


def test_it_is_refused_before_anything_is_loaded(folder: Path) -> None:
    model = {"config": {"model_type": "llama"}, "tokenizer": "owner/name"}
    data = {"train": "data/*.jsonl", "eval": "data/a.jsonl"}
    with pytest.raises(ConfigError, match=r"data\.eval: .*a\.jsonl of"):
        paths.check(Config.from_dict({"model": model, "data": data}, base=folder))
