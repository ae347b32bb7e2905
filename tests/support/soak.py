"""A long run with everything that interrupts one, beside a straight run of the same steps."""

import dataclasses
import gc
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatrain import _core
from megatrain.checkpoint.step_folders import step_folder
from megatrain.engine.host_heap import anonymous_bytes
from megatrain.training.progress import Display
from megatrain.training.stop import Stop
from megatrain.training.trainer import Trainer
from support.runs import settings
from support.trainer import assert_bit_equal, losses

WARM_STEPS = 40
"""Of each part of the run, in which buffers reach their sizes."""


@dataclasses.dataclass
class Soaked:
    """What a long run took."""

    parts: int
    steps: int
    mapped: int
    """Host mappings that were made after the warm-up of a part, by the core's count, without the buffer of a save."""
    warm_bytes: int
    """Most memory while the first part warmed up."""
    peak_bytes: int
    """Most memory after that."""


class _Watching(Display):
    """Pauses now and then, counts mappings and memory, and calls `act` after each step."""

    def __init__(self, rng: random.Random, soaked: Soaked, save_every: int, act: Callable[[int], None]) -> None:
        super().__init__("none")
        self._save_every = save_every
        self._rng, self._soaked, self._act = rng, soaked, act
        self._steps, self._before = 0, 0

    def step(self, record: Any, left_s: float, every: int) -> None:
        super().step(record, left_s, every)
        soaked, mapped = self._soaked, _core.mappings_made()
        self._steps += 1
        soaked.steps += 1
        after_a_save = (record.step - 1) % self._save_every == 0
        if self._steps > WARM_STEPS and not after_a_save:
            soaked.mapped += mapped - self._before
        self._before = mapped
        if soaked.steps % 10 == 0:
            held = anonymous_bytes()
            if soaked.parts == 1 and self._steps <= WARM_STEPS:
                soaked.warm_bytes = max(soaked.warm_bytes, held)
            else:
                soaked.peak_bytes = max(soaked.peak_bytes, held)
        if self._rng.random() < 0.01:
            time.sleep(0.02)
        self._act(record.step)


def soak(folder: Path, steps: int, restart_every: int) -> Soaked:
    """Trains `steps` steps of varying shapes with pauses, saves, evaluations and about `steps / restart_every`
    restarts, and again without any of them. Raises AssertionError where a loss, a norm or a bit differs."""
    common: dict[str, Any] = {"data": {"packing": False}, "train": {"steps": steps, "batch_size": 4}}
    save_every = max(2, restart_every // 3)
    straight = settings(folder, output={"dir": str(folder / "straight")}, **_merged(folder, common))
    disturbed = settings(
        folder,
        output={"save_every": save_every, "keep": 2},
        eval={"every": max(3, restart_every // 4), "at_start": True},
        **_merged(folder, common),
    )
    rng, soaked = random.Random(0), Soaked(0, 0, 0, 0, 0)
    while True:
        soaked.parts += 1
        stop = Stop()
        due = rng.randint(restart_every // 2, restart_every * 3 // 2)
        first = soaked.steps

        def act(_: int, stop: Stop = stop, last: int = first + due) -> None:
            if soaked.steps >= last:
                stop.request("a restart")

        result = Trainer(disturbed, stop=stop, display=_Watching(rng, soaked, save_every, act)).fit()
        gc.collect()
        if not result.stopped:
            break
    Trainer(straight, display=Display("none")).fit()
    assert losses(folder / "run") == losses(folder / "straight")
    assert_bit_equal(step_folder(folder / "run", steps), step_folder(folder / "straight", steps))
    return soaked


def _merged(folder: Path, common: dict[str, Any]) -> dict[str, Any]:
    """Sections of `common` laid over those of `settings`, key by key."""
    base = settings(folder)
    return {name: base[name] | section for name, section in common.items()}


def problems(soaked: Soaked) -> list[str]:
    """What a long run must not show."""
    grown = soaked.peak_bytes - soaked.warm_bytes
    found = []
    if soaked.mapped:
        found.append(f"{soaked.mapped} host mappings were made by warm steps")
    if grown > 16 << 20:
        found.append(f"memory grew by {grown / 2**20:.1f} MiB over the warm peak of {soaked.warm_bytes / 2**20:.0f}")
    return found
