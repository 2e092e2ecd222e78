"""A metric over evaluations as inline SVG: a point and an interval each, evenly spaced, in the order they came.

Colours are CSS classes of the page (`green`, `regressed`, `beside`, `failed`). Labels are escaped here. Knows nothing of evaluations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from askmany.pipeline.charts import nice_step

WIDTH, HEIGHT = 960, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 12, 30


@dataclass(frozen=True, slots=True)
class Point:
    """A mean with its interval, shares from 0 to 1; without a mean a gap. `low` and `high` are NaN where no interval is known."""

    label: str
    mean: float | None
    low: float | None
    high: float | None
    style: str
    title: str


def intervals(points: Sequence[Point], name: str) -> str:
    """The chart; "" without a point that has a mean."""
    known = [value for point in points for value in (point.mean, point.low, point.high) if value is not None and not math.isnan(value)]
    if not known:
        return ""
    low, high, step = _scale(min(known), max(known))
    parts = [_rule(_y(low + step * n, low, high), f"{100 * (low + step * n):.6g}") for n in range(round((high - low) / step) + 1)]
    places = [_x(index, len(points)) for index in range(len(points))]
    line = " ".join(f"{x:.1f},{_y(p.mean, low, high):.1f}" for x, p in zip(places, points, strict=True) if p.mean is not None)
    parts.append(f'<polyline class="line" points="{line}"/>')
    parts += [_mark(x, point, low, high) for x, point in zip(places, points, strict=True)]
    every = max(1, -(-len(points) // 12))
    parts += [
        f'<text class="tick mid" x="{x:.1f}" y="{HEIGHT - 8}">{escape(point.label)}</text>'
        for index, (x, point) in enumerate(zip(places, points, strict=True))
        if index % every == 0
    ]
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(name)} over time">{"".join(parts)}</svg>'


def _scale(low: float, high: float) -> tuple[float, float, float]:
    """Round bounds around the values, inside 0 to 1, and the step of the grid."""
    step = nice_step(max(high - low, 0.02), 4)
    bottom = max(0.0, math.floor(low / step) * step)
    top = min(1.0, max(math.ceil(high / step), round(bottom / step) + 1) * step)
    return (bottom, top, step) if top > bottom else (top - step, top, step)


def _x(index: int, count: int) -> float:
    return _LEFT + (WIDTH - _LEFT - _RIGHT) * (index + 0.5) / count


def _y(value: float, low: float, high: float) -> float:
    return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * (value - low) / (high - low)


def _rule(y: float, label: str) -> str:
    rule = f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return rule + f'<text class="tick end" x="{_LEFT - 8}" y="{y + 4:.1f}">{escape(label)}</text>'


def _mark(x: float, point: Point, low: float, high: float) -> str:
    title = f"<title>{escape(point.title)}</title>"
    if point.mean is None:
        y = HEIGHT - _BOTTOM
        return f'<g class="point {escape(point.style)}"><path d="M{x - 5:.1f},{y - 12} l10,10 m0,-10 l-10,10"/>{title}</g>'
    bar = ""
    if point.low is not None and point.high is not None and not math.isnan(point.low):
        bar = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_y(point.low, low, high):.1f}" y2="{_y(point.high, low, high):.1f}"/>'
    return f'<g class="point {escape(point.style)}">{bar}<circle cx="{x:.1f}" cy="{_y(point.mean, low, high):.1f}" r="5"/>{title}</g>'
