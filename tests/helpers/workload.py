"""Random work for an engine, what must come out of it, and an executor that writes down the plans it ran."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import strategies as st

from askmany.engine.config import EngineConfig
from askmany.engine.fake import expected_answer
from askmany.engine.request import Document, FinishReason, Phase, Question, Sampling, Stream, StreamResult
from askmany.engine.step import Executor, Sampled, StepPlan

VOCAB_SIZE = 60
EOS = 7


def make_question(question_id: str, tokens: Iterable[int], max_new_tokens: int = 4, **sampling: object) -> Question:
    return Question(question_id, tuple(tokens), Sampling(max_new_tokens, **sampling))  # type: ignore[arg-type]


def make_document(key: str, segments: Iterable[Iterable[int]], tails: Iterable[int], max_new_tokens: int = 4) -> Document:
    """A document whose i-th question has `tails[i]` tokens, all of value i + 1."""
    questions = (make_question(f"q{i}", [i + 1] * length, max_new_tokens) for i, length in enumerate(tails))
    return Document(key, tuple(tuple(segment) for segment in segments), tuple(questions))


@dataclass(frozen=True)
class Workload:
    config: EngineConfig
    kv_tokens: int
    documents: tuple[Document, ...]
    arrivals: tuple[int, ...]  # the step before which each document is submitted, ascending

    @property
    def expected(self) -> dict[tuple[str, str], tuple[tuple[int, ...], str, FinishReason]]:
        return {(d.key, q.question_id): outcome(d, q) for d in self.documents for q in d.questions}


def outcome(document: Document, question: Question, eos: frozenset[int] = frozenset({EOS})) -> tuple[tuple[int, ...], str, FinishReason]:
    """Answer tokens, text and finish reason of the fake engine, from the rules of `StreamResult` applied to the whole answer at once."""
    ids: list[int] = []
    for token_id in expected_answer(document, question, vocab_size=VOCAB_SIZE):
        if token_id in eos or token_id in question.sampling.stop_token_ids:
            return tuple(ids), text_of(ids), "stop"
        ids.append(token_id)
        found = [text_of(ids).index(stop) for stop in question.sampling.stop if stop in text_of(ids)]
        if found:
            return tuple(ids), text_of(ids)[: min(found)], "stop"
    return tuple(ids), text_of(ids), "length"


def text_of(ids: Iterable[int]) -> str:
    return " ".join(map(str, ids))


def by_key(results: Iterable[StreamResult]) -> dict[tuple[str, str], tuple[tuple[int, ...], str, FinishReason]]:
    """Results by key; a key that comes twice fails."""
    found: dict[tuple[str, str], tuple[tuple[int, ...], str, FinishReason]] = {}
    for result in results:
        key = (result.document_key, result.question_id)
        assert key not in found, f"{key} was answered twice"
        found[key] = (result.answer_token_ids, result.text, result.finish_reason)
    return found


@dataclass(frozen=True)
class Fed:
    """A plan as plain values, taken before it is advanced."""

    tokens: int
    chunks: tuple[tuple[tuple[int, ...], int, int], ...]  # (the node's tokens, start, stop)
    tails: tuple[tuple[int, int, int], ...]  # (stream id, start, stop)
    decodes: tuple[tuple[int, int, int], ...]
    woven: tuple[tuple[tuple[int, ...], int, tuple[tuple[int, int], ...]], ...]  # (stream ids of the request, start, entries)

    @property
    def kinds(self) -> int:
        return sum(map(bool, (self.chunks, self.tails, self.decodes)))


@dataclass
class Recorder:
    """An executor that notes each plan and passes it on."""

    inner: Executor
    steps: list[Fed] = field(default_factory=list)
    streams: dict[int, Stream] = field(default_factory=dict)

    def execute(self, plan: StepPlan) -> list[Sampled]:
        self.streams |= {run.stream.stream_id: run.stream for run in plan.runs}
        self.streams |= {stream.stream_id: stream for run in plan.masked for stream in run.request.streams}
        runs = [(run.stream.phase, (run.stream.stream_id, run.start, run.stop)) for run in plan.runs]
        self.steps.append(
            Fed(
                tokens=plan.tokens,
                chunks=tuple((chunk.node.token_ids, chunk.start, chunk.stop) for chunk in plan.chunks),
                tails=tuple(run for phase, run in runs if phase is Phase.TAIL),
                decodes=tuple(run for phase, run in runs if phase is Phase.DECODE),
                woven=tuple((tuple(s.stream_id for s in run.request.streams), run.start, run.entries) for run in plan.masked),
            )
        )
        return self.inner.execute(plan)

    def release(self, streams: list[Stream]) -> None:
        self.inner.release(streams)


@st.composite
def configs(draw: st.DrawFn, layout: str | None = None, deterministic: bool | None = None) -> EngineConfig:
    """Small limits of every kind, at their edges too."""
    max_rows = draw(st.integers(1, 12))
    deterministic = draw(st.booleans()) if deterministic is None else deterministic
    prefill_chunk, tail_piece = draw(st.integers(1, 24)), draw(st.integers(1, 8))
    least = max(max_rows, prefill_chunk, tail_piece) if deterministic else max_rows
    layout = layout or draw(st.sampled_from(["split", "interleaved"]))
    return EngineConfig.model_validate(
        {
            "layout": layout,
            "streams": draw(st.one_of(st.just("auto"), st.integers(1, 6))),
            "batching": draw(st.sampled_from(["continuous", "run_to_completion"])) if layout == "interleaved" else "continuous",
            "deterministic": deterministic,
            "page_size": draw(st.integers(1, 7)),
            "max_rows": max_rows,
            "step_tokens": least + draw(st.integers(0, 30)),
            "prefill_chunk": prefill_chunk,
            "tail_piece": tail_piece,
        }
    )


@st.composite
def workloads(draw: st.DrawFn, layout: str | None = None, deterministic: bool | None = None) -> Workload:
    """Documents that share instructions, sometimes whole prefixes, in a pool that just holds the largest or is roomy."""
    config = draw(configs(layout, deterministic))
    rng = random.Random(draw(st.integers(0, 2**32)))
    shape = draw(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9)), min_size=1, max_size=7))
    documents = tuple(_random_document(rng, f"d{i}", length, questions) for i, (length, questions) in enumerate(shape))
    least = max(_least_pages(document, config.page_size) for document in documents)
    kv_tokens = (least + draw(st.one_of(st.just(0), st.integers(0, 4 * least)))) * config.page_size
    arrivals = tuple(sorted(draw(st.lists(st.integers(0, 30), min_size=len(documents), max_size=len(documents)))))
    return Workload(config, kv_tokens, documents, arrivals)


def _random_document(rng: random.Random, key: str, length: int, questions: int) -> Document:
    instruction = tuple([rng.randrange(2)] * rng.randrange(1, 4))
    text = tuple([3] * length) if rng.random() < 0.2 else tuple(rng.randrange(VOCAB_SIZE) for _ in range(length))
    segments = ((*instruction, *text),) if rng.random() < 0.2 else (instruction, text)
    return Document(key, segments, tuple(_random_question(rng, f"q{i}") for i in range(questions)))


def _random_question(rng: random.Random, question_id: str) -> Question:
    first, last = rng.randrange(VOCAB_SIZE), rng.randrange(VOCAB_SIZE)
    sampling = Sampling(
        max_new_tokens=rng.randrange(1, 14),
        temperature=rng.choice([0.0, 0.7]),
        stop=rng.choice([(), (), (f" {first}",), (f"{first} {(first + 1) % VOCAB_SIZE}", str(last))]),
        stop_token_ids=rng.choice([(), (), (last,)]),
        seed=rng.randrange(1000),
    )
    return Question(question_id, tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 12))), sampling)


def _least_pages(document: Document, page_size: int) -> int:
    path = sum(-(-len(segment) // page_size) for segment in document.segments)
    return path + max((-(-question.budget_tokens // page_size) for question in document.questions), default=0)
