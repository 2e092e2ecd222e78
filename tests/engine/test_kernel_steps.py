"""Steps through the kernels, interpreted: logits and answers are those of PyTorch's passes and of the lone prompt.

Every run starts in NaN-filled memory and refills freed pages with NaN before each step.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from askmany.engine.config import EngineConfig
from askmany.engine.errors import EngineError
from askmany.engine.executor import TorchExecutor
from askmany.engine.labels import label_trie
from askmany.engine.model_transformers import TransformersModel
from askmany.engine.request import Document, Question, Sampling, StreamResult
from tests.engine.test_isolation import run_late_arrivals, tokens
from tests.helpers.interpreter import INTERPRETED
from tests.helpers.kernel_engines import CONFIGS, kernel_engine, reference_chunks
from tests.helpers.tiny_models import random_model
from tests.helpers.torch_engines import Key, poisoned_engine

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="interpreted kernels alone run on a CPU"),
    pytest.mark.timeout(300),
]


def config_of(layout: str, **values: Any) -> EngineConfig:
    standing = {"layout": layout, "device": "cpu", "dtype": "float32", "page_size": 8, "kv_tokens": 512, "max_rows": 4, "streams": 2}
    return EngineConfig(**(standing | {"step_tokens": 16, "prefill_chunk": 12, "tail_piece": 8} | values))


def small_document(rng: random.Random, key: str, instruction: tuple[int, ...], questions: int) -> Document:
    asked = tuple(Question(f"q{i}", tokens(rng, rng.randint(1, 6)), Sampling(rng.randint(2, 4))) for i in range(questions))
    return Document(key, (instruction, tokens(rng, rng.randint(14, 20))), asked)


def same(got: dict[Key, StreamResult], wanted: dict[Key, StreamResult]) -> None:
    assert got.keys() == wanted.keys()
    for key, result in got.items():
        assert result.answer_token_ids == wanted[key].answer_token_ids
        assert result.logprob == pytest.approx(wanted[key].logprob, abs=1e-3)
        assert result.margin == pytest.approx(wanted[key].margin, abs=1e-3)


@pytest.fixture(scope="module", params=list(CONFIGS))
def plain(request: pytest.FixtureRequest) -> PreTrainedModel:
    return random_model(CONFIGS[request.param])


@pytest.mark.parametrize(
    ("layout", "chunks"),
    [
        ("split", "vendor"),
        ("interleaved", "own"),
        pytest.param("split", "own", marks=pytest.mark.slow),
        pytest.param("interleaved", "vendor", marks=pytest.mark.slow),
    ],
)
def test_answers_are_those_of_the_passes(plain: PreTrainedModel, layout: str, chunks: str) -> None:
    """Documents in chunks, tails and decode rows in one step, a shared instruction, late arrivals; with and without a prefill kernel."""
    rng = random.Random(f"{layout} {chunks}")
    documents = [small_document(rng, f"d{i}", tokens(random.Random(0), 3), 2) for i in range(2)]
    config = config_of(layout, page_size=rng.choice([8, 16]))
    model = TransformersModel(plain)
    wanted = run_late_arrivals(poisoned_engine(model, config), documents, random.Random(1))
    setting = {"chunk_pass": reference_chunks()} if chunks == "vendor" else {}
    engine = kernel_engine(model, config, **setting)
    refuse_passes(engine.executor)
    same(run_late_arrivals(engine, documents, random.Random(1)), wanted)


def refuse_passes(executor: Any) -> None:
    """Fail when a step is not run by the kernels."""

    def passes(plan: Any) -> None:
        raise AssertionError("a step went through PyTorch's passes")

    assert isinstance(executor, TorchExecutor)
    executor._passes = passes  # type: ignore[method-assign,assignment]


@pytest.mark.slow
def test_labels_of_one_token_and_of_one_chain_beside_a_free_answer() -> None:
    model = TransformersModel(random_model(CONFIGS["gqa"]))
    single, tree = label_trie(["a", "b"], [(3,), (4,)], None), label_trie(["a", "b"], [(3, 5), (3, 6)], None)
    plain = Question("plain", (7, 8), Sampling(4))

    asked = (plain, Question("single", (9,), Sampling(1), labels=single), Question("tree", (9,), Sampling(1), labels=tree))

    def run(engine: Any, *questions: Question) -> dict[Key, StreamResult]:
        engine.submit(Document("d", ((1, 2, 3), tuple(range(10, 25))), questions))
        return {(result.document_key, result.question_id): result for result in engine.drain()}

    config = config_of("split")
    engine = kernel_engine(model, config)
    refuse_passes(engine.executor)
    got, wanted = run(engine, *asked), run(poisoned_engine(model, config), *asked)
    same(got, wanted)
    for key in wanted:
        if wanted[key].labels is not None:
            assert got[key].labels.logprobs == pytest.approx(wanted[key].labels.logprobs, abs=1e-4)  # type: ignore[union-attr]


@pytest.mark.slow
def test_temperatures_draw_what_the_passes_draw() -> None:
    model = TransformersModel(random_model(CONFIGS["gqa"]))
    questions = tuple(Question(f"q{i}", (5 + i, 6), Sampling(3, temperature=0.8 * (i % 2), seed=i)) for i in range(3))
    document = Document("d", (tokens(random.Random(2), 14),), questions)
    config = config_of("split")
    results, drawn = [], set()
    ours = kernel_engine(model, config)
    draw = ours.executor._draw  # type: ignore[attr-defined]
    ours.executor._draw = lambda streams, logits: drawn.update(s.question.question_id for s in streams) or draw(streams, logits)  # type: ignore[attr-defined]
    for engine in (ours, poisoned_engine(model, config)):
        engine.submit(document)
        results.append({(result.document_key, result.question_id): result for result in engine.drain()})
    same(*results)
    assert drawn == {"q1"}  # the others are the device's, as they would be alone


def test_a_position_beyond_the_context_is_refused() -> None:
    model = TransformersModel(random_model(CONFIGS["gqa"]))
    engine = kernel_engine(model, config_of("split"))
    engine.executor.steps._context_tokens = 12  # type: ignore[attr-defined]
    engine.submit(Document("d", (tokens(random.Random(2), 14),), (Question("q", (1,), Sampling(2)),)))
    with pytest.raises(EngineError, match="position 13 lies beyond its context of 12 tokens"):
        list(engine.drain())


def test_nan_weights_are_named() -> None:
    model = TransformersModel(random_model(CONFIGS["gqa"]))
    for parameter in model._model.parameters():
        parameter.data.fill_(float("nan"))
    engine = kernel_engine(model, config_of("split"))
    engine.submit(Document("d", (tokens(random.Random(2), 5),), (Question("q", (1,), Sampling(2)),)))
    with pytest.raises(EngineError, match="NaN logits for question 'q' of 'd'"):
        list(engine.drain())
    assert torch.is_grad_enabled()
