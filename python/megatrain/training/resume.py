"""Where a run begins: at step 0, or at a checkpoint, with settings that may have changed since."""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megatrain.checkpoint.step_folders import steps_in
from megatrain.config import Config, diff
from megatrain.errors import CheckpointError, ConfigError, DamagedCheckpoint

if TYPE_CHECKING:
    from megatrain.checkpoint.checkpoint import Checkpoint

log: logging.Logger = logging.getLogger("megatrain")

T = TypeVar("T")


@dataclasses.dataclass(kw_only=True, slots=True)
class Position:
    """How far a run is; stored in every checkpoint."""

    step: int = 0
    """Optimizer steps done, skipped ones included. It determines the next batch."""
    tokens: int = 0
    """Tokens seen, without padding."""
    nonfinite: int = 0
    """Consecutive steps whose loss or gradients were not finite."""
    first_eval_loss: float | None = None
    eval_loss: float | None = None
    """The latest held-out loss."""
    best_loss: float | None = None
    """The lowest held-out loss, and the step it was measured after."""
    best_step: int | None = None
    stale_evals: int = 0
    """Evaluations since the lowest loss."""
    eval_sets: dict[str, float] = dataclasses.field(default_factory=dict)
    """The latest loss of each held-out set by its name, where there are several."""
    owed_eval: bool = False
    """Whether a stop cut off the evaluation that was due after `step`, so that it is still to be done."""
    seconds: float = 0.0
    """Seconds spent in steps, over all parts of the run."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ResumePoint:
    """The checkpoint that a run resumes from."""

    folder: Path
    position: Position
    numerics: dict[str, Any]
    """The numerics key it was computed under (see `planning`)."""
    from_elsewhere: bool
    """Whether it is in another run's folder."""


def resolve_resume(config: Config, run: Path, build: Callable[[ResumePoint | None], T]) -> tuple[ResumePoint | None, T]:
    """Finds the checkpoint that the run in folder `run` resumes from and passes it to `build`; returns it and what
    `build` returned. None means that the run begins at step 0. With `output.resume: auto` it is the newest checkpoint
    that proves to be whole when it is read. Changes nothing itself.

    Raises ConfigError with a list of differences when the checkpoint belongs to another run, and what `build` raises.
    """
    damaged: set[Path] = set()
    while True:
        try:
            origin = _find(config, run, damaged)
            none_is_sound = origin is None and bool(damaged)
            if none_is_sound:
                log.warning(
                    "no sound checkpoint is left in %s: the run begins again at step 0, and its metrics and its export "
                    "replace those that are there. To keep them, stop it now and name another output.dir",
                    run,
                )
            return origin, build(origin)
        except DamagedCheckpoint as error:
            if config.output.resume != "auto":
                raise
            log.warning("skipped: %s", error)
            damaged.add(error.folder)


def _find(config: Config, run: Path, damaged: set[Path]) -> ResumePoint | None:
    """The checkpoint that `output.resume` asks for, checked against `config`. Incomplete ones and those in `damaged`
    are skipped. Raises ConfigError, and DamagedCheckpoint when its state cannot be read."""
    wanted = config.output.resume
    if wanted == "never":
        if steps_in(run) or (run / "metrics.jsonl").exists():
            raise ConfigError(
                f"output.resume is never and {run} holds a run already; remove it, name another output.dir, or "
                "write output.resume: auto to go on with it"
            )
        return None
    found = _latest(run, damaged)
    elsewhere = False
    if found is None and wanted not in ("auto", "required"):
        found, elsewhere = _named(Path(wanted)), True
    if found is None:
        if wanted == "required":
            raise ConfigError(f"output.resume is required and {run} holds no complete checkpoint")
        return None
    origin = _origin(found, config, elsewhere)
    log.info("resuming from %s, after step %d", found.folder, origin.position.step)
    return origin


def _latest(run: Path, damaged: set[Path]) -> "Checkpoint | None":
    if not (run / "checkpoints").is_dir():
        return None
    # Only now: a run that begins at step 0 is refused or planned before torch is loaded.
    from megatrain.checkpoint import checkpoint

    newest = checkpoint.latest_complete(run, damaged)
    return None if newest is None else checkpoint.Checkpoint.open(newest)


def _named(path: Path) -> "Checkpoint":
    from megatrain.checkpoint.checkpoint import Checkpoint

    if (path / "manifest.json").is_file():
        return Checkpoint.open(path)
    if not path.is_dir():
        raise ConfigError(
            f"output.resume is {str(path)!r}, and there is no such folder; name a run or a checkpoint, or write auto, "
            "never or required"
        )
    found = _latest(path, set())
    if found is None:
        raise ConfigError(f"output.resume is {str(path)!r}, which holds no complete checkpoint; name another run")
    return found


def _origin(found: "Checkpoint", config: Config, elsewhere: bool) -> ResumePoint:
    try:
        state = found.state().state["run"]
        position = Position(**state["position"])
        before = Config.from_dict(state["config"])
        numerics = dict(state["numerics"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {found.folder} was not written by a run ({error}); name another") from None
    identity, course = _differences(state.get("data"), before, config, position.step, found.precision)
    if identity:
        raise ConfigError(_refusal(found, config, identity, elsewhere))
    if "data" not in state:
        log.warning(
            "%s was written by an earlier version, without fingerprints of its data: changes of data are not checked",
            found.folder,
        )
    for change in course:
        log.info("from here on, %s", change)
    if position.best_step is not None and _measures_otherwise(before, config, course):
        log.info(
            "step %d was the best so far by other held-out data or settings; the best is looked for anew",
            position.best_step,
        )
        position.best_loss, position.best_step, position.stale_evals = None, None, 0
    return ResumePoint(folder=found.folder, position=position, numerics=numerics, from_elsewhere=elsewhere)


def _differences(
    data: dict[str, list[dict[str, Any]]] | None,  # fingerprints, as the checkpoint has them
    before: Config,
    config: Config,
    step: int,
    precision: str,  # of the checkpoint
) -> tuple[list[str], list[str]]:
    """What differs from the run that the checkpoint belongs to: (identity, course), one setting or source per entry."""
    from megatrain.data import fingerprint  # which loads torch

    run_plan = (before.run_plan(precision), config.run_plan(precision))
    identity, course, _ = (list(map(str, changes)) for changes in diff(*run_plan))
    # Files are compared where their settings are equal; otherwise the settings differ already.
    if data is not None and before.data.train == config.data.train:
        identity += fingerprint.changed_sources("data.train", data["train"], config.data.train, step)
    if data is not None and before.data.eval == config.data.eval:
        course += fingerprint.changed_sources("data.eval", data["eval"], config.data.eval, step)
    return identity, course


def _measures_otherwise(before: Config, config: Config, course: list[str]) -> bool:
    """Whether losses that decide which step is the best cannot be compared with earlier ones."""
    if not config.data.eval:
        return False
    asked = [(one.data.eval, one.eval.best, one.eval.max_batches) for one in (before, config)]
    return asked[0] != asked[1] or any(change.startswith("data.eval[") for change in course)


def _refusal(found: "Checkpoint", config: Config, differences: list[str], elsewhere: bool) -> str:
    listed = "; ".join(differences)
    run = Path(config.output.resume) if elsewhere else found.folder.parent.parent
    if (run / "export" / "config.json").is_file():
        model = f"model: {run / 'export'}"
    else:
        model = f"model: OUT after megatrain export {run} OUT"
    if not elsewhere:
        return (
            f"{found.folder} belongs to another run, since these differ: {listed}. Put them back to go on with it, or "
            f"name another output.dir to start anew, from its weights with {model}"
        )
    return (
        f"output.resume is {str(run)!r}, and a branch keeps model, data, batch and seed, but these differ: {listed}. "
        f"Put them back to branch off, or start a new run from its weights: write {model}, and leave output.resume out"
    )
