"""Plans as `megatrain plan` gives them, for a card that is described and not there."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatrain.cli import main

H100 = {
    "name": "an H100",
    "host": {"memory": "1500GiB", "cpus": 64},
    "gpu": {"name": "H100", "memory": "80GiB", "capability": [9, 0]},
    "rates": {"h2d_gbs": 55, "d2h_gbs": 55, "matmul_tflops": 746, "adamw_gparams": 5.0, "hbm_gbs": 2600},
}


def written(folder: Path, name: str, document: dict[str, Any]) -> str:
    (folder / name).write_text(yaml.safe_dump(document))
    return str(folder / name)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 0
    return capsys.readouterr().out


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code = main(["plan", *words, "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    found: dict[str, Any] = json.loads(captured.out)
    return found
