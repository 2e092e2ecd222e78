"""What `streams: auto` means for a run: layout, live rows and resident documents, from the KV budget and what is expected of the documents.

Arithmetic alone; the reason is a sentence for the log. P of the interleaved layout is measured on a calibration set, as published (Parallel
Prompting, arXiv 2611.15130).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from askmany.engine.config import DEFAULT_INTERLEAVED_STREAMS, Layout

PREFILLING = 1  # documents beyond those that fill the rows: the next is prefilled while they are answered
INTERLEAVED_CANDIDATES = (8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Expected:
    """What a usual document brings. Tokens and counts are at least 1."""

    document_tokens: int
    questions: int
    question_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Choice:
    """`rows`: live streams of all documents; `streams`: of one; `documents`: resident at once."""

    layout: Layout
    streams: int
    rows: int
    documents: int
    reason: str


def choose(expected: Expected, kv_tokens: int, page_size: int, max_rows: int) -> Choice:
    """The rows that the KV budget carries, up to `max_rows`, with as many documents as fill them and one more.

    ValueError when not even one question of one document fits.
    """
    document = _pages(expected.document_tokens, page_size)
    stream = _pages(expected.question_tokens + expected.answer_tokens, page_size)
    budget = kv_tokens // page_size
    if document + stream > budget:
        raise ValueError(f"a document of {expected.document_tokens} tokens with one answer takes {document + stream} pages of {budget}")
    wanted = -(-max_rows // expected.questions)
    documents, rows = 1, 0
    for count in range(1, wanted + 1):
        held = min(count + PREFILLING, max(1, budget // document))
        carried = min(max_rows, count * expected.questions, max(0, budget - held * document) // stream)
        if carried > rows:
            documents, rows = held, carried
    if not rows:  # no room for a document ahead
        documents, rows = 1, min(max_rows, expected.questions, (budget - document) // stream)
    return Choice("split", min(rows, expected.questions), rows, documents, _reason(expected, rows, documents, kv_tokens))


def _reason(expected: Expected, rows: int, documents: int, kv_tokens: int) -> str:
    own = expected.question_tokens + expected.answer_tokens
    streams = min(rows, expected.questions)
    split, interleaved = expected.document_tokens + streams * own, expected.document_tokens * streams + streams * streams * own
    return (
        f"layout split: a step over one document reads {split} KV tokens for its {streams} streams, where interleaved rows scan "
        f"{interleaved} pairs of query and key against {streams * (expected.document_tokens + own)}; {rows} rows over {documents} resident "
        f"documents take what {kv_tokens} KV tokens hold"
    )


def calibrated_streams(
    measure: Callable[[int], float], candidates: Sequence[int] = INTERLEAVED_CANDIDATES, most: int | None = None
) -> tuple[int, str]:
    """P of the interleaved layout: the candidate with the most tokens a second on a calibration set, and the reason. `measure(P)` gives
    them; candidates above `most` are left out, and without any, the default is taken."""
    fitting = [count for count in candidates if most is None or count <= most]
    if not fitting:
        streams = DEFAULT_INTERLEAVED_STREAMS if most is None else min(DEFAULT_INTERLEAVED_STREAMS, most)
        return streams, f"P = {streams}: nothing to calibrate with"
    rates = {count: measure(count) for count in fitting}
    best = max(fitting, key=lambda count: (rates[count], -count))
    return best, f"P = {best}: " + ", ".join(f"{count} gave {rate:.0f} tokens/s" for count, rate in rates.items())


def _pages(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)
