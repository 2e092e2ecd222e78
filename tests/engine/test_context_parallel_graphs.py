"""Captured decode steps of a group: replays equal the single-process engine, nothing is baked in, what cannot be captured is not."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from askmany.engine.config import EngineConfig
from askmany.engine.context_parallel import Groups
from askmany.engine.context_parallel_build import ContextParallelEngine, build_rank, leader_engine
from askmany.engine.context_parallel_layout import read_results
from askmany.engine.context_parallel_rows import RowPolicy
from askmany.engine.fake import FakeDetokenizer
from askmany.engine.model_transformers import TransformersModel
from askmany.engine.request import Document, Question, Sampling, StreamResult
from askmany.kernels.rank_group import RankGroup, Traffic
from askmany.kernels.store import launch_store
from askmany.kernels.stream_attention import Partials
from tests.engine.test_context_parallel import alone
from tests.helpers.gloo import GlooRanks, gloo_ranks
from tests.helpers.group_engines import GroupAnswers, GroupCase, answer_turns
from tests.helpers.interpreter import INTERPRETED, repair
from tests.helpers.recorded import RecordingCapturer
from tests.helpers.tiny_models import VOCABULARY, tiny_model
from tests.helpers.torch_engines import answers, poisoned_engine

if INTERPRETED:
    repair()

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not INTERPRETED, reason="the ranks of these tests are CPU processes with interpreted kernels"),
]
CONFIG = EngineConfig(kv_tokens=192, page_size=4, max_rows=4, step_tokens=64, prefill_chunk=48, device="cpu", dtype="float32")


def tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCABULARY) for _ in range(count))


def asked(rng: random.Random, counts: Sequence[int], sampling: Sampling | None = None) -> tuple[Question, ...]:
    return tuple(Question(f"q{i}", tokens(rng, 1 + i % 3), sampling or Sampling(new)) for i, new in enumerate(counts))


class LoneGroup(RankGroup):
    """A group of this process alone, with its messages as plain copies, so that they can be recorded."""

    def __init__(self) -> None:
        self.ranks, self.size, self.rank, self.traffic = (0,), 1, 0, Traffic()

    def all_gather(self, part: Tensor) -> tuple[Tensor, Callable[[], None]]:
        return part[None].clone(), lambda: None

    def all_to_all(self, parts: Tensor) -> Tensor:
        return parts.clone()

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        return value


def lone_engine(capturer: Any, config: EngineConfig) -> ContextParallelEngine:
    model = TransformersModel(tiny_model("qwen3"))
    rank = build_rank(model, int(config.kv_tokens), config, Groups(LoneGroup(), LoneGroup()), capturer=capturer)
    return leader_engine(rank, config, FakeDetokenizer(), (), None)


def by_key(results: Sequence[StreamResult]) -> dict[tuple[str, str], tuple[int, ...]]:
    return {(result.document_key, result.question_id): result.answer_token_ids for result in results}


def test_recorded_steps_serve_streams_that_grow_end_and_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """More questions than rows, answers of many lengths, below an instruction; a second document is a path of its own."""
    monkeypatch.setattr("askmany.engine.space.store", launch_store)
    rng = random.Random(1)
    instruction = tokens(rng, 5)
    documents = [Document(f"d{i}", (instruction, tokens(rng, 20 + 9 * i)), asked(rng, (4, 2, 3, 2, 2))) for i in range(2)]
    capturer = RecordingCapturer()
    reads: list[Tensor] = []
    count = reads.append
    monkeypatch.setattr("askmany.engine.context_parallel_launch.read_results", lambda results: count(results) or read_results(results))
    engine = lone_engine(capturer, CONFIG)
    plain = poisoned_engine(TransformersModel(tiny_model("qwen3")), CONFIG)
    for document in documents:
        got, want = answers(engine, [document]), answers(plain, [document])
        assert by_key(list(got.values())) == by_key(list(want.values()))
        for key, result in want.items():
            assert got[key].logprob == pytest.approx(result.logprob, abs=1e-3)
    assert len(capturer.recorders) == 2
    assert all(recorder.kernels > 5 for recorder in capturer.recorders)
    tally = engine.group_model.rank.tally
    assert tally.sections["gather_q", "captured"] >= 4
    assert len(reads) == tally.sections["gather_q", "captured"], "steps beside it that feed on its tokens read them once"


def test_steps_with_temperature_stay_on_the_other_way() -> None:
    rng = random.Random(2)
    document = Document("d", (tokens(rng, 20),), asked(rng, (4, 4), Sampling(4, temperature=0.7, seed=3)))
    capturer = RecordingCapturer()
    engine = lone_engine(capturer, CONFIG)
    plain = poisoned_engine(TransformersModel(tiny_model("qwen3")), CONFIG)
    assert by_key(list(answers(engine, [document]).values())) == by_key(list(answers(plain, [document]).values()))
    assert not capturer.recorders


class PooledCapturer:
    """A `Capturer` whose graphs share a pool that, as PyTorch's, cannot be used again once the last of them is gone."""

    def __init__(self) -> None:
        self.alive: list[weakref.ref[Callable[[], None]]] = []

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        assert not self.alive or any(graph() is not None for graph in self.alive), "the pool is out of use"
        work()

        def replay() -> None:
            work()

        self.alive.append(weakref.ref(replay))
        return replay


def test_a_path_is_asked_by_more_rows_later_and_captured_again_after_a_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows outgrow the one bucket that is captured; then another path's slots move; then this one's, while its graphs are the only
    ones. All graphs share one workspace."""
    monkeypatch.setattr("askmany.engine.space.store", launch_store)
    monkeypatch.setattr("askmany.kernels.stream_attention.Partials", None)  # what a space without a given workspace would make
    made: list[int] = []
    keep = made.append
    monkeypatch.setattr("askmany.engine.context_parallel_decode.Partials", lambda count, *rest: keep(count) or Partials(count, *rest))
    rng = random.Random(5)
    config = CONFIG.model_copy(update={"max_rows": 8})
    path, asks = (tokens(rng, 7),), [asked(rng, counts) for counts in ((2,), (2,) * 5, (2,), (2,))]
    capturer = PooledCapturer()
    engine = lone_engine(capturer, config)
    plain = poisoned_engine(TransformersModel(tiny_model("qwen3")), config)
    for turn, questions in enumerate(asks):
        document = Document(f"d{turn}", path, questions)
        assert by_key(list(answers(engine, [document]).values())) == by_key(list(answers(plain, [document]).values()))
        assert len(capturer.alive) == (1, 2, 2, 3)[turn]
        rank = engine.group_model.rank
        assert rank.decode is not None
        if turn >= 1:
            rank.slots.version += 1
        if turn == 2:
            (known,) = rank.decode._paths.values()
            known.lies = known.lies + 1  # as if the slots had lain elsewhere when the graphs were made
            del known
    assert sum(graph() is not None for graph in capturer.alive) == 1
    assert len(made) == 1


@pytest.fixture(scope="module")
def ranks() -> Iterator[GlooRanks]:
    with gloo_ranks(2) as started:
        yield started


def test_groups_answer_as_one_process(ranks: GlooRanks) -> None:
    """Two documents after one another; streams come and go, steps with question tails run between captured ones."""
    rng = random.Random(3)
    documents = tuple(Document(f"d{i}", (tokens(rng, 60 + i),), asked(rng, (4, 2, 3, 2, 2))) for i in range(2))
    case = GroupCase("qwen3", CONFIG, tuple((one,) for one in documents), None, RowPolicy("home"), captured=True)
    got: GroupAnswers = ranks.run(answer_turns, case)[0]
    wanted, _ = alone(replace(case, captured=False), ranks.size)
    assert by_key(list(got.results.values())) == wanted
    assert got.captured >= 4
    assert got.metrics.sent_bytes > 0


@pytest.mark.slow
def test_a_document_that_was_handed_over_is_captured_too(ranks: GlooRanks) -> None:
    """Its keys and all of its streams lie on one rank; the other one has rows of no stream and no key of the document."""
    rng = random.Random(4)
    documents = tuple(Document(f"d{i}", (tokens(rng, 6), tokens(rng, 30 + i)), asked(rng, (6, 3, 5))) for i in range(2))
    case = GroupCase("qwen3", CONFIG, tuple((one,) for one in documents), None, RowPolicy("auto", hand_over=True), captured=True)
    got: GroupAnswers = ranks.run(answer_turns, case)[0]
    wanted, _ = alone(replace(case, captured=False), ranks.size)
    assert by_key(list(got.results.values())) == wanted
    assert got.metrics.handed_over_documents == 2
    assert got.captured >= 4
