"""A worker: one engine, fed with the documents of the groups it is given, its answers committed a group at a time.

Reads its own documents by locator, so text never travels. Whatever happens to a document ends as records; only a broken engine ends the
worker, whose group is then tried in a fresh process. Knows nothing of Ray: `dispatch` wraps it in an actor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from askmany.engine.errors import ConfigError, DocumentError, EngineError
from askmany.engine.request import StreamResult
from askmany.pipeline import attempts
from askmany.pipeline.commit import ShardFooter, write_shard
from askmany.pipeline.config import RunConfig
from askmany.pipeline.documents import SourceDocument
from askmany.pipeline.engine_loop import Engine, EngineLoop, Ticket
from askmany.pipeline.plan import PlannedDocument, planned_documents
from askmany.pipeline.preparing import PreparedDocument, Preparer
from askmany.pipeline.questions import AskedQuestion
from askmany.pipeline.readers import Fetcher
from askmany.pipeline.schema import Record, to_table
from askmany.pipeline.storage import ObjectStore
from askmany.pipeline.text import clean
from askmany.pipeline.typed import typed_fields

EngineFactory = Callable[[RunConfig], Engine]


@dataclass(frozen=True, slots=True)
class Job:
    """What every worker of a run is told; small, since it travels to each of them and is kept for their restarts."""

    config: RunConfig
    fingerprint: str
    launch: str
    build_engine: EngineFactory
    build_preparer: Callable[[RunConfig], Preparer]


@dataclass(frozen=True, slots=True)
class Ack:
    """All that a worker says of a committed group. `usage` are the engine's counters since its last acknowledgement."""

    group: str
    attempt: int
    documents: int
    records: int
    statuses: Mapping[str, int]
    document_tokens: int
    seconds: float
    usage: Mapping[str, float] = field(default_factory=dict)

    def footer(self, fingerprint: str) -> ShardFooter:
        """The footer of the shard that this acknowledges."""
        return ShardFooter(fingerprint, self.group, self.attempt, self.records, self.documents, self.statuses, self.usage)


@dataclass(slots=True)
class _Asked:
    """A prepared document and its ticket; the ticket is None when no question needs the engine."""

    prepared: PreparedDocument
    ticket: Ticket | None


class GroupWorker:
    """Turns groups into shards; `process` may be called from several threads at once.

    `die` ends the process when the engine can no longer be trusted. `on_answer` hears of each answer as it comes.
    """

    def __init__(
        self,
        job: Job,
        die: Callable[[BaseException], None],
        on_answer: Callable[[StreamResult], None] = lambda result: None,
    ) -> None:
        self._job = job
        self._die = die
        config = job.config
        self._store = ObjectStore(config.output.uri, config.output.storage_options)
        self._preparer = job.build_preparer(config)
        self._fetcher = Fetcher(config.input)
        self._loop = EngineLoop(job.build_engine(config), on_answer)

    def process(self, group: str, rows: pa.Table) -> Ack:
        """Answer a group's documents (plan rows) and commit its shard."""
        started = time.monotonic()
        documents = list(planned_documents(rows))
        limit = self._job.config.workers.max_attempts
        attempt = attempts.begin(self._store, self._job.launch, group, limit)
        try:
            records = self._give_up(documents, limit) if attempt is None else self._answer(group, documents, attempt)
        except EngineError as error:
            self._die(error)
            raise
        attempt = attempt or limit
        table = to_table(records, self._job.config.input.keep)
        footer = write_shard(
            self._store, table, self._job.fingerprint, group, attempt, documents=len(documents), usage=self._loop.take_usage()
        )
        tokens = sum(rows.column("document_tokens").to_pylist())
        seconds = time.monotonic() - started
        return Ack(group, attempt, len(documents), footer.rows, footer.statuses, tokens, seconds, footer.usage)

    def close(self) -> None:
        """End the engine's thread and remove temporary files."""
        self._loop.close()
        self._fetcher.close()

    def _answer(self, group: str, documents: Sequence[PlannedDocument], attempt: int) -> list[Record]:
        """Submit documents as fast as they can be read, then gather what became of each."""
        planned = {document.locator: document for document in documents}
        records: list[Record] = []
        asked: list[_Asked] = []
        for locator, source in self._fetcher.fetch(list(planned)):
            prepared = self._prepare(planned[locator], source)
            if isinstance(prepared, DocumentError):
                records += self._failed(planned[locator], str(prepared), attempt)
            else:
                asked.append(_Asked(prepared, self._submit(group, prepared)))
        for item in asked:
            records += self._gather(item, attempt)
        return records

    def _prepare(self, planned: PlannedDocument, source: SourceDocument | DocumentError) -> PreparedDocument | DocumentError:
        if isinstance(source, DocumentError):
            return source
        if (source.doc_id, source.content_hash) != (planned.doc_id, planned.content_hash):
            return DocumentError(f"{planned.locator.place()}: the document has changed since it was planned")
        try:
            return self._preparer.prepare(source)
        except (ConfigError, DocumentError) as error:
            return DocumentError(str(error))
        except Exception as error:  # a document may fail in any way; its siblings may not notice
            return DocumentError(f"{planned.locator.place()}: {type(error).__name__}: {error}")

    def _submit(self, group: str, prepared: PreparedDocument) -> Ticket | None:
        if not prepared.answerable:
            return None
        return self._loop.submit(prepared.for_engine(f"{group}/{prepared.source.doc_id}"))

    def _gather(self, asked: _Asked, attempt: int) -> Iterator[Record]:
        """One record for each of a document's questions."""
        prepared, ticket = asked.prepared, asked.ticket
        if ticket is not None:
            ticket.wait()
            ticket = self._ask_lost_again(ticket)
        for question in prepared.questions:
            if question.status is not None:
                yield prepared.record(question, attempt, status=question.status, error=question.error)
            else:
                assert ticket is not None
                yield prepared.record(question, attempt, **outcome(ticket, question.asked))

    def _ask_lost_again(self, ticket: Ticket) -> Ticket:
        """Questions that the engine lost are asked once more; the ticket with both outcomes."""
        if not ticket.lost:
            return ticket
        lost = tuple(q for q in ticket.document.questions if q.question_id in ticket.lost)
        again = self._loop.submit(replace(ticket.document, questions=lost))
        again.wait()
        again.results |= ticket.results
        again.refused |= ticket.refused
        return again

    def _failed(self, planned: PlannedDocument, reason: str, attempt: int) -> list[Record]:
        """Error records for a document that cannot be read or prepared: one for each question it is known to have."""
        ids = self._preparer.question_ids(planned.own_questions)
        return [Record(planned.doc_id, question_id, "error", attempt=attempt, error=reason) for question_id in ids]

    def _give_up(self, documents: Sequence[PlannedDocument], attempts_made: int) -> list[Record]:
        """Records for a group that ended its worker at every try."""
        reason = f"worker_lost: the worker process ended at each of {attempts_made} tries"
        return [record for document in documents for record in self._failed(document, reason, attempts_made)]


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
