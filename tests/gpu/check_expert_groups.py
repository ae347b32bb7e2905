"""The experts of a layer in groups beside the same model in halves: the same numbers, in less device memory.

Run: python tests/gpu/check_expert_groups.py [--device cuda|cpu] [--layers 1] [--experts 128] [--rows 8]. Layers of
gpt-oss-120b's width, and of DeepSeek-V3's with an eighth of its experts. Each way of cutting runs in a process of its
own and prints one JSON line: losses, seconds of a step and those predicted, GiB that were planned and the most that
were taken. Torch is refused what is beyond the budget, as on a card that has no more. Exits 1 where a loss or norm
differs from that of halves, as far as those repeat their own, or, with few tokens, where the experts that are routed to
are sent alone.
"""

import argparse
import json
import multiprocessing
import sys
import time
from typing import Any

import torch
from transformers import AutoConfig

from megatrain import AdamW, Engine
from megatrain.models.decoder import Decoder

GIB = 2**30
SEQ = 1024
STEPS = 4


def config(family: str, layers: int, experts: int) -> Any:
    """A configuration of the family's published width, with a small vocabulary."""
    if family == "gpt_oss":
        sizes = {"num_hidden_layers": layers, "num_local_experts": experts}
    else:
        sizes = {"num_hidden_layers": layers + 1, "n_routed_experts": experts // 4, "first_k_dense_replace": 1}
    return AutoConfig.for_model(family, vocab_size=32_000, tie_word_embeddings=False, **sizes)


def run(family: str, given: argparse.Namespace, budget: float, plan: dict[str, Any]) -> dict[str, Any]:
    """Trains a few steps on random tokens."""
    device = torch.device(given.device)
    decoder = Decoder.from_config(config(family, given.layers, given.experts), precision="bf16")
    engine = Engine(
        decoder,
        optimizer=AdamW(lr=1e-4),
        device=given.device,
        seed=0,
        micro_batch=(given.rows, given.seq),
        micro_batches=2,
        max_grad_norm=1.0,
        memory={"gpu": int(budget * GIB), "host": f"{given.host}GiB"},
        plan={**plan, "hold_torch": True},
    )
    found, seconds = [], []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        batch = []
        for _ in range(2):
            ids = torch.randint(32_000, (given.rows, given.seq), generator=generator)
            batch.append({"input_ids": ids, "labels": ids.clone()})
        start = time.perf_counter()
        out = engine.step(batch)
        found.append((out.loss, out.grad_norm))
        seconds.append(time.perf_counter() - start)
    taken = 0.0
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        taken = (total - free - torch.cuda.memory_reserved() + torch.cuda.max_memory_reserved()) / GIB
    planned = engine.plan
    line = {
        "family": family,
        "plan": plan,
        "units": len(planned["units"]),
        "budget_gib": budget,
        "planned_gib": round(planned["totals"]["device"] / GIB, 2),
        "taken_gib": round(taken, 2),
        "slots": planned["slots"],
        "step_s": round(sum(seconds[1:]) / (STEPS - 1), 3),
        "predicted_s": round(planned["estimate"]["expected_step_s"], 3),
        "found": found,
    }
    engine.close()
    print(json.dumps(line), flush=True)
    return line


def main() -> int:
    """Checks both families; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--families", nargs="+", default=["gpt_oss", "deepseek_v3"])
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seq", type=int, default=SEQ)
    parser.add_argument("--host", type=int, default=110)
    parser.add_argument("--budget", type=float, default=40.0)
    parser.add_argument("--small-budget", type=float, default=16.0)
    given = parser.parse_args()
    wrong = 0
    for family in given.families:
        streamed = {"state_on_device": 0}
        eager = {**streamed, "compile": False} if given.device == "cuda" else streamed
        halves = apart(family, given, given.budget, {**eager, "fragments": "halves"})
        # what two runs of the same plan have in common: some kernels of cards add in any order
        repeats = apart(family, given, given.budget, {**eager, "fragments": "halves"})["found"] == halves["found"]
        for budget, plan in (
            (given.budget, {**eager, "fragments": "experts", "expert_groups": 4}),
            (given.small_budget, {**eager, "fragments": "experts"}),
            (given.small_budget, {**streamed, "fragments": "experts"}),
        ):
            line = apart(family, given, budget, plan)
            same = line["found"] == halves["found"]
            near = all(
                abs(a - b) <= 2e-3 * abs(b)
                for one, other in zip(line["found"], halves["found"], strict=True)
                for a, b in zip(one, other, strict=True)
            )
            bits = repeats and ("compile" in plan or given.device == "cpu")
            shown = {"family": family, "plan": plan, "repeats": repeats, "same": same, "near": near}
            print(json.dumps(shown), flush=True)
            wrong += not (same if bits else near)
        # few tokens need few experts
        few = argparse.Namespace(**{**vars(given), "rows": 1, "seq": 4})
        spread = {**eager, "fragments": "experts", "expert_groups": 4}
        every, some = (apart(family, few, given.budget, {**spread, "sent_experts": sent}) for sent in ("all", "routed"))
        same, share = some["found"] == every["found"], some["step_s"] / every["step_s"]
        print(
            json.dumps({"family": family, "sent": "routed", "same": same, "time_of_all": round(share, 3)}), flush=True
        )
        wrong += not same
    return 1 if wrong else 0


def apart(*given: Any) -> dict[str, Any]:
    """`run` in a process of its own, so that nothing of another run takes memory."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found: dict[str, Any] = pool.apply(run, given)
        return found


if __name__ == "__main__":
    sys.exit(main())
