"""What is asked, by identity: a cell is a question's id with the hash of everything its record depends on besides the document.

Two plans that ask the same cell of the same prompt ask for the same record, so one may take it from the other. Knows no documents.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence

from askmany.pipeline.questions import AskedQuestion

Cell = tuple[str, int]  # question_id, identity
Sets = Mapping[str, Sequence[Cell]]


def cell_of(question: AskedQuestion) -> Cell:
    """The cell of a question: its text, its answer's type, how the answer is drawn, and its references, which its records hold."""
    kind, sampling = question.kind.model_dump(mode="json"), question.sampling.model_dump(mode="json")
    parts = [question.text, question.kind.kind, kind, sampling, question.references]
    return question.question_id, short_hash(json.dumps(parts, sort_keys=True).encode())


def set_name(cells: Iterable[Cell]) -> str:
    """16 hex digits over cells, in any order."""
    return hashlib.sha256(json.dumps(sorted(cells)).encode()).hexdigest()[:16]


def short_hash(data: bytes) -> int:
    """A hash that fits a signed 64-bit column."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True)
