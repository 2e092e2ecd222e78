"""Sorted rows: those of all shards, once each, in order of key, however many shards may be open at once."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from askmany.pipeline.commit import list_shards, read_manifest
from askmany.pipeline.export import write_jsonl
from askmany.pipeline.merging import by_document, sorted_rows
from askmany.pipeline.schema import Record
from askmany.pipeline.storage import ObjectStore
from tests.helpers.stored import stored_run

KEYS = st.tuples(st.text(st.sampled_from("ab\U0001f600\uffff"), max_size=3), st.sampled_from(["q1", "q2"]), st.integers(0, 2))


@settings(deadline=None, max_examples=25)
@given(st.dictionaries(KEYS, st.integers(0, 5), min_size=1, max_size=40), st.integers(2, 4))
def test_rows_of_all_shards_in_order_of_key(shard_of: dict[tuple[str, str, int], int], fan: int) -> None:
    shards: dict[str, list[Record]] = {}
    for (doc_id, question_id, chunk), shard in shard_of.items():
        shards.setdefault(f"g{shard}", []).append(Record(doc_id, question_id, "ok", f"{doc_id}{chunk}", (1, 2), chunk=chunk))
    with TemporaryDirectory() as folder:
        store = ObjectStore(stored_run(Path(folder), shards), {})
        rows = list(sorted_rows(store, list(list_shards(store)), fan))
        assert [(row["doc_id"], row["question_id"], row["chunk"]) for row in rows] == sorted(shard_of)
        assert all(row["answer"] == f"{row['doc_id']}{row['chunk']}" and row["answer_token_ids"] == [1, 2] for row in rows)
        documents = [{row["doc_id"] for row in document} for document in by_document(iter(rows))]
        assert documents == [{doc_id} for doc_id in sorted({doc_id for doc_id, _, _ in shard_of})]
        write_jsonl(store, read_manifest(store), sort=True)
        lines = [json.loads(line) for line in store.get("answers.jsonl").splitlines()]
        assert lines == rows
