"""Plans, data sets and configurations as tables and lines."""

from typing import TYPE_CHECKING, Any

from megatrain.cli.output import line, table
from megatrain.system.hardware import format_bytes

if TYPE_CHECKING:
    from megatrain.data.inspection import RowView, Summary, TokenView
    from megatrain.planning.planner import RunPlan
    from megatrain.training.forecast import Forecast


def plan(report: "Forecast") -> None:
    """Everything `megatrain plan` says, and the dry run of its plan."""
    from megatrain.planning import calibrate

    run_plan = report.run_plan
    machine = run_plan.machine
    where = machine.gpu.name if run_plan.device == "cuda" and machine.gpu else f"{machine.cpus} processors"
    line(f"{report.num_parameters:,} parameters, {report.num_trainable:,} trained, {run_plan.precision} on {where}")
    items(run_plan)
    updates(run_plan)
    rows, seq = run_plan.micro_batch
    estimate = report.estimate
    lanes = ", ".join(f"{lane} {seconds:.3g} s" for lane, seconds in estimate["lanes"].items())
    line(
        f"micro-batches: {run_plan.micro_batches} of up to {rows} x {seq} tokens; "
        f"{report.largest_micro_batch} rows would fit"
    )
    line(
        f"step: about {report.expected_step_s:.3g} s expected, at least {report.step_s:.3g} s "
        f"({report.step_tokens / report.step_s:,.0f} tokens/s at most); bound by "
        f"{estimate['bound']} ({lanes})"
    )
    line(f"at least: {_bound_basis(report.timed)}")
    if not run_plan.measured:
        line("rates: not measured, so those of a usual machine are expected; `megatrain probe` measures this one")
    elif not machine.described and (busy := calibrate.kept_busy(machine, run_plan.device)):
        line(f"rates: of a busy machine ({busy}); run `megatrain probe` again when it is idle")
    if report.free_clipping_tokens is not None:
        line(f"clipping is free from {report.free_clipping_tokens:,} tokens a step on")
    if report.given_up is not None:
        line(f"train.update: {report.update} gives up: {report.given_up}")
    disk(report)
    if report.checkpoint_s is not None:
        line(
            f"a checkpoint: about {report.checkpoint_s:.3g} s at the {run_plan.rates['disk_write_gbs']:.3g} GB/s that "
            "the probe's disk wrote, beneath the steps that follow"
        )
    line("numerics key: " + ", ".join(f"{key} {_plain(value)}" for key, value in report.numerics.items()))
    line(f"packed rows: {_packed_rows(report.numerics['packed_rows'])}")
    if report.numerics["attention"] == "sdpa: flash or math":
        line("attention: flash, and torch's math kernel for micro-batches with a dense mask, which flash does not take")
    elif report.numerics["attention"] == "sdpa: math":
        line(
            f"attention: torch's math kernel, slow and with a matrix of seq x seq for each head, since flash takes no "
            f"{run_plan.precision} heads of this model; without train.deterministic it is another kernel"
        )
    if run_plan.device == "cuda" and not report.numerics["deterministic"]:
        line("without train.deterministic a repeated run on CUDA agrees closely, not bit for bit")


def disk(report: "Forecast") -> None:
    """What a run leaves on disk, against what is free there."""
    sizes = {name: format_bytes(size) for name, size in report.disk.items() if size is not None}
    cache = f", {sizes['cache']} of tokenized data" if "cache" in sizes else ""
    free = f"; {sizes['free']} are free {report.output_dir or 'here'}" if "free" in sizes else ""
    line(
        f"disk: {sizes['checkpoint']} a checkpoint, {sizes['checkpoints']} for all that exist at a time, "
        f"{sizes['export']} for the export{cache}{free}"
    )


def _packed_rows(how: str) -> str:
    """What the documents of packed rows cost."""
    costs = {
        "variable length": "attention costs each document its own length",
        "dense mask": "attention takes about 3 times as long on a card as over whole rows",
        "a row for each document": "a call for each length of documents, uncompiled",
    }
    return f"{how} ({'; '.join(cost for way, cost in costs.items() if way in how)})"


def _bound_basis(run_plan: "RunPlan") -> str:
    """At which rates a step takes its least time; see `forecast.lower_bound_rates`."""
    if run_plan.device == "cpu":
        return (
            "at rates that no processors pass, measured or not: a probe shares them with whatever else runs, so it "
            "says what to expect and not what is possible"
        )
    if run_plan.measured:
        from megatrain.training.forecast import PROBE_MARGIN

        return f"at {PROBE_MARGIN:g} times the measured rates"
    return "at rates that no card passes"


_CPU_TIERS = {"device": "RAM, to compute", "host": "RAM, state"}
"""On the CPU both tiers are one memory, which nothing needs to pin."""


def items(run_plan: "RunPlan") -> None:
    """What goes where, line by line, with totals against budgets."""
    from megatrain.planning.planner import items_by_tier

    cpu = run_plan.device == "cpu"
    rows: list[tuple[str, str, str]] = []
    for tier, group, total in items_by_tier(run_plan.plan):
        where = _CPU_TIERS[tier] if cpu else tier
        for item in group:
            what = item["what"] + (" (pinned)" if item.get("pinned") and not cpu else "")
            rows.append((where, what, format_bytes(item["bytes"])))
        shared = cpu and run_plan.budget[tier] == run_plan.budget["host"]
        allowed = "" if shared else f", of {format_bytes(run_plan.budget[tier])} allowed"
        rows.append((where, f"sum{allowed}", format_bytes(total)))
    if cpu:
        both = format_bytes(sum(run_plan.plan["totals"].values()))
        rows.append(("RAM", f"in all, of {format_bytes(run_plan.budget['host'])} allowed", both))
    table(("where", "what", ">size"), rows)
    line("sizes are rounded here; --json and a run's plan.json have every byte")


_UPDATES = (("host", "host"), ("device", "device"), ("host", "device"))
"""Where a unit's state lives and where it is updated."""


def updates(run_plan: "RunPlan") -> None:
    """How many units are updated where."""
    places = [(unit["state"], unit["update"]) for unit in run_plan.plan["units"]]
    on_host, living, visiting = (places.count(place) for place in _UPDATES)
    line(
        f"updates: {on_host} units by the host's optimizer, {living} on the device where their state lives, "
        f"{visiting} on the device with their state on the host"
    )


def data(name: str, summary: "Summary") -> None:
    """A data set in numbers."""
    share = summary.num_supervised / summary.num_tokens if summary.num_tokens else 0.0
    padding = f", {summary.padding:.1%} padding" if summary.padding else ""
    lengths = summary.lengths
    line(
        f"{name}: {summary.num_rows:,} rows, {summary.num_tokens:,} tokens, {share:.0%} supervised, "
        f"{summary.num_sequences:,} sequences of up to {summary.seq_len}{padding}"
    )
    line(
        f"  row lengths: {lengths['min']} to {lengths['max']}, half of them up to {lengths['median']}, "
        f"95 % up to {lengths['p95']}" + ("; from the cache" if summary.cached else "")
    )
    for read in summary.formats:
        line(f"  {read}")
    for note in summary.notes:
        line(f"  note: {note}")


def row(view: "RowView") -> None:
    """One row, token by token."""
    dropped = f", dropped: {view.dropped}" if view.dropped else ""
    size = f"{view.num_tokens} tokens"
    if view.parts > 1:
        size = f"part {view.part} of {view.parts}: {len(view.tokens)} of {size}"
    line(f"row {view.row} ({view.where}): {size}, {view.num_supervised} supervised{dropped}")
    tokens(view.tokens)


_SCREENFUL = 20
"""Lines of a batch that are shown."""


def batch(sequences: "list[list[TokenView]]", limit: int = 400) -> None:
    """The beginning of a micro-batch: tokens of its first sequences, as far as a screen shows them."""
    left, lines, shown = limit, _SCREENFUL, 0
    for views in sequences:
        count = 0
        while count < min(left, len(views)) and lines > 0:
            lines -= views[count].text.count("\n")
            count += 1
        if not count:
            break
        left, lines, shown = left - count, lines - 1, shown + 1
        tokens(views, count)
    if shown < len(sequences):
        line(f"… and {len(sequences) - shown} more sequences; `megatrain data` shows the rows, --json all of the batch")


def tokens(views: "tuple[TokenView, ...] | list[TokenView]", limit: int = 400) -> None:
    """Tokens in the order of the text; what is learnt is in green on a terminal and in [brackets] elsewhere."""
    import sys

    terminal = sys.stdout.isatty()
    parts: list[str] = []
    learning = False
    for view in views[:limit]:
        if view.supervised != learning:
            learning = view.supervised
            parts.append(("\x1b[32m" if learning else "\x1b[0m") if terminal else ("[" if learning else "]"))
        parts.append(view.text)
    if learning:
        parts.append("\x1b[0m" if terminal else "]")
    line("".join(parts) + (f" … and {len(views) - limit} more tokens" if len(views) > limit else ""))


def _plain(value: Any) -> str:
    return " x ".join(map(str, value)) if isinstance(value, list) else str(value)
