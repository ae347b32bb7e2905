"""Layers replayed as CUDA graphs: the same bits as without, and what a step takes.

Run: python tests/gpu/check_graphs.py [--layers 6]. Each case trains eight steps with graphs and without, in
deterministic mode, and compares losses, norms, weights and moments bit for bit; the speed of a launch-bound model
follows. Prints one JSON line a check; exits 1 on a miss.
"""

import argparse
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

sys.path.insert(0, str(Path(__file__).parent))

from check_step import digest

import megatrain

STEPS = 8
ROWS, SEQ, VOCAB = 4, 256, 4096


def build(layers: int, width: int = 512, vocab: int = VOCAB) -> torch.nn.Module:
    """A Qwen2 decoder, the same for the same arguments."""
    config = Qwen2Config(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=width * 4,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        vocab_size=vocab,
        tie_word_embeddings=True,
        use_cache=False,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


def batches(count: int, seed: int, *, packed: bool = False, seq: int = SEQ) -> list[dict[str, Any]]:
    """Micro-batches of uniform tokens, some without a label; packed ones hold documents of random lengths."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        ids = torch.randint(0, VOCAB, (ROWS, seq), generator=generator)
        labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -100)
        batch: dict[str, Any] = {"input_ids": ids, "labels": labels}
        if packed:
            begins = torch.rand(ids.shape, generator=generator) < 0.03
            begins[:, 0] = True
            at = torch.arange(seq).expand(ROWS, seq)
            batch["position_ids"] = at - torch.where(begins, at, 0).cummax(1).values
        made.append(batch)
    return made


def engine(model: torch.nn.Module, count: int, *, graphs: bool, **options: Any) -> megatrain.Engine:
    """Ours on the card."""
    plan = {**options.pop("plan", {}), "graphs": graphs}
    return megatrain.Engine(
        model,
        optimizer=megatrain.AdamW(lr=1e-4),
        **{"device": "cuda", "micro_batch": (ROWS, SEQ), "micro_batches": count, "max_grad_norm": 1.0, **options},
        plan=plan,
    )


def captured(ours: megatrain.Engine) -> int:
    """Passes that were captured; -1 where it has failed, or the plan has no graphs."""
    graphs = ours._runtime.templates.graphs
    return -1 if graphs is None or graphs._failed else len(graphs._captured)


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    # micro-batches, options
    "one micro-batch": (1, {}),
    "three micro-batches": (3, {}),
    "recomputed": (3, {"plan": {"activation": "recompute"}}),
    "one in a group": (3, {"plan": {"group": 1}}),
    "some layers resident": (2, {"plan": {"state_on_device": 5}}),
    "halves": (2, {"plan": {"fragments": "halves"}}),
    "halves, recomputed, one in a group": (3, {"plan": {"fragments": "halves", "activation": "recompute", "group": 1}}),
    "halves, some of them resident": (2, {"plan": {"fragments": "halves", "state_on_device": 8}}),
    # the attention halves are captured, the tiled ones are not
    "tiles": (2, {"plan": {"mlp_tiles": 3}}),
    "immediate": (2, {"update": "immediate", "max_grad_norm": None}),
    "packed": (2, {"packed": True}),
    "not compiled": (2, {"plan": {"compile": False}}),
    "packed, not compiled": (2, {"plan": {"compile": False}, "packed": True}),
    # not compiled: which kernels a compiler takes for rows of one length depends on the lengths it has seen before
    "shorter rows between": (2, {"plan": {"compile": False}, "shorter": True}),
}


def same_bits(name: str, layers: int) -> bool:
    """Eight steps with graphs and without."""
    count, given = CASES[name]
    found = {}
    facts: dict[str, Any] = {}
    for graphs in (False, True):
        options = {k: dict(v) if isinstance(v, dict) else v for k, v in given.items()}
        packed, shorter = options.pop("packed", False), options.pop("shorter", False)
        ours = engine(build(layers), count, graphs=graphs, deterministic=True, **options)
        outs = []
        for step in range(STEPS):
            seq = SEQ // 2 if shorter and step == 5 else SEQ
            outs.append(ours.step(batches(count, step, packed=packed, seq=seq)))
        ours.drain()
        found[graphs] = [(out.loss, out.grad_norm) for out in outs], digest(ours)
        if graphs:
            facts = {
                "captured": captured(ours),
                "units": len(ours.plan["units"]),
                "losses": [round(out.loss, 4) for out in outs[::7]],
            }
        ours.close()
        torch.cuda.empty_cache()
    different = [s for s, (a, b) in enumerate(zip(found[False][0], found[True][0], strict=True)) if a != b]
    ok = found[False] == found[True] and facts["captured"] > 0
    return say(name, ok, first_different=different[:1], weights_equal=found[False][1] == found[True][1], **facts)


def speed(layers: int, width: int, rows: int, seq: int) -> bool:
    """Seconds a step of a small model, with graphs and without."""
    facts: dict[str, Any] = {}
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (rows, seq), generator=generator)
    for graphs in (False, True):
        ours = engine(build(layers, width), 1, graphs=graphs, micro_batch=(rows, seq))
        for _ in range(5):
            ours.step([{"input_ids": ids, "labels": ids}])
        ours.drain()
        started = time.perf_counter()
        for _ in range(20):
            ours.step([{"input_ids": ids, "labels": ids}])
        ours.drain()
        facts["with_ms" if graphs else "without_ms"] = round((time.perf_counter() - started) * 50, 2)
        if graphs:
            facts["captured"] = captured(ours)
            facts["gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
        ours.close()
        torch.cuda.empty_cache()
    return say(f"{layers} layers {width} wide, {rows} x {seq}", facts["captured"] > 0, **facts)


def say(check: str, ok: bool, **facts: Any) -> bool:
    """One line for a check."""
    print("GRAPHS " + json.dumps({"check": check, "ok": ok, **facts}), flush=True)
    return ok


def main() -> int:
    """0 when nothing differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    layers = parser.parse_args().layers
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    checks = []
    for name in CASES:
        try:
            checks.append(same_bits(name, layers))
        except Exception as error:  # the other cases are still of use
            checks.append(say(name, False, error=f"{type(error).__name__}: {error}"[:500]))
    checks += [speed(5, 256, 8, 128), speed(24, 896, 2, 1024)]
    return 0 if all(checks) else 1


if __name__ == "__main__":
    sys.exit(main())
