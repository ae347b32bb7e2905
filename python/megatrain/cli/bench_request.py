"""What `megatrain bench` times, and its refusals. Loads no torch."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from megatrain.config import Config, ModelConfig, paths, yaml12
from megatrain.errors import ConfigError
from megatrain.models.presets import SHAPES
from megatrain.training.run_dir import CONFIG, is_run


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BenchRequest:
    """What is timed."""

    model: str
    """A public shape, a `config.json` or its folder, or a configuration or a run, for its model section."""
    batch: int
    """Rows per step."""
    seq: int
    """Tokens per row."""
    steps: int = 10
    """Timed steps."""
    warmup: int = 3
    """Untimed steps before those. The first compiles; in the third, layers are captured as CUDA graphs where the plan
    has that, which can take seconds."""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Sections of a configuration: train, memory, plan, device."""
    trace: Path | None = None
    """The file for a trace of one more step."""


_NOT_TIMED = {
    "steps": "--steps says how many steps are",
    "epochs": "--steps says how many steps are",
    "batch_size": "--batch gives the rows of a step",
    "batch_tokens": "--batch and --seq give the tokens of a step",
    "schedule": "all steps have the same learning rate",
    "max_nonfinite": "a bench goes on whatever the gradients are",
    "check_every": "no step is computed twice",
}
"""Keys of `train` that a bench does not read, and why."""


def bench_request(args: argparse.Namespace) -> BenchRequest:
    """The request that the arguments of `megatrain bench` describe. Raises ConfigError."""
    plan: dict[str, Any] = {"keep": args.keep, "slots": args.slots, "micro_batch": args.micro_batch}
    if args.trace:
        paths.check_writable(Path(args.trace), "--trace")
    settings: dict[str, Any] = {
        "train": {
            "update": args.update,
            "max_grad_norm": args.max_grad_norm,
            "precision": args.precision,
            "matmul": args.matmul,
            "lr": args.lr,
            "seed": args.seed,
        },
        "memory": {"gpu": args.gpu_memory or "auto", "host": args.host_memory or "auto"},
        "plan": {key: value for key, value in plan.items() if value is not None},
        "device": args.device,
    }
    for word in args.assignments:
        key, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"--set {word!r} is not KEY=VALUE, such as loss_chunk=4096 or train.moments=8bit")
        section, dot, name = key.rpartition(".")
        if dot and section not in ("train", "memory", "plan"):
            raise ConfigError(f"--set {key}: a bench has sections train, memory and plan, not {section!r}")
        if section == "train" and name in _NOT_TIMED:
            raise ConfigError(f"--set {key} would change nothing in what is timed: {_NOT_TIMED[name]}; leave it out")
        settings[section or "plan"][name] = yaml12.load(text, f"--set {key}")
    return BenchRequest(
        model=args.model,
        batch=args.batch,
        seq=args.seq,
        steps=args.steps,
        warmup=args.warmup,
        settings=settings,
        trace=Path(args.trace) if args.trace else None,
    )


def configuration(request: BenchRequest) -> Config:
    """The configuration of a run with the request's steps, on random weights. Raises ConfigError."""
    if request.steps < 1 or request.warmup < 0:
        raise ConfigError(f"--steps is {request.steps} and --warmup {request.warmup}; time at least one step")
    sections = {key: dict(value) if isinstance(value, dict) else value for key, value in request.settings.items()}
    train = sections.setdefault("train", {})
    train |= {"batch_size": request.batch, "steps": request.steps + request.warmup}
    return Config.from_dict({"model": _model(request.model), "data": {"seq_len": request.seq}, **sections})


def _model(name: str) -> dict[str, Any]:
    """The model section for `--model`, whose weights are drawn at random."""
    path = Path(name)
    if not path.exists() and name.lower() in SHAPES:
        return {"config": SHAPES[name.lower()].config()}
    if path.is_dir() and is_run(path):
        path = path / CONFIG
    if path.suffix in (".yaml", ".yml"):
        model: dict[str, Any] = Config.load(path).to_dict()["model"]
        return model | {"init": "random"}
    return {"config": _read(path)}


def _read(path: Path) -> dict[str, Any]:
    """The keys of a `config.json`."""
    file = path / "config.json" if path.is_dir() else path
    try:
        keys: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigError(
            f"--model is {str(path)!r}: neither a public shape ({', '.join(SHAPES)}), nor a readable config.json, "
            "nor a configuration (CONFIG.yaml) or run, whose model section it would take"
        ) from None
    ModelConfig(config=keys)
    return keys
