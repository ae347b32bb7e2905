"""The loss on a GPU: the kernel against its plain PyTorch twin, then its time against its three matmuls alone.

    PYTHONPATH=python python tests/gpu/check_loss.py [--rows 32768] [--sweep]

Prints one JSON line; exit status 1 when the kernel and its twin disagree, with or without weights of rows, or weights
of 1 give other bits than none. `--sweep` also times other chunks, block
sizes and numbers of warps.
"""

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

from megatrain.engine import loss, loss_triton, matmul
from megatrain.engine.loss import chunked_loss, default_chunk
from megatrain.names import IGNORED


def milliseconds(run: Callable[[], Any], repeats: int = 7) -> float:
    """Median time on the device, after two runs that do not count."""
    times = []
    for index in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if index >= 2:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def disagreement(dtype: torch.dtype) -> dict[str, float]:
    """Largest relative differences between kernel and twin over the terms of the loss."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    hidden = torch.randn(300, 128, device="cuda", generator=generator).to(dtype)
    weight = (torch.randn(50001, 128, device="cuda", generator=generator) / 11).to(dtype)
    bias = torch.randn(50001, device="cuda", generator=generator).to(dtype)
    targets = torch.randint(50001, (300,), device="cuda", generator=generator)
    targets[::3] = IGNORED
    row_weights = torch.rand(300, device="cuda", generator=generator) * 3
    worst = {"loss": 0.0, "grad_hidden": 0.0, "grad_weight": 0.0, "grad_bias": 0.0}
    for terms in (
        {},
        {"label_smoothing": 0.1},
        {"z_loss": 1e-2},
        {"softcap": 4.0},
        {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 6.0, "logit_scale": 0.5},
        {"row_weights": row_weights},
        {"row_weights": row_weights, "label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 6.0, "logit_scale": 0.5},
    ):
        results = []
        for kernel in (True, False):
            loss._KERNEL[:] = [kernel]
            sums = torch.zeros_like(weight, dtype=torch.float32), torch.zeros_like(bias, dtype=torch.float32)
            out = chunked_loss(
                hidden, targets, weight, bias, scale=1e-3, chunk=128, grad_weight=sums[0], grad_bias=sums[1], **terms
            )
            assert out.grad_hidden is not None
            results.append((out.loss_sum, out.grad_hidden, *sums))
        loss._KERNEL.clear()
        for name, ours, twin in zip(worst, *results, strict=True):
            difference = (ours.double() - twin.double()).norm() / twin.double().norm()
            worst[name] = max(worst[name], float(difference))
    return worst


def weights_of_one() -> bool:
    """Whether the kernel gives the bits of no weights where every row weighs 1."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    hidden = torch.randn(64, 128, device="cuda", generator=generator).bfloat16()
    weight = (torch.randn(9001, 128, device="cuda", generator=generator) / 11).bfloat16()
    targets = torch.randint(9001, (64,), device="cuda", generator=generator)
    plain, ones = (
        chunked_loss(hidden, targets, weight, scale=1e-3, row_weights=factors)
        for factors in (None, torch.ones(64, device="cuda"))
    )
    assert plain.grad_hidden is not None
    assert ones.grad_hidden is not None
    return torch.equal(plain.loss_sum, ones.loss_sum) and torch.equal(plain.grad_hidden, ones.grad_hidden)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32768)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    bf16, fp32 = disagreement(torch.bfloat16), disagreement(torch.float32)
    rows, vocab, width = options.rows, options.vocab, options.hidden
    hidden = torch.randn(rows, width, device="cuda").bfloat16()
    weight = (torch.randn(vocab, width, device="cuda") / width**0.5).bfloat16()
    targets = torch.randint(vocab, (rows,), device="cuda")
    grad_weight = torch.zeros(vocab, width, device="cuda")
    grad_hidden = torch.empty_like(hidden)

    def ours(chunk: int | None = None) -> None:
        chunked_loss(hidden, targets, weight, scale=1e-5, chunk=chunk, grad_weight=grad_weight, grad_hidden=grad_hidden)

    chunk = default_chunk(vocab, "cuda")

    def matmuls_alone() -> float:
        logits = torch.empty(chunk, vocab, device="cuda", dtype=torch.bfloat16)
        product = torch.empty_like(weight)

        def run() -> None:
            for start in range(0, rows, chunk):
                part = hidden[start : start + chunk]
                torch.mm(part, weight.t(), out=logits[: len(part)])
                torch.mm(logits[: len(part)], weight, out=grad_hidden[start : start + chunk])
                torch.mm(logits[: len(part)].t(), part, out=product)

        return milliseconds(run)

    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rows": rows,
        "chunk": chunk,
        "mixed_matmul": matmul.mixed_matmul(hidden.device),
        "bf16": bf16,
        "fp32": fp32,
        "weights_of_one": weights_of_one(),
        "matmuls_ms": matmuls_alone(),
    }
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result["loss_ms"] = milliseconds(ours)
    result["peak_extra_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    if options.sweep:
        result["chunks"] = {
            size: milliseconds(functools.partial(ours, size)) for size in (512, 896, 1792, 2048, 3584, 4096)
        }
        logits32 = torch.randn(chunk, vocab, device="cuda")
        terms = loss._Terms(1e-5, 0.0, 0.0, 1.0, None)
        result["kernel"] = {}
        for block in (1024, 2048, 4096, 8192, 16384):
            for warps in (4, 8, 16, 32):
                loss_triton._BLOCK, loss_triton._NUM_WARPS = block, warps
                time = milliseconds(
                    lambda: loss_triton.cross_entropy(logits32, targets[:chunk], None, terms, IGNORED, torch.bfloat16)
                )
                result["kernel"][f"{block}/{warps}"] = round(time * rows / chunk, 2)
        pieces = {}
        part, dlogits = hidden[:chunk], logits32.view(torch.bfloat16)[:, :vocab]
        dense = dlogits.contiguous()
        per_step = rows / chunk
        pieces["logits fp32"] = milliseconds(lambda: loss._matmul_logits(part, weight, logits32)) * per_step
        pieces["logits bf16"] = milliseconds(lambda: torch.mm(part, weight.t(), out=dense)) * per_step
        pieces["grad_hidden strided"] = (
            milliseconds(lambda: torch.mm(dlogits, weight, out=grad_hidden[:chunk])) * per_step
        )
        pieces["grad_hidden dense"] = milliseconds(lambda: torch.mm(dense, weight, out=grad_hidden[:chunk])) * per_step
        pieces["grad_weight add fp32 strided"] = (
            milliseconds(lambda: matmul.add_matmul(grad_weight, dlogits, part)) * per_step
        )
        pieces["grad_weight add fp32 dense"] = (
            milliseconds(lambda: matmul.add_matmul(grad_weight, dense, part)) * per_step
        )
        out32 = torch.empty_like(grad_weight)
        pieces["grad_weight fp32 no add"] = (
            milliseconds(lambda: torch.mm(dense.t(), part, out_dtype=torch.float32, out=out32)) * per_step
        )
        result["pieces"] = pieces
    agree = max(bf16.values()) < 5e-3 and max(fp32.values()) < 1e-5 and max(bf16["loss"], fp32["loss"]) < 1e-6
    agree = agree and result["weights_of_one"]
    result["agree"] = agree
    print(json.dumps(result))
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
