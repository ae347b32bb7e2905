"""Settings that are each fine and contradict each other. All refused by name."""

from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.config.constraints import check_eps, refuse_clipped_immediate, refuse_slabs, refuse_unrepeatable
from megatrain.errors import ConfigError

if TYPE_CHECKING:
    from megatrain.config.config import Config
    from megatrain.config.schema import TrainConfig

_MOST_TOKENS = 2**40
"""Of a step: more than any run has, and few enough for the core to count their parts."""


def check(config: "Config") -> None:
    """Raises ConfigError for the first contradiction found."""
    _model(config)
    _batch(config)
    _train(config)
    _eval(config)
    _disk(config)
    _plan(config)


def _disk(config: "Config") -> None:
    plan = config.plan
    if plan.inputs_on_disk and plan.inputs == "device":
        raise ConfigError(
            f"plan.inputs_on_disk ({plan.inputs_on_disk}) and plan.inputs (device) are both given, and inputs that "
            "wait on the device are not on disk; remove one"
        )
    for name in ("state_on_disk", "weights_on_disk", "inputs_on_disk"):
        count = getattr(plan, name)
        if count and config.memory.nvme is None:
            raise ConfigError(
                f"plan.{name} is {count}, and no disk is named; set memory.nvme.path to a folder on a fast disk, or "
                "remove it"
            )
        if count and plan.updates_on_device and name != "inputs_on_disk":
            raise ConfigError(
                f"plan.{name} ({count}) and plan.updates_on_device ({plan.updates_on_device}) are both given, and the "
                "latter is about state in host memory; keep one"
            )
    if plan.state_on_disk is not None and (plan.weights_on_disk or 0) > plan.state_on_disk:
        raise ConfigError(
            f"plan.weights_on_disk ({plan.weights_on_disk}) is more than plan.state_on_disk ({plan.state_on_disk}), "
            "and weights go to disk only with the optimizer state of their unit; make it at most that"
        )


def _model(config: "Config") -> None:
    model = config.model
    if model.revision is not None and model.path is not None and Path(model.path).exists():
        raise ConfigError(f"model.revision has no effect on model.path {model.path}, a local folder; remove it")


def _batch(config: "Config") -> None:
    train, data, plan = config.train, config.data, config.plan
    if train.batch_tokens is not None and train.batch_tokens > _MOST_TOKENS:
        raise ConfigError(f"train.batch_tokens is {train.batch_tokens}; a step has at most {_MOST_TOKENS} tokens")
    if data.packing and train.batch_tokens is not None:
        if train.batch_tokens < data.seq_len:
            raise ConfigError(
                f"train.batch_tokens ({train.batch_tokens}) is less than data.seq_len ({data.seq_len}), one window; "
                "raise the one or lower the other"
            )
        if train.batch_tokens % data.seq_len:
            below = train.batch_tokens // data.seq_len * data.seq_len
            raise ConfigError(
                f"train.batch_tokens ({train.batch_tokens}) is not a multiple of data.seq_len ({data.seq_len}); "
                f"with packing a step is whole windows: write {below} or {below + data.seq_len}"
            )
    if plan.micro_batch is not None:
        rows = train.batch_size
        what = f"train.batch_size ({rows})"
        if rows is None and train.batch_tokens is not None and data.packing:
            rows = train.batch_tokens // data.seq_len
            what = (
                f"the {rows} windows of a step (train.batch_tokens {train.batch_tokens} / data.seq_len {data.seq_len})"
            )
        if rows is not None and plan.micro_batch > rows:
            raise ConfigError(f"plan.micro_batch ({plan.micro_batch}) is more than {what}")


def _plan(config: "Config") -> None:
    refuse_slabs(config.plan.slabs, config.train.update, "train.")


def _train(config: "Config") -> None:
    train = config.train
    refuse_clipped_immediate(train.update, train.max_grad_norm, "train.")
    if train.check_every is not None:
        device = "cuda" if config.device == "cuda" else "cpu"  # `auto` is decided, and asked again, by the planner
        refuse_unrepeatable(train.update, device, train.deterministic, "train.check_every", "train.")
    for group in train.groups:  # what a group leaves out is the section's
        eps = train.eps if group.eps is None else group.eps
        check_eps(eps, group.betas or train.betas, f"eps of train.groups {list(group.params)}")
    if train.steps is not None:
        check_schedule_length(train, train.steps, "train.steps")
    _schedule(train)


def check_schedule_length(train: "TrainConfig", steps: int, source: str) -> None:
    """Raises ConfigError for a warm-up, or a warm-up and a decay, of more steps than the run has: the learning rate
    would never reach `train.lr`, or would fall before it does. `source`: where the number of steps comes from."""
    schedule = train.schedule
    warmup, decay = (amount if amount >= 1 else amount * steps for amount in (schedule.warmup, schedule.decay))
    if warmup > steps:
        raise ConfigError(
            f"train.schedule.warmup ({warmup:g} steps) is longer than the run, {source} ({steps}); lower it, or write "
            "a part of all steps, such as 0.03"
        )
    # Parts that together are the whole run may be a little more than it as floats.
    if schedule.name == "wsd" and decay and warmup + decay > steps * (1 + 1e-9):
        remedy = "write a part of all steps, such as 0.2" if schedule.decay >= 1 else "shorten the warm-up"
        raise ConfigError(
            f"train.schedule.decay ({decay:g} steps) after a warm-up of {warmup:g} is longer than the run, {source} "
            f"({steps}); lower it, or {remedy}"
        )


def _schedule(train: "TrainConfig") -> None:
    """What a schedule of this shape would not look at."""
    schedule = train.schedule
    if schedule.name == "constant" and schedule.min_lr:
        raise ConfigError(
            f"train.schedule.min_lr ({schedule.min_lr:g}) has no effect on a constant schedule, which never falls; "
            "remove it, or name another schedule"
        )
    default = type(schedule)().decay
    if schedule.name != "wsd" and schedule.decay != default:
        raise ConfigError(
            f"train.schedule.decay ({schedule.decay:g}) has no effect on a {schedule.name} schedule; remove it, or "
            "write name: wsd"
        )
    moves = schedule.name != "constant" or schedule.warmup > 0
    for index, group in enumerate(train.groups):
        if train.lr == 0 and group.lr and moves:
            raise ConfigError(
                f"train.lr is 0 and train.groups.{index}.lr is {group.lr:g}: the schedule moves a group in proportion "
                f"to train.lr, so it would stay as it is. Write train.lr: {group.lr:g} and freeze what is not trained "
                "(model.freeze)"
            )


def _eval(config: "Config") -> None:
    held_out, when = config.data.eval, config.eval
    for source in held_out:
        if source.weight != 1.0:
            raise ConfigError(
                f"weight of {source.path} in data.eval is {source.weight:g} and has no effect: an evaluation takes "
                "each row once; remove it"
            )
    if not held_out:
        for name in ("every", "max_batches", "early_stop", "best"):
            if getattr(when, name) is not None:
                raise ConfigError(
                    f"eval.{name} has no effect without data.eval; name held-out data, such as data.eval: 0.05"
                )
        if when.keep_best:
            raise ConfigError("eval.keep_best needs data.eval to tell which checkpoint is best; name held-out data")
        return
    if when.every is None:
        if when.early_stop is not None:
            raise ConfigError(
                "eval.early_stop has no effect without eval.every: nothing is evaluated in between; set it"
            )
        if when.keep_best:
            raise ConfigError(
                "eval.keep_best has no effect without eval.every: nothing is evaluated in between; set it"
            )
    names = list(dict.fromkeys(source.name for source in held_out if source.name is not None))
    if when.best is not None and when.best not in names:
        there = f"data.eval has {', '.join(names)}" if names else "data.eval has one set without a name"
        raise ConfigError(
            f"eval.best is {when.best!r}, and {there}; name one of several sets, or leave it out for the loss over all"
        )
