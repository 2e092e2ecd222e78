"""The interleaved layout's scheduler: the published method (Parallel Prompting, arXiv 2611.15130), as a mode and as a baseline.

The unit is a request: one document and up to P of its streams, whose tokens share one KV row. The row holds the question tails, woven
token by token, then one answer token of every live stream a step. A stream that ended feeds nothing more, but its slots and its place
stay until the whole request is done: the limits that the split layout does away with.

Continuous batching refills a finished request's place at once; run-to-completion starts a new batch of up to B requests when the last one
is done. Document prefixes lie in the same prefix tree and are prefilled as in the split layout. In deterministic mode a step holds one
kind of work, and a request's tails are cut at multiples of `prefill_chunk`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from askmany.engine.admission import Admission, Claim
from askmany.engine.booking import StepBooking
from askmany.engine.config import SchedulerLimits
from askmany.engine.errors import QuestionError
from askmany.engine.pages import PagePool
from askmany.engine.prefill import plan_chunks, ready
from askmany.engine.prefix_tree import PrefixTree
from askmany.engine.request import Document, DocumentState, InterleavedRequest, Phase, Stream
from askmany.engine.step import MaskedRun, Sampled, StepPlan
from askmany.engine.streams import check_stream, may_decode, open_stream

Entry = tuple[int, int]  # (sid, private token index)


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """A live request: its claim, and the order in which its tails are woven into the row."""

    request: InterleavedRequest
    claim: Claim
    tails: tuple[Entry, ...]

    @property
    def stored(self) -> int:
        return len(self.request.sids)

    @property
    def in_tails(self) -> bool:
        return self.stored < len(self.tails)

    @property
    def done(self) -> bool:
        return all(stream.phase is Phase.DONE for stream in self.request.streams)


class InterleavedScheduler(StepBooking):
    """At most B = `limits.requests` requests of P = `limits.streams` streams, documents and questions in order of submission."""

    def __init__(self, pool: PagePool, tree: PrefixTree, limits: SchedulerLimits) -> None:
        super().__init__(pool, tree, limits, Admission(pool, tree, limits.requests, limits.requests))
        self._rows: dict[InterleavedRequest, _Row] = {}  # live requests in the order they started

    def check_integrity(self) -> bool:
        self._admission.check_integrity([row.claim for row in self._rows.values()])
        for request, row in self._rows.items():
            assert request.pages == row.claim.pages
            assert not row.done, "a finished request was kept"
            assert len(request.sids) <= row.claim.tokens, "a request is over its budget"
            for sid, stream in enumerate(request.streams):
                assert request.sids.count(sid) == stream.stored, "slots of a stream and its stored tokens disagree"
                if stream.phase is not Phase.DONE:
                    check_stream(stream)
        return True

    def _refuse(self, document: Document) -> None:
        """Branches of one stream would see each other here: stream ids tell streams apart, not the branches of a stream."""
        refused = tuple(question.question_id for question in document.questions if question.labels and question.labels.feed)
        if refused:
            raise QuestionError(f"document {document.key!r}: labels of several tokens are scored in the split layout alone", refused)

    def _claims(self, state: DocumentState) -> list[Claim]:
        """Cut the questions into requests: P streams each, fewer where path and request would not fit an empty pool."""
        room = (self.pool.page_count - self.tree.path_pages(state.document.segments)) * self.pool.page_size
        claims: list[Claim] = []
        group: list[Stream] = []
        tokens = 0
        for stream in state.streams:
            if group and (len(group) == self.limits.streams or tokens + stream.budget_tokens > room):
                claims.append(Claim(state, tuple(group), tokens))
                group, tokens = [], 0
            group.append(stream)
            tokens += stream.budget_tokens
        return [*claims, Claim(state, tuple(group), tokens)]

    def _next_step(self) -> StepPlan:
        if self.limits.batching == "continuous" or not self._rows:
            self._start()
        fed = [row for row in self._rows.values() if ready(row.request.document)]
        decoding = [run for row in fed if not row.in_tails if (run := _decode_run(row)).entries]
        weaving = [row for row in fed if row.in_tails]
        return self._plan_one_kind(decoding, weaving) if self.limits.deterministic else self._plan_mixed(decoding, weaving)

    def _book_runs(self, plan: StepPlan) -> None:
        for run in plan.masked:
            for sid, index in run.entries:
                run.request.sids.append(sid)
                run.request.streams[sid].stored = index + 1

    def _end_streams(self, plan: StepPlan, sampled: list[Sampled]) -> list[Stream]:
        for run in plan.masked:
            row = self._rows.get(run.request)  # a request may have ended while the step ran
            if row is not None and row.done:
                self._end(run.request)
        return [sample.stream for sample in sampled if sample.stream.phase is Phase.DONE]

    def _start(self) -> None:
        for claim in self._admission.start():
            request = InterleavedRequest(claim.document, claim.streams, claim.pages)
            for stream in claim.streams:
                open_stream(stream)
            self._rows[request] = _Row(request, claim, weave(len(stream.question.token_ids) for stream in claim.streams))

    def _end(self, request: InterleavedRequest) -> None:
        request.pages = []
        self._admission.end(self._rows.pop(request).claim)

    def _plan_mixed(self, decoding: list[MaskedRun], weaving: list[_Row]) -> StepPlan:
        budget = self.limits.step_tokens - sum(len(run.entries) for run in decoding)
        runs = list(decoding)
        for row in weaving:
            size = min(budget, len(row.tails) - row.stored)
            if not size:
                break
            runs.append(_tail_run(row, size))
            budget -= size
        return StepPlan(plan_chunks(self._admission.resident, budget, self.limits), masked=tuple(runs))

    def _plan_one_kind(self, decoding: list[MaskedRun], weaving: list[_Row]) -> StepPlan:
        budget = self.limits.step_tokens
        runs: list[MaskedRun] = []
        for row in weaving:
            size = min(self.limits.prefill_chunk, len(row.tails) - row.stored)
            if size > budget:
                break
            runs.append(_tail_run(row, size))
            budget -= size
        if runs:
            return StepPlan((), masked=tuple(runs))
        chunks = plan_chunks(self._admission.resident, budget, self.limits)
        return StepPlan(chunks) if chunks else StepPlan((), masked=tuple(decoding))


def weave(lengths: Iterable[int]) -> tuple[Entry, ...]:
    """Tails token by token in turn: (0, 0), (1, 0), ..., (0, 1), (1, 1), ...; a tail that is over is passed by."""
    tails = list(enumerate(lengths))
    longest = max(length for _, length in tails)
    return tuple((sid, index) for index in range(longest) for sid, length in tails if index < length)


def _tail_run(row: _Row, size: int) -> MaskedRun:
    entries = row.tails[row.stored : row.stored + size]
    tails = [len(stream.question.token_ids) for stream in row.request.streams]
    samples = tuple(i for i, (sid, index) in enumerate(entries) if index == tails[sid] - 1)
    return MaskedRun(row.request, row.stored, entries, samples)


def _decode_run(row: _Row) -> MaskedRun:
    streams = enumerate(row.request.streams)
    entries = tuple((sid, stream.stored) for sid, stream in streams if may_decode(stream))
    return MaskedRun(row.request, row.stored, entries, tuple(range(len(entries))))
