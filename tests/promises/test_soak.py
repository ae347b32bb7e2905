"""A run with pauses, saves, evaluations, restarts and varying shapes has the bytes of a straight one, and neither grows
nor allocates once it is warm: a short form of `make test-soak`."""

from pathlib import Path

from support import soak


def test_a_disturbed_run_is_a_straight_one_and_does_not_grow(tmp_path: Path) -> None:
    soaked = soak.soak(tmp_path, steps=180, restart_every=70)
    assert soaked.steps == 180
    assert soaked.parts >= 2
    assert soak.problems(soaked) == []
