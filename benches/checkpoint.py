"""How fast a checkpoint is written, beside a plain sequential writer of as many bytes in the same folder: JSON lines.

    python benches/checkpoint.py FOLDER --model qwen2.5-3b --batch 32 --max-grad-norm 1.0
    python benches/checkpoint.py FOLDER --model qwen2.5-7b --batch 16 --set train.moments=8bit --set train.master=24bit

Further arguments are those of `megatrain bench`. A checkpoint takes 12 bytes a parameter with fp32 state (3B: 37 GB,
7B: 91 GB) and 5.1 with 8-bit moments and a 24-bit master (7B: 39 GB), so both commands fit on a disk with 64 GiB
free. What was written is removed before the next is begun: two are never on the disk at once.

The plain writer writes random bytes and ends with fsync, once through the page cache and once around it (O_DIRECT); the
ratio is to the faster of the two. A checkpoint is timed from its beginning until its folder has its final name: while
training goes on, as in a run, and while nothing else happens. The stall is how much longer the training thread took for
its steps meanwhile; what `megatrain plan` expects is bytes / disk - one step.
"""

import argparse
import contextlib
import dataclasses
import json
import mmap
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatrain.cli import bench
from megatrain.cli import parser as cli
from megatrain.cli.bench_request import BenchRequest, bench_request
from megatrain.engine.inputs import StepInputs
from megatrain.errors import MegatrainError
from megatrain.planning import disk_space

CHUNK = 16 << 20
MOST_STEPS = 64
"""Steps beside one checkpoint."""
WANTED = 0.8
POLL_S = 0.005


def say(what: str, **values: Any) -> None:
    """Prints a JSON line."""
    print(json.dumps({"measured": what, **values}), flush=True)


def gbs(size: int, seconds: float) -> float:
    """1e9 bytes a second."""
    return round(size / seconds / 1e9, 3)


def write_plainly(path: Path, size: int, *, direct: bool) -> float:
    """Seconds for a file of `size` bytes, on the disk at the end; the file is removed. Raises OSError: EINVAL where the
    file system has no O_DIRECT."""
    buffer = mmap.mmap(-1, CHUNK)  # page-aligned, as O_DIRECT asks for
    buffer.write(os.urandom(CHUNK))
    view = memoryview(buffer)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0), 0o600)
    try:
        start = time.perf_counter()
        for begin in range(0, size, CHUNK):
            # the last chunk is written whole: O_DIRECT takes whole blocks only
            part = view if direct else view[: min(CHUNK, size - begin)]
            while part:
                part = part[os.write(file, part) :]
        os.fsync(file)
        return time.perf_counter() - start
    finally:
        os.close(file)
        path.unlink()


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that was written and removed again."""

    size: int
    files: int
    begin_s: float
    """What `begin_save` took of the training thread."""
    seconds: float
    steps: int
    """That ended meanwhile, the one that was running at its end included."""
    steps_s: float
    """From the beginning of the checkpoint to the end of those steps."""


def save(running: bench.Bench, folder: Path, prepared: Iterator[StepInputs], number: int) -> Saved:
    """Writes one checkpoint while the steps of `prepared` run."""
    engine = running.engine
    start = time.perf_counter()
    saving = engine.begin_save(folder, step=number)
    begin_s = time.perf_counter() - start
    ended: list[float] = []

    def complete() -> None:
        with contextlib.suppress(Exception):  # `finish` below raises it again
            while not saving.is_written:
                time.sleep(POLL_S)
            saving.finish()
            ended.append(time.perf_counter())

    thread = threading.Thread(target=complete, daemon=True)
    thread.start()
    steps, stepped = 0, start
    for step in prepared:
        if saving.over:
            break
        engine.step(step)
        steps, stepped = steps + 1, time.perf_counter()
    saving.finish()
    thread.join()
    found = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    shutil.rmtree(folder)
    return Saved(sum(found), len(found), begin_s, ended[0] - start, steps, stepped - start)


def measure(running: bench.Bench, folder: Path) -> dict[str, Any]:
    """All of it, in the order in which it is printed; returns the last line."""
    decoder = running.model_setup.decoder
    size = disk_space.disk_needed(running.config, decoder, decoder.precision)["checkpoint"]
    free = shutil.disk_usage(folder).free
    if size * 1.02 > free:
        sys.exit(
            f"a checkpoint of {size / 1e9:.1f} GB does not fit in {folder}, where {free / 1e9:.1f} GB are free; "
            "--set train.moments=8bit --set train.master=24bit make it smaller, and so does a smaller model"
        )
    plain: dict[str, float] = {}

    def plainly(name: str, direct: bool) -> None:
        try:
            plain[name] = gbs(size, write_plainly(folder / "plain.bin", size, direct=direct))
            say(name, gbs=plain[name], bytes=size)
        except OSError as error:
            if not direct:
                raise
            say(name, error=f"no O_DIRECT here: {error.strerror}")

    plainly("plain writer", False)
    request = running.request
    prepared = (running.step(number) for number in range(request.warmup + request.steps))
    seconds = []
    for step in prepared:
        start = time.perf_counter()
        running.engine.step(step)
        seconds.append(time.perf_counter() - start)
    step_s = statistics.median(seconds[request.warmup :])
    say("steps without a checkpoint", step_s=round(step_s, 4), steps=request.steps)
    inputs = [running.step(1000 + number) for number in range(MOST_STEPS)]
    busy = save(running, folder / "step-1", iter(inputs), 1)
    stall = max(0.0, busy.steps_s - busy.steps * step_s)
    say("checkpoint beside training", gbs=gbs(busy.size, busy.seconds), stall_s=round(stall, 3), **rounded(busy))
    bench.settle_down(running.engine)
    idle = save(running, folder / "step-2", iter(()), 2)
    say("checkpoint alone", gbs=gbs(idle.size, idle.seconds), **rounded(idle))
    plainly("plain writer around the page cache", True)
    fastest = max(plain.values())
    return {
        "model": request.model,
        "card": running.run_plan.machine.gpu.name if running.run_plan.machine.gpu else "cpu",
        "moments": running.config.train.moments,
        "master": running.config.train.master,
        "bytes": busy.size,
        "plain_gbs": fastest,
        "checkpoint_gbs": gbs(busy.size, busy.seconds),
        "ratio": round(gbs(busy.size, busy.seconds) / fastest, 3),
        "ratio_alone": round(gbs(idle.size, idle.seconds) / fastest, 3),
        "wanted": WANTED,
        "step_s": round(step_s, 4),
        "stall_s": round(stall, 3),
        "expected_stall_s": round(max(0.0, busy.size / (fastest * 1e9) - step_s), 3),
    }


def rounded(saved: Saved) -> dict[str, Any]:
    """For a JSON line."""
    return {name: round(value, 3) for name, value in dataclasses.asdict(saved).items()}


def parse(words: list[str] | None = None) -> tuple[Path, BenchRequest]:
    """The folder, and what is run there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folder", type=Path, help="an empty folder on the disk that is measured; made if need be")
    given, rest = parser.parse_known_args(words)
    request = bench_request(cli.build().parse_args(["bench", *rest]))
    if given.folder.exists() and (not given.folder.is_dir() or any(given.folder.iterdir())):
        parser.error(f"{given.folder} is not an empty folder, and what is measured there is removed")
    return given.folder, request


def main(words: list[str] | None = None) -> None:
    try:
        folder, request = parse(words)
        folder.mkdir(parents=True, exist_ok=True)
        with bench.opened(request) as running:
            say("result", **measure(running, folder))
    except MegatrainError as error:
        sys.exit(f"{error}")


if __name__ == "__main__":
    main()
