"""Audits on engines that do depend on what they should not, and on one that does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from askmany.engine.engine import Engine
from askmany.engine.errors import ConfigError
from askmany.engine.fake import fake_engine
from askmany.engine.request import Document, StreamResult
from askmany.pipeline.audit import Auditor, Sampled, draw_sample, match
from askmany.pipeline.documents import Locator, SourceDocument
from askmany.pipeline.preparing import Preparer
from tests.helpers.runs import opened_run
from tests.helpers.word_model import words

OPTIONS = ["w10", "w11", "w12"]
QUESTIONS = [
    "w1",
    {"id": "shown", "question": "w2 {{ options }}", "type": "choice", "options": OPTIONS},
    {"id": "hidden", "question": "w3", "type": "choice", "options": OPTIONS},
]


class Scripted:
    """An engine that answers as it is told, by document and question."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self._waiting: list[Document] = []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    @property
    def metrics(self) -> Any:
        return None

    def submit(self, document: Document) -> None:
        self._waiting.append(document)

    def step(self) -> list[StreamResult]:
        document = self._waiting.pop(0)
        assert len(document.questions) == 1, "a question is asked alone"
        (question,) = document.questions
        return [StreamResult(document.key, question.question_id, (), self._answer(document, question), "stop", 0.0, 1.0)]


def sample_of(folder: Path, engine: Engine, context: int = 128, **values: Any) -> tuple[Preparer, list[Sampled]]:
    """A run's answers by an engine, all of them sampled."""
    preparer = opened_run(folder, [{"doc_id": "d", "text": "w1"}], context, questions=QUESTIONS, **values).preparer
    source = SourceDocument("d", words(40), None, {}, (), Locator("f", "", "jsonl", 0, 1, 1))
    engine.submit(preparer.prepare(source).for_engine("k"))
    rows = [row_of(result) for result in engine.drain()]
    return preparer, match(draw_sample(rows, 50, 0), {"d": source}, preparer)


def row_of(result: StreamResult) -> Mapping[str, Any]:
    key = {"doc_id": "d", "question_id": result.question_id, "chunk": 0}
    return {**key, "status": "ok", "answer": result.text, "margin": result.margin}


def test_an_engine_whose_answers_are_independent_agrees_with_itself(tmp_path: Path) -> None:
    preparer, sample = sample_of(tmp_path, fake_engine())
    report = Auditor(fake_engine(), preparer).report(sample)
    assert report["sample"] == 3
    assert report["independence"] == {
        "asked": 3,
        "not_askable": 0,
        "agreement": 1.0,
        "differing": [],
        "largest_margin_that_differs": None,
    }


def test_answers_that_change_when_asked_alone_are_listed_with_their_margin(tmp_path: Path) -> None:
    preparer, sample = sample_of(tmp_path, fake_engine())
    sample = [replace(item, margin=0.25) for item in sample]
    stored = {item.question.asked.question_id: item.answer for item in sample}
    changing = Scripted(lambda document, question: "other" if question.question_id == "shown" else stored[question.question_id])
    report = Auditor(changing, preparer).independence(sample)
    assert report["agreement"] == pytest.approx(2 / 3)
    assert report["largest_margin_that_differs"] == 0.25
    assert report["differing"] == [{"doc_id": "d", "question_id": "shown", "answer": stored["shown"], "again": "other", "margin": 0.25}]


def test_label_order_is_tried_where_the_question_shows_its_options(tmp_path: Path) -> None:
    preparer, sample = sample_of(tmp_path, fake_engine())
    asked: list[tuple[int, ...]] = []

    def first_shown(document: Document, question: Any) -> str:
        asked.append(question.token_ids)
        assert question.labels.labels == tuple(OPTIONS), "the labels keep their order"
        return "flipped"

    report = Auditor(Scripted(first_shown), preparer).label_order(sample)
    assert (report["asked"], report["flip_rate"]) == (1, 1.0)
    original = next(item.question.token_ids for item in sample if item.question.asked.question_id == "shown")
    assert asked != [original]
    assert len(asked[0]) == len(original)


def test_without_shown_options_there_is_no_flip_rate(tmp_path: Path) -> None:
    preparer, sample = sample_of(tmp_path, fake_engine())
    plain = [item for item in sample if item.question.asked.question_id != "shown"]
    assert Auditor(fake_engine(), preparer).label_order(plain)["flip_rate"] is None


def test_one_option_has_no_other_order(tmp_path: Path) -> None:
    asked = [{"id": "one", "question": "w2 {{ options }}", "type": "multi_choice", "options": ["w10"]}]
    preparer = opened_run(tmp_path, [{"doc_id": "d", "text": "w1"}], 128, questions=asked).preparer
    document = preparer.prepare(SourceDocument("d", words(40), None, {}, (), Locator("f", "", "jsonl", 0, 1, 1)))
    sample = [Sampled(document, question, "[]", None) for question in document.questions]
    assert len(sample) == 1
    assert Auditor(fake_engine(), preparer).label_order(sample)["asked"] == 0


def test_an_answer_to_a_question_that_is_not_asked_any_more_is_refused(tmp_path: Path) -> None:
    preparer = opened_run(tmp_path, [{"doc_id": "d", "text": "w1"}], 128, questions=QUESTIONS).preparer
    source = SourceDocument("d", words(40), None, {}, (), Locator("f", "", "jsonl", 0, 1, 1))
    with pytest.raises(ConfigError, match="question 'old' of doc_id 'd' is not asked any more; run first, then audit"):
        match([{"doc_id": "d", "question_id": "old", "chunk": 0, "answer": "x", "margin": None}], {"d": source}, preparer)


@pytest.mark.parametrize(
    ("context", "policy", "part", "prefix"),
    [(128, "error", "whole", 20), (30, "truncate_tail", "cut_by_the_run", None), (30, "truncate_head", "cut_by_the_run", None)],
)
def test_another_cut_of_the_document_is_asked(tmp_path: Path, context: int, policy: str, part: str, prefix: int | None) -> None:
    preparer, sample = sample_of(tmp_path, fake_engine(), context, long_documents={"policy": policy})
    seen: list[Document] = []

    def keep(document: Document, question: Any) -> str:
        seen.append(document)
        return "other"

    report = Auditor(Scripted(keep), preparer).truncation(sample)
    assert report[part]["asked"] == 3
    assert report[part]["agreement"] == 0.0
    own = sample[0].document.segments
    assert all(document.segments != own for document in seen)
    expected = prefix if prefix is not None else sum(map(len, own))
    assert {document.prefix_tokens for document in seen} == {expected}


def test_the_sample_is_drawn_from_what_is_ok_and_is_the_same_again() -> None:
    rows = [{"doc_id": str(i), "question_id": "q", "chunk": 0, "status": "ok" if i % 2 else "error"} for i in range(40)]
    sample = draw_sample(rows, 5, 3)
    assert sample == draw_sample(rows[::-1], 5, 3)
    assert len(sample) == 5
    assert all(row["status"] == "ok" for row in sample)
    assert len(draw_sample(rows, 500, 3)) == 20
