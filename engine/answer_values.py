"""From texts to values and back to reasons: the small checks that answer types share.

Knows no type and no grammar. Every function raises ValueError saying what is wrong with what it was given.
"""

from __future__ import annotations

import json
from datetime import date
from decimal import Decimal
from typing import Any, TypeVar

Bounded = TypeVar("Bounded", int, Decimal, date)


def as_texts(value: Any) -> Any:
    """YAML reads an unquoted yes or 3 as something else than text; numbers are taken as they are written, booleans are refused."""
    if not isinstance(value, list | tuple):
        return value
    for item in value:
        if isinstance(item, bool):
            raise ValueError(f"option {str(item).lower()} was read as a truth value; put it in quotes")
    return tuple(str(item) if isinstance(item, int | float) else item for item in value)


def distinct_labels(labels: tuple[str, ...], least: int, most: int) -> tuple[str, ...]:
    """`least` to `most` labels, no two alike, none blank or with blanks around it."""
    if not least <= len(labels) <= most:
        raise ValueError(f"{len(labels)} options, there must be {least} to {most}")
    for label in labels:
        if not label or label != label.strip():
            raise ValueError(f"option {label!r} is empty or begins or ends with white space")
        if labels.count(label) > 1:
            raise ValueError(f"option {label!r} is given twice")
    return labels


def label_of(text: str, labels: tuple[str, ...]) -> str:
    """The label that a text names: exactly, or but for case and a final stop when only one fits so."""
    if text in labels:
        return text
    plain = text.casefold().rstrip(".").strip()
    close = [label for label in labels if label.casefold().rstrip(".") == plain]
    if len(close) != 1:
        raise ValueError(f"{text!r} is none of {', '.join(map(repr, labels[:20]))}{' ...' if len(labels) > 20 else ''}")
    return close[0]


def load_json(text: str) -> Any:
    """A JSON value, by the standard: no NaN, no Infinity."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("not valid JSON: nested too deeply") from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def within(value: Bounded, low: Bounded, high: Bounded) -> Bounded:
    """The value, if it is from `low` to `high`."""
    if not low <= value <= high:
        raise ValueError(f"{value} is not from {low} to {high}")
    return value
