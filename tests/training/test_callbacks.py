"""Callbacks: when each is called and with what, what happens when one fails, and the two that write elsewhere."""

import importlib.util
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import megatrain
from megatrain.cli import main
from megatrain.errors import ConfigError
from megatrain.training.run_dir import read_metrics, read_status
from megatrain.training.stop import RunStopped
from support.runs import settings
from support.trainer import fit


class Noted(megatrain.Callback):
    """Keeps every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def on_step(self, run: Any, metrics: Any) -> None:
        assert run.engine.num_steps == metrics["step"]
        self.calls.append(("step", dict(metrics)))

    def on_eval(self, run: Any, metrics: Any) -> None:
        assert run.total_steps == 6
        self.calls.append(("eval", dict(metrics)))

    def on_save(self, run: Any, step: int, folder: Path) -> None:
        assert folder.parent.parent == run.folder
        assert (folder / "manifest.json").is_file()
        self.calls.append(("save", step))

    def on_end(self, run: Any, result: Any) -> None:  # noqa: ARG002
        self.calls.append(("end", result))

    def of(self, name: str) -> list[Any]:
        return [value for called, value in self.calls if called == name]


def test_every_step_evaluation_and_checkpoint_is_reported_with_its_numbers(tmp_path: Path) -> None:
    noted = Noted()
    config = settings(tmp_path, eval={"at_start": True, "every": 3}, output={"save_every": 2})
    result = fit(config, callbacks=[noted])
    records = read_metrics(tmp_path / "run")
    steps = noted.of("step")
    assert [one["step"] for one in steps] == [1, 2, 3, 4, 5, 6]
    for key in ("loss", "grad_norm", "lr", "tokens", "step_s", "lanes", "rows"):
        assert [one[key] for one in steps] == [one[key] for one in records], key
    assert [one["step"] for one in noted.of("eval")] == [0, 3, 6]
    assert noted.of("eval")[0]["eval_loss"] == records[0]["eval_loss_before"]
    for key in ("eval_loss", "eval_accuracy"):
        assert [one[key] for one in noted.of("eval")[1:]] == [records[2][key], records[5][key]]
    assert all(one["eval_perplexity"] == pytest.approx(math.exp(one["eval_loss"])) for one in noted.of("eval"))
    assert noted.of("save") == [2, 4, 6]
    assert noted.of("end") == [result]
    assert noted.calls[-1][0] == "end"


@pytest.mark.parametrize("method", ["on_step", "on_eval"])
def test_a_callback_that_raises_is_named_and_the_run_stops_with_a_checkpoint_to_go_on_from(
    tmp_path: Path, method: str
) -> None:
    class Broken(megatrain.Callback):
        pass

    def fails(_self: Any, _run: Any, metrics: Any) -> None:
        if metrics["step"] == 3:
            raise ValueError("no such metric")

    setattr(Broken, method, fails)
    noted, config = Noted(), settings(tmp_path, eval={"every": 3})
    with pytest.raises(RunStopped, match=rf"Broken\.{method} raised ValueError: no such metric.*step-3") as stopped:
        fit(config, callbacks=[Broken(), noted])
    assert isinstance(stopped.value.__cause__, ValueError)
    status = read_status(tmp_path / "run")
    assert (status["state"], status["step"], status["checkpoint"]) == ("failed", 3, 3)
    assert f"Broken.{method}" in status["reason"]
    assert "Traceback" in (tmp_path / "run" / "log.txt").read_text()
    assert noted.of("end") == [None]
    assert [one["step"] for one in read_metrics(tmp_path / "run")] == [1, 2, 3]
    straight = fit(settings(tmp_path, eval={"every": 3}, output={"dir": str(tmp_path / "straight")}))
    resumed = fit(config)
    assert (resumed.loss, resumed.eval_loss) == (straight.loss, straight.eval_loss)


def test_a_trainer_that_is_called_again_goes_on_after_a_callback_failed(tmp_path: Path) -> None:
    class Once(megatrain.Callback):
        failed = False

        def on_step(self, run: Any, metrics: Any) -> None:  # noqa: ARG002
            if metrics["step"] == 2 and not self.failed:
                self.failed = True
                raise ValueError("only once")

    trainer = megatrain.Trainer(settings(tmp_path), callbacks=[Once()])
    with pytest.raises(RunStopped, match="only once"):
        trainer.fit()
    assert trainer.fit().step == 6


@pytest.mark.parametrize("method", ["on_save", "on_end"])
def test_one_that_raises_at_the_end_loses_nothing(tmp_path: Path, method: str) -> None:
    def fails(*_: Any) -> None:
        raise OSError("the network is down")

    broken = type("Broken", (megatrain.Callback,), {method: fails})()
    with pytest.raises(RunStopped, match=rf"Broken\.{method} raised OSError: the network is down.*step-6"):
        fit(settings(tmp_path), callbacks=[broken])
    assert len(read_metrics(tmp_path / "run")) == 6


def test_a_callback_can_stop_the_run_as_ctrl_c_does(tmp_path: Path) -> None:
    class Enough(megatrain.Callback):
        def on_step(self, run: Any, metrics: Any) -> None:
            if metrics["step"] == 2:
                run.stop("enough learnt")

    result = fit(settings(tmp_path), callbacks=[Enough()])
    assert (result.step, result.stopped) == (2, "enough learnt")
    assert fit(settings(tmp_path)).step == 6


@pytest.mark.parametrize("wrong", [Noted, print, "tensorboard"])
def test_what_is_no_callback_is_refused(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"callbacks must be instances of megatrain\.Callback, not"):
        megatrain.Trainer(settings(tmp_path), callbacks=[wrong])


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_package_is_refused_with_its_command_before_anything_is_read(
    tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))
    config = settings(tmp_path, output={package: True})
    with pytest.raises(ConfigError, match=rf"output\.{package} needs .*pip install 'megatrain\[{package}\]'"):
        megatrain.Trainer(config)
    import yaml

    (tmp_path / "train.yaml").write_text(yaml.safe_dump(config))
    assert main(["train", str(tmp_path / "train.yaml"), "--dry-run"]) == 2
    assert f"pip install 'megatrain[{package}]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_tensorboard_reads_back_the_run_and_forgets_what_an_abandoned_part_wrote(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="an extra: pip install 'megatrain[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    class Gone(megatrain.Callback):
        def on_step(self, run: Any, metrics: Any) -> None:  # noqa: ARG002
            if metrics["step"] == 3:
                raise KeyboardInterrupt

    config = settings(tmp_path, eval={"every": 2}, output={"tensorboard": True, "save_every": 2})
    with pytest.raises(KeyboardInterrupt):
        fit(config, callbacks=[Gone()])
    fit(config)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    records = read_metrics(tmp_path / "run")
    for tag, key in (("train/loss", "loss"), ("train/lr", "lr"), ("eval/eval_loss", "eval_loss")):
        seen = [(one.step, one.value) for one in events.Scalars(tag)]
        wanted = [(one["step"], one[key]) for one in records if key in one]
        assert [step for step, _ in seen] == [step for step, _ in wanted], tag
        assert [value for _, value in seen] == pytest.approx([value for _, value in wanted], rel=1e-6)
    assert any(tag.startswith("lanes/") for tag in events.Tags()["scalars"])


def test_weights_and_biases_gets_config_and_numbers_and_a_run_that_goes_on_stays_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[dict[str, Any]] = []
    logged: list[dict[str, Any]] = []
    ended: list[int] = []

    def init(**given: Any) -> Any:
        begun.append(given)
        return SimpleNamespace(
            id=given["id"] or "abc",
            define_metric=lambda *_, **__: None,
            log=logged.append,
            finish=lambda exit_code: ended.append(exit_code),
        )

    stand_in = SimpleNamespace(init=init, __spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "wandb", stand_in)  # type: ignore[arg-type]

    class Enough(megatrain.Callback):
        def on_step(self, run: Any, metrics: Any) -> None:
            if metrics["step"] == 2:
                run.stop("enough")

    config = settings(tmp_path, output={"wandb": True})
    fit(config, callbacks=[Enough()])
    fit(config)
    first, second = begun
    assert first["config"]["train"]["steps"] == 6
    assert (first["id"], second["id"], second["resume"]) == (None, "abc", "allow")
    assert [one["step"] for one in logged if "train/loss" in one] == [1, 2, 3, 4, 5, 6]
    assert [one["train/loss"] for one in logged if "train/loss" in one] == [
        record["loss"] for record in read_metrics(tmp_path / "run")
    ]
    assert ended == [0, 0]
