"""`megatrain plan`: why a plan is as it is, its picture, machines by name, and the hours of a run."""

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from megatrain.cli import main
from megatrain.planning import calibrate, presets
from support.plans import H100, answer, printed, written


def test_a_plan_says_what_other_choices_would_cost_as_a_plan_with_them_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = ("--machine", written(tmp_path, "h100.yaml", H100))
    words = ("qwen2.5-0.5b", "memory.gpu=6GiB", "data.seq_len=2048", *machine)
    found = answer(capsys, *words)
    others = {one["change"]: one for one in found["runners_up"]}
    seconds = [one["expected_step_s"] for one in found["runners_up"] if one["expected_step_s"] is not None]
    assert seconds == sorted(seconds)
    assert others["plan.activation=keep"]["expected_step_s"] is None, "it does not fit"
    asked = answer(capsys, *words, "plan.group=1")
    assert others["plan.group=1"]["expected_step_s"] == pytest.approx(asked["plan"]["estimate"]["expected_step_s"])
    assert others["plan.group=1"]["bound"] == asked["plan"]["estimate"]["bound"]
    assert "plan.group=1" not in {one["change"] for one in asked["runners_up"]}, "what was asked for is not varied"
    said = printed(capsys, *words)
    least = found["runners_up"][0]
    change = least["expected_step_s"] / found["plan"]["estimate"]["expected_step_s"] - 1
    assert f"why this plan: other choices change the step's time: {least['change']} {change:+.0%}" in said
    assert len(said.splitlines()) <= 12
    assert re.search(r"plan\.activation=keep +does not fit", printed(capsys, *words, "--verbose"))


def test_the_picture_of_a_plan_has_every_lane_with_its_share_of_the_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = ("--machine", written(tmp_path, "h100.yaml", H100))
    words = ("qwen2.5-0.5b", "memory.gpu=6GiB", "data.seq_len=2048", *machine)
    picture = tmp_path / "plan.svg"
    found = answer(capsys, *words, "--picture", str(picture))
    root = ET.fromstring(picture.read_text(encoding="utf-8"))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    texts = [text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text")]
    milliseconds = 1000 * found["expected_step_s"]
    assert texts[0] == f"qwen2.5-0.5b on H100: a step of 65,536 tokens, predicted {milliseconds:.4g} ms"
    estimate = found["plan"]["estimate"]
    for lane, busy in estimate["lanes"].items():
        shown = float(texts[texts.index(lane) + 1].removesuffix("% busy")) / 100
        assert shown == pytest.approx(busy / estimate["step_s"], abs=0.02), lane
    titles = [title.text or "" for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert any(title.startswith("backward layers.23, micro-batch 0: ") for title in titles)
    assert main(["plan", "tiny", "device=cpu", "--picture", str(tmp_path / "none" / "plan.svg")]) == 2
    assert "--picture" in capsys.readouterr().err


@pytest.mark.parametrize("name", presets.names())
def test_a_card_by_its_name_has_the_rates_of_its_data_sheet_and_says_what_is_assumed(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = presets.preset(name)
    assert machine.gpu is not None
    rates, measured = calibrate.rates(machine, "cuda")
    assert not measured
    assert any(word.lower() in machine.gpu.name.lower() for word in calibrate._CARDS), "known by its name"
    assert rates["matmul_tflops"] > 40
    said = printed(capsys, "tiny", "--machine", name.upper().replace("-", " "))
    assert f"on {machine.gpu.name}\n" in said
    assert f"assumed are {machine.assumed}" in said
    assert len(said.splitlines()) <= 12


def test_an_unknown_machine_is_refused_with_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tiny", "--machine", "rtx4900"]) == 2
    assert "did you mean rtx4090?" in capsys.readouterr().err
    assert main(["plan", "tiny", "--machine", "none.yaml"]) == 2
    assert "none.yaml cannot be read" in capsys.readouterr().err


def test_hours_and_expected_rate_of_a_run_are_in_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.txt"
    rows.write_text("a" * 400_000)
    words = ("tiny", "device=cpu", "data.seq_len=128", "train.batch_size=2")
    found = answer(capsys, *words, "train.steps=50")
    assert found["expected_tokens_per_s"] == pytest.approx(256 / found["expected_step_s"])
    assert found["expected_tokens_per_s"] <= found["tokens_per_s"]
    assert (found["steps"], found["run_tokens"]) == (50, 50 * 256)
    assert found["run_hours"] == pytest.approx(50 * found["expected_step_s"] / 3600)
    by_data = answer(
        capsys, *words, "train.epochs=2", f"data.train={rows}", "model.tokenizer={train: bpe, vocab_size: 300}"
    )
    assert (by_data["steps"], by_data["run_tokens"]) == (None, 200_000)
    assert by_data["run_hours"] == pytest.approx(200_000 / by_data["expected_tokens_per_s"] / 3600)
    assert answer(capsys, *words)["run_hours"] is None
