"""The lanes of one step as a picture: predicted, from the simulated schedule, or measured, from a trace."""

import dataclasses
import html
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.cli.charts import COLORS, STYLE, round_ticks
from megatrain.errors import ConfigError

if TYPE_CHECKING:
    from megatrain.training.forecast import Forecast

LANES = ("compute", "upload", "download", "update", "host", "disk", "caller")
"""Top to bottom. Others follow by name."""

_WIDTH, _LEFT, _RIGHT, _ROW, _TOP, _BOTTOM = 1100, 84, 14, 34, 8, 46
_NARROWEST = 0.5
"""Of a bar, in the picture's units: a shorter operation is drawn together with its neighbours of the same kind."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """One operation: seconds from the start of the step."""

    lane: str
    kind: str
    what: str
    """The unit and micro-batch, or how many operations are drawn as one."""
    start: float
    end: float


def simulated(report: "Forecast") -> tuple[list[Span], float]:
    """(operations, seconds of the step) of a planned step in steady state, on the planner's clock: the second of the
    two that it simulates, with the first one's updates beside it. Its axis is stretched to the predicted step, which
    allows for what the simulated rates leave out."""
    from megatrain import _core

    timed = report.timed
    rates = {key: timed.rates[key] for key in timed.request["rates"]}
    found = json.loads(_core.simulate(json.dumps(timed.request), json.dumps(timed.plan), json.dumps(rates)))
    stretch = report.expected_step_s / found["step_s"]
    begin = min(one["start_s"] for one in found["spans"] if one["step"] == 2 and one["lane"] == "compute")
    spans = [
        Span(
            one["lane"],
            one["kind"],
            f"{one['unit']}, micro-batch {one['micro_batch']}",
            (one["start_s"] - begin) * stretch,
            (one["end_s"] - begin) * stretch,
        )
        for one in found["spans"]
    ]
    return spans, report.expected_step_s


def from_trace(path: Path) -> tuple[list[Span], float]:
    """(operations, seconds) of the last step in a trace as `megatrain bench --trace` writes it. Raises ConfigError for
    a file that is none."""
    try:
        events = json.loads(path.read_text(encoding="utf-8"))
        events = events["traceEvents"] if isinstance(events, dict) else events
        rows = {one["tid"]: str(one["args"]["name"]) for one in events if one["ph"] == "M"}
        spans = [_of_event(one, rows) for one in events if one["ph"] == "X"]
    except OSError as error:
        raise ConfigError(f"the trace {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"{path} is no trace of `megatrain bench --trace` ({type(error).__name__}: {error})"
        ) from None
    spans = [one for one in spans if one.end > one.start]
    if not spans:
        raise ConfigError(f"the trace {path} holds no operation; record one with megatrain bench --trace FILE")
    # a step's first computation is the embedding of its first micro-batch
    begins = sorted(one.start for one in spans if one.kind == "embed" and one.what.endswith("micro-batch 0"))
    begin = begins[-1] if begins else min(one.start for one in spans)
    kept = [dataclasses.replace(one, start=one.start - begin, end=one.end - begin) for one in spans if one.end > begin]
    return kept, max(one.end for one in kept)


def _of_event(event: dict[str, Any], rows: dict[int, str]) -> Span:
    kind, _, unit = str(event["name"]).partition(" ")
    start, length = event["ts"] / 1e6, event["dur"] / 1e6
    if not (math.isfinite(start) and 0 <= length < math.inf):
        raise ValueError(f"an operation at {event['ts']} of {event['dur']}")
    micro_batch = event.get("args", {}).get("micro_batch", 0)
    return Span(
        rows.get(event["tid"], str(event["tid"])),
        kind,
        f"{unit}, micro-batch {micro_batch}",
        start,
        start + length,
    )


def draw(spans: Sequence[Span], length: float, caption: str) -> str:
    """The SVG element. `length` is the part of the clock that is shown, in seconds; what is outside is cut off."""
    shown = [one for one in spans if one.start < length and one.end > 0 and one.end > one.start]
    names = {one.lane for one in shown}
    lanes = [lane for lane in LANES if lane in names] + sorted(names - set(LANES))
    kinds = list(dict.fromkeys(one.kind for lane in lanes for one in shown if one.lane == lane))
    color = {kind: index % COLORS for index, kind in enumerate(kinds)}
    plot = _WIDTH - _LEFT - _RIGHT
    bottom = _TOP + _ROW * len(lanes)

    def x(seconds: float) -> float:
        return _LEFT + min(max(seconds, 0.0), length) / length * plot

    parts = [
        f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{_TOP}" y2="{bottom}"/>'
        f'<text x="{x(tick):.1f}" y="{bottom + 15}" text-anchor="middle">{seconds_text(tick, length)}</text>'
        for tick in round_ticks(0.0, length, 8)
    ]
    for row, lane in enumerate(lanes):
        top = _TOP + _ROW * row
        mine = sorted((one for one in shown if one.lane == lane), key=lambda one: one.start)
        busy = sum(min(one.end, length) - max(one.start, 0.0) for one in mine)
        parts.append(
            f'<text x="{_LEFT - 8}" y="{top + 15}" text-anchor="end">{html.escape(lane)}</text>'
            f'<text x="{_LEFT - 8}" y="{top + 28}" text-anchor="end" font-size="10">{busy / length:.0%} busy</text>'
        )
        parts += [
            f'<rect class="f{color[one.kind]}" x="{x(one.start):.2f}" y="{top + 3}" '
            f'width="{max(_NARROWEST, x(one.end) - x(one.start)):.2f}" height="{_ROW - 8}">'
            f"<title>{html.escape(f'{one.kind} {one.what}')}: {seconds_text(one.end - one.start)}</title></rect>"
            for one in _merged(mine, length / plot * _NARROWEST)
        ]
    at = _LEFT
    for kind in kinds:
        parts.append(
            f'<rect class="f{color[kind]}" x="{at}" y="{bottom + 26}" width="10" height="10"/>'
            f'<text x="{at + 14}" y="{bottom + 35}">{html.escape(kind)}</text>'
        )
        at += 30 + 7 * len(kind)
    height = bottom + _BOTTOM
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="timeline" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{html.escape(caption)}">{"".join(parts)}</svg>'
    )


def document(svg: str, caption: str) -> str:
    """An SVG file of its own: the picture with a heading, colors and a background."""
    inner = svg.partition(">")[2]
    size = svg.partition('viewBox="0 0 ')[2].partition('"')[0]
    width, height = (float(word) for word in size.split())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 -34 {width:g} {height + 34:g}" width="{width:g}" '
        f'height="{height + 34:g}"><style>{STYLE} .page {{ fill: #fff; }} '
        "@media (prefers-color-scheme: dark) { .page { fill: #14171b; } }</style>"
        f'<rect class="page" x="0" y="-34" width="{width:g}" height="{height + 34:g}"/>'
        f'<text x="{_LEFT}" y="-12" font-size="14">{html.escape(caption)}</text>{inner}\n'
    )


def _merged(spans: Sequence[Span], narrow: float) -> list[Span]:
    """Operations of one lane, by their start; those that are too narrow to see are joined with the ones of the same
    kind that follow without a visible gap."""
    made: list[Span] = []
    counts: list[int] = []
    for one in spans:
        before = made[-1] if made else None
        small = one.end - one.start < narrow
        if before is not None and small and before.kind == one.kind and one.start - before.end < narrow:
            counts[-1] += 1
            made[-1] = dataclasses.replace(before, what=f"{counts[-1]} operations", end=max(before.end, one.end))
        else:
            made.append(one)
            counts.append(1)
    return made


def seconds_text(seconds: float, scale: float | None = None) -> str:
    """Seconds in the unit of `scale`, or of themselves."""
    size = abs(seconds if scale is None else scale)
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if size >= factor or unit == "µs":
            value = seconds / factor
            return f"{value:.4g} {unit}" if math.isfinite(value) else "?"
    return ""
