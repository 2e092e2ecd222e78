"""A second run on the same output: the plan that is there, and which of its groups are committed.

A plan whose input listing and questions have not changed is taken as it is, without reading a document; otherwise see `replanning`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from askmany.pipeline.announcing import read_announced
from askmany.pipeline.commit import PLAN, Shard, ShardFooter, group_of, list_shards, read_footer
from askmany.pipeline.config import InputConfig
from askmany.pipeline.ledger import read_ledger
from askmany.pipeline.plan import Plan, from_bytes
from askmany.pipeline.storage import InputFile, ObjectStore


def listing_hash(files: Sequence[InputFile], columns: InputConfig, shared: str) -> str:
    """What a plan is made from, as it looks from outside: names, sizes and versions of files, how many documents are taken, and what is
    asked of them (`shared`: the name of the set of shared questions)."""
    names = [[file.uri, file.size, file.version] for file in files]
    asked = [shared, columns.questions, columns.max_questions]
    return hashlib.sha256(json.dumps([names, columns.limit, columns.format, asked]).encode()).hexdigest()[:16]


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
    """What is done. A shard that the ledger tells of, or that was announced, is not opened while its size is the same; any other is, and
    must prove itself."""
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
            shard = read_announced(store, group)
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
        if line.get("kind") in ("group", "carried"):
            with contextlib.suppress(TypeError, KeyError):
                found[line["group"]] = Shard(ShardFooter(**{key: line[key] for key in names}), line["bytes"])
    return found
