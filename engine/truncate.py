"""Cutting a document that is too long for its context, as text, so that its prompt stays the prompt of a text.

Token counts of parts do not add up exactly (a cut makes new neighbours), so the cut text is measured again until it fits. Which tokens go
is `fit`'s decision; knows no context size.
"""

from __future__ import annotations

from dataclasses import dataclass

from askmany.engine.errors import DocumentError
from askmany.engine.fit import FitPolicy, kept_ranges
from askmany.engine.prompts import PromptBuilder


@dataclass(frozen=True, slots=True)
class CutDocument:
    """What is left of a document: its text, and the ranges [start, stop) of characters of the original that it is made of."""

    text: str
    kept_chars: tuple[tuple[int, int], ...]


def document_tokens(builder: PromptBuilder, text: str) -> int:
    """Tokens that a document adds to the shared instruction; with `len(builder.instruction_ids)` they are the whole prefix."""
    return sum(len(segment) for segment in builder.segments(text)) - len(builder.instruction_ids)


def cut_document(builder: PromptBuilder, text: str, room_tokens: int, policy: FitPolicy) -> CutDocument:
    """Cut `text` to at most `room_tokens` document tokens, at the side that `policy` names. A character is kept whole or not at all.

    Raises DocumentError (`too_long`) when not even one token's text fits.
    """
    if document_tokens(builder, text) <= room_tokens:
        return CutDocument(text, ((0, len(text)),))
    spans = builder.tokenizer.encode(text).offsets
    keep = min(len(spans), room_tokens)
    while keep > 0:
        chars = _chars(spans, kept_ranges(len(spans), keep, policy))
        cut = "".join(text[start:stop] for start, stop in chars)
        excess = document_tokens(builder, cut) - room_tokens
        if excess <= 0:
            return CutDocument(cut, chars)
        keep = max(keep - excess, 1) if keep > 1 else 0
    raise DocumentError(f"no part of the document fits the {room_tokens} tokens that are left for it", "too_long")


def _chars(spans: list[tuple[int, int]], ranges: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Character ranges of token ranges; tokens that share a character do not repeat it, blanks between tokens go with the token before."""
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        first, last = spans[start][0], max(spans[stop - 1][1], spans[stop][0] if stop < len(spans) else 0)
        found.append((max(first, found[-1][1]) if found else first, last))
    return tuple((first, last) for first, last in found if last > first)
