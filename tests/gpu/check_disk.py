"""Optimizer state and weights on disk while a card computes: the numbers of the run that has them in host memory.

Run: python tests/gpu/check_disk.py [--device cuda|cpu] [--nvme DIR]. Clipped and immediate updates, each run whole with
everything in memory, then with the state of six of eight layers on disk, and again with the weights of five of these
there too; both are stopped half-way and resumed. The checkpoints and losses are compared bit for bit. Prints one JSON
line a check; exits 1 on a miss.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatrain.checkpoint.step_folders import list_checkpoints
from megatrain.training.progress import Display
from megatrain.training.stop import Stop
from megatrain.training.trainer import Trainer
from support.trainer import At, assert_bit_equal, losses

STEPS, STOPPED, ON_DISK = 8, 4, 6
WEIGHTS = (0, 5)
MODES: dict[str, dict[str, Any]] = {
    "just_in_time": {"max_grad_norm": 1.0},
    "immediate": {"max_grad_norm": None, "update": "immediate"},
}


def config(folder: Path, device: str, run: str, train: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A Llama of 8 layers, all state off the card."""
    width, seq = (1024, 1024) if device == "cuda" else (64, 64)
    plan = {"micro_batch": 4, "state_on_device": 0, "updates_on_device": 0, **more.pop("plan", {})}
    return {
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": width,
                "intermediate_size": width * 3,
                "num_hidden_layers": 8,
                "num_attention_heads": 16,
                "num_key_value_heads": 4,
                "max_position_embeddings": seq,
            },
            "tokenizer": {"train": "bpe", "vocab_size": 4096},
        },
        "data": {"train": "python:stdlib", "seq_len": seq, "cache": str(folder / "cache")},
        "train": {"steps": STEPS, "batch_size": 8, "lr": 1e-3, "deterministic": True, **train},
        "plan": {"compile": False if device == "cuda" else None, **plan},
        "device": device,
        "output": {"dir": str(folder / run), "export": "never"},
        **more,
    }


def compared(folder: Path, device: str, train: dict[str, Any], weights: int) -> dict[str, Any]:
    """A run in memory, which is made once, and one on disk."""
    facts: dict[str, Any] = {}
    if not (folder / "memory").exists():
        started = time.perf_counter()
        Trainer(config(folder, device, "memory", train), display=Display("none")).fit()
        facts["memory_s"] = round(time.perf_counter() - started, 1)
    run = f"disk-{weights}"
    plan = {"state_on_disk": ON_DISK, "weights_on_disk": weights}
    spilled = config(folder, device, run, train, plan=plan, memory={"nvme": {"path": str(folder)}})
    started, stop = time.perf_counter(), Stop()
    Trainer(spilled, stop=stop, display=At(STOPPED, lambda stop=stop: stop.request("SIGINT"))).fit()
    result = Trainer(spilled, display=Display("none")).fit()
    facts["disk_s"] = round(time.perf_counter() - started, 1)
    assert_bit_equal(*(list_checkpoints(folder / one)[-1] for one in (run, "memory")))
    units = json.loads((folder / run / "plan.json").read_text())["units"]
    counts = sum(unit["state"] == "disk" for unit in units), sum(unit.get("weights_on_disk", False) for unit in units)
    same = losses(folder / run) == losses(folder / "memory")
    ok = same and counts == (ON_DISK, weights) and result.step == STEPS
    return facts | {"state_on_disk": counts[0], "weights_on_disk": counts[1], "metrics_equal": same, "ok": ok}


def main() -> int:
    """0 when nothing differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--nvme", type=Path, help="a folder on the drive (default: a temporary one)")
    args = parser.parse_args()
    missed = False
    for mode, train in MODES.items():
        with tempfile.TemporaryDirectory(dir=args.nvme) as name:
            folder = Path(name)
            for weights in WEIGHTS:
                facts = {"check": f"state on disk, weights of {weights} units there, {mode}", "ok": False}
                try:
                    facts |= compared(folder, args.device, train, weights)
                except Exception as error:  # the others are still of use
                    facts["error"] = f"{type(error).__name__}: {error}"[:600]
                missed |= not facts["ok"]
                print("DISK " + json.dumps(facts), flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
