"""How a run goes on: bit equal after a stop, and never on other data, another tokenizer or under another identity."""

import datetime as dt
import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from megatrain.checkpoint import checkpoint
from megatrain.cli import main
from megatrain.config import Config, SourceConfig
from megatrain.data import fingerprint, stdlib
from megatrain.data.readers import Source
from megatrain.data.train_tokenizer import train_bpe
from megatrain.errors import ConfigError, DoesNotFit
from megatrain.training.run_dir import read_metrics, read_status
from megatrain.training.setup import prepare_run
from megatrain.training.stop import Stop
from support.runs import MODEL, WORDS, settings, write_rows
from support.trainer import At, assert_bit_equal, fit, losses, stopped_after_two_steps


@pytest.mark.parametrize("stop_at", [1, 3, 5])
def test_a_stopped_run_goes_on_bit_equal_with_the_same_command(tmp_path: Path, stop_at: int) -> None:
    straight = settings(tmp_path, output={"dir": str(tmp_path / "straight"), "export": "never"})
    parted = settings(tmp_path, output={"dir": str(tmp_path / "parted"), "export": "never"})
    fit(straight)
    stop = Stop()
    first = fit(parted, stop=stop, display=At(stop_at, lambda: stop.request("SIGINT")))
    assert (first.step, first.stopped) == (stop_at, "SIGINT")
    assert first.checkpoint == tmp_path / "parted" / "checkpoints" / f"step-{stop_at}"
    assert read_status(tmp_path / "parted")["state"] == "stopped"
    second = fit(parted)
    assert (second.step, second.stopped) == (6, "")
    assert losses(tmp_path / "parted") == losses(tmp_path / "straight")
    assert_bit_equal(tmp_path / "parted/checkpoints/step-6", tmp_path / "straight/checkpoints/step-6")


@pytest.mark.parametrize(
    "plan",
    [
        {"slots": 2, "keep": 0, "poison": True},
        {"group": 1, "activation": "offload", "inputs": "host", "stage_buffers": 3, "parts": 2, "threads": 1},
    ],
)
def test_a_second_half_under_another_placement_is_bit_equal(tmp_path: Path, plan: dict[str, Any]) -> None:
    straight = settings(tmp_path, output={"dir": str(tmp_path / "straight"), "export": "never"})
    fit(straight)
    stop = Stop()
    parted = settings(tmp_path, output={"dir": str(tmp_path / "parted"), "export": "never"})
    fit(parted, stop=stop, display=At(3, lambda: stop.request("SIGINT")))
    fit(parted | {"plan": {"micro_batch": 2, **plan}})
    placed = json.loads((tmp_path / "parted" / "plan.json").read_text())
    assert all(placed[key] == plan[key] for key in plan.keys() & {"slots", "group", "stage_buffers"})
    if "inputs" in plan:
        assert {(unit["activation"], unit["input"]) for unit in placed["units"][1:-1]} == {("offload", "host")}
    assert losses(tmp_path / "parted") == losses(tmp_path / "straight")
    assert_bit_equal(tmp_path / "parted/checkpoints/step-6", tmp_path / "straight/checkpoints/step-6")


def test_a_run_that_was_killed_after_its_checkpoint_repeats_what_came_after(tmp_path: Path) -> None:
    config = settings(tmp_path, output={"dir": str(tmp_path / "run"), "save_every": 2, "export": "never"})

    def killed() -> None:
        raise ZeroDivisionError("as if the process had been killed")

    with pytest.raises(ZeroDivisionError):
        fit(config, display=At(5, killed))
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == [1, 2, 3, 4, 5]
    assert fit(config).step == 6
    straight = settings(tmp_path, output={"dir": str(tmp_path / "straight"), "export": "never"})
    fit(straight)
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")


def test_the_precision_of_gradients_is_written_as_it_is_and_no_other_way_of_asking_for_it_is_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(tmp_path)
    with monkeypatch.context() as earlier:  # wrote null
        earlier.setattr("megatrain.config.Config.run_plan", lambda self, _: self)
        stopped_after_two_steps(config)
    stop = Stop()
    fit(config, stop=stop, display=At(4, lambda: stop.request("SIGINT")))
    written = Config.load(tmp_path / "run" / "config.yaml")
    assert written.train.grad_precision == "fp32"
    stop = Stop()
    fit(written.to_dict(), stop=stop, display=At(5, lambda: stop.request("SIGINT")))
    assert fit(config).step == 6
    narrow = config | {"train": config["train"] | {"precision": "bf16"}}
    with pytest.raises(ConfigError, match=r"train\.precision: auto → bf16"):
        fit(narrow)


def test_a_request_for_another_run_is_refused_with_the_list_and_a_new_course_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings(tmp_path)
    stop = Stop()
    fit(config, stop=stop, display=At(2, lambda: stop.request("SIGINT")))
    other = settings(tmp_path, data={"seq_len": 16}, train={"steps": 6, "batch_size": 4, "lr": 1e-2, "seed": 7})
    with pytest.raises(
        ConfigError, match=r"data\.seq_len: 32 → 16.*train\.seed: 0 → 7.* model: OUT after megatrain exp"
    ):
        fit(other)
    slower = settings(tmp_path, train={"steps": 8, "batch_size": 4, "lr": 1e-3, "schedule": {"name": "constant"}})
    with caplog.at_level(logging.INFO, "megatrain"):
        assert fit(slower).step == 8
    said = " ".join(record.message for record in caplog.records)
    assert "train.lr: 0.01 → 0.001" in said
    assert "train.steps: 6 → 8" in said
    assert read_metrics(tmp_path / "run")[-1]["lr"] == pytest.approx(1e-3)


def test_training_data_whose_content_changed_make_another_run(tmp_path: Path) -> None:
    config = settings(tmp_path)
    rows = tmp_path / "rows.jsonl"
    stopped_after_two_steps(config)
    before, status = rows.read_bytes(), read_status(tmp_path / "run")
    rows.write_bytes(before.replace(b"fox", b"cow", 1))  # as many bytes
    with pytest.raises(ConfigError, match=r"data\.train\[0\]: its content changed since step 2: .*rows\.jsonl"):
        fit(config)
    with pytest.raises(ConfigError, match=r"differ: train\.seed: 0 → 7; data\.train\[0\]: its content .*\. Put"):
        fit(config | {"train": config["train"] | {"seed": 7}})
    assert read_status(tmp_path / "run") == status
    rows.write_bytes(before)
    assert fit(config).step == 6


def test_a_dry_run_refuses_what_a_start_refuses_in_the_same_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tokenizer"
    train_bpe(WORDS, 300).save_pretrained(folder)
    config = settings(tmp_path, model={"tokenizer": str(folder)})
    config["model"]["config"] = MODEL | {"vocab_size": 300}
    stopped_after_two_steps(config)
    command = ["train", str(tmp_path / "config.yml"), "--dry-run"]

    def refusal(asked: dict[str, Any]) -> str:
        with pytest.raises(ConfigError) as refused:
            fit(asked)
        (tmp_path / "config.yml").write_text(yaml.safe_dump(asked))
        capsys.readouterr()
        assert main(command) == 2
        assert capsys.readouterr().err.endswith(f"megatrain train: {refused.value}\n")
        assert main(["data", command[1]]) == 0
        assert capsys.readouterr().err == f"megatrain train would refuse this: {refused.value}\n"
        return str(refused.value)

    def listing() -> dict[str, bytes]:
        files = (path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name != "lock")
        return {str(path): path.read_bytes() for path in files}

    before = listing()
    rows = (tmp_path / "rows.jsonl").read_bytes()
    (tmp_path / "rows.jsonl").write_bytes(rows.replace(b"fox", b"cow", 1))
    assert "data.train[0]: its content changed since step 2" in refusal(config)
    (tmp_path / "rows.jsonl").write_bytes(rows)
    train_bpe([word[::-1] for word in WORDS], 300).save_pretrained(folder)
    assert "the tokenizer of model.tokenizer: its content changed since step 2" in refusal(config)
    train_bpe(WORDS, 300).save_pretrained(folder)
    assert "train.seed: 0 → 7" in refusal(config | {"train": config["train"] | {"seed": 7}})
    assert "output.resume is never" in refusal(config | {"output": config["output"] | {"resume": "never"}})
    (tmp_path / "config.yml").write_text(yaml.safe_dump(config))
    assert main(command) == 0
    assert listing() == before
    assert fit(config).step == 6


def test_a_dry_run_and_the_data_view_of_a_stopped_run_are_of_its_tokenizer_and_its_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(tmp_path)
    path = tmp_path / "config.yml"
    path.write_text(yaml.safe_dump(config))
    parts = prepare_run(Config.of(config), folder=None)
    wanted = parts.loader.batch(2).micro_batches[0]["input_ids"].tolist()
    parts.close()
    stopped_after_two_steps(config)
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setattr("megatrain.data.train_tokenizer.train_bpe", lambda *_: pytest.fail("trained again"))
    capsys.readouterr()
    assert main(["train", str(path), "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["resume"], found["step"], found["steps"]) == (str(tmp_path / "run/checkpoints/step-2"), 2, 6)
    assert [[token[0] for token in row] for row in found["first_batch"]] == wanted
    assert main(["train", str(path), "--dry-run"]) == 0
    said = capsys.readouterr()
    assert "step 3's first micro-batch, 2 sequences, begins:" in said.out
    assert "steps: 6, of which 2 are done" in said.out
    assert "after step 2" in said.err
    assert main(["data", str(path)]) == 0
    assert not capsys.readouterr().err
    assert fit(config).step == 6
    capsys.readouterr()
    assert main(["train", str(path), "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["first_batch"]) == (6, [])


def test_a_tokenizer_that_the_run_trained_is_never_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = write_rows(tmp_path / "held_out.jsonl", 8)
    whole = settings(tmp_path, data={"eval": str(held_out)}, output={"dir": str(tmp_path / "whole")})
    fit(whole)
    parted = settings(tmp_path, data={"eval": str(held_out)}, output={"dir": str(tmp_path / "run")})
    stopped_after_two_steps(parted)
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setattr("megatrain.data.train_tokenizer.train_bpe", lambda *_: pytest.fail("trained again"))
    assert fit(parted).step == 6
    newest = tmp_path / "run/checkpoints/step-6"
    assert_bit_equal(newest, tmp_path / "whole/checkpoints/step-6")
    assert (newest / "tokenizer.json").read_bytes() == (newest.with_name("step-2") / "tokenizer.json").read_bytes()

    (tmp_path / "rows.jsonl").write_text('{"text": "words that no row held before"}\n' * 20)
    assert main(["eval", str(tmp_path / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["eval_loss"]
    assert found == pytest.approx(read_status(tmp_path / "run")["eval_loss"])


def test_a_damaged_tokenizer_of_a_checkpoint_makes_the_run_go_on_from_the_one_before(tmp_path: Path) -> None:
    output = {"dir": str(tmp_path / "run"), "save_every": 2, "export": "never"}
    fit(settings(tmp_path, output=output))
    damaged = tmp_path / "run/checkpoints/step-6/tokenizer.json"
    damaged.write_bytes(damaged.read_bytes().replace(b"endoftext", b"endofword"))
    more = settings(tmp_path, output=output, train={"steps": 7, "batch_size": 4, "lr": 1e-2})
    assert fit(more).step == 7
    assert "endofword" not in (tmp_path / "run/checkpoints/step-7/tokenizer.json").read_text()


@pytest.mark.parametrize("goes_on_from", [4, 0])
def test_a_damaged_checkpoint_that_was_skipped_is_not_the_newest_any_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, goes_on_from: int
) -> None:
    config = settings(tmp_path, output={"save_every": 4, "keep": 2})
    fit(config)
    run = tmp_path / "run"
    for step in (4, 6):
        if step > goes_on_from:
            (shard,) = (run / "checkpoints" / f"step-{step}").glob("exp_avg_sq*.safetensors")
            content = shard.read_bytes()
            shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    stop, stop_at = Stop(), goes_on_from + 1
    with caplog.at_level(logging.INFO, "megatrain"):
        stopped = fit(config, stop=stop, display=At(stop_at, lambda: stop.request("SIGINT")))
    newest = run / "checkpoints" / f"step-{stop_at}"
    assert (stopped.step, stopped.checkpoint) == (stop_at, newest)
    assert checkpoint.choose(run, "last") == newest
    assert f"step-6 was skipped and is now {run / 'checkpoints/skipped-step-6'}" in caplog.text
    assert ("the run begins again at step 0" in caplog.text) == (goes_on_from == 0)
    kept = (
        {"step-1", "skipped-step-4", "skipped-step-6"} if goes_on_from == 0 else {"step-4", "step-5", "skipped-step-6"}
    )
    assert {place.name for place in newest.parent.iterdir()} == kept
    assert fit(config).step == 6
    assert checkpoint.verify(run / "checkpoints/step-6") == []


def test_a_branch_sets_aside_what_is_damaged_in_its_folder_and_saves_the_step_it_began_at(tmp_path: Path) -> None:
    fit(settings(tmp_path, train={"steps": 2}, output={"dir": str(tmp_path / "first")}))
    branch = settings(tmp_path, output={"resume": str(tmp_path / "first")})
    damaged = tmp_path / "run/checkpoints/step-2"
    damaged.mkdir(parents=True)
    (tmp_path / "run/lock").write_text("process 1")
    result = fit(branch | {"train": branch["train"] | {"steps": 2}})
    assert (result.step, result.checkpoint) == (2, damaged)
    assert checkpoint.verify(damaged) == []


def test_held_out_data_may_change_and_that_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    held_out = write_rows(tmp_path / "held_out.jsonl", 8)
    config = settings(tmp_path, data={"eval": str(held_out)})
    stopped_after_two_steps(config)
    write_rows(held_out, 9)
    with caplog.at_level(logging.INFO, "megatrain"):
        assert fit(config).step == 6
    assert "from here on, data.eval[0]: its content changed since step 2" in caplog.text


def test_a_run_of_an_earlier_version_goes_on_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings(tmp_path)
    with monkeypatch.context() as earlier:
        earlier.setattr("megatrain.data.fingerprint.of_run", lambda *_: {})
        stopped_after_two_steps(config)
    assert fit(config).step == 6
    assert [r.message for r in caplog.records if "changes of data are not checked" in r.message]


def test_a_tokenizer_or_template_that_changed_in_its_folder_makes_another_run(tmp_path: Path) -> None:
    folder, template = tmp_path / "tokenizer", tmp_path / "template.jinja"
    train_bpe(WORDS, 300).save_pretrained(folder)
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    model = {"tokenizer": str(folder), "chat_template": str(template)}
    config = settings(tmp_path, model=model)
    config["model"]["config"] = MODEL | {"vocab_size": 300}
    stopped_after_two_steps(config)
    template.write_text("{% for message in messages %}{{ message.content }}.{% endfor %}")
    with pytest.raises(ConfigError, match=r"model\.chat_template: its content changed since step 2"):
        fit(config)
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    train_bpe([word[::-1] for word in WORDS], 300).save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"the tokenizer of model\.tokenizer: its content changed since step 2"):
        fit(config)
    train_bpe(WORDS, 300).save_pretrained(folder)
    tokens = folder / "tokenizer.json"
    as_trained = tokens.read_text()
    # the same vocabulary, and the same tokens for whatever does not hold the word
    normalizer = {"type": "Replace", "pattern": {"String": "lazy"}, "content": "quick"}
    tokens.write_text(json.dumps(json.loads(as_trained) | {"normalizer": normalizer}))
    with pytest.raises(ConfigError, match=r"the tokenizer of model\.tokenizer: its content changed since step 2"):
        fit(config)
    tokens.write_text(as_trained)
    assert fit(config).step == 6


def test_the_day_that_templates_are_given_is_that_of_the_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock(dt.date):
        day = 4

        @classmethod
        def today(cls) -> dt.date:
            return dt.date(2024, 7, cls.day)

    monkeypatch.setattr("megatrain.data.dataset.dt", SimpleNamespace(date=Clock))
    template = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    rows = [[{"role": "user", "content": word}, {"role": "assistant", "content": word[::-1]}] for word in WORDS]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    data = {"train": str(tmp_path / "chat.jsonl"), "eval": []}

    def run(name: str, **more: Any) -> dict[str, Any]:
        output = {"dir": str(tmp_path / name), "export": "never"}
        config = settings(tmp_path, data=data | more, output=output)
        config["model"] = config["model"] | {"chat_template": template}
        return config

    fit(run("straight"))
    stopped_after_two_steps(run("parted"))
    Clock.day = 5
    fit(run("parted"))
    assert losses(tmp_path / "parted") == losses(tmp_path / "straight")
    fit(run("later"))
    assert losses(tmp_path / "later") != losses(tmp_path / "straight")
    fit(run("dated", date="2024-07-04"))
    assert losses(tmp_path / "dated") == losses(tmp_path / "straight")


def test_the_standard_library_of_another_python_is_other_data(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = SourceConfig(path="python:stdlib-chat")
    before = fingerprint.of_source(Source(setting))
    assert fingerprint.changed_sources("data.train", [before], [setting], 9) == []
    original = stdlib.documents
    monkeypatch.setattr(stdlib, "documents", lambda path: original(path)[:-1])
    monkeypatch.setattr("platform.python_version", lambda: "3.99.1")
    said = f"data.train[0]: its content changed since step 9: python:stdlib-chat of Python {before['python']} → 3.99.1"
    assert fingerprint.changed_sources("data.train", [before], [setting], 9) == [said]


def test_a_branch_that_would_be_another_run_is_told_how_to_start_from_its_weights(tmp_path: Path) -> None:
    fit(settings(tmp_path))
    branch = settings(
        tmp_path, data={"seq_len": 16}, output={"dir": str(tmp_path / "branch"), "resume": str(tmp_path / "run")}
    )
    with pytest.raises(
        ConfigError, match=r"data\.seq_len: 32 → 16.*model: OUT after megatrain export .*run OUT"
    ) as said:
        fit(branch)
    assert "another output.dir" not in str(said.value)
    fit(settings(tmp_path, output={"dir": str(tmp_path / "run"), "export": "auto"}))
    with pytest.raises(ConfigError, match=r"write model: .*run/export, and leave output\.resume out"):
        fit(branch)
    assert not (tmp_path / "branch").exists()


def test_resume_never_and_required_are_kept_to(tmp_path: Path) -> None:
    required = settings(tmp_path, output={"dir": str(tmp_path / "run"), "resume": "required", "export": "never"})
    with pytest.raises(ConfigError, match="required"):
        fit(required)
    assert not (tmp_path / "run").exists(), "a refusal leaves nothing behind"
    fit(settings(tmp_path))
    with pytest.raises(ConfigError, match="never"):
        fit(settings(tmp_path, output={"dir": str(tmp_path / "run"), "resume": "never", "export": "never"}))
    elsewhere = settings(
        tmp_path,
        train={"steps": 8, "batch_size": 4, "lr": 1e-2},
        output={"dir": str(tmp_path / "branch"), "resume": str(tmp_path / "run"), "export": "never"},
    )
    assert fit(elsewhere).step == 8
    assert [record["step"] for record in read_metrics(tmp_path / "branch")] == [7, 8]


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("output", "resume", "never"),
        ("data", "seq_len", 16),
        ("memory", "host", "64KiB"),
        ("model", "config", MODEL | {"hidden_size": 64}),
        ("train", "batch_size", 2),
    ],
)
def test_a_refused_request_leaves_a_finished_run_as_it_was(tmp_path: Path, section: str, key: str, value: Any) -> None:
    config = settings(tmp_path)
    fit(config)
    run = tmp_path / "run"

    def contents() -> dict[str, bytes]:
        files = (path for path in run.rglob("*") if path.is_file() and path.name != "lock")
        return {str(path.relative_to(run)): path.read_bytes() for path in files}

    before = contents()
    assert read_status(run)["step"] == 6
    with pytest.raises((ConfigError, DoesNotFit)):
        fit(config | {section: config.get(section, {}) | {key: value}})
    assert contents() == before


def test_a_finished_run_that_is_run_again_keeps_its_losses(tmp_path: Path) -> None:
    config = settings(tmp_path)
    fit(config)
    before = read_status(tmp_path / "run")
    assert before["loss"] is not None
    assert fit(config).loss is None, "no step was taken"
    after = read_status(tmp_path / "run")
    del before["pid"], before["updated"], after["pid"], after["updated"]
    assert after == before


def test_an_evaluation_that_gave_way_to_a_stop_is_made_up(tmp_path: Path) -> None:
    more = {"eval": {"at_start": False, "every": 3, "keep_best": True}}
    straight = settings(tmp_path, output={"dir": str(tmp_path / "straight"), "export": "never"}, **more)
    parted = settings(tmp_path, output={"dir": str(tmp_path / "parted"), "export": "never"}, **more)
    fit(straight)
    stop = Stop()
    assert fit(parted, stop=stop, display=At(3, lambda: stop.request("SIGINT"))).eval_loss is None
    fit(parted)
    wanted, found = (read_metrics(tmp_path / name) for name in ("straight", "parted"))
    assert found[3]["eval_loss_before"] == wanted[2]["eval_loss"]
    assert read_status(tmp_path / "parted")["best_step"] == read_status(tmp_path / "straight")["best_step"]


def test_a_record_that_somebody_has_changed_does_not_keep_a_run_from_going_on(tmp_path: Path) -> None:
    config = settings(tmp_path)
    stopped_after_two_steps(config)
    metrics = tmp_path / "run" / "metrics.jsonl"
    first, second = metrics.read_text().splitlines()
    odd = [{"loss": "abc"}, {"step": "x"}, {"step": None, "loss": [1]}, {"grad_norm": {}}]
    lines = [first, *(json.dumps(json.loads(second) | changed) for changed in odd), '{"\udcff": 1}']
    metrics.write_bytes("".join(f"{line}\n" for line in lines).encode(errors="surrogateescape"))
    fit(config)
    assert [row.get("step") for row in read_metrics(tmp_path / "run")] == [1, 2, "x", None, 2, None, 3, 4, 5, 6]
