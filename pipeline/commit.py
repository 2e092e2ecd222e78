"""Answers become real here: one shard object a group, put whole, then a manifest that names the shards.

A shard's object is its commit: its name comes from the plan, it appears in one atomic put, and its footer says which run and group it
belongs to and what it holds. Readers take the shards that the manifest names; the manifest is rebuilt from the listing and the footers.
Knows nothing of engines or Ray.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from askmany.engine.errors import ConfigError
from askmany.pipeline.schema import SCHEMA_VERSION, STATUSES, count_statuses
from askmany.pipeline.storage import ObjectStore

ANSWERS, MANIFEST, RUN, PLAN, DEAD_LETTERS = "answers", "manifest.json", "run.json", "plan.parquet", "dead_letters.jsonl"
_FOOTER_KEY = b"askmany"


@dataclass(frozen=True, slots=True)
class ShardFooter:
    """What a shard says of itself, in its Parquet footer. `usage` are the engine's counters that this shard accounts for."""

    fingerprint: str
    group: str
    attempt: int
    rows: int
    documents: int
    statuses: Mapping[str, int]
    usage: Mapping[str, float] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION


def shard_name(group: str) -> str:
    return f"{ANSWERS}/{group}.parquet"


def group_of(name: str) -> str:
    return name.removeprefix(f"{ANSWERS}/").removesuffix(".parquet")


def write_shard(
    store: ObjectStore, table: pa.Table, fingerprint: str, group: str, attempt: int, documents: int, usage: Mapping[str, float]
) -> ShardFooter:
    """Put a group's records as one object. A second write of the same group replaces the first whole."""
    statuses = count_statuses(table.column("status").to_pylist())
    footer = ShardFooter(fingerprint, group, attempt, table.num_rows, documents, statuses, usage)
    metadata = {**(table.schema.metadata or {}), _FOOTER_KEY: json.dumps(asdict(footer)).encode()}
    sink = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(metadata), sink, compression="zstd")
    store.put(shard_name(group), sink.getvalue())
    return footer


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


def seal(store: ObjectStore, fingerprint: str, planned: Mapping[str, int], footers: Mapping[str, ShardFooter]) -> Manifest:
    """Write the manifest from the listing. `planned` maps groups to records; `footers` are those known already, by group.

    A shard that is unreadable, of another run, not planned, or with another number of rows than planned is not named.
    """
    shards: dict[str, dict[str, int]] = {}
    statuses: Counter[str] = Counter()
    usage: Counter[str] = Counter()
    for name, size in list_shards(store).items():
        group = group_of(name)
        footer = footers.get(group) or read_footer(store, name)
        if footer is None or footer.fingerprint != fingerprint or footer.rows != planned.get(group):
            continue
        shards[name] = {"rows": footer.rows, "bytes": size, "documents": footer.documents}
        statuses.update(footer.statuses)
        usage.update(footer.usage)
    manifest = Manifest(
        fingerprint=fingerprint,
        complete=set(map(group_of, shards)) == set(planned),
        planned_records=sum(planned.values()),
        documents=sum(shard["documents"] for shard in shards.values()),
        records=sum(shard["rows"] for shard in shards.values()),
        statuses={status: statuses[status] for status in STATUSES if statuses[status]},
        usage=dict(usage),
        shards=shards,
    )
    store.put(MANIFEST, json.dumps(asdict(manifest), indent=1).encode())
    return manifest


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
    """The answers as they stand: by the manifest of a complete run, else every whole shard of the run that is there."""
    manifest = read_manifest(store) if store.exists(MANIFEST) else None
    if manifest is not None and manifest.complete:
        yield from read_answers(store, manifest)
        return
    try:
        fingerprint = json.loads(store.get(RUN))["fingerprint"]
    except FileNotFoundError:
        raise ConfigError(f"{store.uri_of(RUN)}: no such file; is {store.uri} the output of a run?") from None
    for name in list_shards(store):
        footer = read_footer(store, name)
        if footer is not None and footer.fingerprint == fingerprint:
            with store.open(name) as stream:
                yield pq.ParquetFile(stream).read()
