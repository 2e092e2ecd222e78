"""What the engine benchmark asks: cells (a size of work each), and the tokens that a seed draws for a cell.

A cell is asked of every engine with the same tokens. Documents have exactly the given length: slices of a text's tokens where one is given,
else random ids. Answer lengths of the cells that have a spread come from the seed; an engine is told the cap alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

FIRST_ID = 10  # below lie the ids of special tokens


@dataclass(frozen=True, slots=True)
class Cell:
    """`documents` of `document_tokens`, `questions` each of `question_tokens`; answers of `new_tokens`, or around that by `spread` up to
    `cap`. `cached`: the documents are in the KV cache before the clock starts."""

    work: str
    document_tokens: int
    questions: int
    new_tokens: int
    documents: int = 1
    question_tokens: int = 12
    spread: int = 0
    cap: int = 0
    cached: bool = True

    @property
    def most_tokens(self) -> int:
        """Of one answer."""
        return self.cap or self.new_tokens

    @property
    def kv_tokens(self) -> int:
        """Slots that all of it takes at once."""
        return self.documents * (self.document_tokens + self.questions * (self.question_tokens + self.most_tokens))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A cell's tokens for one seed: documents, for each its question tails, and for each of these the length of the answer."""

    documents: list[list[int]]
    tails: list[list[list[int]]]
    lengths: list[list[int]]


def draw(cell: Cell, seed: int, vocabulary: int, text: Sequence[int] = ()) -> Drawn:
    """The tokens of `cell` under `seed`, from `text` where it is long enough."""
    rng = random.Random(f"{cell} {seed}")
    documents = [_document(cell.document_tokens, rng, vocabulary, text) for _ in range(cell.documents)]
    tails = [[_ids(cell.question_tokens, rng, vocabulary) for _ in range(cell.questions)] for _ in documents]
    lengths = [[_length(cell, rng) for _ in range(cell.questions)] for _ in documents]
    return Drawn(documents, tails, lengths)


def _document(count: int, rng: random.Random, vocabulary: int, text: Sequence[int]) -> list[int]:
    if len(text) <= count:
        return _ids(count, rng, vocabulary)
    start = rng.randrange(len(text) - count)
    return list(text[start : start + count])


def _ids(count: int, rng: random.Random, vocabulary: int) -> list[int]:
    return [rng.randrange(FIRST_ID, vocabulary) for _ in range(count)]


def _length(cell: Cell, rng: random.Random) -> int:
    if not cell.spread:
        return cell.new_tokens
    return min(cell.most_tokens, max(1, round(rng.gauss(cell.new_tokens, cell.spread))))


def suites() -> dict[str, list[Cell]]:
    """The comparisons, by name."""
    return {
        "grid": [Cell("grid", length, count, 128) for length, count in product((8192, 16384), (64, 128, 256))],
        "long": [Cell("long answers", 8192, 128, 1024)],
        "worst": [
            Cell("worst", length, count, new) for length, count, new in product((512, 4096, 16384), (1, 4, 16, 64, 256), (16, 128))
        ],
        "loogle": [Cell("LooGLE-shaped", 20000, 18, 234, documents=6, question_tokens=40, spread=80, cap=300, cached=False)],
        "quality": [Cell("QuALITY-shaped", 5700, 18, 16, documents=24, question_tokens=60, cached=False)],
        "mixed": [Cell("mixed lengths", 4096, 64, 46, documents=16, spread=44, cap=160, cached=False)],
        "batch": [Cell("documents a batch", 4096, 16, 64, documents=count) for count in (1, 2, 4, 8, 16)],
        "once": [Cell("other shapes", 8192, 64, 128)],
        "tiny": [
            Cell("tiny", 48, 3, 4), Cell("tiny mixed", 32, 4, 3, documents=2, question_tokens=5, spread=2, cap=6, cached=False),
        ],
    }  # fmt: skip
