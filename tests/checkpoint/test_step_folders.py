"""Where the checkpoints of a run are, and what of them no longer counts."""

from pathlib import Path

import pytest

from megatrain.checkpoint.step_folders import list_checkpoints, set_aside, step_folder, steps_in


def test_checkpoints_that_were_skipped_are_set_aside_under_names_of_their_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for again in ("first", "second"):
        for step in (10, 20, 30):
            step_folder(tmp_path, step).mkdir(parents=True, exist_ok=True)
            (step_folder(tmp_path, step) / "manifest.json").write_text(again)
        caplog.clear()
        moved = set_aside(tmp_path, 10)
        assert [message.split(" was skipped")[0] for message in caplog.messages] == [
            str(step_folder(tmp_path, step)) for step in (20, 30)
        ]
        assert {(place / "manifest.json").read_text() for place in moved} == {again}
        assert steps_in(tmp_path) == [10]
        assert list_checkpoints(tmp_path) == [step_folder(tmp_path, 10)]
    assert set_aside(tmp_path, 10) == []
    assert sorted(place.name for place in (tmp_path / "checkpoints").iterdir()) == [
        "skipped-step-20",
        "skipped-step-20-2",
        "skipped-step-30",
        "skipped-step-30-2",
        "step-10",
    ]
