"""Odd text: what is repaired is counted, what is not stays as it was."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from askmany.pipeline.text import clean, decode, decode_record, is_blank

UNTOUCHED = ["a\r\nb\rc\n", "nul \x00 inside", "e\u0301 and \u00e9", "שלום 🙂🏽 ﷺ", "\u200bzero width", " leading", "x" * (1 << 20)]


@pytest.mark.parametrize("text", UNTOUCHED, ids=range(len(UNTOUCHED)))
def test_odd_text_stays_as_it_is(text: str) -> None:
    assert clean(text).text == text
    assert clean(text).flags == ()
    assert decode(text.encode()).text == text


def test_lone_surrogates_are_replaced_and_counted() -> None:
    cleaned = clean("a\ud800b\udfffc🙂")
    assert cleaned.text == "a\ufffdb\ufffdc🙂"
    assert cleaned.flags == ("surrogates_replaced:2",)


def test_only_a_leading_byte_order_mark_is_taken_off() -> None:
    assert clean("\ufeffa\ufeffb").text == "a\ufeffb"
    assert decode(b"\xef\xbb\xbfa").text == "a"


@given(st.text(alphabet=st.characters(codec=None)))
def test_cleaned_text_always_encodes(text: str) -> None:
    cleaned = clean(text).text
    assert cleaned.encode().decode() == cleaned
    assert len(cleaned) >= len(text) - 1


def test_other_encodings_are_named() -> None:
    assert decode("café “q”".encode("cp1252")).text == "café “q”"
    assert decode("café".encode("latin-1")).flags == ("encoding:cp1252",)
    assert decode(b"\x81\xe9").flags == ("encoding:latin-1",)
    assert decode(b"\x81\xe9").text == "\x81é"
    assert decode("naïve".encode("utf-16")).text == "naïve"
    assert decode("naïve".encode("utf-16")).flags == ("encoding:utf-16",)
    assert decode(b"\xff\xfea").flags == ("encoding:cp1252",)  # a mark, but no UTF-16 behind it


def test_bad_bytes_of_a_record_are_counted_apart_from_those_it_brought() -> None:
    assert decode_record("fine \ufffd".encode()).flags == ()
    found = decode_record(b"a\xffb \xef\xbf\xbd \xe9c")
    assert found.text == "a\ufffdb \ufffd \ufffdc"
    assert found.flags == ("bytes_replaced:2",)


@pytest.mark.parametrize("text", ["", " ", "\t\r\n", "\u00a0\u3000", "\ufeff", "\u200b \u2060"])
def test_blank(text: str) -> None:
    assert is_blank(text)


@pytest.mark.parametrize("text", ["a", " \x00 ", "\u0301", "."])
def test_not_blank(text: str) -> None:
    assert not is_blank(text)
