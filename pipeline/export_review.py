"""The review list: answers in the order in which a person should look at them, most doubtful first.

First what is no legal answer, then by rising margin, then by rising legal mass. Records without an answer are not for review.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from typing import Any

from askmany.pipeline.export_shapes import ANSWERED, Answers
from askmany.pipeline.storage import ObjectStore

NAME = "review.csv"
COLUMNS = (
    "rank",
    "doc_id",
    "question_id",
    "chunk",
    "question",
    "answer",
    "status",
    "probability",
    "margin",
    "legal_mass",
    "flags",
    "error",
)


def export_review(answers: Answers, target: ObjectStore) -> list[str]:
    """Write the list as CSV."""
    rows = [_row(row) for row in answers.rows() if row["status"] in ANSWERED]
    rows.sort(key=_doubt)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS)
    writer.writeheader()
    writer.writerows({**row, "rank": number} for number, row in enumerate(rows, start=1))
    target.put(NAME, text.getvalue().encode("utf-8"))
    return [NAME]


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    chosen = [entry["probability"] for entry in row["label_probabilities"] or () if entry["label"] == row["answer"]]
    plain = {name: row.get(name) for name in COLUMNS if name not in ("rank", "probability", "flags")}
    return {**plain, "probability": chosen[0] if chosen else None, "flags": " ".join(row["flags"])}


def _doubt(row: Mapping[str, Any]) -> tuple[bool, float, float, str, str, int]:
    margin = math.inf if row["margin"] is None else row["margin"]
    mass = math.inf if row["legal_mass"] is None else row["legal_mass"]
    return row["status"] == "ok", margin, mass, row["doc_id"], row["question_id"], row["chunk"]
