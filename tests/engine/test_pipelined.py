"""The pipelined engine gives the engine's answers: streams that stop while a step runs, documents that arrive late, all layouts."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from askmany.engine.build import build_scheduler
from askmany.engine.engine import Engine
from askmany.engine.fake import FakeDetokenizer
from askmany.engine.labels import label_trie
from askmany.engine.model_transformers import TransformersModel
from askmany.engine.pipelined import PipelinedEngine
from askmany.engine.request import PENDING, Document, Question, Sampling, StreamResult
from askmany.engine.step import Sampled, StepPlan
from tests.engine.test_isolation import run_late_arrivals, tokens
from tests.engine.test_kernel_steps import config_of, same, small_document
from tests.helpers.interpreter import INTERPRETED
from tests.helpers.kernel_engines import CONFIGS, kernel_engine
from tests.helpers.tiny_models import VOCABULARY, random_model
from tests.helpers.torch_engines import Key, poisoned_engine

pytestmark = pytest.mark.timeout(300)


class _Pending:
    def __init__(self, collect: Callable[[], list[Sampled]], ahead: bool) -> None:
        self._collect, self.ahead, self.drawn = collect, ahead, False

    def draw(self) -> None:
        self.drawn = True

    def collect(self) -> list[Sampled]:
        assert self.drawn or not self.ahead
        return self._collect()


class LateExecutor:
    """Draws a token that only the stream and its index decide, and says so one step late."""

    def __init__(self, ahead: Callable[[StepPlan], bool] = lambda plan: True) -> None:
        self._ahead = ahead
        self.void_rows = self.paused = 0
        self._launched: list[int] = []

    def execute(self, plan: StepPlan) -> list[Sampled]:
        return self._drawn([(stream, len(stream.answer_token_ids)) for stream in plan.sampling_streams])

    def launch(self, plan: StepPlan) -> _Pending:
        places = [(stream, len(stream.answer_token_ids)) for stream in plan.sampling_streams]
        ahead = self._ahead(plan)
        return _Pending(lambda: self._drawn(places), ahead)

    def release(self, streams: list[Any]) -> None:
        pass

    def device_times(self) -> tuple[float, float]:
        return 3.0, 1.0

    def pause(self) -> None:
        self.paused += 1

    def _drawn(self, places: list[Any]) -> list[Sampled]:
        self.void_rows += sum(stream.finish_reason is not None for stream, _ in places)
        return [Sampled(s, (7 * sum(s.question.token_ids) + 13 * index) % 50, -0.5, 1.0) for s, index in places]


def documents(rng: random.Random, count: int) -> list[Document]:
    made = []
    for d in range(count):
        asked = tuple(
            Question(f"q{i}", tokens(rng, rng.randint(1, 9)), Sampling(rng.randint(1, 12), stop_token_ids=tuple(rng.sample(range(50), 6))))
            for i in range(rng.randint(1, 7))
        )
        made.append(Document(f"d{d}", (tokens(rng, 4), tokens(rng, rng.randint(1, 60))), asked))
    return made


@pytest.mark.parametrize("layout", ["split", "interleaved"])
def test_results_are_those_of_the_plain_engine(layout: str) -> None:
    voids = 0
    for seed in range(40):
        rng = random.Random(seed)
        batching = rng.choice(["continuous", "run_to_completion"]) if layout == "interleaved" else "continuous"
        config = config_of(layout, max_rows=rng.choice([1, 4, 6]), streams=rng.choice([1, 2, 3]), batching=batching, kv_tokens=640)
        asked = documents(rng, 4)
        plain = Engine(build_scheduler(config), LateExecutor(), FakeDetokenizer(), eos_token_ids=[3])
        wanted = run_late_arrivals(plain, asked, random.Random(seed))
        lucky = random.Random(seed)
        late = LateExecutor(ahead=lambda plan, lucky=lucky: lucky.random() < 0.8)  # type: ignore[misc]
        engine = PipelinedEngine(build_scheduler(config), late, FakeDetokenizer(), eos_token_ids=[3])
        got = run_late_arrivals(engine, asked, random.Random(seed))
        assert got == wanted
        assert all(PENDING not in result.answer_token_ids for result in got.values())
        engine.scheduler.check_integrity()
        assert late.paused
        assert engine.metrics.device_idle_ratio == 0.25
        voids += late.void_rows
    assert voids > 20, "no stream ended while a step that fed it ran"


@pytest.mark.skipif(not INTERPRETED, reason="interpreted kernels alone run on a CPU")
@pytest.mark.parametrize("layout", ["split", "interleaved"])
def test_the_device_feeds_itself(layout: str) -> None:
    """Through the kernels: a step's tokens go into the next one without the host; label trees and temperatures in between."""
    rng = random.Random(5)
    model = TransformersModel(random_model(CONFIGS["mqa"]))
    config = config_of(layout)
    asked = [small_document(rng, "d0", (1, 2, 3), 2)]
    extra = [Question("hot", (4,), Sampling(3, temperature=0.9, seed=2)), Question("cold", (4, 6), Sampling(5))]
    if layout == "split":
        extra.append(Question("tree", (9,), Sampling(1), labels=label_trie(["a", "b"], [(3, 5), (3, 6)], None)))
    asked.append(Document("d1", (tokens(rng, 10),), tuple(extra)))
    ends = tuple(range(0, VOCABULARY, 5))  # some answers stop early
    plain = poisoned_engine(model, config)
    plain._eos_token_ids = frozenset(ends)
    wanted = _run(plain, asked)
    executor = kernel_engine(model, config).executor
    scheduler = build_scheduler(config)
    executor.free_pages = scheduler.tree.pool.free_pages  # type: ignore[attr-defined]
    engine = PipelinedEngine(scheduler, executor, FakeDetokenizer(), ends)  # type: ignore[arg-type]
    same(_run(engine, asked), wanted)


def _run(engine: Engine, asked: list[Document]) -> dict[Key, StreamResult]:
    for document in asked:
        engine.submit(document)
    return {(result.document_key, result.question_id): result for result in engine.drain()}
