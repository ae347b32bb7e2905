"""What the peers' scripts share: the shape, the tokens, the clock and the line that is printed. Needs no package, so
that a peer runs in an environment of its own."""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn


def arguments(description: str | None, *, steps: int = 10, warmup: int = 2) -> argparse.ArgumentParser:
    """The arguments that every peer has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-3b", help="a shape of megatrain's, or a folder with a config.json")
    parser.add_argument("--batch", type=int, default=8, help="rows per step")
    parser.add_argument("--seq", type=int, default=1024, help="tokens per row")
    parser.add_argument("--steps", type=int, default=steps, help="timed steps (default %(default)s)")
    parser.add_argument("--warmup", type=int, default=warmup, help="untimed steps before those (default %(default)s)")
    return parser


def model_config(name: str) -> dict[str, Any]:
    """Keys of the model's config.json."""
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        keys: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return keys
    try:
        from megatrain.models.presets import SHAPES
    except ImportError as error:
        refuse(f"--model {name} is not a config.json, and megatrain, which has names for shapes, is not here: {error}")
    if name not in SHAPES:
        refuse(f"--model {name}: neither a config.json nor one of {', '.join(SHAPES)}")
    return SHAPES[name].config()


def timed(step: Callable[[int], object], wait: Callable[[], object], steps: int, warmup: int) -> float:
    """Seconds a step: `steps` as one interval after `warmup`, with what they leave running awaited inside it."""
    for number in range(warmup):
        step(number)
    wait()
    start = time.perf_counter()
    for number in range(warmup, warmup + steps):
        step(number)
    wait()
    return (time.perf_counter() - start) / steps


def report(peer: str, given: argparse.Namespace, seconds: float, **more: Any) -> None:
    """Prints the JSON line."""
    found = {
        "peer": peer,
        "model": Path(given.model).name,
        "batch": given.batch,
        "seq": given.seq,
        "steps": given.steps,
        "step_s": round(seconds, 5),
        "tokens_s": round(given.batch * given.seq / seconds, 1),
    }
    print(json.dumps(found | more), flush=True)


def refuse(why: str) -> NoReturn:
    """Ends with the reason why this peer cannot run, as a JSON line."""
    print(json.dumps({"error": why}), flush=True)
    sys.exit(1)


def device_used_gib() -> float | None:
    """What the card's first device has in use, all processes together; None without nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        used = subprocess.run(query, check=True, capture_output=True, text=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None
    return round(int(used) / 1024, 2)
