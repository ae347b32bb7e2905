"""Times steps of a public shape on random weights and random tokens; nothing is downloaded. Prints one JSON line.

    megatrain bench --model qwen2.5-3b --batch 32 --seq 1024 --gpu-memory 12GiB --update immediate

The clock starts when the last step of the warm-up has returned, and stops when the last timed step has. Updates may
still run then, beneath the next step's forward: those of the warm-up's last step are timed, those of the last timed
step are not, which makes as many updates as steps. Without a warm-up the clock stops when all updates are done.
"""

import collections
import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatrain.cli.bench_request import BenchRequest, configuration
from megatrain.config import Config
from megatrain.engine.engine import Engine
from megatrain.engine.inputs import StepInputs
from megatrain.errors import StorageError
from megatrain.planning import planner
from megatrain.system import hardware as facts
from megatrain.training import metrics
from megatrain.training.setup import ModelSetup, build_engine, prepare_model

log: logging.Logger = logging.getLogger("megatrain")


def run(request: BenchRequest) -> dict[str, Any]:
    """Runs the steps and returns the measurements. Raises ConfigError or DoesNotFit before anything is allocated."""
    with opened(request) as bench:
        return measure(bench)


@dataclasses.dataclass(frozen=True, slots=True)
class Bench:
    """An engine with random weights for a request; see `opened`."""

    request: BenchRequest
    config: Config
    model_setup: ModelSetup
    run_plan: planner.RunPlan
    engine: Engine
    free_before: int | None
    """Bytes of device memory that were free before the engine was made; None on the CPU."""

    def step(self, number: int) -> StepInputs:
        """A step's micro-batches, checked and prepared: made before the clock starts, as a run's loader works ahead."""
        vocab, rows = self.engine.decoder.num_embeddings, self.run_plan.micro_batch[0]
        return self.engine.prepare(batches(self.request, vocab, number, rows))


@contextlib.contextmanager
def opened(request: BenchRequest) -> Iterator[Bench]:
    """The engine that a request asks for, closed at the end. Raises what `run` raises."""
    config = configuration(request)
    machine = facts.read()
    model_setup = prepare_model(config, machine, plan_only=True)
    run_plan = planner.plan_run(
        config, model_setup.decoder, device=model_setup.device, machine=machine, rows=request.batch
    )
    if request.trace is not None:
        run_plan = dataclasses.replace(run_plan, options=run_plan.options | {"trace": True})
    free_before = _free_device_bytes(run_plan.device)
    engine = build_engine(model_setup, run_plan)
    try:
        yield Bench(request, config, model_setup, run_plan, engine, free_before)
    finally:
        engine.close()


def measure(bench: Bench) -> dict[str, Any]:
    """Runs warm-up and timed steps, and one more for the trace where one was requested."""
    timed = _timed(bench)
    answer = _answer(bench, timed)
    answer["gpu_peak_gib"] = None
    if bench.free_before is not None:
        answer["gpu_peak_gib"] = _gib(_taken(bench.free_before))
        answer["torch_peak_gib"] = _gib(int(torch.cuda.max_memory_allocated()))
    if bench.request.trace is not None:
        _trace(bench, bench.request.trace)
    return answer


def batches(request: BenchRequest, vocab: int, step: int, rows: int) -> list[dict[str, torch.Tensor]]:
    """Micro-batches of `step`: (rows, seq) int64 random ids, all of them supervised."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, vocab, (request.batch, request.seq), generator=generator)
    return [{"input_ids": part, "labels": part} for part in torch.split(ids, rows)]


@dataclasses.dataclass(frozen=True, slots=True)
class _Timed:
    seconds: float
    losses: list[float]
    norms: list[float]
    lanes: dict[str, float]
    bound: str
    """The lane that bounded most of the steps."""


def _timed(bench: Bench) -> _Timed:
    request, engine = bench.request, bench.engine
    prepared = [bench.step(number) for number in range(request.warmup + request.steps)]
    for step in range(request.warmup):
        engine.step(prepared[step])
    losses, norms = [], []
    lanes: dict[str, float] = {}
    bounds: collections.Counter[str] = collections.Counter()
    start = time.perf_counter()
    for step in range(request.warmup, request.warmup + request.steps):
        out = engine.step(prepared[step])
        losses.append(out.loss)
        norms.append(out.grad_norm)
        stats = engine.stats()
        bounds[stats.bound] += 1
        for lane, seconds in stats.lanes.items():
            lanes[lane] = lanes.get(lane, 0.0) + seconds
    if request.warmup == 0:
        settle_down(engine)
    seconds = time.perf_counter() - start
    settle_down(engine)
    mean = {lane: total / request.steps for lane, total in lanes.items()}
    return _Timed(seconds, losses, norms, mean, bounds.most_common(1)[0][0])


def settle_down(engine: Engine) -> None:
    """Waits for updates, copies and kernels."""
    engine.drain()
    if engine.device.type == "cuda":
        torch.cuda.synchronize()


def _answer(bench: Bench, timed: _Timed) -> dict[str, Any]:
    request, config, run_plan, engine = bench.request, bench.config, bench.run_plan, bench.engine
    step_s = timed.seconds / request.steps
    tokens = request.batch * request.seq
    flops = bench.model_setup.count.flops_per_token(request.seq) * tokens
    planned = engine.plan
    units = planned["units"]
    return {
        "model": request.model,
        "device": run_plan.machine.gpu.name if run_plan.device == "cuda" and run_plan.machine.gpu else "cpu",
        "precision": run_plan.precision,
        "matmul": config.train.matmul,
        "update": config.train.update,
        "max_grad_norm": config.train.max_grad_norm,
        "batch": request.batch,
        "seq": request.seq,
        "micro_batch": run_plan.micro_batch[0],
        "steps": request.steps,
        "step_s": round(step_s, 5),
        "tokens_s": round(tokens / step_s, 1),
        "model_tflops": round(flops / step_s / 1e12, 3),
        "lanes_s": {lane: round(seconds, 5) for lane, seconds in timed.lanes.items()},
        "bound": timed.bound,
        "loss": timed.losses[-1],
        "first_loss": timed.losses[0],
        "grad_norm": timed.norms[-1],
        "parameters": bench.model_setup.decoder.num_parameters,
        "host_peak_gib": _gib(metrics.host_peak_bytes()),
        "host_anonymous_gib": _gib(metrics.host_anonymous_bytes()),
        "plan": {
            **{
                key: planned.get(key)
                for key in (
                    "slots",
                    "slabs",
                    "group",
                    "large_group",
                    "large_begin",
                    "micro_batches",
                    "totals",
                    "estimate",
                )
            },
            "state_on_device": sum(unit["state"] == "device" for unit in units),
            "updates_on_device": sum(unit["state"] == "host" and unit["update"] == "device" for unit in units),
            "activations": {
                kind: sum(unit["activation"] == kind for unit in units) for kind in ("keep", "offload", "recompute")
            },
            "inputs_on_host": sum(unit["input"] == "host" for unit in units),
            "inputs_on_disk": sum(unit["input"] == "disk" for unit in units),
        },
        "torch": torch.__version__,
    }


def _free_device_bytes(device: str) -> int | None:
    if device != "cuda":
        return None
    torch.cuda.init()  # type: ignore[no-untyped-call]
    torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.mem_get_info()[0])


def _taken(free_before: int) -> int:
    """Device memory taken since before the engine was made, torch's cache and the libraries' contexts included: the
    peak, unless torch has given some of its cache back."""
    return max(0, free_before - int(torch.cuda.mem_get_info()[0]))


def _gib(size: int) -> float:
    return round(size / facts.GIB, 3)


def _trace(bench: Bench, path: Path) -> None:
    bench.engine.step(bench.step(bench.request.warmup + bench.request.steps))
    settle_down(bench.engine)
    try:
        path.write_text(bench.engine.core.trace(), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"--trace {path} cannot be written: {error.strerror}") from None
