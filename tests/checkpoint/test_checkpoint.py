"""Checkpoints: everything bit for bit, complete or not there at all, whatever stops the save."""

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain.checkpoint import checkpoint, manifest, step_folders
from megatrain.checkpoint.export import export_checkpoint
from megatrain.checkpoint.load import load
from megatrain.checkpoint.save import save
from megatrain.errors import CheckpointError, ConfigError, StorageError
from megatrain.models.decoder import Decoder
from megatrain.system import atomic, safetensors_io
from megatrain.training.run_dir import RunFolder
from megatrain.weights.state_format import StateFormat
from support.fake_core import MemoryCore, engine, llama

STATE = {"position": {"epoch": 1, "row": 17}, "numerics": {"micro_batch": 2}, "rng": [1, 2, 3]}


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks and shards so small that a tiny model has many of each."""
    monkeypatch.setattr(safetensors_io, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(atomic, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(manifest, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(safetensors_io.plan_shards, "__defaults__", (20_000,))


def emptied(like: SimpleNamespace, **options: Any) -> SimpleNamespace:
    decoder = like.decoder
    return engine(decoder.precision, bool(decoder.aliases), seed=99, **options)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_plane_and_count_comes_back_bit_for_bit(tmp_path: Path, precision: str, tied: bool) -> None:
    source = engine(precision, tied, seed=1)
    folder = tmp_path / "step-7"
    save(folder, source, STATE, step=7)
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    assert bool(list(folder.glob("residual*"))) == (precision == "bf16")
    target = emptied(source)
    assert not target.core.equals(source.core)
    assert load(folder, target) == STATE
    assert target.core.equals(source.core)
    assert checkpoint.verify(folder) == []


def test_a_checkpoint_in_few_large_chunks_comes_back_too(tmp_path: Path) -> None:
    source = engine("bf16", seed=2)
    save(tmp_path / "step-1", source, {}, step=1)
    target = emptied(source)
    load(tmp_path / "step-1", target)
    assert target.core.equals(source.core)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_folder_loads_in_stock_transformers_as_the_model_that_computes(
    tmp_path: Path, precision: str, tied: bool
) -> None:
    source = engine(precision, tied, seed=3)
    save(tmp_path / "step-1", source, {}, step=1)
    model, told = AutoModelForCausalLM.from_pretrained(tmp_path / "step-1", dtype="auto", output_loading_info=True)
    assert not any(told.values()), told
    assert model.dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)
    for name, ref in source.decoder.tensors.items():
        mine = source.core.planes[ref.unit, ref.tensor].weights.view(ref.shape)
        assert torch.equal(model.state_dict()[name], mine)


def test_names_are_hugging_faces_and_nothing_is_a_pickle(tmp_path: Path) -> None:
    source = engine("bf16", seed=3)
    save(tmp_path / "step-1", source, STATE, step=1)
    names = {path.name for path in (tmp_path / "step-1").iterdir()}
    stems = {"model", "residual", "exp_avg", "exp_avg_sq"}
    assert names == {f"{stem}.safetensors" for stem in stems} | {
        "config.json",
        "generation_config.json",
        "state.json",
        "manifest.json",
    }
    for stem in stems:
        held = {entry.name for entry in safetensors_io.read_shard(tmp_path / "step-1" / f"{stem}.safetensors").entries}
        assert held == set(source.decoder.tensors)
    counts = json.loads((tmp_path / "step-1" / "state.json").read_text())["step_counts"]
    assert counts == dict.fromkeys(source.decoder.tensors, 7)


def test_a_parameter_trained_from_now_on_starts_with_zero_moments_and_its_own_count(tmp_path: Path) -> None:
    source = engine("bf16", seed=4, freeze=["*embed*"])
    save(tmp_path / "step-5", source, {}, step=5)
    target = engine("bf16", seed=99)
    load(tmp_path / "step-5", target)
    for name, ref in target.decoder.tensors.items():
        mine, theirs = target.core.planes[ref.unit, ref.tensor], source.core.planes[ref.unit, ref.tensor]
        assert torch.equal(mine.weights, theirs.weights)
        if "embed" in name:
            assert mine.count == 0
            assert mine.exp_avg is not None
            assert mine.exp_avg_sq is not None
            assert not mine.exp_avg.any()
            assert not mine.exp_avg_sq.any()
        else:
            assert mine.count == 7


def test_a_parameter_frozen_from_now_on_keeps_its_weights(tmp_path: Path) -> None:
    source = engine("bf16", seed=4)
    save(tmp_path / "step-5", source, {}, step=5)
    for dtype in (torch.bfloat16, torch.float32):
        decoder = Decoder.from_config(
            llama(), precision="bf16", freeze=["lm_head*"], frozen_dtypes={"lm_head.weight": dtype}
        )
        target = SimpleNamespace(decoder=decoder, core=MemoryCore(decoder), state_format=StateFormat())
        load(tmp_path / "step-5", target)
        ref, theirs = target.decoder.tensors["lm_head.weight"], source.decoder.tensors["lm_head.weight"]
        kept = target.core.planes[ref.unit, ref.tensor].weights
        wanted = source.core.planes[theirs.unit, theirs.tensor].weights if dtype == torch.bfloat16 else None
        assert torch.equal(kept, wanted if wanted is not None else source.core.master(theirs).view(-1))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"vocab_size": 97}, "has shape"),
        ({"num_hidden_layers": 2}, "no tensor for"),
        ({"num_hidden_layers": 4}, "lacks model.layers.3"),
        ({"precision": "fp32"}, "trained in bf16 and this run is fp32"),
    ],
)
def test_another_models_checkpoint_is_refused_before_anything_changes(
    tmp_path: Path, other: dict[str, Any], words: str
) -> None:
    save(tmp_path / "step-1", engine("bf16", seed=5), {}, step=1)
    other = dict(other)
    precision = other.pop("precision", "bf16")
    target, twin = engine(precision, seed=6, **other), engine(precision, seed=6, **other)
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path / "step-1", target)
    assert target.core.equals(twin.core)


@pytest.mark.usefixtures("small_chunks")
def test_any_changed_byte_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "step-1"
    source, target = engine("bf16", seed=7), engine("bf16", seed=99)
    save(folder, source, STATE, step=1)
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        for place in (0, len(data) // 2, len(data) - 1):
            changed = bytearray(data)
            changed[place] ^= 1
            path.write_bytes(changed)
            assert checkpoint.verify(folder), f"{path.name} at {place}"
            if path.suffix == ".safetensors" or path.name in ("state.json", "manifest.json"):
                with pytest.raises(CheckpointError):
                    load(folder, target)
        path.write_bytes(data[:-2])
        assert checkpoint.verify(folder)
        path.unlink()
        with pytest.raises(CheckpointError):
            checkpoint.Checkpoint.open(folder)
        path.write_bytes(data)
    assert checkpoint.verify(folder) == []


def test_the_newest_complete_one_is_taken_and_others_passed_over_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = engine("bf16", seed=8)
    assert checkpoint.latest_complete(tmp_path) is None
    for step in (2, 10, 9):
        save(tmp_path / "checkpoints" / f"step-{step}", source, {}, step=step)
    (tmp_path / "checkpoints" / "step-notes").mkdir()
    assert [path.name for path in step_folders.list_checkpoints(tmp_path)] == ["step-2", "step-9", "step-10"]
    (tmp_path / "checkpoints" / "step-10" / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING):
        newest = checkpoint.latest_complete(tmp_path)
    assert newest is not None
    assert newest.name == "step-9"
    assert "step-10" in caplog.text


def test_a_checkpoint_may_take_the_place_of_an_earlier_one_of_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "step-1"
    first, second = engine("bf16", seed=1), engine("bf16", seed=2)
    save(folder, first, {"which": 1}, step=1)
    save(folder, second, {"which": 2}, step=1)
    target = emptied(second)
    assert load(folder, target) == {"which": 2}
    assert target.core.equals(second.core)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_a_kill_between_two_renames_loses_nothing_and_a_reader_changes_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    folder = run / "checkpoints" / "step-1"
    source = engine("bf16", seed=1)
    save(folder, source, {"which": 1}, step=1)
    folder.rename(folder.parent / ".old-step-1")
    # What readers do of a run that another process trains: that process may be between the two renames.
    newest = checkpoint.latest_complete(run)
    assert newest is not None
    target = emptied(source)
    for place in (newest, folder, checkpoint.choose(run, "1"), *step_folders.list_checkpoints(run)):
        assert load(place, target) == {"which": 1}
        assert checkpoint.verify(place) == []
    assert target.core.equals(source.core)
    export_checkpoint(folder, tmp_path / "out")
    assert [path.name for path in folder.parent.iterdir()] == [".old-step-1"]
    # The owner of the run's lock puts the folder back.
    (run / "lock").write_text("process 1")
    opened = RunFolder(run)
    opened.close()
    assert [path.name for path in folder.parent.iterdir()] == ["step-1"]


@pytest.mark.parametrize("step", [-1, 1.5, "7", True, None])
def test_a_step_that_is_no_number_of_steps_is_refused(tmp_path: Path, step: Any) -> None:
    with pytest.raises(ConfigError, match="step must be a whole number and not negative"):
        save(tmp_path / "step-1", engine("bf16"), {}, step=step)
    assert not list(tmp_path.iterdir())


def test_state_that_is_not_json_is_refused_before_the_first_byte(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not JSON"):
        save(tmp_path / "step-1", engine("bf16", seed=1), {"what": object()}, step=1)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------- H15, interrupted saves


def complete_one(run: Path) -> SimpleNamespace:
    first = engine("bf16", seed=1)
    save(run / "checkpoints" / "step-1", first, {"which": 1}, step=1)
    return first


def only_step_1_is_left(run: Path, first: SimpleNamespace) -> None:
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-1"]
    target = emptied(first)
    assert load(run / "checkpoints" / "step-1", target) == {"which": 1}
    assert target.core.equals(first.core)


@pytest.mark.usefixtures("small_chunks")
def test_a_disk_that_fills_at_sixty_percent_leaves_the_earlier_checkpoint_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = complete_one(tmp_path)
    second = engine("bf16", seed=2)
    limit = 0.6 * sum(path.stat().st_size for path in (tmp_path / "checkpoints" / "step-1").iterdir())
    written = [0]
    write = os.pwrite

    def full(file: int, data: Any, offset: int) -> int:
        written[0] += len(data)
        if written[0] > limit:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(StorageError, match=r"No space left.*\d+ bytes were needed, \d+ are free"):
            save(tmp_path / "checkpoints" / "step-2", second, {"which": 2}, step=2)
    only_step_1_is_left(tmp_path, first)


def test_a_file_size_limit_leaves_the_earlier_checkpoint_alone(tmp_path: Path) -> None:
    """The kernel itself refuses the write, in a process of its own."""
    first = complete_one(tmp_path)
    result = run_program(
        tmp_path,
        """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
        try:
            save(run / "checkpoints" / "step-2", engine("bf16", seed=2), {}, step=2)
        except StorageError as error:
            print(error)
        """,
    )
    assert "File too large" in result
    only_step_1_is_left(tmp_path, first)


def test_no_space_is_seen_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = complete_one(tmp_path)
    monkeypatch.setattr(atomic, "free_bytes", lambda _: 1000)
    monkeypatch.setattr(os, "pwrite", lambda *_: pytest.fail("something was written"))
    with pytest.raises(StorageError, match=r"needs \d+ bytes and 1000 are free"):
        save(tmp_path / "checkpoints" / "step-2", engine("bf16", seed=2), {}, step=2)
    monkeypatch.undo()
    only_step_1_is_left(tmp_path, first)


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_failing_flush_or_rename_leaves_the_earlier_checkpoint_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    first = complete_one(tmp_path)

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(*((os, "fsync", fail) if call == "fsync" else (Path, "rename", fail)))
    with pytest.raises(StorageError, match="Input/output error"):
        save(tmp_path / "checkpoints" / "step-2", engine("bf16", seed=2), {}, step=2)
    monkeypatch.undo()
    only_step_1_is_left(tmp_path, first)


@pytest.mark.usefixtures("small_chunks")
def test_an_interrupt_during_a_save_leaves_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = complete_one(tmp_path)
    left, write = [20], os.pwrite

    def interrupt(*args: Any) -> int:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return write(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path / "checkpoints" / "step-2", engine("bf16", seed=2), {}, step=2)
    only_step_1_is_left(tmp_path, first)


def test_a_kill_at_any_point_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    """The process kills itself at its n-th file operation, for n over the whole save; a fresh process then resumes."""
    program = """
        import signal
        first, second = engine("bf16", seed=1), engine("bf16", seed=2)

        def dying(name, module, left):
            original = getattr(module, name)
            def call(*args, **kwargs):
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*args, **kwargs)
            return call

        deaths, n = 0, 0
        while True:
            child = os.fork()
            if child == 0:
                left = [n]
                for name in ("pwrite", "fsync", "open", "mkdir", "rename"):
                    setattr(os, name, dying(name, os, left))
                save(run / "checkpoints" / "step-2", second, {"which": 2}, step=2)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            newest = checkpoint.latest_complete(run)
            target = engine("bf16", seed=99)
            which = load(newest, target)["which"]
            assert newest.name == f"step-{which}"
            assert target.core.equals({1: first, 2: second}[which].core)
            assert checkpoint.verify(run / "checkpoints" / "step-1") == []
            if not os.WIFSIGNALED(status):
                break
            deaths += 1
            n += 1
        assert which == 2
        print(deaths)
        """
    complete_one(tmp_path)
    assert int(run_program(tmp_path, program)) >= 20


def run_program(run: Path, body: str) -> str:
    """Runs statements in a new process, with what tests of checkpoints need imported; returns what they print."""
    head = f"""
        import os, sys
        from pathlib import Path
        import torch
        torch.set_num_threads(1)
        from megatrain.checkpoint import checkpoint
        from megatrain.checkpoint.load import load
        from megatrain.checkpoint.save import save
        from megatrain.system import atomic, safetensors_io
        from megatrain.errors import StorageError
        from support.fake_core import engine
        run = Path({str(run)!r})
        """
    program = textwrap.dedent(head) + textwrap.dedent(body)
    environment = {"PYTHONPATH": ":".join([str(Path(__file__).parents[1]), *sys.path]), "PATH": ""}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture
def saving(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that saves checkpoints 2, 3, … without end."""
    program = f"""
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from megatrain.checkpoint import checkpoint, manifest
from megatrain.checkpoint.load import load
from megatrain.checkpoint.save import save
from support.fake_core import engine
source = engine("bf16", seed=1, vocab_size=20000)
for step in range(2, 10000):
    save(Path({str(tmp_path)!r}) / "checkpoints" / f"step-{{step}}", source, {{"which": step}}, step=step)
    print(step, flush=True)
"""
    environment = {"PYTHONPATH": ":".join([str(Path(__file__).parents[1]), *sys.path]), "PATH": ""}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_kill_from_outside_leaves_a_complete_checkpoint(tmp_path: Path, saving: subprocess.Popen[str]) -> None:
    assert saving.stdout is not None
    assert saving.stdout.readline() == "2\n"
    time.sleep(0.05)
    saving.send_signal(signal.SIGKILL)
    saving.wait()
    newest = checkpoint.latest_complete(tmp_path)
    assert newest is not None
    assert checkpoint.verify(newest) == []
