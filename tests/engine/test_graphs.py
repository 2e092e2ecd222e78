"""Graphs on a CPU: a recorded step replayed at other steps equals an eager run; buckets are chosen and captured when it pays."""

from __future__ import annotations

import gc
import random
import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch

from askmany.engine.graphs import PATIENCE_CLOSER, PATIENCE_FIRST, Bucket, GraphRunner, request_buckets, row_buckets
from askmany.engine.kv_pool import KVPool
from askmany.engine.model_transformers import TransformersModel
from askmany.engine.paged import PagedRows
from askmany.engine.request import Document, Question, Sampling, StreamResult
from askmany.engine.space_makers import NodeUse
from askmany.kernels.store import launch_store, launch_store_ids
from tests.engine.test_isolation import tokens
from tests.engine.test_kernel_steps import config_of, same
from tests.helpers.interpreter import INTERPRETED
from tests.helpers.kernel_engines import CONFIGS, kernel_engine, kernel_steps
from tests.helpers.recorded import RecordingCapturer
from tests.helpers.tiny_models import random_model
from tests.helpers.torch_engines import Key, poisoned_engine

pytestmark = pytest.mark.timeout(300)


class FakeSpace:
    """Remembers what it was asked."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket, self.loaded = bucket, []  # type: ignore[var-annotated]

    def load(self, step: PagedRows, feeds: Any) -> None:
        self.loaded.append(step.rows)

    def compute(self) -> None:
        DRAWN.fill_(-7)  # as a capture over dummies does


DRAWN = torch.arange(4)
KERNELS = {"space": launch_store, "masked_space": launch_store_ids}


class FakeCapturer:
    def __init__(self) -> None:
        self.captured = 0

    def capture(self, work: Any) -> Any:
        work()
        self.captured += 1
        return lambda: None


def runner(*rows: int, mixed: int = 0) -> tuple[GraphRunner, FakeCapturer]:
    buckets = [Bucket(count, count, True) for count in rows] + ([Bucket(mixed, 8, False)] if mixed else [])
    capturer = FakeCapturer()
    make = lambda bucket, step: FakeSpace(bucket)  # noqa: E731
    return GraphRunner(buckets, make, lambda bucket, step: True, capturer, PagedRows(), DRAWN), capturer  # type: ignore[arg-type,return-value]


def decode(rows: int) -> PagedRows:
    return PagedRows(token_ids=[1] * rows, positions=[0] * rows, slots=[0] * rows, wanted=list(range(rows)))


def run(graphs: GraphRunner, step: PagedRows) -> Any:
    """The space in which a step was replayed; None when no bucket served it."""
    loaded = graphs.load(step, [-1] * step.rows)
    if loaded is None:
        return None
    space, replay = loaded
    replay()
    return space


def test_decode_steps_take_the_graph_without_gathers() -> None:
    buckets = [Bucket(16, 16, False), Bucket(16, 16, True), Bucket(4, 4, True)]
    graphs = GraphRunner(
        buckets,
        lambda bucket, step: FakeSpace(bucket),
        lambda bucket, step: True,
        FakeCapturer(),
        PagedRows(),
        DRAWN,  # type: ignore[arg-type,return-value]
    )
    graphs.warm([decode(16)])
    assert list(graphs.capture_s) == [Bucket(16, 16, True)]


def test_the_first_steps_run_without_a_graph_and_then_their_bucket_is_captured() -> None:
    graphs, capturer = runner(4, 16)
    spaces = [run(graphs, decode(3)) for _ in range(PATIENCE_FIRST + 1)]
    assert spaces[:PATIENCE_FIRST] == [None] * PATIENCE_FIRST
    assert spaces[-1].bucket.rows == 4  # type: ignore[union-attr]
    assert spaces[-1].loaded == [0, 3]  # type: ignore[union-attr]  # dummies while captured, then the step
    assert capturer.captured == 1
    assert list(graphs.capture_s) == [Bucket(4, 4, True)]
    assert DRAWN.tolist() == [0, 1, 2, 3]


def test_a_larger_captured_bucket_serves_until_a_closer_one_pays() -> None:
    graphs, capturer = runner(4, 16)
    graphs.warm([decode(9)])
    served = [run(graphs, decode(2)).bucket.rows for _ in range(PATIENCE_CLOSER + 1)]  # type: ignore[union-attr]
    assert served == [16] * PATIENCE_CLOSER + [4]
    assert capturer.captured == 2


def test_steps_with_tails_take_no_decode_bucket_and_too_large_ones_none() -> None:
    graphs, _ = runner(4, 16, mixed=12)
    step = decode(10)
    step.wanted = [3, 9]
    for _ in range(PATIENCE_FIRST):
        assert run(graphs, step) is None
    assert run(graphs, step).bucket == Bucket(12, 8, False)  # type: ignore[union-attr]
    assert graphs.choose(decode(17)) is None
    assert graphs.choose(PagedRows()) is None


def test_a_warm_start_captures_largest_first_and_each_bucket_once() -> None:
    graphs, capturer = runner(4, 16, 64)
    graphs.warm([decode(3), decode(60), decode(4)])
    assert [bucket.rows for bucket in graphs.capture_s] == [64, 4]
    graphs.warm([decode(2), decode(61)])
    assert capturer.captured == 2


def test_buckets_cover_every_count() -> None:
    for most in (1, 3, 16, 100, 256, 300):
        rows = row_buckets(most)
        assert rows[-1] == most
        assert all(upper <= 2 * lower or upper - lower <= 64 for lower, upper in pairwise(rows[1:]))
    assert request_buckets(5) == [1, 2, 4, 8]
    assert request_buckets(8) == [1, 2, 4, 8]


@pytest.mark.skipif(not INTERPRETED, reason="interpreted kernels alone can be recorded")
@pytest.mark.parametrize("layout", ["split", "interleaved"])
def test_replayed_steps_equal_the_passes(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One capture serves steps of other documents, lengths and row counts, dummies among them; nothing of the first step is baked in."""
    for module in ("space", "masked_space"):
        monkeypatch.setattr(f"askmany.engine.{module}.store{'_ids' if module == 'masked_space' else ''}", KERNELS[module])
    rng = random.Random(3)
    asked = [
        tuple(Question(f"q{i}", tokens(rng, 1 + i), Sampling(2 + 2 * i)) for i in range(3)),
        tuple(Question(f"q{i}", tokens(rng, 2), Sampling(4)) for i in range(1)),
    ]
    documents = [Document(f"d{i}", (tokens(rng, 5 + 9 * i),), questions) for i, questions in enumerate(asked)]
    model, config = TransformersModel(random_model(CONFIGS["mqa"])), config_of(layout, max_rows=4, streams=4)

    def run(engine: Any) -> dict[Key, StreamResult]:
        found = {}
        for document in documents:
            engine.submit(document)
            found |= {(result.document_key, result.question_id): result for result in engine.drain()}
        return found

    capturer = RecordingCapturer()
    engine = kernel_engine(model, config, capturer)
    steps = engine.executor.steps  # type: ignore[attr-defined]
    steps.warm([3])
    got = run(engine)
    same(got, run(poisoned_engine(model, config)))
    assert len(capturer.recorders) == 1
    assert capturer.recorders[0].kernels > 5
    assert sum(steps._graphs._wanted.values()) >= 8  # all decode steps went through the graph


@pytest.mark.skipif(not INTERPRETED, reason="interpreted kernels alone can be recorded")
def test_steps_with_chunks_and_tails_are_replayed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of several rows, fewer wanted rows than places, steps that ask for nothing: one recording serves all of them."""
    monkeypatch.setattr("askmany.engine.space.store", launch_store)
    monkeypatch.setattr("askmany.engine.workspaces.MIXED_ROWS", (16,))
    monkeypatch.setattr("askmany.engine.graphs.PATIENCE_FIRST", 0)
    rng = random.Random(4)
    questions = tuple(Question(f"q{i}", tokens(rng, 1 + 2 * i), Sampling(2 + i)) for i in range(2))
    model, config = TransformersModel(random_model(CONFIGS["mqa"])), config_of("split", max_rows=4, streams=4)
    capturer, results = RecordingCapturer(), []
    kernels = kernel_engine(model, config, capturer)
    for engine in (kernels, poisoned_engine(model, config)):
        for number in range(2):
            engine.submit(Document(f"d{number}", (tokens(random.Random(5), 3), tokens(random.Random(number), 9)), questions))
        results.append({(result.document_key, result.question_id): result for result in engine.drain()})
    same(*results)
    assert [bucket.decode for bucket in kernels.executor.steps.capture_s] == [False]  # type: ignore[attr-defined]
    assert kernels.executor.steps._eager is None  # type: ignore[attr-defined]


@pytest.mark.skipif(not INTERPRETED, reason="interpreted kernels alone can be recorded")
def test_a_warmed_run_captures_nothing_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of different lengths: decode steps of every size, tiles for the rows that read one document, steps with tails."""
    monkeypatch.setattr("askmany.engine.space.store", launch_store)
    monkeypatch.setattr("askmany.engine.workspaces.MIXED_ROWS", (16,))
    rng = random.Random(6)
    questions = tuple(Question(f"q{i}", tokens(rng, 2), Sampling(2 + 3 * i)) for i in range(3))
    model, config = TransformersModel(random_model(CONFIGS["mqa"])), config_of("split", max_rows=6, streams=6)
    engine = kernel_engine(model, config, RecordingCapturer())
    steps = engine.executor.steps  # type: ignore[attr-defined]
    made = []
    make = steps._maker._layout
    monkeypatch.setattr(
        steps._maker, "_layout", lambda size, use, *more, **named: made.append((size.rows, use)) or make(size, use, *more, **named)
    )
    steps.warm_run(5, 3, 9)
    assert made == [(16, NodeUse(16, 9)), (6, NodeUse(3, 9)), (4, NodeUse(3, 9))]
    captured = list(steps.capture_s)
    for number in range(2):
        engine.submit(Document(f"d{number}", (tokens(random.Random(number), 9),), questions))
    assert len(list(engine.drain())) == 6
    assert list(steps.capture_s) == captured
    assert steps._eager is None


class IdleCapturer:
    """Runs nothing."""

    def capture(self, work: Any) -> Any:
        return work


@pytest.mark.skipif(not INTERPRETED, reason="interpreted kernels alone run on a CPU")
def test_a_pool_goes_with_the_last_reference_to_its_steps() -> None:
    """A second engine in one process has the memory of the first at once, not when cycles are next looked for."""
    model, config = TransformersModel(random_model(CONFIGS["mqa"])), config_of("split")
    pool = KVPool(model.kv_shape, config.kv_pages * config.page_size, model.device)
    held, steps = weakref.ref(pool), kernel_steps(model, pool, config, IdleCapturer())
    steps.warm([3])
    assert len(steps.capture_s) == 1
    gc.disable()
    try:
        del pool, steps
        assert held() is None
    finally:
        gc.enable()


@pytest.mark.skipif(not INTERPRETED, reason="interpreted kernels alone can be recorded")
def test_the_stand_in_notices_what_a_graph_would_bake_in() -> None:
    buffer, host, out = torch.ones(3), [2.0], torch.zeros(3)
    replay = RecordingCapturer().capture(lambda: out.copy_(buffer * host[0]))
    buffer.fill_(5.0)
    replay()
    assert out.tolist() == [10.0] * 3
    host[0] = 3.0
    replay()
    assert out.tolist() == [10.0] * 3
    with pytest.raises(RuntimeError, match="not permitted while capturing"):
        RecordingCapturer().capture(lambda: out.fill_(buffer.sum().item()))
