"""From a document's text to what the engine takes: tokens, fit, and the verdict on every question.

The same function runs when the run is planned (for the counts) and on the worker (for the tokens), so the two cannot disagree. Knows
neither files nor engines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from askmany.engine.answer_types import BoolType, ChoiceType
from askmany.engine.chunks import Chunk, chunk_document
from askmany.engine.errors import ConfigError, DocumentError, QuestionError
from askmany.engine.fit import Ask, Fit, FitPolicy, chunk_room, fit, require_room
from askmany.engine.grammar_pieces import with_leading_blank
from askmany.engine.labels import LabelTrie, label_trie
from askmany.engine.prompts import PromptBuilder
from askmany.engine.request import Document, Question
from askmany.engine.truncate import cut_document
from askmany.pipeline.cells import Cell, cell_of, set_name, short_hash
from askmany.pipeline.config import RunConfig
from askmany.pipeline.documents import SourceDocument
from askmany.pipeline.questions import AskedQuestion, QuestionSetError, ask, own_questions
from askmany.pipeline.schema import Record, Status
from askmany.pipeline.text import is_blank

Segments = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class PreparedQuestion:
    """A question of one document: its tail, its labels where they are scored, else the grammar that its answer is held to; `status` when
    it has its end already and needs no engine."""

    asked: AskedQuestion
    token_ids: tuple[int, ...] = ()
    status: Status | None = None
    error: str | None = None
    labels: LabelTrie | None = None
    grammar: str | None = None

    @property
    def ask(self) -> Ask:
        """What the question takes of the context: its tail, and its answer or its longest label."""
        answer = max(map(len, self.labels.token_ids)) if self.labels else self.asked.sampling.max_new_tokens
        return Ask(len(self.token_ids), answer)

    def for_engine(self, doc_id: str, chunk: int = 0) -> Question:
        """The engine's question about this document, or this chunk of it."""
        sampling = self.asked.sampling.to_engine(stream_seed(self.asked, doc_id, chunk))
        return Question(self.asked.question_id, self.token_ids, sampling, self.grammar, self.labels)


@dataclass(frozen=True, slots=True)
class PreparedDocument:
    """A document ready for the engine, or one chunk of it. `text` is what its prompt holds, which is less than `document_tokens` when
    `truncated`; the prompt's tokens are `segments`. Both are empty when no question needs them."""

    source: SourceDocument
    questions: tuple[PreparedQuestion, ...]
    text: str = ""
    segments: Segments = ()
    document_tokens: int = 0
    truncated: bool = False
    flags: tuple[str, ...] = ()
    chunk: int = 0

    @property
    def answerable(self) -> tuple[PreparedQuestion, ...]:
        return tuple(question for question in self.questions if question.status is None)

    def only(self, question_ids: Collection[str]) -> PreparedDocument:
        """The same document with these questions alone."""
        return replace(self, questions=tuple(q for q in self.questions if q.asked.question_id in question_ids))

    def for_engine(self, key: str) -> Document:
        """The engine's document with the questions that need it, under a key unique among submitted ones."""
        return Document(key, self.segments, tuple(question.for_engine(self.source.doc_id, self.chunk) for question in self.answerable))

    def record(self, question: PreparedQuestion, attempt: int, flags: Sequence[str] = (), **what: object) -> Record:
        """The record of one question: what is known from preparing, and `what` became of it."""
        return Record(
            doc_id=self.source.doc_id,
            question_id=question.asked.question_id,
            document_tokens=self.document_tokens,
            question_tokens=len(question.token_ids),
            truncated=self.truncated,
            chunk=self.chunk,
            attempt=attempt,
            question=question.asked.text,
            references=question.asked.references or None,
            answer_type=question.asked.kind.kind,
            flags=(*self.flags, *flags),
            keep=self.source.keep,
            **what,  # type: ignore[arg-type]
        )


class Preparer:
    """Prepares documents of one run. `shared` are asked of every document, before its own questions. `context_tokens` bounds a prompt
    with its answer, `end_token_id` ends one; `compile_grammar` raises ValueError for a
    grammar that cannot be had for the model's vocabulary."""

    def __init__(
        self,
        config: RunConfig,
        prompts: PromptBuilder,
        context_tokens: int,
        shared: Sequence[AskedQuestion],
        end_token_id: int | None = None,
        compile_grammar: Callable[[str], object] = lambda grammar: None,
    ) -> None:
        self.prompts = prompts
        self._compile = compile_grammar
        self._compiled: set[str] = set()
        self._end_token_id = end_token_id
        self.context_tokens = context_tokens
        self._config = config
        self._shared = tuple(shared)
        self._shared_asks = {question: self._prepared_shared(question) for question in self._shared}

    def check(self) -> None:
        """Prove the prompt's boundaries and that the shared questions have room. ConfigError otherwise."""
        self.prompts.check([question.text for question in self._shared])
        asks = [question.ask for question in self._shared_asks.values()]
        require_room(len(self.prompts.instruction_ids), asks, self.context_tokens)
        for question in self._shared_asks.values():
            if question.labels and question.labels.feed and self._config.engine.layout == "interleaved":
                raise ConfigError(
                    f"question {question.asked.question_id!r}: labels of several tokens are scored in the split layout alone; "
                    "set engine.layout to split, or the question's answer to decode"
                )

    @property
    def longest_ask_tokens(self) -> int:
        """The most that a shared question takes with its answer; 0 without shared questions."""
        return max((question.ask.tokens for question in self._shared_asks.values()), default=0)

    @property
    def other_policy(self) -> FitPolicy:
        """A way of cutting documents that keeps another part than the run's own."""
        return "truncate_tail" if self._config.long_documents.policy == "truncate_head" else "truncate_head"

    def check_grammars(self, prepared: PreparedDocument) -> None:
        """Compile the grammars of a document's questions, each once. QuestionSetError names the question. Loads PyTorch: for CPU tasks."""
        for question in prepared.answerable:
            grammar = question.grammar
            if grammar is None or grammar in self._compiled:
                continue
            try:
                self._compile(grammar)
            except ValueError as error:
                raise QuestionSetError(f"question {question.asked.question_id!r}: type {question.asked.kind.kind}: {error}") from error
            self._compiled.add(grammar)

    @cached_property
    def shared_asks(self) -> dict[Cell, Ask]:
        """The shared questions that every document is asked, in order, by cell."""
        asked = self._shared[: self._config.input.max_questions]
        return {cell_of(question): self._shared_asks[question].ask for question in asked}

    @cached_property
    def shared_name(self) -> str:
        """The name of their set."""
        return set_name(self.shared_asks)

    def own(self, prepared: PreparedDocument) -> tuple[PreparedQuestion, ...]:
        """A prepared document's questions that are not shared ones."""
        return prepared.questions[len(self._shared) :]

    def prepare(self, source: SourceDocument, chunk: int = 0) -> PreparedDocument:
        """A document, or one chunk of it (see `parts`)."""
        return self.parts(source)[chunk]

    def parts(self, source: SourceDocument) -> tuple[PreparedDocument, ...]:
        """Tokens and verdicts of one document, all of it or each of its chunks, all asked the same questions. ConfigError when its own
        questions are malformed, QuestionSetError when they clash."""
        place = source.locator.place()
        own = own_questions(source.questions, self._config.sampling, place)
        asked = ask(self._shared, own, self._config.input.max_questions, place)
        if not asked:
            return (PreparedDocument(source, (), flags=source.flags),)
        if is_blank(source.text):
            return (_verdict(source, asked, "empty_document", "there is no text to ask about"),)
        try:
            segments = self.prompts.segments(source.text)
            self.prompts.check_document(source.text, asked[0].text)
            questions = [self._with_tail(question) for question in asked]
            if self._config.long_documents.policy == "split":
                return self._split(source, segments, questions)
            return (self._fitted(source, segments, questions),)
        except DocumentError as error:
            return (_verdict(source, asked, "too_long" if error.status == "too_long" else "error", str(error)),)

    def _split(self, source: SourceDocument, segments: Segments, questions: list[PreparedQuestion]) -> tuple[PreparedDocument, ...]:
        """A document whose whole prefix is known, in chunks if it is longer than one may be."""
        settings = self._config.long_documents
        overhead = len(self.prompts.instruction_ids)
        tokens = _length(segments) - overhead
        asks = [question.ask for question in questions]
        room, found = chunk_room(tokens, overhead, asks, self.context_tokens, 2 * settings.overlap_tokens)
        judged = tuple(self._judged(question, index, found) for index, question in enumerate(questions))
        size = room if settings.chunk_tokens == "auto" else min(room, settings.chunk_tokens)
        if tokens <= size or not room:
            return (PreparedDocument(source, judged, source.text, segments, tokens, flags=source.flags),)
        chunks = chunk_document(self.prompts, source.text, size, settings.overlap_tokens)
        return tuple(self._chunk(source, judged, chunk, index, len(chunks)) for index, chunk in enumerate(chunks))

    def _chunk(
        self, source: SourceDocument, judged: tuple[PreparedQuestion, ...], chunk: Chunk, index: int, count: int
    ) -> PreparedDocument:
        flags = (*source.flags, f"chunk:{index + 1}/{count}", f"chunk_chars:{chunk.chars[0]}-{chunk.chars[1]}")
        if is_blank(chunk.text):
            reason = "there is no text in this chunk to ask about"
            blank = tuple(q if q.status else replace(q, status="empty_document", error=reason) for q in judged)
            return PreparedDocument(source, blank, chunk.text, flags=flags, chunk=index)
        segments = self.prompts.segments(chunk.text)
        self.prompts.check_document(chunk.text, judged[0].asked.text)
        tokens = _length(segments) - len(self.prompts.instruction_ids)
        return PreparedDocument(source, judged, chunk.text, segments, tokens, flags=flags, chunk=index)

    def _fitted(self, source: SourceDocument, segments: Segments, questions: list[PreparedQuestion]) -> PreparedDocument:
        """Apply the fit policy to a document whose whole prefix is known."""
        policy = self._config.long_documents.policy
        assert policy != "split"
        asks = [question.ask for question in questions]
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
        reason = f"{found.total_tokens[index]} tokens with the answer's {question.ask.answer_tokens}, over the limit"
        return replace(question, status="too_long", error=f"{reason} of {self.context_tokens}")

    def _with_tail(self, question: AskedQuestion) -> PreparedQuestion:
        try:
            return self._shared_asks.get(question) or self.prepare_question(question)
        except QuestionError as error:
            return PreparedQuestion(question, status="error", error=str(error))

    def _prepared_shared(self, question: AskedQuestion) -> PreparedQuestion:
        try:
            return self.prepare_question(question)
        except QuestionError as error:
            raise ConfigError(f"question {question.question_id!r}: {error}") from error

    def prepare_question(self, question: AskedQuestion) -> PreparedQuestion:
        """A question's tail and labels. Raises QuestionError when it cannot be asked."""
        labels = self._labels(question)
        grammar = None if labels else question.kind.grammar
        if grammar is not None and not self.prompts.is_chat:
            grammar = with_leading_blank(grammar)
        return PreparedQuestion(question, self.prompts.tail(question.text), labels=labels, grammar=grammar)

    def _labels(self, question: AskedQuestion) -> LabelTrie | None:
        kind = question.kind
        if not isinstance(kind, ChoiceType | BoolType) or not kind.labels:
            return None
        try:
            token_ids = [self.prompts.answer_ids(question.text, label) for label in kind.labels]
            return label_trie(kind.labels, token_ids, self._end_token_id, kind.normalise)
        except ValueError as error:
            raise QuestionError(str(error)) from error


def _length(segments: Segments) -> int:
    return sum(map(len, segments))


def _verdict(source: SourceDocument, asked: Sequence[AskedQuestion], status: Status, reason: str) -> PreparedDocument:
    """A document none of whose questions needs the engine."""
    return PreparedDocument(source, tuple(PreparedQuestion(q, (), status, reason) for q in asked), flags=source.flags)


def prompt_identity(parts: Sequence[PreparedDocument]) -> int:
    """What the records of a document depend on besides the questions: its prompt's tokens, and what else they tell of it."""
    told: list[object] = [parts[0].source.keep]
    for part in parts:
        verdict = None if part.segments or not part.questions else (part.questions[0].status, part.questions[0].error)
        told.append([part.segments, part.document_tokens, part.truncated, part.flags, verdict])
    return short_hash(json.dumps(told).encode())


def stream_seed(question: AskedQuestion, doc_id: str, chunk: int = 0) -> int:
    """The seed of one stream: from the run's (or the question's own) seed and what is asked of what, whatever else runs. [0, 2**63)"""
    key = f"{question.sampling.seed}\0{doc_id}\0{question.question_id}{f'{chr(0)}{chunk}' if chunk else ''}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1
