"""What a plan lets an engine expect."""

from __future__ import annotations

from askmany.engine.choice import Expected
from askmany.pipeline.expecting import expect
from tests.pipeline.test_plan import plan, row


def test_medians_of_the_documents_that_are_left_and_the_most_of_each() -> None:
    rows = [row(f"d{i}", 100 * (i + 1), questions=4, answerable=4, question_tokens=40, answer_tokens=128) for i in range(3)]
    rows.append(row("many", 150, questions=90, answerable=90, question_tokens=900, answer_tokens=90 * 64))
    made = plan(rows, max_documents=1)
    assert expect(made, made.groups) == Expected(175, 4, 10, 32, most_questions=90, streams=102)
    left = [group for group in made.groups if made.rows(group).column("doc_id")[0].as_py() != "many"]
    assert expect(made, left) == Expected(200, 4, 10, 32, most_questions=4, streams=12)
    assert expect(made, left, long_above=250) == Expected(150, 4, 10, 32, most_questions=4, streams=8)


def test_chunks_count_one_by_one_and_what_needs_no_engine_not_at_all() -> None:
    split = row("split", 4000, chunks=4, questions=3, answerable=12, question_tokens=120, answer_tokens=384, longest_tokens=1100)
    none = row("too long", 9_000_000, answerable=0, question_tokens=0, answer_tokens=0)
    made = plan([split, none])
    assert expect(made, made.groups) == Expected(1000, 3, 10, 32, most_questions=3, streams=12)
    made = plan([none])
    assert expect(made, made.groups) is None
    assert expect(made, []) is None
