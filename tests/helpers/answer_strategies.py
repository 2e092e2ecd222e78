"""Random answer types for hypothesis: regular expressions, JSON schemas, choices, numbers and dates."""

from __future__ import annotations

from datetime import date
from typing import Any

from hypothesis import strategies as st

from askmany.engine.answer_types import AnswerType, answer_type
from askmany.engine.errors import ConfigError

WORDS = st.text(st.sampled_from('abcXYZ 019-_.,:;!?"\\/[]{}()+*^$|&é日'), min_size=1, max_size=12)
LABELS = WORDS.map(str.strip).filter(bool)
SMALL = st.integers(-2000, 2000)


def choices() -> st.SearchStrategy[dict[str, Any]]:
    """Choices and subsets of random labels."""
    labels = st.lists(LABELS, min_size=2, max_size=9, unique=True)
    one = st.builds(lambda options: {"type": "choice", "options": options, "answer": "decode"}, labels)
    some = st.builds(lambda options: {"type": "multi_choice", "options": options}, labels)
    return st.one_of(one, some)


def numbers() -> st.SearchStrategy[dict[str, Any]]:
    """Integers, decimals and dates between random bounds."""
    pairs = st.tuples(SMALL, SMALL).map(sorted)
    whole = pairs.map(lambda b: {"type": "int", "minimum": b[0], "maximum": b[1], "absent": "not stated"})
    decimal = st.tuples(pairs, st.integers(1, 4)).map(
        lambda b: {"type": "number", "minimum": b[0][0] / 64, "maximum": b[0][1] / 64 + 1, "decimals": b[1]}
    )
    days = st.tuples(*[st.dates(date(1000, 1, 1), date(2999, 12, 31))] * 2).map(sorted)
    return st.one_of(whole, decimal, days.map(lambda b: {"type": "date", "minimum": b[0], "maximum": b[1]}))


def patterns() -> st.SearchStrategy[str]:
    """Regular expressions of the kind people write."""
    single = st.sampled_from(["a", "b", "1", r"\d", r"\w", r"\s", ".", "[a-f]", "[^x]", r"\.", r"\[", '"', "é", "[日é]", r"[\d-]", r"\\"])
    repeats = st.sampled_from(["", "", "", "?", "*", "+", "{2}", "{1,3}", "{0,2}", "{2,}", "+?"])

    def grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        group = st.lists(inner, min_size=1, max_size=3).map("|".join)
        return st.one_of(
            st.lists(inner, min_size=1, max_size=4).map("".join),
            st.builds(lambda body, count: f"({body}){count}", group, repeats),
            st.builds(lambda body: f"(?:{body})", group),
        )

    return st.recursive(st.builds(str.__add__, single, repeats), grown, max_leaves=6)


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """JSON schemas of the keywords that are enforced."""
    text = st.tuples(st.integers(0, 3), st.integers(0, 9)).map(lambda b: {"type": "string", "minLength": b[0], "maxLength": b[0] + b[1]})
    bounds = st.tuples(SMALL, SMALL).map(sorted)
    leaves = st.one_of(
        text,
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "string"}, {"type": "number"}, {"type": "integer"}]),
        st.just({"type": "string", "format": "date"}),
        patterns().map(lambda pattern: {"type": "string", "pattern": f"^{pattern}$"}),
        bounds.map(lambda b: {"type": "integer", "minimum": b[0] + 0.5, "exclusiveMaximum": b[1] + 2}),
        bounds.map(lambda b: {"type": "number", "exclusiveMinimum": b[0] / 8, "maximum": b[1] / 8 + 1}),
        st.lists(st.one_of(WORDS, SMALL, st.booleans(), st.none()), min_size=1, max_size=4).map(lambda values: {"enum": values}),
        WORDS.map(lambda value: {"const": {"only": value}}),
        st.just({"type": ["string", "null"], "maxLength": 4}),
    )

    def grown(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
        keys = st.lists(WORDS, min_size=0, max_size=4, unique=True)
        return st.one_of(
            st.builds(_object, keys, st.lists(inner, min_size=4, max_size=4), st.lists(st.booleans(), min_size=4, max_size=4)),
            st.builds(lambda items, least, more: _array(items, least, least + more), inner, st.integers(0, 2), st.integers(0, 2)),
            st.lists(inner, min_size=1, max_size=2).map(lambda items: {"type": "array", "prefixItems": items}),
            st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
        )

    return st.recursive(leaves, grown, max_leaves=6)


def types() -> st.SearchStrategy[AnswerType]:
    """Types of every kind whose answers are decoded under a grammar."""
    written = st.one_of(
        choices(),
        numbers(),
        patterns().map(lambda p: {"type": "regex", "pattern": p}),
        schemas().map(lambda s: {"type": "json", "schema": s}),
    )
    return written.map(_made).filter(lambda kind: kind is not None)  # type: ignore[return-value]


def _made(values: dict[str, Any]) -> AnswerType | None:
    try:
        return answer_type(values, "question")
    except ConfigError as error:
        if "control characters" in str(error):  # a pattern of blanks alone inside a JSON string
            return None
        raise


def _object(keys: list[str], schemas: list[dict[str, Any]], required: list[bool]) -> dict[str, Any]:
    needed = [key for key, is_needed in zip(keys, required, strict=False) if is_needed]
    return {"type": "object", "properties": dict(zip(keys, schemas, strict=False)), "required": needed}


def _array(items: dict[str, Any], least: int, most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}
