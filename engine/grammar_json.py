"""The grammar of a JSON schema: compact JSON, properties in the order the schema lists them, everything of bounded length.

What the grammar admits, the schema accepts. A keyword that a grammar cannot enforce is refused by name instead of being ignored. A string
without `maxLength`, an array without `maxItems` and a number without bounds get the defaults below; a `$ref` that contains itself has no
longest text. Strings hold any character but control characters; quotes and backslashes are escaped, in strings of a few characters and
those with a pattern alone: others hold none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

from askmany.engine.grammar_numbers import DECIMALS, LARGEST, decimal, iso_date, whole
from askmany.engine.grammar_pieces import (
    Interval,
    Piece,
    characters,
    complement,
    either,
    grammar,
    literal,
    merged,
    optional,
    repeated,
    sequence,
)
from askmany.engine.grammar_regex import regex

MAX_STRING = 200  # characters of a string that has no maxLength
ESCAPING_STRING = 8  # characters of a string that may hold escapes at most: beyond, masks would take hundreds of milliseconds each
MAX_ITEMS = 16  # items of an array that has no maxItems

_CONTROL: tuple[Interval, ...] = ((0, 0x1F), (0x7F, 0x9F))
_ESCAPED: tuple[Interval, ...] = ((ord('"'), ord('"')), (ord("\\"), ord("\\")))
_NOTES = {
    "$comment",
    "$defs",
    "$id",
    "$schema",
    "definitions",
    "default",
    "deprecated",
    "description",
    "examples",
    "readOnly",
    "title",
    "writeOnly",
}
_KEYWORDS = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "boolean": set(),
    "null": set(),
}
_ALONE = ("$ref", "anyOf", "allOf", "const", "enum")


def json_grammar(schema: Mapping[str, Any]) -> tuple[str, int | None]:
    """The grammar of a schema, and the bytes of its longest text (None: unbounded). ValueError names the place and the keyword."""
    translator = _Translator(schema)
    root = translator.piece(schema, "$")
    return grammar(root, translator.rules), root.longest


def string_character(intervals: tuple[Interval, ...]) -> Piece:
    """One character of these, as it stands inside a JSON string."""
    allowed = merged(intervals)
    plain = _without(allowed, (*_CONTROL, *_ESCAPED))
    parts = [characters(plain)] if plain else []
    parts += [literal("\\" + mark) for mark in '"\\' if any(low <= ord(mark) <= high for low, high in allowed)]
    if not parts:
        raise ValueError("only control characters, which are not written into JSON strings")
    return either(*parts)


def compact(value: Any) -> str:
    """A JSON value without white space between its parts."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


class _Translator:
    """Walks a schema; `rules` are the named rules made on the way."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self.rules: list[tuple[str, Piece]] = []
        self._references: dict[str, Piece] = {}
        self._open: dict[str, int] = {}  # references being translated -> containers around them when they began
        self._containers = 0

    def piece(self, schema: Any, at: str) -> Piece:
        if not isinstance(schema, Mapping):
            raise ValueError(f"{at}: a schema is an object, not {schema!r}")
        kinds = _kinds(schema, at)
        _refuse_unknown(schema, kinds, at)
        for keyword in _ALONE:
            if keyword in schema:
                piece: Piece = getattr(self, "_" + keyword.lower().lstrip("$"))(schema, at)
                return piece
        return either(*(getattr(self, "_" + kind)(schema, at) for kind in kinds))

    def _rule(self, piece: Piece) -> Piece:
        name = f"rule{len(self.rules)}"
        self.rules.append((name, piece))
        return Piece(name, piece.longest)

    def _ref(self, schema: Mapping[str, Any], at: str) -> Piece:
        reference = schema["$ref"]
        if reference in self._open:
            if self._open[reference] == self._containers:
                raise ValueError(f"{at}: $ref {reference!r} leads to itself")
            return Piece(_reference_name(reference), None)
        if reference not in self._references:
            self._open[reference] = self._containers
            piece = self.piece(_resolve(self.root, reference, at), reference)
            del self._open[reference]
            name = _reference_name(reference)
            self.rules.append((name, piece))
            self._references[reference] = Piece(name, piece.longest)
        return self._references[reference]

    def _anyof(self, schema: Mapping[str, Any], at: str) -> Piece:
        options = schema["anyOf"]
        if not isinstance(options, Sequence) or not options:
            raise ValueError(f"{at}: anyOf is {options!r}, it must be a list of schemas")
        return either(*(self.piece(option, f"{at}.anyOf[{i}]") for i, option in enumerate(options)))

    def _allof(self, schema: Mapping[str, Any], at: str) -> Piece:
        options = schema["allOf"]
        if not isinstance(options, Sequence) or len(options) != 1:
            raise ValueError(f"{at}: allOf of several schemas cannot be enforced by a grammar")
        return self.piece(options[0], f"{at}.allOf[0]")

    def _const(self, schema: Mapping[str, Any], at: str) -> Piece:
        return literal(compact(schema["const"]))

    def _enum(self, schema: Mapping[str, Any], at: str) -> Piece:
        kinds = _kinds(schema, at) if "type" in schema else ()
        values = [value for value in schema["enum"] if not kinds or any(_is_kind(value, kind) for kind in kinds)]
        if not values:
            raise ValueError(f"{at}: enum {schema['enum']!r} holds no value of the type")
        return either(*(literal(compact(value)) for value in values))

    def _object(self, schema: Mapping[str, Any], at: str) -> Piece:
        if schema.get("additionalProperties", False) is not False:
            raise ValueError(f"{at}: additionalProperties must be false or left out: an answer has the keys that the schema names")
        properties = schema.get("properties", {})
        required = set(schema.get("required", ()))
        if unknown := sorted(required - set(properties)):
            raise ValueError(f"{at}: required names {unknown[0]!r}, which is not among the properties")
        self._containers += 1
        entries = [self._rule(self._entry(name, value, at)) for name, value in properties.items()]
        self._containers -= 1
        return sequence(literal("{"), self._members(entries, [name in required for name in properties]), literal("}"))

    def _entry(self, name: str, schema: Any, at: str) -> Piece:
        return sequence(literal(compact(name) + ":"), self.piece(schema, f"{at}.{name}"))

    def _members(self, entries: list[Piece], required: list[bool]) -> Piece:
        """Entries in order with commas between; those that are not required may be missing. Built from the last entry backwards."""
        later = first = literal("")  # the rest after something was written, and when nothing was
        for entry, needed in zip(reversed(entries), reversed(required), strict=True):
            written = sequence(entry, later)
            following = sequence(literal(","), written)
            first = self._rule(written if needed else either(written, first))
            later = self._rule(following if needed else either(following, later))
        return first

    def _array(self, schema: Mapping[str, Any], at: str) -> Piece:
        self._containers += 1
        prefix = [self.piece(item, f"{at}.prefixItems[{i}]") for i, item in enumerate(schema.get("prefixItems", ()))]
        rest = schema.get("items", False if prefix else None)
        if rest is None or rest is True:
            raise ValueError(f"{at}: items is needed: an array says what it holds")
        item = self._rule(self.piece(rest, f"{at}.items")) if rest is not False else None
        self._containers -= 1
        least = int(schema.get("minItems", len(prefix)))
        most = int(schema.get("maxItems", max(least, MAX_ITEMS, len(prefix)) if item else len(prefix)))
        if least < len(prefix) or most < max(least, len(prefix)) or (item is None and most > len(prefix)):
            raise ValueError(f"{at}: minItems {least} and maxItems {most} do not fit {len(prefix)} prefixItems")
        return sequence(literal("["), _items(prefix, item, least - len(prefix), most - len(prefix)), literal("]"))

    def _string(self, schema: Mapping[str, Any], at: str) -> Piece:
        least, most = int(schema.get("minLength", 0)), int(schema.get("maxLength", max(MAX_STRING, int(schema.get("minLength", 0)))))
        if least > most:
            raise ValueError(f"{at}: minLength {least} is above maxLength {most}")
        if "format" in schema:
            return self._formatted(schema, at)
        if "pattern" in schema:
            if "minLength" in schema or "maxLength" in schema:
                raise ValueError(f"{at}: pattern together with minLength or maxLength; say the length in the pattern")
            body = _at(at, lambda: regex(schema["pattern"], string_character))
        else:
            legal = complement(_CONTROL)
            body = repeated(string_character(legal) if most <= ESCAPING_STRING else characters(_without(legal, _ESCAPED)), least, most)
        return sequence(literal('"'), body, literal('"'))

    def _formatted(self, schema: Mapping[str, Any], at: str) -> Piece:
        if schema["format"] != "date" or {"pattern", "minLength", "maxLength"} & set(schema):
            raise ValueError(f"{at}: format {schema['format']!r}: the one format that is enforced is 'date', without pattern or lengths")
        return sequence(literal('"'), iso_date(date(1, 1, 1), date(9999, 12, 31)), literal('"'))

    def _integer(self, schema: Mapping[str, Any], at: str) -> Piece:
        low, high = _bounds(schema, Decimal(1))
        return _at(at, lambda: whole(int(low.to_integral_value(ROUND_CEILING)), int(high.to_integral_value(ROUND_FLOOR))))

    def _number(self, schema: Mapping[str, Any], at: str) -> Piece:
        low, high = _bounds(schema, Decimal(1).scaleb(-DECIMALS))
        return _at(at, lambda: decimal(low, high, DECIMALS))

    def _boolean(self, schema: Mapping[str, Any], at: str) -> Piece:
        return either(literal("true"), literal("false"))

    def _null(self, schema: Mapping[str, Any], at: str) -> Piece:
        return literal("null")


def _at(at: str, make: Any) -> Piece:
    try:
        piece: Piece = make()
    except ValueError as error:
        raise ValueError(f"{at}: {error}") from error
    return piece


def _items(prefix: list[Piece], item: Piece | None, least: int, most: int) -> Piece:
    """The prefix, then `least` to `most` of `item`, commas between all of them."""
    comma = literal(",")
    start = [part for i, piece in enumerate(prefix) for part in ((comma, piece) if i else (piece,))]
    if item is None or most == 0:
        return sequence(*start) if start else literal("")
    if start:
        return sequence(*start, repeated(sequence(comma, item), least, most))
    filled = sequence(item, repeated(sequence(comma, item), max(least - 1, 0), most - 1))
    return filled if least else optional(filled)


def _kinds(schema: Mapping[str, Any], at: str) -> tuple[str, ...]:
    """The types a schema asks for; none where it says what it wants otherwise."""
    kinds = schema.get("type")
    if kinds is None:
        kinds = "object" if "properties" in schema else "array" if {"items", "prefixItems"} & set(schema) else ()
    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    for kind in kinds:
        if kind not in _KEYWORDS:
            raise ValueError(f"{at}: type {kind!r} is none of {', '.join(_KEYWORDS)}")
    if not kinds and not any(keyword in schema for keyword in _ALONE):
        raise ValueError(f"{at}: a type is needed ({', '.join(_KEYWORDS)}), or one of {', '.join(_ALONE)}")
    return kinds


def _refuse_unknown(schema: Mapping[str, Any], kinds: tuple[str, ...], at: str) -> None:
    alone = [keyword for keyword in _ALONE if keyword in schema]
    known = {*_NOTES, "type"}.union(alone[:1] if alone else (), *(() if alone else (_KEYWORDS[kind] for kind in kinds)))
    ignored = set().union(*_KEYWORDS.values()) if not alone else set()  # keywords of another type say nothing about this one
    for keyword in schema:
        if keyword not in known and keyword not in ignored:
            beside = f" beside {alone[0]}" if alone else ""
            raise ValueError(f"{at}: {keyword}{beside} cannot be enforced by a grammar")


def _is_kind(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    types: dict[str, Any] = {"object": Mapping, "array": list, "string": str, "integer": int, "number": (int, float), "null": type(None)}
    return kind in types and isinstance(value, types[kind])


def _bounds(schema: Mapping[str, Any], step: Decimal) -> tuple[Decimal, Decimal]:
    low, high = Decimal(-LARGEST), Decimal(LARGEST)
    exact = {key: Decimal(str(schema[key])) for key in _KEYWORDS["number"] if key in schema}
    low = exact.get("minimum", low)
    high = exact.get("maximum", high)
    if "exclusiveMinimum" in exact:
        low = max(low, _above(exact["exclusiveMinimum"], step))
    if "exclusiveMaximum" in exact:
        high = min(high, -_above(-exact["exclusiveMaximum"], step))
    return low, high


def _above(bound: Decimal, step: Decimal) -> Decimal:
    """The smallest multiple of `step` above `bound`."""
    return ((bound / step).to_integral_value(ROUND_FLOOR) + 1) * step


def _resolve(root: Mapping[str, Any], reference: Any, at: str) -> Any:
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise ValueError(f"{at}: $ref {reference!r} leads out of the schema")
    found: Any = root
    for part in _path(reference):
        if not isinstance(found, Mapping) or part not in found:
            raise ValueError(f"{at}: $ref {reference!r} leads nowhere")
        found = found[part]
    return found


def _path(reference: str) -> Iterator[str]:
    for part in reference[1:].split("/")[1:]:
        yield part.replace("~1", "/").replace("~0", "~")


def _reference_name(reference: str) -> str:
    return "ref" + "".join(character if character.isascii() and character.isalnum() else f"x{ord(character):x}x" for character in reference)


def _without(intervals: tuple[Interval, ...], removed: tuple[Interval, ...]) -> tuple[Interval, ...]:
    kept = merged(removed)
    result: list[Interval] = []
    for low, high in intervals:
        for start, stop in kept:
            if start > high or stop < low:
                continue
            if low < start:
                result.append((low, start - 1))
            low = max(low, stop + 1)
        if low <= high:
            result.append((low, high))
    return merged(result)
