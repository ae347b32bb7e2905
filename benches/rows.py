"""The rows of `h100.py`: what of ours is timed, beside which peers, and which ratio is wanted."""

import dataclasses
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PEERS = Path(__file__).parent / "peers"
QUICKSTART = ROOT / "examples" / "quickstart.yaml"

CLIPPED = ("--max-grad-norm", "1.0")
IMMEDIATE = ("--update", "immediate")
ON_HOST = ("--set", "state_on_device=0")

MATMUL = "matmul"
"""In `Row.wanted`: model TFLOP/s as a share of the rate of a large matrix product."""
WHOLE_CARD = "whole-card"
"""A peer: ours, without the row's memory budget."""
GIVEN_PLAN = "given-plan"
"""A peer: ours, with the plan keys of `--against`."""
SCRIPTS = {
    "llmq": "llmq.py",
    "roundpipe": "round_pipe.py",
    "deepspeed": "zero3.py",
    "resident": "resident.py",
    "resident-checkpoint": "resident.py",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One comparison."""

    what: str
    model: str
    """A shape of `megatrain.models.presets`, or `quickstart`: the model of examples/quickstart.yaml."""
    batch: int
    """Rows per step."""
    words: tuple[str, ...]
    """Further arguments of `megatrain bench`. No plan key, except where a row is about state on the host."""
    peers: tuple[str, ...] = ()
    wanted: dict[str, float] = dataclasses.field(default_factory=dict)
    """By peer, or `MATMUL`: our speed over theirs."""
    llmq: tuple[str, ...] = ()
    """How LLMQ divides the step: its micro-batch in rows, and what it recomputes or offloads."""
    memory: str | None = None
    """The card's memory that ours may use; None: all of it, or what `--gpu-memory` says."""
    seq: int = 1024
    steps: int = 8
    warmup: int = 3
    """In the last of three, layers are captured as CUDA graphs, where the plan has that."""
    seconds: int = 150
    """Most that one measurement of ours may take, start and compilation included."""
    peer_seconds: int = 90

    def ours(self, model: str, memory: str | None, device: str, plan: tuple[str, ...] = ()) -> list[str]:
        """Arguments of `megatrain`. `model` is the shape's name or a path; `plan` holds KEY=VALUE words."""
        words = ["bench", "--model", model, "--batch", str(self.batch), "--seq", str(self.seq)]
        words += ["--steps", str(self.steps), "--warmup", str(self.warmup), "--device", device, *self.words]
        words += ["--gpu-memory", memory] if memory and device != "cpu" else []
        for key in plan:
            words += ["--set", key]
        return words

    def peer(self, name: str, model: str) -> list[str]:
        """The script of a peer and its arguments; `model` is the path of a folder with a config.json."""
        words = [str(PEERS / SCRIPTS[name]), "--model", model, "--seq", str(self.seq)]
        # a step of the resident model with recompute is as large as fits beside its fp32 state
        batch = min(self.batch, 16) if name == "resident-checkpoint" else self.batch
        words += ["--batch", str(batch), "--steps", str(self.steps)]
        if name == "resident-checkpoint":
            words.append("--checkpoint")
        if name == "llmq":
            words += ["--warmup", str(min(2, self.warmup)), *self.llmq]
        if name == "roundpipe":
            words += ["--micro-batches", str(max(2, self.batch // 8))]
        return words


LLMQ_3B = ("--micro-batch", "8")
LLMQ_7B = ("--micro-batch", "4", "--chunks", "2", "--attention-chunks", "2")
LLMQ_14B = ("--micro-batch", "8", "--offload", "--recompute", "ffn", "--chunks", "2", "--attention-chunks", "2")
"""Those of 7B and 14B are of its own tables for an H100."""
SMALL: dict[str, Any] = {"memory": "12GiB", "peers": ("deepspeed", "roundpipe"), "peer_seconds": 200}


def _3b(tokens: str, batch: int, **keys: Any) -> Row:
    return Row(what=f"3B, {tokens} tokens a step", model="qwen2.5-3b", batch=batch, **keys)


def _7b(tokens: str, batch: int, **keys: Any) -> Row:
    return Row(
        what=f"7B, {tokens} tokens a step",
        model="qwen2.5-7b",
        batch=batch,
        **{"llmq": LLMQ_7B, "seconds": 190} | keys,
    )


ROWS: dict[str, Row] = {
    "3b-32k": _3b(
        "32k", 32, words=CLIPPED, llmq=LLMQ_3B, peers=("llmq", "resident-checkpoint"), wanted={"llmq": 0.98}
    ),
    "3b-128k": _3b(
        "128k", 128, words=CLIPPED, llmq=LLMQ_3B, peers=("llmq",), wanted={"llmq": 0.98}, seconds=170
    ),
    "3b-8k": _3b("8k", 8, words=CLIPPED, llmq=LLMQ_3B, peers=("resident", "llmq"), wanted={"resident": 1.30}, steps=16),
    "7b-512k": _7b(
        "512k", 512, words=CLIPPED, peers=("llmq",), wanted={"llmq": 0.95}, steps=2, warmup=1, seconds=290,
        peer_seconds=180,
    ),
    "7b-64k": _7b("64k", 64, words=CLIPPED, peers=("llmq",), wanted={"llmq": 0.86}),
    "7b-64k-immediate": _7b("64k", 64, words=IMMEDIATE, peers=("llmq",), wanted={"llmq": 0.90}),
    "7b-16k": _7b("16k", 16, words=CLIPPED, peers=("llmq",), wanted={MATMUL: 0.62}),
    "7b-16k-immediate": _7b("16k", 16, words=IMMEDIATE, peers=("llmq",), wanted={MATMUL: 0.70}),
    "3b-8k-12g-immediate": _3b("8k", 8, words=(*ON_HOST, *IMMEDIATE), wanted={"deepspeed": 4.0}, **SMALL),
    "3b-8k-12g": _3b("8k", 8, words=(*ON_HOST, *CLIPPED), wanted={"deepspeed": 3.1}, **SMALL),
    "3b-32k-12g-immediate": _3b(
        "32k", 32, words=(*ON_HOST, *IMMEDIATE), memory="12GiB", peers=("resident-checkpoint", "roundpipe"),
        wanted={"resident-checkpoint": 0.98}, peer_seconds=200,
    ),
    "3b-128k-12g": _3b(
        "128k", 128, words=(*ON_HOST, *CLIPPED), memory="12GiB", peers=("resident-checkpoint",),
        wanted={"resident-checkpoint": 0.98}, seconds=180,
    ),
    "7b-64k-24g": _7b(
        "64k", 64, words=CLIPPED, memory="24GiB", peers=(WHOLE_CARD, "roundpipe"), wanted={WHOLE_CARD: 0.92}
    ),
    "14b-64k": Row(
        what="14B, 64k tokens a step, 256 GiB of host memory", model="qwen2.5-14b", batch=64, words=CLIPPED,
        llmq=LLMQ_14B, peers=("llmq", "roundpipe"), wanted={"llmq": 1.0, GIVEN_PLAN: 1.12}, warmup=2, seconds=340,
        peer_seconds=180,
    ),
    "quickstart": Row(
        what="the quick start's model, 8 x 128 tokens", model="quickstart", batch=8, seq=128, words=CLIPPED,
        peers=("resident",), wanted={"resident": 1.5}, steps=100, warmup=20, seconds=90,
    ),
    "0.5b-2rows": Row(
        what="0.5B, 2k tokens a step", model="qwen2.5-0.5b", batch=2, words=CLIPPED, llmq=("--micro-batch", "2"),
        peers=("resident", "llmq"), wanted={"resident": 2.0}, steps=40, warmup=10, seconds=90,
    ),
    "7b-memory": _7b("8k", 8, words=(*ON_HOST, *CLIPPED), steps=2, warmup=2),
    "7b-memory-immediate": _7b(
        "8k", 8, words=(*ON_HOST, "--set", "slabs=4", *IMMEDIATE), steps=2, warmup=2
    ),
    "tiny": Row(
        what="a check of this script, without a card too", model="tiny", batch=4, seq=32, words=CLIPPED, steps=3,
        warmup=1,
    ),
}  # fmt: skip
PARTS: dict[str, list[str]] = {
    "cpu-adamw": ["benches/peers/cpu_adamw.py"],
    "loss": ["tests/gpu/check_loss.py"],
}
"""What is measured by a script of its own: the host's optimizer over 1e9 parameters, and the loss."""
LEFT_OUT = ("tiny", "14b-64k")
"""Rows that run only when they are named: the first shows nothing, the second needs a larger host."""


def select(only: str) -> list[str]:
    """Names of rows and parts in the order given; all but LEFT_OUT for an empty string. Raises ValueError naming those
    that do not exist."""
    names = [name.strip() for name in only.split(",") if name.strip()]
    unknown = [name for name in names if name not in ROWS and name not in PARTS]
    if unknown:
        raise ValueError(f"no row {', '.join(unknown)}; there are {', '.join((*ROWS, *PARTS))}")
    return names or [name for name in (*ROWS, *PARTS) if name not in LEFT_OUT]


def model_config(name: str) -> dict[str, Any]:
    """Keys of the config.json of a row's model."""
    if name == "quickstart":
        from megatrain.config import yaml12

        section = yaml12.load(QUICKSTART.read_text(encoding="utf-8"), str(QUICKSTART))["model"]
        return section["config"] | {"vocab_size": section["tokenizer"]["vocab_size"]}
    from megatrain.models.presets import SHAPES

    return SHAPES[name].config()


def write_model(name: str, folder: Path) -> Path:
    """A folder with the config.json of a row's model, which every peer reads."""
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(model_config(name)), encoding="utf-8")
    return place
