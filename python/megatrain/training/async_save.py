"""When the checkpoints of a run begin and end: each is written beneath the steps that follow it."""

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from megatrain.config import Duration

if TYPE_CHECKING:
    from megatrain.checkpoint.checkpoint import PendingCheckpoint
    from megatrain.config.schema import OutputConfig
    from megatrain.engine.engine import Engine
    from megatrain.training.run_dir import RunFolder

log = logging.getLogger("megatrain")

_LOOK_S = 0.05


class CheckpointWriter:
    """The checkpoints of one run, of which one at most is under way."""

    def __init__(self, settings: "OutputConfig", folder: "RunFolder", step: int) -> None:
        self._settings, self._folder = settings, folder
        self.running: PendingCheckpoint | None = None
        """The one that is being written."""
        self.saved_step = step if folder.steps() else -1
        """The step of the newest one that is complete."""
        self._begun_at = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Whether `output.save_every` asks for one after this step."""
        every = self._settings.save_every
        if isinstance(every, Duration):
            return self.running is None and time.monotonic() - self._begun_at >= every.seconds
        return every is not None and step % every == 0

    def has(self, step: int) -> bool:
        """Whether the checkpoint of this step is complete, or will be."""
        return step == (self.saved_step if self.running is None else self.running.step)

    def begin(self, engine: "Engine", state: dict[str, Any], step: int, best: int | None) -> None:
        """Begins the checkpoint of the last step; `best` is another one that retention spares. Raises StorageError."""
        assert self.running is None, "the one before is finished first"
        self._begun_at = time.monotonic()
        saving = self.running = engine.begin_save(self._folder.checkpoint(step), state, step=step)
        saving.on_complete = lambda: self._completed(step, {step} if best is None else {step, best})
        # A step may last for minutes; a kill in it must not cost a checkpoint of which every byte is on the disk.
        threading.Thread(target=_complete_when_written, args=(saving,), name="megatrain-save", daemon=True).start()

    def finish(self) -> None:
        """Waits for the one that is under way. Raises StorageError when it has failed."""
        saving, self.running = self.running, None
        if saving is not None:
            saving.finish()

    def _completed(self, step: int, spared: set[int]) -> None:
        self.saved_step = step
        self._folder.retain(self._settings.keep, spared)
        log.info("step %d: checkpoint saved in %.1f s", step, time.monotonic() - self._begun_at)


def _complete_when_written(saving: "PendingCheckpoint") -> None:
    # What goes wrong is told to the run when it asks for the end.
    with contextlib.suppress(Exception):
        while not saving.is_written:
            time.sleep(_LOOK_S)
        saving.finish()
