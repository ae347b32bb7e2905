"""Data sets of the hub, through `datasets`: without a network, from a folder that has the name of one."""

import json
import sys

import pytest

from megatrain.config import Config, SourceConfig
from megatrain.config.paths import check
from megatrain.data import prepare
from megatrain.data.readers import Source
from megatrain.errors import ConfigError
from support.tiny_tokenizer import tiny_tokenizer


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A data set of two splits that `datasets` finds under the name `someone/talk`, and a folder for configurations
    from which that name is no path."""
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "hub" / "someone" / "talk" / "data"
    folder.mkdir(parents=True)
    for split, words in (("train", ["hello", "there"]), ("test", ["paris"])):
        (folder / f"{split}-00000.jsonl").write_text("".join(json.dumps({"text": word}) + "\n" for word in words))
    load = datasets.load_dataset

    def from_folder(name, *arguments):
        place = tmp_path / "hub" / name
        return load(str(place) if place.exists() else name, *arguments, cache_dir=str(tmp_path / "downloads"))

    monkeypatch.setattr(datasets, "load_dataset", from_folder)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def texts(**settings):
    return [row.text for row in Source(SourceConfig(**settings)).rows()]


@pytest.mark.usefixtures("hub")
def test_a_split_of_a_data_set_of_the_hub_is_read_and_cached_by_its_content(tmp_path):
    assert texts(path="someone/talk", split="train") == ["hello", "there"]
    assert texts(path="someone/talk", split="test") == ["paris"]
    config = Config.from_dict(
        {
            "model": "owner/name",
            "data": {
                "train": {"path": "someone/talk", "split": "train"},
                "eval": {"path": "someone/talk", "split": "test"},
                "cache": str(tmp_path / "cache"),
            },
        }
    )
    train, held_out = prepare(config, tiny_tokenizer())
    assert (train.num_rows, held_out.num_rows, train.cached) == (2, 1, False)
    assert prepare(config, tiny_tokenizer())[0].cached


@pytest.mark.usefixtures("hub")
def test_what_the_hub_does_not_have_is_named():
    with pytest.raises(
        ConfigError, match=r"someone/talk has the splits train, test; name one, such as \{path: someone"
    ):
        texts(path="someone/talk")
    with pytest.raises(ConfigError, match=r"someone/talk has no split 'dev'; there are train, test"):
        texts(path="someone/talk", split="dev")
    with pytest.raises(ConfigError, match=r"someone/none: there is no such file or folder here, and no data set"):
        texts(path="someone/none")


def test_without_the_package_the_command_that_installs_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ConfigError, match=r"someone/talk: there is no such file .* pip install 'megatrain\[datasets\]'"
    ):
        texts(path="someone/talk")
    monkeypatch.undo()
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    config = Config.from_dict({"model": str(tmp_path), "data": "someone/talk"})
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"someone/talk: .* pip install 'megatrain\[datasets\]'"):
        check(config)


def test_a_path_that_is_there_or_has_a_suffix_is_no_name_of_a_data_set(tmp_path):
    (tmp_path / "someone").mkdir()
    (tmp_path / "someone" / "talk").write_text("hello")
    for path in ("someone/talk", "someone/talk.jsonl", "./someone/other", "a/b/c"):
        config = Config.from_dict({"model": "owner/name", "data": path}, base=tmp_path)
        assert config.data.train[0].path == str(tmp_path / path)
    config = Config.from_dict({"model": "owner/name", "data": "someone/other#plain"}, base=tmp_path)
    assert config.data.train[0].path == "someone/other#plain"
