"""Answers in other shapes than Parquet: one answers.jsonl, written from the shards that the manifest names."""

from __future__ import annotations

import json

from askmany.pipeline.commit import Manifest, read_answers
from askmany.pipeline.merging import sorted_rows
from askmany.pipeline.storage import ObjectStore

JSONL = "answers.jsonl"


def write_jsonl(store: ObjectStore, manifest: Manifest, sort: bool = False) -> str:
    """Put answers.jsonl: a JSON object a record, valid UTF-8, one shard in memory at a time; with `sort`, in order of key over all shards,
    a few rows of each in memory. Returns its URI."""
    plain = (row for table in read_answers(store, manifest) for row in table.to_pylist())
    with store.writer(JSONL) as stream:
        for row in sorted_rows(store, sorted(manifest.shards)) if sort else plain:
            stream.write(json.dumps(row, ensure_ascii=False).encode("utf-8") + b"\n")
    return store.uri_of(JSONL)
