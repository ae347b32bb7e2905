"""Optimizer state on disk while a card computes: the numbers of the run whose state is in host memory.

Run: python tests/gpu/check_disk.py [--device cuda|cpu] [--nvme DIR]. Clipped and immediate updates, each run whole with
its state in memory, then with the state of six of eight layers on disk, stopped half-way and resumed; the checkpoints
and losses are compared bit for bit. Prints one JSON line a check; exits 1 on a miss.
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
            facts: dict[str, Any] = {"check": f"state on disk, {mode}", "ok": False}
            try:
                started = time.perf_counter()
                Trainer(config(folder, args.device, "memory", train), display=Display("none")).fit()
                facts["memory_s"] = round(time.perf_counter() - started, 1)
                spilled = config(
                    folder,
                    args.device,
                    "disk",
                    train,
                    plan={"state_on_disk": ON_DISK},
                    memory={"nvme": {"path": str(folder)}},
                )
                started, stop = time.perf_counter(), Stop()
                Trainer(spilled, stop=stop, display=At(STOPPED, lambda stop=stop: stop.request("SIGINT"))).fit()
                result = Trainer(spilled, display=Display("none")).fit()
                facts["disk_s"] = round(time.perf_counter() - started, 1)
                assert_bit_equal(*(list_checkpoints(folder / run)[-1] for run in ("disk", "memory")))
                plan = json.loads((folder / "disk/plan.json").read_text())
                facts["state_on_disk"] = sum(unit["state"] == "disk" for unit in plan["units"])
                same = losses(folder / "disk") == losses(folder / "memory")
                on_disk = facts["state_on_disk"] == ON_DISK
                facts |= {"metrics_equal": same, "ok": same and on_disk and result.step == STEPS}
            except Exception as error:  # the other mode is still of use
                facts["error"] = f"{type(error).__name__}: {error}"[:600]
            missed |= not facts["ok"]
            print("DISK " + json.dumps(facts), flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
