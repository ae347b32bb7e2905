"""A card whose memory does not hold what was planned: the run says so, plans again, and computes the same numbers.

Run: python tests/gpu/check_memory.py [--device cuda|cpu]. From step 3 on, torch may have no more memory than half-way
between what it holds when activations are recomputed and when they are kept, so that the plan that keeps them runs out
of memory; on the CPU, where torch has
no such limit, a layer that keeps its activations raises the error. Every fourth step runs twice and is compared bit for
bit (`train.check_every`). Beside it a run that was left alone. Prints one JSON line; exits 1 on a miss.
"""

import argparse
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatrain.checkpoint.step_folders import list_checkpoints
from megatrain.engine.step import Pass
from megatrain.training.progress import Display
from megatrain.training.trainer import Trainer
from support.trainer import assert_bit_equal, losses

STEPS, LIMITED = 8, 3


def config(folder: Path, device: str, run: str, **plan: Any) -> dict[str, Any]:
    """A Llama of 8 layers whose activations take most of its memory."""
    width, seq = (1024, 2048) if device == "cuda" else (64, 64)
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
                "tie_word_embeddings": True,
            },
            "tokenizer": {"train": "bpe", "vocab_size": 4096},
        },
        "data": {"train": "python:stdlib", "seq_len": seq, "cache": str(folder / "cache")},
        "train": {"steps": STEPS, "batch_size": 16, "lr": 1e-3, "deterministic": True, "check_every": 4},
        "plan": {"micro_batch": 8, "compile": False if device == "cuda" else None, "graphs": False, **plan},
        "device": device,
        "output": {"dir": str(folder / run), "export": "never"},
    }


def fit(settings: dict[str, Any]) -> Any:
    return Trainer(settings, display=Display("none")).fit()


def held_at_most() -> int:
    """Bytes that torch has held since this was last asked."""
    held = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return held


def limit(device: str, held: int) -> None:
    """From step `LIMITED` on, memory does not suffice for kept activations."""
    forward = Pass._forward

    def limited(self: Pass, op: Any) -> None:
        begun = self._training and self._step + 1 >= LIMITED
        if begun and device == "cuda":
            torch.cuda.set_per_process_memory_fraction(held / torch.cuda.get_device_properties(0).total_memory)
        forward(self, op)
        if begun and device == "cpu" and op.activation == "keep":
            raise torch.OutOfMemoryError("Tried to allocate 64.00 KiB.")

    Pass._forward = limited  # type: ignore[method-assign]


def main() -> int:
    """0 when the run has gone on and nothing differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = parser.parse_args().device
    said: list[str] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    with tempfile.TemporaryDirectory() as name:
        folder, held = Path(name), 0
        alone = config(folder, device, "alone", activation="recompute")
        fit(alone)
        if device == "cuda":
            held = held_at_most()
            fit(config(folder, device, "kept", activation="keep"))
            held = (held + held_at_most()) // 2
        limit(device, held)
        logging.getLogger("megatrain").addHandler(Listening())
        result = fit(config(folder, device, "limited"))
        again = [message for message in said if "Planning again, once" in message]
        checked = [message for message in said if "agree bit for bit" in message]
        assert_bit_equal(*(list_checkpoints(folder / run)[-1] for run in ("limited", "alone")))
        same = losses(folder / "limited") == losses(folder / "alone")
        plan = json.loads((folder / "limited/plan.json").read_text())
        facts = {
            "check": "memory",
            "ok": result.step == STEPS and len(again) == 1 and len(checked) == 2 and same,
            "device": device,
            "limit_gib": round(held / 2**30, 2),
            "said": again,
            "checked_steps": len(checked),
            "corrected": plan.get("corrected"),
            "metrics_equal": same,
        }
    print("MEMORY " + json.dumps(facts), flush=True)
    return 0 if facts["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
