"""The folder of one run: effective configuration, plan, metrics, log, status, lock, checkpoints, export.

    config.yaml  plan.json  metrics.jsonl  log.txt  status.json  lock  checkpoints/step-N/  export/

One process owns the folder at a time: it holds an flock on `lock`, which the kernel releases when the process ends, for
whatever reason. Small files are replaced whole (temporary file, then rename), so a reader never sees half of one.
"""

import contextlib
import datetime as dt
import errno
import fcntl
import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from megatrain.checkpoint.step_folders import CHECKPOINTS, step_folder, steps_in
from megatrain.config import Config
from megatrain.config.paths import check_makeable
from megatrain.errors import ConfigError, StorageError
from megatrain.system.atomic import make_folders, recover, remove, remove_leftovers, storage_error, write_whole
from megatrain.training.metrics import StepRecord, dumps

log: logging.Logger = logging.getLogger("megatrain")

CONFIG, PLAN, METRICS, LOG, STATUS, LOCK = (
    "config.yaml",
    "plan.json",
    "metrics.jsonl",
    "log.txt",
    "status.json",
    "lock",
)
EXPORT, REPORT, DATA, TRACE = "export", "report.html", "data.json", "trace.json"

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Error numbers that mean that a disk is full or failing."""

ENDED = ("done", "stopped", "failed", "killed")
"""States in `status.json` that a run does not leave by itself; in any other it is still going on, or was killed."""

_LEFTOVERS = (EXPORT, CONFIG, PLAN, METRICS, STATUS, REPORT, DATA)
"""What a killed process can have been writing at the top of a run's folder."""
_REPLACED = (CONFIG, PLAN, METRICS, LOG, STATUS, LOCK, DATA, CHECKPOINTS, EXPORT)
"""What a run replaces in its folder, cuts back or writes to."""

_CORRECTION = "corrected"
"""The key of `plan.json` for what was changed after memory had run out."""

_LONGEST_REASON = 1000
"""Characters of a reason in `status.json`: the file stays within one block of the disk (see `_overwrite`)."""

_OWNER = "process "
"""What `lock` begins with; the process id follows."""

_HEADER = "# The effective configuration of this run, written by megatrain: every default spelled out.\n"


def output_folder(config: Config) -> Path:
    """The folder that `output.dir` names. Raises ConfigError when it is not set."""
    config.require("output")
    return Path(config.output.dir or "")


def check(path: Path) -> None:
    """Raises ConfigError when `output.dir` cannot be created or written, or when a run would replace something there
    that no run wrote. Names alone do not make a folder a run's: other programs write a `metrics.jsonl` too."""
    check_makeable(path, "output.dir")
    config = path / CONFIG
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if config.is_file():
            if config.read_text(encoding="utf-8").startswith(_HEADER):
                return
            raise ConfigError(
                f"output.dir is {str(path)!r}, and the {str(config)!r} in it is not a run's: a run would replace it "
                "with its effective configuration; name another output.dir, or rename your file"
            )
    if _is_own_lock(path / LOCK):  # of a run that has written no configuration yet
        return
    for name in _REPLACED:
        # An empty file has nothing to lose, and is all that a run could write on a full disk.
        if (path / name).exists() and _size(path / name) != 0:
            raise ConfigError(
                f"output.dir is {str(path)!r}, which is not a run's folder and holds {name!r}, which a run would "
                "replace with its own; name another folder"
            )


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, the library's name
        """Drops the line without a traceback: on a full disk it is the metrics that stop the run."""


class MetricsFile:
    """`metrics.jsonl`, open for appending."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def write(self, record: StepRecord | dict[str, Any]) -> None:
        """Appends one line and passes it to the kernel, so that a killed run loses none. Raises StorageError."""
        try:
            self._file.write((record.as_json() if isinstance(record, StepRecord) else dumps(record)) + "\n")
            self._file.flush()
        except OSError as error:
            raise storage_error(error, self._path) from None

    def close(self) -> None:
        """Closes the file. What a full disk had no room for was reported when it was written."""
        with contextlib.suppress(OSError):
            self._file.close()


class RunFolder:
    """Creates and opens a run's folder, and holds its lock until `close`. Raises ConfigError when another process holds
    the lock, and when the folder is not a run's but holds what a run would replace."""

    def __init__(self, path: Path) -> None:
        self.path = path
        check(path)
        absolute = path.absolute()
        self._made = [folder for folder in (absolute, *absolute.parents) if not folder.exists()]
        self._lock_made = not (path / LOCK).exists()
        try:
            make_folders(path)
            self._lock: IO[str] = (path / LOCK).open("a+", encoding="utf-8")
        except OSError as error:
            nowhere = path.is_symlink() and not path.exists()
            why = "it is a link that leads nowhere" if nowhere else error.strerror
            raise ConfigError(
                f"output.dir is {str(path)!r}, which cannot be written ({why}); name a folder that can"
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
        with contextlib.suppress(OSError):  # on a full disk the lock is held without naming its owner
            self._lock.truncate(0)
            self._lock.write(f"{_OWNER}{os.getpid()}")
            self._lock.flush()
        self._recover()
        self._open = contextlib.ExitStack()
        self._handler: logging.Handler | None = None
        self._status_lock, self._killed = threading.Lock(), False
        self._status_before = _bytes(path / STATUS)
        self._log_before = _size(path / LOG)

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
        """The folder that holds `step-N`."""
        return self.path / CHECKPOINTS

    @property
    def export(self) -> Path:
        """Where the finished model is written."""
        return self.path / EXPORT

    def begin_log(self) -> None:
        """Appends the package's log to `log.txt`: messages, and the lines of steps, which are logged at debug level."""
        handler = _LogFile(self.path / LOG, encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        handler.setLevel(logging.DEBUG)
        log.addHandler(handler)
        log.setLevel(logging.DEBUG)
        self._handler = handler

    def write_config(self, text: str) -> None:
        """Writes the effective configuration, every default spelled out. Raises StorageError."""
        write_whole(self.path / CONFIG, _HEADER + text)

    def write_plan(self, plan: dict[str, Any], correction: dict[str, Any] | None = None) -> None:
        """Writes the plan in force, with what was changed in it after memory had run out (`planner.safer`): the run is
        planned so from then on. Raises StorageError."""
        written = plan | ({_CORRECTION: correction} if correction else {})
        write_whole(self.path / PLAN, json.dumps(written, indent=1) + "\n")

    def correct_plan(self, correction: dict[str, Any]) -> None:
        """Notes in `plan.json` what the next plan has to change. Raises StorageError."""
        self.write_plan(_read_plan(self.path), correction)

    def write_data(self, profile: dict[str, Any]) -> None:
        """Writes the data sets in numbers (`train`, `eval`, `eval_sets`). Raises StorageError."""
        write_whole(self.path / DATA, json.dumps(profile, indent=1) + "\n")

    def write_status(self, state: str, **facts: Any) -> None:
        """Writes what the run is doing now, for a program that watches it. A full disk does not raise. Nothing follows
        `killed`, which a second thread writes while the run's own may be about to write something else."""
        now = dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")
        if "reason" in facts:
            facts["reason"] = _shortened(str(facts["reason"]))
        text = dumps({"state": state, "pid": os.getpid(), "updated": now, **facts}) + "\n"
        with self._status_lock:
            if self._killed:
                return
            self._killed = state == "killed"
            try:
                write_whole(self.path / STATUS, text)
            except StorageError:
                _overwrite(self.path / STATUS, text)

    def facts(self) -> dict[str, Any]:
        """What `status.json` says besides the present state: steps, losses, newest checkpoint."""
        passing = ("state", "pid", "updated", "reason", "stalled")
        return {name: value for name, value in read_status(self.path).items() if name not in passing}

    def begin_metrics(self, step: int) -> MetricsFile:
        """Opens `metrics.jsonl` for appending after `step`. Records of later steps, which an abandoned part of the run
        wrote, are removed first. Raises StorageError."""
        path = self.path / METRICS
        try:
            if path.exists():
                kept = [line for _, line, record in _lines(path) if (number_in(record, "step") or 0) <= step]
                write_whole(path, "".join(kept))
            file = MetricsFile(path)
        except OSError as error:
            raise storage_error(error, path) from None
        self._open.callback(file.close)
        return file

    def metrics(self) -> list[dict[str, Any]]:
        """Every record so far."""
        return read_metrics(self.path)

    def loss(self, step: int) -> float | None:
        """The training loss recorded for a step; None when there is no record."""
        return next((number_in(one, "loss") for one in reversed(self.metrics()) if one.get("step") == step), None)

    def steps(self) -> list[int]:
        """Steps that have a checkpoint folder, ascending. `checkpoint.verify` checks whether each is complete."""
        return steps_in(self.path)

    def checkpoint(self, step: int) -> Path:
        """The folder of the checkpoint of `step`."""
        return step_folder(self.path, step)

    def retain(self, keep: int, always: set[int]) -> list[int]:
        """Removes all but the newest `keep` checkpoints and those in `always`; returns the removed steps."""
        steps = self.steps()
        removed = [step for step in steps[: max(0, len(steps) - keep)] if step not in always]
        for step in removed:
            remove(self.checkpoint(step))
        return removed

    def clear_leftovers(self) -> None:
        """Removes what an interrupted save, export or removal left, by the names that only we use, and logs it."""
        removed = remove_leftovers(self.checkpoints, "step-*") + remove_leftovers(self.path, *_LEFTOVERS)
        if removed:
            names = ", ".join(str(entry.relative_to(self.path)) for entry in sorted(removed))
            log.warning("removed what a killed run left unfinished in %s: %s", self.path, names)

    def withdraw(self) -> None:
        """Restores `status.json` and `log.txt` as they were when the folder was opened, since a refused request did not
        change the run. Only valid before the first `write_config`, `write_plan` or `begin_metrics`."""
        self._end_log()
        status, logged = self.path / STATUS, self.path / LOG
        with contextlib.suppress(OSError, StorageError):
            if self._log_before is None:
                logged.unlink(missing_ok=True)
            elif _size(logged) != self._log_before:
                os.truncate(logged, self._log_before)
            if self._status_before is None:
                status.unlink(missing_ok=True)
            elif _bytes(status) != self._status_before:
                write_whole(status, self._status_before)

    def discard_if_empty(self) -> None:
        """Removes the folders that this process created if they are still empty, and the lock from one of the user's
        that holds nothing else of a run: a refusal leaves nothing behind, and no folder marked as a run's."""
        held = {entry.name for entry in self.path.iterdir()}
        if self._made and held <= {LOCK, LOG, STATUS}:
            for name in (LOG, STATUS, LOCK):
                (self.path / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                for folder in self._made:
                    folder.rmdir()
        elif self._lock_made and held & {*_REPLACED} <= {LOCK}:
            (self.path / LOCK).unlink(missing_ok=True)

    def close(self) -> None:
        """Closes all files and releases the lock."""
        self._open.close()
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
    """The records of `metrics.jsonl`, without a last line that a kill cut in half. Empty when there is no file."""
    return [record for _, record in numbered_metrics(run)]


def numbered_metrics(run: Path) -> list[tuple[int, dict[str, Any]]]:
    """The same, each with the number of its line."""
    path = run / METRICS
    return [(number, record) for number, _, record in _lines(path)] if path.exists() else []


def number_in(record: Mapping[str, Any], key: str) -> float | None:
    """A number of a record of `metrics.jsonl`; None where there is none, also where somebody has written something
    else."""
    value = record.get(key)
    return value if isinstance(value, (int, float)) else None


def read_correction(run: Path) -> dict[str, Any]:
    """What an earlier part of the run had to change in its plan after memory had run out; empty where nothing."""
    found = _read_plan(run).get(_CORRECTION)
    return found if isinstance(found, dict) else {}


def _read_plan(run: Path) -> dict[str, Any]:
    """`plan.json`, or an empty mapping."""
    try:
        found = json.loads((run / PLAN).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_status(run: Path) -> dict[str, Any]:
    """`status.json`, or an empty mapping."""
    try:
        status = json.loads((run / STATUS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return status if isinstance(status, dict) else {}


def state_of(run: Path) -> str:
    """The run's state. A run that was killed could not update `status.json`: where that says that the run goes on and
    no process holds the lock, it is `killed`."""
    state = str(read_status(run).get("state", "unknown"))
    if state in (*ENDED, "unknown"):
        return state
    try:
        with (run / LOCK).open("r", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # held by the run, or a file system without locks
        return state
    return f"killed (while {state})"


def is_run(path: Path) -> bool:
    """Whether a folder is one of ours."""
    return (path / CONFIG).is_file() and ((path / CHECKPOINTS).is_dir() or (path / METRICS).is_file())


def _is_own_lock(path: Path) -> bool:
    """Whether a run wrote this file, which has the id of the process that last owned the folder."""
    content = _bytes(path) if _size(path) else None
    return content is not None and content.startswith(_OWNER.encode()) and content[len(_OWNER) :].isdigit()


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _overwrite(path: Path, text: str) -> None:
    """Writes a small file in place. On a full disk there is no room for a second file, but the first one's block is
    still there to be written."""
    with contextlib.suppress(OSError), path.open("r+b") as file:
        file.write(text.encode())
        file.truncate()


def _shortened(reason: str) -> str:
    return reason if len(reason) <= _LONGEST_REASON else reason[: _LONGEST_REASON - 1] + "…"


def _lines(path: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(number, line, record) of each whole line of JSON."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and line.endswith("\n"):
                yield number, line, record
