"""When the checkpoints of a run begin and end. Each is written in the background while later steps run."""

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from megatrain.config import Duration

if TYPE_CHECKING:
    from megatrain.checkpoint.save import PendingCheckpoint
    from megatrain.config.schema import OutputConfig
    from megatrain.engine.engine import Engine
    from megatrain.training.run_dir import RunFolder

log: logging.Logger = logging.getLogger("megatrain")

_POLL_S = 0.05


class CheckpointWriter:
    """The checkpoints of one run; at most one is being written."""

    def __init__(self, settings: "OutputConfig", folder: "RunFolder", step: int) -> None:
        self._settings, self._folder = settings, folder
        self.running: PendingCheckpoint | None = None
        """The one that is being written."""
        self.saved_step: int = step if folder.steps() else -1
        """The step of the newest complete one."""
        self._completing: threading.Thread | None = None
        self._begun_at = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Whether `output.save_every` asks for one after this step."""
        every = self._settings.save_every
        if isinstance(every, Duration):
            return self.running is None and time.monotonic() - self._begun_at >= every.seconds
        return every is not None and step % every == 0

    def has(self, step: int) -> bool:
        """Whether the checkpoint of this step is complete or being written."""
        return step == (self.saved_step if self.running is None else self.running.step)

    def begin(self, engine: "Engine", state: dict[str, Any], step: int, best: int | None) -> None:
        """Begins the checkpoint of the last step, after `finish`. `best` is another step whose checkpoint retention
        keeps. Raises StorageError."""
        self._begun_at = time.monotonic()
        saving = self.running = engine.begin_save(self._folder.checkpoint(step), state, step=step)
        saving.on_complete = lambda: self._completed(step, {step} if best is None else {step, best})
        # A step may take minutes; a kill during it must not lose a checkpoint whose bytes are all on the disk.
        self._completing = threading.Thread(
            target=_complete_when_written, args=(saving,), name="megatrain-save", daemon=True
        )
        self._completing.start()

    def finish(self) -> None:
        """Waits for the one being written. Raises StorageError when it failed."""
        saving, self.running = self.running, None
        if saving is not None:
            saving.finish()
        # What the thread drops last are tensors. Where the process ends meanwhile, the interpreter cuts the thread off
        # within torch, which aborts the process: exit code 134 of a run that is done.
        if self._completing is not None:
            self._completing.join()
            self._completing = None

    def _completed(self, step: int, kept: set[int]) -> None:
        self.saved_step = step
        self._folder.retain(self._settings.keep, kept)
        log.info("step %d: checkpoint saved in %.1f s", step, time.monotonic() - self._begun_at)


def _complete_when_written(saving: "PendingCheckpoint") -> None:
    # An error is raised where the run calls `finish`.
    with contextlib.suppress(Exception):
        while not saving.is_written:
            time.sleep(_POLL_S)
        saving.finish()
