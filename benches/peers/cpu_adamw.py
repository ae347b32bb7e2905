"""Host optimizers beside one another: ours over split planes, PyTorch's fused AdamW, DeepSpeed's CPUAdam.

    python benches/peers/cpu_adamw.py [--params 1000000000] [--peers torch,deepspeed]

Parameters a second, the best of three passes over fp32 masters and moments; ours takes bf16 gradients and writes the
bf16 weights too, the peers take fp32 gradients (neither takes bf16 ones for fp32 masters). One JSON line.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from megatrain import _core


def best(step: Callable[[], object], params: int) -> float:
    """1e9 parameters a second."""
    step()
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return round(params / min(seconds) / 1e9, 3)


def parameter(params: int) -> torch.nn.Parameter:
    """fp32, with a gradient; touched by every thread."""
    weight = torch.nn.Parameter(torch.full((params,), 0.5))
    weight.grad = torch.full((params,), 1e-3)
    return weight


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=1_000_000_000)
    parser.add_argument("--peers", default="torch,deepspeed")
    arguments = parser.parse_args()
    params = arguments.params
    threads = torch.get_num_threads()
    ours = json.loads(_core.probe_host(14 * params, max(1, threads - 2)))["adamw_params_per_s"]
    answer: dict[str, Any] = {"params": params, "threads": threads, "ours_gparams": round(ours / 1e9, 3)}
    if "torch" in arguments.peers:
        optimizer = torch.optim.AdamW([parameter(params)], lr=1e-5, fused=True)
        answer["torch_gparams"] = best(optimizer.step, params)
        del optimizer
    if "deepspeed" in arguments.peers:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam([parameter(params)], lr=1e-5)
        answer["deepspeed_gparams"] = best(optimizer.step, params)
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
