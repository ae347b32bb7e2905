"""One training step on a CUDA card, looked at closely: no synchronisation inside, compiled once, same bits twice.

Run: python tests/gpu/check_step.py [--layers 8]. Prints one JSON line a check; exits 1 on a miss.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

import megatrain
from megatrain.engine.step import Pass


def build(layers: int, tied: bool = True, vocab: int = 151936) -> torch.nn.Module:
    """A Qwen2 decoder 2,048 wide, the same for the same arguments."""
    config = Qwen2Config(
        num_hidden_layers=layers,
        hidden_size=2048,
        intermediate_size=11008,
        num_attention_heads=16,
        num_key_value_heads=2,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


def batches(count: int, rows: int = 4, seq: int = 1024, seed: int = 0, vocab: int = 151936) -> list[dict[str, Any]]:
    """Micro-batches of uniform tokens."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randint(0, vocab, (rows, seq), generator=generator) for _ in range(count)]
    return [{"input_ids": ids, "labels": ids} for ids in made]


def engine(layers: int, **options: Any) -> megatrain.Engine:
    """Ours, clipped, on the card."""
    settings: dict[str, Any] = {"device": "cuda", "micro_batch": (4, 1024), "micro_batches": 3, "max_grad_norm": 1.0}
    model = build(layers).cpu()
    torch.cuda.empty_cache()
    return megatrain.Engine(model, optimizer=megatrain.AdamW(lr=1e-4), **{**settings, **options})


def say(check: str, ok: bool, **facts: Any) -> bool:
    """One line for a check."""
    print("STEP " + json.dumps({"check": check, "ok": ok, **facts}), flush=True)
    return ok


def no_synchronisation(layers: int) -> bool:
    """Between the first and the last operation of a pass nothing waits for the device."""
    ours = engine(layers)
    for seed in range(2):
        ours.step(batches(3, seed=seed))
    run = Pass.run

    def watched(self: Pass, *args: Any) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(self, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    Pass.run = watched  # type: ignore[method-assign]
    try:
        started = time.perf_counter()
        for seed in range(4):
            ours.step(batches(3, seed=seed))
        ours.drain()
        seconds = (time.perf_counter() - started) / 4
    except RuntimeError as error:
        return say("no synchronisation", False, error=str(error))
    finally:
        Pass.run = run  # type: ignore[method-assign]
        stats = ours.stats()
        ours.close()
    return say(
        "no synchronisation",
        True,
        seconds_a_step=round(seconds, 3),
        tokens_per_s=round(3 * 4096 / seconds),
        lanes=stats.lanes,
        bound=stats.bound,
        peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2),
    )


def digest(ours: megatrain.Engine) -> str:
    """A hash of every weight, both moments and every count."""

    def of(name: str) -> bytes:
        state = ours.optimizer_state(name)
        parts = [ours.weight(name), state["exp_avg"], state["exp_avg_sq"], torch.tensor(state["step"])]
        return b"".join(hashlib.sha256(part.reshape(-1).view(torch.uint8).numpy()).digest() for part in parts)

    with ThreadPoolExecutor(8) as pool:
        return hashlib.sha256(b"".join(pool.map(of, ours.decoder.tensors))).hexdigest()


def plans_agree(layers: int) -> bool:
    """Wherever activations and state lie, the card gives the same bits in deterministic mode: loss, norm, weights, both
    moments and counts."""
    large = {"group": 1, "large_group": 2, "keep": layers - 1, "large_keep": 1, "inputs": "host", "poison": True}
    clipped: dict[str, dict[str, Any]] = {
        "keep": {"activation": "keep"},
        "recompute": {"activation": "recompute", "inputs": "host", "slots": 2, "state_on_device": 0},
        "offload": {"activation": "offload", "inputs": "host", "slots": 2, "group": 1, "poison": True},
        "large group": large,
        "one slot": {"slots": 1, "state_on_device": 0, "group": 1, "poison": True},
        "visit": {"activation": "keep", "slots": 3, "state_on_device": 0, "updates_on_device": layers - 1},
        "visit, poisoned": {"state_on_device": 1, "updates_on_device": layers // 2, "parts": 7, "poison": True},
    }
    unclipped: dict[str, dict[str, Any]] = {
        "keep": {"activation": "keep"},
        "immediate": {"update": "immediate", "slots": 1, "state_on_device": 0},
        "immediate, large group": {"update": "immediate", **large, "state_on_device": 0},
    }
    ok = True
    for norm, plans in ((1.0, clipped), (None, unclipped)):
        found: dict[str, tuple[float, float, str]] = {}
        for name, plan in plans.items():
            update = plan.pop("update", "just_in_time")
            ours = engine(layers, plan=plan, deterministic=True, max_grad_norm=norm, update=update)
            outs = [ours.step(batches(3, seed=seed)) for seed in range(3)]
            found[name] = (outs[-1].loss, outs[-1].grad_norm, digest(ours))
            ours.close()
            torch.cuda.empty_cache()
        ok = say("plans agree", len(set(found.values())) == 1, found=found) and ok
    return ok


def compiled_once(layers: int) -> bool:
    """However many layers, plans and steps: one graph for training."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    ours = engine(layers)
    ours.step(batches(3))
    ours.step(batches(3, seed=1))
    graphs = counters["stats"]["unique_graphs"]
    ours.close()
    return say("compiled once", graphs == 1, graphs=graphs)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    layers = parser.parse_args().layers
    checks = [compiled_once(layers), no_synchronisation(layers), plans_agree(layers)]
    return 0 if all(checks) else 1


if __name__ == "__main__":
    sys.exit(main())
