"""Answers in the shapes that other tools take: what an export is given, and the ones that are a row an answer.

Exports read the shards a manifest names, one at a time, and write into a target prefix; each returns the names it wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from askmany.pipeline.commit import current_answers, current_shards
from askmany.pipeline.merging import by_document, sorted_rows
from askmany.pipeline.run_file import read_run
from askmany.pipeline.storage import ObjectStore

ANSWERED = ("ok", "invalid_output", "length")


@dataclass(frozen=True)
class Answers:
    """The stored answers of a run, to be read as often as an export needs."""

    store: ObjectStore

    def tables(self) -> Iterator[pa.Table]:
        """One table a shard, shards in a fixed order."""
        yield from current_answers(self.store)

    def rows(self) -> Iterator[dict[str, Any]]:
        for table in self.tables():
            yield from table.to_pylist()

    def documents(self) -> Iterator[list[dict[str, Any]]]:
        """All records of one document after another's, whatever shards they lie in."""
        yield from by_document(sorted_rows(self.store, list(current_shards(self.store))))

    @cached_property
    def model(self) -> str:
        """Name and revision of the model, for tools that ask for a version."""
        run = read_run(self.store) or {}
        config = run.get("config", {})
        return f"{config.get('model', 'unknown')}@{str(config.get('model_revision') or run.get('fingerprint') or 'unknown')[:12]}"


Export = Callable[[Answers, ObjectStore], list[str]]


def key_text(row: Mapping[str, Any]) -> str:
    """A record's key as one text: `doc_id/question_id`, and `/chunk` after it where a document has several."""
    key = f"{row['doc_id']}/{row['question_id']}"
    return key if not row["chunk"] else f"{key}/{row['chunk']}"


def write_lines(stream: IO[bytes], rows: Iterator[Mapping[str, Any]]) -> None:
    """JSON lines in UTF-8."""
    for row in rows:
        stream.write(json.dumps(row, ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n")


def export_long(answers: Answers, target: ObjectStore) -> list[str]:
    """One Parquet file with a row a record, all columns."""
    return _one_parquet(answers, target, "answers.parquet")


def export_batch(answers: Answers, target: ObjectStore) -> list[str]:
    """`batch.jsonl` as hosted batch APIs give it: a line a request with its `custom_id`, a response or an error."""
    with target.writer("batch.jsonl") as stream:
        write_lines(stream, (_batch_line(row, answers.model) for row in answers.rows()))
    return ["batch.jsonl"]


def export_dataset(answers: Answers, target: ObjectStore) -> list[str]:
    """A Hugging Face datasets folder: `data/train-*.parquet` and a card; `datasets.load_dataset(folder)` reads it."""
    names = []
    tables = list(answers.store.list("answers"))
    for number, table in enumerate(answers.tables()):
        name = f"data/train-{number:05d}-of-{len(tables):05d}.parquet"
        with target.writer(name) as stream:
            pq.write_table(table.replace_schema_metadata(None), stream, compression="zstd")
        names.append(name)
    card = "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: data/train-*.parquet\n---\n"
    target.put("README.md", f"{card}\nAnswers of {answers.model}: a row for each question of each document.\n".encode())
    return [*names, "README.md"]


def _one_parquet(answers: Answers, target: ObjectStore, name: str) -> list[str]:
    with target.writer(name) as stream:
        writer = None
        for table in answers.tables():
            plain = table.replace_schema_metadata(None)
            writer = writer or pq.ParquetWriter(stream, plain.schema, compression="zstd")
            writer.write_table(plain)
        if writer:
            writer.close()
    return [name]


def _batch_line(row: Mapping[str, Any], model: str) -> dict[str, Any]:
    key = key_text(row)
    if row["status"] not in ANSWERED:
        return {"id": key, "custom_id": key, "response": None, "error": {"code": row["status"], "message": row["error"] or row["status"]}}
    prompt = (row["document_tokens"] or 0) + (row["question_tokens"] or 0)
    completion = len(row["answer_token_ids"] or ())
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": row["answer"]},
        "finish_reason": row["finish_reason"],
        "logprobs": None,
    }
    body = {
        "id": key,
        "object": "chat.completion",
        "model": model,
        "choices": [choice],
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
    }
    error = None if row["status"] == "ok" else {"code": row["status"], "message": row["error"]}
    return {"id": key, "custom_id": key, "response": {"status_code": 200, "request_id": key, "body": body}, "error": error}
