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
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from megatrain.config.paths import check_makeable
from megatrain.errors import ConfigError, StorageError
from megatrain.system.hardware import format_bytes
from megatrain.training.metrics import StepRecord, dumps

log = logging.getLogger("megatrain")

_STEP = re.compile(r"step-(\d+)")


_OURS_ALONE = ("lock", "status.json", "metrics.jsonl")
_LEFTOVERS = (
    ".tmp-export",
    ".removing-export",
    *(f"{name}.tmp" for name in ("config.yaml", "plan.json", "metrics.jsonl", "status.json")),
)
"""What an interrupted run can leave in its folder's root."""
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
        self._metrics: IO[str] | None = None
        self._handler: logging.Handler | None = None
        self._status_before = _bytes(path / "status.json")
        self._log_before = _size(path / "log.txt")

    @property
    def checkpoints(self) -> Path:
        """Where `step-N` folders lie."""
        return self.path / "checkpoints"

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
        replace(self.path / "config.yaml", _HEADER + text)

    def write_plan(self, plan: dict[str, Any]) -> None:
        """The plan as the engine has it."""
        replace(self.path / "plan.json", json.dumps(plan, indent=1) + "\n")

    def write_status(self, state: str, **facts: Any) -> None:
        """What the run is doing now, for a program that looks in from outside."""
        now = dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")
        with contextlib.suppress(OSError):  # a full disk must not end a run that can still be saved elsewhere
            replace(
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
            replace(path, "".join(kept))
        self._metrics = path.open("a", encoding="utf-8")

    def write_metrics(self, record: StepRecord | dict[str, Any]) -> None:
        """Appends one line and hands it to the kernel, so that a killed run loses none."""
        assert self._metrics is not None, "begin_metrics comes first"
        try:
            self._metrics.write((record.as_json() if isinstance(record, StepRecord) else dumps(record)) + "\n")
            self._metrics.flush()
        except OSError as error:
            raise StorageError(f"{self.path / 'metrics.jsonl'} cannot be written: {error.strerror}") from None

    def metrics(self) -> list[dict[str, Any]]:
        """Every record so far."""
        return read_metrics(self.path)

    def loss(self, step: int) -> float | None:
        """The training loss that was recorded for a step; None where there is none."""
        return next((one.get("loss") for one in reversed(self.metrics()) if one.get("step") == step), None)

    def steps(self) -> list[int]:
        """Steps that have a checkpoint folder, ascending; whether each is whole is for `checkpoint.verify` to say."""
        return steps_in(self.checkpoints)

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint of `step` lies."""
        return self.checkpoints / f"step-{step}"

    def retain(self, keep: int, always: set[int]) -> list[int]:
        """Removes all but the newest `keep` checkpoints and those in `always`; returns what was removed."""
        steps = self.steps()
        removed = [step for step in steps[: max(0, len(steps) - keep)] if step not in always]
        for step in removed:
            # Renamed first: a folder half removed must never look like a checkpoint.
            doomed = self.checkpoints / f".removing-step-{step}"
            shutil.rmtree(doomed, ignore_errors=True)
            self.checkpoint(step).rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
        return removed

    def clear_leftovers(self) -> None:
        """Removes what an interrupted save, export or removal left behind: names of ours and no others."""
        if self.checkpoints.is_dir():
            _remove(e for e in self.checkpoints.iterdir() if e.name.startswith((".tmp-step-", ".removing-step-")))
        _remove(self.path / name for name in _LEFTOVERS)

    def withdraw(self) -> None:
        """Puts `status.json` and `log.txt` back as they were when the folder was opened: a request that is refused has
        told the run nothing. For before the first of `write_config`, `write_plan` and `begin_metrics`."""
        self._end_log()
        status, said = self.path / "status.json", self.path / "log.txt"
        with contextlib.suppress(OSError):
            if self._log_before is None:
                said.unlink(missing_ok=True)
            elif _size(said) != self._log_before:
                os.truncate(said, self._log_before)
            if self._status_before is None:
                status.unlink(missing_ok=True)
            elif _bytes(status) != self._status_before:
                replace(status, self._status_before)

    def need(self, size: int, what: str) -> None:
        """Raises StorageError when the disk has less than `size` free bytes for `what`."""
        facts = os.statvfs(self.path)
        free = facts.f_bavail * facts.f_frsize
        if free < size:
            raise StorageError(
                f"{what} needs {format_bytes(size)} in {self.path} and {format_bytes(free)} are free; "
                "free some space, lower output.keep or name another output.dir"
            )

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


def steps_in(checkpoints: Path) -> list[int]:
    """Steps N of the folders `step-N`, ascending."""
    if not checkpoints.is_dir():
        return []
    matches = (_STEP.fullmatch(entry.name) for entry in checkpoints.iterdir() if entry.is_dir())
    return sorted(int(match[1]) for match in matches if match)


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


def _remove(entries: Iterable[Path]) -> None:
    for entry in entries:
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def replace(path: Path, content: str | bytes) -> None:
    """Writes a file whole: beside it, flushed to disk, then renamed over it."""
    beside = path.with_name(path.name + ".tmp")
    with beside.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and line.endswith("\n"):
                yield line, record
