import re
from html.parser import HTMLParser
from typing import Any

import pytest

from askmany.pipeline.charts import Block, area, bar, clock, columns, lanes, nice_step
from askmany.pipeline.report import ReportInput, read_course, render, share, throughput

HOSTILE = '</td><script>alert("x")</script><img src=x onerror=alert(1)>{{ 7*7 }}&'


def _group(number: int, **values: Any) -> dict[str, Any]:
    base = {
        "kind": "group",
        "at": 1000.0 + number,
        "group": f"g{number}",
        "worker": f"node/{number % 2}",
        "accelerator": "cpu",
        "attempt": 1,
    }
    counts = {"documents": 2, "records": 6, "statuses": {"ok": 6}, "seconds": 1.0, "usage": {"busy_s": 0.9}, "errors": {}, "slowest": []}
    return {**base, **counts, **values}


def _given(**values: Any) -> ReportInput:
    lines = [_group(n) for n in range(5)]
    lines[2] |= {"slowest": [{"doc_id": HOSTILE, "seconds": 3.0, "tokens": 1234, "questions": 3}], "errors": {HOSTILE: 2}, "truncated": 1}
    lines.append({"kind": "event", "at": 1002.0, "event": "worker_hung", "worker": HOSTILE})
    totals = {
        "documents": 10,
        "records": 30,
        "planned_records": 30,
        "statuses": {"ok": 28, "error": 2},
        "usage": {"kv_bytes_read": 5, "kv_bytes_alone": 50},
    }
    run = {"model": HOSTILE, "state": "complete", "launches": [{"seconds": 5.0}]}
    sample = [{"doc_id": HOSTILE, "question": HOSTILE, "question_id": "q", "answer": HOSTILE, "status": "ok", "error": None}]
    return ReportInput(**{"run": run, "totals": totals, "lines": lines, "sample": sample, "output": HOSTILE, **values})


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_nothing_of_a_document_becomes_markup_and_nothing_is_loaded_from_outside() -> None:
    parser = _Tags()
    page = render(_given())
    parser.feed(page)
    names = {tag for tag, _ in parser.tags}
    assert not names & {"script", "img", "iframe", "link", "object", "embed"}
    assert not any(name.startswith("on") or name in ("src", "href") for _, attributes in parser.tags for name in attributes)
    assert page.count("&lt;script&gt;") >= 6
    assert "{{ 7*7 }}" in page
    assert "49" not in re.sub(r"<style>.*?</style>|<svg.*?</svg>", "", page, flags=re.DOTALL)
    assert not re.search(r"https?://|url\(|@import", page)


def test_the_figures_are_the_manifests() -> None:
    text = re.sub(r"<[^>]+>", " ", render(_given()))
    for figure in ("of 30 planned", "93.3 %", "2 not ok", "10.0×", "ok 28", "error 2", "6.0"):
        assert figure in re.sub(r"\s+", " ", text)


def test_an_empty_run_has_a_page() -> None:
    totals = {"documents": 0, "records": 0, "planned_records": 0, "statuses": {}, "usage": {}}
    assert "0" in render(ReportInput(run={"state": "interrupted"}, totals=totals, lines=[]))


def test_a_group_committed_twice_counts_once() -> None:
    course = read_course([_group(1, records=5), _group(1, records=6, at=1009.0)])
    assert [line["records"] for line in course.groups] == [6]


def test_throughput_holds_every_answer() -> None:
    points = throughput([_group(n, seconds=2.5, records=10 + n) for n in range(9)])
    inner = points[1:-1]
    width = inner[1][0] - inner[0][0]
    assert sum(rate * width for _, rate in inner) == pytest.approx(sum(10 + n for n in range(9)), rel=1e-6)


def test_a_share_is_100_only_when_nothing_is_missing() -> None:
    assert share(99_999, 100_000) == "99.9 %"
    assert share(5, 5) == "100.0 %"
    assert share(0, 0) == "–"


@pytest.mark.parametrize(("span", "step"), [(9, 2), (100, 20), (0.04, 0.01), (0, 1)])
def test_steps_are_round(span: float, step: float) -> None:
    assert nice_step(span) == pytest.approx(step)


def test_charts_escape_their_labels() -> None:
    drawn = [
        lanes([(HOSTILE, [Block(0, 1, "block", HOSTILE)])], 1.0),
        bar([(HOSTILE, 1.0)]),
        columns([(HOSTILE, 2)], HOSTILE),
        area([(0, 1), (1, 2)], HOSTILE),
    ]
    assert all("<script" not in chart and "<img" not in chart for chart in drawn)


def test_clock_reads_like_one() -> None:
    assert [clock(seconds) for seconds in (42, 200, 7500)] == ["42 s", "3:20", "2:05:00"]
