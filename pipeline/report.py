"""report.html: what a run did, on one page that opens anywhere, offline.

Totals come from the manifest, so they agree with it to the unit; the course of the run comes from the ledger. Everything that was in a
document is escaped (the template escapes by default) and nothing in the page runs. Knows no cluster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from askmany.pipeline.charts import Block, area, bar, clock, columns, lanes

REPORT = "report.html"
MAX_LANES, MAX_BLOCKS, MAX_POINTS, MAX_ROWS = 40, 400, 120, 12
GOOD = frozenset({"ok"})


@dataclass(frozen=True, slots=True)
class ReportInput:
    """What the page is made of: `run` is run.json, `totals` the manifest's figures, `lines` the ledger, `sample` some answer records."""

    run: Mapping[str, Any]
    totals: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]]
    sample: Sequence[Mapping[str, Any]] = ()
    sizes: Sequence[tuple[int, int]] = ()  # (tokens up to, documents) of the plan, for the histogram
    output: str = ""
    state: str = ""
    retries: int = 0


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure with its name and a word of explanation."""

    name: str
    value: str
    note: str = ""


@dataclass(slots=True)
class Course:
    """The ledger, read once: groups by time, events, and what adds up."""

    groups: list[Mapping[str, Any]] = field(default_factory=list)
    events: list[Mapping[str, Any]] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    slowest: list[Mapping[str, Any]] = field(default_factory=list)
    truncated: int = 0
    dropped_tokens: int = 0


def render(given: ReportInput) -> str:
    """The page."""
    course = read_course(given.lines)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(resources.files("askmany.pipeline").joinpath("report_page.html").read_text("utf-8"))
    statuses = [(name, count) for name, count in given.totals["statuses"].items() if count]
    return template.render(
        output=given.output,
        state=given.state or str(given.run.get("state", "")),
        model=given.run.get("model", ""),
        tiles=tiles(given, course),
        statuses=[(name, count, share(count, given.totals["records"])) for name, count in statuses],
        status_bar=Markup(bar(statuses)),
        throughput=Markup(area(throughput(course.groups), "answers/s")),
        worker_lanes=Markup(lanes(*worker_lanes(course.groups))) if course.groups else "",
        workers=worker_rows(course.groups),
        histogram=Markup(columns([(short(size), count) for size, count in given.sizes], "documents")) if given.sizes else "",
        reads=reads(given.totals.get("usage", {})),
        slowest=course.slowest[:8],
        errors=course.errors.most_common(MAX_ROWS),
        truncated=course.truncated,
        dropped_tokens=course.dropped_tokens,
        events=[event_row(event, course) for event in course.events[-60:]],
        launches=given.run.get("launches", []),
        sample=given.sample[:MAX_ROWS],
        clock=clock,
    )


def read_course(lines: Iterable[Mapping[str, Any]]) -> Course:
    """Groups (the last word on each, should one have been committed twice), events and sums."""
    course, last = Course(), {}
    for line in lines:
        if line.get("kind") == "group":
            last[line["group"]] = line
        else:
            course.events.append(line)
    course.groups = sorted(last.values(), key=lambda line: float(line["at"]))
    for line in course.groups:
        course.errors.update(line.get("errors") or {})
        course.slowest += line.get("slowest") or []
        course.truncated += int(line.get("truncated") or 0)
        course.dropped_tokens += int(line.get("dropped_tokens") or 0)
    course.slowest.sort(key=lambda one: -float(one["seconds"]))
    return course


def tiles(given: ReportInput, course: Course) -> list[Tile]:
    """The figures at the top."""
    totals, usage = given.totals, given.totals.get("usage", {})
    seconds = sum(float(one.get("seconds", 0)) for one in given.run.get("launches", []))
    good = sum(count for status, count in totals["statuses"].items() if status in GOOD)
    rate = totals["records"] / seconds if seconds else 0.0
    alone, read = float(usage.get("kv_bytes_alone", 0)), float(usage.get("kv_bytes_read", 0))
    found = [
        Tile("documents", f"{totals['documents']:,}"),
        Tile("answers", f"{totals['records']:,}", f"of {totals['planned_records']:,} planned"),
        Tile("ok", share(good, totals["records"]), f"{totals['records'] - good:,} not ok"),
        Tile("answers/s", f"{rate:,.1f}", f"over {clock(seconds)}" if seconds else ""),
        Tile("answer tokens", f"{int(usage.get('answer_tokens', 0)):,}"),
    ]
    if read:
        found.append(Tile("KV reads saved", f"{alone / read:.1f}×", f"{size(alone - read)} not read"))
    return [*found, Tile("I/O retries", f"{given.retries:,}")]


def throughput(groups: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """(seconds since the start, answers per second); a group's answers are spread over the time it took."""
    if not groups:
        return []
    start = min(began(line) for line in groups)
    end = max(float(line["at"]) for line in groups)
    width = max((end - start) / MAX_POINTS, 1e-6)
    rates = [0.0] * MAX_POINTS
    for line in groups:
        first, last = began(line) - start, float(line["at"]) - start
        rate = float(line["records"]) / max(last - first, 1e-6)
        for index in range(int(first / width), min(int(last / width) + 1, MAX_POINTS)):
            overlap = min(last, (index + 1) * width) - max(first, index * width)
            rates[index] += rate * max(overlap, 0.0) / width
    return [(0.0, rates[0]), *(((index + 0.5) * width, rate) for index, rate in enumerate(rates)), (end - start, rates[-1])]


def worker_lanes(groups: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[str, list[Block]]], float]:
    """Lanes of the busiest workers, and when the last group ended."""
    start = min(began(line) for line in groups)
    rows = []
    for name, lines in list(by_worker(groups).items())[:MAX_LANES]:
        blocks = [
            Block(began(line) - start, float(line["at"]) - start, block_style(line), block_title(line))
            for line in sorted(lines, key=lambda line: -float(line["seconds"]))[:MAX_BLOCKS]
        ]
        rows.append((name, blocks))
    return rows, max(float(line["at"]) for line in groups) - start


def worker_rows(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What each worker did, the busiest first."""
    rows = []
    for name, lines in by_worker(groups).items():
        busy = sum(float((line.get("usage") or {}).get("busy_s", 0)) for line in lines)
        span = max(float(line["at"]) for line in lines) - min(began(line) for line in lines)
        total = {key: sum(int(line[key]) for line in lines) for key in ("documents", "records")}
        answered = {"groups": len(lines), "busy": share(busy, span), "rate": f"{total['records'] / span:,.1f}" if span else "–"}
        rows.append({"name": name, "accelerator": lines[0].get("accelerator", ""), **total, **answered})
    return rows


def by_worker(groups: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for line in groups:
        found.setdefault(str(line.get("worker", "?")), []).append(line)
    return dict(sorted(found.items(), key=lambda item: -sum(int(line["records"]) for line in item[1])))


def began(line: Mapping[str, Any]) -> float:
    return float(line["at"]) - float(line["seconds"])


def block_style(line: Mapping[str, Any]) -> str:
    if (line.get("statuses") or {}).get("error"):
        return "block bad"
    return "block again" if int(line.get("attempt", 1)) > 1 else "block"


def block_title(line: Mapping[str, Any]) -> str:
    tried = f", try {line['attempt']}" if int(line.get("attempt", 1)) > 1 else ""
    return f"group {line['group']}: {line['documents']} documents, {line['records']} answers in {float(line['seconds']):.1f} s{tried}"


def event_row(event: Mapping[str, Any], course: Course) -> tuple[str, str, str]:
    """When (since the first group began), what, and the rest of it."""
    start = min((began(line) for line in course.groups), default=float(event.get("at", 0)))
    rest = ", ".join(f"{key} {value}" for key, value in event.items() if key not in ("kind", "at", "event"))
    return clock(max(float(event.get("at", 0)) - start, 0)), str(event.get("event", event.get("kind", ""))), rest


def reads(usage: Mapping[str, Any]) -> list[tuple[str, str]]:
    """KV reads and tokens, in words."""
    names = {
        "prefill_tokens": "prefix tokens computed",
        "prefix_hit_tokens": "prefix tokens found again",
        "tail_tokens": "question tokens computed",
        "decode_tokens": "answer tokens fed",
        "steps": "engine steps",
    }
    rows = [(label, f"{int(usage[name]):,}") for name, label in names.items() if usage.get(name)]
    for name, label in (("kv_bytes_read", "KV bytes read"), ("kv_bytes_alone", "KV bytes one request per question reads")):
        if usage.get(name):
            rows.append((label, size(float(usage[name]))))
    return rows


def share(part: float, whole: float) -> str:
    """A percentage that says 100 % only when nothing is missing."""
    if not whole:
        return "–"
    value = 100 * part / whole
    return f"{min(value, 99.9) if part < whole else value:.1f} %"


def short(tokens: int) -> str:
    return f"{tokens / 1000:g}k" if tokens >= 1000 else str(tokens)


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:,.1f} {unit}" if unit != "B" else f"{count:,.0f} B"
