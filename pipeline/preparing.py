"""From a document's text to what the engine takes: tokens, fit, and the verdict on every question.

The same function runs when the run is planned (for the counts) and on the worker (for the tokens), so the two cannot disagree. Knows
neither files nor engines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from askmany.engine.errors import DocumentError, QuestionError
from askmany.engine.fit import Ask, Fit, fit, require_room
from askmany.engine.prompts import PromptBuilder
from askmany.engine.request import Document, Question
from askmany.engine.truncate import cut_document
from askmany.pipeline.config import RunConfig
from askmany.pipeline.documents import SourceDocument
from askmany.pipeline.questions import AskedQuestion, ask, own_questions
from askmany.pipeline.schema import Record, Status
from askmany.pipeline.text import is_blank

Segments = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class PreparedQuestion:
    """A question of one document: its tail, and `status` when it needs no engine because it has its end already."""

    asked: AskedQuestion
    token_ids: tuple[int, ...] = ()
    status: Status | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class PreparedDocument:
    """A document ready for the engine. `text` is what its prompt holds, which is less than `document_tokens` when `truncated`; the prompt's
    tokens are `segments`. Both are empty when no question needs them."""

    source: SourceDocument
    questions: tuple[PreparedQuestion, ...]
    text: str = ""
    segments: Segments = ()
    document_tokens: int = 0
    truncated: bool = False
    flags: tuple[str, ...] = ()

    @property
    def answerable(self) -> tuple[PreparedQuestion, ...]:
        return tuple(question for question in self.questions if question.status is None)

    def for_engine(self, key: str) -> Document:
        """The engine's document with the questions that need it, under a key unique among submitted ones."""
        questions = tuple(
            Question(q.asked.question_id, q.token_ids, q.asked.sampling.to_engine(stream_seed(q.asked, self.source.doc_id)))
            for q in self.answerable
        )
        return Document(key, self.segments, questions)

    def record(self, question: PreparedQuestion, attempt: int, **what: object) -> Record:
        """The record of one question: what is known from preparing, and `what` became of it."""
        return Record(
            doc_id=self.source.doc_id,
            question_id=question.asked.question_id,
            document_tokens=self.document_tokens,
            question_tokens=len(question.token_ids),
            truncated=self.truncated,
            attempt=attempt,
            question=question.asked.text,
            references=question.asked.references or None,
            flags=self.flags,
            keep=self.source.keep,
            **what,  # type: ignore[arg-type]
        )


class Preparer:
    """Prepares documents of one run. `shared` are asked of every document, before its own questions. `context_tokens` bounds a prompt
    with its answer."""

    def __init__(self, config: RunConfig, prompts: PromptBuilder, context_tokens: int, shared: Sequence[AskedQuestion]) -> None:
        self.prompts = prompts
        self.context_tokens = context_tokens
        self._config = config
        self._shared = tuple(shared)
        self._tails = {question: prompts.tail(question.text) for question in self._shared}

    def check(self) -> None:
        """Prove the prompt's boundaries and that the shared questions have room. ConfigError otherwise."""
        self.prompts.check([question.text for question in self._shared])
        asks = [Ask(len(self._tail(question)), question.sampling.max_new_tokens) for question in self._shared]
        require_room(len(self.prompts.instruction_ids), asks, self.context_tokens)

    def question_ids(self, own: Sequence[str]) -> tuple[str, ...]:
        """The ids asked of a document whose own questions have these ids."""
        return (*(question.question_id for question in self._shared), *own)[: self._config.input.max_questions]

    def own_question_ids(self, prepared: PreparedDocument) -> list[str]:
        """The ids of a prepared document's questions that are not shared ones."""
        return [question.asked.question_id for question in prepared.questions[len(self._shared) :]]

    def prepare(self, source: SourceDocument) -> PreparedDocument:
        """Tokens and verdicts of one document. ConfigError when its own questions are malformed, QuestionSetError when they clash."""
        place = source.locator.place()
        own = own_questions(source.questions, self._config.sampling, place)
        asked = ask(self._shared, own, self._config.input.max_questions, place)
        if not asked:
            return PreparedDocument(source, (), flags=source.flags)
        if is_blank(source.text):
            return _verdict(source, asked, "empty_document", "there is no text to ask about")
        try:
            segments = self.prompts.segments(source.text)
            self.prompts.check_document(source.text, asked[0].text)
            return self._fitted(source, segments, [self._with_tail(question) for question in asked])
        except DocumentError as error:
            return _verdict(source, asked, "too_long" if error.status == "too_long" else "error", str(error))

    def _fitted(self, source: SourceDocument, segments: Segments, questions: list[PreparedQuestion]) -> PreparedDocument:
        """Apply the fit policy to a document whose whole prefix is known."""
        policy = self._config.long_documents.policy
        asks = [Ask(len(q.token_ids), q.asked.sampling.max_new_tokens) for q in questions]
        overhead = self._shared_tokens(segments)
        tokens = _length(segments) - overhead
        found = fit(tokens, overhead, asks, self.context_tokens, policy)
        text, flags = source.text, source.flags
        if found.truncated:
            text = cut_document(self.prompts, text, found.kept_tokens, policy).text
            segments = self.prompts.segments(text)
            flags = (*flags, f"truncated_tokens:{tokens + overhead - _length(segments)}")
        judged = tuple(self._judged(question, index, found) for index, question in enumerate(questions))
        return PreparedDocument(source, judged, text, segments, tokens, found.truncated, flags)

    def _shared_tokens(self, segments: Segments) -> int:
        """Tokens of a prefix that are the instruction's; a document that begins like no other may share none."""
        first = len(segments[0])
        return first if segments[0] == self.prompts.instruction_ids[:first] else 0

    def _judged(self, question: PreparedQuestion, index: int, found: Fit) -> PreparedQuestion:
        if question.status is not None or index not in found.too_long:
            return question
        reason = f"{found.total_tokens[index]} tokens with the answer's {question.asked.sampling.max_new_tokens}, over the limit"
        return PreparedQuestion(question.asked, question.token_ids, "too_long", f"{reason} of {self.context_tokens}")

    def _with_tail(self, question: AskedQuestion) -> PreparedQuestion:
        try:
            return PreparedQuestion(question, self._tail(question))
        except QuestionError as error:
            return PreparedQuestion(question, status="error", error=str(error))

    def _tail(self, question: AskedQuestion) -> tuple[int, ...]:
        tail = self._tails.get(question)
        return self.prompts.tail(question.text) if tail is None else tail


def _length(segments: Segments) -> int:
    return sum(map(len, segments))


def _verdict(source: SourceDocument, asked: Sequence[AskedQuestion], status: Status, reason: str) -> PreparedDocument:
    """A document none of whose questions needs the engine."""
    return PreparedDocument(source, tuple(PreparedQuestion(q, (), status, reason) for q in asked), flags=source.flags)


def stream_seed(question: AskedQuestion, doc_id: str) -> int:
    """The seed of one stream: from the run's (or the question's own) seed and what is asked of what, whatever else runs. [0, 2**63)"""
    key = f"{question.sampling.seed}\0{doc_id}\0{question.question_id}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1
