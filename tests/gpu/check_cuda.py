"""The CUDA device through an installed wheel: conformance, arithmetic to the bit, copies, DLPack, streams, exit.

    python tests/gpu/check_cuda.py [--device cuda|cpu] [--elements 10000003] [--only NAME …]

Prints one JSON line a check, `{"check": …, "ok": …, …}`, and exits with 1 when one failed. `--device cpu` runs what the
simulated device can show too, as a test of this script.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatrain import _core

GROUP = (1e-3, 0.9, 0.95, 1e-8, 0.1)  # lr, beta1, beta2, eps, weight_decay
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PLANES = ("master", "exp_avg", "exp_avg_sq")
CHECKS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {}


def check(run: Callable[[argparse.Namespace], dict[str, Any]]) -> Callable[[argparse.Namespace], dict[str, Any]]:
    """Adds a check under its own name. It returns what to print and raises when what it checks does not hold."""
    CHECKS[run.__name__] = run
    return run


def open_device(kind: str) -> _core.Device:
    """The device under test."""
    return _core.Device.cuda() if kind == "cuda" else _core.Device.cpu()


def synchronize(kind: str) -> None:
    """Waits for all of torch's work."""
    if kind == "cuda":
        torch.cuda.synchronize()


class Model:
    """An engine over three units of bare tensors, whose gradients are given instead of computed."""

    def __init__(
        self,
        kind: str,
        numels: list[int],
        *,
        precision: str,
        grad_precision: str,
        on_device: int,
        device: _core.Device | None = None,
    ) -> None:
        self.kind, self.numels, self.precision = kind, numels, precision
        self.grad_dtype = DTYPES[grad_precision]
        roles = {"embed": "embed", "layers.0": "layer", "head": "head"}
        request = json.dumps(
            {
                "units": [
                    {
                        "name": name,
                        "role": role,
                        "tensors": [
                            {"name": f"{name}.{i}", "shape": [n], "dtype": "f32", "role": "trainable", "group": 0}
                            for i, n in enumerate(numels)
                        ],
                        "kept_bytes": 0,
                        "input_bytes": 0,
                        "flops": 1.0,
                    }
                    for name, role in roles.items()
                ],
                "tied": False,
                "precision": precision,
                "grad_precision": grad_precision,
                "update": "just_in_time",
                "micro_batches": 1,
                "workspace_bytes": 0,
                "budget": {"device": 60 << 30, "host": 60 << 30},
                "device": kind,
                "requests": {"state_on_device": on_device},
            }
        )
        plan = _core.plan(request)
        self.engine = _core.Engine(device or open_device(kind), request, plan, json.dumps({"threads": 8}))
        self.layout = json.loads(self.engine.layout())
        self.weights = torch.from_dlpack(self.engine.region("weights"))
        self.grads = torch.from_dlpack(self.engine.region("grads"))

    def write(self, unit: int, masters: list[torch.Tensor]) -> None:
        """Sets the masters of a unit."""
        for tensor, master in enumerate(masters):
            self.engine.write(unit, tensor, "master", master)

    def read(self, unit: int) -> dict[str, list[torch.Tensor]]:
        """Every plane of a unit, a tensor each."""
        found: dict[str, list[torch.Tensor]] = {}
        for plane in PLANES:
            found[plane] = [torch.empty(n) for n in self.numels]
            for tensor, out in enumerate(found[plane]):
                self.engine.read(unit, tensor, plane, out)  # type: ignore[arg-type]
        return found

    def step(
        self,
        gradient: Callable[[int, int], torch.Tensor],
        max_norm: float | None,
        before: Callable[[], None] = lambda: None,
        stream: int = 0,
    ) -> _core.Outcome:
        """One step whose gradients are `gradient(unit, tensor)`; `before` runs ahead of each gradient's write."""
        self.engine.begin("train", 1, compute_stream=stream)
        size = self.grad_dtype.itemsize
        while (op := self.engine.next()) is not None:
            if op.grad is not None and op.phase in ("loss", "backward", "embed_backward"):
                before()
                for tensor, numel in enumerate(self.numels):
                    first = op.grad + self.layout[op.unit]["tensors"][tensor]["element"] * size
                    here = self.grads[first : first + numel * size].view(self.grad_dtype)
                    here.copy_(gradient(op.unit, tensor), non_blocking=True)
            self.engine.finish(op)
        return self.engine.apply([GROUP], max_norm)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits."""
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def masters_for(numels: list[int], seed: int) -> list[torch.Tensor]:
    """Masters of every size, some of them ties between two bf16 values."""
    generator = torch.Generator().manual_seed(seed)
    masters = [torch.randn(n, generator=generator) * 0.02 for n in numels]
    for master in masters:
        bits(master)[::97] = (bits(master)[::97] & ~0xFFFF) | 0x8000
    return masters


def gradients_for(numels: list[int], seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Gradients with absent rows, and with magnitudes from subnormal to large."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for numel in numels:
        scale = torch.randint(-44, 3, (numel,), generator=generator).to(torch.float64)
        values = torch.randn(numel, generator=generator) * (10.0**scale).float()
        values[::5] = 0
        found.append(values.to(dtype))
    return found


@check
def status(arguments: argparse.Namespace) -> dict[str, Any]:
    """What is here."""
    device = open_device(arguments.device)
    found = {"status": json.loads(_core.cuda_status()), "name": device.name, "capability": device.capability}
    found |= {"total_bytes": device.total_bytes, "free_bytes": device.free_bytes, "isa": _core.isa()}
    if arguments.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        assert total == device.total_bytes
        assert abs(free - device.free_bytes) < 256 << 20
        found |= {"torch": torch.__version__, "cuda": torch.version.cuda}
    return found


@check
def conformance(arguments: argparse.Namespace) -> dict[str, Any]:
    """The suite that every device passes."""
    start = time.perf_counter()
    device = open_device(arguments.device)
    opened = time.perf_counter()
    _core.conformance(device)
    return {"open_s": round(opened - start, 3), "suite_s": round(time.perf_counter() - opened, 3)}


@check
def adamw_bits(arguments: argparse.Namespace) -> dict[str, Any]:
    """AdamW on the device, in every combination of dtypes, is the host's to the bit."""
    numels = [arguments.elements, 1, 5, 4099]
    compared = 0
    for precision, grad_precision in itertools.product(DTYPES, DTYPES):
        if precision == "fp32" and grad_precision == "bf16":
            continue  # refused by the planner
        masters = {unit: masters_for(numels, unit) for unit in range(3)}
        model = Model(arguments.device, numels, precision=precision, grad_precision=grad_precision, on_device=3)
        host = {}
        for unit, values in masters.items():
            model.write(unit, values)
            moments = [[torch.zeros(n), torch.zeros(n)] for n in numels]
            planes: list[tuple[torch.Tensor, torch.Tensor | None]] = []
            for master in values:
                upper, lower = (
                    torch.empty_like(master, dtype=torch.bfloat16),
                    torch.empty_like(master, dtype=torch.int16),
                )
                _core.split(master, upper, lower)
                planes.append((upper, lower) if precision == "bf16" else (master.clone(), None))
            host[unit] = (planes, moments)
        for step in (1, 2, 3):
            grads = {u: gradients_for(numels, 100 * step + u, model.grad_dtype) for u in range(3)}
            outcome = model.step(lambda unit, tensor, grads=grads: grads[unit][tensor], 1.0 if step == 2 else None)
            synchronize(arguments.device)
            for unit, (planes, moments) in host.items():
                for (weights, residual), (exp_avg, exp_avg_sq), grad in zip(planes, moments, grads[unit], strict=True):
                    lr, beta1, beta2, eps, decay = GROUP
                    _core.adamw(
                        weights, residual, exp_avg, exp_avg_sq, grad, lr=lr, betas=(beta1, beta2), eps=eps,
                        weight_decay=decay, step=step, grad_scale=outcome.clip, threads=8,
                    )  # fmt: skip
        for unit, (planes, moments) in host.items():
            ours = model.read(unit)
            for tensor, ((weights, residual), (exp_avg, exp_avg_sq)) in enumerate(zip(planes, moments, strict=True)):
                master = weights
                if residual is not None:
                    upper = weights.view(torch.int16).to(torch.int32) << 16
                    master = (upper + residual.to(torch.int32)).view(torch.float32)
                for plane, expected in zip(PLANES, (master, exp_avg, exp_avg_sq), strict=True):
                    got = ours[plane][tensor]
                    differ = int((bits(got) != bits(expected)).sum())
                    assert differ == 0, f"{precision}/{grad_precision} unit {unit}.{tensor} {plane}: {differ} differ"
                    compared += got.numel()
        model.engine.close()
    return {"elements_compared": compared}


@check
def adamw_rate(arguments: argparse.Namespace) -> dict[str, Any]:
    """How fast the device updates, beside a plain copy on it."""
    numel = 20 * arguments.elements
    rates = {}
    for precision, moved in (("bf16", 26), ("fp32", 28)):
        model = Model(arguments.device, [numel], precision=precision, grad_precision=precision, on_device=3)
        best = 0.0
        for _ in range(4):
            model.step(lambda _unit, _tensor: torch.tensor(1e-3), None)
            model.engine.drain()
            busy = json.loads(model.engine.stats())["lanes"].get("update", 0.0)
            best = max(best, 3 * numel / busy / 1e9 if busy else 0.0)
        rates[f"{precision}_gparams"] = round(best, 2)
        rates[f"{precision}_gbs"] = round(best * moved, 1)
        model.engine.close()
        del model
    if arguments.device == "cuda":
        source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        times = []
        for _ in range(5):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            target.copy_(source)
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        rates["plain_copy_gbs"] = round(2 * source.numel() / min(times) / 1e6, 1)
    return rates


@check
def norm(arguments: argparse.Namespace) -> dict[str, Any]:
    """The gradient norm is torch's in fp64, and the same on every run."""
    numels = [arguments.elements, 1, 5, 65536, 65537, 131071]
    worst = 0.0
    for grad_precision, dtype in DTYPES.items():
        grads = {u: gradients_for(numels, 7 + u, dtype) for u in range(3)}
        squares = sum(float(g.double().square().sum()) for unit in grads.values() for g in unit)
        seen = set()
        for on_device in (0, 3, 3):
            model = Model(
                arguments.device, numels, precision="bf16" if grad_precision == "bf16" else "fp32",
                grad_precision=grad_precision, on_device=on_device,
            )  # fmt: skip
            outcome = model.step(lambda unit, tensor, grads=grads: grads[unit][tensor], None)
            seen.add(outcome.grad_norm)
            model.engine.close()
        assert len(seen) == 1, f"the norm differs between runs: {seen}"
        worst = max(worst, abs(seen.pop() / squares**0.5 - 1))
    assert worst < 1e-12, worst
    return {"relative_error": worst}


@check
def not_finite(arguments: argparse.Namespace) -> dict[str, Any]:
    """One infinite gradient skips the whole update."""
    numels = [70_001]
    model = Model(arguments.device, numels, precision="bf16", grad_precision="bf16", on_device=1)
    for unit in range(3):
        model.write(unit, masters_for(numels, unit))
    before = [model.read(unit) for unit in range(3)]

    def gradient(unit: int, _: int) -> torch.Tensor:
        grad = torch.ones(numels[0], dtype=torch.bfloat16)
        grad[-1] = float("inf") if unit == 1 else 1.0
        return grad

    outcome = model.step(gradient, 1.0)
    assert outcome.skipped
    for unit in range(3):
        for plane, tensors in model.read(unit).items():
            assert torch.equal(bits(tensors[0]), bits(before[unit][plane][0])), (unit, plane)
        assert model.engine.step_count(unit, 0) == 0
    model.engine.close()
    return {"grad_norm": str(outcome.grad_norm)}


@check
def copy_rates(arguments: argparse.Namespace) -> dict[str, Any]:
    """The link, beside torch's own pinned copies."""
    size = 1 << 30 if arguments.device == "cuda" else 1 << 24
    rates = json.loads(_core.probe_device(open_device(arguments.device), size))
    if arguments.device == "cuda":
        host, device = (
            torch.empty(size, dtype=torch.uint8, pin_memory=True),
            torch.empty(size, dtype=torch.uint8, device="cuda"),
        )
        for name, run in (
            ("torch_h2d_gbs", lambda: device.copy_(host, non_blocking=True)),
            ("torch_d2h_gbs", lambda: host.copy_(device, non_blocking=True)),
        ):
            times = []
            for _ in range(4):
                torch.cuda.synchronize()
                start = time.perf_counter()
                run()
                torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
            rates[name] = size / min(times) / 1e9
        assert rates["h2d_gbs"] > 0.9 * rates["torch_h2d_gbs"], rates
        assert rates["d2h_gbs"] > 0.9 * rates["torch_d2h_gbs"], rates
    return {name: round(rate, 2) for name, rate in rates.items()}


@check
def host_rates(arguments: argparse.Namespace) -> dict[str, Any]:
    """Memory and optimizer of the host."""
    size = 4 << 30 if arguments.device == "cuda" else 1 << 26
    threads = max(1, len(os.sched_getaffinity(0)))
    return {"threads": threads} | json.loads(_core.probe_host(size, threads))


@check
def dlpack_device(arguments: argparse.Namespace) -> dict[str, Any]:
    """Device memory in torch: right device, shared, aligned, alive, given back."""
    device = open_device(arguments.device)
    free = device.free_bytes
    buffer = device.allocate(64 << 20)
    tensor = torch.from_dlpack(buffer)
    assert tensor.device.type == arguments.device
    assert tensor.data_ptr() % 512 == 0
    assert not bool(tensor.any())
    again = torch.from_dlpack(buffer)
    tensor.view(torch.bfloat16).fill_(1.5)
    assert float(again.view(torch.bfloat16).float().mean()) == 1.5
    del buffer, tensor, device
    again.add_(1)
    grown = again.view(torch.bfloat16).requires_grad_()
    (grown.float() * 2).sum().backward()
    assert grown.grad is not None
    assert bool((grown.grad == 2).all())
    del again, grown
    synchronize(arguments.device)
    device = open_device(arguments.device)
    if arguments.device == "cuda":
        torch.cuda.empty_cache()
        assert device.free_bytes >= free - (64 << 20) // 2, (free, device.free_bytes)
    return {}


@check
def dlpack_host(arguments: argparse.Namespace) -> dict[str, Any]:
    """Registered host memory in torch: on the CPU, pinned, and as fast to copy as torch's own."""
    device = open_device(arguments.device)
    tensor = torch.from_dlpack(device.allocate_host(256 << 20))
    assert tensor.device.type == "cpu"
    found: dict[str, Any] = {"is_pinned": tensor.is_pinned() if arguments.device == "cuda" else None}
    tensor.view(torch.int32).copy_(torch.arange(tensor.numel() // 4, dtype=torch.int32))
    if arguments.device == "cuda":
        assert found["is_pinned"]
        there = torch.empty_like(tensor, device="cuda")
        times = []
        for _ in range(4):
            torch.cuda.synchronize()
            start = time.perf_counter()
            there.copy_(tensor, non_blocking=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        assert torch.equal(there.cpu(), tensor)
        found["h2d_gbs"] = round(tensor.numel() / min(times) / 1e9, 2)
        # A pinned tensor of torch's own is lent as kDLCUDAHost, and is taken in.
        master = torch.randn(1000).pin_memory()
        upper, lower = torch.empty(1000, dtype=torch.bfloat16), torch.empty(1000, dtype=torch.int16)
        found["torch_pinned_as"] = master.__dlpack_device__()[0]
        _core.split(master, upper, lower)
        try:
            _core.split(master.cuda(), upper, lower)
        except ValueError as error:
            assert "CUDA device 0" in str(error)  # noqa: PT017
        else:
            raise AssertionError("a CUDA tensor was taken for a host array")
    return found


@check
def streams(arguments: argparse.Namespace) -> dict[str, Any]:
    """Gradients written late on torch's stream, default or not, are not missed; the next load waits for the update."""
    numels = [300_007]
    orders = ["default"] if arguments.device == "cpu" else ["default", "side", "changing"]
    for order in orders:
        model = Model(arguments.device, numels, precision="fp32", grad_precision="fp32", on_device=0)
        reference = []
        for unit in range(3):
            values = masters_for(numels, unit)
            model.write(unit, values)
            reference.append(torch.nn.Parameter(values[0].clone()))
        lr, beta1, beta2, eps, decay = GROUP
        optimizer = torch.optim.AdamW(reference, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay)
        pool = [torch.cuda.Stream() for _ in range(2)] if arguments.device == "cuda" else []
        for step in range(6):
            grads = [
                [torch.randn(n, generator=torch.Generator().manual_seed(10 * step + u)) for n in numels]
                for u in range(3)
            ]
            on_device = [[g.to(arguments.device) for g in unit] for unit in grads]
            synchronize(arguments.device)

            def late() -> None:
                if arguments.device == "cuda":
                    torch.cuda._sleep(20_000_000)

            def run(model: Model = model, given: list[list[torch.Tensor]] = on_device) -> None:
                current = torch.cuda.current_stream().cuda_stream if arguments.device == "cuda" else 0
                model.step(lambda of, tensor: given[of][tensor], None, before=late, stream=current)

            if order == "default":
                run()
            else:
                with torch.cuda.stream(pool[step % 2 if order == "changing" else 0]):
                    run()
            for parameter, grad in zip(reference, grads, strict=True):
                parameter.grad = grad[0]
            optimizer.step()
        for unit, parameter in enumerate(reference):
            got = model.read(unit)["master"][0]
            error = float((got - parameter.detach()).norm() / parameter.detach().norm())
            assert error < 1e-6, f"{order}: unit {unit} is off by {error}"
        model.engine.close()
    return {"orders": orders}


@check
def refusals(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the device refuses is an ordinary error, and the next call works."""
    device = open_device(arguments.device)
    words = []
    for _ in range(2):
        try:
            device.allocate(1 << 45)
        except _core.MegatrainError as error:
            words.append(str(error))
    assert len(words) == 2
    assert not bool(torch.from_dlpack(device.allocate(1 << 20)).any())
    if arguments.device == "cuda":
        try:
            _core.Device.cuda(99)
        except _core.DeviceError as error:
            words.append(str(error))
        assert "99" in words[-1]
        torch.ones(4, device="cuda").sum().item()
    return {"words": words[1:]}


@check
def beside_torch(arguments: argparse.Namespace) -> dict[str, Any]:
    """Before torch starts CUDA or after, one context; and a process may end with everything alive."""
    code = """
        import torch
        from megatrain import _core

        first, kind = {first!r}, {kind!r}
        def ours():
            device = _core.Device.cuda() if kind == "cuda" else _core.Device.cpu()
            return device, torch.from_dlpack(device.allocate(1 << 20)), torch.from_dlpack(device.allocate_host(1 << 20))
        def theirs():
            return torch.ones(1 << 20, device=kind)
        if first == "ours":
            held = ours()
            other = theirs()
        else:
            other = theirs()
            held = ours()
        held[1].add_(other.to(torch.uint8))
        assert int(held[1].sum()) == 1 << 20
        if kind == "cuda":
            assert torch.cuda.current_device() == 0
        torch.keep = held
        print("leaving")
    """
    for first in ("ours", "theirs"):
        text = textwrap.dedent(code).format(first=first, kind=arguments.device)
        answer = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300, check=False)
        assert (answer.returncode, answer.stdout.strip()) == (0, "leaving"), (first, answer.returncode, answer.stderr)
    return {}


def results(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Runs the checks, each to its end whatever became of the others."""
    for name, run in CHECKS.items():
        if arguments.only and name not in arguments.only:
            continue
        start = time.perf_counter()
        try:
            result = {"check": name, "ok": True} | run(arguments)
        except Exception as error:
            result = {"check": name, "ok": False, "error": f"{type(error).__name__}: {error}"}
            result["where"] = traceback.format_exc().splitlines()[-4:-1]
        yield result | {"seconds": round(time.perf_counter() - start, 2)}


def main() -> int:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--elements", type=int, default=10_000_003)
    parser.add_argument("--only", nargs="*", choices=list(CHECKS))
    arguments = parser.parse_args()
    failed = 0
    for result in results(arguments):
        print(json.dumps(result), flush=True)
        failed += not result["ok"]
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
