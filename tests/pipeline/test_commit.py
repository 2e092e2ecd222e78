"""Shards and manifests: whole or not there, and never another run's."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from askmany.engine.errors import ConfigError
from askmany.pipeline.attempts import begin
from askmany.pipeline.commit import (
    MANIFEST,
    RUN,
    ShardFooter,
    current_answers,
    list_shards,
    read_answers,
    read_footer,
    read_manifest,
    seal,
    shard_name,
    write_shard,
)
from askmany.pipeline.export import write_jsonl
from askmany.pipeline.schema import Record, answer_schema, to_table
from askmany.pipeline.storage import ObjectStore


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore(str(tmp_path / "out"), {})


def put(store: ObjectStore, group: str, rows: int, fingerprint: str = "f", **usage: float) -> ShardFooter:
    records = [Record(f"{group}-{i}", "q", "ok" if i else "error", answer=f"a{i} é\u2028", error=None) for i in range(rows)]
    return write_shard(store, to_table(records), fingerprint, group, attempt=1, documents=rows, usage=usage)


def test_a_shard_says_what_it_is(store: ObjectStore) -> None:
    footer = put(store, "g1", 3, steps=2)
    assert read_footer(store, shard_name("g1")) == footer == ShardFooter("f", "g1", 1, 3, 3, {"ok": 2, "error": 1}, {"steps": 2})
    table = pq.read_table(store.open(shard_name("g1")))
    assert table.schema.equals(answer_schema())
    assert list(list_shards(store)) == ["answers/g1.parquet"]


@pytest.mark.parametrize("damage", [b"", b"PAR1 not a file", None])
def test_what_is_no_shard_has_no_footer(store: ObjectStore, damage: bytes | None) -> None:
    put(store, "g1", 3)
    name = shard_name("g1")
    store.put(name, store.get(name)[:-20] if damage is None else damage)
    assert read_footer(store, name) is None
    assert read_footer(store, shard_name("none")) is None


def test_a_foreign_parquet_file_or_another_schema_version_is_no_shard(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with store.writer(shard_name("foreign")) as stream:
        pq.write_table(to_table([]), stream)
    assert read_footer(store, shard_name("foreign")) is None
    put(store, "g1", 1)
    monkeypatch.setattr("askmany.pipeline.commit.SCHEMA_VERSION", 99)
    assert read_footer(store, shard_name("g1")) is None


def test_the_seal_names_exactly_the_planned_whole_shards(store: ObjectStore) -> None:
    known = put(store, "g1", 3, steps=2, kv_bytes_read=10)
    put(store, "g2", 2, steps=1)
    put(store, "other run", 2, fingerprint="else")
    put(store, "not planned", 2)
    put(store, "rows missing", 1)
    store.put(shard_name("damaged"), b"x")
    planned = {"g1": 3, "g2": 2, "other run": 2, "rows missing": 2, "damaged": 4}
    manifest = seal(store, "f", planned, {"g1": known})
    assert sorted(manifest.shards) == [shard_name("g1"), shard_name("g2")]
    assert not manifest.complete
    assert (manifest.records, manifest.documents, manifest.planned_records) == (5, 5, 13)
    assert manifest.statuses == {"ok": 3, "error": 2}
    assert manifest.usage == {"steps": 3, "kv_bytes_read": 10}
    assert read_manifest(store) == manifest
    assert seal(store, "f", {"g1": 3, "g2": 2}, {}).complete
    assert sum(table.num_rows for table in read_answers(store, manifest)) == 5


def test_a_group_written_twice_counts_once(store: ObjectStore) -> None:
    put(store, "g1", 3)
    put(store, "g1", 3)
    assert seal(store, "f", {"g1": 3}, {}).records == 3


def test_answers_as_they_stand(store: ObjectStore) -> None:
    with pytest.raises(ConfigError, match=r"run\.json: no such file"):
        list(current_answers(store))
    store.put(RUN, json.dumps({"fingerprint": "f"}).encode())
    put(store, "g1", 3)
    put(store, "other", 2, fingerprint="else")
    store.put(shard_name("damaged"), b"x")
    assert sum(table.num_rows for table in current_answers(store)) == 3
    seal(store, "f", {"g1": 3, "g2": 1}, {})
    put(store, "g2", 1)
    assert sum(table.num_rows for table in current_answers(store)) == 4  # the manifest is not complete: the listing counts
    seal(store, "f", {"g1": 3}, {})
    assert sum(table.num_rows for table in current_answers(store)) == 3


def test_manifests_that_are_none_are_refused_by_name(store: ObjectStore) -> None:
    with pytest.raises(ConfigError, match=r"manifest\.json: no such file"):
        read_manifest(store)
    for text in (b"{", b"[]", b'{"a": 1}'):
        store.put(MANIFEST, text)
        with pytest.raises(ConfigError, match=r"manifest\.json: not a manifest"):
            read_manifest(store)


def test_jsonl_has_every_record_on_a_line_of_its_own(store: ObjectStore) -> None:
    put(store, "g1", 3)
    put(store, "g2", 2)
    uri = write_jsonl(store, seal(store, "f", {"g1": 3, "g2": 2}, {}))
    assert uri.endswith("answers.jsonl")
    lines = store.get("answers.jsonl").decode().split("\n")
    rows = [json.loads(line) for line in lines[:-1]]
    assert lines[-1] == ""
    assert len(rows) == 5
    assert rows[1]["answer"] == "a1 é\u2028"
    assert list(rows[0]) == answer_schema().names


def test_tries_are_counted_by_launch(store: ObjectStore) -> None:
    assert [begin(store, "l1", "g", 2) for _ in range(3)] == [1, 2, None]
    assert begin(store, "l1", "h", 2) == 1
    assert begin(store, "l2", "g", 2) == 1
