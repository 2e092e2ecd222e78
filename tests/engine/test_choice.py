"""Rows, residency and P: arithmetic with an injected timer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from askmany.engine.choice import Expected, bounded, calibrated_streams, choose, choose_interleaved, chosen
from askmany.engine.config import EngineConfig


def test_a_large_budget_fills_the_rows_and_keeps_a_document_ahead() -> None:
    found = choose(Expected(8192, 64, 12, 128), kv_tokens=1_000_000, page_size=16, max_rows=256)
    assert (found.layout, found.rows, found.streams, found.documents) == ("split", 256, 64, 5)
    assert "256 rows over 5 resident documents" in found.reason


def test_a_small_budget_carries_fewer_rows() -> None:
    found = choose(Expected(8192, 64, 12, 128), kv_tokens=8192 + 144 * 10, page_size=16, max_rows=256)
    assert (found.rows, found.documents) == (10, 1)


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="a document of 8192 tokens with one answer takes 521 pages of 512"):
        choose(Expected(8192, 4, 12, 128), kv_tokens=8192, page_size=16, max_rows=8)


@given(
    st.integers(1, 4000), st.integers(1, 300), st.integers(1, 200), st.integers(1, 400), st.integers(1, 200_000),
    st.sampled_from([1, 16, 64]), st.integers(1, 512),
)  # fmt: skip
def test_what_is_chosen_fits(document: int, questions: int, question: int, answer: int, kv_tokens: int, page: int, rows: int) -> None:
    expected = Expected(document, questions, question, answer)
    pages = -(-document // page) + -(-(question + answer) // page)
    if pages > kv_tokens // page:
        with pytest.raises(ValueError, match="pages"):
            choose(expected, kv_tokens, page, rows)
        return
    found = choose(expected, kv_tokens, page, rows)
    assert 1 <= found.streams <= found.rows <= rows
    assert found.documents >= 1
    used = found.documents * -(-document // page) + found.rows * -(-(question + answer) // page)
    assert used <= kv_tokens // page


def test_p_is_the_fastest_on_the_calibration_set() -> None:
    rates = {8: 100.0, 16: 180.0, 32: 240.0, 64: 240.0, 128: 90.0}
    assert calibrated_streams(rates.__getitem__) == (
        32, "P = 32: 8 gave 100 tokens/s, 16 gave 180 tokens/s, 32 gave 240 tokens/s, 64 gave 240 tokens/s, 128 gave 90 tokens/s",
    )  # fmt: skip
    assert calibrated_streams(rates.__getitem__, most=20)[0] == 16
    assert calibrated_streams(rates.__getitem__, most=4) == (4, "P = 4: nothing to calibrate with")
    assert calibrated_streams(rates.__getitem__, candidates=()) == (32, "P = 32: nothing to calibrate with")


SIZES = (
    st.integers(1, 4000), st.integers(1, 300), st.integers(1, 200), st.integers(1, 400), st.integers(1, 200_000),
    st.sampled_from([1, 16, 64]), st.integers(1, 64), st.integers(1, 40), st.integers(0, 500),
)  # fmt: skip


@given(*SIZES)
def test_interleaved_requests_that_are_chosen_fit(
    document: int, questions: int, question: int, answer: int, kv_tokens: int, page: int, streams: int, requests: int, all_streams: int
) -> None:
    expected = Expected(document, questions, question, answer, streams=all_streams and max(questions, all_streams))
    if -(-document // page) + -(-(question + answer) // page) > kv_tokens // page:
        with pytest.raises(ValueError, match="pages"):
            choose_interleaved(expected, kv_tokens, page, streams, requests)
        return
    found = choose_interleaved(expected, kv_tokens, page, streams, requests)
    count = found.rows // found.streams
    assert found.layout == "interleaved"
    assert 1 <= found.streams <= min(streams, questions)
    assert 1 <= count <= requests
    used = found.documents * -(-document // page) + count * -(-(found.streams * (question + answer)) // page)
    assert used <= kv_tokens // page


def test_a_run_of_few_questions_makes_room_for_no_more() -> None:
    config = EngineConfig()
    assert bounded(config, Expected(1000, 8, 12, 32, most_questions=20, streams=40)).max_rows == 40
    assert bounded(config, Expected(1000, 1, 12, 32, most_questions=1, streams=3)).max_rows == 16
    assert bounded(config, Expected(1000, 8, 12, 32, most_questions=900, streams=90_000)) == config
    assert bounded(config, Expected(1000, 8, 12, 32)) == config
    assert bounded(config, None) is config


def test_what_the_user_set_and_deterministic_shapes_stay() -> None:
    expected = Expected(1000, 2, 12, 32, most_questions=3, streams=40)
    for config in (EngineConfig(streams=64), EngineConfig(layout="interleaved", streams=64), EngineConfig(deterministic=True)):
        assert bounded(config, expected) is config
    assert chosen(EngineConfig(streams=64), EngineConfig(streams=64, kv_tokens=4096), expected) is None


def test_an_unusual_document_keeps_its_rows() -> None:
    """The usual document has 2 questions, one has 500: nothing keeps its streams from running together."""
    config = bounded(EngineConfig(), Expected(1000, 2, 12, 32, most_questions=500, streams=700))
    assert config.limits.streams == config.limits.max_rows == 256


def test_p_is_the_published_default_or_what_a_document_asks() -> None:
    config = EngineConfig(layout="interleaved")
    assert bounded(config, Expected(1000, 50, 12, 32, most_questions=64, streams=6400)).limits.streams == 32
    few = bounded(config, Expected(1000, 4, 12, 32, most_questions=6, streams=6000))
    assert (few.limits.streams, few.limits.requests) == (6, 42)
    resolved = few.resolve(device="cpu", dtype="float32", kv_tokens=1_000_000)
    found = chosen(config, resolved, Expected(1000, 4, 12, 32, most_questions=6, streams=6000))
    assert found is not None
    assert (found.layout, found.streams, found.rows, found.documents) == ("interleaved", 4, 168, 42)
    assert "P = 4, not calibrated (the published default is 32" in found.reason


def test_a_choice_is_of_what_is_there() -> None:
    found = choose(Expected(100, 1, 4, 8, most_questions=1, streams=4), kv_tokens=1_000_000, page_size=16, max_rows=256)
    assert (found.rows, found.streams, found.documents) == (4, 1, 4)


def test_a_usual_document_without_room_decides_nothing() -> None:
    config = EngineConfig(kv_tokens=512, page_size=16)
    found = chosen(config, config.resolve(device="cpu", dtype="float32", kv_tokens=512), Expected(1000, 4, 12, 32))
    assert found is not None
    assert (found.rows, found.streams) == (256, 256)
    assert "all 256 rows: a document of 1000 tokens with one answer takes 66 pages of 32" in found.reason
