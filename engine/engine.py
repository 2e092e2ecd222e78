"""The engine: documents in, one result per question out. A step is: plan, execute, judge, advance, collect.

Holds a scheduler (what runs), an executor (the device) and the answers that are growing; it knows neither pages nor tensors. Bad input is
refused at `submit`; whatever goes wrong in a step is an EngineError, after which this engine must not be used again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from time import perf_counter

from askmany.engine.answers import Answer, Detokenizer, GrowingAnswer, LabelAnswer
from askmany.engine.choice import Choice
from askmany.engine.errors import EngineError
from askmany.engine.metrics import Metrics, measure
from askmany.engine.request import Document, FinishReason, Stream, StreamResult
from askmany.engine.scheduler import Scheduler
from askmany.engine.step import Executor, Sampled, StepPlan

CHECK_SHARE = 0.02


class Engine:
    """One model on one device. `eos_token_ids` end every answer; `kv_bytes_per_token` (all layers, K and V) scales the KV figures. Whenever
    the engine falls idle its books are looked through, as often as costs at most `check_share` of the work since the start."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        detokenizer: Detokenizer,
        eos_token_ids: Iterable[int] = (),
        kv_bytes_per_token: int = 0,
        check_share: float = CHECK_SHARE,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.choice: Choice | None = None  # what its builder made of `streams: auto`
        self._detokenizer = detokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._kv_bytes_per_token = kv_bytes_per_token
        self._answers: dict[int, GrowingAnswer] = {}  # by stream id
        self._metrics = Metrics()
        self._check_share, self._checks_s = check_share, 0.0  # spent on checks of the books
        self._plan: StepPlan | None = None  # of the turn under way
        self._broken: EngineError | None = None

    @property
    def has_work(self) -> bool:
        """Whether a submitted question is still unanswered."""
        return self.scheduler.has_work

    @property
    def room_tokens(self) -> int:
        """Tokens that the KV pool holds."""
        pool = self.scheduler.tree.pool
        return pool.page_count * pool.page_size

    @property
    def metrics(self) -> Metrics:
        """Everything counted so far."""
        stats = self.scheduler.tree.stats
        return replace(
            self._metrics,
            prefix_hit_tokens=stats.hit_tokens,
            prefix_missed_tokens=stats.missed_tokens,
            prefix_evicted_tokens=stats.evicted_tokens,
        )

    def submit(self, document: Document) -> None:
        """Queue a document; its results come out of later steps.

        Raises, with nothing queued: DocumentError when none of its questions can be answered (malformed, a key that is in the engine
        already, or too long for the KV pool), QuestionError when some cannot (`question_ids`; without them the document is accepted).
        """
        self.scheduler.submit(document)

    def step(self) -> list[StreamResult]:
        """One forward pass; the answers that it finished. Empty without work. Raises EngineError."""
        if self._broken:
            raise EngineError(f"the engine broke before: {self._broken}") from self._broken
        self._plan = None
        try:
            return self._turn(perf_counter())
        except Exception as error:
            where = f"step {self._metrics.steps + 1}" + (f" ({describe(self._plan)})" if self._plan else "")
            self._broken = EngineError(f"{where} failed: {type(error).__name__}: {error}")
            raise self._broken from error

    def drain(self) -> Iterator[StreamResult]:
        """Step until nothing is left, handing out results as they come."""
        while self.has_work:
            yield from self.step()

    def _turn(self, started_s: float) -> list[StreamResult]:
        self._plan = plan = self.scheduler.plan()
        if plan is None:
            return []
        counted = measure(plan, self._kv_bytes_per_token)
        sampled = self._matched(plan, self.executor.execute(plan))
        finished = self.scheduler.advance(plan, sampled, self._judge(sampled))
        return self._hand_out(plan, finished, counted, started_s)

    def _hand_out(self, plan: StepPlan | None, finished: list[Stream], counted: Metrics, started_s: float) -> list[StreamResult]:
        """The results of streams that ended in a turn that ran `plan`."""
        self.executor.release(finished)
        results = [self._answers.pop(stream.stream_id).result(stream) for stream in finished]
        if self._check_share and not self.has_work and self._checks_s <= self._check_share * self._metrics.busy_s:
            self._check()
        busy_s = perf_counter() - started_s
        prefill_s = 0.0 if plan is None or plan.runs or plan.masked else busy_s
        self._metrics += replace(counted, **_collected(finished, results), busy_s=busy_s, prefill_s=prefill_s)
        return results

    def _check(self) -> None:
        """Look through the books of an idle engine."""
        started_s = perf_counter()
        self.scheduler.check_integrity()
        self._checks_s += perf_counter() - started_s

    def _matched(self, plan: StepPlan, sampled: list[Sampled]) -> list[Sampled]:
        expected = plan.sampling_streams
        if len(sampled) != len(expected) or any(sample.stream is not stream for sample, stream in zip(sampled, expected, strict=True)):
            raise RuntimeError(f"the plan asks for a token of {len(expected)} streams, the executor gave {len(sampled)} or another order")
        return sampled

    def _judge(self, sampled: list[Sampled]) -> dict[int, FinishReason]:
        """Push each new token into its answer; the streams that end here, and why."""
        finish: dict[int, FinishReason] = {}
        for sample in sampled:
            stream = sample.stream
            answer = self._answers.get(stream.stream_id)
            if answer is None:
                answer = self._answers[stream.stream_id] = self._open(stream)
            reason = answer.push(sample)
            if reason is not None:
                finish[stream.stream_id] = reason
        return finish

    def _open(self, stream: Stream) -> GrowingAnswer:
        question = stream.question
        if question.labels:
            return LabelAnswer(question.labels)
        return Answer(question.sampling, self._eos_token_ids, self._detokenizer.stream())


def describe(plan: StepPlan) -> str:
    """A step in one phrase, for error messages."""
    streams = [run.stream for run in plan.runs] + [stream for run in plan.masked for stream in run.request.streams]
    keys = sorted({stream.document.document.key for stream in streams})
    named = ", ".join(repr(key) for key in keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
    runs = f"{len(plan.runs)} runs" if plan.runs else f"{len(plan.masked)} masked runs"
    return f"{plan.tokens} tokens, {len(plan.chunks)} chunks, {runs}" + (f" of documents {named}" if named else "")


def _collected(finished: list[Stream], results: list[StreamResult]) -> dict[str, int]:
    return {
        "streams": len(finished),
        "documents": len({stream.document for stream in finished if stream.document.finished}),
        "answer_tokens": sum(len(result.answer_token_ids) for result in results),
    }
