"""What a run calls at fixed points, and TensorBoard and Weights & Biases, which are written through it.

class Best(megatrain.Callback):
    def on_eval(self, run, metrics):
        print(metrics["step"], metrics["eval_loss"])

megatrain.Trainer("train.yaml", callbacks=[Best()]).fit()
"""

import dataclasses
import importlib.util
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.config import Config
from megatrain.errors import ConfigError
from megatrain.training.progress import evaluated

if TYPE_CHECKING:
    from megatrain.engine.engine import Engine
    from megatrain.training.evaluation import HeldOut
    from megatrain.training.result import Result

log: logging.Logger = logging.getLogger("megatrain")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The run that calls a callback."""

    config: Config
    """The effective configuration."""
    folder: Path
    """`output.dir`."""
    engine: "Engine"
    """To read weights, gradients or logits from; training it here would make another run of this one."""
    first_step: int
    """The step that this part of the run goes on from; 0 for a new run."""
    total_steps: int
    """Optimizer steps of the whole run."""
    stop: Callable[[str], None]
    """Called with a reason, ends the run after the present step as Ctrl-C does: with a checkpoint, and to be gone on
    with."""


class Callback:
    """Called by a run, on its thread, between steps: what these methods do takes the run's time. Override what is
    needed. An exception that is raised here ends the run after the present step, with a checkpoint, and names the
    callback."""

    def on_step(self, run: Run, metrics: Mapping[str, Any]) -> None:
        """After each step, with its line of `metrics.jsonl`, before what an evaluation or samples add to it."""

    def on_eval(self, run: Run, metrics: Mapping[str, Any]) -> None:
        """After each evaluation: `step` (0 before the first), `eval_loss` per supervised token,
        `eval_perplexity`, `eval_accuracy`, `eval_tokens`, and with several held-out sets `eval_sets`: for each name
        `loss`, `perplexity`, `accuracy`, `tokens`."""

    def on_save(self, run: Run, step: int, folder: Path) -> None:
        """Once the checkpoint of `step` is complete in `folder`, which may be some steps later."""

    def on_end(self, run: Run, result: "Result | None") -> None:
        """However the run ends, if it has begun; None where it failed."""


class Callbacks:
    """All callbacks of a run. After an exception in one nothing but `on_end` is called any more."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = list(callbacks)
        self._run: Run | None = None
        self.failure: str = ""
        """Which callback raised what, as a sentence; empty where none did."""
        self.error: Exception | None = None

    def begin(self, run: Run) -> None:
        """The run that is passed on from here: from its first step, or again with another engine."""
        self._run, self.failure, self.error = run, "", None

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Calls `on_step`."""
        self._call("on_step", metrics)

    def evaluation(self, step: int, found: "HeldOut") -> None:
        """Calls `on_eval`."""
        self._call("on_eval", {"step": step, **evaluated(found)})

    def save(self, step: int, folder: Path) -> None:
        """Calls `on_save`."""
        self._call("on_save", step, folder)

    def end(self, result: "Result | None") -> None:
        """Calls `on_end` of every callback, those after one that fails included, once for a run that has begun."""
        self._call("on_end", result, always=True)
        self._run = None

    def _call(self, name: str, *arguments: Any, always: bool = False) -> None:
        for callback in self._callbacks:
            if self._run is None or (self.failure and not always):
                return
            try:
                getattr(callback, name)(self._run, *arguments)
            except Exception as error:
                sentence = f"the callback {type(callback).__name__}.{name} raised {type(error).__name__}: {error}"
                log.debug("%s", sentence, exc_info=True)
                if self.failure:
                    log.warning("%s", sentence)
                else:
                    self.failure = sentence
                    self.error = error


def check(callbacks: Sequence[Any]) -> list[Callback]:
    """The callbacks as a list. Raises ConfigError for what is none."""
    for callback in callbacks:
        if not isinstance(callback, Callback):
            hint = "; write an instance, with parentheses" if isinstance(callback, type) else ""
            raise ConfigError(f"callbacks must be instances of megatrain.Callback, not {callback!r}{hint}")
    return list(callbacks)


def configured(config: Config) -> list[Callback]:
    """Those that `output.tensorboard` and `output.wandb` ask for. Raises ConfigError where a package is missing."""
    check_installed(config)
    wanted = (("tensorboard", TensorBoard), ("wandb", WandB))
    return [kind() for key, kind in wanted if getattr(config.output, key)]


def check_installed(config: Config) -> None:
    """Raises ConfigError with the command that installs what `output.tensorboard` or `output.wandb` needs."""
    for package in ("tensorboard", "wandb"):
        if getattr(config.output, package) and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"output.{package} needs the package {package}, which is not installed: "
                f"pip install 'megatrain[{package}]', or leave it false"
            )


def _scalars(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """(tag, value) of the finite numbers of a line of metrics: those of training, lanes and memory in groups."""
    groups = {"loss": "train", "grad_norm": "train", "lr": "train", "aux_loss": "train"}
    for key, value in metrics.items():
        if key == "eval_sets":
            for name, numbers in value.items():
                yield from ((f"eval_{name}/{part}", number) for part, number in numbers.items() if _is_finite(number))
        elif isinstance(value, Mapping):
            yield from ((f"{key}/{name}", part) for name, part in value.items() if _is_finite(part))
        elif key != "step" and _is_finite(value):
            yield f"{groups.get(key, 'eval' if key.startswith('eval_') else 'step')}/{key}", value


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class TensorBoard(Callback):
    """Writes event files into `tensorboard` in the run's folder, in TensorBoard's format."""

    def __init__(self) -> None:
        self._writer: Any = None

    def _write(self, run: Run, metrics: Mapping[str, Any]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # what an abandoned part of the run wrote after its last checkpoint is no longer shown
            purge = run.first_step + 1 if run.first_step else 0
            self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge)
        for tag, value in _scalars(metrics):
            self._writer.add_scalar(tag, value, metrics["step"])

    def on_step(self, run: Run, metrics: Mapping[str, Any]) -> None:
        """Writes the step's numbers."""
        self._write(run, metrics)

    def on_eval(self, run: Run, metrics: Mapping[str, Any]) -> None:
        """Writes the evaluation's numbers."""
        self._write(run, metrics)

    def on_end(self, run: Run, result: "Result | None") -> None:  # noqa: ARG002
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()


class WandB(Callback):
    """Logs to Weights & Biases. Project, entity and mode are taken from WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE; a
    run that goes on continues the one there, whose id is kept in `wandb/id` in the run's folder."""

    def __init__(self) -> None:
        self._logged: Any = None

    def _write(self, run: Run, metrics: Mapping[str, Any]) -> None:
        if self._logged is None:
            self._logged = self._begin(run)
        self._logged.log({"step": metrics["step"], **dict(_scalars(metrics))})

    def on_step(self, run: Run, metrics: Mapping[str, Any]) -> None:
        """Writes the step's numbers."""
        self._write(run, metrics)

    def on_eval(self, run: Run, metrics: Mapping[str, Any]) -> None:
        """Writes the evaluation's numbers."""
        self._write(run, metrics)

    def _begin(self, run: Run) -> Any:
        import wandb

        folder = run.folder / "wandb"
        folder.mkdir(exist_ok=True)
        known = folder / "id"
        identity = known.read_text(encoding="utf-8").strip() if run.first_step and known.is_file() else None
        begun = wandb.init(
            dir=str(run.folder),
            name=run.folder.resolve().name,
            config=run.config.to_dict(),
            id=identity,
            resume="allow" if identity else None,
        )
        # its own counter may not go back, and a run that goes on from a checkpoint does
        begun.define_metric("*", step_metric="step")
        known.write_text(begun.id + "\n", encoding="utf-8")
        return begun

    def on_end(self, run: Run, result: "Result | None") -> None:  # noqa: ARG002
        """Waits until everything is sent."""
        if self._logged is not None:
            self._logged.finish(exit_code=0 if result is not None else 1)
