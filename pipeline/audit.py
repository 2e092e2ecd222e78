"""Audits of a finished run, each on a sample of its answers: what they depend on besides the document and the question.

- *independence*: each question asked again alone. Any difference must be a near tie (its margin is reported).
- *label order*: each question that shows its options, asked with the options in another order. How often the answer flips.
- *truncation*: each question asked of less of the document (the half that a middle cut keeps), or, where the run has cut the document
  already, of another part as long. How often the answer stays.

Nothing is written into the run's answers.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from askmany.engine.answer_types import BoolType, ChoiceType, MultiChoiceType
from askmany.engine.errors import ConfigError, DocumentError, QuestionError
from askmany.engine.request import Document, StreamResult
from askmany.engine.truncate import cut_document, document_tokens
from askmany.pipeline.documents import SourceDocument
from askmany.pipeline.engine_loop import Engine
from askmany.pipeline.preparing import PreparedDocument, PreparedQuestion, Preparer
from askmany.pipeline.questions import with_options

MAX_LISTED = 50  # differing answers that a report lists


@dataclass(frozen=True, slots=True)
class Sampled:
    """An answer of the run, and what it was asked."""

    document: PreparedDocument
    question: PreparedQuestion
    answer: str
    margin: float | None

    @property
    def place(self) -> dict[str, str]:
        chunk = {"chunk": str(self.document.chunk)} if self.document.chunk else {}
        return {"doc_id": self.document.source.doc_id, "question_id": self.question.asked.question_id, **chunk}


def draw_sample(rows: Iterable[Mapping[str, Any]], size: int, seed: int) -> list[Mapping[str, Any]]:
    """At most `size` of the records that are `ok`, the same for the same seed."""
    answered = sorted((row for row in rows if row["status"] == "ok"), key=lambda row: (row["doc_id"], row["question_id"], row["chunk"]))
    return random.Random(seed).sample(answered, min(size, len(answered)))


def match(rows: Sequence[Mapping[str, Any]], documents: Mapping[str, SourceDocument], preparer: Preparer) -> list[Sampled]:
    """The sampled records with their documents and questions, prepared as the run prepared them. ConfigError for a question that is not
    asked any more: what was edited since the run must be answered before it can be audited."""
    prepared: dict[str, tuple[PreparedDocument, ...]] = {}
    found = []
    for row in rows:
        if row["doc_id"] not in prepared:
            prepared[row["doc_id"]] = preparer.parts(documents[row["doc_id"]])
        document = prepared[row["doc_id"]][row["chunk"]]
        question = next((q for q in document.questions if q.asked.question_id == row["question_id"]), None)
        if question is None:
            raise ConfigError(f"question {row['question_id']!r} of doc_id {row['doc_id']!r} is not asked any more; run first, then audit")
        found.append(Sampled(document, question, row["answer"], row["margin"]))
    return found


class Auditor:
    """Asks again. The engine must have no other work."""

    def __init__(self, engine: Engine, preparer: Preparer, seed: int = 0) -> None:
        self._engine = engine
        self._preparer = preparer
        self._random = random.Random(seed)

    def report(self, sample: Sequence[Sampled]) -> dict[str, Any]:
        """All three audits."""
        return {
            "sample": len(sample),
            "independence": self.independence(sample),
            "label_order": self.label_order(sample),
            "truncation": self.truncation(sample),
        }

    def independence(self, sample: Sequence[Sampled]) -> dict[str, Any]:
        """Each question alone in the engine."""
        found = [(item, self._alone(item, item.question, item.document.segments)) for item in sample]
        report = _agreement(found)
        margins = [entry["margin"] for entry in report["differing"] if entry["margin"] is not None]
        return {**report, "largest_margin_that_differs": max(margins, default=None)}

    def label_order(self, sample: Sequence[Sampled]) -> dict[str, Any]:
        """Each question that shows its options, with these in another order (its labels stay in theirs, so ties fall as before)."""
        found = []
        for item in sample:
            question = self._reordered(item.question)
            if question is not None:
                found.append((item, self._alone(item, question, item.document.segments)))
        report = _agreement(found)
        return {**report, "flip_rate": None if report["agreement"] is None else 1 - report["agreement"]}

    def truncation(self, sample: Sequence[Sampled]) -> dict[str, Any]:
        """Each question over another cut of its document, whole documents and documents cut by the run apart."""
        parts: dict[str, list[tuple[Sampled, StreamResult | None]]] = {"whole": [], "cut_by_the_run": []}
        for item in sample:
            segments = self._other_cut(item.document)
            if segments is not None:
                name = "cut_by_the_run" if item.document.truncated else "whole"
                parts[name].append((item, self._alone(item, item.question, segments)))
        return {name: _agreement(found) for name, found in parts.items()}

    def _alone(self, item: Sampled, question: PreparedQuestion, segments: tuple[tuple[int, ...], ...]) -> StreamResult | None:
        """The answer to one question with nothing beside it; None when it cannot be asked so."""
        source, chunk = item.document.source, item.document.chunk
        document = Document(f"audit/{source.doc_id}", segments, (question.for_engine(source.doc_id, chunk),))
        try:
            self._engine.submit(document)
        except (DocumentError, QuestionError):
            return None
        results = list(_drained(self._engine))
        return results[0] if results else None

    def _reordered(self, question: PreparedQuestion) -> PreparedQuestion | None:
        """The question with its options in another order; None when it shows none, or so few that there is no other."""
        asked, kind = question.asked, question.asked.kind
        if not asked.template or not isinstance(kind, ChoiceType | BoolType | MultiChoiceType):
            return None
        options = list(kind.options)
        if len(set(options)) < 2:
            return None
        while options == list(kind.options):
            self._random.shuffle(options)
        shown = kind.model_copy(update={"options": tuple(options)})
        return self._preparer.prepare_question(replace(asked, text=with_options(asked.template, shown)))

    def _other_cut(self, document: PreparedDocument) -> tuple[tuple[int, ...], ...] | None:
        prompts, text = self._preparer.prompts, document.source.text if document.truncated else document.text
        room = document_tokens(prompts, document.text) if document.truncated else document.document_tokens // 2
        policy = self._preparer.other_policy if document.truncated else "truncate_middle"
        try:
            return prompts.segments(cut_document(prompts, text, room, policy).text) if room else None
        except DocumentError:
            return None


def _drained(engine: Engine) -> Iterator[StreamResult]:
    while engine.has_work:
        yield from engine.step()


def _agreement(found: Sequence[tuple[Sampled, StreamResult | None]]) -> dict[str, Any]:
    """How many answers stayed, and those that did not."""
    asked = [(item, result) for item, result in found if result is not None]
    differing = [
        {**item.place, "answer": item.answer, "again": result.text, "margin": item.margin}
        for item, result in asked
        if result.text != item.answer
    ]
    return {
        "asked": len(asked),
        "not_askable": len(found) - len(asked),
        "agreement": 1 - len(differing) / len(asked) if asked else None,
        "differing": differing[:MAX_LISTED],
    }
