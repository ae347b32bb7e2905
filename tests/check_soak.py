"""Runs `support/soak.py` over 2,000 steps: `make test-soak`. Prints what the run took; exit code 1 where it grew."""

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from support import soak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000, help="steps of the run")
    parser.add_argument("--restart-every", type=int, default=200, help="steps between two restarts, on average")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        soaked = soak.soak(Path(folder), arguments.steps, arguments.restart_every)
    found = soak.problems(soaked)
    print(json.dumps(asdict(soaked) | {"problems": found}))
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
