"""`megatrain report RUN`: one self-contained HTML page. Its curves are SVG, drawn from `metrics.jsonl`.

Reads only the run folder, so it also works for a run that is still going on, that was killed, or that was copied here.
"""

import dataclasses
import html
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatrain.errors import ConfigError
from megatrain.system.hardware import format_bytes
from megatrain.training import run_dir
from megatrain.training.metrics import duration

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 560, 220, 60, 24
_POINTS = 600  # a chart of this width cannot show more

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; } td, th { padding: .15rem .8rem .15rem 0; text-align: left; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
.charts { display: flex; flex-wrap: wrap; gap: 1rem; } figure { margin: 0; } figcaption { font-weight: 600; }
pre { background: #f4f5f7; padding: 1rem; overflow: auto; max-height: 30rem; }
svg text { font-size: 11px; fill: #57606a; } svg .grid { stroke: #e3e6ea; }
@media (prefers-color-scheme: dark) {
  body { background: #14171b; color: #dfe3e8; } pre { background: #1e2329; } svg .grid { stroke: #2c333b; }
}
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Series:
    """One curve: points (step, value)."""

    name: str
    color: str
    points: Sequence[tuple[float, float]]


def page(run: Path) -> str:
    """The page as HTML. Raises ConfigError when `run` is not a run folder."""
    records = run_dir.read_metrics(run)
    if not records:
        raise ConfigError(f"{run} has no metrics.jsonl with a finished step; give the folder of a run (output.dir)")
    status = run_dir.read_status(run)
    parts = [
        f"<h1>{html.escape(run.resolve().name)}</h1>",
        _table(_summary(records, status, run_dir.state_of(run))),
        '<div class="charts">',
        *(_chart(title, series) for title, series in _charts(records)),
        "</div>",
    ]
    samples = [(record["step"], sample) for record in records for sample in record.get("samples", [])]
    if samples:
        parts.append("<h2>Samples</h2>" + _table([(f"step {step}", text) for step, text in samples[-12:]]))
    parts.append(_plan(run))
    for title, name in (("Configuration", run_dir.CONFIG), ("Log", run_dir.LOG)):
        text = _text(run / name)
        if text:
            parts.append(f"<h2>{title}</h2><pre>{html.escape(text)}</pre>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(run.resolve().name)}</title><style>{_STYLE}</style></head><body>"
        + "\n".join(parts)
        + "</body></html>\n"
    )


def _summary(records: list[dict[str, Any]], status: dict[str, Any], state: str) -> list[tuple[str, str]]:
    last = records[-1]
    losses = [record["loss"] for record in records if record.get("loss") is not None]
    held_out = [record["eval_loss"] for record in records if record.get("eval_loss") is not None]
    before = next(
        (record["eval_loss_before"] for record in records if record.get("eval_loss_before") is not None), None
    )
    seconds = sum(record.get("step_s") or 0.0 for record in records)
    tokens = sum(record.get("tokens") or 0 for record in records)
    total = status.get("total_steps")
    rows = [
        ("state", state + (f": {status['reason']}" if status.get("reason") else "")),
        ("steps", f"{last['step']}" + (f" of {total}" if total else "")),
        ("tokens", f"{tokens:,}"),
        ("time in steps", duration(seconds)),
        ("speed", f"{tokens / seconds:,.0f} tokens/s" if seconds else ""),
        ("training loss", f"{losses[0]:.4f} → {losses[-1]:.4f}" if losses else ""),
        ("held-out loss", " → ".join(f"{value:.4f}" for value in (before, *held_out[-1:]) if value is not None)),
        ("skipped steps", str(sum(bool(record.get("skipped")) for record in records))),
        ("peak host memory", format_bytes(max(record.get("host_peak_bytes") or 0 for record in records))),
        ("peak device memory", format_bytes(max(record.get("gpu_peak_bytes") or 0 for record in records))),
    ]
    return [(name, value) for name, value in rows if value and value not in ("0", "0 B")]


def _charts(records: list[dict[str, Any]]) -> list[tuple[str, list[Series]]]:
    def curve(name: str, key: str, color: str) -> Series:
        return Series(name, color, [(r["step"], r[key]) for r in records if isinstance(r.get(key), (int, float))])

    held_out = curve("held-out", "eval_loss", "#d1495b")
    before = next((r["eval_loss_before"] for r in records if r.get("eval_loss_before") is not None), None)
    if before is not None:
        held_out = dataclasses.replace(held_out, points=[(0, before), *held_out.points])
    lanes = sorted({lane for record in records for lane in record.get("lanes", {})})
    colors = ["#2f6f9f", "#d1495b", "#6a994e", "#b8860b", "#7b5ea7"]
    charts = [
        ("Loss", [curve("training", "loss", "#2f6f9f"), held_out]),
        ("Gradient norm, before clipping", [curve("norm", "grad_norm", "#6a994e")]),
        ("Learning rate", [curve("lr", "lr", "#b8860b")]),
        ("Tokens per second", [curve("tokens/s", "tokens_per_s", "#2f6f9f")]),
        (
            "Seconds per step that each lane was busy",
            [
                Series(
                    lane,
                    colors[i % len(colors)],
                    [(r["step"], r["lanes"][lane]) for r in records if lane in r.get("lanes", {})],
                )
                for i, lane in enumerate(lanes)
            ],
        ),
    ]
    return [(title, kept) for title, series in charts if (kept := [one for one in series if one.points])]


def _chart(title: str, series: list[Series]) -> str:
    steps = [step for one in series for step, _ in one.points]
    values = [value for one in series for _, value in one.points if math.isfinite(value)]
    low, high = min(values, default=0.0), max(values, default=1.0)
    low, high = (low - 0.5, high + 0.5) if low == high else (low, high)
    first, last = min(steps), max(*steps, min(steps) + 1)

    def x(step: float) -> float:
        return _LEFT + (step - first) / (last - first) * (_WIDTH - _LEFT - 10)

    def y(value: float) -> float:
        return 10 + (high - value) / (high - low) * (_HEIGHT - _BOTTOM - 10)

    marks = []
    for part in range(5):
        value = low + (high - low) * part / 4
        marks.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
            f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>'
        )
    for step in (first, last):
        anchor = "start" if step == first else "end"
        marks.append(f'<text x="{x(step):.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{step:g}</text>')
    legend = [
        f'<text x="{_WIDTH - 14}" y="{22 + 14 * i}" text-anchor="end" style="fill:{one.color}">'
        f"{html.escape(one.name)}</text>"
        for i, one in enumerate(series)
    ]
    curves = [_curve(one, x, y) for one in series]
    return (
        f"<figure><figcaption>{html.escape(title)}</figcaption>"
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{html.escape(title)} over steps">{"".join([*marks, *curves, *legend])}</svg></figure>'
    )


def _curve(series: Series, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    points = [(step, value) for step, value in series.points if math.isfinite(value)]
    stride = max(1, math.ceil(len(points) / _POINTS))
    shown = points[::stride] + (points[-1:] if (len(points) - 1) % stride else [])
    path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in shown)
    dots = "".join(f'<circle cx="{x(s):.1f}" cy="{y(v):.1f}" r="2.5" fill="{series.color}"/>' for s, v in shown[:60])
    line = f'<polyline fill="none" stroke="{series.color}" stroke-width="1.5" points="{path}"/>'
    return line + (dots if len(shown) <= 60 else "")


def _plan(run: Path) -> str:
    try:
        plan = json.loads(_text(run / run_dir.PLAN) or "")
        rows = [(str(item["what"]), str(item["tier"]), format_bytes(item["bytes"])) for item in plan["items"]]
    except (ValueError, KeyError, TypeError):
        return ""
    body = "".join(
        f"<tr><td>{html.escape(what)}</td><td>{html.escape(tier)}</td><td class=n>{size}</td></tr>"
        for what, tier, size in rows
    )
    return f"<h2>Plan</h2><table><tr><th>what</th><th>where</th><th>size</th></tr>{body}</table>"


def _table(rows: list[tuple[str, str]]) -> str:
    return (
        "<table>"
        + "".join(f"<tr><th>{html.escape(a)}</th><td>{html.escape(b)}</td></tr>" for a, b in rows)
        + "</table>"
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
