"""`megatrain bench`: one JSON line that adds up, on the CPU; refusals name the argument."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain.cli import bench, main
from megatrain.cli.bench_request import BenchRequest
from megatrain.engine.engine import Engine
from megatrain.training.trainer import Trainer
from support.runs import MODEL, settings

WORDS = ["bench", "--device", "cpu", "--batch", "4", "--seq", "32", "--steps", "3", "--warmup", "1"]


@pytest.fixture
def architecture(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"vocab_size": 256}))
    return str(tmp_path)


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--micro-batch", "2", "--max-grad-norm", "1.0"],
        ["--update", "immediate", "--keep", "0", "--slots", "2"],
        ["--set", "loss_chunk=16", "--host-memory", "1GiB"],
        ["--precision", "bf16", "--matmul", "fp8"],
        ["--set", "train.moments=8bit", "--set", "plan.slots=2", "--set", "memory.nvme={path: ., size: 1GiB}"],
        ["--micro-batch", "2", "--set", "group=1", "--set", "activation=offload", "--set", "inputs=host"],
    ],
)
def test_the_answer_is_one_line_that_adds_up(
    architecture: str, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, "--model", architecture, *more]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    found = json.loads(out)
    assert found["tokens_s"] == pytest.approx(4 * 32 / found["step_s"], rel=1e-2)
    assert found["loss"] < found["first_loss"] * 1.2
    assert found["grad_norm"] > 0
    assert found["lanes_s"]["compute"] <= found["step_s"] * 1.05
    assert found["bound"] in found["lanes_s"], "on the CPU nothing is launched"
    assert found["plan"]["totals"]["host"] > 0
    assert sum(found["plan"]["activations"].values()) == MODEL["num_hidden_layers"] + 2
    assert found["matmul"] == ("fp8" if "--matmul" in more else "bf16")
    assert found["micro_batch"] == (2 if "--micro-batch" in more else 4)


@pytest.mark.parametrize("warmup", [0, 2])
def test_the_clock_sees_as_many_updates_as_steps(warmup: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def noted(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: [seen.append(what), function(*args)][1]

    monkeypatch.setattr(Engine, "step", noted("step", Engine.step))
    monkeypatch.setattr(bench, "settle_down", noted("updates", bench.settle_down))
    monkeypatch.setattr(bench.time, "perf_counter", noted("clock", bench.time.perf_counter))
    settings = {"device": "cpu", "train": {"max_grad_norm": 1.0}}
    bench.run(BenchRequest(model="tiny", batch=2, seq=16, steps=2, warmup=warmup, settings=settings))
    # updates of the last step of the warm-up are in, those of the last step are not; without a warm-up those are
    timed = ["step", "step", *(["updates"] if warmup == 0 else [])]
    clock = [index for index, what in enumerate(seen) if what == "clock"]
    start = max(index for index in clock if seen[:index].count("step") == warmup)
    end = next(index for index in clock if index > start)
    assert seen[start + 1 : end] == timed
    assert seen[:start].count("updates") == 0
    assert seen[-1] == "updates"


def test_a_configuration_and_a_run_stand_for_their_model_section(
    architecture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def parameters(model: str) -> int:
        assert main([*WORDS, "--model", model]) == 0
        found: int = json.loads(capsys.readouterr().out)["parameters"]
        return found

    document = settings(tmp_path)
    (tmp_path / "own.yaml").write_text(json.dumps(document))
    (tmp_path / "named.yaml").write_text(json.dumps({"model": {"path": architecture, "freeze": ["*norm*"]}}))
    assert parameters(str(tmp_path / "named.yaml")) == parameters(architecture)
    trained = parameters(str(tmp_path / "own.yaml"))
    assert trained == parameters(architecture) + (300 - 256) * MODEL["hidden_size"]
    Trainer(document | {"train": document["train"] | {"steps": 1, "schedule": "constant"}}).fit()
    assert parameters(str(tmp_path / "run")) == trained


def test_a_trace_of_one_more_step_opens_in_perfetto(
    architecture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    assert main([*WORDS, "--model", architecture, "--trace", str(trace)]) == 0
    capsys.readouterr()
    events = json.loads(trace.read_text())
    events = events["traceEvents"] if isinstance(events, dict) else events
    assert any(event.get("ph") == "X" and event["dur"] >= 0 for event in events)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "qwen9"], "qwen2.5-0.5b"),
        (["--model", "qwen9"], "nor a configuration (CONFIG.yaml) or run, whose model section it would take"),
        (["--model", "gone.yaml"], "gone.yaml: there is no such file"),
        (["--model", "tiny", "--steps", "0"], "--steps"),
        (["--model", "tiny", "--update", "immediate", "--max-grad-norm", "1.0"], "max_grad_norm"),
        (["--model", "tiny", "--set", "chunks=3"], "plan.chunks"),
        (["--model", "tiny", "--set", "group=3"], "plan.group must be between 1 and micro_batches = 1, not 3"),
        (["--model", "tiny", "--set", "activation=stay"], "plan.activation"),
        (["--model", "tiny", "--set", "compile=true"], "plan.compile is for CUDA"),
        (["--model", "tiny", "--set", "train.momentz=8bit"], "did you mean train.moments?"),
        (["--model", "tiny", "--set", "data.path=x"], "sections train, memory and plan, not 'data'"),
        (["--model", "tiny", "--gpu-memory", "plenty"], "memory.gpu"),
        (["--model", "tiny", "--host-memory", "1MiB"], "does not fit"),
        (["--model", "tiny", "--micro-batch", "9"], "plan.micro_batch"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_is_allocated(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, *words]) == 2
    assert said in capsys.readouterr().err


def test_on_a_terminal_it_says_what_it_is_about_to_do_and_help_names_the_default_of_clipping(
    architecture: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert main([*WORDS, "--model", architecture]) == 0
    captured = capsys.readouterr()
    assert "steps: 1 to warm up, then 3 timed, each of 4 x 32 tokens" in captured.err
    assert captured.out.count("\n") == 1
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    assert "no clipping here" in " ".join(capsys.readouterr().out.split())
