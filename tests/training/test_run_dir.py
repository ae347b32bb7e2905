"""The run folder: one owner, whole files, metrics cut back, retention."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatrain.errors import ConfigError
from megatrain.training.metrics import StepRecord
from megatrain.training.run_dir import RunFolder, is_run, read_metrics, read_status


def record(step: int) -> StepRecord:
    return StepRecord(step=step, loss=1.0 / step, grad_norm=1.0, lr=1e-3, tokens=8, num_tokens=8)


def test_a_second_process_is_refused_by_name_and_the_lock_dies_with_its_owner(tmp_path: Path) -> None:
    run = tmp_path / "run"
    program = (
        "import sys; from pathlib import Path; from megatrain.training.run_dir import RunFolder; "
        f"folder = RunFolder(Path({str(run)!r})); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"process {owner.pid}"):
            RunFolder(run)
        owner.kill()
        owner.wait()
    RunFolder(run).close()


def test_metrics_beyond_the_step_that_is_resumed_are_cut_away(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    metrics = folder.begin_metrics(0)
    for step in (1, 2, 3, 4):
        metrics.write(record(step))
    folder.close()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # what a kill leaves
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2, 3, 4]

    folder = RunFolder(tmp_path / "run")
    folder.begin_metrics(2).write(record(3))
    folder.close()
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2, 3]


def test_retention_keeps_the_newest_and_those_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    for step in (2, 10, 4, 6, 8):
        folder.checkpoint(step).mkdir(parents=True)
        (folder.checkpoint(step) / "manifest.json").write_text("{}")
    assert folder.steps() == [2, 4, 6, 8, 10]
    assert folder.retain(2, always={4}) == [2, 6]
    assert folder.steps() == [4, 8, 10]
    folder.close()


def test_leftovers_of_an_interrupted_save_are_removed_with_a_word_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(tmp_path / "run")
    for name in ("step-1", ".tmp-step-2", ".removing-step-0"):
        (folder.checkpoints / name).mkdir(parents=True)
    (folder.path / ".tmp-plan.json").write_text("half")
    (folder.path / "notes.txt").write_text("mine")
    (folder.path / "draft.tmp").write_text("mine too")
    with caplog.at_level("INFO", "megatrain"):
        folder.clear_leftovers()
        folder.clear_leftovers()
    assert sorted(entry.name for entry in folder.checkpoints.iterdir()) == ["step-1"]
    assert sorted(entry.name for entry in folder.path.iterdir()) == ["checkpoints", "draft.tmp", "lock", "notes.txt"]
    (said,) = [entry.message for entry in caplog.records]
    assert said.endswith(".tmp-plan.json, checkpoints/.removing-step-0, checkpoints/.tmp-step-2")
    folder.close()


def test_a_refusal_leaves_no_folder_behind(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "deep" / "run")
    folder.write_status("loading")
    folder.discard_if_empty()
    folder.close()
    assert not (tmp_path / "deep").exists()

    folder = RunFolder(tmp_path / "mine")
    (folder.path / "config.yaml").write_text("model: x\n")
    folder.discard_if_empty()
    folder.close()
    assert (tmp_path / "mine" / "config.yaml").exists()


def test_a_refusal_does_not_mark_a_folder_of_the_users_as_a_runs(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("mine")
    folder = RunFolder(tmp_path)
    folder.write_status("loading")
    folder.withdraw()
    folder.discard_if_empty()
    folder.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.jsonl"]
    (tmp_path / "rows.jsonl").rename(tmp_path / "data.json")
    with pytest.raises(ConfigError, match=r"holds 'data\.json'"):
        RunFolder(tmp_path)


@pytest.mark.parametrize("name", ["config.yaml", "export", "checkpoints"])
def test_what_a_run_would_replace_is_not_taken_from_a_folder_of_something_else(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=f"holds '{name}'"):
        RunFolder(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    "name", ["plan.json", "data.json", "metrics.jsonl", "log.txt", "status.json", "lock", "config.yaml", "export"]
)
def test_a_file_of_the_users_is_neither_replaced_nor_taken_for_a_runs(tmp_path: Path, name: str) -> None:
    """Whatever its name, and whatever else of the same names lies beside it."""
    for foreign in {name, "metrics.jsonl", "status.json", "lock"}:
        (tmp_path / foreign).write_text('{"text": "mine"}\n')
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match=r"output\.dir is .* would replace"):
        RunFolder(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    for foreign in before.keys() - {name}:
        (tmp_path / foreign).unlink()
    with pytest.raises(ConfigError, match=f"output\\.dir is .*{name}.* would replace"):
        RunFolder(tmp_path)
    assert (tmp_path / name).read_bytes() == before[name]


def test_a_folder_is_a_runs_by_the_lock_or_the_configuration_that_a_run_wrote(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.write_status("loading")
    folder.close()  # as a kill while it loads leaves it
    folder = RunFolder(tmp_path / "run")
    folder.write_config("model: x\n")
    folder.write_data({})
    folder.begin_metrics(0)
    folder.close()
    (tmp_path / "run" / "lock").unlink()  # as where a run is copied without it
    RunFolder(tmp_path / "run").close()


def test_empty_files_that_a_full_disk_left_do_not_keep_a_run_from_its_folder(tmp_path: Path) -> None:
    for name in ("lock", "log.txt"):
        (tmp_path / name).touch()
    RunFolder(tmp_path).close()


def test_a_configuration_of_the_users_is_never_replaced(tmp_path: Path) -> None:
    mine = tmp_path / "config.yaml"
    folder = RunFolder(tmp_path)
    folder.write_status("failed")  # so that the folder looks like a run's
    folder.close()
    mine.write_text("model: mine\n")
    with pytest.raises(ConfigError, match=r"output\.dir is '.*', and the '.*config\.yaml' in it is not a run's"):
        RunFolder(tmp_path)
    assert mine.read_text() == "model: mine\n"
    mine.unlink()
    folder = RunFolder(tmp_path)
    folder.write_config("model: effective\n")
    folder.close()
    RunFolder(tmp_path).close()  # a run's own may be replaced
    assert "model: effective" in mine.read_text()


def test_a_folder_that_cannot_be_written_is_a_wrong_request(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"output\.dir"):
        RunFolder(tmp_path / "file" / "run")


def test_status_and_small_files_are_whole(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.write_status("training", step=3, loss=float("nan"))
    assert read_status(folder.path)["step"] == 3
    assert json.loads((folder.path / "status.json").read_text())["loss"] is None
    folder.write_config("model: x\n")
    folder.begin_metrics(0)
    assert is_run(folder.path)
    assert not list(folder.path.glob(".tmp-*"))
    folder.close()


def test_on_a_full_disk_metrics_name_it_once_and_nothing_else_fails(tmp_path: Path) -> None:
    program = (
        "import logging, resource, sys; from pathlib import Path; from megatrain.errors import StorageError; "
        "from megatrain.training.metrics import StepRecord; from megatrain.training.run_dir import RunFolder\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"  # every write fails, as on a full disk
        f"folder = RunFolder(Path({str(tmp_path / 'run')!r}))\n"
        "folder.begin_log()\n"
        "logging.getLogger('megatrain').info('a line')\n"
        "metrics = folder.begin_metrics(0)\n"
        "try:\n"
        "    metrics.write({'step': 1})\n"
        "except StorageError as error:\n"
        "    print(error)\n"
        "folder.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    named = f"{tmp_path / 'run' / 'metrics.jsonl'} cannot be written: File too large"
    assert done.stdout.startswith(named)
    assert done.stdout.count("\n") == 1


def test_a_status_that_is_no_mapping_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("[1, 2]")
    assert read_status(tmp_path) == {}


def test_a_folder_that_is_a_link_to_nowhere_is_named_as_one(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match="it is a link that leads nowhere"):
        RunFolder(tmp_path / "run")
