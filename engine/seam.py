"""The boundary between a document and its questions: where the tokens of a prompt are cut so that both sides can be made apart.

    ... document | separator | question + end ...
                     ^ cut: as many characters of the separator as possible go with the document

Either side is encoded together with a stand-in for the other and cut between tokens, so that the end of a text is tokenised as inside the
whole. Where to cut is tried out once, on texts that begin and end in awkward ways. Knows no templates.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Encoding

from askmany.engine.errors import DocumentError, QuestionError
from askmany.engine.tokenizer import TextTokenizer

_LOOK_AHEAD_CHARS = 256


class Seam:
    """`separator` stands between any document and any question, `end` after the question (as `TextTokenizer.trusted` gives it).

    `documents` and `questions` are the probes; the first of each is the stand-in.
    """

    def __init__(self, tokenizer: TextTokenizer, separator: str, end: str, documents: Sequence[str], questions: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._separator = separator
        self._end = end
        self._document, self._question = documents[0], questions[0]
        self._cut = self._choose(documents, questions)

    def prefix_ids(self, head: str, document: str) -> list[int]:
        """Ids of `head`, the document and its part of the separator. Raises DocumentError when a token spans the cut."""
        return self._prefix_ids(head, document, self._cut)

    def tail_ids(self, question: str) -> list[int]:
        """Ids of the rest of the separator, the question and the end. Raises QuestionError when a token spans the cut."""
        return self._tail_ids(question, self._cut)

    def is_exact(self, document: str, question: str) -> bool:
        """Whether both sides together are the ids of the whole. The end of a long document stands for all of it."""
        return self._is_exact(document, question, self._cut)

    def _choose(self, documents: Sequence[str], questions: Sequence[str]) -> int:
        """The largest cut that is exact for all probes; where there is none, the one that fails for the fewest."""
        failures: dict[int, int] = {}
        for cut in range(len(self._separator), -1, -1):
            failures[cut] = sum(not self._is_exact(document, question, cut) for document in documents for question in questions)
            if failures[cut] == 0:
                break
        return min(failures, key=lambda cut: failures[cut])

    def _prefix_ids(self, head: str, document: str, cut: int) -> list[int]:
        before = head + document + self._separator[:cut]
        encoding = self._tokenizer.encode(before + self._separator[cut:] + self._question[:_LOOK_AHEAD_CHARS])
        count = _tokens_before(encoding, len(before))
        if count is None:
            raise DocumentError(f"the document|question boundary: a token spans it after {document[-20:]!r}; change prompt.separator")
        return encoding.ids[:count]

    def _tail_ids(self, question: str, cut: int) -> list[int]:
        before = self._document + self._separator[:cut]
        encoding = self._tokenizer.encode(before + self._separator[cut:] + question + self._end)
        count = _tokens_before(encoding, len(before))
        if count is None:
            raise QuestionError(f"the document|question boundary: a token spans it before {question[:20]!r}; change prompt.separator")
        return encoding.ids[count:]

    def _is_exact(self, document: str, question: str, cut: int) -> bool:
        try:
            parts = self._prefix_ids("", document, cut) + self._tail_ids(question, cut)
        except (DocumentError, QuestionError):
            return False
        return parts == self._tokenizer.encode(document + self._separator + question + self._end).ids


def _tokens_before(encoding: Encoding, position: int) -> int | None:
    """How many tokens lie before a character position, None when one spans it."""
    count = len(encoding.ids)
    while count:
        start, stop = encoding.token_to_chars(count - 1) or (0, 0)
        if start < position:
            return count if stop <= position else None
        count -= 1
    return count
