"""One long row: whole layers, halves and tiles agree, and torch needs no more memory than planned.

Run: python tests/gpu/check_long_rows.py [--seq 131072] [--layers 4]. Layers have the width of Qwen2.5-7B. Prints one
JSON line a case, with seconds per step and torch's memory: planned, in use, reserved. Exits 1 on a miss.
"""

import argparse
import dataclasses
import json
import sys
import time
from typing import Any

import torch

import megatrain
from megatrain.models.decoder import Decoder
from megatrain.models.presets import SHAPES

CASES: dict[str, dict[str, Any]] = {
    "whole": {"fragments": "whole"},
    "halves": {"fragments": "halves", "mlp_tiles": 1},
    "4 tiles": {"mlp_tiles": 4},
    "16 tiles": {"mlp_tiles": 16},
    "16 tiles, recomputed, inputs on the host": {"mlp_tiles": 16, "activation": "recompute", "inputs": "host"},
}
STEPS = 3
TOLERANCE = 2e-2
"""Relative difference of losses and norms in bf16 after a few steps."""


def run(plan: dict[str, Any], layers: int, seq: int, budget: str) -> dict[str, Any]:
    """Three steps on random tokens, the same for every plan."""
    from transformers import Qwen2Config

    shape = dataclasses.replace(SHAPES["qwen2.5-7b"], layers=layers, vocab=32768)
    config = Qwen2Config(**{key: value for key, value in shape.config().items() if key != "model_type"})
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    ours = megatrain.Engine(
        Decoder.from_config(config, precision="bf16"),
        optimizer=megatrain.AdamW(lr=1e-5),
        device="cuda",
        micro_batch=(1, seq),
        micro_batches=1,
        memory={"gpu": budget},
        plan=plan,
    )
    planned = sum(item["bytes"] for item in ours.plan["items"] if item["what"].endswith("(torch)"))
    planned -= sum(item["bytes"] for item in ours.plan["items"] if item["what"].startswith("context"))
    outs, started = [], time.perf_counter()
    for step in range(STEPS):
        ids = torch.randint(0, 32768, (1, seq), generator=torch.Generator().manual_seed(step))
        outs.append(ours.step([{"input_ids": ids, "labels": ids}]))
        if step == 0:
            ours.drain()
            started = time.perf_counter()
    ours.drain()
    seconds = (time.perf_counter() - started) / (STEPS - 1)
    gib = {
        "planned": planned,
        "in_use": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }
    units = len(ours.plan["units"])
    ours.close()
    return {
        "step_s": round(seconds, 3),
        **{f"{key}_gib": round(value / 2**30, 2) for key, value in gib.items()},
        "units": units,
        "losses": [round(out.loss, 5) for out in outs],
        "norms": [round(out.grad_norm or 0.0, 5) for out in outs],
    }


def main() -> int:
    """0 when nothing is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=131072)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--gpu-memory", default="78GiB")
    given = parser.parse_args()
    missed, wanted = False, None
    for name, plan in CASES.items():
        try:
            found = run(plan, given.layers, given.seq, given.gpu_memory)
        except Exception as error:  # the other cases are still of use
            print("LONG " + json.dumps({"case": name, "ok": False, "error": f"{error}"[:400]}), flush=True)
            missed = True
            continue
        wanted = wanted or found
        pairs = zip(found["losses"] + found["norms"], wanted["losses"] + wanted["norms"], strict=True)
        agree = all(abs(one - other) <= TOLERANCE * abs(other) for one, other in pairs)
        ok = agree and found["reserved_gib"] <= found["planned_gib"]
        missed |= not ok
        print("LONG " + json.dumps({"case": name, "ok": ok, "agree": agree, **found}), flush=True)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
