"""Rates that are wrong, a plan that follows from them, and steps that show a better one: the run changes to it.

Run: python tests/gpu/check_replan.py [--device cuda|cpu]. On a card a probe is said to have found a host that updates
parameters in no time, so that everything is updated there; on the CPU, a link that carries nothing, so that weights
cross it once a step. The change is made whether or not a short run gains from it. Beside it a run that keeps its plan.
The change is made between two steps, and by another run from a checkpoint. Prints a JSON line for each, with what steps
took before and after and what was expected of both; exits 1 on a miss.
"""

import argparse
import dataclasses
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatrain.checkpoint.step_folders import list_checkpoints
from megatrain.planning import calibrate
from megatrain.planning import replan as planning
from megatrain.training import replan
from megatrain.training.progress import Display
from megatrain.training.run_dir import read_metrics
from megatrain.training.trainer import Trainer
from support.trainer import assert_bit_equal, losses

STEPS = 24
WRONG = {
    "cuda": dict.fromkeys(("adamw_gparams", "adamw_bf16_gparams", "adamw_8bit_gparams"), 1000.0),
    "cpu": {"h2d_gbs": 1e-4, "d2h_gbs": 1e-4},
}


def config(folder: Path, device: str, run: str) -> dict[str, Any]:
    """A Llama whose state and activations do not both fit on the device."""
    card = device == "cuda"
    width, seq = (2048, 1024) if card else (64, 64)
    return {
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": width,
                "intermediate_size": width * 3,
                "num_hidden_layers": 12 if card else 4,
                "num_attention_heads": 16,
                "num_key_value_heads": 4,
                "max_position_embeddings": seq,
                "tie_word_embeddings": True,
            },
            "tokenizer": {"train": "bpe", "vocab_size": 4096 if card else 512},
        },
        "data": {"train": "python:stdlib", "seq_len": seq, "cache": str(folder / "cache")},
        "train": {"steps": STEPS, "batch_size": 16, "lr": 1e-3, "deterministic": True},
        "memory": {"gpu": "10GiB" if card else "6MiB"},
        "plan": {"micro_batch": 8 if card else 4},
        "device": device,
        "output": {"dir": str(folder / run), "export": "never"},
    }


def fit(settings: dict[str, Any]) -> Any:
    return Trainer(settings, display=Display("none")).fit()


def decided(run: Path) -> dict[str, Any]:
    plan = json.loads((run / "plan.json").read_text())
    return {key: value for key, value in plan.items() if key not in ("items", "totals", "estimate")}


class Listening(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def check(device: str, folder: Path, how: str, heard: Listening) -> bool:
    """Whether a run that changes its plan `how` computes what the run in `kept` did; prints its line."""
    run = how.replace(" ", "-")
    heard.said.clear()
    result = fit(config(folder, device, run))
    changed = [message for message in heard.said if "The run changes its plan" in message]
    assert_bit_equal(*(list_checkpoints(folder / name)[-1] for name in (run, "kept")))
    same = losses(folder / run) == losses(folder / "kept")
    other = decided(folder / run) != decided(folder / "kept")
    records = read_metrics(folder / run)
    measured = [record for record in records if "median_step_s" in record]
    facts = {
        "check": f"replan {how}",
        "ok": result.step == STEPS and len(changed) == 1 and len(measured) == 2 and same and other,
        "device": device,
        "said": changed,
        "measured": [message for message in heard.said if "was expected" in message],
        "median_and_expected_s": [[record[key] for key in ("median_step_s", "expected_step_s")] for record in measured],
        "metrics_equal": same,
    }
    print("REPLAN " + json.dumps(facts), flush=True)
    return bool(facts["ok"])


def main() -> int:
    """0 when the plan has changed once in either way and nothing else differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = parser.parse_args().device
    known, faster = calibrate.cached, planning.faster_plans
    calibrate.cached = lambda *about: known(*about) | WRONG[device]  # type: ignore[assignment]
    replan.IN_PLACE = frozenset({device})  # on a card, what runs do not do by themselves yet
    replan.StepTimes._cost_s = lambda *_: 0.0  # type: ignore[method-assign,assignment]
    heard = Listening()
    logging.getLogger("megatrain").addHandler(heard)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        planning.faster_plans = lambda *_: []  # type: ignore[assignment]
        fit(config(folder, device, "kept"))
        planning.faster_plans = lambda *about: [one for one in faster(*about) if one.in_place is not None]
        found = [check(device, folder, "in place", heard)]
        planning.faster_plans = lambda *about: [dataclasses.replace(one, in_place=None) for one in faster(*about)[:1]]
        found.append(check(device, folder, "from a checkpoint", heard))
    return int(not all(found))


if __name__ == "__main__":
    sys.exit(main())
