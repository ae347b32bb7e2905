"""Charts as SVG: curves over steps, stacked bars, histograms. Colors are CSS classes, for light and dark pages."""

import dataclasses
import html
import json
import math
from collections.abc import Callable, Iterable, Sequence

WIDTH, HEIGHT = 480, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 24
POINTS = 600
"""Most points of a curve; a chart of this width cannot show more."""
COLORS = 8
"""Classes c0 to c7."""

_LIGHT = ("#2f6f9f", "#c8404f", "#55893b", "#a87a08", "#7b5ea7", "#1f8f89", "#8c6d46", "#6b7280")
_DARK = ("#6db3e8", "#f28b94", "#9ccc80", "#e3b341", "#b79ae8", "#6fd6cf", "#c9a57b", "#a3abb5")


def _palette(colors: Sequence[str]) -> str:
    return "\n".join(
        f".s{i} {{ stroke: {color}; }} .f{i} {{ fill: {color}; background: {color}; color: {color}; }}"
        for i, color in enumerate(colors)
    )


STYLE = f"""
svg {{ font: 12px system-ui, sans-serif; }}
svg text {{ fill: #57606a; }} svg .grid {{ stroke: #e3e6ea; }} svg .axis {{ stroke: #9aa3ad; }}
svg .mark {{ stroke: #1b1f24; }}
svg polyline {{ fill: none; stroke-width: 1.5; }} svg .dashed {{ stroke-dasharray: 5 3; }}
{_palette(_LIGHT)}
@media (prefers-color-scheme: dark) {{
svg text {{ fill: #a3abb5; }} svg .grid {{ stroke: #2c333b; }} svg .axis {{ stroke: #59626d; }}
svg .mark {{ stroke: #dfe3e8; }}
{_palette(_DARK)}
}}
"""
"""For a page's style element, or an SVG file's own."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One curve: points (step, value), by step."""

    name: str
    color: int
    """0 to 7."""
    points: Sequence[tuple[float, float]]
    dashed: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Curves over steps, ready for a page."""

    title: str
    svg: str
    legend: list[tuple[str, int, bool, str]]
    """For each curve: name, color, whether it is dashed, its last value."""


def round_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round values from `low` to `high`: multiples of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Round values for a logarithmic axis from `low` to `high`: decades, or as many more as make three or so, or, over
    a small factor, those of a linear axis."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors in (("1",), ("1", "2", "5"), ("1", "1.5", "2", "3", "5", "7")):
        ticks = [float(f"{f}e{p}") for p in range(first, last + 1) for f in factors]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) > (3 if len(factors) == 1 else 2):
            return inside[:: math.ceil(len(inside) / 9)]
    return round_ticks(low, high)


def number(value: float) -> str:
    """A value on an axis or under the pointer: `0.002`, `4e-05`, `12.5k`, `1.2M`."""
    if value == 0:
        return "0"
    size = abs(value)
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= scale * (10 if unit == "k" and value % 100 else 1):
            return f"{value / scale:.4g}{unit}"
    if size >= 1e3:
        return f"{value:.0f}"
    return f"{value:.3g}" if size < 1e-3 else f"{value:.4f}".rstrip("0").rstrip(".")


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    log: bool = False,  # a logarithmic axis, where all values are positive
    zero: bool = False,  # an axis that begins at 0
    text: Callable[[float], str] = number,  # of a value
) -> Chart:
    """Curves over steps. The data are in the SVG's `data-chart`, for values under the pointer."""
    steps = [step for one in series for step, _ in one.points]
    values = [value for one in series for _, value in one.points if math.isfinite(value)]
    low, high = min(values, default=0.0), max(values, default=1.0)
    log = log and low > 0
    low = 0.0 if zero and low >= 0 else low
    if low == high:
        low, high = (low / 1.5, high * 1.5) if log else (low - 0.5 * abs(low or 1), high + 0.5 * abs(high or 1))
    first, last = min(steps), max(*steps, min(steps) + 1)
    bottom, top = (math.log(low), math.log(high)) if log else (low, high)
    margin = 0.04 * (top - bottom)
    top += margin
    bottom -= 0.0 if zero else margin

    def x(step: float) -> float:
        return LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        height = math.log(value) if log else value
        return TOP + (top - height) / (top - bottom) * (HEIGHT - TOP - BOTTOM)

    marks = [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{text(tick)}</text>'
        for tick in (log_ticks(low, high) if log else round_ticks(low, high))
    ]
    marks += [
        f'<text x="{x(tick):.1f}" y="{HEIGHT - 6}" text-anchor="middle">{number(tick)}</text>'
        for tick in round_ticks(first, last, 6)
        if tick == int(tick) and x(tick) < WIDTH - RIGHT + 1
    ]
    shown = [(one, _thinned(one.points)) for one in series]
    data = {
        "x": [first, last, LEFT, WIDTH - RIGHT],
        "series": [[[step, text(value)] for step, value in points] for _, points in shown],
    }
    return Chart(
        title=title,
        svg=(
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)} over steps" '
            f'data-chart="{html.escape(json.dumps(data, separators=(",", ":")))}">'
            f'{"".join(marks)}<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" '
            f'y2="{HEIGHT - BOTTOM}"/>{"".join(_curve(one, points, x, y) for one, points in shown)}'
            f'<line class="mark" y1="{TOP}" y2="{HEIGHT - BOTTOM}" visibility="hidden"/></svg>'
        ),
        legend=[(one.name, one.color, one.dashed, text(points[-1][1]) if points else "") for one, points in shown],
    )


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    stride = max(1, math.ceil(len(finite) / POINTS))
    return finite[::stride] + (finite[-1:] if (len(finite) - 1) % stride else [])


def _curve(
    series: Series,
    points: Sequence[tuple[float, float]],
    x: Callable[[float], float],
    y: Callable[[float], float],
) -> str:
    path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
    dashed = " dashed" if series.dashed else ""
    line = f'<polyline class="s{series.color}{dashed}" points="{path}"/>' if len(points) > 1 else ""
    dots = (f'<circle class="f{series.color}" cx="{x(s):.1f}" cy="{y(v):.1f}" r="2.5"/>' for s, v in points)
    return line + ("".join(dots) if len(points) <= 40 else "")


def stacked_bar(parts: Iterable[tuple[str, int, float]], whole: float, mark: float | None = None) -> str:
    """A horizontal bar of (name, color, size), as wide as the page where they sum to `whole`. `mark`: a size to show as
    a line, such as a measured peak."""
    pieces, at = [], 0.0
    for name, color, size in parts:
        width = 1000 * size / whole
        pieces.append(
            f'<rect class="f{color}" x="{at:.2f}" y="0" width="{width:.2f}" height="22">'
            f"<title>{html.escape(name)}</title></rect>"
        )
        at += width
    if mark is not None:
        line = f'x1="{1000 * mark / whole:.2f}" x2="{1000 * mark / whole:.2f}" y1="-4" y2="26"'
        pieces.append(f'<line class="mark" {line} stroke-width="2" vector-effect="non-scaling-stroke"/>')
    return (
        '<svg class="bar" viewBox="0 -4 1000 30" preserveAspectRatio="none" role="img" '
        f'aria-label="parts of memory">{"".join(pieces)}</svg>'
    )


def histogram(title: str, bins: Sequence[Sequence[int]]) -> str:
    """Bars of (from, to, count), of equal width."""
    most = max((count for *_, count in bins), default=1) or 1
    low, high = bins[0][0], max(bins[-1][1], bins[0][0] + 1)

    def x(value: float) -> float:
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(count: float) -> float:
        return TOP + (1 - count / most) * (HEIGHT - TOP - BOTTOM)

    marks = [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{number(tick)}</text>'
        for tick in round_ticks(0, most, 4)
        if tick == int(tick)
    ]
    marks += [
        f'<text x="{x(tick):.1f}" y="{HEIGHT - 6}" text-anchor="middle">{number(tick)}</text>'
        for tick in round_ticks(low, high, 6)
        if tick == int(tick)
    ]
    bars = [
        f'<rect class="f0" x="{x(start) + 0.5:.1f}" y="{y(count):.1f}" width="{max(1, x(end) - x(start) - 1):.1f}" '
        f'height="{HEIGHT - BOTTOM - y(count):.1f}"><title>{start} to {end - 1}: {count:,}</title></rect>'
        for start, end, count in bins
    ]
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">'
        f"{''.join(marks)}{''.join(bars)}</svg>"
    )
