"""From planned documents to records, through one engine: read, prepare, submit, gather. Whatever happens to a document ends as records.

Documents are submitted as fast as they can be read and gathered in the same order; nothing here is positional, answers find their
question by key. Knows neither shards nor marks.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from askmany.engine.errors import ConfigError, DocumentError
from askmany.pipeline.documents import SourceDocument
from askmany.pipeline.engine_loop import EngineLoop, Ticket
from askmany.pipeline.plan import PlannedDocument
from askmany.pipeline.preparing import PreparedDocument, Preparer
from askmany.pipeline.questions import AskedQuestion
from askmany.pipeline.readers import Fetcher
from askmany.pipeline.schema import Record
from askmany.pipeline.text import clean
from askmany.pipeline.typed import typed_fields

_GLANCE_S = 0.05  # how often a wait looks whether the worker is draining


@dataclass(frozen=True, slots=True)
class Answered:
    """One document with its end: a record a question, and the seconds from its submission to its last answer."""

    doc_id: str
    records: tuple[Record, ...]
    seconds: float = 0.0
    tokens: int = 0


@dataclass(slots=True)
class _Asked:
    """A prepared document, whole or in chunks, and a ticket for each; a ticket is None when no question of it needs the engine."""

    planned: PlannedDocument
    parts: tuple[PreparedDocument, ...]
    tickets: list[Ticket | None]


class Answerer:
    """Answers documents with one engine. Safe to share between threads. Once `draining` is set, only what is finished is handed out."""

    def __init__(self, preparer: Preparer, fetcher: Fetcher, loop: EngineLoop, draining: threading.Event) -> None:
        self._preparer = preparer
        self._fetcher = fetcher
        self._loop = loop
        self._draining = draining

    def answer(self, group: str, documents: Sequence[PlannedDocument], attempt: int) -> Iterator[Answered]:
        """Each document once, in any order; when draining, those that were finished by then. Raises EngineError when the engine broke."""
        planned = {document.locator: document for document in documents}
        asked: list[_Asked] = []
        for locator, source in self._fetcher.fetch(list(planned)):
            if self._draining.is_set():
                break
            parts = self._prepare(planned[locator], source)
            if isinstance(parts, DocumentError):
                yield self.failed(planned[locator], str(parts), attempt)
            else:
                asked.append(_Asked(planned[locator], parts, [self._submit(group, part) for part in parts]))
        for item in asked:
            if all(map(self._finished, item.tickets)):
                item.tickets = [self._ask_lost_again(ticket) for ticket in item.tickets]
                if all(map(self._finished, item.tickets)):
                    yield self._gather(item, attempt)

    def failed(self, planned: PlannedDocument, reason: str, attempt: int) -> Answered:
        """Error records for a document that cannot be read, prepared or survived: one for each question and chunk that were planned."""
        keys = product(planned.asked, range(planned.chunks))
        return Answered(
            planned.doc_id,
            tuple(Record(planned.doc_id, question_id, "error", chunk=chunk, attempt=attempt, error=reason) for question_id, chunk in keys),
        )

    def _prepare(self, planned: PlannedDocument, source: SourceDocument | DocumentError) -> tuple[PreparedDocument, ...] | DocumentError:
        if isinstance(source, DocumentError):
            return source
        if (source.doc_id, source.content_hash) != (planned.doc_id, planned.content_hash):
            return DocumentError(f"{planned.locator.place()}: the document has changed since it was planned")
        try:
            parts = self._preparer.parts(source)
        except (ConfigError, DocumentError) as error:
            return DocumentError(str(error))
        except Exception as error:  # a document may fail in any way; its siblings may not notice
            return DocumentError(f"{planned.locator.place()}: {type(error).__name__}: {error}")
        return tuple(part.only(planned.asked) for part in parts)

    def _submit(self, group: str, part: PreparedDocument) -> Ticket | None:
        if not part.answerable:
            return None
        chunk = f"#{part.chunk}" if part.chunk else ""
        return self._loop.submit(part.for_engine(f"{group}{chunk}/{part.source.doc_id}"))

    def _finished(self, ticket: Ticket | None) -> bool:
        """Wait for the ticket; False when the worker began to drain first."""
        while ticket is not None and not ticket.done.wait(_GLANCE_S):
            if self._draining.is_set():
                return False
        return True

    def _gather(self, asked: _Asked, attempt: int) -> Answered:
        records = [
            record for part, ticket in zip(asked.parts, asked.tickets, strict=True) for record in self._records(part, ticket, attempt)
        ]
        seconds = max((ticket.seconds for ticket in asked.tickets if ticket is not None), default=0.0)
        return Answered(asked.planned.doc_id, tuple(records), seconds, sum(part.document_tokens for part in asked.parts))

    def _records(self, part: PreparedDocument, ticket: Ticket | None, attempt: int) -> Iterator[Record]:
        if ticket is not None:
            ticket.wait()
        for question in part.questions:
            if question.status is not None:
                yield part.record(question, attempt, status=question.status, error=question.error)
            else:
                assert ticket is not None
                yield part.record(question, attempt, **outcome(ticket, question.asked))

    def _ask_lost_again(self, ticket: Ticket | None) -> Ticket | None:
        """Questions that the engine lost are asked once more; a ticket that will have both outcomes."""
        if ticket is None or not ticket.lost:
            return ticket
        lost = tuple(q for q in ticket.document.questions if q.question_id in ticket.lost)
        again = self._loop.submit(replace(ticket.document, questions=lost))
        again.results |= ticket.results
        again.refused |= ticket.refused
        return again


def outcome(ticket: Ticket, asked: AskedQuestion) -> dict[str, Any]:
    """The fields of a record that the engine decides."""
    result = ticket.results.get(asked.question_id)
    if result is not None:
        return {
            "answer": clean(result.text).text,
            "answer_token_ids": result.answer_token_ids,
            "finish_reason": result.finish_reason,
            "logprob": result.logprob,
            "margin": result.margin if math.isfinite(result.margin) else None,
            **typed_fields(result, asked.kind),
        }
    refusal = ticket.refused.get(asked.question_id)
    if refusal is None:
        return {"status": "error", "error": "missing_stream: the engine took the question and gave no answer, twice"}
    return {"status": refusal.status, "error": str(refusal)}
