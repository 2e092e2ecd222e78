"""The split layout's scheduler: continuous batching at the level of streams.

Host integers and lists alone. Each step it starts what may start (`admission`), then fills the token budget: one token of every decoding
stream, then question tails, then document chunks. A stream that ends gives its pages and its place to the next question at once.

Deterministic mode (`SchedulerLimits`) feeds one kind of work a step, tails before chunks before decode rows, so that decode steps run as
full as they can. Tails and chunks are cut at multiples of a fixed length from their own start and a piece is fed whole or waits: which
tokens of a stream share a step is a property of the stream alone.
"""

from __future__ import annotations

from typing import Protocol

from askmany.engine.admission import Admission, Claim
from askmany.engine.booking import StepBooking
from askmany.engine.config import SchedulerLimits
from askmany.engine.pages import PagePool
from askmany.engine.prefill import plan_chunks, ready
from askmany.engine.prefix_tree import PrefixTree
from askmany.engine.request import Document, DocumentState, FinishReason, Phase, Stream
from askmany.engine.step import Sampled, StepPlan, StreamRun
from askmany.engine.streams import check_stream, may_decode, open_stream


class Scheduler(Protocol):
    """What the engine asks of a scheduler; `plan` and `advance` alternate."""

    @property
    def has_work(self) -> bool:
        """Whether a submitted question is still without its end."""
        ...

    @property
    def tree(self) -> PrefixTree:
        """The prefixes that are stored; to be read."""
        ...

    def submit(self, document: Document) -> None:
        """Queue a document; raises DocumentError or QuestionError (nothing queued) for what the KV pool could never hold."""
        ...

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is no work."""
        ...

    def advance(self, plan: StepPlan, sampled: list[Sampled], finish: dict[int, FinishReason]) -> list[Stream]:
        """Book what the step did. `finish` names streams (by id) that end here; a stream at its budget ends anyway. Returns the ended."""
        ...

    def launch(self, plan: StepPlan) -> None:
        """Instead of `advance`, for a step whose tokens are not known yet: the next may be planned, with every stream going on."""
        ...

    def settle(self, plan: StepPlan, sampled: list[Sampled], finish: dict[int, FinishReason]) -> list[Stream]:
        """The tokens of the oldest step that was launched; those of streams that have ended since are dropped. Returns the ended.

        A stream may end here while a later step feeds it: its pages are free at once, since steps run in order on the device.
        """
        ...

    def check_integrity(self) -> bool:
        """True; fails with AssertionError naming what is wrong when pages, counts and states disagree."""
        ...


class SplitScheduler(StepBooking):
    """At most `limits.streams` live streams a document and `limits.max_rows` in all, documents and questions in order of submission."""

    def __init__(self, pool: PagePool, tree: PrefixTree, limits: SchedulerLimits) -> None:
        super().__init__(pool, tree, limits, Admission(pool, tree, limits.max_rows, limits.streams))
        self._live: dict[int, Claim] = {}  # by stream id, in the order they started

    def check_integrity(self) -> bool:
        self._admission.check_integrity(list(self._live.values()))
        for stream_id, claim in self._live.items():
            (stream,) = claim.streams
            assert stream.stream_id == stream_id
            assert stream.pages == claim.pages
            check_stream(stream)
        return True

    def _refuse(self, document: Document) -> None:
        """Everything can be asked."""

    def _claims(self, state: DocumentState) -> list[Claim]:
        return [Claim(state, (stream,), stream.question.budget_slots(self.pool.page_size)) for stream in state.streams]

    def _next_step(self) -> StepPlan:
        self._start()
        streams = [claim.streams[0] for claim in self._live.values()]
        decoding = [stream for stream in streams if may_decode(stream)]
        tails = [stream for stream in streams if stream.phase is Phase.TAIL and ready(stream.document)]
        return self._plan_one_kind(decoding, tails) if self.limits.deterministic else self._plan_mixed(decoding, tails)

    def _book_runs(self, plan: StepPlan) -> None:
        for run in plan.runs:
            run.stream.stored = run.stop

    def _end_streams(self, plan: StepPlan, sampled: list[Sampled]) -> list[Stream]:
        ended = [sample.stream for sample in sampled if sample.stream.phase is Phase.DONE]
        for stream in ended:
            self._end(stream)
        return ended

    def _start(self) -> None:
        for claim in self._admission.start():
            (stream,) = claim.streams
            stream.pages = claim.pages
            open_stream(stream)
            self._live[stream.stream_id] = claim

    def _end(self, stream: Stream) -> None:
        stream.pages = []
        self._admission.end(self._live.pop(stream.stream_id))

    def _plan_mixed(self, decoding: list[Stream], tails: list[Stream]) -> StepPlan:
        runs = [_decode_run(stream) for stream in decoding]
        budget, places = self.limits.step_tokens - len(runs), self._places - len(runs)
        for stream in tails:
            size, taken = self._piece(stream, budget, places)
            if not size:
                break
            runs.append(_tail_run(stream, size))
            budget -= size
            places -= taken
        return StepPlan(plan_chunks(self._admission.resident, budget, self.limits), tuple(runs))

    def _plan_one_kind(self, decoding: list[Stream], tails: list[Stream]) -> StepPlan:
        budget, places = self.limits.step_tokens, self._places
        runs: list[StreamRun] = []
        for stream in tails:
            size, taken = self._piece(stream, self.limits.tail_piece, self._places)
            if size > budget or taken > places:
                break
            runs.append(_tail_run(stream, size))
            budget -= size
            places -= taken
        if runs:
            return StepPlan((), tuple(runs))
        chunks = plan_chunks(self._admission.resident, budget, self.limits)
        return StepPlan(chunks) if chunks else StepPlan((), tuple(_decode_run(stream) for stream in decoding))

    @property
    def _places(self) -> int:
        """Of a step: what a device makes room for, a row that asks or a run of rows each. Chains below a tail take two."""
        return max(2, self.limits.max_rows)

    def _piece(self, stream: Stream, tokens: int, places: int) -> tuple[int, int]:
        """How many tokens of a tail to feed, and the places they take."""
        question, start = stream.question, stream.stored
        stop = min(start + tokens, question.feed_tokens)
        if question.labels is None:
            return (stop - start, 1) if places else (0, 0)
        laid = question.label_pages(self.pool.page_size)
        stop = laid.fitting(start, stop, places)
        return stop - start, laid.places(start, stop)


def _decode_run(stream: Stream) -> StreamRun:
    return StreamRun(stream, stream.stored, stream.stored + 1, samples=True)


def _tail_run(stream: Stream, size: int) -> StreamRun:
    stop = stream.stored + size
    return StreamRun(stream, stream.stored, stop, samples=stop == stream.question.feed_tokens)
