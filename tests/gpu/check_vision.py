"""Vision-language models on a CUDA card: three steps with images are those of plain PyTorch in fp64, as exactly as
plain PyTorch's own in fp32 are, on the processor or on the card.

Run: python tests/gpu/check_vision.py [--device cuda|cpu] [--only NAME …]. Prints one JSON line a model; exits 1 on a
miss. Tiny random models in fp32, so that nothing but the order of sums differs. `of_allowed` is the largest error as a
part of what is allowed: 1e-5, or three times plain PyTorch's (see tests/reference.py).
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import megatrain
from support.reference import error, run_reference
from support.vision import CHIEF, SEEING, see, seeing_steps

PLANS: tuple[dict[str, Any], ...] = ({}, {"activation": "recompute", "compile": False})
LR, DECAY, MAX_NORM = 3e-4, 0.1, 0.5


def plain(name: str, steps: list[Any], device: str, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and norms of PyTorch's steps, and its weights after them."""
    here = [[{key: value.to(device) for key, value in batch.items()} for batch in step] for step in steps]
    run = run_reference(see(name).to(device), here, lr=LR, weight_decay=DECAY, max_grad_norm=MAX_NORM, **options)
    return run.losses + run.norms, {n: p.detach().cpu() for n, p in run.model.named_parameters()}


def ours(
    name: str, steps: list[Any], device: str, freeze: list[str], plan: dict[str, Any]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same of our engine's."""
    plan = plan if device == "cuda" else {k: v for k, v in plan.items() if k != "compile"}
    with megatrain.Engine(
        see(name),
        optimizer=megatrain.AdamW(lr=LR, weight_decay=DECAY),
        max_grad_norm=MAX_NORM,
        precision="fp32",
        device=device,
        freeze=freeze,
        plan=plan,
        memory={"gpu": "4GiB", "host": "4GiB"},
    ) as engine:
        outputs = [engine.step(step) for step in steps]
        return [o.loss for o in outputs] + [o.grad_norm for o in outputs], dict(engine.state_dict())


def check(name: str, device: str) -> bool:
    """Every plan, with the tower trained and frozen."""
    steps = seeing_steps(name, 3)
    worst = {"numbers": (0.0, ""), "weights": (0.0, "")}
    for frozen in ((), SEEING[name].tower):
        exact, wanted = plain(name, steps, "cpu", frozen=frozen, dtype=torch.float64)
        near = [plain(name, steps, where, frozen=frozen) for where in {"cpu", device}]
        for plan in PLANS:
            numbers, weights = ours(name, steps, device, [f"*{part}*" for part in frozen], plan)
            for found, a, b in (
                *(
                    ("numbers", abs(n - e) / e, max(abs(other[0][i] - e) / e for other in near))
                    for i, (n, e) in enumerate(zip(numbers, exact, strict=True))
                ),
                *(
                    (f"weights {n}", error(weights[n], e), max(error(other[1][n], e) for other in near))
                    for n, e in wanted.items()
                ),
            ):
                kind, _, tensor = found.partition(" ")
                worst[kind] = max(worst[kind], (a / max(1e-5, 3 * b), tensor))
    ok = all(part <= 1 for part, _ in worst.values())
    facts = {"of_allowed": {kind: round(part, 3) for kind, (part, _) in worst.items()}, "worst": worst["weights"][1]}
    print("VISION " + json.dumps({"check": name, "ok": ok, "device": device, **facts}), flush=True)
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
