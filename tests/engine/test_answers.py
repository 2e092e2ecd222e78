import pytest
from hypothesis import given
from hypothesis import strategies as st

from askmany.engine.answers import Answer
from askmany.engine.fake import FakeTextStream
from askmany.engine.request import DocumentState, FinishReason, Sampling, Stream
from askmany.engine.step import Sampled
from tests.helpers.workload import make_document, make_question


class Pieces:
    """A text stream that gives out one prepared piece a token, and a rest at the end."""

    def __init__(self, pieces: list[str], rest: str = "") -> None:
        self.pieces = pieces
        self.rest = rest

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]

    def flush(self) -> str:
        rest, self.rest = self.rest, ""
        return rest


def make_stream() -> Stream:
    return Stream(0, DocumentState(make_document("a", [[1]], [])), make_question("q", [1]))


def push_all(answer: Answer, token_ids: list[int]) -> FinishReason | None:
    """Push until the answer ends; the reason."""
    stream = make_stream()
    for token_id in token_ids:
        reason = answer.push(Sampled(stream, token_id, -0.5, 1.0))
        if reason:
            return reason
    return None


def test_an_answer_ends_at_its_budget() -> None:
    answer = Answer(Sampling(3), frozenset({9}), FakeTextStream())
    assert push_all(answer, [4, 5]) is None
    assert push_all(answer, [6, 7]) == "length"
    assert (answer.token_ids, answer.text, answer.logprob) == ([4, 5, 6], "4 5 6", -1.5)


@pytest.mark.parametrize("stop_token", [9, 8])
def test_a_stop_token_is_no_part_of_the_answer(stop_token: int) -> None:
    """End-of-sequence (9) or the question's own (8), at the very end of the budget too."""
    answer = Answer(Sampling(3, stop_token_ids=(8,)), frozenset({9}), FakeTextStream())
    assert push_all(answer, [4, 5, stop_token]) == "stop"
    assert (answer.token_ids, answer.text, answer.logprob) == ([4, 5], "4 5", -1.0)


def test_an_answer_may_be_empty() -> None:
    answer = Answer(Sampling(3), frozenset({9}), FakeTextStream())
    assert push_all(answer, [9]) == "stop"
    assert (answer.token_ids, answer.text, answer.logprob) == ([], "", 0.0)


def test_a_stop_string_across_tokens_cuts_the_text_before_it() -> None:
    answer = Answer(Sampling(9, stop=("never", "\n\n")), frozenset(), Pieces(["yes.", "\n", "\nand", " more"]))
    assert push_all(answer, [0, 1, 2, 3]) == "stop"
    assert (answer.token_ids, answer.text) == ([0, 1, 2], "yes.")


def test_the_earliest_of_several_stop_strings_counts() -> None:
    answer = Answer(Sampling(9, stop=("d", "bc")), frozenset(), Pieces(["abcd"]))
    assert push_all(answer, [0]) == "stop"
    assert answer.text == "a"


def test_held_back_text_comes_out_at_the_end() -> None:
    cut = Answer(Sampling(1), frozenset(), Pieces([""], rest="\ufffd"))
    assert (push_all(cut, [0]), cut.text) == ("length", "\ufffd")
    stopped = Answer(Sampling(5), frozenset({1}), Pieces(["a"], rest="\ufffd"))
    assert (push_all(stopped, [0, 1]), stopped.text) == ("stop", "a\ufffd")
    found = Answer(Sampling(1, stop=("bc",)), frozenset(), Pieces(["ab"], rest="cd"))
    assert (push_all(found, [0]), found.text) == ("stop", "a")


@given(st.lists(st.text("ab", max_size=3), min_size=1, max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stop_strings_are_found_whatever_the_cut_into_tokens(pieces: list[str], stops: list[str]) -> None:
    answer = Answer(Sampling(len(pieces), stop=tuple(stops)), frozenset(), Pieces(pieces))
    reason = push_all(answer, list(range(len(pieces))))
    ends = [end for end in range(1, len(pieces) + 1) if any(stop in "".join(pieces[:end]) for stop in stops)]
    used = ends[0] if ends else len(pieces)
    text = "".join(pieces[:used])
    assert reason == ("stop" if ends else "length")
    assert answer.token_ids == list(range(used))
    assert answer.text == text[: min([text.index(stop) for stop in stops if stop in text], default=None)]


def test_the_result_carries_its_key() -> None:
    stream = make_stream()
    stream.finish_reason, stream.margin = "stop", 0.25
    answer = Answer(Sampling(3), frozenset({9}), FakeTextStream())
    push_all(answer, [4, 9])
    result = answer.result(stream)
    assert (result.document_key, result.question_id, result.answer_token_ids, result.text) == ("a", "q", (4,), "4")
    assert (result.finish_reason, result.logprob, result.margin) == ("stop", -0.5, 0.25)
