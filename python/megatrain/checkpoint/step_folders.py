"""Where the checkpoints of a run are: `RUN/checkpoints/step-N`. Needs no torch."""

import re
from pathlib import Path

from megatrain.system.atomic import original_name, present

CHECKPOINTS = "checkpoints"

_STEP = re.compile(r"step-(\d{1,18})")


def step_folder(run: str | Path, step: int) -> Path:
    """The folder of the checkpoint that a run writes after `step` steps."""
    return Path(run) / CHECKPOINTS / f"step-{step}"


def is_step_folder(folder: Path) -> bool:
    """Whether a folder has the name of a run's checkpoint."""
    return _STEP.fullmatch(folder.name) is not None


def steps_in(run: str | Path) -> list[int]:
    """Steps that have a checkpoint folder in a run, ascending; `Checkpoint.open` tells whether one is complete.
    Includes a folder that a killed save had renamed to make room."""
    parent = Path(run) / CHECKPOINTS
    if not parent.is_dir():
        return []
    names = [original_name(path.name) or path.name for path in parent.iterdir() if path.is_dir()]
    return sorted({int(match[1]) for name in names if (match := _STEP.fullmatch(name))})


def list_checkpoints(run: str | Path) -> list[Path]:
    """The folders of `steps_in`, each where it is now (see `atomic.present`)."""
    return [present(step_folder(run, step)) for step in steps_in(run)]
