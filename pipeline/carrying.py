"""Records that outlive their plan: found in the output, written into the groups that a new plan gives them, put aside when unwanted.

`former.parquet` lists, as plan rows, the objects of earlier plans that hold records: written before a plan is replaced, so that a launch
that is killed anywhere between finds everything again. A shard that is no part of the plan any more goes from `answers/` to `former/`:
its records are out of the answers, and come back without being asked again if they are wanted again. `gc` removes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.compute as pc

from askmany.pipeline.attempts import FOLDER as ATTEMPTS
from askmany.pipeline.attempts import KEPT
from askmany.pipeline.cells import Sets
from askmany.pipeline.commit import ANSWERS, Shard, describe, list_shards, read_footer, read_records, shard_name, write_shard
from askmany.pipeline.plan import PLANNED, Group, Plan, from_bytes, from_table, plain_table, planned_documents, to_bytes
from askmany.pipeline.replanning import Source
from askmany.pipeline.schema import sort_by_key
from askmany.pipeline.storage import ObjectStore

FORMER, FORMER_PLAN = "former", "former.parquet"
AT_ONCE = 8


def read_former(store: ObjectStore) -> Plan | None:
    """The objects of earlier plans, each a group that is called like its object; None where there are none."""
    try:
        return from_bytes(store.get(FORMER_PLAN))[0]
    except (FileNotFoundError, pa.ArrowException, KeyError):
        return None


def find_sources(store: ObjectStore, plan: Plan, done: Mapping[str, Shard], fingerprint: str) -> tuple[list[Source], Sets]:
    """Everything in the output that holds records, and the sets of questions that its rows name: committed groups of the plan, kept results
    of unfinished ones, objects of earlier plans."""
    former = read_former(store)
    sources = [Source(shard_name(group.name), plan.rows(group), group.name, settled=True) for group in plan.groups if group.name in done]
    sources += _kept_results(store, plan, set(done), fingerprint)
    if former is not None:
        there = {*list_shards(store), *store.list(FORMER), *store.find(ATTEMPTS)}
        known = {source.name for source in sources}
        for group in former.groups:
            if group.name not in known and place(group.name, there) is not None:
                shard = group.name.startswith(f"{ANSWERS}/")
                name = group.name.removeprefix(f"{ANSWERS}/").removesuffix(".parquet") if shard else None
                sources.append(Source(group.name, former.rows(group), name))
    return sources, {**plan.sets, **(former.sets if former is not None else {})}


def place(name: str, there: Mapping[str, int] | set[str]) -> str | None:
    """Where an object lies now, of those that are there: where it was made, or put aside."""
    aside = name.replace(f"{ANSWERS}/", f"{FORMER}/", 1)
    return name if name in there else aside if aside in there else None


def _kept_results(store: ObjectStore, plan: Plan, done: set[str], fingerprint: str) -> Iterator[Source]:
    """Documents that a draining worker, or an earlier try, has answered of groups that are not committed."""
    groups = {group.name: group for group in plan.groups if group.name not in done}
    for name in store.find(ATTEMPTS):
        group = groups.get(name.split("/")[1])
        table = read_records(store, name, fingerprint) if group is not None and name.endswith(KEPT) else None
        if group is not None and table is not None:
            rows = plan.rows(group)
            yield Source(name, rows.filter(pc.is_in(rows.column("doc_id"), table.column("doc_id").combine_chunks())), None)


def write_former(store: ObjectStore, former: Sequence[Source], sets: Sets) -> None:
    """Put the list of objects of earlier plans."""
    tables = []
    for source in former:
        rows = plain_table(source.rows)
        index = rows.schema.get_field_index("group")
        tables.append(rows.set_column(index, "group", pa.repeat(pa.scalar(source.name), rows.num_rows)))
    if tables:
        plan = from_table(pa.concat_tables(tables).cast(PLANNED), sets)
        store.put(FORMER_PLAN, to_bytes(plan, ""))


def fill(store: ObjectStore, plan: Plan, groups: Sequence[Group], fingerprint: str, epoch: int) -> dict[str, Shard]:
    """Write the shards of groups whose records lie in a source. One that cannot be had whole is left out, to be asked of an engine."""
    there = {**list_shards(store), **store.list(FORMER), **store.find(ATTEMPTS)}

    def one(group: Group) -> Shard | None:
        name = place(group.source, there) if group.source else None
        return _fill(store, plan, group, name, fingerprint, epoch) if name else None

    with ThreadPoolExecutor(AT_ONCE) as pool:
        shards = pool.map(one, groups)
        return {group.name: shard for group, shard in zip(groups, shards, strict=True) if shard is not None}


def _fill(store: ObjectStore, plan: Plan, group: Group, name: str, fingerprint: str, epoch: int) -> Shard | None:
    records, footer = read_records(store, name, fingerprint), read_footer(store, name)
    if records is None or footer is None:
        return None
    wanted = {
        (document.doc_id, question_id) for document in planned_documents(plan.rows(group), plan.sets) for question_id in document.asked
    }
    keys = zip(records.column("doc_id").to_pylist(), records.column("question_id").to_pylist(), strict=True)
    found = records.filter(pa.array([key in wanted for key in keys], pa.bool_())).replace_schema_metadata(None)
    if found.num_rows != group.records:
        return None
    usage = footer.usage if name.startswith(f"{ANSWERS}/") else {}  # what a shard cost goes to its successor, once
    table = sort_by_key(found)
    return write_shard(store, table, describe(table, fingerprint, group.name, epoch, footer.attempt, usage))


def put_aside(store: ObjectStore, plan: Plan, done: Collection[str]) -> None:
    """Move shards of earlier plans out of the answers, but those that a group not yet done is to be filled from."""
    former = read_former(store)
    if former is None:
        return
    planned = {shard_name(group.name) for group in plan.groups}
    needed = {group.source for group in plan.groups if group.name not in done}
    listed = list_shards(store)
    for group in former.groups:
        if group.name in listed and group.name not in planned and group.name not in needed:
            store.put(group.name.replace(f"{ANSWERS}/", f"{FORMER}/", 1), store.get(group.name))
            store.delete(group.name)
