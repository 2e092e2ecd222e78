"""Cutting a document that is too long for its context into overlapping chunks, as text, so that the prompt of each is the prompt of a text.

Chunks end between tokens, at the end of a paragraph, else of a sentence, else of a word, where one lies in the chunk's last quarter. Token
counts of parts do not add up exactly (a cut makes new neighbours), so each chunk is measured as it is. Knows no questions and no policy.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from askmany.engine.errors import DocumentError
from askmany.engine.prompts import PromptBuilder
from askmany.engine.truncate import document_tokens

# Where a chunk may end, before the blanks that follow: paragraphs, sentences, words.
_ENDS = tuple(map(re.compile, (r"(?=\n\s*\n)", r"[.!?…]+[\"'”’)\]]*(?=\s)|[。！？]+", r"(?=\s)")))
_LAST_PART = 0.25  # of a chunk, in which its end is looked for


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stretch of a document: its text, and its range [start, stop) in the document's characters and in the tokens of its plain text."""

    text: str
    chars: tuple[int, int]
    tokens: tuple[int, int]


def chunk_document(builder: PromptBuilder, text: str, size_tokens: int, overlap_tokens: int) -> tuple[Chunk, ...]:
    """The chunks of `text`: each of at most `size_tokens` document tokens, each but the first beginning `overlap_tokens` before the end of
    the one before (a little more where tokens share a character). Together they are the whole text.

    Raises DocumentError (`too_long`) when a chunk of that size would hold nothing new.
    """
    cutter = _Cutter(builder, text, size_tokens, overlap_tokens)
    return tuple(cutter.chunks())


class _Cutter:
    def __init__(self, builder: PromptBuilder, text: str, size_tokens: int, overlap_tokens: int) -> None:
        self._builder = builder
        self._text = text
        self._size = size_tokens
        self._overlap = overlap_tokens
        self._spans: Sequence[tuple[int, int]] = builder.tokenizer.encode(text).offsets
        self._starts = [start for start, _ in self._spans]

    def chunks(self) -> Iterator[Chunk]:
        start, count = 0, len(self._spans)
        while True:
            chunk = self._from(start)
            yield chunk
            if chunk.tokens[1] >= count:
                return
            start = self._next(start, chunk.tokens[1])

    def _from(self, start: int) -> Chunk:
        """The longest chunk from a token on that fits, its end moved back to a good place."""
        least = start + self._overlap + 1
        stop = self._boundary(min(start + self._size, len(self._spans)))
        while stop >= min(least, len(self._spans)):
            stop = self._good_end(start, stop, least)
            chunk = self._chunk(start, stop)
            excess = document_tokens(self._builder, chunk.text) - self._size if chunk.text.strip() else 0
            if excess <= 0:
                return chunk
            stop = self._boundary(stop - excess)
        raise DocumentError(f"no chunk of {self._size} tokens goes on after the {self._overlap} that it shares", "too_long")

    def _next(self, start: int, stop: int) -> int:
        """Where the chunk after [start, stop) begins: as much before its end as asked, but after its beginning."""
        token = self._boundary(stop - self._overlap)
        while token <= start or self._boundary(token) != token:
            token += 1
        return token

    def _chunk(self, start: int, stop: int) -> Chunk:
        first = self._char(start)
        last = self._char(stop)
        return Chunk(self._text[first:last], (first, last), (start, stop))

    def _char(self, token: int) -> int:
        """The character at which a token begins; blanks between tokens go with the token before."""
        return 0 if token == 0 else self._starts[token] if token < len(self._starts) else len(self._text)

    def _boundary(self, token: int) -> int:
        """The nearest token at or before that does not share a character with the one before it."""
        while 0 < token < len(self._spans) and self._spans[token][0] < self._spans[token - 1][1]:
            token -= 1
        return token

    def _good_end(self, start: int, stop: int, least: int) -> int:
        """The last end of a paragraph, sentence or word in the chunk's last part; `stop` where there is none, or the document ends."""
        if stop >= len(self._spans):
            return stop
        lowest = max(least, stop - int((stop - start) * _LAST_PART))
        first, last = self._char(lowest - 1), self._char(stop)
        for pattern in _ENDS:
            ends = [found.end() for found in pattern.finditer(self._text, first, last + 1)]
            for end in reversed(ends):
                token = self._boundary(bisect_left(self._starts, end, lowest, stop))
                if lowest <= token <= stop and not self._text[end : self._char(token)].strip():
                    return token
        return stop
