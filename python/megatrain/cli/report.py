"""`megatrain report RUN …`: one self-contained HTML page about a run, or about several side by side.

Reads only the run folders, so it also works for a run that is still going on, that was killed, or that was copied here.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatrain.cli import charts, report_files, timeline
from megatrain.cli.charts import Chart, Series
from megatrain.errors import ConfigError
from megatrain.system.hardware import format_bytes
from megatrain.training import run_dir
from megatrain.training.metrics import duration
from megatrain.training.plan_summary import memory_groups

_SAMPLES = 12
_LONGEST_PEAK = 2
"""A measured peak of more than this times what is planned is not drawn: of a tiny model most of it is libraries."""
_TEMPLATE = "report.html.j2"


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    """What is on disk of one run."""

    name: str
    folder: Path
    records: list[dict[str, Any]]
    status: dict[str, Any]
    plan: dict[str, Any]
    data: dict[str, Any]
    trace: Path | None


def page(runs: Sequence[Path], trace: Path | None = None) -> str:
    """The page as HTML. `trace`: a file of `megatrain bench --trace`, for the timeline of a step; without it, that in a
    run's folder (`trace.json`), if there is one. Raises ConfigError for what is no run folder or no trace."""
    import jinja2

    read = [_read(run, name, trace) for run, name in zip(runs, _names(runs), strict=True)]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(_TEMPLATE).render(
        title=" · ".join(run.name for run in read),
        style=charts.STYLE,
        summary=_summary(read),
        differences=_differences(read),
        charts=_charts(read),
        runs=[_sections(run) for run in read],
    )


def _names(runs: Sequence[Path]) -> list[str]:
    """The folders' names, with as much of their paths as tells them apart."""
    paths = [run.resolve() for run in runs]
    if len(set(paths)) < len(paths):
        raise ConfigError("a run was named twice; name each run once")
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return ["/".join(path.parts[-depth:]) for path in paths]


def _read(folder: Path, name: str, trace: Path | None) -> _Run:
    records = report_files.records(folder)
    if not records:
        raise ConfigError(f"{folder} has no metrics.jsonl with a finished step; give the folder of a run (output.dir)")
    own = folder / run_dir.TRACE
    return _Run(
        name=name,
        folder=folder,
        records=records,
        status=run_dir.read_status(folder) | {"state": run_dir.state_of(folder)},
        plan=report_files.plan(folder),
        data=report_files.data(folder),
        trace=trace if trace is not None else own if own.is_file() else None,
    )


def _summary(runs: Sequence[_Run]) -> list[tuple[str, list[str]]]:
    """(name, a value for each run)."""
    columns = [dict(_facts(run)) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    return [(name, [column.get(name, "") for column in columns]) for name in names]


def _facts(run: _Run) -> list[tuple[str, str]]:
    records, status = run.records, run.status
    losses = [record["loss"] for record in records if record.get("loss") is not None]
    held_out = [record["eval_loss"] for record in records if record.get("eval_loss") is not None]
    seconds = sum(record.get("step_s") or 0.0 for record in records)
    tokens = sum(record.get("tokens") or 0 for record in records)
    total = status.get("total_steps")
    rows = [
        ("state", status["state"] + (f": {status['reason']}" if status.get("reason") else "")),
        ("steps", f"{records[-1]['step']}" + (f" of {total}" if total else "")),
        ("tokens", f"{tokens:,}"),
        ("time in steps", duration(seconds)),
        ("speed", f"{tokens / seconds:,.0f} tokens/s" if seconds else ""),
        ("training loss", f"{losses[0]:.4f} → {losses[-1]:.4f}" if losses else ""),
        ("held-out loss", _from_to(_first_eval(records), held_out)),
        *(
            (f"held-out loss of {name}", _from_to(_first_of_set(records, name), [loss for _, loss in points]))
            for name, points in _sets(records).items()
        ),
        ("skipped steps", str(sum(bool(record.get("skipped")) for record in records))),
        ("peak host memory", format_bytes(_most(records, "host_peak_bytes"))),
        ("peak device memory", format_bytes(_most(records, "gpu_peak_bytes"))),
    ]
    return [(name, value) for name, value in rows if value and value not in ("0", "0 B")]


def _most(records: Sequence[Mapping[str, Any]], key: str) -> int:
    return max(record.get(key) or 0 for record in records)


def _first_eval(records: Sequence[Mapping[str, Any]]) -> float | None:
    """The held-out loss before the first step."""
    return next((r["eval_loss_before"] for r in records if r.get("eval_loss_before") is not None), None)


def _from_to(first: float | None, later: Sequence[float]) -> str:
    return " → ".join(f"{value:.4f}" for value in (first, *later[-1:]) if value is not None)


def _sets(records: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """(step, loss) of each held-out set with a name."""
    found: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        for name, numbers in (record.get("eval_sets") or {}).items():
            if numbers.get("loss") is not None:
                found.setdefault(name, []).append((record["step"], numbers["loss"]))
    return found


def _first_of_set(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """A held-out set's loss before the first step."""
    before: Mapping[str, Any] = next((r["eval_sets_before"] for r in records if r.get("eval_sets_before")), {})
    loss: float | None = before.get(name, {}).get("loss")
    return loss


def _charts(runs: Sequence[_Run]) -> list[Chart]:
    several = len(runs) > 1

    def curves(key: str, scale: float = 1.0) -> list[Series]:
        return [
            Series(name=run.name if several else key.replace("_", " "), color=color % charts.COLORS, points=points)
            for color, run in enumerate(runs)
            if (points := _points(run.records, key, scale))
        ]

    made = []
    if losses := _losses(runs):
        made.append(charts.line_chart("Loss", losses, log=True))
    for title, key, log in (
        ("Gradient norm, before clipping", "grad_norm", True),
        ("Learning rate", "lr", False),
        ("Tokens per second", "tokens_per_s", False),
    ):
        if found := curves(key):
            made.append(charts.line_chart(title, found, log=log, zero=not log))
    for run in runs:
        if lanes := _lanes(run.records):
            title = "Seconds a lane was busy in a step" + (f": {run.name}" if several else "")
            made.append(charts.line_chart(title, lanes, zero=True))
    return made


def _losses(runs: Sequence[_Run]) -> list[Series]:
    """Training and held-out loss; of several runs each pair in a color of its own."""
    series = []
    for number, run in enumerate(runs):
        before = _first_eval(run.records)
        held_out = ([] if before is None else [(0.0, before)]) + _points(run.records, "eval_loss")
        prefix = f"{run.name}, " if len(runs) > 1 else ""
        own = number % charts.COLORS
        sets = []
        for place, (name, points) in enumerate(_sets(run.records).items(), start=2):
            first = _first_of_set(run.records, name)
            points = ([] if first is None else [(0.0, first)]) + points
            sets.append((f"held-out {name}", points, own if prefix else place % charts.COLORS))
        for name, points, color in (
            ("training", _points(run.records, "loss"), own),
            ("held-out", held_out, own if prefix else 1),
            *sets,
        ):
            if points:
                dashed = bool(prefix) and name != "training"
                series.append(Series(name=prefix + name, color=color, points=points, dashed=dashed))
    return series


def _lanes(records: Sequence[Mapping[str, Any]]) -> list[Series]:
    names = {lane for record in records for lane in record.get("lanes", {})}
    known = [lane for lane in timeline.LANES if lane in names]
    return [
        Series(
            name=lane,
            color=color % charts.COLORS,
            points=[(r["step"], r["lanes"][lane]) for r in records if lane in r.get("lanes", {})],
        )
        for color, lane in enumerate([*known, *sorted(names - set(known))])
    ]


def _points(records: Sequence[Mapping[str, Any]], key: str, scale: float = 1.0) -> list[tuple[float, float]]:
    return [(r["step"], r[key] * scale) for r in records if isinstance(r.get(key), (int, float))]


def _differences(runs: Sequence[_Run]) -> list[tuple[str, list[str]]]:
    """Settings in which several runs differ: (key, a value for each run)."""
    if len(runs) < 2:
        return []
    import yaml

    flat = []
    for run in runs:
        try:
            flat.append(dict(_flat(yaml.safe_load(report_files.text(run.folder / run_dir.CONFIG)) or {})))
        except yaml.YAMLError:
            flat.append({})
    keys = sorted({key for one in flat for key in one} - {"output.dir"})
    rows = [
        (key, [json.dumps(one.get(key), ensure_ascii=False, default=str).strip('"') for one in flat]) for key in keys
    ]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _flat(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(tree, dict):
        return [(prefix, tree)]
    return [pair for key, value in tree.items() for pair in _flat(value, f"{prefix}.{key}" if prefix else str(key))]


def _sections(run: _Run) -> dict[str, Any]:
    """What the page shows of one run alone."""
    samples = [(record["step"], text) for record in run.records for text in record.get("samples", [])]
    texts = [
        (name, report_files.text(run.folder / file))
        for name, file in (("Configuration", run_dir.CONFIG), ("Log", run_dir.LOG))
    ]
    items = [i for i in run.plan.get("items", []) if {"what", "tier", "bytes"} <= i.keys()]
    return {
        "name": run.name,
        "memory": _memory(run, items),
        "planned": [(i["what"], i["tier"], format_bytes(i["bytes"])) for i in items],
        "timeline": timeline.draw(*timeline.from_trace(run.trace), "Timeline of a step") if run.trace else "",
        "data": [
            _data_set(name, run.data[key])
            for key, name in (("train", "Training data"), ("eval", "Held-out data"))
            if isinstance(run.data.get(key), dict)
        ]
        + [_data_set(f"Held-out data: {name}", numbers) for name, numbers in run.data.get("eval_sets", {}).items()],
        "samples": samples[-_SAMPLES:],
        "texts": [(name, text) for name, text in texts if text],
    }


def _memory(run: _Run, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A bar for each tier, with the measured peak; all in one scale and with one color for each group."""
    tiers = list(dict.fromkeys(item["tier"] for item in items))
    groups = {tier: memory_groups(items, (tier,)) for tier in tiers}
    names = list(dict.fromkeys(name for parts in groups.values() for name in parts))
    peaks = {"device": _most(run.records, "gpu_peak_bytes"), "host": _most(run.records, "host_peak_bytes")}
    planned = max([1, *(sum(parts.values()) for parts in groups.values())])
    drawn = {tier: peak for tier, peak in peaks.items() if 0 < peak <= _LONGEST_PEAK * planned}
    whole = max([planned, *drawn.values()])
    made = []
    for tier, parts in groups.items():
        shown = [(name, names.index(name) % charts.COLORS, size) for name, size in parts.items()]
        peak = peaks.get(tier, 0)
        made.append(
            {
                "name": tier,
                "total": format_bytes(sum(parts.values())),
                "peak": format_bytes(peak) if peak else "",
                "drawn": tier in drawn,
                "bar": charts.stacked_bar(
                    [(f"{name} {format_bytes(size)}", color, size) for name, color, size in shown],
                    whole,
                    drawn.get(tier),
                ),
                "parts": [(name, color, format_bytes(size)) for name, color, size in shown],
            }
        )
    return made


def _data_set(name: str, summary: Mapping[str, Any]) -> dict[str, Any]:
    """A data set in numbers, from `data.json`."""
    tokens, supervised = int(summary.get("num_tokens", 0)), int(summary.get("num_supervised", 0))
    lengths, bins = summary.get("lengths", {}), summary.get("histogram", [])
    rows = [
        ("rows", f"{summary.get('num_rows', 0):,}"),
        ("tokens", f"{tokens:,}"),
        ("supervised", f"{supervised:,} ({supervised / tokens:.0%})" if tokens else ""),
        ("sequences", f"{summary.get('num_sequences', 0):,} of up to {summary.get('seq_len', 0):,}"),
        ("padding", f"{summary['padding']:.1%} of the windows" if summary.get("padding") else ""),
        ("row weights", ", ".join(f"{key} {value:.4g}" for key, value in (summary.get("weights") or {}).items())),
        ("row lengths", ", ".join(f"{key} {value:,}" for key, value in lengths.items())),
        *(("left out", f"{count:,}: {reason}, such as {where}") for reason, count, where in summary.get("dropped", [])),
    ]
    return {
        "name": name,
        "rows": [(key, value) for key, value in rows if value],
        "notes": [*summary.get("formats", []), *summary.get("notes", [])],
        "histogram": charts.histogram("Rows by their length in tokens", bins) if bins else "",
    }
