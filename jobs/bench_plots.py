"""Plots of an engine benchmark's record: speed-up against document length, questions, answer length and documents a batch; seconds
against questions. Needs matplotlib."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

AXES = {
    "document_tokens": "document tokens", "questions": "questions", "new_tokens": "new tokens", "documents": "documents a batch",
}  # fmt: skip


def plot(record: dict[str, Any], folder: Path) -> list[Path]:
    """One SVG for each of AXES along which the record has more than one value, and one of seconds; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = record["table"]
    made = [_lines(rows, axis, "ratio", folder / f"speedup-{axis}.svg") for axis in AXES if len({row[axis] for row in rows}) > 1]
    if len({row["questions"] for row in rows}) > 1:
        made.append(_lines(rows, "questions", "ours_s", folder / "seconds-questions.svg"))
    return made


def _lines(rows: list[dict[str, Any]], axis: str, value: str, file: Path) -> Path:
    """A line for each layout and each set of the other sizes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    series: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        others = ", ".join(f"{row[name]} {AXES[name]}" for name in AXES if name != axis)
        series[f"{row['layout']}: {others}"].append((row[axis], row[value]))
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for label, points in series.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    axes.set_xlabel(AXES[axis])
    axes.set_ylabel("times the best stock backend" if value == "ratio" else "seconds")
    axes.set_xscale("log", base=2)
    if value == "ratio":
        axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)
    return file
