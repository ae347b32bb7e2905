"""Attention over packed rows on a CUDA card: what it costs to keep documents apart, and how exact it is.

Run: python tests/gpu/check_varlen.py [cost] [graphs] [numbers] [speed]; the first three where none is named. Prints one
JSON line a fact; exits 1 on a miss.

- cost: one layer's attention, forward and backward, over 8 windows of 4,096 tokens with 16 query and 2 key heads of
  128, as a ratio to causal attention over whole windows and to attention with a dense mask.
- numbers: our engine on packed rows against fp32 PyTorch on the same documents in rows of their own; same bits twice.
- graphs: one compiled graph and no synchronisation over steps with different numbers of documents.
- speed: steps on packed rows, by document and with dense masks, against steps on whole rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import megatrain
from megatrain.engine.step import Pass
from megatrain.models import inspect_model, packing, varlen_attention

WINDOWS, SEQ, HEADS, KV_HEADS, WIDTH = 8, 4096, 16, 2, 128
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def say(check: str, ok: bool, **facts: Any) -> bool:
    """One line for a check."""
    print("VARLEN " + json.dumps({"check": check, "ok": ok, **facts}), flush=True)
    return ok


def packed(kind: str, windows: int = WINDOWS, seq: int = SEQ, seed: int = 0) -> list[list[int]]:
    """Lengths of the documents of each window."""
    generator = torch.Generator().manual_seed(seed)
    low, high = {"short": (32, 400), "mixed": (64, 2048), "long": (2500, 4096), "one": (seq, seq)}[kind]
    rows = []
    for _ in range(windows):
        row: list[int] = []
        while sum(row) < seq:
            drawn = torch.rand((), generator=generator)
            length = round(low * (high / low) ** float(drawn))
            row.append(min(length, seq - sum(row)))
        rows.append(row)
    return rows


def inputs(seed: int = 0, windows: int = WINDOWS, seq: int = SEQ) -> list[Tensor]:
    """Queries, keys, values and the gradient of the output: (batch, heads, seq, width) over memory in the order of
    (batch, seq, heads, width), as projections leave them."""
    generator = torch.Generator("cuda").manual_seed(seed)
    made = [
        torch.randn(windows, seq, heads, WIDTH, device="cuda", generator=generator).bfloat16().transpose(1, 2)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    return [t.requires_grad_() for t in made[:3]] + made[3:]


def starts(rows: list[list[int]]) -> Tensor:
    """Where each document begins in the flattened windows, and where the last one ends."""
    return torch.tensor([0, *itertools.accumulate(n for row in rows for n in row)], dtype=torch.int32)


def ids(rows: list[list[int]]) -> Tensor:
    """Of each token, the number of its document in its window."""
    return torch.stack([torch.repeat_interleave(torch.arange(len(r)), torch.tensor(r)) for r in rows])


def dense(rows: list[list[int]], window: int | None) -> Tensor:
    """True where a query sees a key: (batch, 1, seq, seq)."""
    of = ids(rows).cuda()
    at = torch.arange(of.shape[1], device="cuda")
    seen = (of[:, :, None] == of[:, None, :]) & (at[:, None] >= at[None, :])
    if window is not None:
        seen &= at[:, None] - at[None, :] < window
    return seen[:, None]


def ours(rows: list[list[int]], window: int | None = None) -> Attention:
    """As our layers compute it: one launch for all documents."""
    lengths = torch.tensor([n for row in rows for n in row])
    given = varlen_attention.Documents(starts(rows).cuda(), lengths, window)
    return lambda q, k, v: varlen_attention.attend(None, q, k, v, given)[0].transpose(1, 2)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Whole windows, as if each were one document."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def masked(rows: list[list[int]], window: int | None = None) -> Attention:
    """A dense mask, as transformers hands it over: keys and values repeated for every query head."""
    mask = dense(rows, window)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return run


def timed(run: Attention, rounds: int = 5) -> dict[str, float]:
    """Milliseconds of forward, and of forward and backward."""
    q, k, v, grad = inputs()
    for _ in range(2):
        torch.autograd.grad(run(q, k, v), (q, k, v), grad)
    found: dict[str, list[float]] = {"forward_ms": [], "both_ms": []}
    for _ in range(rounds):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        marks[0].record()
        out = run(q, k, v)
        marks[1].record()
        torch.autograd.grad(out, (q, k, v), grad)
        marks[2].record()
        torch.cuda.synchronize()
        found["forward_ms"].append(marks[0].elapsed_time(marks[1]))
        found["both_ms"].append(marks[0].elapsed_time(marks[2]))
    return {name: round(statistics.median(times), 3) for name, times in found.items()}


def errors(run: Attention, rows: list[list[int]], window: int | None) -> list[float]:
    """‖a−b‖/‖b‖ of output and gradients of q, k, v against fp32 with a dense mask."""
    windows, seq = len(rows), sum(rows[0])
    q, k, v, grad = inputs(1, windows, seq)
    out = run(q, k, v)
    found = [out, *torch.autograd.grad(out, (q, k, v), grad)]
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    repeated = [wide[0], *(x.repeat_interleave(HEADS // KV_HEADS, 1) for x in wide[1:])]
    scores = (repeated[0] @ repeated[1].transpose(2, 3)) / WIDTH**0.5
    reference = scores.masked_fill(~dense(rows, window), -torch.inf).softmax(-1) @ repeated[2]
    wanted = [reference, *torch.autograd.grad(reference, wide, grad.float())]
    return [
        float((a.detach().float() - b.detach()).norm() / b.detach().norm()) for a, b in zip(found, wanted, strict=True)
    ]


def cost() -> bool:
    """Times of attention over documents, and its errors beside those of a dense mask."""
    ok = True
    base = timed(causal)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        say("cost of whole rows", True, default=base, flash=timed(causal))
    for kind, window in (("one", None), ("long", None), ("mixed", None), ("short", None), ("mixed", 256)):
        rows = packed(kind)
        mask, by_document = timed(masked(rows, window)), timed(ours(rows, window))
        torch.use_deterministic_algorithms(True)
        repeatable = timed(ours(rows, window))
        torch.use_deterministic_algorithms(False)
        few = packed(kind, 2, 1024) if kind != "one" else [[1024]] * 2
        found, allowed = errors(ours(few, window), few, window), errors(masked(few, window), few, window)
        exact = all(a < 1.5 * b + 1e-4 for a, b in zip(found, allowed, strict=True))
        ok &= say(
            "cost",
            exact,
            packed=kind,
            window=window,
            documents=sum(map(len, rows)),
            longest=max(map(max, rows)),
            mask=mask,
            by_document=by_document,
            deterministic=repeatable,
            of_causal=round(by_document["both_ms"] / base["both_ms"], 2),
            of_mask=round(by_document["both_ms"] / mask["both_ms"], 2),
            mask_of_causal=round(mask["both_ms"] / base["both_ms"], 2),
            errors=[round(e, 5) for e in found],
            errors_of_mask=[round(e, 5) for e in allowed],
        )
        torch.cuda.empty_cache()
    return ok


ROWS = [[[300, 212], [500, 12]], [[100, 5, 1, 406], [128, 384]], [[256, 256], [77, 300, 135]]]
"""Three micro-batches of packed rows of 512 tokens."""


def small(kind: str) -> torch.nn.Module:
    """Three layers, the weights exact in bf16; `mistral` with a window."""
    from transformers import AutoConfig, AutoModelForCausalLM

    window = {"sliding_window": 96} if kind == "mistral" else {}
    config = AutoConfig.for_model(
        kind,
        hidden_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=1024,
        vocab_size=4096,
        use_cache=False,
        **window,
    )
    torch.manual_seed(0)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model


def batch_of(rows: list[list[int]], seed: int, vocab: int = 4096) -> dict[str, Tensor]:
    """Random tokens in packed rows; no token supervises the next document's first."""
    tokens = torch.randint(0, vocab, (len(rows), sum(rows[0])), generator=torch.Generator().manual_seed(seed))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    return {"input_ids": tokens, "labels": tokens.masked_fill(positions == 0, -100), "position_ids": positions}


def alone(batch: dict[str, Tensor], rows: list[list[int]]) -> list[dict[str, Tensor]]:
    """Each document of a batch in a row of its own."""
    return [
        {name: batch[name][row : row + 1, at : at + n] for name in ("input_ids", "labels")}
        for row, lengths in enumerate(rows)
        for at, n in zip(itertools.accumulate([0, *lengths[:-1]]), lengths, strict=True)
    ]


def numbers(kind: str) -> bool:
    """Loss and gradients of one step on packed rows, on the same documents apart, and of fp32 PyTorch."""
    batches = [batch_of(rows, seed) for seed, rows in enumerate(ROWS)]
    document_buckets = [piece for batch, rows in zip(batches, ROWS, strict=True) for piece in alone(batch, rows)]
    document_buckets = [piece for piece in document_buckets if piece["input_ids"].shape[1] > 1]
    reference = small(kind).float().cuda()
    tokens = sum(int((piece["labels"][:, 1:] != -100).sum()) for piece in document_buckets)
    loss = 0.0
    for piece in document_buckets:
        logits = reference(input_ids=piece["input_ids"].cuda()).logits[:, :-1]
        part = F.cross_entropy(logits.flatten(0, 1), piece["labels"][:, 1:].flatten().cuda(), reduction="sum") / tokens
        part.backward()
        loss += float(part.detach())
    wanted = {name: p.grad.cpu() for name, p in reference.named_parameters() if p.grad is not None}
    total = sum(float(g.double().square().sum()) for g in wanted.values()) ** 0.5
    found: dict[str, Any] = {}
    losses: dict[str, tuple[float, float]] = {}
    plain: dict[str, Any] = {"plan": {"compile": False}}  # what is compiled, `graphs` runs
    ways: dict[str, tuple[list[dict[str, Tensor]], dict[str, Any]]] = {
        "packed": (batches, {} if kind == "mistral" else plain),
        "apart": (document_buckets, plain),
        "deterministic": (batches, plain | {"deterministic": True}),
        "again": (batches, plain | {"deterministic": True}),
    }
    for name, (step, options) in ways.items():
        rows, seq = step[0]["input_ids"].shape if name != "apart" else (1, 512)
        engine = megatrain.Engine(
            small(kind),
            optimizer=megatrain.AdamW(lr=1e-4),
            device="cuda",
            grad_precision="fp32",
            micro_batch=(rows, seq),
            micro_batches=len(step),
            **options,
        )
        packing = engine.decoder.packed_rows("cuda")
        out = engine.step(step)
        off = sum(float((engine.gradient(n).double() - g.double()).square().sum()) for n, g in wanted.items()) ** 0.5
        found[name] = {"loss": abs(out.loss - loss) / loss, "gradients": off / total, "packing": packing}
        losses[name] = (out.loss, out.grad_norm)
        engine.close()
    as_exact = found["packed"]["gradients"] < 1.25 * found["apart"]["gradients"] + 1e-3
    same = losses["deterministic"] == losses["again"]
    ok = as_exact and same and found["packed"]["packing"] == "variable length"
    return say(f"numbers of {kind}", ok, errors=found, same_bits=same)


def steps_of(kind: str, seed: int, vocab: int = 151936) -> list[dict[str, Tensor]]:
    """Two micro-batches of 4 windows of 2,048 tokens."""
    if kind == "whole":
        tokens = [torch.randint(0, vocab, (4, 2048), generator=torch.Generator().manual_seed(seed)) for _ in range(2)]
        return [{"input_ids": ids, "labels": ids} for ids in tokens]
    return [batch_of(packed(kind, 4, 2048, seed * 2 + i), seed * 2 + i, vocab) for i in range(2)]


def wide(layers: int = 4) -> megatrain.Engine:
    """Ours on a Qwen2 decoder 2,048 wide."""
    from check_step import build

    model = build(layers).cpu()
    torch.cuda.empty_cache()
    return megatrain.Engine(
        model, optimizer=megatrain.AdamW(lr=1e-4), device="cuda", micro_batch=(4, 2048), micro_batches=2
    )


def graphs(layers: int = 4) -> bool:
    """One graph for whatever number of documents, and nothing waits inside a pass."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    engine = wide(layers)
    run = Pass.run

    def watched(self: Pass, *args: Any) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(self, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    failure, counts = None, []
    try:
        for seed, kind in enumerate(("mixed", "short", "mixed", "short", "mixed")):
            Pass.run = watched if seed else run  # type: ignore[method-assign]
            engine.step(steps_of(kind, seed))
            counts.append(counters["stats"]["unique_graphs"])
        engine.drain()
    except RuntimeError as error:
        failure = str(error)[:400]
    finally:
        Pass.run = run  # type: ignore[method-assign]
        engine.close()
    return say("graphs", failure is None and counts[-1:] == [1], graphs=counts, error=failure)


def speed(layers: int = 4) -> bool:
    """Seconds a step, on whole rows, by document, and with the dense masks that transformers builds."""
    use = inspect_model.use_varlen_attention
    found: dict[str, float] = {}
    try:
        for name, kind in (("whole", "whole"), ("by document", "mixed"), ("dense mask", "mixed")):
            if name == "dense mask":
                inspect_model.use_varlen_attention = lambda *_: packing.Packing(refusal="to compare")
            engine = wide(layers)
            for seed in range(3):
                engine.step(steps_of(kind, seed))
            engine.drain()
            data = [steps_of(kind, seed) for seed in range(10, 14)]
            started = time.perf_counter()
            for step in data:
                engine.step(step)
            engine.drain()
            found[name] = round((time.perf_counter() - started) / len(data), 4)
            engine.close()
            torch.cuda.empty_cache()
    finally:
        inspect_model.use_varlen_attention = use
    return say("speed", found["by document"] < found["dense mask"], seconds_a_step=found)


CHECKS: dict[str, Callable[[], bool]] = {
    "cost": cost,
    "graphs": graphs,
    "numbers": lambda: all([numbers("qwen2"), numbers("mistral")]),
    "speed": speed,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checks", nargs="*", choices=[[], *CHECKS])
    asked = parser.parse_args().checks or ["cost", "graphs", "numbers"]
    say(
        "versions",
        True,
        torch=torch.__version__,
        cudnn=torch.backends.cudnn.version(),
        card=torch.cuda.get_device_name(),
    )
    results = []
    for name in asked:
        started = time.perf_counter()
        try:
            results.append(CHECKS[name]())
        except Exception as error:  # one check that fails must not hide the others
            results.append(say(name, False, error=traceback.format_exc()[-1500:], what=str(error)[:300]))
        say(f"time of {name}", True, seconds=round(time.perf_counter() - started, 1))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
