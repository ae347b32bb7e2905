"""`train.matmul: fp8` on a CUDA card: one linear layer against a reference, losses beside bf16's, and speed.

Run: python tests/gpu/check_fp8.py [--steps 300] [--only linear,steps,speed,curves]. Prints one JSON line a check; exits
1 on a miss. No time is asserted.

- `linear` compares a layer, eager and compiled, with e4m3 numbers multiplied in fp64, and checks that no infinity or
  NaN becomes a number.
- `steps` trains four layers 2,048 wide under several plans, which give the same bits.
- `speed` times forward and backward of layers of Qwen2.5-3B's shape, and the products of its linear layers with what
  the conversions take.
- `curves` trains the quick start's model on the text that comes with Python in bf16 and in fp8, and prints both curves
  and held-out losses.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

sys.path.insert(0, str(Path(__file__).parent))

from check_step import batches, digest, engine

from megatrain import Trainer
from megatrain.config import Config
from megatrain.engine import float8
from megatrain.engine.float8 import quantize
from megatrain.engine.weight_grads import WeightGradients
from megatrain.models.decoder import Decoder
from megatrain.models.modules import copy_without
from megatrain.models.presets import SHAPES

BF16 = torch.bfloat16
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
MOST_APART = 0.02
"""By how much the held-out loss in fp8 may be above that in bf16, as a share of the latter."""
MOST_APART_IN_A_STEP = 0.05
"""The same of six single steps on random tokens, whose losses jump by a quarter from one to the next."""


def say(check: str, ok: bool, **facts: Any) -> bool:
    """One line for a check."""
    print("FP8 " + json.dumps({"check": check, "ok": ok, **facts}), flush=True)
    return ok


def converted(inner: int, outer: int) -> nn.Linear:
    """A float8 layer on the card, the same for the same sizes."""
    torch.manual_seed(0)
    made = nn.ModuleDict({"one": nn.Linear(inner, outer, device="cuda").to(BF16)})
    float8.convert(made, "fp8")
    one = made["one"]
    assert isinstance(one, nn.Linear)
    return one


def error(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||."""
    return float((found.double() - expected).norm() / expected.norm())


def linear(rows: int, inner: int, outer: int, run: Callable[[nn.Module], Any], how: str) -> bool:
    """Forward, both gradients, and what is not finite."""
    one = converted(inner, outer)
    called = run(one)
    x = torch.randn(rows, inner, device="cuda").to(BF16).requires_grad_()
    grad = torch.randn(rows, outer, device="cuda").to(BF16) * torch.logspace(-8, 2, rows, device="cuda")[:, None].to(
        BF16
    )
    sums = [torch.full_like(p, torch.nan, dtype=torch.float32) for p in (one.weight, one.bias)]
    collector = WeightGradients(one, [one.weight, one.bias])
    collector.begin(sums, first=True, in_fp32=True)
    output = called(x)
    grads = torch.autograd.grad(output, (x, one.weight, one.bias), grad, allow_unused=True)
    collector.finish(grads[1:])

    def rounded(values: Tensor) -> Tensor:
        numbers, scale = quantize(values)
        return numbers.double() * scale.double()

    with torch.no_grad():
        weight, scale = rounded(one.weight), quantize(one.weight)[1]
        expected = rounded(x) @ weight.t() + one.bias.double()
        of_x = rounded(grad.float() * scale.t()) @ (weight / scale.double())
        exact = x.double() @ one.weight.double().t() + one.bias.double()
        errors = {
            "output": error(output, expected),
            "of_input": error(grads[0], of_x),
            "of_weight": error(sums[0], grad.double().t() @ x.double()),
            "output_beside_bf16s": error(output, exact),
        }
        smallest = error(grads[0][:1], of_x[:1])  # rows have scales of their own
        bad = torch.ones(4, inner, device="cuda", dtype=BF16)
        bad[0, 1], bad[1, 1], bad[2, 1] = torch.inf, -torch.inf, torch.nan
        passed_on = bool(one(bad)[:3].isnan().all()) and bool(one(bad)[3].isfinite().all())
    leaf = x.detach().clone().requires_grad_()
    spoilt = grad.clone()
    spoilt[1, 0], spoilt[2, 0] = torch.inf, torch.nan
    collector.begin(sums, first=True, in_fp32=True)
    of_leaf = torch.autograd.grad(called(leaf), leaf, spoilt)[0]
    collector.finish([None, None])
    passed_back = bool(of_leaf[1:3].isnan().all()) and bool(of_leaf[3:].isfinite().all())
    with torch.no_grad():
        leaf[0, 0] = torch.inf
    passed_on &= bool(called(leaf)[0].isnan().all())
    limits = {"output": 1e-2, "of_input": 1e-2, "of_weight": 1e-4, "output_beside_bf16s": 0.06}
    fine = all(errors[name] <= limit for name, limit in limits.items()) and smallest < 2e-2
    facts = {"shape": [rows, inner, outer], "errors": errors, "smallest_row": smallest}
    ok = fine and passed_on and passed_back
    return say("linear", ok, how=how, **facts, non_finite_forward=passed_on, non_finite_backward=passed_back)


PLANS: dict[str, dict[str, Any]] = {
    "on the card, replayed": {"activation": "keep", "state_on_device": 6},
    "on the card": {"activation": "keep", "state_on_device": 6, "graphs": False},
    "recompute": {"activation": "recompute", "inputs": "host", "slots": 2, "state_on_device": 0},
    "offload": {"activation": "offload", "inputs": "host", "slots": 2, "group": 1, "poison": True},
    "not compiled": {"activation": "keep", "compile": False},
}


def steps_agree() -> bool:
    """Six steps of four layers in fp8 under several plans: the same bits, but for the layers that are not compiled, and
    losses near those in bf16."""
    found: dict[str, Any] = {}
    for name, plan in {**PLANS, "bf16": {}}.items():
        options = {} if name == "bf16" else {"matmul": "fp8"}
        ours = engine(4, plan=plan, deterministic=True, precision="bf16", **options)
        torch.cuda.reset_peak_memory_stats()
        outs = [ours.step(batches(3, seed=seed % 2)) for seed in range(6)]
        planned = sum(item["bytes"] for item in ours.plan["items"] if item["what"].endswith("(torch)"))
        peak = torch.cuda.max_memory_allocated()
        losses = [out.loss for out in outs]
        found[name] = {"losses": losses, "norm": outs[-1].grad_norm, "digest": digest(ours)[:16]}
        found[name] |= {"torch_peak_gib": round(peak / 2**30, 3), "planned_gib": round(planned / 2**30, 3)}
        ours.close()
        torch.cuda.empty_cache()
    compiled = [one["digest"] for name, one in found.items() if name not in ("not compiled", "bf16")]
    apart = {
        name: max(abs(a / b - 1) for a, b in zip(one["losses"], found["bf16"]["losses"], strict=True))
        for name, one in found.items()
    }
    fits = all(one["torch_peak_gib"] <= one["planned_gib"] for one in found.values())
    same = len(set(compiled)) == 1
    return say(
        "steps", same and max(apart.values()) < MOST_APART_IN_A_STEP, found=found, apart=apart, within_the_plan=fits
    )


def curves(steps: int) -> bool:
    """The quick start's model in bf16 and in fp8, on the same text from the same weights."""
    held_out: dict[str, float] = {}
    for matmul in ("bf16", "fp8"):
        with tempfile.TemporaryDirectory() as folder:
            keys: dict[str, Any] = Config.load(QUICKSTART).to_dict()
            keys["device"] = "cuda"
            keys["train"] |= {"steps": steps, "matmul": matmul, "precision": "bf16", "grad_precision": "bf16"}
            keys["eval"] |= {"every": steps, "samples": {"every": None}}
            keys["output"] |= {"dir": f"{folder}/run", "save_every": None, "export": "never", "log_every": 100}
            started = time.perf_counter()
            Trainer(Config.from_dict(keys)).fit()
            seconds = time.perf_counter() - started
            lines = [json.loads(text) for text in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
        losses = [line["loss"] for line in lines if "loss" in line]
        found = [line["eval_loss"] for line in lines if line.get("eval_loss") is not None]
        held_out[matmul] = found[-1] if found else float("nan")
        every = max(1, steps // 50)
        curve = [round(loss, 4) for loss in losses[::every]]
        seen = {"steps": len(losses), "every": every, "losses": curve, "last": losses[-1], "held_out": found}
        say(f"curve in {matmul}", bool(found), seconds=round(seconds, 1), **seen)
    apart = held_out["fp8"] / held_out["bf16"] - 1
    return say("curves", apart < MOST_APART, held_out=held_out, fp8_above_bf16=apart, most=MOST_APART)


def timed(run: Callable[[], Any], count: int = 20) -> float:
    """Milliseconds of the median run."""
    for _ in range(5):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[count // 2]


def matmuls(rows: int, inner: int, outer: int) -> bool:
    """What each product of a linear layer takes, and its conversions."""
    x = torch.randn(rows, inner, device="cuda").to(BF16)
    weight = torch.randn(outer, inner, device="cuda").to(BF16)
    convert = torch.compile(quantize)
    turn = torch.compile(lambda weight, scale: float8.divide(weight, scale).t().contiguous())
    (numbers, scale), (weights, weight_scale) = convert(x), convert(weight)
    tensorwise = torch.ones((), device="cuda")

    def product(scales: tuple[Tensor, Tensor], fast: bool) -> Callable[[], Tensor]:
        return lambda: torch._scaled_mm(
            numbers, weights.t(), scale_a=scales[0], scale_b=scales[1], out_dtype=BF16, use_fast_accum=fast
        )

    by_rows = (scale, weight_scale.t())
    exact = (numbers.double() * scale.double()) @ (weights.double() * weight_scale.double()).t()
    runs: dict[str, Callable[[], Any]] = {
        "bf16": lambda: x @ weight.t(),
        "fp8": product(by_rows, True),
        "fp8, sums promoted": product(by_rows, False),
        "fp8, one scale a tensor": product((tensorwise, tensorwise), True),
        "fp8, one scale a tensor, sums promoted": product((tensorwise, tensorwise), False),
        "activations converted": lambda: convert(x),
        "weight converted": lambda: convert(weight),
        "weight converted and turned": lambda: turn(weight, weight_scale),
    }
    found: dict[str, Any] = {}
    for name, run in runs.items():
        try:
            found[name] = round(timed(run), 4)
        except RuntimeError as problem:  # a kernel that this torch or card lacks
            found[name] = str(problem)[:200]
    errors: dict[str, Any] = {}
    for fast in (True, False):
        with contextlib.suppress(RuntimeError):
            errors[str(fast)] = error(product(by_rows, fast)(), exact)
    shape = [rows, inner, outer]
    return say("matmuls", isinstance(found["fp8"], float), shape=shape, ms=found, errors_by_fast_sums=errors)


def layer_ms(matmul: str, rows: int, seq: int, count: int = 4) -> tuple[float, float]:
    """Milliseconds of forward and backward of one layer of Qwen2.5-3B's shape, of `count` in a row, and the peak in
    GiB; compiled, gradients of weights added in fp32."""
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    shape = SHAPES["qwen2.5-3b"].config() | {"num_hidden_layers": 1}
    decoder = Decoder.from_config(shape, precision="bf16", matmul=matmul)
    record = decoder.recorder.record(torch.zeros((rows, seq), dtype=torch.int64))
    args, kwargs = tree_map(lambda v: v.cuda() if isinstance(v, Tensor) else v, (record.args[0], record.kwargs[0]))
    module = copy_without(decoder.layers[0]).to_empty(device="cuda").train()
    float8.convert(module, matmul)
    torch.manual_seed(0)
    parameters = list(module.parameters())
    with torch.no_grad():
        for parameter in parameters:
            parameter.normal_(std=0.02)
    collector = WeightGradients(module, parameters)
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
    compiled: Any = torch.compile(module, fullgraph=True)
    x = torch.randn(rows, seq, decoder.hidden_size, device="cuda").to(BF16).requires_grad_()
    grad = torch.randn_like(x)

    def step() -> None:
        for _ in range(count):
            collector.begin(sums, first=False, in_fp32=True)
            output = compiled(x, *args, **kwargs)
            output = output[0] if decoder.recorder.tuple_output else output
            collector.finish(torch.autograd.grad(output, (x, *parameters), grad, allow_unused=True)[1:])

    return timed(step) / count, torch.cuda.max_memory_allocated() / 2**30


def layers() -> bool:
    """Both kinds of layers, with 8,192 tokens and with 32,768."""
    found: dict[str, Any] = {}
    for rows in (8, 32):
        for matmul in ("bf16", "fp8"):
            ms, peak = layer_ms(matmul, rows, 1024)
            found[f"{matmul}, {rows} x 1024"] = {"ms": round(ms, 3), "peak_gib": round(peak, 3)}
    return say("layers", True, found=found)


def main() -> int:
    """0 when nothing is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", default="linear,steps,speed,curves")
    asked = parser.parse_args()
    only = asked.only.split(",")
    ways: dict[str, Callable[[nn.Module], Any]] = {
        "eager": lambda module: module,
        "compiled": lambda module: torch.compile(module, fullgraph=True),
    }
    checks: list[tuple[str, Callable[[], bool]]] = []
    if "linear" in only:
        shapes = ((1000, 2048, 256), (4096, 2048, 11008), (4096, 11008, 2048), (7, 64, 48))
        checks += [
            (f"linear {how} {shape}", lambda shape=shape, how=how: linear(*shape, ways[how], how))
            for shape in shapes
            for how in ways
        ]
    if "steps" in only:
        checks += [("steps", steps_agree)]
    if "speed" in only:
        checks += [
            (f"matmuls {shape}", lambda shape=shape: matmuls(*shape))
            for shape in ((8192, 2048, 11008), (8192, 11008, 2048))
        ]
        checks += [("layers", layers)]
    if "curves" in only:
        checks += [("curves", lambda: curves(asked.steps))]
    missed = False
    for name, check in checks:
        torch._dynamo.reset()
        try:
            missed |= not check()
        except Exception as error:  # the other checks are still of use
            missed |= not say(name, False, error=f"{type(error).__name__}: {error}"[:1000])
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
