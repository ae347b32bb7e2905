"""Where the checkpoints of a run are: `RUN/checkpoints/step-N`. Needs no torch."""

import itertools
import logging
import os
import re
from pathlib import Path

from megatrain.system.atomic import original_name, present, storage_error, sync_folder

log: logging.Logger = logging.getLogger("megatrain")

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


def newest_written(run: str | Path) -> Path | None:
    """The newest checkpoint of a run that was written to its end: that has a manifest, whose content is not read."""
    return next((one for one in reversed(list_checkpoints(run)) if (one / "manifest.json").is_file()), None)


def set_aside(run: str | Path, step: int) -> list[Path]:
    """Renames the checkpoints of steps after `step`, which a run that goes on there has skipped as damaged: they count
    neither as its newest nor among those it keeps, and nothing of them is lost. Logs them and returns their new places.
    Only for the process that owns the run. Raises StorageError."""
    places = []
    for later in (step_folder(run, one) for one in steps_in(run) if one > step):
        names = itertools.chain([f"skipped-{later.name}"], (f"skipped-{later.name}-{n}" for n in itertools.count(2)))
        place = next(place for name in names if not os.path.lexists(place := later.with_name(name)))
        try:
            later.rename(place)
            sync_folder(place.parent)
        except OSError as error:
            raise storage_error(error, later) from None
        log.info("%s was skipped and is now %s; remove it if you do not need it", later, place)
        places.append(place)
    return places
