"""Our steps and their parts beside their peers on one card, in one command: a JSON line each, then a table.

    python benches/h100.py [--only 1,2,5] [--steps 10] [--peers deepspeed,resident,resident-checkpoint]
                           [--prototype proto_stream.py]

Cases 1 to 8 are tokens a second of `--steps` steps timed as one interval, after warm-up, with pending updates drained
inside it; random weights, random tokens, sequence 1,024, bf16 with fp32 masters and moments. 9 is the host's optimizer
over 1e9 parameters, 10 the host memory of a 7B model whose state is all there, 12 the loss; 11, the share of a step in
which the card computes, comes with `--together --profile`. A ratio holds within one run of this script only, since
machines are shared and differ.
"""

import argparse
import gc
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ON_HOST = ["--set", "state_on_device=0"]
SMALL = ["--gpu-memory", "12GiB", *ON_HOST]
CLIPPED = ["--max-grad-norm", "1.0"]
IMMEDIATE = ["--update", "immediate"]

CASES: dict[str, tuple[list[str], str | None]] = {
    # case: arguments of `megatrain bench`, the peer it is a ratio of
    "1": (["--model", "qwen2.5-3b", "--batch", "8", *SMALL, *IMMEDIATE], "deepspeed"),
    "2": (["--model", "qwen2.5-3b", "--batch", "8", *SMALL, *CLIPPED], "deepspeed"),
    "3": (["--model", "qwen2.5-3b", "--batch", "32", *SMALL, *IMMEDIATE], "resident-checkpoint"),
    "4": (["--model", "qwen2.5-3b", "--batch", "128", *SMALL, *CLIPPED], "resident-checkpoint"),
    "5": (["--model", "qwen2.5-3b", "--batch", "8", *CLIPPED], "resident"),
    "6": (["--model", "qwen2.5-3b", "--batch", "32", *CLIPPED], "resident-checkpoint"),
    "7": (["--model", "qwen2.5-7b", "--batch", "16", *CLIPPED], "prototype"),
    "7i": (["--model", "qwen2.5-7b", "--batch", "16", *IMMEDIATE], "prototype"),
    "8": (["--model", "qwen2.5-7b", "--batch", "64", *CLIPPED], None),
    "10": (["--model", "qwen2.5-7b", "--batch", "8", *ON_HOST, *CLIPPED], None),
    "10i": (["--model", "qwen2.5-7b", "--batch", "8", *ON_HOST, "--set", "slabs=4", *IMMEDIATE], None),
}
PARTS: dict[str, list[str]] = {
    "9": ["benches/peers/cpu_adamw.py"],
    "12": ["tests/gpu/check_loss.py"],
}
PEERS: dict[str, list[str]] = {
    "resident": ["resident.py", "--model", "qwen2.5-3b", "--batch", "8"],
    "resident-checkpoint": ["resident.py", "--model", "qwen2.5-3b", "--batch", "16", "--checkpoint"],
    "deepspeed": ["zero3.py", "--model", "qwen2.5-3b", "--batch", "8"],
}
PROTOTYPE = ["--model", "qwen2.5-7b", "--batch", "16", "--keep", "8", "--liger", "--cudnn"]
"""A streaming prototype that neither clips nor trains embedding and head, given as a file (`--prototype`)."""
FEW_STEPS = 2
"""Of case 10, which is about memory."""
ROOT = Path(__file__).parents[1]


def matmul_tflops() -> float:
    """bf16 matrix product of 8192 cubed, the median of 20."""
    code = """
import torch
a, b = (torch.randn(8192, 8192, device='cuda', dtype=torch.bfloat16) for _ in range(2))
times = []
for i in range(25):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(); a @ b; end.record(); torch.cuda.synchronize(); times.append(start.elapsed_time(end))
print(2 * 8192**3 / sorted(times[5:])[10] / 1e9)
"""
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def run(name: str, command: list[str], limit: float) -> dict[str, Any] | None:
    """The JSON line that a command ends with; what went wrong is printed."""
    started = time.perf_counter()
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        print(json.dumps({"case": name, "error": f"not done after {limit:.0f} s"}), flush=True)
        return None
    lines = [line[line.index("{") :] for line in done.stdout.splitlines() if line.startswith(("{", "RESULT {"))]
    if done.returncode != 0 or not lines:
        print(json.dumps({"case": name, "error": (done.stderr or done.stdout)[-600:]}), flush=True)
        return None
    answer: dict[str, Any] = json.loads(lines[-1])
    print(json.dumps({"case": name, "took_s": round(time.perf_counter() - started, 1), **answer}), flush=True)
    return answer


def run_here(name: str, words: list[str], profiled: bool) -> dict[str, Any] | None:
    """The same in this process: imports and compiled kernels are shared, and so is the peak of host memory."""
    import torch
    from busy import share

    from megatrain import MegatrainError
    from megatrain.cli import bench
    from megatrain.cli import parser as cli
    from megatrain.cli.commands import bench_request

    started = time.perf_counter()
    try:
        with bench.opened(bench_request(cli.build().parse_args(words))) as opened:
            answer = bench.measure(opened)
            if profiled:
                answer |= share(opened, 4)
    except MegatrainError as error:
        print(json.dumps({"case": name, "error": str(error)[-600:]}), flush=True)
        return None
    finally:
        gc.collect()
        torch.cuda.empty_cache()
        torch._dynamo.reset()
    print(json.dumps({"case": name, "took_s": round(time.perf_counter() - started, 1), **answer}), flush=True)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join((*CASES, *PARTS)), help="cases, comma-separated")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a case")
    parser.add_argument(
        "--long-steps", type=int, default=None, help="timed steps of cases 4 and 8, whose steps are long"
    )
    parser.add_argument("--peers", default=",".join(PEERS), help="peers, comma-separated; empty for none")
    parser.add_argument("--prototype", type=Path, help="a streaming prototype's script, the peer of case 7")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that one of them may take")
    parser.add_argument("--together", action="store_true", help="all of ours in one process, which saves start-up")
    parser.add_argument("--traces", type=Path, help="folder for the traces of cases 3 and 6")
    parser.add_argument(
        "--profile", action="store_true", help="with --together: how much of a step cases 3 and 6 compute, see busy.py"
    )
    arguments = parser.parse_args()
    rate = matmul_tflops()
    print(json.dumps({"matmul_tflops": round(rate, 1)}), flush=True)
    peers: dict[str, dict[str, Any] | None] = {}
    for peer in filter(None, arguments.peers.split(",")):
        script, *rest = PEERS[peer]
        command = [sys.executable, str(Path(__file__).parent / "peers" / script), *rest]
        peers[peer] = run(peer, [*command, "--steps", str(arguments.steps)], arguments.limit)
    if arguments.prototype:
        command = [sys.executable, str(arguments.prototype), *PROTOTYPE, "--steps", str(arguments.steps)]
        peers["prototype"] = run("prototype", command, arguments.limit)
    rows = []
    for case in filter(None, arguments.only.split(",")):
        if case in PARTS:
            run(case, [sys.executable, *(str(ROOT / word) for word in PARTS[case])], arguments.limit)
            continue
        words, peer = CASES[case]
        steps = arguments.long_steps if case in ("4", "8") and arguments.long_steps else arguments.steps
        steps = FEW_STEPS if case.startswith("10") else steps
        command = ["bench", "--seq", "1024", "--steps", str(steps), *words]
        if arguments.traces and case in ("3", "6"):
            command += ["--trace", str(arguments.traces / f"case-{case}.json")]
        if arguments.together and not case.startswith("10"):  # whose memory is that of a process
            ours = run_here(case, command, arguments.profile and case in ("3", "6"))
        else:
            ours = run(case, [sys.executable, "-m", "megatrain", *command], arguments.limit)
        other = peers.get(peer) if peer else None
        ratio = f"{ours['tokens_s'] / other['tokens_s']:.3f} x {peer}" if ours and other else ""
        speed = f"{ours['tokens_s']:,.0f}" if ours else "failed"
        share = f"{ours['model_tflops'] / rate:.3f}" if ours else ""
        memory = f"{ours['host_anonymous_gib'] * 2**30 / ours['parameters']:.2f}" if ours else ""
        rows.append((case, " ".join(words), speed, share, ratio, memory))
    print("\n| case | arguments | tokens/s | of the matmul rate | ratio | host bytes a parameter |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
