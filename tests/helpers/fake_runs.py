"""Runs of the fake engine that are watched at every step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from askmany.engine.config import EngineConfig, SchedulerLimits
from askmany.engine.engine import Engine
from askmany.engine.fake import fake_engine
from askmany.engine.request import Document, FinishReason, StreamResult
from tests.helpers.workload import EOS, VOCAB_SIZE, Fed, Recorder, Workload, by_key


@dataclass(frozen=True)
class Ran:
    engine: Engine
    results: dict[tuple[str, str], tuple[tuple[int, ...], str, FinishReason]]
    recorder: Recorder

    @property
    def steps(self) -> list[Fed]:
        return self.recorder.steps

    def pieces(self) -> dict[tuple[str, str], list[tuple[int, int]]]:
        """The runs of each stream in order, as (start, stop)."""
        found: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for step in self.steps:
            for stream_id, start, stop in (*step.tails, *step.decodes):
                stream = self.recorder.streams[stream_id]
                found.setdefault((stream.document.document.key, stream.question.question_id), []).append((start, stop))
        return found


def recorded_engine(config: EngineConfig, kv_tokens: int) -> tuple[Engine, Recorder]:
    engine = fake_engine(config, kv_tokens=kv_tokens, eos_token_ids=(EOS,), vocab_size=VOCAB_SIZE)
    recorder = Recorder(engine.executor)
    engine.executor = recorder
    return engine, recorder


def run_workload(work: Workload) -> Ran:
    """Submit each document before its step, check every step's bounds and the engine's integrity, then that all pages come free."""
    engine, recorder = recorded_engine(work.config, work.kv_tokens)
    limits = work.config.limits
    results: list[StreamResult] = []
    waiting = list(zip(work.arrivals, work.documents, strict=True))
    step = 0
    while waiting or engine.has_work:
        while waiting and waiting[0][0] <= step:
            engine.submit(waiting.pop(0)[1])
        steps_before = len(recorder.steps)
        results += engine.step()
        assert engine.scheduler.check_integrity()
        if len(recorder.steps) > steps_before:
            check_step(recorder.steps[-1], limits)
            check_live(recorder, work, limits)
        step += 1
    check_pages_come_free(engine)
    return Ran(engine, by_key(results), recorder)


def check_step(fed: Fed, limits: SchedulerLimits) -> None:
    assert 0 < fed.tokens <= limits.step_tokens
    assert all(stop - start <= limits.prefill_chunk for _, start, stop in fed.chunks)


def check_live(recorder: Recorder, work: Workload, limits: SchedulerLimits) -> None:
    live = [stream for stream in recorder.streams.values() if stream.finish_reason is None]
    assert len(live) <= limits.max_rows
    if work.config.layout == "split":
        assert max(Counter(stream.document for stream in live).values(), default=0) <= limits.streams


def check_pages_come_free(engine: Engine) -> None:
    tree = engine.scheduler.tree
    assert all(node.refs == 0 for node in tree.nodes())
    assert tree.room_pages == tree.pool.page_count
    tree.clear()
    assert tree.pool.available == tree.pool.page_count


def run_documents(config: EngineConfig, kv_tokens: int, documents: list[Document]) -> Ran:
    """All documents submitted at once."""
    return run_workload(Workload(config, kv_tokens, tuple(documents), (0,) * len(documents)))
