"""Rows, residency and P: arithmetic with an injected timer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from askmany.engine.choice import Expected, calibrated_streams, choose


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
