"""What both layouts' schedulers share: documents come in, and every step is planned, then advanced, or launched and settled later.

It owns which step is planned and how many were launched and are not settled. It does not know how a step is filled, what a stream's tokens
are stored in, or when pages are given back: that is the layouts' own (`scheduler`, `interleaved`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import count

from askmany.engine.admission import Admission, Claim
from askmany.engine.config import SchedulerLimits
from askmany.engine.errors import DocumentError
from askmany.engine.intake import open_document
from askmany.engine.pages import PagePool
from askmany.engine.prefix_tree import PrefixTree
from askmany.engine.request import Document, DocumentState, FinishReason, Stream
from askmany.engine.step import Sampled, StepPlan
from askmany.engine.streams import book_pending, book_sample, settle_sample


class StepBooking(ABC):
    """A scheduler but for its layout. The contracts are `Scheduler`'s."""

    def __init__(self, pool: PagePool, tree: PrefixTree, limits: SchedulerLimits, admission: Admission) -> None:
        self.pool = pool
        self.tree = tree
        self.limits = limits
        self._admission = admission
        self._stream_ids = count()
        self._planned: StepPlan | None = None
        self._unsettled = 0  # steps that were launched

    @property
    def has_work(self) -> bool:
        return self._admission.has_work

    def submit(self, document: Document) -> None:
        """Queue a document; one without questions is done already. Raises DocumentError, QuestionError."""
        if self._admission.holds(document.key):
            raise DocumentError(f"document {document.key!r} is in the engine already")
        self._refuse(document)
        state = open_document(document, self.pool, self._stream_ids)
        if state.streams:
            self._admission.submit(state, self._claims(state))

    def plan(self) -> StepPlan | None:
        assert self._planned is None, "the last plan was not advanced"
        plan = self._next_step()
        assert plan.tokens or not self.has_work or self._unsettled, "there is work and nothing to do"
        self._planned = plan if plan.tokens else None
        return self._planned

    def advance(self, plan: StepPlan, sampled: list[Sampled], finish: dict[int, FinishReason]) -> list[Stream]:
        self._book_stored(plan)
        for sample in sampled:
            book_sample(sample, finish.get(sample.stream.stream_id))
        return self._end_streams(plan, sampled)

    def launch(self, plan: StepPlan) -> None:
        self._book_stored(plan)
        self._unsettled += 1
        for stream in plan.sampling_streams:
            book_pending(stream)

    def settle(self, plan: StepPlan, sampled: list[Sampled], finish: dict[int, FinishReason]) -> list[Stream]:
        self._unsettled -= 1
        return self._end_streams(plan, [sample for sample in sampled if settle_sample(sample, finish.get(sample.stream.stream_id))])

    def _book_stored(self, plan: StepPlan) -> None:
        assert plan is self._planned, "advance without its plan"
        self._planned = None
        for chunk in plan.chunks:
            chunk.node.stored = chunk.stop
        self._book_runs(plan)

    @abstractmethod
    def _refuse(self, document: Document) -> None:
        """Raise QuestionError for what this layout cannot ask."""

    @abstractmethod
    def _claims(self, state: DocumentState) -> list[Claim]:
        """The document's streams, cut into what is admitted at once."""

    @abstractmethod
    def _next_step(self) -> StepPlan:
        """Start what may start and fill a step; one of no tokens when there is nothing to feed."""

    @abstractmethod
    def _book_runs(self, plan: StepPlan) -> None:
        """The tokens of streams that the step feeds count as stored."""

    @abstractmethod
    def _end_streams(self, plan: StepPlan, sampled: list[Sampled]) -> list[Stream]:
        """The streams of `sampled` that are done; gives back what is free now."""
