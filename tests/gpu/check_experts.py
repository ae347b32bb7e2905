"""Gradients of routed experts that are added to their sums in parts, beside autograd's: the same bits, and less memory.

Run: python tests/gpu/check_experts.py [--device cuda|cpu] [--experts 64] [--tokens 4096]. Experts of gpt-oss-120b's
width and of a small Mixtral's, forward and backward, with parts of several sizes. Prints one JSON line each:
milliseconds, and the most that torch allocated beside weights and sums. Exits 1 where a number differs, or where parts
take more memory.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GptOssConfig, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from megatrain.engine import expert_grads
from megatrain.engine.weight_grads import WeightGradients

PARTS = (2**40, 2**28, 2**26)
"""Bytes of a part: the first is larger than any weight."""
REPEATS = 5


class Case:
    """Experts with random weights, and one micro-batch of random rows."""

    def __init__(self, kind: Any, config: Any, tokens: int, chosen: int, device: torch.device) -> None:
        config._experts_implementation = "grouped_mm"
        torch.manual_seed(0)
        with device:
            self.module: nn.Module = kind(config).to(torch.bfloat16)
            for parameter in self.module.parameters():
                nn.init.normal_(parameter, std=0.02)
            self.rows = torch.randn(tokens, config.hidden_size).to(torch.bfloat16)
            self.grad = torch.randn(tokens, config.hidden_size).to(torch.bfloat16)
            self.chosen = torch.rand(tokens, config.num_local_experts).topk(chosen, -1).indices
            self.weights = torch.rand(tokens, chosen).to(torch.bfloat16)
        self.device = device
        self.trained = list(self.module.parameters())
        self.sums = [torch.zeros_like(p, dtype=torch.float32) for p in self.trained]

    def backward(self) -> tuple[Tensor, ...]:
        """Output, gradients of rows and of their experts' weights, and of the parameters as torch returns them."""
        rows, weights = self.rows.clone().requires_grad_(), self.weights.clone().requires_grad_()
        output = self.module(rows, self.chosen, weights)
        wanted = (rows, weights, *self.trained)
        return output, *torch.autograd.grad(output, wanted, self.grad, allow_unused=True)

    def measured(self, run: Callable[[], Any]) -> dict[str, float]:
        """Milliseconds of a run, and the most GiB that torch allocates; no memory on the CPU."""
        card = self.device.type == "cuda"
        run()
        if card:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before, start = torch.cuda.memory_allocated() if card else 0, time.perf_counter()
        for _ in range(REPEATS):
            run()
        if card:
            torch.cuda.synchronize()
        taken = {"ms": round((time.perf_counter() - start) / REPEATS * 1e3, 2)}
        return taken | ({"gib": round((torch.cuda.max_memory_allocated() - before) / 2**30, 2)} if card else {})


def compared(name: str, case: Case) -> bool:
    """Prints a line for each size of parts; whether all agree with autograd."""

    def by_autograd() -> None:
        torch._foreach_copy_(case.sums, list(case.backward()[3:]))

    plain = case.measured(by_autograd)
    wanted = [*case.backward()[:3], *(total.clone() for total in case.sums)]
    collector = WeightGradients(case.module, case.trained)
    expert_grads.convert(case.module, collector)

    def in_parts() -> tuple[Tensor, ...]:
        collector.begin(case.sums, first=True, in_fp32=True)
        found = case.backward()
        collector.finish(found[3:])
        return found[:3]

    agreed = isinstance(case.module, expert_grads.SummedExperts)
    for part in PARTS:
        expert_grads.PART_BYTES = part
        taken = case.measured(in_parts)
        found = [*in_parts(), *case.sums]
        ok = all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        ok = ok and taken.get("gib", 0) <= plain.get("gib", 0)
        agreed = agreed and ok
        print("EXPERTS " + json.dumps({"experts": name, "part": part, "ok": ok, "autograd": plain, "parts": taken}))
    return agreed


def main() -> int:
    """0 when nothing differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--experts", type=int, default=64, help="of gpt-oss (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=4096)
    given = parser.parse_args()
    device = torch.device(given.device)
    cases = {
        "gpt-oss": (GptOssExperts, GptOssConfig(num_local_experts=given.experts), 4),
        "mixtral": (MixtralExperts, MixtralConfig(hidden_size=2048, intermediate_size=4096), 2),
    }
    agreed = True
    for name, (kind, config, chosen) in cases.items():
        agreed = compared(name, Case(kind, config, given.tokens, chosen, device)) and agreed
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(main())
