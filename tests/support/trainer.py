"""Runs of the trainer in tests: started, cut off at a step, and compared bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megatrain.training.progress import Display
from megatrain.training.run_dir import read_metrics
from megatrain.training.stop import Stop
from megatrain.training.trainer import Result, Trainer


class At(Display):
    """Calls `act` when step `step` has finished, or a held-out batch of step `step` is about to be read."""

    def __init__(self, step: int, act: Callable[[], Any]) -> None:
        super().__init__("none")
        self.when, self.act = step, act

    def step(self, record: Any, left_s: float, every: int) -> None:
        super().step(record, left_s, every)
        if record.step == self.when:
            self.act()


def fit(config: dict[str, Any], **more: Any) -> Result:
    return Trainer(config, **more).fit()


def planes(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, by plane and name."""
    return {
        f"{path.name}/{name}": tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def assert_bit_equal(left: Path, right: Path) -> None:
    ours, theirs = planes(left), planes(right)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def losses(run: Path) -> list[Any]:
    return [(record["step"], record["loss"], record["grad_norm"], record["rows"]) for record in read_metrics(run)]


def stopped_after_two_steps(config: dict[str, Any]) -> None:
    stop = Stop()
    fit(config, stop=stop, display=At(2, lambda: stop.request("SIGINT")))
