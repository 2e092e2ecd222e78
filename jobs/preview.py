"""`askmany preview`: the exact prompt of one document and one question, its tokens, and the checks it has to pass. Loads no weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from askmany.engine.errors import ConfigError
from askmany.pipeline.config_file import load_config
from askmany.pipeline.documents import DeadLetter, SourceDocument
from askmany.pipeline.opening import OpenedRun, open_run
from askmany.pipeline.preparing import PreparedDocument, PreparedQuestion
from askmany.pipeline.readers import plan_spans, scan

SHOWN_TOKENS = 12


def main(config: Path, overrides: Sequence[str], doc_id: str | None, question_id: str | None, console: Console, chunk: int = 0) -> int:
    """Print the prompt as the model gets it. ConfigError when there is no such document, chunk of it, or question."""
    opened = open_run(load_config(config, overrides), own_output=False)
    source = next((document for document in documents(opened) if doc_id in (None, document.doc_id)), None)
    if source is None:
        raise ConfigError("input.uri: " + ("no document there" if doc_id is None else f"no document {doc_id!r} there"))
    parts = opened.preparer.parts(source)
    if chunk >= len(parts):
        raise ConfigError(f"--chunk {chunk}: document {source.doc_id!r} is answered in {len(parts)}, counted from 0")
    prepared = parts[chunk]
    question = next((q for q in prepared.questions if question_id in (None, q.asked.question_id)), None)
    if question is None:
        ids = ", ".join(q.asked.question_id for q in prepared.questions[:5])
        raise ConfigError(f"--question {question_id}: document {source.doc_id!r} is not asked it; it is asked {ids or 'nothing'}")
    for line in _report(opened, prepared, question):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


def documents(opened: OpenedRun) -> Iterator[SourceDocument]:
    """The documents of a run's input, in its order; rows that are none are left out."""
    for file in opened.files:
        for span in plan_spans(file, opened.config.input, 1 << 62):
            yield from (item for item in scan(span, opened.config.input) if not isinstance(item, DeadLetter))


def _report(opened: OpenedRun, prepared: PreparedDocument, question: PreparedQuestion) -> Iterator[str]:
    prompts = opened.preparer.prompts
    prefix = tuple(token for segment in prepared.segments for token in segment)
    ids = prefix + question.token_ids
    yield f"document {prepared.source.doc_id} · question {question.asked.question_id} · model {opened.model.name} ({opened.model.revision})"
    if question.status is not None:
        yield f"not asked: {question.status}: {question.error}"
    else:
        yield "--- prompt"
        yield prompts.render(prepared.text, question.asked.text)
        yield "--- end of prompt"
    if not prefix:
        return
    shared = len(prepared.segments[0]) if len(prepared.segments) > 1 else 0
    yield (
        f"tokens: instruction {shared} + document {len(prefix) - shared} + question {len(question.token_ids)} = {len(ids)}, "
        f"answer at most {question.asked.sampling.max_new_tokens}, context {opened.preparer.context_tokens}"
    )
    yield f"first: {_tokens(opened, ids[:SHOWN_TOKENS])}"
    yield f"question and after: {_tokens(opened, question.token_ids)}"
    yield f"BOS tokens at the start: {prompts.leading_bos(ids)}"
    whole = prompts.reference_ids(prepared.text, question.asked.text)
    yield f"equal to the whole prompt encoded in one go: {'yes' if whole == ids else 'NO'}"
    if prepared.flags:
        yield f"flags: {', '.join(prepared.flags)}"


def _tokens(opened: OpenedRun, ids: Sequence[int]) -> str:
    tokenizer = opened.preparer.prompts.tokenizer
    return " ".join(f"{tokenizer.token(token_id)!r}:{token_id}" for token_id in ids)
