"""Runs `support/state_fuzz.py` for hours: `make test-fuzz`. Ends with exit code 1 at the first case that fails."""

import argparse
import itertools
import tempfile
import time
import traceback
from pathlib import Path

import torch

from support import state_fuzz


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=120.0, help="how long it goes on")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    end = time.monotonic() + arguments.minutes * 60
    for number in itertools.count(arguments.first):
        if time.monotonic() > end:
            print(f"cases {arguments.first} to {number - 1}: no difference")
            return 0
        with tempfile.TemporaryDirectory() as folder:
            try:
                state_fuzz.check(state_fuzz.drawn(number), Path(folder))
            except Exception:
                traceback.print_exc()
                print(f"case {number} fails; run it again with --first {number}")
                return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
