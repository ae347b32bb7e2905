"""Smaller optimizer states on a CUDA card: the same bits wherever a layer is updated, by the host or by the card.

Run: python tests/gpu/check_states.py [--layers 4]. Each kind of state trains three steps of three micro-batches with
all state on the host, with it on the card, and with layers that visit the card to be updated. Prints one JSON line a
kind; exits 1 on a miss.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from check_step import batches, digest, engine

STATES: dict[str, dict[str, Any]] = {
    "bf16 moments": {"moments": "bf16"},
    "8-bit moments": {"moments": "8bit"},
    "8-bit moments, 24-bit master": {"moments": "8bit", "master": "24bit"},
    "fp32 moments, 24-bit master": {"master": "24bit"},
}


def plans(layers: int) -> dict[str, dict[str, Any]]:
    """Where state is and is updated."""
    return {
        "host": {"state_on_device": 0, "updates_on_device": 0, "slots": 2},
        "card": {"state_on_device": layers + 2},
        "visit": {"state_on_device": 0, "updates_on_device": layers - 1, "parts": 3},
    }


def main() -> int:
    """0 when all bits agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    layers = parser.parse_args().layers
    missed = False
    for name, state in STATES.items():
        found: dict[str, Any] = {}
        try:
            for where, plan in plans(layers).items():
                ours = engine(layers, plan=plan, deterministic=True, **state)
                outs = [ours.step(batches(3, seed=seed)) for seed in range(3)]
                found[where] = (outs[-1].loss, outs[-1].grad_norm, digest(ours)[:16])
                ours.close()
                torch.cuda.empty_cache()
        except Exception as error:  # the other kinds are still of use
            found["error"] = f"{type(error).__name__}: {error}"[:500]
        ok = "error" not in found and len(set(found.values())) == 1
        missed |= not ok
        print("STATES " + json.dumps({"check": name, "ok": ok, "found": found}), flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
