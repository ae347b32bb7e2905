"""What a run prints: a progress bar on a terminal or below a notebook's cell, a line every `output.log_every` steps
elsewhere, or JSON lines."""

import contextlib
import logging
import math
import sys
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any, Literal, cast

from megatrain.system.terminal import NotebookLine, in_notebook, moving_line, progress_line
from megatrain.training.metrics import StepRecord, dumps, duration

if TYPE_CHECKING:
    from rich.progress import Progress

    from megatrain.engine.transactions import EvalOutput
    from megatrain.training.evaluation import HeldOut

log: logging.Logger = logging.getLogger("megatrain")

_HISTORY = 40
"""Most lines of steps, or a few more, that stay above a bar."""
_BAR, _SHORT_BAR = 24, 8
"""Characters of the bar, and of that of a narrow terminal."""
_WIDE = 100
"""Columns of a terminal from which on it is not narrow."""

Mode = Literal["bar", "notebook", "lines", "json", "none"]


def mode_for(stream: IO[str], json: bool) -> Mode:
    """A progress bar on a terminal, plain lines otherwise."""
    if json:
        return "json"
    return "bar" if stream.isatty() else "lines"


def default_mode() -> Mode:
    """Of a run that is started from Python: silent, except in a notebook."""
    return "notebook" if in_notebook() else "none"


class _LossyStream:
    """Standard output or error that may fail without ending the run: the reader of the pipe has gone, the terminal was
    closed, or the disk it goes to is full. The run's own log has every line."""

    def __init__(self, stream: IO[str], name: str) -> None:
        self._stream, self._name = stream, name
        self._lost = False

    def write(self, text: str) -> int:
        with self._ignoring_errors():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._ignoring_errors():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _ignoring_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._lost:
                self._lost = True  # first: the warning may fail in the same way
                log.warning(
                    "%s cannot be written (%s); the run goes on, and log.txt has every line",
                    self._name,
                    error.strerror or error,
                )


class Display:
    """Shows steps, evaluations and samples. Its log handler prints messages above the bar."""

    def __init__(self, mode: Mode = "none", out: IO[str] | None = None, err: IO[str] | None = None) -> None:
        self.mode = mode
        self.out: IO[str] = cast("IO[str]", _LossyStream(out or sys.stdout, "standard output"))
        self.err: IO[str] = cast("IO[str]", _LossyStream(err or sys.stderr, "standard error"))
        self._progress: Progress | None = None
        self._line = NotebookLine()
        self._reading = progress_line() if mode == "notebook" else None
        self._task: Any = None
        self._total = 0
        self._bar_width = _BAR
        self._loading = ""
        self._handler = _Handler(self)

    def __enter__(self) -> "Display":
        if self.mode != "none":
            log.addHandler(self._handler)
            if log.level == logging.NOTSET:
                log.setLevel(logging.INFO)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        log.removeHandler(self._handler)

    def loading(self, what: str, done: int, total: int) -> None:
        """Shows how far something before the first step is, on a terminal as one moving line. `total` 0: unknown."""
        if self.mode == "bar" and self._progress is None:
            moving_line(self.err, what, done, total)
        elif self._reading is not None:
            self._reading(what, done, total)
        elif self.mode == "lines" and what != self._loading:
            self.note(what)
        self._loading = what

    def begin(self, done: int, total: int) -> None:
        """Starts the bar after `done` of `total` steps."""
        self._total = total
        if self.mode != "bar":
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        console = Console(file=self.err)
        self._bar_width = _BAR if console.width >= _WIDE else _SHORT_BAR
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=self._bar_width),
            TextColumn("{task.fields[status]}", markup=False),
            console=console,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task("", total=total, completed=done, status="")
        self._progress.start()

    def step(self, record: StepRecord, left_s: float, every: int) -> None:
        """Shows a finished step; `left_s` is how long the remaining ones will take."""
        if self._progress is not None:
            self._progress.update(
                self._task, completed=record.step, status=self._status(record, left_s, self._progress.console.width)
            )
        elif self.mode == "notebook":
            self._line.show(self._bar(record, left_s), last=record.step == self._total)
        elif self.mode == "json":
            self._write(record.as_json())
        ends = record.step in (1, self._total)
        if record.step % every == 0 or ends:
            bound = f", {record.bound_by}" if record.bound_by else ""
            skipped = ", SKIPPED (loss or gradient not finite)" if record.skipped else ""
            numbers = (
                f"step {record.step}/{self._total}: loss {record.loss:.4f}, norm {record.grad_norm:.3g}, "
                f"lr {record.lr:.3g}"
            )
            self._log_and_print(
                f"{numbers}, {record.tokens_per_s:,.0f} tokens/s, {duration(left_s)} left{bound}{skipped}",
                shown=self.mode == "lines",
            )
            # above a bar a history of the loss that stays readable; the bar has the rest
            some = every * max(1, math.ceil(self._total / (every * _HISTORY)))
            if self._progress is not None and (record.step % some == 0 or ends):
                self._write(numbers + skipped)

    def _status(self, record: StepRecord, left_s: float, width: int) -> str:
        """What is shown beside the bar: as much of it as fits into `width` characters."""
        shown = f"loss {record.loss:.4f}"
        room = width - len(f"step {record.step}/{self._total} ") - self._bar_width - 1
        for part in (f"{record.tokens_per_s:,.0f} tok/s", f"{duration(left_s)} left", record.bound_by):
            if part and len(shown) + 2 + len(part) <= room:
                shown += f"  {part}"
        return shown

    def _bar(self, record: StepRecord, left_s: float) -> str:
        """A finished step as one line of text."""
        full = round(_BAR * record.step / max(self._total, 1))
        bound = f"  {record.bound_by}" if record.bound_by else ""
        return (
            f"step {record.step}/{self._total} {'█' * full}{'░' * (_BAR - full)} loss {record.loss:.4f}  "
            f"{record.tokens_per_s:,.0f} tokens/s  {duration(left_s)} left{bound}"
        )

    def evaluation(self, step: int, found: "HeldOut") -> None:
        """Shows what was measured on held-out data after `step`."""
        if self.mode == "json":
            self._write(dumps({"step": step, **evaluated(found)}))
        for text in held_out(found):
            self._log_and_print(f"step {step}: {text}", shown=self.mode != "json")

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Shows a text that was generated after `step`."""
        if self.mode == "json":
            self._write(dumps({"step": step, "prompt": prompt, "sample": text}))
        self._log_and_print(f"step {step}: {prompt!r} -> {text!r}", shown=self.mode != "json")

    def end(self) -> None:
        """Removes the bar."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def note(self, text: str) -> None:
        """Prints a log message, above the bar where there is one."""
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False)
        elif self.mode != "none":
            with contextlib.suppress(ValueError):
                self.err.write(text + "\n")
                self.err.flush()

    def _log_and_print(self, text: str, *, shown: bool) -> None:
        """Writes a line to the run's log file, and prints it when `shown`."""
        log.debug(text)
        if shown:
            self._write(text)

    def _write(self, text: str) -> None:
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False)
        elif self.mode != "none":
            self.out.write(text + "\n")
            self.out.flush()


def evaluated(found: "HeldOut") -> dict[str, Any]:
    """An evaluation by the names that JSON lines have; `eval_sets` where there are sets with names."""
    total = {f"eval_{key}": value for key, value in _numbers(found.total).items()}
    sets = eval_sets(found)
    return total | ({"eval_sets": sets} if sets else {})


def eval_sets(found: "HeldOut") -> dict[str, dict[str, Any]]:
    """For each held-out set with a name its loss, perplexity, accuracy and number of tokens."""
    return {name: _numbers(one) for name, one in found.sets.items()}


def _numbers(found: "EvalOutput") -> dict[str, Any]:
    return {
        "loss": found.loss,
        "perplexity": found.perplexity,
        "accuracy": found.accuracy,
        "tokens": found.num_tokens,
    }


def held_out(found: "HeldOut") -> list[str]:
    """An evaluation in words: all of it, then each set with a name."""
    every = ("held-out loss", found.total)
    return [
        f"{what} {one.loss:.4f} (perplexity {one.perplexity:.4g}, accuracy {100 * one.accuracy:.1f} %) "
        f"over {one.num_tokens:,} tokens"
        for what, one in (every, *((f"held-out loss of {name}", one) for name, one in found.sets.items()))
    ]


class _Handler(logging.Handler):
    """Prints the package's log records on standard error."""

    def __init__(self, display: Display) -> None:
        super().__init__(logging.INFO)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        self._display.note(prefix + record.getMessage())
