"""A stream's logits are those of its lone prompt, whatever rides along; with `deterministic` they are bit-identical too.

Every run starts in NaN-filled memory and refills freed pages with NaN before each step.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from askmany.engine.config import EngineConfig
from askmany.engine.engine import Engine
from askmany.engine.request import Document, Question, Sampling, StreamResult
from tests.helpers.tiny_models import CONFIGS, VOCABULARY, tiny_model
from tests.helpers.torch_engines import Key, lone_logits, recording_engine

LAYOUTS = ("split", "interleaved")
TOLERANCE = 1e-4


def tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCABULARY) for _ in range(count))


def random_document(rng: random.Random, key: str, instruction: tuple[int, ...], questions: int, max_document: int = 90) -> Document:
    segments = (*((instruction,) if instruction else ()), tokens(rng, rng.randint(1, max_document)))
    asked = tuple(Question(f"q{i}", tokens(rng, rng.randint(1, 20)), Sampling(rng.randint(1, 10))) for i in range(questions))
    return Document(key, segments, asked)


def random_config(rng: random.Random, layout: str, **fixed: Any) -> EngineConfig:
    rows = rng.choice([1, 3, 8, 16])
    drawn: dict[str, Any] = {
        "layout": layout,
        "batching": rng.choice(["continuous", "run_to_completion"]) if layout == "interleaved" else "continuous",
        "device": "cpu",
        "dtype": "float32",
        "page_size": rng.choice([1, 4, 8, 16]),
        "kv_tokens": rng.choice([640, 2048]),
        "max_rows": rows,
        "streams": rng.choice([1, 2, 5, 8]),
        "step_tokens": max(rows, rng.choice([16, 64, 256])),
        "prefill_chunk": rng.choice([7, 16, 128]),
        "tail_piece": rng.choice([4, 16]),
    }
    return EngineConfig(**(drawn | fixed))


def run_late_arrivals(engine: Engine, documents: list[Document], rng: random.Random) -> dict[Key, StreamResult]:
    """Submit the first document, the others after a few steps each, and run to the end."""
    results: list[StreamResult] = []
    for document in documents:
        engine.submit(document)
        for _ in range(rng.randint(0, 6)):
            results += engine.step()
    results += engine.drain()
    return {(result.document_key, result.question_id): result for result in results}


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 25), marks=pytest.mark.slow)], ids=["first", "rest"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_the_lone_prompt(name: str, layout: str, seeds: range) -> None:
    """25 random cases for each model and layout: documents, questions, page sizes, budgets, and documents that arrive late."""
    model = tiny_model(name)
    for seed in seeds:
        rng = random.Random(f"{name} {layout} {seed}")
        engine, recorder = recording_engine(model, random_config(rng, layout))
        instruction = tokens(rng, rng.choice([0, 1, 6]))
        documents = [random_document(rng, f"d{i}", instruction, rng.randint(1, 6)) for i in range(rng.randint(1, 3))]
        results = run_late_arrivals(engine, documents, rng)
        for document in documents:
            for question in document.questions:
                result = results[document.key, question.question_id]
                wanted = lone_logits(model, document, question.question_id, result.answer_token_ids)
                got = torch.stack(recorder.logits[document.key, question.question_id])
                torch.testing.assert_close(got, wanted, rtol=0, atol=TOLERANCE)
                assert result.answer_token_ids == tuple(got.argmax(dim=-1).tolist())


def watched_document(rng: random.Random, before: int, after: int, watched: Question) -> Document:
    """One question among others that are drawn anew."""
    segments = (tokens(random.Random(1), 6), tokens(random.Random(2), 75))
    others = [Question(f"o{i}", tokens(rng, rng.randint(1, 20)), Sampling(rng.randint(1, 14))) for i in range(before + after)]
    return Document("d", segments, (*others[:before], watched, *others[before:]))


def watched_logits(
    name: str, config: EngineConfig, documents: list[Document], watched: Question, rng: random.Random | None = None
) -> torch.Tensor:
    engine, recorder = recording_engine(tiny_model(name), config)
    if rng is None:
        for document in documents:
            engine.submit(document)
        list(engine.drain())
    else:
        run_late_arrivals(engine, documents, rng)
    (key,) = [key for key in recorder.logits if key[1] == watched.question_id]
    return torch.stack(recorder.logits[key])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_siblings_words_never_change_a_bit(name: str, layout: str, deterministic: bool) -> None:
    """The same token counts, so the same schedule; other words in every other question."""
    watched = Question("watched", tokens(random.Random(3), 9), Sampling(8))
    config = random_config(random.Random(4), layout, max_rows=16, step_tokens=64, streams=8, kv_tokens=2048, deterministic=deterministic)
    seen = []
    for words in range(4):
        document = watched_document(random.Random(5), 4, 3, watched)
        rng = random.Random(words)
        questions = (q if q is watched else Question(q.question_id, tokens(rng, len(q.token_ids)), q.sampling) for q in document.questions)
        seen.append(watched_logits(name, config, [Document("d", document.segments, tuple(questions))], watched))
    assert all(torch.equal(logits, seen[0]) for logits in seen[1:])


@pytest.mark.parametrize(("name", "threads"), [*((name, 1) for name in CONFIGS), ("llama-gqa", 2)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_deterministic_mode_is_blind_to_siblings(name: str, layout: str, threads: int) -> None:
    """Siblings added, removed and re-timed, other documents before and beside it, another page size, another P: the same bits."""
    watched = Question("watched", tokens(random.Random(3), 23), Sampling(8))
    fixed = {"prefill_chunk": 32, "tail_piece": 16, "step_tokens": 64, "kv_tokens": 2048, "deterministic": True}
    kept = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        seen = []
        for case, (before, after) in enumerate([(0, 0), (5, 2), (2, 30), (0, 3), (14, 9)][: 6 // threads]):
            rng = random.Random(case)
            config = random_config(rng, layout, **(fixed | {"max_rows": rng.choice([3, 16, 32])}))
            documents = [random_document(rng, f"other{i}", tokens(random.Random(1), 6), 4) for i in range(case)]
            documents.insert(rng.randint(0, case), watched_document(rng, before, after, watched))
            seen.append(watched_logits(name, config, documents, watched, rng))
    finally:
        torch.set_num_threads(kept)
    assert all(torch.equal(logits, seen[0]) for logits in seen[1:])
    assert torch.isfinite(seen[0]).all()
