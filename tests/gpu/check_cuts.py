"""How an engine cuts its layers, and so what it computes, does not follow what else is on the card.

Run: python tests/gpu/check_cuts.py [--layers 2] [--seq 16384]. Trains three steps on an empty card, and three with a
tensor on it that leaves the plan a little more than it needs: the same cut, the same bits. Prints one JSON line a case.
Exits 1 on a miss.
"""

import argparse
import dataclasses
import json
import sys
from typing import Any

import torch

import megatrain
from megatrain.models.decoder import Decoder
from megatrain.models.presets import SHAPES

STEPS = 3
SPARE = 2 << 30
"""Bytes that the tensor leaves free beside what the plan on the empty card took."""
PLAN = {"activation": "recompute", "state_on_device": 0, "slots": 2}


def run(layers: int, seq: int, held: int) -> dict[str, Any]:
    """Three steps on random tokens beside a tensor of `held` bytes."""
    from transformers import Qwen2Config

    shape = dataclasses.replace(SHAPES["qwen2.5-7b"], layers=layers, vocab=32768)
    config = Qwen2Config(**{key: value for key, value in shape.config().items() if key != "model_type"})
    torch.cuda.empty_cache()
    tensor = torch.empty(held, dtype=torch.uint8, device="cuda")
    ours = megatrain.Engine(
        Decoder.from_config(config, precision="bf16"),
        device="cuda",
        micro_batch=(1, seq),
        micro_batches=1,
        deterministic=True,
        plan=dict(PLAN),
    )
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(STEPS):
        ids = torch.randint(0, 32768, (1, seq), generator=generator)
        losses.append(ours.step([{"input_ids": ids, "labels": ids}]).loss)
    facts = {"held": held, "cut": ours._runtime.cut.options, "planned": ours.plan["totals"]["device"], "losses": losses}
    ours.close()
    del tensor
    return facts


def main() -> int:
    """Prints a line a case; 1 on a miss."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seq", type=int, default=16384)
    args = parser.parse_args()
    empty = run(args.layers, args.seq, 0)
    free = torch.cuda.mem_get_info()[0]
    busy = run(args.layers, args.seq, max(0, free - empty["planned"] - SPARE))
    same = empty["cut"] == busy["cut"] and empty["losses"] == busy["losses"]
    for name, facts in (("empty card", empty), ("busy card", busy)):
        print(json.dumps({"case": name, "ok": same, **facts}), flush=True)
    return 0 if same and busy["held"] > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
