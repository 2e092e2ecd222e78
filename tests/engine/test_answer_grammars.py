"""Grammars of numbers, dates, patterns and schemas against what they are to mean, text by text."""

from __future__ import annotations

import json
import re
from datetime import date, timedelta
from decimal import Decimal

import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from askmany.engine.answer_types import answer_type
from askmany.engine.grammar_json import json_grammar
from askmany.engine.grammar_numbers import decimal, iso_date, whole
from askmany.engine.grammar_pieces import Piece, characters, complement, grammar, literal, merged, repeated
from askmany.engine.grammar_regex import regex
from tests.helpers.answer_strategies import patterns

PLAIN = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo([chr(i) for i in range(1, 128)], stop_token_ids=[0]))


def accepts(root: Piece | str, text: str) -> bool:
    """Whether the grammar admits exactly this text."""
    source = root if isinstance(root, str) else grammar(root)
    matcher = xgrammar.GrammarMatcher(PLAIN.compile_grammar(source))
    return bool(matcher.accept_string(text)) and bool(matcher.is_completed())


@settings(max_examples=60, deadline=None)
@given(st.integers(-1200, 1200), st.integers(0, 1500), st.data())
def test_whole_numbers_are_exact_at_their_bounds(low: int, width: int, data: st.DataObject) -> None:
    high = low + width
    piece = whole(low, high)
    near = [low - 1, low, low + 1, high - 1, high, high + 1, -high, 0, data.draw(st.integers(-3000, 3000))]
    for value in near:
        assert accepts(piece, str(value)) == (low <= value <= high)
    for text in ("-0", "+1", "01", "", "1 ", "1.0"):
        assert not accepts(piece, text)
    assert piece.longest == max(len(str(low)), len(str(high)))


@settings(max_examples=60, deadline=None)
@given(st.integers(-30000, 30000), st.integers(10, 30000), st.data())
def test_decimals_are_exact_at_their_bounds(low: int, width: int, data: st.DataObject) -> None:
    bounds = Decimal(low) / 1000, Decimal(low + width) / 1000
    piece = decimal(*bounds, 2)
    values = [low // 10 + d for d in (-1, 0, 1, 2)] + [(low + width) // 10 + d for d in (-1, 0, 1, 2)]
    values.append(data.draw(st.integers(-7000, 7000)))
    for value in (Decimal(v) / 100 for v in values):
        for text in {f"{value:.2f}", f"{value:.1f}", f"{value:.2f}".rstrip("0").rstrip(".")}:
            if "E" in text or not text or re.match(r"-0(\.0*)?$", text):
                continue
            assert accepts(piece, text) == (bounds[0] <= Decimal(text) <= bounds[1]), text
    for text in (".5", "1.", "1.234", "1e3", "-0", "-0.0", "00.5"):
        assert not accepts(piece, text)


@settings(max_examples=40, deadline=None)
@given(st.dates(date(1000, 1, 1), date(2400, 1, 1)), st.integers(0, 90000), st.integers(-40, 40))
def test_dates_are_the_days_between_their_bounds(first: date, days: int, off: int) -> None:
    last = first + timedelta(days)
    piece = iso_date(first, last)
    for day in (first + timedelta(off), last + timedelta(off), first + timedelta(days // 2)):
        assert accepts(piece, day.isoformat()) == (first <= day <= last)
    for text in ("1900-02-29", "2023-02-29", "2023-13-01", "2023-04-31", "2023-00-10", "2023-01-00", "2023-1-1"):
        assert not accepts(piece, text)
    assert piece.longest == 10


def test_leap_days_of_a_long_range() -> None:
    piece = iso_date(date(1, 1, 1), date(9999, 12, 31))
    for year in (4, 1600, 1900, 1996, 2000, 2100, 2023, 2024, 9996):
        leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
        assert accepts(piece, f"{year:04d}-02-29") == leap


@settings(max_examples=150, deadline=None)
@given(patterns(), st.data())
def test_patterns_mean_what_python_means(pattern: str, data: st.DataObject) -> None:
    piece = regex(pattern)
    compiled = re.compile(pattern, re.ASCII)
    for text in data.draw(st.lists(st.one_of(st.from_regex(compiled, fullmatch=True), st.text('ab1x.["é日- \\', max_size=6)), max_size=4)):
        if "\0" not in text and not any(0xD800 <= ord(c) <= 0xDFFF for c in text):
            assert accepts(piece, text) == bool(compiled.fullmatch(text)), (pattern, text)
            assert piece.longest is None or not compiled.fullmatch(text) or len(text.encode()) <= piece.longest


@pytest.mark.parametrize("text", ['a"b\\c', "é", "日本語", "😀", "a\nb\tc", "[x]^-", "{2}", "root ::= x # no"])
def test_literals_and_classes_hold_any_character(text: str) -> None:
    assert accepts(literal(text), text)
    assert not accepts(literal(text), text + "a")
    assert accepts(repeated(characters((ord(c), ord(c)) for c in text), 1, None), text)


def test_code_points_are_merged_and_complemented() -> None:
    assert merged([(5, 9), (1, 4), (20, 30), (8, 12)]) == ((1, 12), (20, 30))
    assert merged([(0xD7F0, 0xE00F)]) == ((0xD7F0, 0xD7FF), (0xE000, 0xE00F))
    assert complement(complement([(97, 122)])) == ((97, 122),)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 4},
        "tags": {"type": "array", "items": {"enum": ["a", 'b"', None]}, "maxItems": 2},
        "when": {"type": "string", "format": "date"},
        "pair": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}]},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["name", "next"],
}


@pytest.mark.parametrize(
    ("text", "legal"),
    [
        ('{"name":"Ada","next":null}', True),
        ('{"name":"A\\"\\\\é","tags":["b\\"",null],"when":"2024-02-29","pair":[1,true],"next":{"name":"x","next":null}}', True),
        ('{"name":"","next":null}', False),
        ('{"name":"Adaaa","next":null}', False),
        ('{"name":"A"}', False),
        ('{"next":null,"name":"A"}', False),
        ('{"name":"A","tags":["a","a","a"],"next":null}', False),
        ('{"name":"A","when":"2023-02-29","next":null}', False),
        ('{"name":"A","pair":[1],"next":null}', False),
        ('{"name":"A", "next":null}', False),
        ('{"name":"A","next":null,}', False),
        ('{"name":"a\tb","next":null}', False),
        ('{"name":"A","other":1,"next":null}', False),
    ],
)
def test_a_schema_admits_compact_json_that_it_accepts(text: str, legal: bool) -> None:
    source, longest = json_grammar(SCHEMA)
    assert longest is None, "it contains itself"
    assert accepts(source, text) == legal
    if legal:
        assert answer_type({"type": "json", "schema": SCHEMA}, "q").parse(text) == json.loads(text)


@pytest.mark.parametrize(
    ("least", "most", "legal", "illegal"),
    [
        (0, None, ["[]", '["a"]', '["a","b c","d"]'], ['["b c","a"]', '["a","a"]', '["a",]', '[,"a"]']),
        (1, 2, ['["a"]', '["b c","d"]'], ["[]", '["a","b c","d"]']),
        (3, None, ['["a","b c","d"]'], ['["a","d"]', "[]"]),
    ],
)
def test_subsets_name_each_option_once_and_in_order(least: int, most: int | None, legal: list[str], illegal: list[str]) -> None:
    kind = answer_type({"type": "multi_choice", "options": ["a", "b c", "d"], "min_items": least, "max_items": most}, "q")
    assert kind.grammar is not None
    assert all(accepts(kind.grammar, text) for text in legal)
    assert not any(accepts(kind.grammar, text) for text in illegal)
    assert kind.longest is not None
    assert max(len(text) for text in legal) <= kind.longest


def test_strings_that_may_be_long_hold_no_escapes_and_count_one_class() -> None:
    """One negated class with its bounds between the quotes is the form that XGrammar masks in microseconds."""
    source, _ = json_grammar({"type": "string"})
    assert r'"\u0022" ([^\u0000-\u001f\u0022\u005c\u007f-\u009f\ud800-\udfff]){0,200} "\u0022"' in source
    short, _ = json_grammar({"type": "string", "maxLength": 8})
    for text in ('""', "\"a, 'b': é日😀\"", '"' + "x" * 200 + '"'):
        assert accepts(source, text), text
    for text in ('"a\\"b"', '"\\\\"', '"\n"', '"\x85"', '"' + "x" * 201 + '"', '"a'):
        assert not accepts(source, text), text
    assert accepts(short, '"a\\"b"')
    assert not accepts(short, '"123456789"')


@pytest.mark.parametrize(
    "intervals", [((0x41, 0x10FFFF),), ((0, 0x40), (0x60, 0x10FFFF)), ((0, 0x10FFFF),), ((0x30, 0x39), (0x10FFFF, 0x10FFFF))]
)
def test_a_class_up_to_the_last_character_admits_the_same(intervals: tuple[tuple[int, int], ...]) -> None:
    piece = characters(intervals)
    for code in (0x2F, 0x30, 0x39, 0x40, 0x41, 0x5F, 0x60, 0xFF, 0xD7FF, 0xE000, 0x10FFFE, 0x10FFFF):
        assert accepts(piece, chr(code)) == any(low <= code <= high for low, high in intervals), hex(code)
