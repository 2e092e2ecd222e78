"""Progress, counted and shown."""

import io
import threading
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from askmany.pipeline import watching
from askmany.pipeline.acks import Ack
from askmany.pipeline.commit import Shard, ShardFooter
from askmany.pipeline.progress import Counts, LiveDisplay, PlainDisplay, duration, line, make_display
from askmany.pipeline.watching import Watcher


def counts(**values: Any) -> Counts:
    return Counts(**{"planned_documents": 10, "planned_records": 40, "planned_cost": 100.0, **values})


def ack(records: int = 4, errors: int = 0) -> Ack:
    footer = ShardFooter("f", "g", 1, 1, records, 1, {"ok": records - errors, "error": errors}, "sum", usage={"answer_tokens": 40})
    return Ack("g", Shard(footer, 1000), 1.0, "host/1", "cpu")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_counts_end_equal_to_the_records() -> None:
    made = counts()
    for _ in range(10):
        made.book(ack(errors=1), 10.0)
    made.book(replace(ack(), shard=None), 10.0)
    assert (made.documents, made.records, made.questions, made.errors, made.answer_tokens) == (10, 40, 40, 10, 400)
    assert made.share == 1.0
    assert made.remaining_s(60) == 0


def test_answers_count_before_their_group_is_done_but_never_more_than_planned() -> None:
    made = counts(live_answers=20)
    assert made.questions == 20
    assert made.share == 0.5
    assert made.remaining_s(60) == 60
    made.live_answers = 99
    assert made.questions == 40
    assert made.share == 0.99
    assert counts().remaining_s(60) is None


def test_nothing_to_do_is_done() -> None:
    assert Counts(0, 0, 0.0).share == 1.0


def test_the_line_says_what_matters() -> None:
    made = counts(documents=3, records=12, errors=2, cost=25.0, live_tokens=500, live_answers=12)
    assert line(made, 10.0) == "3/10 documents · 12/40 questions · 500 answer tokens · 50.0 tokens/s · 2 errors · about 23 s left"
    assert line(counts(), 0.0) == "0/10 documents · 0/40 questions · 0 answer tokens"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.4, "59 s"), (59.9, "1 min 0 s"), (200, "3 min 20 s"), (7500, "2 h 5 min"), (90000, "25 h 0 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_plain_lines_come_at_intervals_and_at_the_end() -> None:
    clock, out = Clock(), io.StringIO()
    display = make_display(Console(file=out, width=40), clock)
    assert isinstance(display, PlainDisplay)
    for clock.now in (1.0, 9.0, 11.0, 12.0, 25.0):
        display.show(counts(documents=int(clock.now)))
    display.show(counts(documents=99), final=True)
    display.close()
    assert [text.split("/")[0] for text in out.getvalue().splitlines()] == ["11", "25", "99"]


def test_a_terminal_gets_a_bar() -> None:
    out = io.StringIO()
    display = make_display(Console(file=out, width=150, force_terminal=True))
    assert isinstance(display, LiveDisplay)
    display.show(counts(documents=3))
    display.show(counts(documents=10), final=True)
    display.close()
    assert "10/10 documents" in out.getvalue()


class Recorded:
    """Stands in for the recorder of a launch."""

    def __init__(self) -> None:
        self.groups: list[str] = []
        self.most_workers = 0
        self.eta_s: float | None = None

    def book(self, ack: Ack) -> None:
        self.groups.append(ack.group)

    def workers(self, count: int) -> None:
        self.most_workers = max(self.most_workers, count)


def watcher(shown: Any, planned: Counts, control: Any, recorded: Any) -> Watcher:
    made = Watcher(shown, planned, {"g": 100.0}, control, recorded)
    made.start()
    return made


class Shown:
    """A display that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.final = False
        self.seen = threading.Event()

    def show(self, counts: Counts, final: bool = False) -> None:
        self.lines.append(line(counts, 0.0))
        self.final = self.final or final
        if counts.live_answers:
            self.seen.set()

    def close(self) -> None:
        self.lines.append("closed")


class Remote:
    """A control actor's handle; `ray.get` is replaced to return what `remote` does."""

    def __init__(self, answers: tuple[int, int, int] | Exception) -> None:
        self.answers = answers
        self.read = self

    def remote(self) -> Any:
        return self.answers


@pytest.fixture
def plain_get(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(value: Any, timeout: float) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setattr("ray.get", get)
    monkeypatch.setattr(watching, "POLL_S", 0.01)


@pytest.mark.usefixtures("plain_get")
def test_a_watcher_shows_the_live_counts_and_then_what_was_acknowledged() -> None:
    shown, recorded = Shown(), Recorded()
    made = watcher(shown, counts(planned_documents=1, planned_records=4), Remote((3, 30, 2)), recorded)
    assert shown.seen.wait(10)
    made.book(ack())
    made.stop()
    assert shown.final
    assert "0/1 documents · 3/4 questions · 30 answer tokens" in shown.lines[0]
    assert "1/1 documents · 4/4 questions" in shown.lines[-2]
    assert shown.lines[-1] == "closed"
    assert (recorded.groups, recorded.most_workers) == (["g"], 2)


@pytest.mark.usefixtures("plain_get")
def test_a_control_actor_that_is_gone_harms_nothing() -> None:
    shown = Shown()
    made = watcher(shown, counts(planned_records=4), Remote(RuntimeError("dead")), Recorded())
    made.book(ack())
    made.stop()
    assert "4/4 questions" in shown.lines[-2]
