"""Answers held to their types by a real (random) model: legal whatever the model prefers, and never at a sibling's cost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from askmany.engine.answer_types import AnswerType, answer_type
from askmany.engine.config import EngineConfig
from askmany.engine.constraints import Constraints
from askmany.engine.errors import EngineError
from askmany.engine.executor import TorchExecutor
from askmany.engine.grammar_json import compact
from askmany.engine.labels import label_trie
from askmany.engine.request import Document, Question, Sampling, StreamResult
from tests.helpers import answer_strategies
from tests.helpers.typed_engines import END, IDS, PIECES, random_model, results, spell, typed_engine

SEGMENTS = (spell("Read this."), spell("In 1973 the price of oil rose; the reason is stated. " * 3))
CHOICE = answer_type({"type": "choice", "options": ["yes", "no", "not stated", "not sure"], "answer": "decode"}, "q")
WHOLE = answer_type({"type": "int", "minimum": -20, "maximum": 1500}, "q")
OBJECT = answer_type(
    {
        "type": "json",
        "schema": {"type": "object", "properties": {"a": {"type": "string", "maxLength": 5}, "b": {"type": "boolean"}}, "required": ["a"]},
    },
    "q",
)


def asked(question_id: str, kind: AnswerType | None, tail: str = " Q? A:", **sampling: object) -> Question:
    settings = {"max_new_tokens": 40, **sampling}
    return Question(question_id, spell(tail), Sampling(**settings), grammar=kind.grammar if kind else None)  # type: ignore[arg-type]


def mixed_questions() -> tuple[Question, ...]:
    """40 questions, each with its own budget (1 to 40), temperature, stop string, seed and type."""
    kinds = (CHOICE, WHOLE, OBJECT, None)
    questions = [
        asked(
            f"q{i}",
            kinds[i % 4],
            f" Question {i}, is it {'so' * (i % 5)}? A:",
            max_new_tokens=i + 1,
            temperature=(0.0, 0.7, 1.5)[i % 3],
            stop=("", "B", "20", "\n", "st")[i % 5 : i % 5 + 1] if i % 5 else (),
            seed=1000 + i,
        )
        for i in range(40)
    ]
    labels = ("yes", "no", "not stated", "not sure")
    questions[8] = replace(questions[8], grammar=None, labels=label_trie(labels, [spell(label) for label in labels], END))
    return tuple(questions)


def run(questions: Sequence[Question], streams: int = 40) -> dict[str, StreamResult]:
    config = EngineConfig(deterministic=True, streams=streams, max_rows=40, step_tokens=256, prefill_chunk=64, tail_piece=16)
    return results(typed_engine(random_model(), config), [Document("d", SEGMENTS, tuple(questions))])


def test_each_question_gets_the_same_result_in_any_company() -> None:
    questions = mixed_questions()
    expected = run(questions)
    assert len({(result.text, result.finish_reason) for result in expected.values()}) > 20, "the answers differ, so mixing them would show"
    shuffled = random.Random(3).sample(questions, len(questions))
    orders = {"reversed": questions[::-1], "shuffled": shuffled, "waves of 7": questions, "waves of 1": questions}
    for name, order in orders.items():
        found = run(order, {"waves of 7": 7, "waves of 1": 1}.get(name, 40))
        assert found == expected, name
    for question in questions[::3]:
        assert run([question])[question.question_id] == expected[question.question_id]
    for question in questions:
        assert len(expected[question.question_id].answer_token_ids) <= max(question.sampling.max_new_tokens, 2)


def test_constrained_answers_are_legal_or_left_incomplete() -> None:
    kinds = {f"q{i}": (CHOICE, WHOLE, OBJECT, None)[i % 4] for i in range(40)}
    parsed = 0
    for question_id, result in run(mixed_questions()).items():
        kind = kinds[question_id]
        question = mixed_questions()[int(question_id[1:])]
        if kind and result.finish_reason == "stop" and not question.sampling.stop and result.labels is None:
            kind.parse(result.text)
            parsed += 1
    assert parsed


@pytest.mark.parametrize("layout", ["split", "interleaved"])
def test_a_model_that_prefers_white_space_still_writes_compact_json(layout: str) -> None:
    engine = typed_engine(loving(" ", "  ", "\n"), EngineConfig(layout=layout))  # type: ignore[arg-type]
    kinds = {"object": OBJECT, "whole": WHOLE, "choice": CHOICE}
    found = results(engine, [Document("d", SEGMENTS, tuple(asked(name, kind) for name, kind in kinds.items()))])
    for name, kind in kinds.items():
        assert found[name].finish_reason == "stop"
        kind.parse(found[name].text)
    assert found["object"].text == compact(OBJECT.parse(found["object"].text))


def test_a_stop_token_that_the_model_does_not_have_ends_nothing() -> None:
    beyond = asked("beyond", WHOLE, stop_token_ids=(100_000,))
    found = results(typed_engine(random_model()), [Document("d", SEGMENTS, (beyond, asked("plain", WHOLE)))])
    assert found["beyond"].answer_token_ids == found["plain"].answer_token_ids


def test_a_string_without_end_stays_a_failure_of_its_own() -> None:
    endless = answer_type({"type": "json", "schema": {"type": "string", "pattern": "^a+$"}}, "q")
    questions = (asked("endless", endless, max_new_tokens=12), asked("whole", WHOLE), asked("free", None, max_new_tokens=9))
    model = loving("a")
    found = results(typed_engine(model), [Document("d", SEGMENTS, questions)])
    assert (found["endless"].finish_reason, found["endless"].text) == ("length", '"' + "a" * 11)
    assert found["whole"].finish_reason == "stop"
    WHOLE.parse(found["whole"].text)
    for name in ("whole", "free"):
        alone = results(typed_engine(model), [Document("d", SEGMENTS, tuple(q for q in questions if q.question_id == name))])
        assert alone[name].answer_token_ids == found[name].answer_token_ids


def test_a_schema_no_value_fits_ends_its_own_stream_alone() -> None:
    schema = {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}}}
    hopeless = answer_type({"type": "json", "schema": schema}, "q")
    found = results(typed_engine(random_model()), [Document("d", SEGMENTS, (asked("hopeless", hopeless), asked("whole", WHOLE)))])
    WHOLE.parse(found["whole"].text)
    with pytest.raises(ValueError, match="JSON"):
        hopeless.parse(found["hopeless"].text)


def test_an_answer_ends_with_its_last_possible_token() -> None:
    """No end token is fed nor drawn where the grammar is complete, and the log-probability is the plain model's."""
    fixed = answer_type({"type": "regex", "pattern": "no"}, "q")
    found = results(typed_engine(random_model()), [Document("d", SEGMENTS, (asked("q", fixed),))])["q"]
    assert (found.text, found.finish_reason) == ("no", "stop")
    assert END not in found.answer_token_ids
    assert found.logprob < -1, "the model's own distribution, not the constrained one"


def test_an_open_end_is_left_to_the_model() -> None:
    digits = answer_type({"type": "regex", "pattern": "[0-9]{1,30}"}, "q")
    found = results(typed_engine(loving("7", bias=30)), [Document("d", SEGMENTS, (asked("q", digits),))])["q"]
    assert (found.text, found.finish_reason) == ("7" * 30, "stop")
    soon = results(typed_engine(loving("", bias=30)), [Document("d", SEGMENTS, (asked("q", digits),))])["q"]
    assert len(soon.text) == 1
    assert soon.finish_reason == "stop"


def test_an_engine_without_constraints_refuses_grammars() -> None:
    engine = typed_engine(random_model())
    bare = engine.executor
    assert isinstance(bare, TorchExecutor)
    engine.executor = TorchExecutor(bare.model, bare.pool, bare.page_size)
    engine.submit(Document("d", SEGMENTS, (asked("q", WHOLE),)))
    with pytest.raises(EngineError, match="without constraints"):
        list(engine.drain())


def test_streams_at_the_same_place_share_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[int] = []
    fill = Constraints._fill
    monkeypatch.setattr(Constraints, "_fill", lambda self, held, bits: filled.append(len(held)) or fill(self, held, bits))
    fixed = answer_type({"type": "regex", "pattern": "nobody"}, "q")
    questions = [asked(f"q{i}", fixed, f" Question {i}? A:", temperature=0.0) for i in range(6)]
    found = results(typed_engine(random_model()), [Document("d", SEGMENTS, tuple(questions))])
    assert {result.text for result in found.values()} == {"nobody"}
    said = [result.answer_token_ids for result in found.values()]
    wanted = [len({ids[:step] for ids in said if len(ids) > step}) for step in range(max(map(len, said)))]
    assert filled == wanted
    assert wanted[0] == 1


def test_an_untyped_run_never_touches_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xgrammar.allocate_token_bitmask", lambda *_: pytest.fail("a mask was made"))
    monkeypatch.setattr("xgrammar.apply_token_bitmask_inplace", lambda *_: pytest.fail("a mask was applied"))
    monkeypatch.setattr("tests.helpers.typed_engines.compiler", lambda: pytest.fail("a compiler was made"))
    found = results(typed_engine(random_model()), [Document("d", SEGMENTS, (asked("q", None, max_new_tokens=5),))])
    assert len(found["q"].answer_token_ids) == 5


def check_types(kinds: Sequence[AnswerType], seed: int, budget: int) -> None:
    """All together with a free sibling: each is legal or left incomplete, and the sibling does not notice."""
    questions = [
        asked(f"q{i}", kind, f" Q{seed % 97}{'x' * i}? A:", max_new_tokens=budget, temperature=i % 2 * 1.3, seed=seed + i)
        for i, kind in enumerate(kinds)
    ]
    free = asked("free", None, max_new_tokens=8)
    model = random_model(seed % 5)
    found = results(typed_engine(model), [Document("d", SEGMENTS, (*questions[:2], free, *questions[2:]))])
    for question, kind in zip(questions, kinds, strict=True):
        result = found[question.question_id]
        assert len(result.answer_token_ids) <= budget
        assert result.text == "".join(PIECES[token] for token in result.answer_token_ids)
        if result.finish_reason == "stop":
            kind.parse(result.text)
    alone = results(typed_engine(model), [Document("d", SEGMENTS, (free,))])
    assert alone["free"].answer_token_ids == found["free"].answer_token_ids


BATCH = st.lists(answer_strategies.types(), min_size=8, max_size=8)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(BATCH, st.integers(0, 10**6), st.integers(1, 90))
def test_any_type_is_enforced(kinds: list[AnswerType], seed: int, budget: int) -> None:
    check_types(kinds, seed, budget)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(BATCH, st.integers(0, 10**6), st.integers(1, 90))
def test_two_thousand_types_are_enforced(kinds: list[AnswerType], seed: int, budget: int) -> None:
    check_types(kinds, seed, budget)


def loving(*pieces: str, bias: float = 1000.0) -> PreTrainedModel:
    """A random model whose logits for these pieces ("": the end) are raised by `bias`, whatever it reads."""
    model = random_model()
    raised = torch.zeros(len(PIECES))
    raised[[IDS.get(piece, END) for piece in pieces]] = bias
    weight = model.lm_head.weight
    model.lm_head = torch.nn.Linear(weight.shape[1], weight.shape[0])
    model.lm_head.weight.data.copy_(weight)
    model.lm_head.bias.data.copy_(raised)
    return model
