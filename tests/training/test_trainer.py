"""The loop: what a run leaves and says, when it stops itself, and what it refuses."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatrain.checkpoint import checkpoint
from megatrain.checkpoint.save import PendingCheckpoint
from megatrain.cli import main
from megatrain.engine.engine import Engine, StepOutput
from megatrain.errors import ConfigError, DoesNotFit, EngineBroken, StorageError
from megatrain.training.run_dir import read_metrics, read_status
from megatrain.training.stop import RunStopped, Stop
from megatrain.training.trainer import Trainer
from support.runs import settings, write_rows
from support.trainer import At, assert_bit_equal, fit


def test_a_run_leaves_its_whole_folder(tmp_path: Path) -> None:
    config = settings(
        tmp_path,
        eval={"at_start": True, "every": 3, "samples": {"every": 3, "prompts": ["the "], "max_new_tokens": 4}},
        output={"dir": str(tmp_path / "run"), "save_every": 3, "export": "auto"},
    )
    result = fit(config)
    run = tmp_path / "run"
    assert (result.step, result.total_steps, result.stopped) == (6, 6, "")
    assert {entry.name for entry in run.iterdir()} == {
        "config.yaml",
        "plan.json",
        "data.json",
        "metrics.jsonl",
        "log.txt",
        "status.json",
        "lock",
        "checkpoints",
        "export",
    }
    records = read_metrics(run)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6], "one object a step"
    for record in records:
        assert {"loss", "grad_norm", "lr", "tokens", "tokens_per_s", "model_tflops", "lanes", "host_peak_bytes"} <= set(
            record
        )
        assert record["num_tokens"] > 0
    assert records[0]["lr"] == pytest.approx(0.5e-2), "step 1 of 2 warm-up steps uses half of the rate"
    assert records[0]["eval_loss_before"] > records[-1]["eval_loss"]
    assert records[2]["samples"][0].startswith("the ")
    assert records[-1]["loss"] < records[0]["loss"]
    assert checkpoint.verify(run / "checkpoints" / "step-6") == []
    assert read_status(run)["state"] == "done"
    plan = json.loads((run / "plan.json").read_text())
    assert plan["totals"]["host"] == sum(item["bytes"] for item in plan["items"] if item["tier"] == "host")


def test_the_export_loads_in_stock_transformers_without_a_missing_key(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result = fit(settings(tmp_path, output={"dir": str(tmp_path / "run"), "export": "auto"}))
    assert result.export is not None
    model, info = AutoModelForCausalLM.from_pretrained(result.export, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(result.export)
    ids = tokenizer("the quick", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] == ids.shape[1] + 3


def test_a_stop_during_evaluation_leaves_the_last_finished_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = Stop()
    evaluate = Engine.evaluate_metrics

    def interrupted(self: Engine, batches: Any) -> Any:
        stop.request("SIGTERM")
        return evaluate(self, batches)

    monkeypatch.setattr(Engine, "evaluate_metrics", interrupted)
    config = settings(tmp_path, train={"steps": 6, "batch_size": 2, "lr": 1e-2}, eval={"at_start": False, "every": 4})
    result = fit(config, stop=stop)
    assert (result.step, result.stopped, result.eval_loss) == (4, "SIGTERM", None)
    assert checkpoint.verify(tmp_path / "run/checkpoints/step-4") == []


def test_a_stop_while_saving_lets_the_save_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = Stop()
    save = Engine.begin_save

    def interrupted(self: Engine, *arguments: Any, **more: Any) -> PendingCheckpoint:
        stop.request("SIGTERM")
        return save(self, *arguments, **more)

    monkeypatch.setattr(Engine, "begin_save", interrupted)
    config = settings(tmp_path, output={"dir": str(tmp_path / "run"), "save_every": 2, "export": "never"})
    result = fit(config, stop=stop)
    assert (result.step, result.stopped) == (2, "SIGTERM")
    assert checkpoint.verify(tmp_path / "run/checkpoints/step-2") == []


def test_a_step_without_a_supervised_token_changes_nothing_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatrain.data import Loader

    build = Loader.batch

    def bare(self: Loader, step: int) -> Any:
        batch = build(self, step)
        if step != 2:
            return batch
        for micro in batch.micro_batches:
            micro["labels"].fill_(-100)
        import dataclasses

        return dataclasses.replace(batch, num_supervised=0)

    monkeypatch.setattr(Loader, "batch", bare)
    config = settings(tmp_path, output={"dir": str(tmp_path / "run"), "save_every": 1, "keep": 9, "export": "never"})
    with caplog.at_level(logging.WARNING, "megatrain"):
        fit(config)
    records = read_metrics(tmp_path / "run")
    assert records[2]["loss"] is None
    assert records[2]["num_tokens"] == 0
    assert records[2]["unsupervised"] is True
    assert any(
        "has a supervised token" in record.message and "rows.jsonl" in record.message for record in caplog.records
    )
    assert_bit_equal(tmp_path / "run/checkpoints/step-2", tmp_path / "run/checkpoints/step-3")
    assert records[3]["loss"] is not None


def test_too_many_nonfinite_steps_in_a_row_end_the_run_and_name_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Engine.step
    seen = []

    def broken(self: Engine, *arguments: Any, **more: Any) -> StepOutput:
        seen.append(1)
        if len(seen) in (2, 4, 5, 6):
            return StepOutput(loss=1.0, grad_norm=float("inf"), num_tokens=8, skipped=True, reason="not finite")
        return step(self, *arguments, **more)

    monkeypatch.setattr(Engine, "step", broken)
    config = settings(
        tmp_path,
        train={"steps": 9, "batch_size": 4, "lr": 1e-2, "max_nonfinite": 2},
        output={"dir": str(tmp_path / "run"), "save_every": 3, "export": "never"},
    )
    with pytest.raises(RunStopped, match=r"3 steps in a row.*max_nonfinite.*step-3") as stopped:
        fit(config)
    assert "train.lr" in str(stopped.value)
    assert [record["skipped"] for record in read_metrics(tmp_path / "run")] == [False, True, False, True, True, True]
    assert read_status(tmp_path / "run")["state"] == "failed"


@pytest.mark.parametrize("failure", [EngineBroken("layers.1: copy failed"), StorageError("disk full")])
def test_a_broken_engine_or_disk_ends_the_run_and_names_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    step = Engine.step
    seen = []

    def broken(self: Engine, *arguments: Any, **more: Any) -> StepOutput:
        seen.append(1)
        if len(seen) == 4:
            raise failure
        return step(self, *arguments, **more)

    monkeypatch.setattr(Engine, "step", broken)
    config = settings(tmp_path, output={"dir": str(tmp_path / "run"), "save_every": 2, "export": "never"})
    with pytest.raises(RunStopped, match=r"step 4: .*step-2"):
        fit(config)


def test_an_evaluation_says_of_which_weights_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = settings(tmp_path, train={"steps": 2, "batch_size": 4, "lr": 1e-2, "seed": 5})
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(config))

    def evaluate(target: Path) -> tuple[str, str]:
        assert main(["eval", str(target)]) == 0
        said = capsys.readouterr()
        return said.out, said.err

    untrained, remark = evaluate(path)
    assert untrained.endswith("tokens, of an untrained model, drawn at random (train.seed 5)\n")
    assert "the run in" not in remark
    fit(config | {"output": config["output"] | {"export": "auto"}})
    capsys.readouterr()
    run = tmp_path / "run"
    again, remark = evaluate(path)
    assert again == untrained
    assert f"for those, megatrain eval {run}\n" in remark
    trained, remark = evaluate(run)
    assert trained.endswith(f"tokens, of the checkpoint {run / 'checkpoints/step-2'}\n")
    assert trained.split(" over ")[0] != untrained.split(" over ")[0]
    assert "the run in" not in remark
    exported = config | {"model": {"path": str(run / "export")}, "output": {"dir": str(tmp_path / "other")}}
    path.write_text(yaml.safe_dump(exported))
    assert main(["eval", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["weights"] == f"the model {run / 'export'}"


def test_a_run_that_fails_says_how_far_it_came_and_one_that_breaks_while_loading_forgets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(tmp_path, output={"dir": str(tmp_path / "run"), "save_every": 2, "export": "never"})
    original = Engine.step

    taken = 0

    def step(self: Engine, batches: Any, **more: Any) -> StepOutput:
        nonlocal taken
        taken += 1
        if taken == 4:
            raise EngineBroken("a copy failed")
        return original(self, batches, **more)

    monkeypatch.setattr(Engine, "step", step)
    with pytest.raises(RunStopped):
        fit(config)
    status = read_status(tmp_path / "run")
    assert (status["state"], status["step"], status["checkpoint"]) == ("failed", 3, 2)
    assert status["loss"] is not None
    monkeypatch.setattr("megatrain.training.trainer.resolve_resume", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fit(config)
    broken_loading = read_status(tmp_path / "run")
    assert (broken_loading["state"], broken_loading["step"], broken_loading["checkpoint"]) == ("failed", 3, 2)
    assert "zero" in broken_loading["reason"]


def test_the_best_checkpoint_outlives_retention_and_early_stopping_ends_the_run(tmp_path: Path) -> None:
    config = settings(
        tmp_path,
        # so high a rate that held-out loss soon rises
        train={"steps": 40, "batch_size": 2, "lr": 0.3, "schedule": {"name": "constant", "warmup": 0}},
        eval={"at_start": True, "every": 1, "keep_best": True, "early_stop": 3},
        output={"dir": str(tmp_path / "run"), "save_every": 1, "keep": 1, "export": "never"},
    )
    result = fit(config)
    assert result.stopped == ""
    assert result.step < 40
    best = read_status(tmp_path / "run")["best_step"]
    steps = sorted(int(path.name.removeprefix("step-")) for path in (tmp_path / "run/checkpoints").iterdir())
    assert steps == sorted({best, result.step} - {0})
    again = fit(config)
    assert again.step == result.step, "the same command does not go on with a run that ended early"


def test_a_run_that_stops_early_says_so_and_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = settings(
        tmp_path,
        train={"steps": 40, "batch_size": 2, "lr": 0.3, "schedule": {"name": "constant", "warmup": 0}},
        eval={"at_start": True, "every": 1, "early_stop": 3},
    )
    (tmp_path / "early.yaml").write_text(yaml.safe_dump(config))
    assert main(["train", str(tmp_path / "early.yaml")]) == 0
    step = read_metrics(tmp_path / "run")[-1]["step"]
    out, err = capsys.readouterr()
    assert "for 3 evaluations: stopping early" in err
    assert f"done: stopped early after {step} of 40 steps (eval.early_stop)" in out
    assert main(["train", str(tmp_path / "early.yaml"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (answer["step"], answer["early_stop"], answer["stopped"]) == (step, True, None)


@pytest.mark.parametrize(("lr", "warned"), [(1e-2, False), (5.0, True)])
def test_a_run_that_has_learnt_nothing_says_so_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lr: float, warned: bool
) -> None:
    config = settings(tmp_path, train={"steps": 12, "batch_size": 4, "lr": lr, "schedule": {"name": "constant"}})
    (tmp_path / "config.yml").write_text(yaml.safe_dump(config))
    assert main(["train", str(tmp_path / "config.yml")]) == 0
    out = capsys.readouterr().out
    assert out.count("warning: the loss has not fallen") == int(warned), out
    assert "done: 12 steps" in out


def test_a_warm_up_or_decay_longer_than_the_epochs_is_refused_like_one_longer_than_the_steps(tmp_path: Path) -> None:
    for schedule, words in [
        ({"name": "cosine", "warmup": 500}, r"warmup \(500 steps\) is longer than the run, train\.epochs 1 \(\d+\)"),
        ({"name": "wsd", "warmup": 0, "decay": 500}, r"decay \(500 steps\) .* is longer than the run, train\.epochs 1"),
    ]:
        config = settings(tmp_path, train={"schedule": schedule, "epochs": 1})
        del config["train"]["steps"]
        with pytest.raises(ConfigError, match=words):
            fit(config)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_what_does_not_fit_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    config = settings(tmp_path) | {"memory": {"host": "64KiB"}}
    with pytest.raises(DoesNotFit) as refused:
        fit(config)
    said = str(refused.value)
    assert "exp_avg_sq" in said
    assert "memory.host" in said
    assert refused.value.items
    assert not (tmp_path / "run").exists()


def test_rows_longer_than_the_models_positions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.seq_len is 128.*64"):
        fit(settings(tmp_path, data={"seq_len": 128}))


def test_two_trainers_cannot_share_a_folder(tmp_path: Path) -> None:
    config = settings(tmp_path)

    def again() -> None:
        with pytest.raises(ConfigError, match="is using"):
            fit(config)

    fit(config, display=At(2, again))


def test_groups_and_no_decay_become_the_optimizers_groups(tmp_path: Path) -> None:
    from megatrain.config import Config
    from megatrain.planning.optimizer_groups import optimizer_for

    write_rows(tmp_path / "rows.jsonl")
    config = Config.of(
        settings(
            tmp_path,
            train={
                "steps": 2,
                "batch_size": 2,
                "lr": 1e-3,
                "weight_decay": 0.1,
                "no_decay": ["*norm*"],
                "groups": [{"params": ["*embed*"], "lr": 1e-4, "weight_decay": 0.5}],
            },
        )
    )
    names = ["model.embed_tokens.weight", "model.layers.0.mlp.up.weight", "model.norm.weight"]
    optimizer = optimizer_for(config, names)
    assigned = optimizer.assign(names)
    groups = optimizer.core_groups()
    found = {name: (groups[index][0], groups[index][4]) for name, index in assigned.items()}
    assert found == {names[0]: (1e-4, 0.5), names[1]: (1e-3, 0.1), names[2]: (1e-3, 0.0)}
    with pytest.raises(ConfigError, match="no_decay"):
        optimizer_for(Config.of(settings(tmp_path, train={"steps": 2, "batch_size": 2, "no_decay": ["*bias"]})), names)


def test_the_log_file_holds_every_line_of_the_run_whatever_is_shown(tmp_path: Path) -> None:
    Trainer(settings(tmp_path)).fit()
    said = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    assert "step 1/" in said
    assert "loss" in said
