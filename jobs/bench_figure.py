"""A figure of several panels of lines, side by side, for a benchmark's record. Needs matplotlib.

A line's name is a tuple: who was measured, then the sizes it was measured at. One colour a tuple of sizes and one stroke for each who,
both told in a legend below; what all lines of a panel have in common stands in its title.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, StrMethodFormatter

Line = tuple[str, ...]
Series = Mapping[Line, Sequence[tuple[float, float]]]
STROKES = (("-", "o"), ("--", ""), ("-.", "s"), (":", "^"))  # of the first, second ... who; then over again


class _Plain(LogFormatter):
    """Numbers without exponents, where matplotlib finds room for any."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:,g}" if super().__call__(x, pos) else ""


def figure(panels: Mapping[str, Series], across: str, up: str, file: Path, *, level: float | None = None) -> Path:
    """One panel for each entry of `panels`, by its title, both axes logarithmic; a horizontal line at `level`."""
    drawn = Figure(figsize=(6 * len(panels), 4.5))
    axes = drawn.subplots(1, len(panels), squeeze=False)
    for panel, (title, series) in zip(axes[0], panels.items(), strict=True):
        _scale(panel)
        _draw(panel, title, series, colormaps["turbo"])
        panel.set_xlabel(across)
        panel.set_ylabel(up)
        if level is not None:
            panel.axhline(level, color="grey", linewidth=0.8)
    drawn.savefig(file, bbox_inches="tight")
    return file


def _scale(panel: Any) -> None:
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(_Plain())
    panel.yaxis.set_minor_formatter(_Plain(minor_thresholds=(2, 0.5)))


def _draw(panel: Any, title: str, series: Series, colours: Any) -> None:
    common = set.intersection(*(set(line) for line in series)) if len(series) > 1 else set()
    sizes = list(dict.fromkeys(line[1:] for line in series))
    who = list(dict.fromkeys(line[0] for line in series))
    shade = {own: colours((index + 0.5) / len(sizes)) for index, own in enumerate(sizes)}
    stroke = {name: dict(zip(("linestyle", "marker"), STROKES[index % len(STROKES)], strict=True)) for index, name in enumerate(who)}
    for line, points in series.items():
        panel.plot(*zip(*points, strict=True), color=shade[line[1:]], markersize=4, **stroke[line[0]])
    told = [(", ".join(part for part in own if part not in common), {"color": shade[own]}) for own in sizes]
    told += [(name, {"color": "grey", **stroke[name]}) for name in who if name not in common]
    handles = [panel.plot([], [], label=name, **style)[0] for name, style in told if name]
    panel.set_title(", ".join([title, *(part for part in next(iter(series)) if part in common)]), fontsize=9)
    panel.legend(handles=handles, fontsize=6, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncol=2)
