"""The folder of one run: effective configuration, plan, metrics, log, status, lock, checkpoints, export.

    config.yaml  plan.json  metrics.jsonl  log.txt  status.json  lock  checkpoints/step-N/  export/

One process owns the folder at a time (an flock on `lock`, which the kernel drops with the process however it ends).
Small files are replaced whole (temporary file, then rename), so a reader never sees half of one.
"""

import contextlib
import datetime as dt
import fcntl
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from megatrain.checkpoint.step_folders import CHECKPOINTS, step_folder, steps_in
from megatrain.config.paths import check_makeable
from megatrain.errors import ConfigError, StorageError
from megatrain.system.atomic import recover, remove, remove_leftovers, storage_error, write_whole
from megatrain.training.metrics import StepRecord, dumps

log = logging.getLogger("megatrain")

_OURS_ALONE = ("lock", "status.json", "metrics.jsonl")
_LEFTOVERS = ("export", "config.yaml", "plan.json", "metrics.jsonl", "status.json", "report.html")
"""What a killed process can have been writing in a run's root."""
_REPLACED = ("config.yaml", "plan.json", "log.txt", "checkpoints", "export")


_HEADER = "# The effective configuration of this run, written by megatrain: every default spelled out.\n"


def check(path: Path) -> None:
    """Raises ConfigError for an `output.dir` that cannot be made or written, or where a run would replace or remove
    something that no run wrote."""
    check_makeable(path, "output.dir")
    config = path / "config.yaml"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if config.is_file() and not config.read_text(encoding="utf-8").startswith(_HEADER):
            raise ConfigError(
                f"output.dir is {str(path)!r}, and the {str(config)!r} in it is not a run's: a run would put its "
                "effective configuration in its place; name another output.dir, or give your file another name"
            )
    if any((path / name).exists() for name in _OURS_ALONE):
        return
    for name in _REPLACED:
        if (path / name).exists():
            raise ConfigError(
                f"output.dir is {str(path)!r}, which is not a run's folder and holds {name!r}, in whose place a run "
                "puts its own; name another folder"
            )


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, the library's name
        """A full disk ends the run where metrics do not fit; the log does without, and prints no traceback."""


class RunFolder:
    """Opens (and makes) a run's folder and holds its lock until `close`. Raises ConfigError when another has it, and
    when it is no run's but holds what a run would replace."""

    def __init__(self, path: Path) -> None:
        self.path = path
        check(path)
        absolute = path.absolute()
        self._made = [folder for folder in (absolute, *absolute.parents) if not folder.exists()]
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock: IO[str] = (path / "lock").open("a+", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"output.dir is {str(path)!r}, which cannot be written ({error.strerror}); name a folder that can"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.seek(0)
            owner = self._lock.read().strip() or "another process"
            self._lock.close()
            raise ConfigError(
                f"output.dir is {str(path)!r}, which {owner} is using; wait for it, stop it, or name another folder"
            ) from None
        with contextlib.suppress(OSError):  # on a full disk it is held namelessly; what is needed is reckoned later
            self._lock.truncate(0)
            self._lock.write(f"process {os.getpid()}")
            self._lock.flush()
        self._recover()
        self._metrics: IO[str] | None = None
        self._handler: logging.Handler | None = None
        self._status_before = _bytes(path / "status.json")
        self._log_before = _size(path / "log.txt")

    def _recover(self) -> None:
        """Undoes half-made replacements of a killed process; only the owner of the lock may. Raises StorageError."""
        for folder in (*(self.checkpoint(step) for step in self.steps()), self.export):
            try:
                recover(folder)
            except OSError as error:
                self._lock.close()
                raise storage_error(error, folder) from None

    @property
    def checkpoints(self) -> Path:
        """Where `step-N` folders lie."""
        return self.path / CHECKPOINTS

    @property
    def export(self) -> Path:
        """Where the finished model goes."""
        return self.path / "export"

    def begin_log(self) -> None:
        """Sends the package's log to `log.txt`, appended: messages, and the lines of steps, which it says quietly."""
        handler = _LogFile(self.path / "log.txt", encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        handler.setLevel(logging.DEBUG)
        log.addHandler(handler)
        log.setLevel(logging.DEBUG)
        self._handler = handler

    def write_config(self, text: str) -> None:
        """The effective configuration, every default written out."""
        write_whole(self.path / "config.yaml", _HEADER + text)

    def write_plan(self, plan: dict[str, Any]) -> None:
        """The plan as the engine has it."""
        write_whole(self.path / "plan.json", json.dumps(plan, indent=1) + "\n")

    def write_status(self, state: str, **facts: Any) -> None:
        """What the run is doing now, for a program that looks in from outside."""
        now = dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")
        with contextlib.suppress(StorageError):  # a full disk must not end a run that can still be saved elsewhere
            write_whole(
                self.path / "status.json", dumps({"state": state, "pid": os.getpid(), "updated": now, **facts}) + "\n"
            )

    def facts(self) -> dict[str, Any]:
        """What `status.json` says beside what is done now: steps, losses, newest checkpoint."""
        passing = ("state", "pid", "updated", "reason")
        return {name: value for name, value in read_status(self.path).items() if name not in passing}

    def begin_metrics(self, step: int) -> None:
        """Opens `metrics.jsonl` for appending after `step`: what an abandoned stretch wrote beyond it is cut away."""
        path = self.path / "metrics.jsonl"
        if path.exists():
            kept = [line for line, record in _lines(path) if record.get("step", 0) <= step]
            write_whole(path, "".join(kept))
        try:
            self._metrics = path.open("a", encoding="utf-8")
        except OSError as error:
            raise storage_error(error, path) from None

    def write_metrics(self, record: StepRecord | dict[str, Any]) -> None:
        """Appends one line and hands it to the kernel, so that a killed run loses none."""
        assert self._metrics is not None, "begin_metrics comes first"
        try:
            self._metrics.write((record.as_json() if isinstance(record, StepRecord) else dumps(record)) + "\n")
            self._metrics.flush()
        except OSError as error:
            raise storage_error(error, self.path / "metrics.jsonl") from None

    def metrics(self) -> list[dict[str, Any]]:
        """Every record so far."""
        return read_metrics(self.path)

    def loss(self, step: int) -> float | None:
        """The training loss that was recorded for a step; None where there is none."""
        return next((one.get("loss") for one in reversed(self.metrics()) if one.get("step") == step), None)

    def steps(self) -> list[int]:
        """Steps that have a checkpoint folder, ascending; whether each is whole is for `checkpoint.verify` to say."""
        return steps_in(self.path)

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint of `step` lies."""
        return step_folder(self.path, step)

    def retain(self, keep: int, always: set[int]) -> list[int]:
        """Removes all but the newest `keep` checkpoints and those in `always`; returns what was removed."""
        steps = self.steps()
        removed = [step for step in steps[: max(0, len(steps) - keep)] if step not in always]
        for step in removed:
            remove(self.checkpoint(step))
        return removed

    def clear_leftovers(self) -> None:
        """Removes what a killed save, export or removal left behind, names of ours and no others, and says what."""
        removed = remove_leftovers(self.checkpoints, "step-*") + remove_leftovers(self.path, *_LEFTOVERS)
        if removed:
            names = ", ".join(str(path.relative_to(self.path)) for path in removed)
            log.warning("removed what an earlier process was killed in the middle of: %s", names)

    def withdraw(self) -> None:
        """Puts `status.json` and `log.txt` back as they were when the folder was opened: a request that is refused has
        told the run nothing. For before the first of `write_config`, `write_plan` and `begin_metrics`."""
        self._end_log()
        status, said = self.path / "status.json", self.path / "log.txt"
        with contextlib.suppress(OSError, StorageError):
            if self._log_before is None:
                said.unlink(missing_ok=True)
            elif _size(said) != self._log_before:
                os.truncate(said, self._log_before)
            if self._status_before is None:
                status.unlink(missing_ok=True)
            elif _bytes(status) != self._status_before:
                write_whole(status, self._status_before)

    def discard_if_empty(self) -> None:
        """Removes folders that this process made and that hold nothing yet: a refusal leaves nothing behind."""
        if not self._made:
            return
        if {entry.name for entry in self.path.iterdir()} <= {"lock", "log.txt", "status.json"}:
            for name in ("log.txt", "status.json", "lock"):
                (self.path / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                for folder in self._made:
                    folder.rmdir()

    def close(self) -> None:
        """Closes files and gives up the lock. What a full disk had no room for was told when it was written."""
        if self._metrics is not None:
            with contextlib.suppress(OSError):
                self._metrics.close()
            self._metrics = None
        self._end_log()
        with contextlib.suppress(OSError):
            self._lock.close()

    def _end_log(self) -> None:
        if self._handler is not None:
            log.removeHandler(self._handler)
            with contextlib.suppress(OSError):
                self._handler.close()
            self._handler = None


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The records of `metrics.jsonl`; a last line that a kill cut in half is left out. Empty when there is none."""
    path = run / "metrics.jsonl"
    return [record for _, record in _lines(path)] if path.exists() else []


def read_status(run: Path) -> dict[str, Any]:
    """`status.json`, or an empty mapping."""
    try:
        status: dict[str, Any] = json.loads((run / "status.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return status


def is_run(path: Path) -> bool:
    """Whether a folder is one of ours."""
    return (path / "config.yaml").is_file() and ((path / "checkpoints").is_dir() or (path / "metrics.jsonl").is_file())


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and line.endswith("\n"):
                yield line, record
