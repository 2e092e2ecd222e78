"""Batch prompting, as a baseline: many questions of a document in one prompt, the answers parsed from one text.

What it gains in requests it pays in interference: an answer depends on the questions beside it and on how many there are, and a line that
cannot be told apart is an answer lost (Cheng et al. 2023; Lin et al. 2024).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from askmany.engine.answer_types import answer_type
from askmany.engine.errors import ConfigError
from askmany.pipeline.score_items import Item

HEADER = "Answer each of the following questions in a few words. Write one line for each answer, beginning with the question's number."
_LINE = re.compile(r"^\s*(\d{1,3})\s*[.):]\s*(.*?)\s*$")
_EXTRA_TOKENS = 4  # number, stop and line break of one answer


def batched_rows(rows: Sequence[Mapping[str, Any]], size: int, max_new_tokens: int) -> list[dict[str, Any]]:
    """The same documents with `size` questions in each question."""
    return [{**row, "questions": list(_batches(row["questions"], size, max_new_tokens))} for row in rows]


def _batches(questions: Sequence[Mapping[str, Any]], size: int, max_new_tokens: int) -> Iterator[dict[str, Any]]:
    for start in range(0, len(questions), size):
        part = questions[start : start + size]
        lines = [f"{number}. {' '.join(question['question'].split())}" for number, question in enumerate(part, start=1)]
        budget = len(part) * (max_new_tokens + _EXTRA_TOKENS)
        yield {"qid": f"batch-{start}", "question": "\n".join([HEADER, *lines]), "max_new_tokens": budget}


def parsed(text: str, count: int) -> list[str | None]:
    """The answers 1 to `count` of a text, the first line of each number; None where there is none."""
    found: dict[int, str] = {}
    for line in text.split("\n"):
        match = _LINE.match(line)
        if match:
            found.setdefault(int(match[1]), match[2])
    return [found.get(number) for number in range(1, count + 1)]


def batched_items(rows: Sequence[Mapping[str, Any]], answers: Mapping[tuple[str, str], str], size: int) -> list[Item]:
    """One item for each question, from the answers by (doc_id, batch id); an answer that is lost or illegal is `invalid_output`."""
    items = []
    for row in rows:
        questions = row["questions"]
        for start in range(0, len(questions), size):
            part = questions[start : start + size]
            texts = parsed(answers.get((row["doc_id"], f"batch-{start}"), ""), len(part))
            items += [_item(row["doc_id"], question, text) for question, text in zip(part, texts, strict=True)]
    return items


def _item(doc_id: str, question: Mapping[str, Any], text: str | None) -> Item:
    key, references = (doc_id, question["qid"], 0), tuple(question["answers"])
    answer, kind = legal_answer(question, text)
    return Item(key, kind, "invalid_output" if answer is None else "ok", answer or "", references)


def legal_answer(question: Mapping[str, Any], text: str | None) -> tuple[str | None, str]:
    """The text as an answer of the question's type (None where it is none), and the type's name."""
    try:
        kind = answer_type(question if "type" in question else {}, "question")
        if text is None:
            return None, kind.kind
        value = kind.parse(text)
    except ConfigError:
        return text, "text"
    except ValueError:
        return None, kind.kind
    labels = kind.labels
    return (next((label for label in labels if label == value), text) if labels else text), kind.kind
