"""The first look at the input: every document's place, size and verdict, found by CPU tasks that read and tokenise spans of files.

`survey_spans` is what a task does; `run_survey` hands spans to Ray Data and gathers the rows. Text stays inside the task that read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from askmany.engine.errors import ConfigError
from askmany.pipeline.cells import cell_of
from askmany.pipeline.columns import release, reordered
from askmany.pipeline.config import InputConfig, RunConfig
from askmany.pipeline.documents import DeadLetter, Locator, SourceDocument
from askmany.pipeline.iteration import batches
from askmany.pipeline.plan import DOCUMENTS
from askmany.pipeline.preparing import PreparedDocument, Preparer, prompt_identity
from askmany.pipeline.questions import QuestionSetError
from askmany.pipeline.readers import Span, scan
from askmany.pipeline.storage import open_binary

TASK_BYTES = 32 << 20
TASK_SPANS = 256
SPAN = pa.schema(
    [
        ("uri", pa.string()),
        ("name", pa.string()),
        ("format", pa.string()),
        ("start", pa.int64()),
        ("stop", pa.int64()),
        ("size", pa.int64()),
    ]
)
# Beside what the plan takes, what a plan for some of a document's questions needs: the tokens and answer tokens of its own questions, and
# the ids of the questions that need no engine, one for each chunk in which that is so.
SURVEYED = pa.schema(
    [
        *DOCUMENTS,
        pa.field("own_tokens", pa.list_(pa.int32())),
        pa.field("own_answer_tokens", pa.list_(pa.int32())),
        pa.field("settled", pa.list_(pa.string())),
    ]
)
# A row is a document, a dead letter (`reason`), or a reason to refuse the whole run (`refused`).
FOUND = pa.schema(
    [pa.field(f.name, f.type.value_type if pa.types.is_dictionary(f.type) else f.type) for f in SURVEYED]
    + [pa.field("name", pa.string()), pa.field("reason", pa.string()), pa.field("refused", pa.bool_())]
)


@dataclass(frozen=True, slots=True)
class Survey:
    """What the input holds: documents (schema `SURVEYED`, in input order), dead letters, documents that nothing is asked of."""

    documents: pa.Table
    dead_letters: tuple[DeadLetter, ...]
    unasked: int


def pack_spans(spans: Iterable[Span]) -> list[pa.Table]:
    """Spans as blocks of one task each: about `TASK_BYTES`, at most `TASK_SPANS`."""
    blocks: list[list[Span]] = [[]]
    size = 0
    for span in spans:
        if blocks[-1] and (size + span.size > TASK_BYTES or len(blocks[-1]) >= TASK_SPANS):
            blocks.append([])
            size = 0
        blocks[-1].append(span)
        size += span.size
    return [pa.Table.from_pylist([asdict(span) for span in block], schema=SPAN) for block in blocks if block]


def survey_spans(block: pa.Table, columns: InputConfig, preparer: Preparer) -> pa.Table:
    """The rows (schema `FOUND`) of a block of spans. Never raises for what a document holds."""
    rows: list[dict[str, object]] = []
    for values in block.to_pylist():
        rows += _limited((_found(item, preparer) for item in scan(Span(**values), columns)), columns.limit)
    return pa.Table.from_pylist(rows, schema=FOUND)


def _limited(rows: Iterable[dict[str, object]], limit: int | None) -> Iterator[dict[str, object]]:
    """The rows up to the `limit`-th document: no span has to give more than the whole run takes."""
    documents = 0
    for row in rows:
        yield row
        documents += row.get("reason") is None
        if documents == limit:
            return


def _found(item: SourceDocument | DeadLetter, preparer: Preparer) -> dict[str, object]:
    if isinstance(item, DeadLetter):
        return {**asdict(item.locator), "doc_id": item.doc_id, "reason": item.reason}
    place = asdict(item.locator)
    try:
        parts = preparer.parts(item)
        for part in parts:
            preparer.check_grammars(part)
    except QuestionSetError as error:
        return {**place, "doc_id": item.doc_id, "reason": str(error), "refused": True}
    except ConfigError as error:
        return {**place, "doc_id": item.doc_id, "reason": str(error)}
    except Exception as error:  # whatever one document does to the tokenizer, the survey goes on
        return {**place, "doc_id": item.doc_id, "reason": f"{type(error).__name__}: {error}"}
    return place | {"doc_id": item.doc_id, "content_hash": bytes.fromhex(item.content_hash)} | _sizes(parts, preparer)


def _sizes(parts: Sequence[PreparedDocument], preparer: Preparer) -> dict[str, object]:
    """What the survey tells of a prepared document: what is asked of it, and how much that takes."""
    answerable = [question for part in parts for question in part.answerable]
    own = preparer.own(parts[0])
    settled = [question.asked.question_id for part in parts for question in part.questions if question.status is not None]
    cells = [cell_of(question.asked) for question in own]
    return {
        "prompt": prompt_identity(parts),
        "document_tokens": sum(part.document_tokens for part in parts),
        "longest_tokens": max(part.document_tokens for part in parts),
        "chunks": len(parts),
        "questions": len(parts[0].questions),
        "question_tokens": sum(len(question.token_ids) for question in answerable),
        "answer_tokens": sum(question.ask.answer_tokens for question in answerable),
        "answerable": len(answerable),
        "shared": preparer.shared_name,
        "own_questions": [question_id for question_id, _ in cells] or None,
        "own_identities": [identity for _, identity in cells] or None,
        "own_tokens": [len(question.token_ids) for question in own] or None,
        "own_answer_tokens": [question.ask.answer_tokens for question in own] or None,
        "settled": settled or None,
    }


def run_survey(spans: Sequence[Span], config: RunConfig, build_preparer: Callable[[RunConfig], Preparer]) -> Survey:
    """Read and tokenise every span on the cluster's CPUs. ConfigError when something found refuses the run."""
    import ray.data

    blocks = pack_spans(spans)
    if not blocks:
        return gather([], config.input)

    def task(block: pa.Table) -> pa.Table:
        return survey_spans(block, config.input, build_preparer(config))

    found = ray.data.from_arrow(blocks).map_batches(task, batch_size=None, batch_format="pyarrow", num_cpus=1)
    with closing(batches(found)) as tables:
        return gather(tables, config.input)


def gather(tables: Iterable[pa.Table], columns: InputConfig) -> Survey:
    """One survey out of the tasks' rows (schema `FOUND`), in input order whatever order they came in."""
    parts, bad = [SURVEYED.empty_table()], []
    for table in tables:
        if table.column("reason").null_count < table.num_rows:
            bad += table.filter(pc.is_valid(table.column("reason"))).to_pylist()
            table = table.filter(pc.is_null(table.column("reason")))
        parts.append(_own(table.select(SURVEYED.names).cast(SURVEYED)))
    bad.sort(key=lambda row: (row["uri"], row["start"], row["length"]))
    for row in bad:
        if row["refused"]:
            raise ConfigError(row["reason"])
    letters = tuple(_exact_line(_dead_letter(row), columns) for row in bad)
    documents = in_input_order(_joined(parts)).slice(0, columns.limit)
    asked = documents.filter(pc.greater(documents.column("questions"), 0)) if _unasked(documents) else documents
    release()
    return Survey(asked, letters, documents.num_rows - asked.num_rows)


def _joined(parts: list[pa.Table]) -> pa.Table:
    """The parts as one table; the list is emptied, so that they go when the table does."""
    table = pa.concat_tables(parts).unify_dictionaries()
    parts.clear()
    return table


def in_input_order(documents: pa.Table) -> pa.Table:
    """Rows (schema `SURVEYED`) by file and place."""
    uris = documents.column("uri").combine_chunks()
    ranks = np.argsort(np.argsort(np.array(uris.dictionary.to_pylist(), dtype=object))) if len(uris.dictionary) else np.zeros(0, dtype=int)
    keys = [documents.column(name).to_numpy() for name in ("length", "start")]
    order = pa.array(np.lexsort([*keys, ranks[uris.indices.to_numpy()]]))
    columns = dict(zip(SURVEYED.names, documents.columns, strict=True))
    del documents, uris, keys
    return reordered(columns, order, SURVEYED.names).cast(SURVEYED)


def _own(table: pa.Table) -> pa.Table:
    """The same rows in this process's memory: a block of the object store lives as long as a column of it is in use."""
    return table.take(pa.array(np.arange(table.num_rows)))


def _unasked(documents: pa.Table) -> bool:
    return bool(documents.num_rows) and pc.min(documents.column("questions")).as_py() == 0


def _dead_letter(row: dict[str, object]) -> DeadLetter:
    locator = Locator(row["uri"], row["name"], row["format"], row["start"], row["length"], row["line"])  # type: ignore[arg-type]
    return DeadLetter(locator, str(row["reason"]), row["doc_id"])  # type: ignore[arg-type]


def _exact_line(letter: DeadLetter, columns: InputConfig) -> DeadLetter:
    """The letter with its line in the file; spans other than a file's first know their bytes only."""
    if letter.locator.line:
        return letter
    line, left = 1, letter.locator.start
    with open_binary(letter.locator.uri, columns.storage_options) as stream:
        while left and (data := stream.read(min(left, 1 << 20))):
            line += data.count(b"\n")
            left -= len(data)
    return replace(letter, locator=replace(letter.locator, line=line))
