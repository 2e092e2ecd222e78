"""From planned documents to records, through one engine: read, prepare, submit, gather. Whatever happens to a document ends as records.

Documents are submitted as fast as they can be read and gathered in the same order; nothing here is positional, answers find their
question by key. Knows neither shards nor marks.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
    """A prepared document and its ticket; the ticket is None when no question needs the engine."""

    planned: PlannedDocument
    prepared: PreparedDocument
    ticket: Ticket | None


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
            prepared = self._prepare(planned[locator], source)
            if isinstance(prepared, DocumentError):
                yield self.failed(planned[locator], str(prepared), attempt)
            else:
                asked.append(_Asked(planned[locator], prepared, self._submit(group, prepared)))
        for item in asked:
            if self._finished(item.ticket) and self._finished(again := self._ask_lost_again(item.ticket)):
                yield self._gather(replace(item, ticket=again), attempt)

    def failed(self, planned: PlannedDocument, reason: str, attempt: int) -> Answered:
        """Error records for a document that cannot be read, prepared or survived: one for each question it is known to have."""
        ids = planned.asked if planned.asked is not None else self._preparer.question_ids(planned.own_questions)
        records = (Record(planned.doc_id, question_id, "error", attempt=attempt, error=reason) for question_id in ids)
        return Answered(planned.doc_id, tuple(records))

    def _prepare(self, planned: PlannedDocument, source: SourceDocument | DocumentError) -> PreparedDocument | DocumentError:
        if isinstance(source, DocumentError):
            return source
        if (source.doc_id, source.content_hash) != (planned.doc_id, planned.content_hash):
            return DocumentError(f"{planned.locator.place()}: the document has changed since it was planned")
        try:
            prepared = self._preparer.prepare(source)
        except (ConfigError, DocumentError) as error:
            return DocumentError(str(error))
        except Exception as error:  # a document may fail in any way; its siblings may not notice
            return DocumentError(f"{planned.locator.place()}: {type(error).__name__}: {error}")
        return prepared if planned.asked is None else prepared.only(planned.asked)

    def _submit(self, group: str, prepared: PreparedDocument) -> Ticket | None:
        if not prepared.answerable:
            return None
        return self._loop.submit(prepared.for_engine(f"{group}/{prepared.source.doc_id}"))

    def _finished(self, ticket: Ticket | None) -> bool:
        """Wait for the ticket; False when the worker began to drain first."""
        while ticket is not None and not ticket.done.wait(_GLANCE_S):
            if self._draining.is_set():
                return False
        return True

    def _gather(self, asked: _Asked, attempt: int) -> Answered:
        prepared, ticket = asked.prepared, asked.ticket
        if ticket is not None:
            ticket.wait()
        records = []
        for question in prepared.questions:
            if question.status is not None:
                records.append(prepared.record(question, attempt, status=question.status, error=question.error))
            else:
                assert ticket is not None
                records.append(prepared.record(question, attempt, **outcome(ticket, question.asked)))
        seconds = ticket.seconds if ticket is not None else 0.0
        return Answered(asked.planned.doc_id, tuple(records), seconds, prepared.document_tokens)

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
