"""Prints plans, data sets and tokens as tables and lines."""

from typing import TYPE_CHECKING

from megatrain.cli.output import line, table
from megatrain.system.hardware import format_bytes
from megatrain.training import plan_summary
from megatrain.training.forecast import PROBE_MARGIN

if TYPE_CHECKING:
    from megatrain.data.inspection import RowView, Summary, TokenView
    from megatrain.planning.planner import RunPlan
    from megatrain.training.forecast import Forecast


def plan(report: "Forecast", *, verbose: bool = False) -> None:
    """The plan as `megatrain plan` and the dry run print it: a summary, or with `verbose` everything."""
    for text in plan_summary.lines(report, why=not verbose):
        line(text)
    if not verbose:
        line("more: --verbose lists every item, lane and the numerics key; --json has every byte")
        return
    line()
    items(report.run_plan)
    updates(report.run_plan)
    line(f"largest micro-batch that would fit: {report.largest_micro_batch} rows")
    lanes = ", ".join(f"{lane} {seconds:.3g} s" for lane, seconds in report.timed.plan["estimate"]["lanes"].items())
    line(f"busy time per lane: {lanes}")
    checkpoints(report)
    line(f"no step can take less than {report.step_s:.3g} s, {_bound_basis(report.timed)}")
    if report.free_clipping_tokens is not None:
        line(f"clipping costs no time from {report.free_clipping_tokens:,} tokens per step on")
    runners_up(report)
    numerics(report)


def checkpoints(report: "Forecast") -> None:
    """What a checkpoint costs, where the disk was measured."""
    size, seconds, stall = report.disk["checkpoint"], report.checkpoint_s, report.checkpoint_stall_s
    if size is None or seconds is None or stall is None:
        return
    holds_up = f"holds up the next step by {stall:.3g} s" if stall > 0 else "is written while one step runs"
    per_day = report.checkpoint_bytes_per_day
    wear = f"; {format_bytes(round(per_day))} written per day" if per_day is not None else ""
    line(f"a checkpoint of {size:,} bytes takes {seconds:.3g} s to write and {holds_up}{wear}")


def runners_up(report: "Forecast") -> None:
    """A table of the plans that were not chosen."""
    chosen = report.timed.plan["estimate"]
    rows = [("this plan", f"{chosen['expected_step_s']:.3g} s", "", chosen["bound"])]
    for one in report.runners_up:
        seconds = one.expected_step_s
        fits = seconds is not None
        rows.append(
            (
                one.change,
                f"{seconds:.3g} s" if fits else "does not fit",
                f"{seconds / chosen['expected_step_s'] - 1:+.1%}" if seconds is not None else "",
                one.bound,
            )
        )
    table(("why this plan", ">step", ">", "bound by"), rows)


def numerics(report: "Forecast") -> None:
    """The numerics key, and what it means for attention and repetition."""
    key = report.numerics
    line(plan_summary.numerics_key(key))
    line(f"packed rows: {_packed_rows(key['packed_rows'])}")
    if key["attention"] == "sdpa: flash or math":
        line("attention: flash, and torch's math kernel for micro-batches with a dense mask, which flash does not take")
    elif key["attention"] == "sdpa: math":
        line(
            "attention: torch's math kernel, which is slow and allocates a seq x seq matrix per head, because flash "
            f"does not take this model's heads in {report.run_plan.precision}; without train.deterministic another "
            "kernel is used"
        )
    if report.run_plan.device == "cuda" and not key["deterministic"]:
        line("without train.deterministic a repeated run on CUDA agrees closely, not bit for bit")


def _packed_rows(how: str) -> str:
    """How documents in one row are kept apart, and what that costs."""
    costs = {
        "variable length": "attention costs what each document alone would",
        "dense mask": "attention takes about 3 times as long on a card as over whole rows",
        "a row for each document": "one uncompiled call per document length",
    }
    return f"{how} ({'; '.join(cost for way, cost in costs.items() if way in how)})"


def _bound_basis(run_plan: "RunPlan") -> str:
    """The rates behind the lower bound of the step time; see `forecast.lower_bound_rates`."""
    if run_plan.device == "cpu":
        return "at rates above any processor's (a probe shares the processors with whatever else runs)"
    if run_plan.measured:
        return f"at {PROBE_MARGIN:g} times the measured rates"
    return "at rates above any card's"


_CPU_TIERS = {"device": "RAM, to compute", "host": "RAM, state", "disk": "disk"}
"""On the CPU both tiers are one memory, and nothing is pinned."""


def items(run_plan: "RunPlan") -> None:
    """A table of what goes where, with the totals and what is allowed."""
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
        totals = run_plan.plan["totals"]
        both = format_bytes(totals["device"] + totals["host"])
        rows.append(("RAM", f"total, of {format_bytes(run_plan.budget['host'])} allowed", both))
    table(("where", "what", ">size"), rows)
    line("sizes are rounded; --json and a run's plan.json have every byte")


_UPDATES = (("host", "host"), ("device", "device"), ("host", "device"), ("disk", "host"))
"""Where a unit's state lives and where it is updated."""


def updates(run_plan: "RunPlan") -> None:
    """Prints how many units are updated where."""
    places = [(unit["state"], unit["update"]) for unit in run_plan.plan["units"]]
    on_host, living, visiting, spilled = (places.count(place) for place in _UPDATES)
    line(
        f"updates: {on_host} units on the host, {living} on the device with their state there, "
        f"{visiting} on the device with their state on the host"
        + (f", {spilled} on the host with their state on disk" if spilled else "")
    )


def data(name: str, summary: "Summary") -> None:
    """Prints a data set in numbers."""
    share = summary.num_supervised / summary.num_tokens if summary.num_tokens else 0.0
    padding = f", {summary.padding:.1%} padding" if summary.padding else ""
    lengths = summary.lengths
    line(
        f"{name}: {summary.num_rows:,} rows, {summary.num_tokens:,} tokens, {share:.0%} supervised, "
        f"{summary.num_sequences:,} sequences of up to {summary.seq_len}{padding}"
    )
    line(
        f"  row lengths: {lengths['min']} to {lengths['max']} tokens, median {lengths['median']}, "
        f"95th percentile {lengths['p95']}" + ("; from the cache" if summary.cached else "")
    )
    if summary.weights is not None:
        least, mean, most = (f"{summary.weights[key]:.4g}" for key in ("min", "mean", "max"))
        line(f"  row weights: {least} to {most}, mean {mean}")
    for read in summary.formats:
        line(f"  {read}")
    for note in summary.notes:
        line(f"  note: {note}")


def row(view: "RowView") -> None:
    """Prints one row, token by token."""
    dropped = f", dropped: {view.dropped}" if view.dropped else ""
    size = f"{view.num_tokens} tokens"
    if view.parts > 1:
        size = f"part {view.part} of {view.parts}: {len(view.tokens)} of {size}"
    weight = f", weight {view.weight:.4g}" if view.weight != 1 else ""
    line(f"row {view.row} ({view.where}): {size}, {view.num_supervised} supervised{weight}{dropped}")
    tokens(view.tokens)


_SCREENFUL = 20
"""Most lines of a batch that are printed."""


def batch(sequences: "list[list[TokenView]]", limit: int = 400) -> None:
    """Prints the beginning of a micro-batch: the tokens of its first sequences, about a screenful."""
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
    """Prints tokens as text; supervised ones are green on a terminal and in [brackets] elsewhere."""
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
