"""Answer types: what is refused, what is legal, and what a text is worth."""

from __future__ import annotations

import json
import math
from datetime import date
from decimal import Decimal
from typing import Any

import pytest

from askmany.engine.answer_types import MAX_DERIVED_TOKENS, TEXT, AnswerType, answer_type
from askmany.engine.errors import ConfigError

PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}}, "required": ["name"]}


def made(**values: Any) -> AnswerType:
    return answer_type(values, "q7")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"type": "colour"}, "type 'colour' is none of text, choice"),
        ({"type": 3}, "type 3 is none of"),
        ({"type": "choice"}, "options: field required"),
        ({"type": "choice", "options": ["a"]}, "1 options, there must be 2"),
        ({"type": "choice", "options": ["a", "a"]}, "option 'a' is given twice"),
        ({"type": "choice", "options": ["a", " b"]}, "begins or ends with white space"),
        ({"type": "choice", "options": ["a", ""]}, "is empty"),
        ({"type": "choice", "options": [True, False]}, "read as a truth value; put it in quotes"),
        ({"type": "bool", "options": ["a", "b", "c"]}, "options"),
        ({"type": "int", "minimum": 5, "maximum": 4}, "no whole number from 5 to 4"),
        ({"type": "int", "options": ["a", "b"]}, "options: a question of this type has no such setting"),
        ({"options": ["a", "b"]}, "type text: options: a question of this type has no such setting"),
        ({"type": "number", "minimum": 0.1, "maximum": 0.2, "decimals": 0}, "no number with 0 decimals"),
        ({"type": "date", "minimum": "2020-02-30"}, "minimum"),
        ({"type": "date", "minimum": "2020-02-02", "maximum": "2020-02-01"}, "no day from"),
        ({"type": "multi_choice", "options": ["a", "b"], "min_items": 3}, "min_items 3 is above"),
        ({"type": "regex", "pattern": "["}, "is no regular expression"),
        ({"type": "regex", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "regex", "pattern": r"(a)\1"}, "a back reference"),
        ({"type": "regex", "pattern": r"a\bb"}, "inside the pattern"),
        ({"type": "regex", "pattern": "(?i)a"}, "flags"),
        ({"type": "json"}, "schema: field required"),
        ({"type": "json", "schema": {"type": "thing"}}, "'thing' is not valid"),
        ({"type": "json", "schema": {}}, "a type is needed"),
        ({"type": "json", "schema": {"type": "array"}}, "items is needed"),
        ({"type": "json", "schema": {"type": "string", "not": {"const": "a"}}}, "not cannot be enforced"),
        ({"type": "json", "schema": {"type": "array", "items": {"type": "null"}, "uniqueItems": True}}, "uniqueItems cannot be enforced"),
        ({"type": "json", "schema": {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 3}}}}, r"\$.a: multipleOf"),
        ({"type": "json", "schema": {"type": "object", "properties": {}, "required": ["a"]}}, "required names 'a'"),
        ({"type": "json", "schema": {"type": "object", "additionalProperties": True}}, "additionalProperties must be false"),
        ({"type": "json", "schema": {"$ref": "#/$defs/a"}}, "leads nowhere"),
        ({"type": "json", "schema": {"$ref": "http://a/b"}}, "leads out of the schema"),
        ({"type": "json", "schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "leads to itself"),
        ({"type": "json", "schema": {"type": "string", "pattern": "(?<=a)"}}, "look-around"),
        ({"type": "json", "schema": {"type": "string", "format": "email"}}, "format 'email'"),
        ({"type": "json", "schema": {"type": "string", "minLength": 4, "maxLength": 3}}, "minLength 4 is above"),
    ],
)
def test_a_type_that_cannot_be_enforced_is_refused_naming_the_question(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        made(**values)
    assert str(refused.value).startswith("q7: ")
    assert "\n" not in str(refused.value)


def test_a_question_without_a_type_is_free_text() -> None:
    assert made() == TEXT
    assert TEXT.grammar is None
    assert TEXT.max_new_tokens is None
    assert TEXT.parse(" It is.\n") == "It is."


def test_settings_stand_beside_the_type_or_inside_it() -> None:
    assert made(type="int", minimum=3) == made(type={"kind": "int", "minimum": 3})


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (made(type="choice", options=["Yes", "No"]), "Yes", "Yes"),
        (made(type="choice", options=["Yes", "No"]), " yes.\n", "Yes"),
        (made(type="choice", options=["A", "a", "b"]), "a", "a"),
        (made(type="choice", options=[1, 2.5]), "2.5", "2.5"),
        (made(type="bool"), "yes", True),
        (made(type="bool", options=["true", "false"]), "False", False),
        (made(type="bool", absent="not stated"), "not stated", None),
        (made(type="multi_choice", options=["a", "b", "c"]), '["a","c"]', ["a", "c"]),
        (made(type="multi_choice", options=["a", "b", "c"]), '["c", "a"]', ["a", "c"]),
        (made(type="multi_choice", options=["a", "b"]), "[]", []),
        (made(type="int", minimum=-3), "-2", -2),
        (made(type="int", absent="unknown"), "unknown", None),
        (made(type="number"), "1.50", 1.5),
        (made(type="date"), "1973-10-06", "1973-10-06"),
        (made(type="json", schema=PERSON), '{"name":"Ada","age":36}', {"name": "Ada", "age": 36}),
        (made(type="regex", pattern="[A-Z]{2}-[0-9]+"), "AB-12", "AB-12"),
        (made(type="regex", pattern="[A-Z]{2}"), " AB", "AB"),
        (made(type="regex", pattern=" ?[A-Z]{2}"), " AB", " AB"),
    ],
)
def test_a_legal_text_has_its_value(kind: AnswerType, text: str, value: Any) -> None:
    assert kind.parse(text) == value


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (made(type="choice", options=["Yes", "No"]), "Maybe"),
        (made(type="choice", options=["A", "a", "b"]), "B C"),
        (made(type="bool"), "true"),
        (made(type="multi_choice", options=["a", "b"]), '["a","a"]'),
        (made(type="multi_choice", options=["a", "b"], min_items=1), "[]"),
        (made(type="multi_choice", options=["a", "b"]), '"a"'),
        (made(type="int", minimum=-3), "-4"),
        (made(type="int"), "1.0"),
        (made(type="int"), "٣"),
        (made(type="number"), "nan"),
        (made(type="number", maximum=1), "1.01"),
        (made(type="date"), "1973-02-29"),
        (made(type="date", maximum="1999-12-31"), "2000-01-01"),
        (made(type="date"), "19731006"),
        (made(type="json", schema=PERSON), '{"age":3}'),
        (made(type="json", schema=PERSON), '{"name":NaN}'),
        (made(type="json", schema=PERSON), '{"name":"a"'),
        (made(type="json", schema=PERSON), "[" * 100000),
        (made(type="regex", pattern="[A-Z]{2}"), "AB "),
        (made(type="regex", pattern="[A-Z]{2}"), "  AB"),
        (made(type="regex", pattern=r"\d"), "٣"),
    ],
)
def test_any_other_text_has_none(kind: AnswerType, text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        kind.parse(text)


@pytest.mark.parametrize(
    ("kind", "budget"),
    [
        (made(type="choice", options=["a", "long one"]), 1),
        (made(type="choice", options=["a", "long one"], answer="decode"), 9),
        (made(type="bool", options=["はい", "いいえ"], answer="decode"), 10),
        (made(type="int", minimum=-99, maximum=5), 4),
        (made(type="int", minimum=0, maximum=9, absent="not stated"), 11),
        (made(type="number", minimum=0, maximum=10, decimals=2), 6),
        (made(type="date"), 11),
        (made(type="multi_choice", options=["a", "bb", "c"], max_items=2), len('["bb","a"]') + 1),
        (made(type="json", schema={"enum": ["a", 17]}), 4),
        (made(type="json", schema={"type": "string", "maxLength": 3}), 2 + 3 * 4 + 1),
        (made(type="json", schema=PERSON), MAX_DERIVED_TOKENS),
        (made(type="regex", pattern="a{2,5}|日"), 6),
        (made(type="regex", pattern="a+"), None),
        (made(type="json", schema={"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}), None),
    ],
)
def test_the_answer_budget_is_the_longest_legal_text_and_a_blank(kind: AnswerType, budget: int | None) -> None:
    assert kind.max_new_tokens == budget


def test_only_argmax_questions_have_labels() -> None:
    assert made(type="bool").labels == ("yes", "no")
    assert made(type="bool", absent="not stated").labels == ("yes", "no", "not stated")
    assert made(type="choice", options=["a", "b"], answer="decode").labels == ()
    assert made(type="multi_choice", options=["a", "b"]).labels == ()


def test_types_survive_being_written_down() -> None:
    kinds = (
        made(type="json", schema=PERSON, absent="-"),
        made(type="number", minimum=Decimal("0.1")),
        made(type="date", minimum=date(1990, 1, 1)),
        made(type="choice", options=["a", "b"], normalise="length"),
    )
    for kind in kinds:
        assert answer_type({"type": json.loads(kind.model_dump_json())}, "q") == kind
    assert math.isclose(0.1, float(kinds[1].minimum))
