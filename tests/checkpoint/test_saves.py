"""Checkpoints beneath training: what they hold, and what becomes of them when the disk, a signal or a kill comes."""

import errno
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatrain import AdamW, Engine
from megatrain.checkpoint import checkpoint, step_folders
from megatrain.errors import CheckpointError, ConfigError, EngineBroken
from megatrain.models.decoder import Decoder
from megatrain.training.run_dir import read_metrics
from megatrain.training.stop import Stop
from support import faulty_disk
from support.fake_core import llama
from support.resume import OPTIMIZER, PLACEMENTS, batches, same, started, state
from support.runs import settings
from support.trainer import At, assert_bit_equal, fit, losses


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ------------------------------------------------------------------------------------------- beneath a step


@pytest.mark.parametrize("options", PLACEMENTS.values(), ids=PLACEMENTS.keys())
@pytest.mark.parametrize(("precision", "tied"), [("bf16", False), ("fp32", True)])
def test_one_written_beneath_steps_is_the_one_written_drained(
    tmp_path: Path, options: dict[str, Any], precision: str, tied: bool
) -> None:
    mode = {key: options[key] for key in ("update", "max_grad_norm") if key in options}
    drained = started(precision, tied, **mode)
    for step in range(2):
        drained.step(batches(step, 3))
    drained.drain()
    drained.save(tmp_path / "drained", {"which": 2}, step=2)
    for step in range(2, 5):
        drained.step(batches(step, 3))
    engine = started(precision, tied, **options)
    for step in range(2):
        engine.step(batches(step, 3))
    saving = engine.begin_save(tmp_path / "beneath", {"which": 2}, step=2)
    with pytest.raises(ConfigError, match="still being written"):
        engine.begin_save(tmp_path / "other", step=2)
    engine.step(batches(2, 3))
    engine.evaluate(batches(9, 1))
    engine.step(batches(3, 3))
    saving.finish()
    saving.finish()  # does nothing
    between = engine.begin_save(tmp_path / "evaluated", {"which": 4}, step=4)
    engine.evaluate(batches(9, 1))
    engine.evaluate(batches(9, 1))
    engine.evaluate(batches(9, 1))
    assert between.is_written, "at most two passes are alive"
    between.finish()
    engine.step(batches(4, 3))
    assert same(state(engine), state(drained))
    ours, theirs = contents(tmp_path / "beneath"), contents(tmp_path / "drained")
    assert {name for name in ours if ours[name] != theirs.get(name)} == set()
    assert ours.keys() == theirs.keys()
    assert checkpoint.verify(tmp_path / "evaluated") == []
    engine.close()
    drained.close()


def test_state_of_mixed_widths_is_written_and_comes_back(tmp_path: Path) -> None:
    norms = {f"model.layers.{layer}.input_layernorm.weight": torch.float32 for layer in range(3)}

    def engine(seed: int) -> Engine:
        decoder = Decoder.from_config(llama(), precision="bf16", freeze=list(norms), frozen_dtypes=norms)
        return Engine(decoder, optimizer=AdamW(**OPTIMIZER), device="cpu", seed=seed)

    first, second = engine(0), engine(1)
    first.step(batches(0, 1))
    saving = first.begin_save(tmp_path / "step-1", step=1)
    wanted = state(first)
    first.step(batches(1, 1))
    saving.finish()
    assert checkpoint.verify(tmp_path / "step-1") == []
    widths = [
        {tensor.dtype.itemsize for tensor in load_file(path).values()}
        for path in sorted((tmp_path / "step-1").glob("model-*"))
    ]
    assert widths == [{4}, {2}]
    second.load(tmp_path / "step-1")
    assert same(state(second), wanted)
    _, told = AutoModelForCausalLM.from_pretrained(tmp_path / "step-1", output_loading_info=True)
    assert not any(told.values())
    first.close()
    second.close()


@pytest.mark.parametrize("options", PLACEMENTS.values(), ids=PLACEMENTS.keys())
def test_one_begun_while_gradients_wait_is_without_them(tmp_path: Path, options: dict[str, Any]) -> None:
    first, second = started("bf16", False, **options), started("bf16", False, **options)
    first.step(batches(0, 3))
    wanted = state(first)
    first.forward_backward(batches(1, 3))
    if options.get("update") == "immediate":
        with pytest.raises(ConfigError, match="call optimizer_step before a save"):
            first.begin_save(tmp_path / "step-1")
        assert not list(tmp_path.iterdir())
    else:
        saving = first.begin_save(tmp_path / "step-1")
        first.optimizer_step()
        first.step(batches(2, 3))
        saving.finish()
        second.load(tmp_path / "step-1")
        assert second.num_steps == 1
        assert same(state(second), wanted)
        second.forward_backward(batches(1, 3))
        second.optimizer_step()
        second.step(batches(2, 3))
        assert same(state(second), state(first))
    first.close()
    second.close()


def test_an_engine_closed_upon_a_save_leaves_nothing_of_it(tmp_path: Path) -> None:
    engine = started("bf16", False)
    engine.step(batches(0, 3))
    saving = engine.begin_save(tmp_path / "step-1", step=1)
    assert [path.name for path in tmp_path.iterdir()] == [".tmp-step-1"]
    engine.close()
    assert not list(tmp_path.iterdir())
    assert saving.over
    # one that a larger step's new plan has overtaken is complete all the same
    engine = Engine(Decoder.from_config(llama(), precision="bf16"), device="cpu")
    engine.step(batches(0, 1))
    saving = engine.begin_save(tmp_path / "step-1", step=1)
    engine.step(batches(1, 3))
    saving.finish()
    assert checkpoint.verify(tmp_path / "step-1") == []
    engine.close()


def test_a_run_that_is_stopped_leaves_the_save_under_way_and_the_last_step(tmp_path: Path) -> None:
    stop = Stop()
    config = settings(tmp_path, output={"dir": str(tmp_path / "run"), "save_every": 2, "keep": 9, "export": "never"})
    result = fit(config, stop=stop, display=At(3, lambda: stop.request("SIGTERM")))
    assert (result.step, result.stopped) == (3, "SIGTERM")
    found = step_folders.list_checkpoints(tmp_path / "run")
    assert [path.name for path in found] == ["step-2", "step-3"]
    assert [checkpoint.verify(path) for path in found] == [[], []]


def test_a_run_that_breaks_completes_the_save_under_way_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Engine.step

    def broken(self: Engine, *arguments: Any, **more: Any) -> Any:
        if self._passes.num_steps == 2:
            raise EngineBroken("layers.1: copy failed")
        return step(self, *arguments, **more)

    monkeypatch.setattr(Engine, "step", broken)
    config = settings(tmp_path, output={"dir": str(tmp_path / "run"), "save_every": 2, "export": "never"})
    with pytest.raises(Exception, match=r"step 3: layers.1: copy failed; the last good checkpoint is .*step-2"):
        fit(config)
    assert checkpoint.verify(tmp_path / "run/checkpoints/step-2") == []


# ------------------------------------------------------------------------------------- a damaged one is passed over


@pytest.mark.parametrize("name", ["exp_avg.safetensors", "state.json"])
def test_a_run_goes_on_from_the_newest_checkpoint_that_is_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    straight = settings(tmp_path, output={"dir": str(tmp_path / "straight"), "export": "never"})
    fit(straight)
    parted = {"dir": str(tmp_path / "run"), "save_every": 1, "keep": 9, "export": "never"}
    stop = Stop()
    fit(settings(tmp_path, output=parted), stop=stop, display=At(4, lambda: stop.request("SIGINT")))
    damaged = tmp_path / "run/checkpoints/step-4" / name
    data = bytearray(damaged.read_bytes())
    data[-3] ^= 1
    damaged.write_bytes(data)
    for wanted in ("required", str(tmp_path / "run/checkpoints/step-4")):
        place = "run" if wanted == "required" else "elsewhere"
        with pytest.raises(CheckpointError, match=f"{name}.* is damaged"):
            fit(settings(tmp_path, output={**parted, "dir": str(tmp_path / place), "resume": wanted}))
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == [1, 2, 3, 4]
    caplog.clear()
    with caplog.at_level(logging.INFO, "megatrain"):
        assert fit(settings(tmp_path, output=parted)).step == 6
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1, warnings
    assert str(damaged) in warnings[0]
    if name != "state.json":
        assert f"is damaged between bytes 0 and {len(data)}" in warnings[0]
    assert any("step-3, after step 3" in record.message for record in caplog.records)
    assert losses(tmp_path / "run") == losses(tmp_path / "straight"), "cut back to the step it went on from"
    assert_bit_equal(tmp_path / "run/checkpoints/step-6", tmp_path / "straight/checkpoints/step-6")
    assert checkpoint.verify(tmp_path / "run/checkpoints/step-4") == [], "written anew"


# ------------------------------------------------------------------------------------------- H15, H21, H33: a bad disk


@pytest.mark.parametrize("update", ["just_in_time", "immediate"])
def test_a_disk_that_fails_beneath_a_step_leaves_the_earlier_checkpoint_and_the_engine(
    disk: Path, tmp_path: Path, update: str
) -> None:
    body = f"""
        options = {{"update": {update!r}, "max_grad_norm": None}}
        engine, other = started("bf16", False, **options), started("bf16", False, **options)
        for step in range(2):
            engine.step(batches(step, 3))
        engine.save(place / "step-2", step=2)
        size = sum(path.stat().st_size for path in (place / "step-2").iterdir())
        for fault in ({{"room": int(size * 0.6)}}, {{"room": 0}}, {{"fsync": {errno.EIO}}}):
            arm(**fault)
            saving = engine.begin_save(place / "step-3", step=3)
            engine.step(batches(1, 3))
            try:
                saving.finish()
            except StorageError as error:
                print(error)
            arm()
            assert [path.name for path in place.iterdir()] == ["step-2"]
            assert checkpoint.verify(place / "step-2") == []
        for step in (0, 1, 1, 1, 1):
            other.step(batches(step, 3))
        assert same(state(engine), state(other))
        engine.save(place / "step-3", step=3)
        assert checkpoint.verify(place / "step-3") == []
        """
    said = faulty_disk.run(disk, tmp_path, body).splitlines()
    assert len(said) == 3
    for line, words in zip(said, ["No space left", "No space left", "Input/output error"], strict=True):
        assert words in line
        assert ".tmp-step-3/" in line
        assert " bytes were needed, " in line


def test_a_run_whose_disk_fills_beneath_a_step_stops_and_names_the_last_good_checkpoint(
    disk: Path, tmp_path: Path
) -> None:
    body = """
        from support.trainer import At, fit
        from support.runs import settings
        from megatrain.training.stop import RunStopped
        output = {"dir": str(folder / "run"), "save_every": 2, "export": "never"}
        try:
            fit(settings(folder, output=output), display=At(4, lambda: arm(room=100_000)))
        except RunStopped as error:
            print(error)
        arm()
        print(sorted(path.name for path in place.iterdir()), checkpoint.verify(place / "step-2"))
        print(fit(settings(folder, output=output)).step)
        """
    first, second, third = faulty_disk.run(disk, tmp_path, body).splitlines()
    assert "the checkpoint of step 4: " in first
    assert "No space left" in first
    assert first.endswith(f"the last good checkpoint is {tmp_path}/run/checkpoints/step-2")
    assert second == "['step-2'] []"
    assert third == "6"


def test_a_slow_disk_does_not_hold_up_the_next_step_and_an_interrupt_of_it_leaves_nothing(
    disk: Path, tmp_path: Path
) -> None:
    body = """
        from megatrain.system import safetensors_io as shards
        shards.plan_shards.__defaults__ = (20_000,)  # many files, so that there are many writes
        engine = started("bf16", False)
        engine.step(batches(0, 3))
        hold(True)
        saving = engine.begin_save(place / "step-1", step=1)
        engine.step(batches(1, 3))
        assert not saving.is_written
        hold(False)
        saving.finish()
        assert checkpoint.verify(place / "step-1") == []
        # H33: control comes back before the files are written, and nothing of them is left
        import threading
        hold(True)

        def interrupt():
            while disk.disk_operations() < 4:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
            hold(False)

        arm(delay=200)
        threading.Thread(target=interrupt).start()
        try:
            engine.save(place / "step-2", step=2)
        except KeyboardInterrupt:
            print(True)
        assert [path.name for path in place.iterdir()] == ["step-1"]
        arm()
        engine.step(batches(2, 3))
        engine.save(place / "step-3", step=3)
        assert checkpoint.verify(place / "step-3") == []
        """
    assert faulty_disk.run(disk, tmp_path, body) == "True\n"


@pytest.mark.parametrize("every", [None, 100])
def test_a_run_that_saves_only_at_its_end_says_so(tmp_path: Path, every: int | None) -> None:
    fit(settings(tmp_path, output={"dir": str(tmp_path / "run"), "save_every": every, "export": "never"}))
    said = (tmp_path / "run" / "log.txt").read_text()
    assert ("output.save_every is not set" in said) == (every is None)
