"""Optimizer state, weights and layer inputs on disk while a card computes: the numbers of the run that has them in
memory.

Run: python tests/gpu/check_disk.py [--device cuda|cpu] [--nvme DIR]. Clipped and immediate updates, each run whole with
everything in memory, then with the state of six of eight layers on disk, again with the weights of five of these there
too, then with the inputs of six recomputed layers there, and with all of that; each is stopped half-way and resumed.
The checkpoints and losses are compared bit for bit. Prints one JSON line a check; exits 1 on a miss.
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

STEPS, STOPPED = 8, 4
CASES: dict[str, tuple[int, int, int]] = {
    "state": (6, 0, 0),
    "state-and-weights": (6, 5, 0),
    "inputs": (0, 0, 6),
    "everything": (6, 5, 6),
}
"""Units with state on disk, with weights there too, and with their input there."""
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


def compared(folder: Path, device: str, train: dict[str, Any], case: str) -> dict[str, Any]:
    """A run in memory, which is made once, and one on disk."""
    facts: dict[str, Any] = {}
    if not (folder / "memory").exists():
        started = time.perf_counter()
        Trainer(config(folder, device, "memory", train), display=Display("none")).fit()
        facts["memory_s"] = round(time.perf_counter() - started, 1)
    run, wanted = f"disk-{case}", CASES[case]
    plan: dict[str, Any] = dict(zip(("state_on_disk", "weights_on_disk", "inputs_on_disk"), wanted, strict=True))
    if plan["inputs_on_disk"]:
        plan |= {"activation": "recompute", "group": 1}
    spilled = config(folder, device, run, train, plan=plan, memory={"nvme": {"path": str(folder)}})
    started, stop = time.perf_counter(), Stop()
    Trainer(spilled, stop=stop, display=At(STOPPED, lambda stop=stop: stop.request("SIGINT"))).fit()
    result = Trainer(spilled, display=Display("none")).fit()
    facts["disk_s"] = round(time.perf_counter() - started, 1)
    assert_bit_equal(*(list_checkpoints(folder / one)[-1] for one in (run, "memory")))
    units = json.loads((folder / run / "plan.json").read_text())["units"]
    counts = (
        sum(unit["state"] == "disk" for unit in units),
        sum(unit.get("weights_on_disk", False) for unit in units),
        sum(unit["input"] == "disk" for unit in units),
    )
    same = losses(folder / run) == losses(folder / "memory")
    ok = same and counts == wanted and result.step == STEPS
    return facts | {"on_disk": counts, "metrics_equal": same, "ok": ok}


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
            for case in CASES:
                facts = {"check": f"{case} on disk, {mode}", "ok": False}
                try:
                    facts |= compared(folder, args.device, train, case)
                except Exception as error:  # the others are still of use
                    facts["error"] = f"{type(error).__name__}: {error}"[:600]
                missed |= not facts["ok"]
                print("DISK " + json.dumps(facts), flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
