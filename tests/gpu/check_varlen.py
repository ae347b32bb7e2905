"""Attention over packed rows on a CUDA card: what each way of keeping documents apart costs, and how exact it is.

Run: python tests/gpu/check_varlen.py --candidates. Prints one JSON line a fact; exits 1 on a miss.

Times are of one layer's attention, forward and backward, over 8 windows of 4,096 tokens with 16 query and 2 key heads
of 128, as ratios to causal attention over whole windows and to attention with a dense mask.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

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


def flat(x: Tensor) -> Tensor:
    """(batch, heads, seq, width) as (batch * seq, heads, width)."""
    return x.transpose(1, 2).flatten(0, 1)


class Flash(torch.autograd.Function):
    """The flash kernels over documents of any length."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, window: int | None) -> Tensor:
        sides = {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, cu, cu, longest, longest, 0.0, window is None, False, **sides
        )
        ctx.save_for_backward(q, k, v, cu, out, lse)
        ctx.rest = (longest, window, sides)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, cu, out, lse = ctx.saved_tensors
        longest, window, sides = ctx.rest
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        grads = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse, cu, cu, longest, longest, 0.0, window is None, state, state.new_empty(0), **sides
        )
        return (*grads, None, None, None)


def flash(rows: list[list[int]], window: int | None = None, deterministic: bool = False) -> Attention:
    """(a) One launch of the flash kernels for all documents."""
    cu, longest = starts(rows).cuda(), max(max(r) for r in rows)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = Flash.apply(flat(q), flat(k), flat(v), cu, longest, window)
        return out.unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2)

    run.deterministic = deterministic  # type: ignore[attr-defined]
    return run


def buckets(rows: list[list[int]], step: int = 256) -> Attention:
    """(b) Documents of about one length together, padded to a multiple of `step`, by cuDNN."""
    begin = starts(rows)[:-1].tolist()
    groups: dict[int, list[tuple[int, int]]] = {}
    for at, length in zip(begin, (n for row in rows for n in row), strict=True):
        groups.setdefault(-(-length // step) * step, []).append((at, length))
    gather, scatter = {}, {}
    for size, members in groups.items():
        places = torch.full((len(members), size), -1, dtype=torch.int64)
        for i, (at, length) in enumerate(members):
            places[i, :length] = torch.arange(at, at + length)
        real = places >= 0
        gather[size] = places.clamp_min(0).cuda()
        scatter[size] = (places[real].cuda(), real.flatten().nonzero().flatten().cuda())

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = flat(q), flat(k), flat(v)
        out = torch.empty_like(q)
        for size, places in gather.items():
            parts = [x[places].transpose(1, 2) for x in (q, k, v)]
            made = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
            to, of = scatter[size]
            out = out.index_copy(0, to, flat(made)[of])
        return out.unflatten(0, (len(rows), -1)).transpose(1, 2)

    run.launches = len(groups)  # type: ignore[attr-defined]
    return run


@functools.cache
def _flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex(rows: list[list[int]], window: int | None = None) -> Attention:
    """(d) flex_attention with a block mask of documents."""
    from torch.nn.attention.flex_attention import create_block_mask

    of = ids(rows).cuda()

    def seen(b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        near = i - j < window if window is not None else i >= j
        return (i >= j) & near & (of[b, i] == of[b, j])

    blocks = create_block_mask(seen, len(rows), None, of.shape[1], of.shape[1], device="cuda", _compile=True)
    return lambda q, k, v: _flex()(q, k, v, block_mask=blocks, enable_gqa=True)


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


def timed(run: Attention, rounds: int = 9) -> dict[str, float]:
    """Milliseconds of forward, and of forward and backward; seconds of the first call."""
    q, k, v, grad = inputs()
    begun = time.perf_counter()
    torch.autograd.grad(run(q, k, v), (q, k, v), grad)
    torch.cuda.synchronize()
    first = time.perf_counter() - begun
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
    return {name: round(statistics.median(times), 3) for name, times in found.items()} | {"first_s": round(first, 2)}


def errors(run: Attention, rows: list[list[int]], window: int | None) -> list[float]:
    """‖a−b‖/‖b‖ of output and gradients of q, k, v against fp64, a document at a time."""
    q, k, v, grad = inputs(1)
    out = run(q, k, v)
    found = [out, *torch.autograd.grad(out, (q, k, v), grad)]
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    repeated = [wide[0], *(x.repeat_interleave(HEADS // KV_HEADS, 1) for x in wide[1:])]
    outs = []
    for row, lengths in enumerate(rows):
        parts = []
        for at, length in zip(itertools.accumulate([0, *lengths[:-1]]), lengths, strict=True):
            i = torch.arange(length, device="cuda")
            seen = (i[:, None] >= i) & (i[:, None] - i < (window or length))
            a, b, c = (x[row, :, at : at + length] for x in repeated)
            scores = (a @ b.transpose(1, 2) / WIDTH**0.5).masked_fill(~seen, float("-inf"))
            parts.append(scores.softmax(-1) @ c)
        outs.append(torch.cat(parts, 1))
    reference = torch.stack(outs)
    wanted = [reference, *torch.autograd.grad(reference, wide, grad.double())]
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]


def candidates() -> bool:
    """Times and errors of every way, for packed windows of four kinds and for a sliding window."""
    ok = True
    base = timed(causal)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        base_flash = timed(causal)
    say("causal", True, default=base, flash=base_flash)
    for kind, window in (("one", None), ("long", None), ("mixed", None), ("short", None), ("mixed", 1024)):
        rows = packed(kind)
        ways: dict[str, Callable[[], Attention]] = {
            "mask": lambda rows=rows, window=window: masked(rows, window),
            "flash": lambda rows=rows, window=window: flash(rows, window),
            "flash deterministic": lambda rows=rows, window=window: flash(rows, window, deterministic=True),
            "flex": lambda rows=rows, window=window: flex(rows, window),
        }
        if window is None:
            ways["buckets"] = lambda rows=rows: buckets(rows)
        mask_ms = None
        for name, make in ways.items():
            facts: dict[str, Any] = {"way": name, "packed": kind, "window": window}
            facts |= {"documents": sum(map(len, rows)), "longest": max(map(max, rows))}
            try:
                torch.use_deterministic_algorithms(name == "flash deterministic")
                run = make()
                facts |= timed(run)
                facts["of_causal"] = round(facts["both_ms"] / base["both_ms"], 2)
                mask_ms = facts["both_ms"] if name == "mask" else mask_ms
                facts["of_mask"] = round(facts["both_ms"] / mask_ms, 2) if mask_ms else None
                if kind == "mixed":
                    facts["errors"] = [round(e, 5) for e in errors(run, rows, window)]
                    facts["exact"] = max(facts["errors"]) < 0.02
                ok &= say("candidate", facts.get("exact", True), **facts)
            except Exception as error:  # one way that fails must not hide the others
                ok &= say("candidate", False, **facts, error=f"{type(error).__name__}: {str(error)[:300]}")
            finally:
                torch.use_deterministic_algorithms(False)
            torch.cuda.empty_cache()
    return ok


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--candidates", action="store_true", help="time every way of keeping documents apart")
    parser.parse_args()
    say(
        "versions",
        True,
        torch=torch.__version__,
        cudnn=torch.backends.cudnn.version(),
        card=torch.cuda.get_device_name(),
    )
    return 0 if candidates() else 1


if __name__ == "__main__":
    sys.exit(main())
