"""Wide Parquet: a row a document (a chunk of one that was split), a column of typed values a question, beside each the record's status."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from askmany.engine.errors import ConfigError
from askmany.pipeline.export_shapes import Answers
from askmany.pipeline.storage import ObjectStore

NAME = "wide.parquet"
MAX_QUESTIONS, ROWS_AT_ONCE = 2000, 1000
TYPES = {"int": pa.int64(), "number": pa.float64(), "bool": pa.bool_(), "multi_choice": pa.list_(pa.string())}


def export_wide(answers: Answers, target: ObjectStore) -> list[str]:
    """One Parquet file. ConfigError when the documents' own questions would make more columns than a table can bear."""
    kinds = _question_kinds(answers)
    schema = _schema(kinds)
    with target.writer(NAME) as stream, pq.ParquetWriter(stream, schema, compression="zstd") as writer:
        rows = (row for document in answers.documents() for row in _wide_rows(document, kinds))
        while batch := list(islice(rows, ROWS_AT_ONCE)):
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))
    return [NAME]


def _question_kinds(answers: Answers) -> dict[str, str]:
    """Question ids in order of first appearance, with the kind of their answers (text where documents disagree)."""
    kinds: dict[str, str] = {}
    for row in answers.rows():
        kind = row["answer_type"] or "text"
        if kinds.setdefault(row["question_id"], kind) != kind:
            kinds[row["question_id"]] = "text"
        if len(kinds) > MAX_QUESTIONS:
            raise ConfigError(f"{answers.store.uri}: more than {MAX_QUESTIONS} questions, too many for columns; the long shape holds them")
    return kinds


def _schema(kinds: Mapping[str, str]) -> pa.Schema:
    fields = [pa.field("doc_id", pa.string()), pa.field("chunk", pa.int32())]
    for question_id, kind in kinds.items():
        fields += [pa.field(question_id, TYPES.get(kind, pa.string())), pa.field(f"{question_id}.status", pa.string())]
    names = [field.name for field in fields]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"question id {twice[0]!r} would make a column twice; rename the question")
    return pa.schema(fields)


def _wide_rows(rows: list[dict[str, Any]], kinds: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    by_document: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        wide = by_document.setdefault((row["doc_id"], row["chunk"]), {"doc_id": row["doc_id"], "chunk": row["chunk"]})
        wide[row["question_id"]] = _value(row, kinds[row["question_id"]])
        wide[f"{row['question_id']}.status"] = row["status"]
    yield from by_document.values()


def _value(row: Mapping[str, Any], kind: str) -> Any:
    """The typed value where the record has one; JSON stays text, free text is the answer."""
    if row["status"] != "ok":
        return None
    if kind in ("text", "regex", "choice", "date") or row["value"] is None:
        absent = row["value"] == "null"
        return None if absent or kind in TYPES else row["answer"]
    return row["value"] if kind == "json" and row["value"] != "null" else json.loads(row["value"])
