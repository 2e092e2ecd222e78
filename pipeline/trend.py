"""trend.html: every metric of a scheduled evaluation over time, on one page that opens anywhere, offline.

Made from the history alone. Each evaluation is a point with its interval; one that regressed against the last green evaluation is marked,
as are those that failed. Nothing in the page runs, and what came from a model or a file name is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from askmany.pipeline.eval_history import Entry, Metric
from askmany.pipeline.trend_charts import Point, intervals

TREND = "trend.html"
MAX_POINTS = 90


def render_trend(history: Sequence[Entry], root: str) -> str:
    """The page of a history, the oldest evaluation first."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(resources.files("askmany.pipeline").joinpath("trend_page.html").read_text("utf-8"))
    last = history[-1]
    return template.render(
        root=root,
        last=last,
        when=datetime.fromtimestamp(last.began, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        greens=sum(entry.verdict == "green" for entry in history),
        evaluations=len(history),
        charts=[{"name": name, "svg": Markup(intervals(points(history, name), name)), **_now(last, name)} for name in names(history)],
        rows=[_row(entry) for entry in reversed(history[-MAX_POINTS:])],
    )


def names(history: Sequence[Entry]) -> list[str]:
    """Every metric there ever was, in the order of their first appearance."""
    return list(dict.fromkeys(metric.name for entry in history for metric in entry.metrics))


def points(history: Sequence[Entry], name: str) -> list[Point]:
    """A metric's course: a point for each evaluation that has it, a gap for each that failed."""
    found = []
    for entry in history[-MAX_POINTS:]:
        metric = _metric(entry, name)
        if metric is not None:
            found.append(Point(entry.date, metric.mean, metric.low, metric.high, _style(entry, metric), _title(entry, metric)))
        elif entry.verdict == "failed":
            found.append(Point(entry.date, None, None, None, "failed", f"{entry.key}: failed {entry.note}"))
    return found


def _metric(entry: Entry, name: str) -> Metric | None:
    return next((metric for metric in entry.metrics if metric.name == name), None)


def _style(entry: Entry, metric: Metric) -> str:
    return "regressed" if metric.regressed else "green" if entry.verdict == "green" else "beside"


def _title(entry: Entry, metric: Metric) -> str:
    low = f" ({_share(metric.low)} to {_share(metric.high)})" if metric.low == metric.low else ""
    worse = f", {_signed(metric.difference)} against {entry.against}" if metric.difference is not None else ""
    return f"{entry.key}: {_share(metric.mean)}{low} over {metric.items:,} answers{worse}"


def _now(last: Entry, name: str) -> dict[str, Any]:
    metric = _metric(last, name)
    if metric is None:
        return {"value": "none now", "note": "", "regressed": False}
    note = f"{_signed(metric.difference)} against {last.against}" if metric.difference is not None else f"{metric.items:,} answers"
    return {"value": _share(metric.mean), "note": note, "regressed": metric.regressed}


def _row(entry: Entry) -> dict[str, Any]:
    worse = ", ".join(f"{metric.name} {_signed(metric.difference)}" for metric in entry.regressed)
    return {"entry": entry, "revision": entry.revision[:12], "note": worse or (entry.note if entry.verdict == "failed" else "")}


def _share(value: float) -> str:
    return f"{100 * value:.1f}"


def _signed(value: float | None) -> str:
    return "" if value is None else f"{100 * value:+.1f}"
