"""`benches/checkpoint.py`: a checkpoint's rate beside that of as many plain bytes, with nothing left on the disk."""

import json
from pathlib import Path

import pytest

WORDS = ["--model", "tiny", "--batch", "2", "--seq", "16", "--device", "cpu", "--steps", "2", "--warmup", "1"]


@pytest.mark.parametrize(
    ("state", "least", "most"),
    [([], 12.0, 12.1), (["--set", "train.moments=8bit", "--set", "train.master=24bit"], 5.0, 5.3)],
)
def test_a_small_model_is_measured_and_leaves_nothing(
    state: list[str], least: float, most: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from checkpoint import main
    from megatrain.models.presets import SHAPES

    shape = SHAPES["tiny"]
    main([str(tmp_path / "there"), *WORDS, "--precision", "bf16", *state])
    lines = {line["measured"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    found = lines["result"]
    embeddings = 2 * shape.vocab * shape.hidden
    layer = 2 * shape.hidden**2 + 2 * shape.hidden**2 * shape.kv_heads // shape.heads
    parameters = embeddings + shape.layers * (
        layer + 3 * shape.hidden * shape.intermediate
    )  # and some biases and norms
    assert least < found["bytes"] / parameters < most
    assert lines["plain writer"]["bytes"] == pytest.approx(found["bytes"], rel=0.02), "as many bytes are compared"
    beside, alone = lines["checkpoint beside training"], lines["checkpoint alone"]
    assert beside["steps"] >= 1
    assert alone["steps"] == 0
    assert alone["size"] == pytest.approx(beside["size"], rel=1e-3)
    assert found["ratio"] == pytest.approx(beside["gbs"] / found["plain_gbs"], abs=1e-3)
    assert found["stall_s"] == beside["stall_s"] >= 0
    assert list((tmp_path / "there").iterdir()) == []


def test_a_folder_with_files_and_a_checkpoint_that_does_not_fit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import checkpoint

    (tmp_path / "mine").write_text("kept")
    with pytest.raises(SystemExit):
        checkpoint.main([str(tmp_path), *WORDS])
    assert "is not an empty folder" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "kept"
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1_000_000})())
    with pytest.raises(SystemExit, match=r"0\.0 GB are free; --set train.moments=8bit"):
        checkpoint.main([str(tmp_path / "there"), *WORDS])
    with pytest.raises(SystemExit, match=r"train\.master"):
        checkpoint.main([str(tmp_path / "there"), *WORDS, "--set", "train.master=7bit"])
