"""From stored answers to items to score: what was answered, what was right.

Only reads. References come from the answers themselves (`references`, which a run keeps from its input) or from a gold file, whose lines
are `{"doc_id", "question_id" | "qid", "answers"}` or documents with `questions` that have `answers`. An item that cannot be scored is
counted with its reason; it never stops the others.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from askmany.engine.errors import ConfigError
from askmany.pipeline.whole_text import read_text

Key = tuple[str, str, int]  # doc_id, question_id, chunk
ANSWERED = ("ok", "invalid_output", "length")
LABELLED = ("choice", "bool")
NUMERIC = ("int", "number")


@dataclass(frozen=True, slots=True)
class Item:
    """One answered question with its references. `answer` is "" for an answer that is no legal value; `confidence` is the probability of
    the chosen label where labels were scored."""

    key: Key
    kind: str
    status: str
    answer: str
    references: tuple[str, ...]
    confidence: float | None = None

    @property
    def document(self) -> str:
        return self.key[0]


@dataclass(slots=True)
class Items:
    """All that can be scored, and how many of what could not."""

    items: list[Item] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def read_items(tables: Iterable[pa.Table], gold: Mapping[tuple[str, str], Sequence[str]] | None = None) -> Items:
    """The items of a run's answers. Records that were never answered, or have no reference, are left out and counted."""
    found = Items()
    for table in tables:
        for row in table.to_pylist():
            try:
                item = _item(row, gold)
            except Exception as error:  # one odd record may not cost the others their scores
                found.left_out[f"unreadable record ({type(error).__name__})"] += 1
                continue
            if isinstance(item, Item):
                found.items.append(item)
            else:
                found.left_out[item] += 1
    return found


def refuse_nothing(items: Items, where: str) -> None:
    """ConfigError, with the reasons why each was left out, when there is no item."""
    if not items.items:
        reasons = "; ".join(f"{count} {reason}" for reason, count in items.left_out.most_common()) or "it has no records"
        raise ConfigError(f"{where}: nothing to score: {reasons}; references come with the input's questions or from --gold")


def read_gold(uri: str, options: Mapping[str, Any]) -> dict[tuple[str, str], tuple[str, ...]]:
    """References by (doc_id, question_id). ConfigError names file and line."""
    text = read_text(uri, options, "the gold file")
    gold: dict[tuple[str, str], tuple[str, ...]] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                gold.update(_gold_of(json.loads(line)))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(f"{uri}:{number}: no gold answers there: {type(error).__name__}: {error}") from error
    if not gold:
        raise ConfigError(f"{uri}: no gold answers there")
    return gold


def _gold_of(row: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], tuple[str, ...]]]:
    for question in row.get("questions", [row]):
        question_id = question["question_id"] if "question_id" in question else question["qid"]
        answers = question["answers"]
        answers = [answers] if isinstance(answers, (str, int, float)) else answers
        yield (str(row["doc_id"]), str(question_id)), tuple(str(answer) for answer in answers)


def _item(row: Mapping[str, Any], gold: Mapping[tuple[str, str], Sequence[str]] | None) -> Item | str:
    key = row["doc_id"], row["question_id"], row["chunk"]
    if row["status"] not in ANSWERED:
        return f"status {row['status']}"
    references = gold.get(key[:2], ()) if gold is not None else row.get("references") or ()
    if not references:
        return "no reference"
    kind = row.get("answer_type") or "text"
    legal = row["status"] == "ok"
    answer = row["answer"] if legal and row["answer"] is not None else ""
    return Item(key, kind, row["status"], answer, tuple(references), _confidence(row, answer))


def _confidence(row: Mapping[str, Any], answer: str) -> float | None:
    for entry in row.get("label_probabilities") or ():
        if entry["label"] == answer:
            return min(1.0, float(entry["probability"]))
    return None
