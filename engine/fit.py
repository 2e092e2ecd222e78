"""Does a document fit the context with its questions, and what is kept of it when it does not?

Pure arithmetic on token counts; knows no text and no tokenizer. A prompt fits when

    overhead + document + question + answer budget <= context        (all in tokens)

A document is cut only under a `truncate_*` policy, once for all its questions, since they share it; a question is never cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from askmany.engine.errors import ConfigError

FitPolicy = Literal["error", "truncate_head", "truncate_tail", "truncate_middle"]
"""How a document is made to fit as one; under `split` it becomes several (see `chunk_room`)."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What one question takes: its tail, and the most answer tokens it may draw."""

    question_tokens: int
    answer_tokens: int

    @property
    def tokens(self) -> int:
        return self.question_tokens + self.answer_tokens


@dataclass(frozen=True, slots=True)
class Fit:
    """`kept`: ranges [start, stop) of document tokens, in order; `too_long`: indices of the questions that get no answer;
    `total_tokens`: for each question, what the uncut document would have taken."""

    kept: tuple[tuple[int, int], ...]
    truncated: bool
    too_long: tuple[int, ...]
    total_tokens: tuple[int, ...]

    @property
    def kept_tokens(self) -> int:
        return sum(stop - start for start, stop in self.kept)


def fit(document_tokens: int, overhead_tokens: int, asks: Sequence[Ask], context_tokens: int, policy: FitPolicy = "error") -> Fit:
    """Decide one document.

    `overhead_tokens`: everything of the prompt that is neither document nor question. Under `error` each question for which the whole
    document is too long is too long by itself; its siblings are answered. Under a `truncate_*` policy, named after the side that is lost,
    the document is cut to what the most demanding question leaves; only a question that leaves no room for one document token is too long.
    """
    totals = tuple(overhead_tokens + document_tokens + ask.tokens for ask in asks)
    needed = document_tokens if policy == "error" else min(document_tokens, 1)
    too_long = tuple(i for i, ask in enumerate(asks) if overhead_tokens + needed + ask.tokens > context_tokens)
    rooms = [context_tokens - overhead_tokens - ask.tokens for i, ask in enumerate(asks) if i not in too_long]
    room = min(rooms, default=document_tokens)
    if policy == "error" or room >= document_tokens:
        return Fit(((0, document_tokens),), False, too_long, totals)
    return Fit(kept_ranges(document_tokens, room, policy), True, too_long, totals)


def chunk_room(document_tokens: int, overhead_tokens: int, asks: Sequence[Ask], context_tokens: int, least_tokens: int) -> tuple[int, Fit]:
    """How many document tokens a chunk may have, by the most demanding question, and the verdicts.

    A question that leaves less room than `least_tokens` (or than the document takes) is too long; with none left the room is 0.
    """
    totals = tuple(overhead_tokens + document_tokens + ask.tokens for ask in asks)
    rooms = [context_tokens - overhead_tokens - ask.tokens for ask in asks]
    needed = max(1, min(document_tokens, least_tokens))
    too_long = tuple(i for i, room in enumerate(rooms) if room < needed)
    room = min((room for room in rooms if room >= needed), default=0)
    return room, Fit(((0, document_tokens),), False, too_long, totals)


def kept_ranges(tokens: int, room: int, policy: FitPolicy) -> tuple[tuple[int, int], ...]:
    """The ranges of `tokens` tokens that are kept when only `room` of them (at least 1) may be; a middle cut favours the head."""
    if policy == "truncate_head":
        return ((tokens - room, tokens),)
    if policy == "truncate_tail" or room == 1:
        return ((0, room),)
    head = (room + 1) // 2
    return ((0, head), (tokens - (room - head), tokens))


def require_room(overhead_tokens: int, asks: Sequence[Ask], context_tokens: int) -> None:
    """Refuse a run in which no question could be asked of a document of even one token. Raises ConfigError."""
    if not asks:
        return
    least = min(asks, key=lambda ask: ask.tokens)
    total = overhead_tokens + 1 + least.tokens
    if total > context_tokens:
        raise ConfigError(
            f"the context of {context_tokens} tokens is too small for any question: prompt {overhead_tokens} + document 1 + question "
            f"{least.question_tokens} + answer {least.answer_tokens} (sampling.max_new_tokens) = {total}"
        )
