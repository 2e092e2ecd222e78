"""What a scheduler takes in: a document checked against what the KV pool can ever hold, and its streams.

One place for both layouts; knows pages as numbers and starts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from askmany.engine.errors import DocumentError, QuestionError
from askmany.engine.pages import PagePool
from askmany.engine.request import Document, DocumentState, Stream


def open_document(document: Document, pool: PagePool, stream_ids: Iterator[int]) -> DocumentState:
    """The state of a newly submitted document, all its streams waiting.

    Raises DocumentError when no question can be answered (malformed, or too long for the pool), QuestionError naming the questions that
    cannot when others can. In both cases nothing was taken in; without the named questions the same document is accepted.
    """
    _check_shape(document)
    _check_fit(document, pool)
    state = DocumentState(document)
    state.streams = [Stream(next(stream_ids), state, question) for question in document.questions]
    return state


def _check_shape(document: Document) -> None:
    if not all(document.segments):
        raise DocumentError(f"document {document.key!r}: segment {document.segments.index(())} of its prefix is empty")
    seen: set[str] = set()
    for question in document.questions:
        if question.question_id in seen:
            raise DocumentError(f"document {document.key!r} has two questions {question.question_id!r}")
        seen.add(question.question_id)


def _check_fit(document: Document, pool: PagePool) -> None:
    path_pages = sum(pool.pages_for(len(segment)) for segment in document.segments)
    refused: dict[str, str] = {}
    too_large = 0
    for question in document.questions:
        own_pages = pool.pages_for(question.budget_slots(pool.page_size))
        if not question.token_ids:
            refused[question.question_id] = "it has no tokens"
        elif question.sampling.max_new_tokens < 1:
            refused[question.question_id] = f"max_new_tokens is {question.sampling.max_new_tokens}, it must be at least 1"
        elif path_pages + own_pages > pool.page_count:
            too_large += 1
            refused[question.question_id] = (
                f"prefix {document.prefix_tokens} tokens ({path_pages} pages) + question and answer {question.budget_tokens} tokens "
                f"({own_pages} pages) > KV pool {pool.page_count} pages of {pool.page_size} tokens"
            )
    if not refused:
        return
    text = "; ".join(f"question {question_id!r}: {reason}" for question_id, reason in refused.items())
    status = "too_long" if too_large == len(refused) else "error"
    if len(refused) < len(document.questions):
        raise QuestionError(f"document {document.key!r}: {text}", tuple(refused), status)
    raise DocumentError(f"document {document.key!r}: {text}", status)
