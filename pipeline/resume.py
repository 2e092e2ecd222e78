"""A second run on the same output: which groups are committed, and a plan that keeps them and adds what is new.

A plan whose input listing has not changed is taken as it is, without reading a document.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from askmany.engine.errors import ConfigError
from askmany.pipeline.balance import CostModel, GroupLimits
from askmany.pipeline.commit import PLAN, Shard, ShardFooter, group_of, list_shards, read_footer
from askmany.pipeline.config import InputConfig
from askmany.pipeline.ledger import read_ledger
from askmany.pipeline.plan import Plan, from_bytes, from_table, make_plan
from askmany.pipeline.storage import InputFile, ObjectStore


def listing_hash(files: Sequence[InputFile], columns: InputConfig) -> str:
    """What the input looks like from outside: names, sizes, versions, and how many documents are taken."""
    names = [[file.uri, file.size, file.version] for file in files]
    return hashlib.sha256(json.dumps([names, columns.limit, columns.format]).encode()).hexdigest()[:16]


def read_plan(store: ObjectStore) -> tuple[Plan, str] | None:
    """The plan in the output and the listing it was made from; None when there is none that can be read."""
    try:
        return from_bytes(store.get(PLAN))
    except (FileNotFoundError, pa.ArrowException, KeyError):
        return None


@dataclass(frozen=True, slots=True)
class Committed:
    """The planned groups whose shards are there, and the objects that bear a planned group's name and are not what was planned."""

    shards: dict[str, Shard]
    distrusted: tuple[str, ...] = ()


def committed(store: ObjectStore, plan: Plan, fingerprint: str) -> Committed:
    """What is done. A shard that the ledger tells of is not opened while its size is the same; any other is, and must prove itself."""
    planned = {group.name: group.records for group in plan.groups}
    told = told_shards(store)
    done: dict[str, Shard] = {}
    distrusted: list[str] = []
    for name, size in list_shards(store).items():
        group = group_of(name)
        if group not in planned:
            continue
        shard = told.get(group)
        if shard is None or shard.bytes != size:
            footer = read_footer(store, name)
            shard = Shard(footer, size) if footer else None
        if shard is not None and shard.footer.fingerprint == fingerprint and shard.footer.rows == planned[group]:
            done[group] = shard
        else:
            distrusted.append(name)
    return Committed(done, tuple(distrusted))


def told_shards(store: ObjectStore) -> dict[str, Shard]:
    """The shards that the ledger's last word on each group describes."""
    names = ShardFooter.__dataclass_fields__
    found: dict[str, Shard] = {}
    for line in read_ledger(store):
        if line.get("kind") == "group":
            with contextlib.suppress(TypeError, KeyError):
                found[line["group"]] = Shard(ShardFooter(**{key: line[key] for key in names}), line["bytes"])
    return found


def extend(plan: Plan, done: set[str], documents: pa.Table, speed: float, costs: CostModel, limits: GroupLimits, uri: str) -> Plan:
    """A plan that keeps the committed groups and groups anew whatever else the input holds (`documents`, schema `DOCUMENTS`).

    ConfigError when a committed document is no longer in the input, or no longer the same.
    """
    kept = plan.table.filter(pc.is_in(plan.table.column("group").cast(pa.string()), pa.array(sorted(done), pa.string())))
    now = dict(zip(documents.column("doc_id").to_pylist(), documents.column("content_hash").to_pylist(), strict=True))
    for doc_id, content in zip(kept.column("doc_id").to_pylist(), kept.column("content_hash").to_pylist(), strict=True):
        if now.get(doc_id) != content:
            what = "has changed since" if doc_id in now else "is no longer in the input"
            raise ConfigError(f"output.uri: {uri} holds answers for doc_id {doc_id!r}, which {what}; choose another output")
    rest = documents.filter(pc.invert(pc.is_in(documents.column("doc_id"), kept.column("doc_id").combine_chunks())))
    fresh = make_plan(rest, speed, costs, limits)
    table = pa.concat_tables([_plain(kept), _plain(fresh.table)]).cast(plan.table.schema)
    return from_table(table)


def _plain(table: pa.Table) -> pa.Table:
    """The table without dictionaries, which differ from file to file."""
    fields = [pa.field(f.name, f.type.value_type if pa.types.is_dictionary(f.type) else f.type) for f in table.schema]
    return table.cast(pa.schema(fields))
