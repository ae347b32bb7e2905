"""The rows and settings that docs/data.md shows are read as it says."""

import json
import re
from pathlib import Path

import yaml

from megatrain.config import Config, SourceConfig
from megatrain.data.rows import RowParser

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


def block(kind):
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)[0]


def test_the_rows_that_the_page_shows_are_read_and_no_column_is_unused():
    parser = RowParser(SourceConfig(path="rows"))
    found = [parser.row(json.loads(line), 0, 1, "row") for line in block("json").splitlines()]
    assert [row.kind for row in found] == ["text", "chat", "chat", "completion", "chat", "chat", "completion"]
    assert [bool(row.skip) for row in found] == [False] * 6 + [True]
    assert not [remark for row in found for remark in row.remarks if remark[0] == "column"]


def test_the_settings_that_the_page_shows_are_settings(tmp_path):
    config = Config.from_dict({"model": "owner/name", **yaml.safe_load(block("yaml"))}, base=tmp_path)
    assert [source.weight for source in config.data.train] == [1, 0.5, 1, 1, 1]
    assert config.data.train[3].path == "someone/talks"
    assert config.data.train[4].fields == {"prompt": "question", "completion": "answer"}
