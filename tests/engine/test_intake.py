from itertools import count

import pytest

from askmany.engine.errors import DocumentError, QuestionError
from askmany.engine.intake import open_document
from askmany.engine.pages import PagePool
from askmany.engine.request import Document, Phase
from tests.helpers.workload import make_document, make_question


def test_streams_are_made_in_question_order_and_wait() -> None:
    ids = count(5)
    state = open_document(make_document("a", [[1], [2, 3]], [2, 3]), PagePool(10, 4), ids)
    assert [(stream.stream_id, stream.question.question_id, stream.phase) for stream in state.streams] == [
        (5, "q0", Phase.WAITING),
        (6, "q1", Phase.WAITING),
    ]
    assert [stream.budget_tokens for stream in state.streams] == [2 + 4 - 1, 3 + 4 - 1]
    assert all(stream.document is state for stream in state.streams)
    assert not state.finished


@pytest.mark.parametrize(("extra", "fits"), [(-1, True), (0, True), (1, False)])
def test_the_border_of_the_pool(extra: int, fits: bool) -> None:
    """Pool of 4 pages of 4: prefix of 8 tokens, so question + answer - 1 may take 8."""
    document = make_document("a", [[1] * 8], [4 + extra], max_new_tokens=5)
    if fits:
        open_document(document, PagePool(4, 4), count())
        return
    with pytest.raises(DocumentError) as caught:
        open_document(document, PagePool(4, 4), count())
    assert caught.value.status == "too_long"
    assert str(caught.value) == (
        "document 'a': question 'q0': prefix 8 tokens (2 pages) + question and answer 9 tokens (3 pages) > KV pool 4 pages of 4 tokens"
    )


def test_questions_that_do_not_fit_are_named_and_the_rest_is_accepted_without_them() -> None:
    document = make_document("a", [[1] * 8], [1, 50, 2, 60], max_new_tokens=5)
    with pytest.raises(QuestionError, match=r"question 'q1': .* 54 tokens .*question 'q3'") as caught:
        open_document(document, PagePool(4, 4), count())
    assert caught.value.question_ids == ("q1", "q3")
    rest = tuple(question for question in document.questions if question.question_id not in caught.value.question_ids)
    assert len(open_document(Document("a", document.segments, rest), PagePool(4, 4), count()).streams) == 2


def test_malformed_documents_are_refused() -> None:
    pool = PagePool(4, 4)
    with pytest.raises(DocumentError, match="document 'a': segment 1 of its prefix is empty") as empty:
        open_document(make_document("a", [[1], []], [1]), pool, count())
    assert empty.value.status == "error"
    twice = Document("a", ((1,),), (make_question("q", [1]), make_question("q", [2])))
    with pytest.raises(DocumentError, match="document 'a' has two questions 'q'"):
        open_document(twice, pool, count())
    with pytest.raises(DocumentError, match="question 'q0': it has no tokens") as no_tokens:
        open_document(make_document("a", [[1]], [0]), pool, count())
    assert no_tokens.value.status == "error"
    with pytest.raises(DocumentError, match="max_new_tokens is 0, it must be at least 1"):
        open_document(make_document("a", [[1]], [1], max_new_tokens=0), pool, count())
