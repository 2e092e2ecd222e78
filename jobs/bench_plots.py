"""Plots of an engine benchmark's record, merged or of one call, a panel a model: those of the published method's evaluation
(arXiv 2611.15130, figures 3 to 6). Needs matplotlib.

Speed-up against document length and against questions (figure 3), against answer length (figure 4), seconds against the streams that are
together and, interleaved, against P of a request (figure 5), speed-up against documents a batch (figure 6); beside figure 5, throughput
against P with the fitted model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from askmany.jobs.bench_figure import Line, Series, figure
from askmany.jobs.bench_model import point_of
from askmany.jobs.bench_ratios import geometric_mean
from askmany.jobs.bench_variants import label, shown
from askmany.jobs.step_floor import apart

AXES = {
    "document_tokens": "document tokens", "questions": "questions", "new_tokens": "new tokens", "documents": "documents a batch",
}  # fmt: skip
APART = ("question_tokens", "spread", "cap", "cached")  # what rows of one line have in common beside the other axes
_USUAL = {("question_tokens", 12), ("spread", 0), ("cap", 0), ("cached", True)}
OVER_STOCK = "times the best stock backend"

Row = Mapping[str, Any]


def plot(record: Mapping[str, Any], folder: Path) -> list[Path]:
    """One SVG for each of AXES along which two rows alike otherwise differ, one of seconds over P, one of the fits; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    rows, made = apart(record["table"])[0], []
    for axis in AXES:
        if panels := _panels(rows, axis, ("ratio",)):
            made.append(figure(panels, AXES[axis], OVER_STOCK, folder / f"speedup-{axis}.svg", level=1.0))
    if panels := _panels(rows, "questions", ("ours_s", "stock_s")):
        made.append(figure(panels, "streams together (P)", "seconds", folder / "seconds-streams.svg"))
    if panels := _panels(_over_requests(rows), "streams", ("ours_s",)):
        made.append(figure(panels, "streams of a request (P)", "seconds", folder / "seconds-requests.svg"))
    if record.get("fits"):
        panels = _fitted(record["fits"])
        across = "P, or streams in a step where P is one"
        made.append(figure(panels, across, "answer tokens/s", folder / "throughput-streams.svg"))
    return made


def _panels(rows: Iterable[Row], axis: str, values: Sequence[str]) -> dict[str, Series]:
    """Lines by model and label; a size that was measured twice is one point. Lines of a single point are left out."""
    found: dict[str, dict[Line, dict[float, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for row in sorted(rows, key=lambda row: [row[name] for name in AXES]):
        for value in values:
            found[str(row.get("model", ""))][_line(row, axis, value)][row[axis]].append(row[value])
    panels: dict[str, Series] = {}
    for model, lines in sorted(found.items()):
        series = {
            name: [(at, geometric_mean(own)) for at, own in sorted(points.items())] for name, points in lines.items() if len(points) > 1
        }
        if series:
            panels[model] = series
    return panels


def _line(row: Row, axis: str, value: str) -> Line:
    who = "best stock" if value == "stock_s" else shown(row)
    sizes = [f"{row[name]} {AXES[name]}" for name in AXES if name != axis]
    return who, *sizes, *(f"{name} {row[name]}" for name in APART if name in row and (name, row[name]) not in _USUAL)


def _over_requests(rows: Iterable[Row]) -> Iterable[Row]:
    """Rows of the interleaved layout with the P of a request, which is otherwise a part of their setup."""
    for row in rows:
        point = point_of(row) if row["layout"] != "split" and {"spread", "cached"} <= row.keys() else None
        if point:
            yield {**row, "streams": point.streams, "setup_label": label(row, without=("streams", "max_rows"))}


def _fitted(fits: Iterable[Row]) -> dict[str, Series]:
    """Of each fit the measured throughput, and the model's beside it."""
    panels: dict[str, dict[Line, list[tuple[float, float]]]] = defaultdict(dict)
    for found in sorted(fits, key=lambda f: (f["document_tokens"], f["new_tokens"])):
        who = shown(found)
        sizes = (f"{found['document_tokens']} document tokens", f"{found['new_tokens']} new tokens", found["work"])
        several = len({streams for _, streams, *_ in found["points"]}) > 1
        points = sorted((p if several else b * p, measured, modelled) for b, p, _, measured, modelled in found["points"])
        panels[found["model"]][(who, *sizes)] = [(rows, measured) for rows, measured, _ in points]
        panels[found["model"]][(f"model of {who}", *sizes)] = [(rows, modelled) for rows, _, modelled in points]
    return dict(panels)
