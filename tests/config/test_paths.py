"""Paths that no file system has, or will not give: wrong requests, never bugs of ours."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain.cli import main
from megatrain.config import Config, paths, yaml12
from megatrain.errors import ConfigError
from support.runs import settings

LONG = "x" * 300


def test_a_file_system_that_cannot_be_written_is_not_called_a_matter_of_permissions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match=r"cannot be written \(permission denied\)"):
        paths.check_makeable(tmp_path, "output.dir")
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    with pytest.raises(ConfigError, match=r"cannot be written \(read-only file system\)"):
        paths.check_makeable(tmp_path, "output.dir")


@pytest.mark.parametrize(
    "setting",
    ["data.train={0}.jsonl", "model={{path: {0}}}", "data.cache={0}", "output.resume={0}", "output.dir={0}"],
)
def test_a_setting_whose_path_is_too_long_is_refused(
    tmp_path: Path, setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(yaml12.dump(settings(tmp_path)))
    assert main(["train", str(tmp_path / "run.yaml"), setting.format(tmp_path / LONG)]) == 2
    said = capsys.readouterr().err
    assert LONG in said
    assert "name too long" in said
    assert "bug" not in said


@pytest.mark.parametrize(
    "words",
    [["report"], ["doctor"], ["eval"], ["plan"], ["generate", "a"], ["export", "out"]],
    ids=lambda words: words[0],
)
def test_a_folder_whose_name_is_too_long_is_refused_by_every_verb(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([words[0], str(tmp_path / LONG), *words[1:]]) == 2
    assert "name too long" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(errno.EACCES, 2), (errno.ENOSPC, 4), (errno.EIO, 4), (errno.EBADF, 1)])
def test_what_the_system_says_of_a_path_is_told_as_that(
    number: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(_: Any) -> int:
        raise OSError(number, "reason", "/some/file")

    monkeypatch.setattr("megatrain.cli.commands.run", failing)
    assert main(["doctor"]) == code
    said = capsys.readouterr().err
    assert ("/some/file cannot be used: reason" in said) == (code != 1), said


@pytest.mark.parametrize("key", ["output.dir", "output.resume", "data.cache", "model.path", "model.tokenizer"])
@pytest.mark.parametrize("path", ["", "a\0b"])
def test_an_empty_path_is_refused_and_never_the_folder_of_the_configuration(
    tmp_path: Path, key: str, path: str
) -> None:
    section, name = key.split(".")
    given = {"model": {"path": "m"}, "data": {"train": "rows.jsonl"}, "output": {"dir": "run"}}
    with pytest.raises(ConfigError, match=f"{key} is .*, which is not a path"):
        Config.from_dict({**given, section: {**given[section], name: path}}, base=tmp_path)


def test_a_configuration_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.yaml"
    path.write_text("a: " + "[" * 3000 + "]" * 3000)
    with pytest.raises(ConfigError, match="nested too deeply"):
        Config.load(path)
