"""Answers become real here: one shard object a group, put whole, then a manifest that names the shards.

A shard's object is its commit: its name comes from the plan, it appears in one atomic put, and its footer says which run and group it
belongs to and what it holds. Readers take the shards that the manifest names; the manifest is rebuilt from the listing and the footers.
Knows nothing of engines or Ray.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from askmany.engine.errors import ConfigError
from askmany.pipeline.schema import KEY, SCHEMA_VERSION, STATUSES, count_statuses
from askmany.pipeline.storage import ObjectStore

ANSWERS, MANIFEST, RUN, PLAN, DEAD_LETTERS = "answers", "manifest.json", "run.json", "plan.parquet", "dead_letters.jsonl"
_FOOTER_KEY = b"askmany"


@dataclass(frozen=True, slots=True)
class ShardFooter:
    """What a shard says of itself, in its Parquet footer.

    `epoch` is the writer's (see `lock`), `checksum` covers the answers (see `checksum`), `usage` are the engine's counters that this shard
    accounts for.
    """

    fingerprint: str
    group: str
    epoch: int
    attempt: int
    rows: int
    documents: int
    statuses: Mapping[str, int]
    checksum: str
    usage: Mapping[str, float] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard that is known: its footer, and its object's size in bytes, by which a later listing tells whether it is still the same."""

    footer: ShardFooter
    bytes: int


def shard_name(group: str) -> str:
    return f"{ANSWERS}/{group}.parquet"


def group_of(name: str) -> str:
    return name.removeprefix(f"{ANSWERS}/").removesuffix(".parquet")


def write_shard(store: ObjectStore, table: pa.Table, footer: ShardFooter, before: Callable[[Shard], None] | None = None) -> Shard:
    """Put a group's records as one object, after telling `before` of it. A second write of the same group replaces the first whole."""
    return write_records(store, shard_name(footer.group), table, footer, before)


def write_records(
    store: ObjectStore, name: str, table: pa.Table, footer: ShardFooter, before: Callable[[Shard], None] | None = None
) -> Shard:
    """Put records under any name, with their footer."""
    metadata = {**(table.schema.metadata or {}), _FOOTER_KEY: json.dumps(asdict(footer)).encode()}
    sink = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(metadata), sink, compression="zstd")
    shard = Shard(footer, sink.getbuffer().nbytes)
    if before is not None:
        before(shard)
    store.put(name, sink.getbuffer())
    return shard


def describe(table: pa.Table, fingerprint: str, group: str, epoch: int, attempt: int, usage: Mapping[str, float]) -> ShardFooter:
    """The footer of records about to be written."""
    return ShardFooter(
        fingerprint=fingerprint,
        group=group,
        epoch=epoch,
        attempt=attempt,
        rows=table.num_rows,
        documents=pc.count_distinct(table.column("doc_id")).as_py(),
        statuses=count_statuses(table.column("status").to_pylist()),
        checksum=checksum(table),
        usage=usage,
    )


def checksum(table: pa.Table) -> str:
    """16 hex digits over keys, statuses and answers, in the table's order: the same for a table and for its copy read back from a file."""
    digest = hashlib.blake2b(digest_size=8)
    for name in (*KEY, "status", "answer", "answer_token_ids"):
        digest.update(json.dumps(table.column(name).to_pylist()).encode())
    return digest.hexdigest()


def read_records(store: ObjectStore, name: str, fingerprint: str) -> pa.Table | None:
    """Records written for this run, whole and unharmed; None otherwise."""
    footer = read_footer(store, name)
    if footer is None or footer.fingerprint != fingerprint or verify(store, name):
        return None
    with store.open(name) as stream:
        return pq.ParquetFile(stream).read()


def verify(store: ObjectStore, name: str) -> str:
    """Read a whole shard and compare it with its footer; "" when they agree, else what is wrong."""
    footer = read_footer(store, name)
    if footer is None:
        return "not a whole shard"
    try:
        with store.open(name) as stream:
            table = pq.ParquetFile(stream).read()
    except (OSError, pa.ArrowException) as error:
        return f"cannot be read: {error}"
    if table.num_rows != footer.rows or checksum(table) != footer.checksum:
        return f"{table.num_rows} rows with checksum {checksum(table)}, its footer says {footer.rows} with {footer.checksum}"
    return ""


def read_footer(store: ObjectStore, name: str) -> ShardFooter | None:
    """The footer of a shard; None when the object is no whole shard of this schema version."""
    try:
        with store.open(name) as stream:
            metadata = pq.ParquetFile(stream).metadata.metadata or {}
        values: dict[str, Any] = json.loads(metadata[_FOOTER_KEY])
        footer = ShardFooter(**values)
    except (OSError, pa.ArrowException, KeyError, ValueError, TypeError):
        return None
    return footer if footer.schema_version == SCHEMA_VERSION else None


def list_shards(store: ObjectStore) -> dict[str, int]:
    """Names and sizes in bytes of the shard objects that are there."""
    return {name: size for name, size in store.list(ANSWERS).items() if name.endswith(".parquet")}


@dataclass(frozen=True, slots=True)
class Manifest:
    """Which shards make up the answers, and what they add up to. `complete` once every planned group is there."""

    fingerprint: str
    complete: bool
    planned_records: int
    documents: int
    records: int
    statuses: Mapping[str, int]
    usage: Mapping[str, float]
    shards: Mapping[str, Mapping[str, int]]


def seal(
    store: ObjectStore,
    fingerprint: str,
    planned: Mapping[str, int],
    known: Mapping[str, Shard],
    documents: Mapping[str, int] | None = None,
) -> Manifest:
    """Write the manifest. `planned` maps groups to records; `known` are shards that need not be opened while their size is the same;
    `documents` says how many documents count with each group where that is not all that it holds records of.

    Named is every planned group's shard that is there, or that is known though the store's listing does not show it yet. A shard that is
    unreadable, of another run, not planned (an older plan's straggler), or with another number of rows than planned is not named.
    """
    listed = {group_of(name): size for name, size in list_shards(store).items()}
    found: dict[str, Shard] = {}
    for group, rows in planned.items():
        shard = known.get(group)
        if shard is None or listed.get(group, shard.bytes) != shard.bytes:
            footer = read_footer(store, shard_name(group)) if group in listed else None
            shard = Shard(footer, listed[group]) if footer else None
        if shard is not None and shard.footer.fingerprint == fingerprint and shard.footer.rows == rows:
            found[group] = shard
    manifest = _manifest(fingerprint, planned, found, documents or {})
    store.put(MANIFEST, json.dumps(asdict(manifest), indent=1).encode())
    return manifest


def _manifest(fingerprint: str, planned: Mapping[str, int], found: Mapping[str, Shard], documents: Mapping[str, int]) -> Manifest:
    statuses: Counter[str] = Counter()
    usage: Counter[str] = Counter()
    for shard in found.values():
        statuses.update(shard.footer.statuses)
        usage.update(shard.footer.usage)
    shards = {
        shard_name(group): {"rows": shard.footer.rows, "bytes": shard.bytes, "documents": shard.footer.documents}
        for group, shard in sorted(found.items())
    }
    return Manifest(
        fingerprint=fingerprint,
        complete=set(found) == set(planned),
        planned_records=sum(planned.values()),
        documents=sum(documents.get(group, shard.footer.documents) for group, shard in found.items()),
        records=sum(shard["rows"] for shard in shards.values()),
        statuses={status: statuses[status] for status in STATUSES if statuses[status]},
        usage=dict(usage),
        shards=shards,
    )


def read_manifest(store: ObjectStore) -> Manifest:
    """The manifest of a run. ConfigError when there is none."""
    try:
        return Manifest(**json.loads(store.get(MANIFEST)))
    except FileNotFoundError:
        raise ConfigError(f"{store.uri_of(MANIFEST)}: no such file; is {store.uri} the output of a run?") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{store.uri_of(MANIFEST)}: not a manifest: {error}") from error


def read_answers(store: ObjectStore, manifest: Manifest) -> Iterator[pa.Table]:
    """The shards the manifest names, one table each."""
    for name in sorted(manifest.shards):
        with store.open(name) as stream:
            yield pq.ParquetFile(stream).read()


def current_answers(store: ObjectStore) -> Iterator[pa.Table]:
    """The answers as they stand, one table a shard (see `current_shards`)."""
    for name in current_shards(store):
        with store.open(name) as stream:
            yield pq.ParquetFile(stream).read()


def current_shards(store: ObjectStore) -> Iterator[str]:
    """The shards as they stand: by the manifest of a complete run, else every whole shard of the run's plan that is there."""
    manifest = read_manifest(store) if store.exists(MANIFEST) else None
    if manifest is not None and manifest.complete:
        yield from sorted(manifest.shards)
        return
    try:
        fingerprint = json.loads(store.get(RUN))["fingerprint"]
    except FileNotFoundError:
        raise ConfigError(f"{store.uri_of(RUN)}: no such file; is {store.uri} the output of a run?") from None
    planned = _planned_groups(store)
    for name in list_shards(store):
        footer = read_footer(store, name) if planned is None or group_of(name) in planned else None
        if footer is not None and footer.fingerprint == fingerprint:
            yield name


def _planned_groups(store: ObjectStore) -> set[str] | None:
    """The groups of the plan in the output; None where there is none that can be read."""
    try:
        column = pq.read_table(io.BytesIO(store.get(PLAN)), columns=["group"]).column("group")
    except (FileNotFoundError, pa.ArrowException, KeyError):
        return None
    return set(pc.unique(column.cast(pa.string())).to_pylist())
