"""How much of a step the card computes, as PyTorch's profiler sees it: a JSON line a case.

    python benches/busy.py [--only 3b-32k-12g-immediate,3b-32k] [--steps 4]

The share is the union of kernel intervals on the compute stream over the time from one step's first kernel to the last
profiled step's. The cases are rows of `h100.py`.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from megatrain.cli import bench
from megatrain.cli import parser as cli
from megatrain.cli.bench_request import bench_request


def kernels(path: Path) -> list[tuple[float, float]]:
    """Begin and end in microseconds of every kernel on the stream that has most of them, in order."""
    streams: dict[int, list[tuple[float, float]]] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy"):
            stream = streams.setdefault(event["args"]["stream"], [])
            stream.append((event["ts"], event["ts"] + event["dur"]))
    return sorted(max(streams.values(), key=len))


def union(intervals: list[tuple[float, float]], begin: float, end: float) -> float:
    """Length of what sorted intervals cover between two times."""
    covered, reached = 0.0, begin
    for start, stop in intervals:
        start, stop = max(start, reached), min(stop, end)
        if stop > start:
            covered += stop - start
            reached = stop
    return covered


def share(opened: bench.Bench, steps: int) -> dict[str, float]:
    """Of a running engine, over all of `steps` profiled steps but the last."""
    prepared = [opened.step(1000 + number) for number in range(steps)]
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for step in prepared:
            opened.engine.step(step)
        bench.settle_down(opened.engine)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        profiler.export_chrome_trace(str(path))
        found = kernels(path)
    # Every step launches the same kernels.
    begin, end = found[0][0], found[len(found) // steps * (steps - 1)][0]
    busy = union(found, begin, end)
    return {"busy": round(busy / (end - begin), 4), "profiled_step_s": round((end - begin) / 1e6 / (steps - 1), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="3b-32k-12g-immediate,3b-32k", help="rows, comma-separated")
    parser.add_argument("--steps", type=int, default=4, help="profiled steps of a case")
    arguments = parser.parse_args()
    from rows import ROWS, select

    for case, row in ((name, ROWS[name]) for name in select(arguments.only) if name in ROWS):
        words = row.ours(row.model, row.memory, "auto")
        with bench.opened(bench_request(cli.build().parse_args(words))) as opened:
            for number in range(3):
                opened.engine.step(opened.step(number))
            print(json.dumps({"case": case, **share(opened, arguments.steps)}), flush=True)
        torch._dynamo.reset()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
