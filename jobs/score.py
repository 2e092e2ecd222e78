"""`askmany score OUT`: how good stored answers are. Needs no GPU and no model; never touches the answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from askmany.pipeline.score_report import FOLDER, ScoreRequest, score_run
from askmany.pipeline.scoring import means_of


def main(request: ScoreRequest, console: Console) -> int:
    """Score a run and print its means."""
    report = score_run(request)
    print_report(report, console)
    console.print(f"written: {request.output.rstrip('/')}/{FOLDER}/", markup=False, highlight=False, soft_wrap=True)
    return 0


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """Means with their intervals, what was left out, and the comparison where there is one."""
    table = Table("answers", "metric", "mean", "95 % interval", "items", "documents", box=None, pad_edge=False)
    for kind, name, interval in means_of(report):
        table.add_row(kind, name, _share(interval["mean"]), _interval(interval), f"{interval['items']:,}", f"{interval['clusters']:,}")
    for kind, found in report["kinds"].items():
        if "calibration" in found:
            table.add_row(
                kind, "calibration error", _share(found["calibration"]["ece"]), "", f"{sum(found['calibration']['counts']):,}", ""
            )
    console.print(table)
    illegal = sum(found["illegal"] for found in report["kinds"].values())
    left = ", ".join(f"{count:,} {reason}" for reason, count in report["left_out"].items())
    for line in (f"not legal, scored 0: {illegal:,}" if illegal else "", f"not scored: {left}" if left else "", *report.get("notes", ())):
        if line:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    if "against" in report:
        _print_comparison(report["against"], console)


def _print_comparison(found: Mapping[str, Any], console: Console) -> None:
    table = Table("against", "ours", "theirs", "difference", "95 % interval", "same score", box=None, pad_edge=False)
    for name, values in found["metrics"].items():
        difference = values["difference"]
        shares = (_share(values["ours"]), _share(values["theirs"]), f"{100 * difference['mean']:+.2f}")
        table.add_row(name, *shares, _interval(difference), _share(values["agreement"]))
    console.print(table)
    line = f"{found['pairs']:,} pairs with {found['output']}, {found['unmatched']:,} items without a partner"
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _share(value: float) -> str:
    return f"{100 * value:.2f}"


def _interval(interval: Mapping[str, float]) -> str:
    if math.isnan(interval["low"]):
        return "one document"
    return f"{100 * interval['low']:.2f} to {100 * interval['high']:.2f}"
