"""How far a run is: one display on a terminal, plain lines elsewhere. It counts; it decides nothing.

Documents and records come from acknowledgements and end equal to what was committed; answers and tokens in between come from the workers'
tally. The time left goes by cost, since groups are of unequal size.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from askmany.pipeline.acks import Ack

PLAIN_INTERVAL_S = 10.0


@dataclass(slots=True)
class Counts:
    """Planned and done, of one launch."""

    planned_documents: int
    planned_records: int
    planned_cost: float
    documents: int = 0
    records: int = 0
    errors: int = 0
    tokens: int = 0
    cost: float = 0.0
    live_answers: int = 0
    live_tokens: int = 0

    def book(self, ack: Ack, cost: float) -> None:
        if ack.shard is None:
            return
        self.documents += ack.shard.footer.documents
        self.records += ack.shard.footer.rows
        self.errors += ack.shard.footer.statuses.get("error", 0)
        self.tokens += int(ack.shard.footer.usage.get("answer_tokens", 0))
        self.cost += cost

    @property
    def answer_tokens(self) -> int:
        """Tokens of answers, counted as soon as anything is known of them."""
        return max(self.tokens, self.live_tokens)

    @property
    def questions(self) -> int:
        """Questions that have their end, counted as soon as anything is known of them."""
        return min(self.planned_records, max(self.records, self.live_answers))

    @property
    def share(self) -> float:
        """How much of the work is done, 0 to 1."""
        by_cost = self.cost / self.planned_cost if self.planned_cost else 1.0
        by_questions = self.questions / self.planned_records if self.planned_records else 1.0
        return by_cost if self.records == self.planned_records else max(by_cost, min(by_questions, 0.99))

    def remaining_s(self, elapsed_s: float) -> float | None:
        """Seconds left at the pace so far; None before there is one."""
        return elapsed_s * (1 - self.share) / self.share if self.share > 0.01 else None


class Display(Protocol):
    """Shows counts from time to time."""

    def show(self, counts: Counts, final: bool = False) -> None: ...

    def close(self) -> None: ...


def make_display(console: Console, clock: Callable[[], float] = time.monotonic) -> Display:
    """A live bar on a terminal, lines elsewhere."""
    return LiveDisplay(console, clock) if console.is_terminal else PlainDisplay(console, clock)


class PlainDisplay:
    """A line every `PLAIN_INTERVAL_S`, and one at the end."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console = console
        self._clock = clock
        self._started = self._last = clock()

    def show(self, counts: Counts, final: bool = False) -> None:
        now = self._clock()
        if final or now - self._last >= PLAIN_INTERVAL_S:
            self._last = now
            self._console.print(line(counts, now - self._started), soft_wrap=True, highlight=False, markup=False)

    def close(self) -> None:
        pass


class LiveDisplay:
    """A bar that moves, with the same figures behind it."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started = clock()
        self._progress = Progress(
            TextColumn("answering"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True
        )
        self._task = self._progress.add_task("starting", total=1.0)
        self._progress.start()

    def show(self, counts: Counts, final: bool = False) -> None:
        text = line(counts, self._clock() - self._started)
        self._progress.update(self._task, completed=1.0 if final else counts.share, description=text)

    def close(self) -> None:
        self._progress.stop()


def line(counts: Counts, elapsed_s: float) -> str:
    """The state in one line."""
    parts = [
        f"{counts.documents:,}/{counts.planned_documents:,} documents",
        f"{counts.questions:,}/{counts.planned_records:,} questions",
        f"{counts.answer_tokens:,} answer tokens",
    ]
    if elapsed_s > 0 and counts.answer_tokens:
        parts.append(f"{counts.answer_tokens / elapsed_s:,.1f} tokens/s")
    if counts.errors:
        parts.append(f"{counts.errors:,} errors")
    remaining = counts.remaining_s(elapsed_s)
    if remaining is not None and counts.share < 1:
        parts.append(f"about {duration(remaining)} left")
    return " · ".join(parts)


def duration(seconds: float) -> str:
    """`42 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
