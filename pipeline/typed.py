"""What a typed answer adds to its record: the verdict, the value, the distribution over labels.

The one place that turns a finished stream into `ok`, `invalid_output` or `length`; the raw text is kept whatever the verdict.
"""

from __future__ import annotations

from typing import Any

from askmany.engine.answer_types import AnswerType, TextType, Value
from askmany.engine.grammar_json import compact
from askmany.engine.labels import LabelScores
from askmany.engine.request import StreamResult


def typed_fields(result: StreamResult, kind: AnswerType) -> dict[str, Any]:
    """Status, value and label fields. Free text is always `ok`; a typed answer that reached its budget is `length`, its value unknown."""
    if isinstance(kind, TextType):
        return {"status": "ok"}
    if result.labels is None and result.finish_reason == "length":
        tokens = len(result.answer_token_ids)
        return {"status": "length", "error": f"the answer was not complete after {tokens} tokens"}
    try:
        value = kind.parse(result.text)
    except ValueError as error:
        return {"status": "invalid_output", "error": str(error)}
    return {"status": "ok", "value": compact(value), "value_number": _number(value), **_label_fields(result.labels)}


def _label_fields(scores: LabelScores | None) -> dict[str, Any]:
    if scores is None:
        return {}
    pairs = zip(scores.labels, scores.probabilities, strict=True)
    return {
        "label_probabilities": [{"label": label, "probability": probability} for label, probability in pairs],
        "legal_mass": scores.legal_mass,
        "flags": scores.flags,
    }


def _number(value: Value) -> float | None:
    return float(value) if isinstance(value, bool | int | float) else None
