"""What a run shows while it goes: a bar on a terminal, a line every `log_every` steps elsewhere, or JSON lines."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any, Literal, cast

from megatrain.system.terminal import moving_line
from megatrain.training.metrics import StepRecord, dumps, duration

if TYPE_CHECKING:
    from rich.progress import Progress

log = logging.getLogger("megatrain")

Mode = Literal["bar", "lines", "json", "none"]


def mode_for(stream: IO[str], json: bool) -> Mode:
    """A bar where a person looks on, lines where nobody does."""
    if json:
        return "json"
    return "bar" if stream.isatty() else "lines"


class _Outlet:
    """Standard output or error, which a run may lose and go on: whoever read the pipe has left, the terminal was
    closed, or the disk that it goes to is full. The run's own log has every line."""

    def __init__(self, stream: IO[str], name: str) -> None:
        self._stream, self._name = stream, name
        self._lost = False

    def write(self, text: str) -> int:
        with self._bearing():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._bearing():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _bearing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._lost:
                self._lost = True  # before it is said: that may go the same way
                log.warning(
                    "%s cannot be written (%s); the run goes on, and log.txt has every line",
                    self._name,
                    error.strerror or error,
                )


class Display:
    """Shows steps, evaluations and samples. Its log handler keeps messages and the bar apart."""

    def __init__(self, mode: Mode = "none", out: IO[str] | None = None, err: IO[str] | None = None) -> None:
        self.mode = mode
        self.out = cast("IO[str]", _Outlet(out or sys.stdout, "standard output"))
        self.err = cast("IO[str]", _Outlet(err or sys.stderr, "standard error"))
        self._progress: Progress | None = None
        self._task: Any = None
        self._total = 0
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
        """Something before the first step has come so far; `total` 0 is unknown. On a terminal one line that moves."""
        if self.mode == "bar" and self._progress is None:
            moving_line(self.err, what, done, total)
        elif self.mode == "lines" and what != self._loading:
            self.note(what)
        self._loading = what

    def begin(self, done: int, total: int) -> None:
        """Training starts after `done` of `total` steps."""
        self._total = total
        if self.mode != "bar":
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=24),
            TextColumn(
                "loss {task.fields[loss]}  {task.fields[rate]} tok/s  {task.fields[left]}  {task.fields[bound]}"
            ),
            console=Console(file=self.err),
            refresh_per_second=4,
        )
        self._task = self._progress.add_task("", total=total, completed=done, loss="-", rate="-", left="", bound="")
        self._progress.start()

    def step(self, record: StepRecord, left_s: float, every: int) -> None:
        """A step has finished; `left_s` is how long the rest will take."""
        if self._progress is not None:
            self._progress.update(
                self._task,
                completed=record.step,
                loss=f"{record.loss:.4f}",
                rate=f"{record.tokens_per_s:,.0f}",
                left=f"{duration(left_s)} left",
                bound=f"bound by {record.bound}" if record.bound else "",
            )
        elif self.mode == "json":
            self._write(record.as_json())
        if record.step % every == 0 or record.step in (1, self._total):
            bound = f", bound by {record.bound}" if record.bound else ""
            skipped = ", SKIPPED (gradient not finite)" if record.skipped else ""
            self._tell(
                f"step {record.step}/{self._total}: loss {record.loss:.4f}, norm {record.grad_norm:.3g}, "
                f"lr {record.lr:.3g}, "
                f"{record.tokens_per_s:,.0f} tokens/s, {duration(left_s)} left{bound}{skipped}",
                shown=self.mode == "lines",
            )

    def evaluation(self, step: int, loss: float, tokens: int) -> None:
        """A held-out loss was measured after `step`."""
        if self.mode == "json":
            self._write(dumps({"step": step, "eval_loss": loss, "eval_tokens": tokens}))
        self._tell(f"step {step}: held-out loss {loss:.4f} over {tokens:,} tokens", shown=self.mode != "json")

    def sample(self, step: int, prompt: str, text: str) -> None:
        """A sample was drawn after `step`."""
        if self.mode == "json":
            self._write(dumps({"step": step, "prompt": prompt, "sample": text}))
        self._tell(f"step {step}: {prompt!r} -> {text!r}", shown=self.mode != "json")

    def end(self) -> None:
        """The bar leaves."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def note(self, text: str) -> None:
        """A log message, above the bar."""
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False)
        elif self.mode != "none":
            with contextlib.suppress(ValueError):
                self.err.write(text + "\n")
                self.err.flush()

    def _tell(self, text: str, *, shown: bool) -> None:
        """A line of the run: always for its log file, and `shown` here where that is its form."""
        log.debug(text)
        if shown:
            self._write(text)

    def _write(self, text: str) -> None:
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False)
        elif self.mode != "none":
            self.out.write(text + "\n")
            self.out.flush()


class _Handler(logging.Handler):
    """Log records of the package, on standard error."""

    def __init__(self, display: Display) -> None:
        super().__init__(logging.INFO)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        self._display.note(prefix + record.getMessage())
