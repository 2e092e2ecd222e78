"""Charts as inline SVG: no script, no font, no file beside the page. Colours are CSS variables of the page that holds them.

Every function takes numbers and labels and returns markup; labels are escaped here. Knows nothing of runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 960


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of work in a lane: [start, stop) in seconds, a CSS class, and what it says under the pointer."""

    start: float
    stop: float
    style: str
    title: str


def nice_step(span: float, ticks: int = 5) -> float:
    """A step of 1, 2 or 5 times a power of ten that cuts `span` into about `ticks` parts."""
    if span <= 0:
        return 1.0
    raw = span / ticks
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)


def area(points: Sequence[tuple[float, float]], unit: str, height: int = 220) -> str:
    """Values over time (seconds), as a filled line with a grid and the time below."""
    if len(points) < 2:
        return ""
    left, bottom, top = 64, height - 28, 12
    end = max(points[-1][0], 1e-9)
    step = nice_step(max(value for _, value in points) or 1.0, 4)
    most = step * (int(max(value for _, value in points) / step) + 1)

    def x(seconds: float) -> float:
        return left + (WIDTH - left - 8) * seconds / end

    def y(value: float) -> float:
        return bottom - (bottom - top) * value / most

    line = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in points)
    parts = [_grid(left, y(step * n), f"{step * n:,.6g}") for n in range(int(most / step) + 1)]
    parts += _times(end, x, height)
    parts.append(f'<polygon class="area" points="{x(0):.1f},{bottom} {line} {x(points[-1][0]):.1f},{bottom}"/>')
    parts.append(f'<polyline class="line" points="{line}"/>')
    parts += [
        f'<circle class="dot" cx="{x(at):.1f}" cy="{y(value):.1f}" r="7"><title>{value:,.1f} {escape(unit)} at {clock(at)}</title></circle>'
        for at, value in points
    ]
    return _svg(height, parts, f"{unit} over time")


def lanes(rows: Sequence[tuple[str, Sequence[Block]]], end: float, lane: int = 26) -> str:
    """A lane for each worker with its blocks of work."""
    left, height = 150, lane * len(rows) + 30

    def x(seconds: float) -> float:
        return left + (WIDTH - left - 8) * seconds / max(end, 1e-9)

    parts = _times(end, x, height)
    for index, (label, blocks) in enumerate(rows):
        y = index * lane + 4
        parts.append(f'<text class="label" x="0" y="{y + lane / 2 + 1:.0f}">{escape(label)}</text>')
        parts.append(f'<rect class="lane" x="{left}" y="{y}" width="{WIDTH - left - 8}" height="{lane - 8}" rx="4"/>')
        for block in blocks:
            width = max(x(block.stop) - x(block.start) - 1, 1.5)
            shape = f'x="{x(block.start):.1f}" y="{y}" width="{width:.1f}" height="{lane - 8}" rx="3"'
            parts.append(f'<rect class="{escape(block.style)}" {shape}><title>{escape(block.title)}</title></rect>')
    return _svg(height, parts, "work of each worker over time")


def bar(parts: Sequence[tuple[str, float]], height: int = 26) -> str:
    """Shares of a whole in one bar; the name of each is its CSS class (`s-<name>`)."""
    total = sum(value for _, value in parts)
    drawn, at = [], 0.0
    for name, value in parts:
        width = WIDTH * value / total if total else 0.0
        shape = f'x="{at:.2f}" y="0" width="{max(width - 2, 0.5):.2f}" height="{height}" rx="4"'
        drawn.append(f'<rect class="s-{escape(name)}" {shape}><title>{escape(name)}: {value:,.0f} of {total:,.0f}</title></rect>')
        at += width
    return _svg(height, drawn, "share of each status")


def columns(counts: Sequence[tuple[str, float]], unit: str, height: int = 210, full: int = 460) -> str:
    """A histogram, half a page wide: a column each, with its label below."""
    most = max((value for _, value in counts), default=0.0) or 1.0
    width = full / max(len(counts), 1)
    drawn = []
    for index, (label, value) in enumerate(counts):
        tall = (height - 44) * value / most
        x, y = index * width, height - 24 - tall
        title = f"<title>{value:,.0f} {escape(unit)}, {escape(label)} tokens</title>"
        drawn.append(f'<rect class="column" x="{x + 3:.1f}" y="{y:.1f}" width="{width - 6:.1f}" height="{tall:.1f}" rx="3">{title}</rect>')
        drawn.append(f'<text class="tick mid" x="{x + width / 2:.1f}" y="{height - 8}">{escape(label)}</text>')
        if value:
            drawn.append(f'<text class="tick mid" x="{x + width / 2:.1f}" y="{y - 4:.1f}">{value:,.0f}</text>')
    return _svg(height, drawn, f"{unit} by size", full)


def clock(seconds: float) -> str:
    """`42 s`, `3:20`, `2:05:00`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _grid(left: float, y: float, label: str) -> str:
    rule = f'<line class="grid" x1="{left}" x2="{WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return rule + f'<text class="tick end" x="{left - 8}" y="{y + 4:.1f}">{escape(label)}</text>'


def _times(end: float, x: Callable[[float], float], height: int) -> list[str]:
    step = next((s for s in (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200) if end / s <= 8), 86400)
    return [f'<text class="tick mid" x="{x(at):.1f}" y="{height - 6}">{clock(at)}</text>' for at in range(0, int(end) + 1, step)]


def _svg(height: int, parts: Sequence[str], label: str, width: int = WIDTH) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
