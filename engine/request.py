"""The nouns that every part of the engine shares: what is asked, what is running, what came out.

This module imports no torch, and of the project only what a label distribution is. Frozen dataclasses are values made by the caller;
`Stream` and `DocumentState` are the only mutable ones, and `scheduler` is their only writer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal

from askmany.engine.label_pages import LabelPages
from askmany.engine.labels import LabelScores, LabelTrie

if TYPE_CHECKING:
    from askmany.engine.prefix_tree import PrefixNode

FinishReason = Literal["stop", "length"]
PENDING = -1  # the id of an answer token that is being drawn


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one stream draws its tokens. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 switch the cut off."""

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Question:
    """One question about one document, as tokens: `token_ids` is the tail that follows the document's prefix.

    `grammar` (EBNF) holds the answer to its legal texts. With `labels` nothing is drawn: the stream feeds the label tree's tokens after
    its tail and ends with the labels' scores. At most one of the two is given.
    """

    question_id: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    grammar: str | None = None
    labels: LabelTrie | None = None

    @property
    def feed_tokens(self) -> int:
        """Private tokens that are known before anything is drawn."""
        return len(self.token_ids) + (len(self.labels.feed) if self.labels else 0)

    @property
    def budget_tokens(self) -> int:
        """Private tokens that the question's stream may ever store; its last answer token is never stored."""
        return self.feed_tokens + (0 if self.labels else self.sampling.max_new_tokens - 1)

    def budget_slots(self, page_size: int) -> int:
        """Private slots that they take: as many, or whole pages where labels take pages of their own (`label_pages`)."""
        return self.label_pages(page_size).pages * page_size if self.labels and self.labels.longest else self.budget_tokens

    def label_pages(self, page_size: int) -> LabelPages:
        """How a question with labels lies in pages."""
        assert self.labels is not None
        return LabelPages(len(self.token_ids), self.labels, page_size)


@dataclass(frozen=True, slots=True)
class Document:
    """One document with its questions, ready for the engine.

    `segments` is the prefix as a path of the prefix tree: usually (instruction tokens, document tokens); equal leading
    segments of different documents share their KV. No segment is empty. `key` is unique among submitted documents.
    """

    key: str
    segments: tuple[tuple[int, ...], ...]
    questions: tuple[Question, ...]

    @property
    def prefix_tokens(self) -> int:
        return sum(len(segment) for segment in self.segments)


class Phase(Enum):
    """Where a stream stands: `WAITING` holds no page; `TAIL` feeds question tokens; `DECODE` feeds answer tokens."""

    WAITING = "waiting"
    TAIL = "tail"
    DECODE = "decode"
    DONE = "done"


@dataclass(slots=True, eq=False)
class Stream:
    """One question's continuation over a document: its tail, then its answer or the tree of its labels.

    Private tokens are tail + answer (or label tree), numbered from 0; the first `stored` of them have their KV in `pages`, one after the
    other but for trees (`label_pages`). Private token i stands at position `document.prefix_tokens + private_depth(i)`. `stream_id` is
    unique in the life of an engine.
    """

    stream_id: int
    document: DocumentState
    question: Question
    phase: Phase = Phase.WAITING
    pages: list[int] = field(default_factory=list)
    stored: int = 0
    answer_token_ids: list[int] = field(default_factory=list)
    logprob: float = 0.0
    margin: float = float("inf")
    finish_reason: FinishReason | None = None

    @property
    def budget_tokens(self) -> int:
        """Private tokens the stream may ever store."""
        return self.question.budget_tokens

    def private_token(self, index: int) -> int:
        tail = self.question.token_ids
        if index < len(tail):
            return tail[index]
        labels = self.question.labels
        return labels.feed[index - len(tail)] if labels else self.answer_token_ids[index - len(tail)]

    def private_depth(self, index: int) -> int:
        """How many private tokens stand before token `index` on its own way from the tail; `index` itself but in a tree of labels."""
        tail = len(self.question.token_ids)
        labels = self.question.labels
        return index if index < tail or not labels else tail + labels.depths[index - tail]


@dataclass(slots=True, eq=False)
class DocumentState:
    """A submitted document: its path of prefix nodes (held from admission to its last stream) and its streams."""

    document: Document
    streams: list[Stream] = field(default_factory=list)
    path: list[PrefixNode] = field(default_factory=list)
    next_question: int = 0
    live: int = 0
    done: int = 0

    @property
    def finished(self) -> bool:
        return self.done == len(self.document.questions)


@dataclass(slots=True, eq=False)
class InterleavedRequest:
    """The interleaved layout's unit: one document and up to P streams whose tokens share one KV row.

    The row's slot i (after the document's) belongs to stream `streams[sids[i]]`; `pages` hold the row, `sids` grows with every step.
    The i-th stored slot is `pages[i // page_size] * page_size + i % page_size`. Only the interleaved scheduler writes it.
    """

    document: DocumentState
    streams: tuple[Stream, ...]
    pages: list[int] = field(default_factory=list)
    sids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StreamResult:
    """One finished stream. `logprob` is the sum over answer tokens, in nats, of the model's own (unscaled) distribution;
    `margin` is the smallest gap between the two largest logits over the answer's steps. `text` ends before the stop string;
    `answer_token_ids` leaves out the end-of-turn or stop token. For a question with labels, `labels` holds their distribution, the text is
    the likeliest label, `logprob` its own and `margin` the gap to the next label."""

    document_key: str
    question_id: str
    answer_token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprob: float
    margin: float
    labels: LabelScores | None = None
