"""Streamed training beside the same model resident in HBM, on one CUDA card: loss curves and norms must agree.

Run: python tests/gpu/train_parity.py [--shape 1.5b] [--steps 20]. Prints one JSON line a comparison; exits 1 on a miss.
Both start from the same bf16 weights, read the same tokens, and keep fp32 masters and moments. The resident run is
stock transformers, torch.optim.AdamW on fp32 masters and clip_grad_norm_. With `--floor` it is also compared with
itself, the same rows in twice as many micro-batches, which plain arithmetic would not tell apart and bf16 does: two
runs cannot be expected to agree better than that.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

import megatrain

SHAPES = {
    # layers, hidden, intermediate, heads, key-value heads, vocabulary
    "tiny": (4, 256, 704, 4, 2, 1024),
    "1.5b": (28, 1536, 8960, 12, 2, 151936),
}


def build(shape: str, tied: bool) -> torch.nn.Module:
    """A randomly initialised model in bf16 on the card, the same for the same arguments."""
    layers, hidden, intermediate, heads, kv_heads, vocab = SHAPES[shape]
    config = Qwen2Config(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


def batches(shape: str, steps: int, micro_batches: int, rows: int, seq: int) -> list[list[dict[str, torch.Tensor]]]:
    """Zipf-distributed tokens: a distribution that 20 steps visibly learn. Rows differ in supervised tokens."""
    vocab = SHAPES[shape][5]
    generator = torch.Generator().manual_seed(1)
    weights = 1.0 / torch.arange(1, min(vocab, 20000) + 1, dtype=torch.float64)
    out = []
    for step in range(steps):
        micro = []
        for index in range(micro_batches):
            ids = torch.multinomial(weights, rows * seq, replacement=True, generator=generator).view(rows, seq)
            labels = ids.clone()
            labels[:, : (step * 7 + index * 13) % (seq // 2)] = -100
            micro.append({"input_ids": ids, "labels": labels})
        out.append(micro)
    return out


def resident(
    model: torch.nn.Module, data: list[list[dict[str, torch.Tensor]]], lr: float, max_norm: float | None
) -> dict[str, Any]:
    """Everything in HBM: fp32 masters, fp32 gradient sums, torch AdamW."""
    parameters = list(model.parameters())
    masters = [p.detach().float().clone() for p in parameters]
    optimizer = torch.optim.AdamW(masters, lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    losses, norms = [], []
    for micro in data:
        supervised = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in micro)
        sums = [torch.zeros_like(m) for m in masters]
        total = 0.0
        for batch in micro:
            ids, labels = batch["input_ids"].cuda(), batch["labels"].cuda()
            logits = model(input_ids=ids).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
            )
            (loss / supervised).backward()
            total += float(loss.detach())
            for s, p in zip(sums, parameters, strict=True):
                s.add_(p.grad)
                p.grad = None
        for m, s in zip(masters, sums, strict=True):
            m.grad = s.bfloat16().float()
        norm = torch.nn.utils.get_total_norm([m.grad for m in masters])
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(masters, max_norm, norm)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        losses.append(total / supervised)
        norms.append(float(norm))
    return {"losses": losses, "norms": norms}


def streamed(
    model: torch.nn.Module,
    data: list[list[dict[str, torch.Tensor]]],
    lr: float,
    max_norm: float | None,
    plan: dict[str, Any],
    update: str,
) -> dict[str, Any]:
    """The same through the engine."""
    started = time.perf_counter()
    engine = megatrain.Engine(
        model,
        optimizer=megatrain.AdamW(lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1),
        max_grad_norm=max_norm,
        precision="bf16",
        device="cuda",
        plan=plan,
        update=update,
    )
    set_up = time.perf_counter() - started
    losses, norms = [], []
    for micro in data:
        out = engine.step(micro)
        losses.append(float(out.loss))
        norms.append(float(out.grad_norm))
    engine.close()
    return {"losses": losses, "norms": norms, "set_up_s": round(set_up, 1)}


def halved(micro: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """The rows of each micro-batch in two."""
    return [
        {name: value[half] for name, value in batch.items()}
        for batch in micro
        for half in (slice(None, len(batch["input_ids"]) // 2), slice(len(batch["input_ids"]) // 2, None))
    ]


def largest_gap(one: list[float], other: list[float]) -> float:
    """Of two curves."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="1.5b", choices=SHAPES)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--untied", action="store_true")
    parser.add_argument("--only", default="", help="comma-separated names of cases")
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--floor", action="store_true", help="also the resident run beside itself, its rows split")
    arguments = parser.parse_args()
    lr = arguments.lr
    layers = SHAPES[arguments.shape][0]
    tied = not arguments.untied
    cases: dict[str, tuple[int, float | None, dict[str, Any], str]] = {
        # name: micro-batches, clipping, plan, update
        "smallest_slots_clipped": (2, 1.0, {"slots": 2, "keep": 0, "state_on_device": 0}, "just_in_time"),
        "largest_slots_clipped": (2, 1.0, {"slots": layers, "state_on_device": 0}, "just_in_time"),
        "automatic_clipped": (2, 1.0, {}, "just_in_time"),
        "smallest_slots_immediate": (1, None, {"slots": 2, "state_on_device": 0}, "immediate"),
        "largest_slots_immediate": (1, None, {"slots": layers, "state_on_device": 0}, "immediate"),
    }
    missed = False
    references: dict[tuple[int, float | None], dict[str, Any]] = {}
    wanted = [name for name in cases if not arguments.only or name in arguments.only.split(",")]
    for name in wanted:
        micro_batches, max_norm, plan, update = cases[name]
        data = batches(arguments.shape, arguments.steps, micro_batches, arguments.rows, arguments.seq)
        key = (micro_batches, max_norm)
        if key not in references:
            model = build(arguments.shape, tied)
            references[key] = resident(model, data, lr, max_norm)
            del model
            gc.collect()
            torch.cuda.empty_cache()
            if arguments.floor:
                model = build(arguments.shape, tied)
                again = resident(model, [halved(micro) for micro in data], lr, max_norm)
                del model
                gc.collect()
                torch.cuda.empty_cache()
                gaps = {
                    "max_loss_gap": largest_gap(again["losses"], references[key]["losses"]),
                    "last_loss": again["losses"][-1],
                }
                print("PARITY " + json.dumps({"case": f"resident, split, of {name}", "lr": lr, **gaps}), flush=True)
        reference = references[key]
        model = build(arguments.shape, tied).cpu()
        gc.collect()
        torch.cuda.empty_cache()
        ours = streamed(model, data, lr, max_norm, plan, update)
        del model
        gc.collect()
        torch.cuda.empty_cache()
        loss_gap = largest_gap(ours["losses"], reference["losses"])
        norm_gap = abs(ours["norms"][0] - reference["norms"][0]) / reference["norms"][0]
        ok = loss_gap <= 1e-2 and norm_gap <= 1e-2
        missed |= not ok
        line = {
            "case": name,
            "lr": lr,
            "ok": ok,
            "max_loss_gap": loss_gap,
            "step1_norm_gap": norm_gap,
            "first_loss": ours["losses"][0],
            "last_loss": ours["losses"][-1],
            "reference_last_loss": reference["losses"][-1],
            "set_up_s": ours["set_up_s"],
        }
        print("PARITY " + json.dumps(line), flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
