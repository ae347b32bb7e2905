"""A small engine under each placement, and every bit that training leaves in it."""

from typing import Any

import torch
from torch import Tensor

from megatrain import AdamW, Engine
from megatrain.models.decoder import Decoder
from support.fake_core import llama

OPTIMIZER = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}

PLACEMENTS: dict[str, dict[str, Any]] = {
    "two slots": {"plan": {"slots": 2}},
    "as many slots as layers": {"plan": {"slots": 3}},
    "state on the device": {"plan": {"state_on_device": 2}},
    "state that visits the device": {"plan": {"updates_on_device": 3, "parts": 2}},
    "recomputed activations": {"plan": {"activation": "recompute", "inputs": "host"}},
    "a micro-batch at a time": {"plan": {"group": 1}},
    "immediate updates": {"update": "immediate", "max_grad_norm": None},
}


def batches(step: int, accumulation: int) -> list[dict[str, Tensor]]:
    """Rows of a step; the same for the same step."""
    generator = torch.Generator().manual_seed(step)
    found = []
    for _ in range(accumulation):
        ids = torch.randint(96, (2, 12), generator=generator)
        labels = ids.clone()
        labels[torch.rand(2, 12, generator=generator) < 0.3] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def started(precision: str, tied: bool, seed: int = 0, accumulation: int = 3, **options: Any) -> Engine:
    return Engine(
        Decoder.from_config(llama(tied), precision=precision),
        optimizer=AdamW(**OPTIMIZER),
        **{
            "max_grad_norm": 0.5,
            "device": "cpu",
            "seed": seed,
            "micro_batch": (2, 12),
            "micro_batches": accumulation,
            "memory": {"gpu": "1GiB", "host": "1GiB"},
            **options,
        },
    )


def state(engine: Engine) -> dict[str, Any]:
    """Every bit that training left."""
    found: dict[str, Any] = dict(engine.state_dict())
    for name, ref in engine.decoder.tensors.items():
        if ref.role == "trainable":
            found |= {f"{name}/{key}": value for key, value in engine.optimizer_state(name).items()}
    return found


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[key], b[key]) if isinstance(a[key], Tensor) else a[key] == b[key] for key in a
    )
