"""The executor through the engine: every question keeps to itself whatever its sampling, and failures are told apart."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch

from askmany.engine.build import build_scheduler
from askmany.engine.config import EngineConfig
from askmany.engine.engine import Engine
from askmany.engine.errors import EngineError
from askmany.engine.executor import TorchExecutor
from askmany.engine.fake import FakeDetokenizer
from askmany.engine.kv_pool import KVPool
from askmany.engine.model_transformers import TransformersModel
from askmany.engine.request import Document, Question, Sampling, StreamResult
from tests.helpers.tiny_models import VOCABULARY, tiny_model
from tests.helpers.torch_engines import recording_engine

LAYOUTS = ("split", "interleaved")


def tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCABULARY) for _ in range(count))


def forty_questions() -> list[Question]:
    """Each with a budget, temperature, cuts, stop string, stop token and seed of its own."""
    rng = random.Random(7)
    asked = []
    for i in range(40):
        sampling = Sampling(
            max_new_tokens=i + 1,
            temperature=rng.choice([0.0, 0.3, 1.0, 1.5]),
            top_k=rng.choice([0, 0, 5, 30]),
            top_p=rng.choice([1.0, 0.9, 0.5]),
            stop=(f" {rng.randrange(VOCABULARY)}",) if i % 3 == 0 else (),
            stop_token_ids=(rng.randrange(VOCABULARY),) if i % 4 == 0 else (),
            seed=rng.randrange(2**40),
        )
        asked.append(Question(f"q{i}", tokens(rng, rng.randint(1, 12)), sampling))
    return asked


def config_of(**values: Any) -> EngineConfig:
    standing = {"device": "cpu", "dtype": "float32", "kv_tokens": 4096, "page_size": 8, "max_rows": 64, "step_tokens": 96}
    return EngineConfig(**(standing | {"prefill_chunk": 32, "tail_piece": 16} | values))


def run(engine: Engine, questions: list[Question], key: str = "d") -> dict[str, StreamResult]:
    engine.submit(Document(key, ((1, 2, 3), tokens(random.Random(8), 60)), tuple(questions)))
    return {result.question_id: result for result in engine.drain()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_forty_questions_keep_to_themselves(layout: str) -> None:
    """In order, reversed, shuffled, in waves of 1 and 7, and alone: the same results, to the last bit of logprob and margin."""
    model, questions = tiny_model("llama-gqa"), forty_questions()
    engine, _ = recording_engine(model, config_of(layout=layout, streams=40, deterministic=True))
    wanted = run(engine, questions)
    shuffled = random.Random(9).sample(questions, 40)
    assert run(engine, questions[::-1]) == wanted
    assert run(engine, shuffled) == wanted
    for wave in (1, 7):
        other, _ = recording_engine(model, config_of(layout=layout, streams=wave, deterministic=True))
        assert run(other, questions) == wanted
    for question in questions[::4]:
        assert run(engine, [question]) == {question.question_id: wanted[question.question_id]}
    for question in questions:
        result = wanted[question.question_id]
        assert len(result.answer_token_ids) <= question.sampling.max_new_tokens
        assert not set(result.answer_token_ids) & set(question.sampling.stop_token_ids)
        assert not any(stop in result.text for stop in question.sampling.stop)
    reasons = [result.finish_reason for result in wanted.values()]
    assert {"stop", "length"} == set(reasons)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_questions_keep_to_themselves_up_to_rounding_in_the_fast_mode(layout: str) -> None:
    model, questions = tiny_model("qwen3"), forty_questions()
    engine, _ = recording_engine(model, config_of(layout=layout))
    wanted = run(engine, questions)
    for question in questions[::3]:
        (alone,) = run(engine, [question]).values()
        together = wanted[question.question_id]
        assert alone.answer_token_ids == together.answer_token_ids
        assert (alone.text, alone.finish_reason) == (together.text, together.finish_reason)
        assert alone.logprob == pytest.approx(together.logprob, abs=1e-3)


def test_seeds_matter_and_repeat() -> None:
    engine, _ = recording_engine(tiny_model("llama-mha"), config_of())
    tail = (4, 5)
    questions = [Question(f"q{i}", tail, Sampling(12, temperature=1.0, seed=i // 2)) for i in range(8)]
    found = [result.answer_token_ids for result in run(engine, questions).values()]
    by_name = run(engine, questions)
    answers = [by_name[f"q{i}"].answer_token_ids for i in range(8)]
    assert sorted(found) == sorted(answers)
    assert answers[0::2] == answers[1::2]
    assert len(set(answers)) == 4


def broken_engine(harm: Any) -> Engine:
    model = TransformersModel(copy.deepcopy(tiny_model("llama-gqa")))
    config = config_of()
    executor = TorchExecutor(model, KVPool(model.kv_shape, 4096, model.device), config.page_size)
    harm(executor)
    return Engine(build_scheduler(config), executor, FakeDetokenizer())


def too_small_a_pool(executor: TorchExecutor) -> None:
    executor.pool = KVPool(executor.model.kv_shape, 8, executor.model.device)


def weights_of_nan(executor: TorchExecutor) -> None:
    for parameter in executor.model._model.parameters():
        parameter.data.fill_(float("nan"))


@pytest.mark.parametrize(("harm", "said"), [(too_small_a_pool, "failed on cpu"), (weights_of_nan, "logits for question 'q' of 'd'")])
def test_a_broken_device_or_model_is_an_engine_error(harm: Any, said: str) -> None:
    with pytest.raises(EngineError, match=said.replace("logits", ".*logits")):
        run(broken_engine(harm), [Question("q", (5,), Sampling(2))])


def test_execution_leaves_no_gradients() -> None:
    engine, recorder = recording_engine(tiny_model("qwen2"), config_of())
    run(engine, [Question("q", (5, 6), Sampling(3))])
    assert all(logits.is_inference() and not logits.requires_grad for rows in recorder.logits.values() for logits in rows)
    assert torch.is_grad_enabled()
