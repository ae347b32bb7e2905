"""A plan in at most twelve lines for a person to act on: what goes where, whether it fits, how long it takes, what to
change. `megatrain plan` prints them, and a run logs them when it starts."""

import math
from typing import TYPE_CHECKING, Any

from megatrain.config.data_size import BYTES_PER_TOKEN, data_bytes
from megatrain.names import format_names
from megatrain.planning import calibrate, growth, planner
from megatrain.system.hardware import format_bytes
from megatrain.training.forecast import FEW_STEPS
from megatrain.training.metrics import duration

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from megatrain.training.forecast import Forecast

_GROUPS = (
    # words in an item's name, and the group of the summary that counts it; the first match decides
    (("exp_avg",), "exp_avg and exp_avg_sq"),
    (("optimizer state",), "optimizer state"),
    (("gradient",), "gradients"),
    (("weights",), "weights"),
    (("activation", "layer input"), "activations"),
    (("captured",), "captured layers"),
)
_OTHER = "workspace and other"

_MOST_RUNNERS_UP = 3
"""Plans that were not chosen that one line names."""


def lines(report: "Forecast", *, why: bool = False) -> list[str]:
    """The summary, top to bottom. `why`: with the plans that were not chosen, for which more plans are made."""
    return [
        _headline(report),
        *_memory(report),
        _disk(report),
        _layers(report),
        _step(report),
        _time(report),
        *_run(report),
        *(_why(report) if why else []),
        *_matmul(report),
        *_given_up(report),
        *_checks(report),
        *(f"to change: {advice}" for advice in _advice(report)),
    ]


def grace(report: "Forecast") -> str:
    """How long a stop takes, for whoever sets a scheduler's grace period."""
    size, step, writing = report.disk["checkpoint"] or 0, report.expected_step_s, report.checkpoint_s
    if writing is None or not report.run_plan.measured:
        return (
            f"the present step and a checkpoint of {format_bytes(size)}; `megatrain probe` measures how long they take"
        )
    return (
        f"about {duration(math.ceil(step + writing))}: the present step (about {_seconds(step)}) and a checkpoint of "
        f"{format_bytes(size)} (about {_seconds(writing)})"
    )


def numerics_key(key: dict[str, Any]) -> str:
    """The numerics key in one line."""
    shown = {name: " x ".join(map(str, value)) if isinstance(value, list) else value for name, value in key.items()}
    return "numerics key: " + ", ".join(f"{name} {value}" for name, value in shown.items())


def _headline(report: "Forecast") -> str:
    run_plan, decoder = report.run_plan, report.decoder
    machine = run_plan.machine
    where = machine.gpu.name if run_plan.device == "cuda" and machine.gpu else f"{machine.cpus} processors"
    trained = "all" if decoder.num_trainable == decoder.num_parameters else f"{decoder.num_trainable:,}"
    return f"fits: {decoder.num_parameters:,} parameters, {trained} trained, {run_plan.precision} on {where}"


def _memory(report: "Forecast") -> list[str]:
    run_plan = report.run_plan
    totals, budget = run_plan.plan["totals"], run_plan.budget
    if run_plan.device == "cpu":  # one memory
        used, allowed = format_bytes(totals["device"] + totals["host"]), format_bytes(budget["host"])
        return [f"memory: {used} of {allowed}: {_groups(report, ('device', 'host'))}", *_state_on_disk(report)]
    return [
        *(
            f"{tier} memory: {format_bytes(totals[tier])} of {format_bytes(budget[tier])}: {_groups(report, (tier,))}"
            for tier in ("device", "host")
        ),
        *_state_on_disk(report),
    ]


def _state_on_disk(report: "Forecast") -> list[str]:
    disk = report.state_on_disk
    if disk is None:
        return []
    budget, units = report.run_plan.budget["disk"], report.run_plan.plan["units"]
    count = sum(unit["state"] == "disk" for unit in units)
    spilled, daily = format_bytes(disk.bytes), format_bytes(disk.bytes_written_a_day)
    parts, moved = [], "reads and writes it once"
    if disk.weights:
        of = sum(unit.get("weights_on_disk", False) for unit in units)
        parts.append(f"{format_bytes(disk.weights)} of it weights, of {of} units")
    waiting = sum(unit["input"] == "disk" for unit in units)
    what, of_units = "state on disk", f", of {count} of {len(units)} units"
    if disk.inputs and not count:
        what, of_units = "layer inputs on disk", f", of {waiting} of {len(units)} units"
    elif disk.inputs:
        parts.append(f"{format_bytes(disk.inputs)} of it layer inputs, of {waiting} units")
    if disk.weights or disk.inputs:
        moved = f"reads {format_bytes(disk.bytes_read)} and writes {format_bytes(disk.bytes_written)}"
    among = f" ({'; '.join(parts)})" if parts else ""
    text = (
        f"{what}: {spilled} of {format_bytes(budget)}{of_units}{among}; a step "
        f"{moved}, in about {_seconds(disk.seconds)}; wear: {daily} written per day"
    )
    return [text]


def memory_groups(items: "Sequence[Mapping[str, Any]]", tiers: tuple[str, ...]) -> dict[str, int]:
    """Bytes by group (weights, gradients, …) of a plan's items in these tiers, largest first."""
    sums: dict[str, int] = {}
    for item in items:
        if item["tier"] in tiers:
            group = next((name for words, name in _GROUPS if any(word in item["what"] for word in words)), _OTHER)
            sums[group] = sums.get(group, 0) + item["bytes"]
    return dict(sorted(sums.items(), key=lambda one: -one[1]))


def _groups(report: "Forecast", tiers: tuple[str, ...]) -> str:
    groups = memory_groups(report.run_plan.plan["items"], tiers)
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in groups.items())


def _disk(report: "Forecast") -> str:
    disk = report.disk
    sizes = {name: format_bytes(size) for name, size in disk.items() if size is not None}
    count = (disk["checkpoints"] or 0) // max(1, disk["checkpoint"] or 0)
    free = f"; {sizes['free']} free in {report.config.output.dir or 'this folder'}" if "free" in sizes else ""
    cache = f", {sizes['cache']} of tokenized data" if "cache" in sizes else ""
    seconds = f" (about {_seconds(report.checkpoint_s)} to write)" if report.checkpoint_s is not None else ""
    return (
        f"disk: {sizes['checkpoint']} per checkpoint{seconds}, {sizes['checkpoints']} for the {count} that exist at a "
        f"time, {sizes['export']} for the export{cache}{free}"
    )


def _layers(report: "Forecast") -> str:
    units = report.run_plan.plan["units"]
    activations = [unit["activation"] for unit in units[1:-1]]
    how = {"keep": "keep their activations", "offload": "offload them", "recompute": "recompute them"}
    shown = ", ".join(f"{activations.count(kind)} {words}" for kind, words in how.items() if kind in activations)
    if len(set(activations)) == 1:
        shown = f"all {how[activations[0]].replace('them', 'their activations')}"
    else:
        shown = f"of which {shown}" if _counted(report) == "layers" else shown.replace(" ", " units ", 1)
    differ = [unit["large_activation"] for unit in units if "large_activation" in unit]
    if differ:
        plan = report.run_plan.plan
        which = "last" if plan["large_begin"] else "first"
        shown += f"; of the {which} {plan['large_group']} micro-batches {len(differ)} {how[differ[0]]}"
    on_device = sum(unit["update"] == "device" for unit in units)
    where = f", {on_device} on the device" if on_device else ""
    updates = f"{len(units) - on_device} units updated on the host{where}"
    if on_device < len(units):
        updates += f" ({report.run_plan.rates['adamw_gparams']:.2g}e9 parameters/s, {_moments(report)} moments)"
    return f"layers: {_sent(report)}, {shown}; {updates}"


def _counted(report: "Forecast") -> str:
    """What a plan has one entry for, between embedding and head."""
    return "layers" if len(report.run_plan.plan["units"]) - 2 == report.decoder.num_layers else "units"


def _sent(report: "Forecast") -> str:
    """How many layers there are, and which of them are sent and computed in halves and tiles."""
    decoder, run_plan = report.decoder, report.run_plan
    units = len(run_plan.plan["units"]) - 2
    if _counted(report) == "layers":
        return str(decoder.num_layers)
    why = dict.fromkeys(split for of in decoder.structure_of if isinstance(split := decoder.splits[of], str))
    whole = sum(isinstance(decoder.splits[of], str) for of in decoder.structure_of)
    stay = f" ({whole} whole: {'; '.join(why)})" if whole else ""
    if (groups := run_plan.options.get("expert_groups", 1)) > 1:
        routed = ", of which those are sent that tokens are routed to"
        some = routed if run_plan.options.get("sent_experts") == "routed" else ""
        apart = f"attention and MLP apart{stay}, experts in {groups} groups{some}"
        return f"{decoder.num_layers}, sent as {units} units, {apart}"
    tiles = run_plan.options["mlp_tiles"]
    length = -(-math.prod(run_plan.micro_batch) // tiles)
    count = sum(map(decoder.halves.is_tiled, decoder.halves.units)) if tiles > 1 else 0
    some = "" if count == decoder.num_layers else f"{count} "
    tiled = f", {some}MLPs computed in {tiles} tiles of {length:,} tokens" if tiles > 1 else ""
    return f"{decoder.num_layers}, sent as {units} units, attention and MLP apart{stay}{tiled}"


def _moments(report: "Forecast") -> str:
    return {"8bit": "8-bit"}.get(report.config.train.moments, report.config.train.moments)


def _step(report: "Forecast") -> str:
    rows, seq = report.run_plan.micro_batch
    count = report.micro_batches
    split = f"{count} micro-batch{'es' * (count > 1)} of up to {rows} x {seq}"
    return f"step: {report.step_tokens:,} tokens in {split}{_by_length(report)}"


def _by_length(report: "Forecast") -> str:
    """Device memory as a function of the tokens of a micro-batch."""
    if report.run_plan.device == "cpu":
        return ""
    found = growth.device_memory(report.config, report.decoder, report.run_plan)
    if found is None:
        return ""
    constant, per_token = format_bytes(found.constant), format_bytes(found.per_token)
    return f"; device memory: {constant} and {per_token} per token of a micro-batch"


def _time(report: "Forecast") -> str:
    rate = f"{report.expected_tokens_per_s:,.0f} tokens/s"
    return f"time: about {_seconds(report.expected_step_s)} per step, {rate}; bound by {report.bound}"


def _run(report: "Forecast") -> list[str]:
    """Hours of the run: by its steps, or by the size of its data where those were not read."""
    if report.total_steps is not None:
        hours = _hours(report.total_steps * report.expected_step_s)
        steps = f"{report.total_steps:,} step{'s' * (report.total_steps != 1)}"
        return [f"run: {steps}, about {hours}, evaluations not counted"]
    size, epochs = data_bytes(report.config), report.config.train.epochs or 1
    if size is None or report.run_s is None:
        counted = "`megatrain train --dry-run` counts those of your data"
        return [f"run: about {_hours(1e9 / report.expected_tokens_per_s)} per billion tokens ({counted})"]
    if report.run_tokens is not None and report.run_tokens < report.step_tokens:
        held = f"about {report.run_tokens:,} of its {report.step_tokens:,} tokens"
        return [
            f"run: less than one step: {format_bytes(size)} of data have {held}, at {BYTES_PER_TOKEN} bytes per token"
        ]
    passes = f"{epochs:g} epoch{'s' * (epochs != 1)} of {format_bytes(size)} of data"
    counted = "`megatrain train --dry-run` counts the tokens"
    return [f"run: roughly {_hours(report.run_s)} for {passes} at {BYTES_PER_TOKEN} bytes per token ({counted})"]


def _why(report: "Forecast") -> list[str]:
    """The plans next to the chosen one, in a line."""
    others = [one for one in report.runners_up if one.expected_step_s is not None]
    if not others:
        return []
    chosen = report.timed.plan["estimate"]["expected_step_s"]
    shown = [f"{one.change} {(one.expected_step_s or 0) / chosen - 1:+.0%}" for one in others[:_MOST_RUNNERS_UP]]
    return [f"why this plan: other choices change the step's time: {', '.join(shown)} (--verbose has all)"]


def _matmul(report: "Forecast") -> list[str]:
    """With `train.matmul: fp8`, which linear layers are multiplied in what."""
    decoder = report.decoder
    if decoder.matmul != "fp8":
        return []
    from megatrain.engine import float8

    choices = [float8.choose(layer) for layer in decoder.layers]
    chosen = sum(len(choice.chosen) for choice in choices)
    left: dict[str, list[str]] = {}
    for choice in choices:
        for name, reason in choice.left.items():
            left.setdefault(reason, []).append(name)
    others = "; ".join(f"{format_names(sorted(set(names)))} ({reason})" for reason, names in left.items())
    bf16 = f"; in bf16 {others}" if others else ""
    text = (
        f"train.matmul: fp8 in {chosen} linear layers (e4m3, a scale for each token and output channel), gradients of "
        f"weights, head and embedding in bf16{bf16}"
    )
    return [text]


def _given_up(report: "Forecast") -> list[str]:
    return [f"train.update: {report.update} gives up: {report.given_up}"] if report.given_up is not None else []


def _checks(report: "Forecast") -> list[str]:
    """What `train.check_every` costs: forward and backward once more, and one operation at a time."""
    every = report.config.train.check_every
    if every is None:
        return []
    cost = f"about {_seconds(report.expected_step_s)} more, and longer where copies or updates are hidden now"
    return [f"train.check_every: one step in {every} takes {cost}: {100 / every:.2g} % of the run or more"]


def _advice(report: "Forecast") -> list[str]:
    """At most two changes that are known to help."""
    run_plan, config = report.run_plan, report.config
    advice = []
    if run_plan.machine.assumed:
        advice.append(
            f"assumed are {run_plan.machine.assumed}: describe yours in a file (docs/machines.md) for its own"
        )
    elif not run_plan.measured:
        advice.append("the rates are those of a usual machine, not of this one: run `megatrain probe` to measure it")
    elif not run_plan.machine.described and (busy := calibrate.kept_busy(run_plan.machine, run_plan.device)):
        advice.append(f"the rates were measured on a busy machine ({busy}): run `megatrain probe` when it is idle")
    if report.numerics["attention"] == "sdpa: math":
        advice.append("train.deterministic makes attention slow in fp32: turn it off, or use train.precision: bf16")
    if (
        report.total_steps is None
        and report.run_tokens is not None
        and report.run_tokens < FEW_STEPS * report.step_tokens
    ):
        steps = math.ceil(report.run_tokens / report.step_tokens)
        advice.append(
            f"fewer tokens per step (train.batch_tokens): by the size of its data the run has only about {steps} "
            f"step{'s' * (steps != 1)}"
        )
    elif report.step_tokens == planner.nominal_rows(config) * config.data.seq_len:  # else the data have no more
        advice += _larger_steps(report)
    recomputed = sum(unit["activation"] == "recompute" for unit in run_plan.plan["units"][1:-1])
    if recomputed and config.memory.gpu != "auto":
        advice.append(
            f"a larger memory.gpu lets more of the {recomputed} recomputed {_counted(report)} keep their activations"
        )
    return advice[:2]


def _larger_steps(report: "Forecast") -> list[str]:
    """What more tokens in a step would help with, by the lane that a step waits for."""
    free = report.free_clipping_tokens
    hidden = free is None or report.step_tokens >= free or report.update == "immediate"
    if report.bound in ("upload", "download"):
        return ["more tokens per step (train.batch_tokens): weights cross the link once per step, whatever its size"]
    if report.bound in ("state_read", "state_write"):
        more = "more tokens per step (train.batch_tokens), or more drives (memory.nvme.path)"
        disk = report.state_on_disk
        if disk is not None and disk.inputs:
            return [
                "more drives (memory.nvme.path), or more host memory: layer inputs on disk grow with a step's tokens"
            ]
        if disk is not None and disk.weights:
            return [f"{more}: what is on disk is read a few times and written once per step, whatever its size"]
        return [f"{more}: state on disk is read and written once per step, whatever its size"]
    if report.bound == "host" and not hidden:
        return [f"from {free:,} tokens per step on (train.batch_tokens) the host's updates cost no time"]
    return []


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 100 else duration(seconds)


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} h" if seconds >= 3600 else duration(max(1, round(seconds)))
