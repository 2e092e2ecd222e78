"""A worker: one engine, fed with the documents of the groups it is given, its answers committed a group at a time.

Reads its own documents by locator, so text never travels. Only a broken engine ends the worker; its groups are then tried in a fresh
process, by the rules of `attempts`. Knows nothing of Ray: `dispatch` wraps it in an actor.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import pyarrow as pa

from askmany.engine.errors import EngineError
from askmany.engine.garbage import leave_out_what_is_loaded
from askmany.engine.request import StreamResult
from askmany.pipeline.acks import Ack, Notes, take_notes
from askmany.pipeline.announcing import announcer
from askmany.pipeline.answering import Answered, Answerer
from askmany.pipeline.attempts import History, Marks, cut_suspects, unfinished
from askmany.pipeline.cells import Sets
from askmany.pipeline.commit import Shard, describe, read_records, shard_name, write_records, write_shard
from askmany.pipeline.config import RunConfig
from askmany.pipeline.engine_loop import Engine, EngineLoop
from askmany.pipeline.gate import Gate
from askmany.pipeline.plan import PlannedDocument, planned_documents
from askmany.pipeline.preparing import Preparer
from askmany.pipeline.readers import Fetcher
from askmany.pipeline.schema import Record, answer_schema, sort_by_key, to_table
from askmany.pipeline.storage import ObjectStore
from askmany.pipeline.watchdog import HangEvent, Watchdog

EngineFactory = Callable[[RunConfig], Engine]
GroupEngineFactory = Callable[[RunConfig, tuple[str, int], int, int], Engine | None]  # config, meeting place, rank, ranks
STACKS = "stacks"


@dataclass(frozen=True, slots=True)
class Job:
    """What every worker of a run is told; small, since it travels to each of them and is kept for their restarts.

    Documents of more than `long_above` tokens go to groups, whose ranks build their parts with `build_group_engine`. `sets` are the plan's,
    of shared questions; the set of all of them need not be among these. `standing` are groups under whose name an object lies that is to be
    replaced.
    """

    config: RunConfig
    fingerprint: str
    epoch: int
    build_engine: EngineFactory
    build_preparer: Callable[[RunConfig], Preparer]
    retry_errors: bool = False
    long_above: int | None = None
    build_group_engine: GroupEngineFactory | None = None
    sets: Sets = field(default_factory=dict)
    standing: frozenset[str] = frozenset()

    @property
    def launch(self) -> str:
        """Marks of this launch bear this name."""
        return f"{self.epoch:08d}"


@dataclass(slots=True)
class _Work:
    """One group in this process: its plan rows, what is kept of earlier tries, what is answered now."""

    group: str
    documents: list[PlannedDocument]
    marks: Marks
    history: History
    kept: dict[str, pa.Table] = field(default_factory=dict)
    answered: list[Answered] = field(default_factory=list)

    @property
    def done(self) -> set[str]:
        return {*self.kept, *(one.doc_id for one in self.answered)}


class GroupWorker:
    """Turns groups into shards; `process` may be called from several threads at once.

    `die` ends the process when the engine can no longer be trusted. `on_answer` hears of each answer as it comes.
    """

    def __init__(
        self,
        job: Job,
        die: Callable[[BaseException], None],
        on_answer: Callable[[StreamResult], None] = lambda result: None,
        accelerator: str = "cpu",
    ) -> None:
        self._job = job
        self._die = die
        self.accelerator = accelerator
        self._name = f"{socket.gethostname()}/{os.getpid()}"
        config = job.config
        self._store = ObjectStore(config.output.uri, config.output.storage_options)
        self._fetcher = Fetcher(config.input, self._store.retrier)
        self._draining = threading.Event()
        self._gate = Gate()
        self._inside = 0
        self._inside_lock = threading.Lock()
        preparer = job.build_preparer(config)
        self._sets = {preparer.shared_name: tuple(preparer.shared_asks), **job.sets}
        self._loop = EngineLoop(job.build_engine(config), on_answer)
        leave_out_what_is_loaded()
        self._answerer = Answerer(preparer, self._fetcher, self._loop, self._draining)
        self._watchdog = self._watch()

    @property
    def idle(self) -> bool:
        """Whether no group is in this worker."""
        return self._inside == 0

    @property
    def room_tokens(self) -> int:
        """Tokens that the engine's KV pool holds."""
        return self._loop.room_tokens

    def process(self, group: str, rows: pa.Table) -> Ack:
        """Answer a group's documents (plan rows) and commit its shard; when draining, keep what is finished and commit nothing."""
        with self._inside_lock:
            self._inside += 1
        try:
            return self._process(group, rows)
        finally:
            with self._inside_lock:
                self._inside -= 1

    def _process(self, group: str, rows: pa.Table) -> Ack:
        started = time.monotonic()
        marks = Marks(self._store, self._job.launch, group)
        history, kept = marks.look()
        with self._gate.exclusive() if history.in_flight else self._gate.shared():
            if self._draining.is_set():
                return self._ack(group, None, started)
            work = _Work(group, list(planned_documents(rows, self._sets)), marks, history, self._kept(group, kept))
            try:
                self._try(work)
            except EngineError as error:
                self._die(error)
                raise
            if len(work.done) < len(work.documents):
                return self._ack(group, None, started)
            shard = self._commit(work)
        marks.clear()
        return self._ack(group, shard, started, take_notes(work.answered))

    def drain(self) -> None:
        """Stop as soon as may be: what is answered is kept for the next launch, what is not is left to it."""
        self._draining.set()

    def close(self) -> None:
        """End the engine's thread and remove temporary files."""
        self._loop.close()
        self._fetcher.close()
        if self._watchdog is not None:
            self._watchdog.close()

    def _try(self, work: _Work) -> None:
        """Answer what no earlier try has answered: at once on the first try, in parts on a later one."""
        limit = self._job.config.workers.max_attempts
        attempt = work.history.next_attempt
        left = unfinished([document.doc_id for document in work.documents], work.done)
        parts, given_up = cut_suspects(left, work.history.deaths(left), limit)
        planned = {document.doc_id: document for document in work.documents}
        for doc_id in given_up:
            reason = f"worker_lost: the worker process ended at each of {limit} tries of this document"
            work.answered.append(self._answerer.failed(planned[doc_id], reason, limit))
        if not work.history.in_flight:
            work.marks.begin(attempt)
        for number, part in enumerate(parts):
            if work.history.in_flight:
                work.marks.begin_part(attempt, number, part)
            answered = list(self._answerer.answer(work.group, [planned[doc_id] for doc_id in part], attempt))
            work.answered += answered
            if self._draining.is_set() or len(parts) > 1:
                self._keep(work, attempt, number, answered)
            if self._draining.is_set():
                work.marks.forgive(attempt)
                return

    def _keep(self, work: _Work, attempt: int, part: int, answered: Sequence[Answered]) -> None:
        table = self._table([record for one in answered for record in one.records])
        footer = describe(table, self._job.fingerprint, work.group, self._job.epoch, attempt, {})
        write_records(self._store, work.marks.kept_name(attempt, part), table, footer)

    def _kept(self, group: str, names: Sequence[str]) -> dict[str, pa.Table]:
        """What earlier tries left. When errors are tried again, a former shard's documents without one are left as they are."""
        kept = self._read_kept(names)
        if not self._job.retry_errors:
            return kept
        former = self._read_kept([shard_name(group)])
        return {doc_id: rows for doc_id, rows in {**former, **kept}.items() if "error" not in rows.column("status").to_pylist()}

    def _read_kept(self, names: Sequence[str]) -> dict[str, pa.Table]:
        """Records of earlier tries by doc_id. What cannot be read is done again."""
        found: dict[str, pa.Table] = {}
        for name in names:
            table = read_records(self._store, name, self._job.fingerprint)
            if table is None or not table.num_rows:
                continue
            ids = table.column("doc_id").to_pylist()
            starts = [i for i in range(len(ids)) if i == 0 or ids[i] != ids[i - 1]]
            for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
                found[ids[start]] = table.slice(start, stop - start)
        return found

    def _commit(self, work: _Work) -> Shard:
        fresh = self._table([record for one in work.answered for record in one.records])
        schema = answer_schema(self._job.config.input.keep)
        kept = [table.replace_schema_metadata(None).cast(schema) for table in work.kept.values()]
        table = sort_by_key(pa.concat_tables([fresh, *kept])) if kept else fresh
        attempt = work.history.next_attempt
        footer = describe(table, self._job.fingerprint, work.group, self._job.epoch, attempt, self._loop.take_usage())
        replaces = work.group in self._job.standing or work.history.in_flight
        return write_shard(self._store, table, footer, None if replaces else announcer(self._store))

    def _table(self, records: Sequence[Record]) -> pa.Table:
        return to_table(records, self._job.config.input.keep)

    def _ack(self, group: str, shard: Shard | None, started: float, notes: Notes | None = None) -> Ack:
        seconds = time.monotonic() - started
        choice = asdict(self._loop.choice) if self._loop.choice else None
        return Ack(group, shard, seconds, self._name, self.accelerator, notes or Notes(), self._store.retrier.take(), choice)

    def _watch(self) -> Watchdog | None:
        limit_s = self._job.config.workers.watchdog_s
        if limit_s is None:
            return None
        watchdog = Watchdog(limit_s, lambda: self._loop.busy, self._tell)
        self._loop.on_step = watchdog.beat
        return watchdog

    def _tell(self, event: HangEvent, stacks: str) -> None:
        """Put the stacks where whoever looks at the run finds them."""
        name = f"{STACKS}/{self._job.launch}-{self._name.replace('/', '-')}.txt"
        self._store.put(name, f"{event}\n{stacks}".encode())
