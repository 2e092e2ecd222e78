"""The types an answer can have: what is legal, its grammar, and how a raw text becomes a value.

One frozen model a type, told apart by `kind`; `answer_type` reads them from the keys of a question. A type knows texts and values: it
knows neither tokens nor models. `grammar` is EBNF, None for free text. `parse` raises ValueError for a text that is no legal answer, which
makes it usable on answers that were not constrained, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date
from decimal import Decimal, InvalidOperation
from functools import cached_property
from typing import Annotated, Any, Literal, get_args

import jsonschema
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

from askmany.engine.answer_values import as_texts, distinct_labels, label_of, load_json, within
from askmany.engine.errors import ConfigError
from askmany.engine.grammar_json import compact, json_grammar
from askmany.engine.grammar_numbers import DECIMALS, LARGEST, decimal, iso_date, whole
from askmany.engine.grammar_pieces import Piece, either, grammar, literal, sequence
from askmany.engine.grammar_regex import compiled, regex

MAX_DERIVED_TOKENS = 512  # the most answer tokens that a type asks for by itself
MAX_LABELS = 1000
MAX_SUBSET_LABELS = 64

Value = bool | int | float | str | list[Any] | dict[str, Any] | None
AnswerMethod = Literal["argmax", "decode"]


class _Type(BaseModel):
    """What all types share. `absent` is a text that stands for "the document does not say"; its value is None."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    absent: Annotated[str, Field(min_length=1)] | None = None

    @cached_property
    def _root(self) -> Piece | None:
        piece = self._piece()
        return either(piece, literal(self.absent)) if piece and self.absent is not None else piece

    @property
    def grammar(self) -> str | None:
        """EBNF of the legal texts; None where every text is legal. ValueError when there is none that can be expressed."""
        return None if self._root is None else grammar(self._root)

    @property
    def longest(self) -> int | None:
        """Bytes of the longest legal text, and so an upper bound of its tokens; None when there is none."""
        return None if self._root is None else self._root.longest

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels whose distribution is asked for; empty for types that are decoded."""
        return ()

    @property
    def max_new_tokens(self) -> int | None:
        """The answer budget that this type asks for when nobody set one: a token a byte and one for a blank in front; None leaves it to
        the run."""
        return None if self.longest is None else min(self.longest + 1, MAX_DERIVED_TOKENS)

    def parse(self, text: str) -> Value:
        """The value of a raw answer. ValueError says why it is none."""
        stripped = text.strip()
        if self.absent is not None and stripped == self.absent:
            return None
        return self._value(stripped)

    def _piece(self) -> Piece | None:
        raise ValueError("no such type")

    def _value(self, text: str) -> Value:
        return text


class TextType(_Type):
    """Free text."""

    kind: Literal["text"] = "text"

    def _piece(self) -> Piece | None:
        return None


class _Labelled(_Type):
    """Types with a fixed list of labels that exclude each other.

    `answer: argmax` scores every label and takes the likeliest; `decode` writes the answer token by token under the grammar and gives no
    distribution. `normalise: length` compares labels by their log-probability per token, for labels of very different length.
    """

    answer: AnswerMethod = "argmax"
    normalise: Literal["none", "length"] = "none"

    @property
    def labels(self) -> tuple[str, ...]:
        return self._labels() if self.answer == "argmax" else ()

    @property
    def max_new_tokens(self) -> int | None:
        return 1 if self.answer == "argmax" else super().max_new_tokens

    def _labels(self) -> tuple[str, ...]:
        return ()

    def _piece(self) -> Piece:
        return either(*(literal(label) for label in self._labels()))


class ChoiceType(_Labelled):
    """One of the options."""

    kind: Literal["choice"] = "choice"
    options: tuple[str, ...]

    @field_validator("options", mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        return as_texts(value)

    @field_validator("options")
    @classmethod
    def _distinct(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return distinct_labels(value, 2, MAX_LABELS)

    def _labels(self) -> tuple[str, ...]:
        return self.options if self.absent is None or self.absent in self.options else (*self.options, self.absent)

    def _value(self, text: str) -> Value:
        return label_of(text, self.options)


class BoolType(_Labelled):
    """True or false, written as `options` (the first is true)."""

    kind: Literal["bool"] = "bool"
    options: tuple[str, str] = ("yes", "no")

    @field_validator("options", mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        return as_texts(value)

    @field_validator("options")
    @classmethod
    def _distinct(cls, value: tuple[str, str]) -> tuple[str, str]:
        distinct_labels(value, 2, 2)
        return value

    def _labels(self) -> tuple[str, ...]:
        return self.options if self.absent is None else (*self.options, self.absent)

    def _value(self, text: str) -> Value:
        return label_of(text, self.options) == self.options[0]


class MultiChoiceType(_Type):
    """Some of the options, each once and in their order, written as a JSON list."""

    kind: Literal["multi_choice"] = "multi_choice"
    options: tuple[str, ...]
    min_items: Annotated[int, Field(ge=0)] = 0
    max_items: Annotated[int, Field(ge=1)] | None = None

    @field_validator("options", mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        return as_texts(value)

    @model_validator(mode="after")
    def _possible(self) -> MultiChoiceType:
        distinct_labels(self.options, 1, MAX_SUBSET_LABELS)
        if self.min_items > self._most:
            raise ValueError(f"min_items {self.min_items} is above max_items or the number of options, {self._most}")
        return self

    @property
    def _most(self) -> int:
        return len(self.options) if self.max_items is None else min(self.max_items, len(self.options))

    @property
    def grammar(self) -> str | None:
        root = Piece('"[" any0x0 "]"', None)
        root = either(root, literal(self.absent)) if self.absent is not None else root
        return grammar(root, ((name, Piece(text, None)) for name, text in self._rules()))

    @property
    def longest(self) -> int | None:
        written = sorted((len(compact(option).encode()) for option in self.options), reverse=True)[: self._most]
        return max(2 + sum(written) + max(0, len(written) - 1), len((self.absent or "").encode()))

    def _piece(self) -> Piece | None:
        return None

    def _rules(self) -> list[tuple[str, str]]:
        """`anyIxK`: what may follow when option I is the next that may come and K are written."""
        rules = []
        count = len(self.options)
        for index, written in ((i, k) for i in range(count + 1) for k in range(min(i, self._most) + 1)):
            parts = ['""'] if written >= self.min_items else []
            for later in range(index, count) if written < self._most else ():
                if written + (count - later) >= self.min_items:
                    comma = '","' if written else ""
                    parts.append(f"{comma} {literal(compact(self.options[later])).text} any{later + 1}x{written + 1}")
            if parts:
                rules.append((f"any{index}x{written}", " | ".join(parts)))
        return rules

    def _value(self, text: str) -> Value:
        found = load_json(text)
        if not isinstance(found, list):
            raise ValueError(f"{text!r} is no JSON list")
        chosen = [label_of(str(item), self.options) for item in found]
        if len(set(chosen)) < len(chosen):
            raise ValueError(f"{text!r} names an option twice")
        if not self.min_items <= len(chosen) <= self._most:
            raise ValueError(f"{text!r} names {len(chosen)} options, not {self.min_items} to {self._most}")
        return sorted(chosen, key=self.options.index)


class IntType(_Type):
    """A whole number; without bounds, one of at most 15 digits."""

    kind: Literal["int"] = "int"
    minimum: Annotated[int, Field(ge=-LARGEST, le=LARGEST)] = -LARGEST
    maximum: Annotated[int, Field(ge=-LARGEST, le=LARGEST)] = LARGEST

    def _piece(self) -> Piece | None:
        return whole(self.minimum, self.maximum)

    def _value(self, text: str) -> Value:
        if not re.fullmatch(r"-?\d+", text, re.ASCII):
            raise ValueError(f"{text!r} is no whole number")
        return within(int(text), self.minimum, self.maximum)


class NumberType(_Type):
    """A decimal number with at most `decimals` digits behind the point."""

    kind: Literal["number"] = "number"
    minimum: Annotated[Decimal, Field(ge=-LARGEST, le=LARGEST)] = Decimal(-LARGEST)
    maximum: Annotated[Decimal, Field(ge=-LARGEST, le=LARGEST)] = Decimal(LARGEST)
    decimals: Annotated[int, Field(ge=0, le=15)] = DECIMALS

    @field_validator("minimum", "maximum", mode="before")
    @classmethod
    def _exact(cls, value: Any) -> Any:
        return str(value) if isinstance(value, float) else value

    def _piece(self) -> Piece | None:
        return decimal(self.minimum, self.maximum, self.decimals)

    def _value(self, text: str) -> Value:
        try:
            number = Decimal(text)
        except InvalidOperation:
            raise ValueError(f"{text!r} is no number") from None
        if not number.is_finite():
            raise ValueError(f"{text!r} is no number")
        return float(within(number, self.minimum, self.maximum))


class DateType(_Type):
    """A day as YYYY-MM-DD; its value is that text."""

    kind: Literal["date"] = "date"
    minimum: date = date(1000, 1, 1)
    maximum: date = date(2999, 12, 31)

    def _piece(self) -> Piece | None:
        return iso_date(self.minimum, self.maximum)

    def _value(self, text: str) -> Value:
        if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", text, re.ASCII):
            raise ValueError(f"{text!r} is no day written YYYY-MM-DD")
        return within(date.fromisoformat(text), self.minimum, self.maximum).isoformat()


class JsonType(_Type):
    """A JSON value that a schema accepts; compact, with strings and arrays of bounded length."""

    model_config = ConfigDict(frozen=True, extra="forbid", serialize_by_alias=True)

    kind: Literal["json"] = "json"
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]

    @cached_property
    def _translated(self) -> tuple[str, int | None]:
        try:
            jsonschema.Draft202012Validator.check_schema(self.json_schema)
        except jsonschema.SchemaError as error:
            raise ValueError(f"{error.json_path}: {error.message}") from error
        return json_grammar(self.json_schema)

    @property
    def grammar(self) -> str | None:
        text = self._translated[0]
        if self.absent is None:
            return text
        return text.replace("root ::= ", f"root ::= {literal(self.absent).text} | ", 1)

    @property
    def longest(self) -> int | None:
        return self._translated[1]

    def _value(self, text: str) -> Value:
        value = load_json(text)
        validator = jsonschema.Draft202012Validator(self.json_schema, format_checker=jsonschema.FormatChecker(("date",)))
        error = jsonschema.exceptions.best_match(validator.iter_errors(value))
        if error is not None:
            raise ValueError(f"{error.json_path}: {error.message}")
        return value  # type: ignore[no-any-return]


class RegexType(_Type):
    """A text that matches a regular expression from end to end."""

    kind: Literal["regex"] = "regex"
    pattern: str

    def parse(self, text: str) -> Value:
        """As it stands, since white space may be part of the answer; but for a blank in front that the pattern does not admit."""
        matches = compiled(self.pattern).fullmatch
        text = text if matches(text) or text == self.absent else text.removeprefix(" ")
        if self.absent is not None and text == self.absent:
            return None
        if not matches(text):
            raise ValueError(f"{text!r} does not match {self.pattern!r}")
        return text

    def _piece(self) -> Piece | None:
        return sequence(regex(self.pattern))


AnswerType = TextType | ChoiceType | MultiChoiceType | BoolType | IntType | NumberType | DateType | JsonType | RegexType
KINDS: dict[str, type[_Type]] = {get_args(cls.model_fields["kind"].annotation)[0]: cls for cls in get_args(AnswerType)}
TYPE_KEYS = tuple(
    dict.fromkeys(field.alias or name for cls in KINDS.values() for name, field in cls.model_fields.items() if name != "kind")
)
_ADAPTER: TypeAdapter[AnswerType] = TypeAdapter(Annotated[AnswerType, Field(discriminator="kind")])
TEXT = TextType()


def answer_type(values: Mapping[str, Any], place: str) -> AnswerType:
    """The type of a question: the key `type` (a kind, or an object with `kind` and its settings) with the settings beside it.

    ConfigError names `place` (the question), the key and the value; also when the type's grammar cannot be made.
    """
    given = values.get("type", "text")
    own = dict(given) if isinstance(given, Mapping) else {"kind": given}
    beside = {key: values[key] for key in TYPE_KEYS if key in values}
    settings = {**beside, **own}
    kind = settings.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(f"{place}: type {kind!r} is none of {', '.join(KINDS)}")
    try:
        found = _ADAPTER.validate_python(settings)
        _ = found.grammar, found.longest
    except ValidationError as error:
        raise ConfigError(f"{place}: {_first(error, kind)}") from error
    except (ValueError, ArithmeticError) as error:
        raise ConfigError(f"{place}: type {kind}: {error}") from error
    return found


def _first(error: ValidationError, kind: str) -> str:
    details = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in details["loc"] if part != kind)
    reason = details["msg"].removeprefix("Value error, ")
    if details["type"] == "extra_forbidden":
        return f"type {kind}: {key}: a question of this type has no such setting"
    given = "" if details["type"] == "missing" else f", not {details['input']!r}"
    return f"type {kind}: {key + ': ' if key else ''}{reason[:1].lower()}{reason[1:]}{given if key else ''}"
