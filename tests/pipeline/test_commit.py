"""Shards and manifests: whole or not there, and never another run's."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from askmany.engine.errors import ConfigError
from askmany.pipeline.commit import (
    MANIFEST,
    RUN,
    Shard,
    ShardFooter,
    checksum,
    current_answers,
    describe,
    list_shards,
    read_answers,
    read_footer,
    read_manifest,
    seal,
    shard_name,
    verify,
    write_shard,
)
from askmany.pipeline.export import write_jsonl
from askmany.pipeline.schema import Record, answer_schema, to_table
from askmany.pipeline.storage import ObjectStore


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore(str(tmp_path / "out"), {})


def put(store: ObjectStore, group: str, rows: int, fingerprint: str = "f", epoch: int = 1, **usage: float) -> Shard:
    records = [Record(f"{group}-{i}", "q", "ok" if i else "error", answer=f"a{i} é\u2028", error=None) for i in range(rows)]
    table = to_table(records)
    return write_shard(store, table, describe(table, fingerprint, group, epoch, 1, usage))


def test_a_shard_says_what_it_is(store: ObjectStore) -> None:
    shard = put(store, "g1", 3, steps=2)
    table = pq.read_table(store.open(shard_name("g1")))
    expected = ShardFooter("f", "g1", 1, 1, 3, 3, {"ok": 2, "error": 1}, checksum(table), {"steps": 2})
    assert read_footer(store, shard_name("g1")) == shard.footer == expected
    assert shard.bytes == store.list("answers")[shard_name("g1")]
    assert verify(store, shard_name("g1")) == ""
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


def test_a_harmed_shard_is_found_out(store: ObjectStore) -> None:
    put(store, "g1", 3)
    name = shard_name("g1")
    footer = read_footer(store, name)
    assert footer is not None
    table = to_table([Record(f"g1-{i}", "q", "ok" if i else "error", answer="another") for i in range(3)])
    write_shard(store, table, footer)
    assert "checksum" in verify(store, name)
    store.put(name, b"x")
    assert verify(store, name) == "not a whole shard"


def test_a_shard_that_is_known_is_not_opened_unless_its_size_changed(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = {group: put(store, group, 3) for group in ("g1", "g2", "g3")}
    opened: list[str] = []
    monkeypatch.setattr("askmany.pipeline.commit.read_footer", lambda store, name: opened.append(name) or read_footer(store, name))
    assert seal(store, "f", dict.fromkeys(shards, 3), shards).complete
    assert opened == []
    put(store, "g2", 3, more=1)
    assert seal(store, "f", dict.fromkeys(shards, 3), shards).usage == {"more": 1}
    assert opened == [shard_name("g2")]


def test_a_committed_shard_that_the_listing_does_not_show_yet_counts(store: ObjectStore) -> None:
    shards = {group: put(store, group, 3) for group in ("g1", "g2")}
    store.delete(shard_name("g2"))
    assert seal(store, "f", {"g1": 3, "g2": 3}, shards).complete
    assert not seal(store, "f", {"g1": 3, "g2": 3}, {"g1": shards["g1"]}).complete


def test_a_straggler_of_an_older_plan_is_not_named(store: ObjectStore) -> None:
    put(store, "old", 3, epoch=1)
    put(store, "new", 3, epoch=2)
    assert list(seal(store, "f", {"new": 3}, {}).shards) == [shard_name("new")]
