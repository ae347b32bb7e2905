"""Vision-language models on a CUDA card: three steps with images give the CPU's losses, norms and weights.

Run: python tests/gpu/check_vision.py [--device cuda|cpu] [--only NAME …]. Prints one JSON line a model; exits 1 on a
miss. Tiny random models in fp32, so that nothing but the order of sums differs.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import megatrain
from reference import error
from seeing import CHIEF, SEEING, see, seeing_steps

TOLERANCE = 1e-4
"""Relative, after three steps."""
PLANS: tuple[dict[str, Any], ...] = ({}, {"activation": "recompute", "compile": False})


def train(
    name: str, device: str, freeze: list[str], plan: dict[str, Any]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and norms of three steps, and the weights after them."""
    plan = plan if device == "cuda" else {k: v for k, v in plan.items() if k != "compile"}
    with megatrain.Engine(
        see(name),
        optimizer=megatrain.AdamW(lr=3e-4),
        precision="fp32",
        device=device,
        freeze=freeze,
        plan=plan,
        memory={"gpu": "4GiB", "host": "4GiB"},
    ) as ours:
        outputs = [ours.step(step) for step in seeing_steps(name, 3)]
        return [n for o in outputs for n in (o.loss, o.grad_norm)], dict(ours.state_dict())


def check(name: str, device: str) -> bool:
    """Every plan, with the tower trained and frozen, against the CPU."""
    worst = {"numbers": 0.0, "weights": 0.0}
    for freeze in ([], [f"*{part}*" for part in SEEING[name].tower]):
        numbers, weights = train(name, "cpu", freeze, {})
        for plan in PLANS:
            found, theirs = train(name, device, freeze, plan)
            off = max(abs(a - b) / b for a, b in zip(found, numbers, strict=True))
            worst["numbers"] = max(worst["numbers"], off)
            worst["weights"] = max(worst["weights"], *(error(theirs[n], w) for n, w in weights.items()))
    ok = max(worst.values()) <= TOLERANCE
    print("VISION " + json.dumps({"check": name, "ok": ok, "device": device, **worst}), flush=True)
    return ok


def main() -> int:
    """0 when all agree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="*", choices=tuple(SEEING), default=CHIEF)
    arguments = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False
    return min(1, sum(not check(name, arguments.device) for name in arguments.only))


if __name__ == "__main__":
    sys.exit(main())
