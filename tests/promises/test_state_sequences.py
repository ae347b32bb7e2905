"""Random sequences of operations leave the bits of those among them that change the state: a bounded part of
`make test-fuzz`."""

from pathlib import Path

import pytest

from support import state_fuzz


@pytest.mark.parametrize("number", range(10))
def test_what_must_leave_no_trace_leaves_none(number: int, tmp_path: Path) -> None:
    state_fuzz.check(state_fuzz.drawn(number), tmp_path)
