"""Batch prompting: what is asked in one prompt, and what its text is worth."""

from __future__ import annotations

import pytest

from askmany.pipeline.eval_batch_prompt import HEADER, batched_items, batched_rows, legal_answer, parsed

ROWS = [{"doc_id": "d", "text": "x", "questions": [{"qid": f"q{i}", "question": f"Q\n{i}?", "answers": [f"a{i}"]} for i in range(5)]}]


def test_questions_are_numbered_and_the_budget_grows_with_them() -> None:
    (row,) = batched_rows(ROWS, 3, 10)
    assert [(q["qid"], q["max_new_tokens"]) for q in row["questions"]] == [("batch-0", 42), ("batch-3", 28)]
    assert row["questions"][1]["question"] == f"{HEADER}\n1. Q 3?\n2. Q 4?"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1. one\n2. two\n3. three", ["one", "two", "three"]),
        (" 2) two \n1: one", ["one", "two", None]),
        ("1. one\n1. other\n4. four", ["one", None, None]),
        ("one\ntwo", [None, None, None]),
        ("", [None, None, None]),
        ("1973. was the year\n1. one", ["one", None, None]),
    ],
)
def test_answers_are_found_by_their_numbers(text: str, expected: list[str | None]) -> None:
    assert parsed(text, 3) == expected


def test_a_lost_answer_is_an_item_that_scores_nothing() -> None:
    items = batched_items(ROWS, {("d", "batch-0"): "1. a0\n3. a2"}, 3)
    assert [(item.key[1], item.answer, item.status) for item in items] == [
        ("q0", "a0", "ok"),
        ("q1", "", "invalid_output"),
        ("q2", "a2", "ok"),
        ("q3", "", "invalid_output"),
        ("q4", "", "invalid_output"),
    ]


def test_typed_answers_are_read_as_their_type() -> None:
    question = {"type": "choice", "options": ["A", "B"]}
    assert legal_answer(question, "b.") == ("B", "choice")
    assert legal_answer(question, "C") == (None, "choice")
    assert legal_answer({"type": "bool"}, "Yes") == ("Yes", "bool")
    assert legal_answer({}, "anything") == ("anything", "text")
