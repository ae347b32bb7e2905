"""What the command line refuses before it loads torch: combinations of arguments, and a configuration that this machine
cannot run. Each function raises ConfigError."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.config.constraints import refuse_processes
from megatrain.errors import ConfigError

if TYPE_CHECKING:
    from megatrain.config import Config
    from megatrain.data import Loader


def several_processes(verb: str) -> None:
    """More than one process, for the verbs that compute with an engine."""
    if verb in ("train", "bench", "eval"):
        refuse_processes()


def before_loading(config: "Config") -> None:
    """Missing files or packages, and a device or precision that this machine does not have."""
    from megatrain.config import paths
    from megatrain.training import callbacks

    paths.check(config)
    callbacks.check_installed(config)
    device(config)


def device(config: "Config") -> None:
    """A device or precision that this machine does not have."""
    from megatrain.planning import planner
    from megatrain.system import hardware

    machine = hardware.read()
    planner.choose_precision(config, planner.choose_device(config, machine), machine)


def train(args: argparse.Namespace) -> None:
    """`--verbose` where no plan is printed."""
    if args.verbose and not args.dry_run:
        raise ConfigError("--verbose prints the plan of --dry-run item by item; add --dry-run, or leave it out")


def data(args: argparse.Namespace, config: "Config") -> None:
    """`megatrain data`: a number of rows below 0, or held-out rows where there are none."""
    if args.rows < 0:
        raise ConfigError(f"--rows is {args.rows}; give how many rows to show, 0 or more")
    if args.eval and not config.data.eval:
        raise ConfigError("--eval shows held-out rows, and data.eval is not set")


def run_folder(run: Path) -> None:
    """A run or checkpoint that is not there."""
    if not run.is_dir():
        raise ConfigError(f"there is no folder {run}; give the folder of a run (output.dir) or one checkpoint")


def generate(args: argparse.Namespace) -> None:
    """Neither a run nor a model, and numbers with which no text can be drawn."""
    from megatrain.config import constraints, paths

    paths.check_model_source(Path(args.source))
    constraints.check_draws(args.max_new_tokens, args.temperature, args.top_p)


def step_of_configuration(step: str | None, target: Path) -> None:
    """`--step` with a configuration."""
    if step is not None:
        raise ConfigError(f"--step chooses a checkpoint of a run, and {target} is a configuration; leave it out")


def step_of_checkpoint(step: str | None, checkpoint: Path) -> None:
    """`--step` with one checkpoint."""
    if step is not None:
        raise ConfigError(f"{checkpoint} is one checkpoint, not a run, so it has no step {step}; leave --step out")


_NOTHING_HELD_OUT = "data.eval is not set; name held-out data, such as data.eval: 0.05"


def nothing_held_out(config: "Config") -> None:
    """An evaluation without held-out data."""
    if not config.data.eval:
        raise ConfigError(_NOTHING_HELD_OUT)


def held_out(loaders: "dict[str, Loader]") -> "dict[str, Loader]":
    """The same once the data are read; returns the loaders."""
    if not loaders:
        raise ConfigError(_NOTHING_HELD_OUT)
    return loaders


def best_step(run: Path, wanted: str | None) -> str | None:
    """`--step` with `best` replaced by the step of the lowest held-out loss."""
    from megatrain.checkpoint.step_folders import steps_in
    from megatrain.training.run_dir import read_status

    if wanted is None or wanted == "last" or wanted.isdecimal():
        return wanted
    if wanted != "best":
        raise ConfigError(f"--step is {wanted!r}; it takes a number, best or last")
    best = read_status(run).get("best_step")
    if best not in steps_in(run):
        raise ConfigError(
            f"{run} has no checkpoint of its lowest held-out loss; train with eval.keep_best: true to keep it"
        )
    return str(best)
