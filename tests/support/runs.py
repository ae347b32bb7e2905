"""A run small enough for a test: two layers, a tokenizer of 300 tokens, a few dozen rows of text."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from megatrain.training.run_dir import read_metrics

MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}

WORDS = "the quick brown fox jumps over a lazy dog while seven small engines carry every layer back and forth".split()


def last_step(run: Path) -> int:
    """The last step that a run's metrics hold, which another process may be writing; 0 where there are none."""
    try:
        rows = read_metrics(run)
    except (OSError, ValueError):
        return 0
    return int(rows[-1]["step"]) if rows else 0


def write_rows(path: Path, count: int = 60) -> Path:
    """Rows of text, each another; the same for each call."""
    rows = []
    for row in range(count):
        text = " ".join(WORDS[(row * 7 + word * (row % 5 + 1)) % len(WORDS)] for word in range(12 + row % 9))
        rows.append(json.dumps({"text": f"{row}: {text}."}))
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def settings(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """A configuration as a mapping; `sections` are laid over it, key by key."""
    rows = folder / "rows.jsonl"
    if not rows.exists():
        write_rows(rows)
    base: dict[str, Any] = {
        "model": {"config": MODEL, "tokenizer": {"train": "bpe", "vocab_size": 300}},
        "data": {"train": [{"path": str(rows)}], "eval": 0.2, "seq_len": 32, "cache": str(folder / "cache")},
        "train": {"steps": 6, "batch_size": 4, "lr": 1e-2, "schedule": {"name": "cosine", "warmup": 2}},
        "eval": {"at_start": False},
        "plan": {"micro_batch": 2},
        "device": "cpu",
        "output": {"dir": str(folder / "run"), "export": "never"},
    }
    for name, section in sections.items():
        base[name] = base.get(name, {}) | section if isinstance(section, dict) else section
    return base


def course(run: Path) -> list[tuple[int, float, float]]:
    """Step, loss and norm of the gradient of each step of a run."""
    return [(row["step"], row["loss"], row["grad_norm"]) for row in read_metrics(run)]


def killed_after(step: int, asked: dict[str, Any], folder: Path) -> None:
    """A run in a process of its own, in `folder`, that is killed as soon as its metrics hold a step."""
    (folder / "config.json").write_text(json.dumps(asked))
    command = [sys.executable, "-m", "megatrain", "train", "config.json"]
    with subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        while last_step(Path(asked["output"]["dir"])) < step and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL
