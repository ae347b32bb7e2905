"""A run that is killed and goes on: the same metrics and the same checkpoint, to the byte, as one that was left alone.

Run: python tests/gpu/check_resume.py [--device cuda|cpu] [--kills 3]. `megatrain train` in processes of their own, with
state on the device, on the host, and on the host but visiting the device; each process after a kill takes another
placement. Prints one JSON line; exits 1 on a miss.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatrain.checkpoint.step_folders import list_checkpoints
from megatrain.training.run_dir import read_metrics
from support.runs import last_step

STEPS, SAVE_EVERY = 60, 5
PLACEMENTS: tuple[dict[str, Any], ...] = (
    {"state_on_device": 3, "updates_on_device": 2, "slots": 3},
    {"state_on_device": 0, "slots": 2},
    {"state_on_device": 1, "updates_on_device": 4, "slots": 4},
    {"state_on_device": 10},
)


def config(folder: Path, device: str, run: str, placement: int) -> Path:
    """A file that trains a Llama of 8 layers, deterministically, and saves often."""
    width = 1024 if device == "cuda" else 64
    settings = {
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": width,
                "intermediate_size": width * 11 // 4,
                "num_hidden_layers": 8,
                "num_attention_heads": 16,
                "num_key_value_heads": 4,
                "tie_word_embeddings": True,
            },
            "tokenizer": {"train": "bpe", "vocab_size": 4096},
        },
        "data": {"train": "python:stdlib", "eval": 0.05, "seq_len": 256, "cache": str(folder / "cache")},
        "train": {"steps": STEPS, "batch_tokens": 4096, "lr": 1e-3, "deterministic": True},
        "eval": {"at_start": False, "max_batches": 1},
        "memory": {"gpu": "8GiB", "host": "12GiB"},
        "plan": {"micro_batch": 8, **PLACEMENTS[placement % len(PLACEMENTS)]},
        "device": device,
        "output": {"dir": str(folder / run), "save_every": SAVE_EVERY, "log_every": 1, "export": "never"},
    }
    if device == "cpu":
        settings["plan"] = {"micro_batch": 8, "slots": 2 + placement}
    path = folder / f"{run}-{placement}.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def say(began: float, words: str) -> None:
    """How far this check is, on standard error."""
    print(f"{time.perf_counter() - began:6.1f} s: {words}", file=sys.stderr, flush=True)


def start(path: Path) -> subprocess.Popen[str]:
    """`megatrain train` with both outputs in a file beside the configuration."""
    with path.with_suffix(".log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "megatrain", "train", str(path)], stdout=log, stderr=subprocess.STDOUT, text=True
        )


def finish(path: Path) -> None:
    """Runs it to its end."""
    if start(path).wait() != 0:
        raise SystemExit(path.with_suffix(".log").read_text()[-3000:])


def kill_after(path: Path, run: Path, step: int, seconds: float) -> int:
    """Kills it `seconds` after it has finished `step`; the step it had come to."""
    process = start(path)
    while last_step(run) < step:
        if process.poll() is not None:
            raise SystemExit(path.with_suffix(".log").read_text()[-3000:])
        time.sleep(0.002)
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return last_step(run)


def numbers(run: Path) -> list[tuple[Any, ...]]:
    """Of each step what does not depend on time."""
    return [(row["step"], row.get("loss"), row.get("grad_norm")) for row in read_metrics(run)]


def sums(folder: Path) -> dict[str, str]:
    """A digest of every file of a checkpoint. Of state.json what is neither a time nor of the configuration, in which
    folders and placements differ; the manifest holds sums of the others."""
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.name not in ("manifest.json", "state.json")
    }
    state = json.loads((folder / "state.json").read_text())
    run = state["state"]["run"]
    del run["config"], run["position"]["seconds"]
    return found | {"state.json": json.dumps(state, sort_keys=True)}


def main() -> int:
    """0 when nothing differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the moments at which it is killed")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    os.environ["HF_HUB_OFFLINE"] = "1"
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        finish(config(folder, arguments.device, "alone", 0))
        say(began, "trained without a kill")
        alone, killed = folder / "alone", folder / "killed"
        at = []
        for kill in range(arguments.kills):
            after = (kill + 1) * STEPS // (arguments.kills + 1)
            path = config(folder, arguments.device, "killed", kill)
            at.append(kill_after(path, killed, after, draw.uniform(0.0, 0.3)))
            say(began, f"killed at step {at[-1]}")
        finish(config(folder, arguments.device, "killed", arguments.kills))
        ours, theirs = (list_checkpoints(run)[-1] for run in (killed, alone))
        found, expected = sums(ours), sums(theirs)
        differing = sorted(n for n in found.keys() | expected.keys() if found.get(n) != expected.get(n))
        same = numbers(killed) == numbers(alone)
        gib = sum(path.stat().st_size for path in theirs.iterdir()) / 2**30
        facts = {
            "check": "resume",
            "ok": same and not differing and ours.name == theirs.name,
            "device": arguments.device,
            "killed_at_steps": at,
            "of_steps": STEPS,
            "metrics_equal": same,
            "files_that_differ": differing,
            "checkpoint_gib": round(gib, 2),
        }
    print("RESUME " + json.dumps(facts), flush=True)
    return 0 if facts["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
