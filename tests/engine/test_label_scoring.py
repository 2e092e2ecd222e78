"""Labels scored by the engine: equal to the plain model's sequence products, whatever else runs and however the tail is cut."""

from __future__ import annotations

import math

import pytest

from askmany.engine.config import EngineConfig
from askmany.engine.errors import QuestionError
from askmany.engine.fake import expected_label_logprobs, fake_engine
from askmany.engine.labels import label_trie
from askmany.engine.request import Document, Question, Sampling, StreamResult
from tests.helpers.typed_engines import END, random_model, results, sequence_logprob, spell, typed_engine

LABELS = ("yes", "no", "not stated", "not sure")
TREES = (LABELS, ("yes", "yes no", "no"), ("20", "200", "2000", "a b", "a bc"), ("é", "日é", "日a"))
SEGMENTS = (spell("Read this."), spell("It was in 1973 that the price rose, not stated why. " * 3))


def labelled(question_id: str, text: str, labels: tuple[str, ...]) -> Question:
    return Question(question_id, spell(text), Sampling(1), labels=label_trie(labels, [spell(label) for label in labels], END))


def questions() -> tuple[Question, ...]:
    own = tuple(labelled(f"l{i}", f" Q{i}: is it " + "so " * i + "? A:", TREES[i % len(TREES)]) for i in range(12))
    free = tuple(Question(f"t{i}", spell(f" Say {i}:"), Sampling(5 + i)) for i in range(4))
    return own[:6] + free + own[6:]


def expected(document: Document, question: Question) -> list[float]:
    assert question.labels is not None
    prompt = [token for segment in document.segments for token in segment] + list(question.token_ids)
    ends = (END,) if question.labels.end_scored else ()
    return [sequence_logprob(random_model(), prompt, (*ids, *ends)) for ids in question.labels.token_ids]


def checked(document: Document, found: dict[str, StreamResult]) -> None:
    for question in document.questions:
        if question.labels is None:
            continue
        scores = found[question.question_id].labels
        assert scores is not None
        products = expected(document, question)
        assert scores.logprobs == pytest.approx(products, abs=1e-4)
        mass = math.fsum(map(math.exp, products))
        assert scores.probabilities == pytest.approx([math.exp(p) / mass for p in products], abs=1e-6)
        assert scores.legal_mass == pytest.approx(mass, abs=1e-6)
        assert sum(scores.probabilities) == pytest.approx(1, abs=1e-9)
        assert found[question.question_id].text == scores.label
        assert found[question.question_id].finish_reason == "stop"


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(),
        EngineConfig(streams=1, page_size=3),
        EngineConfig(max_rows=3, step_tokens=7, prefill_chunk=5, page_size=4),
        EngineConfig(deterministic=True, tail_piece=4, prefill_chunk=16, max_rows=8, step_tokens=64),
    ],
    ids=["together", "one-at-a-time", "cut-to-pieces", "deterministic"],
)
def test_scores_equal_the_plain_model(config: EngineConfig) -> None:
    document = Document("d", SEGMENTS, questions())
    checked(document, results(typed_engine(random_model(), config), [document]))


def test_a_distribution_is_the_same_alone_and_together_bit_for_bit_in_deterministic_mode() -> None:
    config = EngineConfig(deterministic=True, tail_piece=4, prefill_chunk=16, max_rows=8, step_tokens=64)
    together = results(typed_engine(random_model(), config), [Document("d", SEGMENTS, questions())])
    for question in questions():
        alone = results(typed_engine(random_model(), config), [Document("d", SEGMENTS, (question,))])[question.question_id]
        assert alone == together[question.question_id]


def test_labels_take_no_decoding_step() -> None:
    engine = typed_engine(random_model())
    engine.submit(Document("d", SEGMENTS, tuple(labelled(f"q{i}", f" Q{i}? A:", LABELS) for i in range(20))))
    found = list(engine.drain())
    assert len(found) == 20
    assert engine.metrics.decode_tokens == 0
    assert engine.metrics.steps == 3, "one for each part of the prefix, one for all questions with all their labels"


def test_single_token_labels_work_in_the_interleaved_layout() -> None:
    document = Document("d", SEGMENTS, tuple(labelled(f"q{i}", f" Q{i}? A:", ("yes", "no")) for i in range(5)))
    checked(document, results(typed_engine(random_model(), EngineConfig(layout="interleaved", streams=3)), [document]))


def test_label_trees_are_refused_in_the_interleaved_layout_and_siblings_are_not() -> None:
    engine = typed_engine(random_model(), EngineConfig(layout="interleaved", streams=3))
    with pytest.raises(QuestionError, match="split layout") as refused:
        engine.submit(Document("d", SEGMENTS, (labelled("tree", " Q? A:", LABELS), labelled("flat", " Q? A:", ("yes", "no")))))
    assert refused.value.question_ids == ("tree",)


@pytest.mark.parametrize("step_tokens", [4, 8, 2048])
def test_the_scheduler_feeds_trees_in_any_pieces(step_tokens: int) -> None:
    config = EngineConfig(step_tokens=step_tokens, max_rows=4, prefill_chunk=4, page_size=2)
    document = Document("d", SEGMENTS, questions())
    engine = fake_engine(config)
    found = results(engine, [document])
    for question in document.questions:
        if question.labels is not None:
            scores = found[question.question_id].labels
            assert scores is not None
            asked = expected_label_logprobs(document, question)
            assert scores.logprobs == pytest.approx([sum(asked[i] for i in asks) for asks in question.labels.label_asks])
    assert engine.scheduler.check_integrity()
