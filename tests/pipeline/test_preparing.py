"""From text to tokens and verdicts."""

from pathlib import Path
from typing import Any

import pytest

from askmany.engine.errors import ConfigError
from askmany.pipeline.documents import Locator, SourceDocument
from askmany.pipeline.preparing import PreparedDocument, Preparer, stream_seed
from askmany.pipeline.questions import QuestionSetError
from tests.helpers.runs import opened_run
from tests.helpers.word_model import words

ROWS = [{"doc_id": "a", "text": "w1"}, {"doc_id": "b", "text": "w1", "questions": []}]


def preparer(folder: Path, **values: Any) -> Preparer:
    return opened_run(folder, ROWS, **values).preparer


def source(text: str, questions: Any = None, doc_id: str = "d") -> SourceDocument:
    return SourceDocument(doc_id, text, questions, {"title": "T"}, ("seen:1",), Locator("f", "", "jsonl", 0, 1, 1))


def statuses(prepared: PreparedDocument) -> list[str | None]:
    return [question.status for question in prepared.questions]


@pytest.mark.parametrize(("count", "status"), [(1, None), (59, None), (60, None), (61, "too_long"), (5000, "too_long")])
def test_the_context_bounds_document_question_and_answer_together(tmp_path: Path, count: int, status: str | None) -> None:
    prepared = preparer(tmp_path).prepare(source(words(count)))
    assert statuses(prepared) == [status]
    assert prepared.document_tokens == count
    (question,) = prepared.questions
    if status:
        assert question.error == f"{count + 4} tokens with the answer's 2, over the limit of 64"
        assert prepared.for_engine("k").questions == ()
    else:
        document = prepared.for_engine("k")
        assert document.prefix_tokens == count
        assert len(document.questions[0].token_ids) == 2


def test_each_question_is_too_long_by_itself(tmp_path: Path) -> None:
    questions = [
        {"id": "short", "question": "w1"},
        {"id": "long", "question": words(20)},
        {"id": "wordy", "question": "w2", "max_new_tokens": 30},
    ]
    prepared = preparer(tmp_path, questions=questions).prepare(source(words(50)))
    assert statuses(prepared) == [None, "too_long", "too_long"]
    assert [q.question_id for q in prepared.for_engine("k").questions] == ["short"]


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ("truncate_head", words(60, start=40)),
        ("truncate_tail", words(60)),
        ("truncate_middle", words(30) + " " + words(30, start=70)),
    ],
)
def test_truncation_keeps_what_fits_and_says_so(tmp_path: Path, policy: str, kept: str) -> None:
    ready = preparer(tmp_path, long_documents={"policy": policy})
    prepared = ready.prepare(source(words(100)))
    assert prepared.text.split() == kept.split()
    assert prepared.segments == ready.prompts.segments(prepared.text)
    assert prepared.for_engine("k").prefix_tokens == 60
    assert prepared.truncated
    assert prepared.document_tokens == 100
    assert prepared.flags == ("seen:1", "truncated_tokens:40")
    fits = ready.prepare(source(words(60)))
    assert not fits.truncated
    assert fits.flags == ("seen:1",)


def test_the_most_demanding_question_decides_the_cut_for_all(tmp_path: Path) -> None:
    questions = [{"id": "a", "question": "w1"}, {"id": "b", "question": "w1", "max_new_tokens": 40}, {"id": "c", "question": words(70)}]
    prepared = preparer(tmp_path, questions=questions, long_documents={"policy": "truncate_tail"}).prepare(source(words(100)))
    assert statuses(prepared) == [None, None, "too_long"]
    assert prepared.for_engine("k").prefix_tokens == 64 - 1 - 40


@pytest.mark.parametrize("text", ["", " \r\n", "\u200b\ufeff"])
def test_blank_documents_need_no_engine(tmp_path: Path, text: str) -> None:
    prepared = preparer(tmp_path).prepare(source(text))
    assert statuses(prepared) == ["empty_document"]
    assert prepared.segments == ()
    record = prepared.record(prepared.questions[0], attempt=1, status="empty_document")
    assert (record.document_tokens, record.status, record.keep) == (0, "empty_document", {"title": "T"})


def test_shared_and_own_questions_are_asked_together(tmp_path: Path) -> None:
    ready = preparer(tmp_path, input={"questions": "questions"}, questions=[{"id": "s", "question": "w1"}])
    prepared = ready.prepare(source("w5", [{"qid": "o", "question": "w2"}, "w3"]))
    ids = [q.asked.question_id for q in prepared.questions]
    assert ids[:2] == ["s", "o"]
    assert [question.asked.question_id for question in ready.own(prepared)] == ids[1:]
    with pytest.raises(QuestionSetError):
        ready.prepare(source("w5", [{"qid": "s", "question": "w2"}]))
    with pytest.raises(ConfigError):
        ready.prepare(source("w5", 7))


def test_max_questions_counts_shared_ones_first(tmp_path: Path) -> None:
    shared = [{"id": "s1", "question": "w1"}, {"id": "s2", "question": "w2"}]
    ready = preparer(tmp_path, input={"questions": "questions", "max_questions": 1}, questions=shared)
    prepared = ready.prepare(source("w5", ["w3"]))
    assert [q.asked.question_id for q in prepared.questions] == ["s1"]
    assert ready.own(prepared) == ()
    assert [question_id for question_id, _ in ready.shared_asks] == ["s1"]


def test_a_document_that_is_asked_nothing(tmp_path: Path) -> None:
    ready = preparer(tmp_path, input={"questions": "questions"}, questions=None)
    assert ready.prepare(source("w5", [])).questions == ()


def test_a_run_without_room_for_any_question_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the context of 64 tokens is too small for any question"):
        preparer(tmp_path, sampling={"max_new_tokens": 64})
    with pytest.raises(ConfigError, match="the context of 4 tokens is too small"):
        preparer(tmp_path, context_tokens=4)


def test_records_say_what_was_asked(tmp_path: Path) -> None:
    ready = preparer(tmp_path, questions=[{"id": "s", "question": "w1", "answers": ["yes"]}])
    prepared = ready.prepare(source("w5 w6"))
    record = prepared.record(prepared.questions[0], attempt=2, status="ok", answer="x")
    assert (record.question, record.references, record.attempt, record.question_tokens) == ("w1", ("yes",), 2, 1)


def test_seeds_differ_by_document_and_question_and_nothing_else(tmp_path: Path) -> None:
    shared = [{"id": "s1", "question": "w1"}, {"id": "s2", "question": "w1"}, {"id": "s3", "question": "w1", "seed": 9}]
    ready = preparer(tmp_path, questions=shared, sampling={"temperature": 1})
    questions = [q.asked for q in ready.prepare(source("w5")).questions]
    seeds = {(q.question_id, doc_id): stream_seed(q, doc_id) for q in questions for doc_id in ("a", "b")}
    assert len(set(seeds.values())) == len(seeds)
    assert all(0 <= seed < 1 << 63 for seed in seeds.values())
    again = preparer(tmp_path, questions=shared, sampling={"temperature": 1}).prepare(source("w5")).for_engine("k")
    assert [q.sampling.seed for q in again.questions] == [stream_seed(q, "d") for q in questions]
