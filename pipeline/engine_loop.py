"""One thread that owns an engine, and a queue in front of it, so that several callers keep the engine fed at once.

Callers hand over documents and get a `Ticket` each, on which they wait. The engine is touched by the loop's thread alone. Knows nothing
of groups, files or Ray.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from askmany.engine.choice import Choice
from askmany.engine.errors import DocumentError, EngineError, QuestionError
from askmany.engine.request import Document, StreamResult


class Engine(Protocol):
    """What the loop needs of an engine; `metrics` is a dataclass of counters that only grow."""

    @property
    def has_work(self) -> bool: ...

    @property
    def metrics(self) -> Any: ...

    def submit(self, document: Document) -> None: ...

    def step(self) -> list[StreamResult]: ...


@dataclass(slots=True, eq=False)
class Ticket:
    """What became of one document: results and refusals by question id, filled by the loop until `done` is set.

    `lost` are questions that the engine took in and never answered; `seconds` is how long it took from submission to the last answer.
    """

    document: Document
    results: dict[str, StreamResult] = field(default_factory=dict)
    refused: dict[str, DocumentError | QuestionError] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    failure: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)
    open: set[str] = field(init=False)
    submitted_at: float = field(default_factory=time.monotonic)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.open = {question.question_id for question in self.document.questions}

    def refuse(self, question_ids: Iterable[str], error: DocumentError | QuestionError) -> None:
        for question_id in self.open.intersection(question_ids):
            self.refused[question_id] = error
            self.open.discard(question_id)

    def wait(self) -> None:
        """Until every question has its end. Raises EngineError when the engine failed meanwhile."""
        self.done.wait()
        if self.failure is not None:
            raise EngineError(f"the engine failed: {self.failure!r}") from self.failure


class EngineLoop:
    """Runs the engine whenever it has work. From the loop's thread, `on_result` hears of every accepted answer, `on_step` of every step."""

    def __init__(self, engine: Engine, on_result: Callable[[StreamResult], None] = lambda result: None) -> None:
        self._engine = engine
        self._on_result = on_result
        self.on_step: Callable[[], None] = lambda: None
        self._inbox: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._tickets: dict[str, Ticket] = {}
        self._failure: BaseException | None = None
        self._closing = False
        self._counted = self._counters()
        self._usage_lock = threading.Lock()
        self._usage: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)
        self._thread.start()

    def submit(self, document: Document) -> Ticket:
        """Queue a document. Its key must differ from those of all documents not yet done."""
        ticket = Ticket(document)
        self._inbox.put(ticket)
        return ticket

    @property
    def busy(self) -> bool:
        """Whether a document is waited for."""
        return bool(self._tickets)

    @property
    def room_tokens(self) -> int:
        """Tokens that the engine's KV pool holds; no bound for an engine that does not say."""
        return int(getattr(self._engine, "room_tokens", 1 << 62))

    @property
    def choice(self) -> Choice | None:
        """What the engine's builder made of `streams: auto`, where it was told of the plan."""
        return getattr(self._engine, "choice", None)

    def take_usage(self) -> dict[str, float]:
        """The engine's counters since the last call: every unit of work is handed out once, whoever asks."""
        with self._usage_lock:
            usage, self._usage = self._usage, {}
        return usage

    def close(self) -> None:
        """End the thread after the work at hand is done."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        while self._take_in():
            try:
                self._work()
            except Exception as error:
                self._fail(error)

    def _take_in(self) -> bool:
        """Empty the inbox; wait for something to do when the engine has nothing. False when the loop is to end."""
        while not self._inbox.empty() or (not self._tickets and not self._closing):
            ticket = self._inbox.get()
            if ticket is None:
                self._closing = True
            elif self._failure is not None:
                ticket.failure = self._failure
                ticket.done.set()
            else:
                self._admit(ticket)
        return bool(self._tickets)

    def _admit(self, ticket: Ticket) -> None:
        self._tickets[ticket.document.key] = ticket
        try:
            self._offer(ticket, ticket.document)
        except Exception as error:
            self._fail(error)
        else:
            self._finish_if_done(ticket)

    def _offer(self, ticket: Ticket, document: Document) -> None:
        """Submit; when some questions are refused, submit the others."""
        if not document.questions:
            return
        ids = {question.question_id for question in document.questions}
        try:
            self._engine.submit(document)
        except DocumentError as error:
            ticket.refuse(ids, error)
        except QuestionError as error:
            named = ids.intersection(error.question_ids) or ids
            ticket.refuse(named, error)
            self._offer(ticket, replace(document, questions=tuple(q for q in document.questions if q.question_id not in named)))

    def _work(self) -> None:
        results = self._engine.step()
        self.on_step()
        self._book_usage()
        for result in results:
            self._accept(result)
        if not self._engine.has_work:
            for ticket in list(self._tickets.values()):
                ticket.lost = tuple(sorted(ticket.open))
                self._finish(ticket)

    def _accept(self, result: StreamResult) -> None:
        """Book an answer by its own key; one that nobody waits for (given twice, never asked) is counted and dropped."""
        ticket = self._tickets.get(result.document_key)
        if ticket is None or result.question_id not in ticket.open:
            with self._usage_lock:
                self._usage["unexpected_answers"] = self._usage.get("unexpected_answers", 0) + 1
            return
        ticket.open.discard(result.question_id)
        ticket.results[result.question_id] = result
        self._on_result(result)
        self._finish_if_done(ticket)

    def _finish_if_done(self, ticket: Ticket) -> None:
        if not ticket.open:
            self._finish(ticket)

    def _finish(self, ticket: Ticket) -> None:
        del self._tickets[ticket.document.key]
        ticket.seconds = time.monotonic() - ticket.submitted_at
        ticket.done.set()

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        for ticket in list(self._tickets.values()):
            ticket.failure = error
            self._finish(ticket)

    def _counters(self) -> dict[str, float]:
        return asdict(self._engine.metrics)

    def _book_usage(self) -> None:
        now = self._counters()
        with self._usage_lock:
            for name, value in now.items():
                self._usage[name] = self._usage.get(name, 0) + value - self._counted.get(name, 0)
        self._counted = now
