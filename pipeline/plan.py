"""The plan: every document of a run by place, size and cost, cut into named groups. Never a word of text.

One Arrow table, a row a document (or several, when its questions are asked in several groups: see `replanning`), rows of a group together
and groups in the order they are handed out; kept as one file in the output prefix. A group's name comes from what is in it and what is
asked of it, so the same work makes the same names on any machine.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from askmany.engine.errors import ConfigError
from askmany.pipeline.balance import CostModel, Floats, GroupLimits, guided_groups
from askmany.pipeline.cells import Sets
from askmany.pipeline.columns import release, reordered
from askmany.pipeline.documents import WHOLE_FILE, Locator

Ints = NDArray[np.int64]
ROW_GROUP = 1 << 16  # a row group is encoded in memory before it is written

_NAME = pa.dictionary(pa.int32(), pa.string())
DOCUMENTS = pa.schema(
    [
        pa.field("doc_id", pa.string(), nullable=False),
        pa.field("uri", _NAME, nullable=False),
        pa.field("format", _NAME, nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("length", pa.int64(), nullable=False),
        pa.field("line", pa.int64(), nullable=False),
        pa.field("content_hash", pa.binary(16), nullable=False),
        pa.field("prompt", pa.int64(), nullable=False),
        pa.field("document_tokens", pa.int32(), nullable=False),
        pa.field("longest_tokens", pa.int32(), nullable=False),
        pa.field("chunks", pa.int32(), nullable=False),
        pa.field("questions", pa.int32(), nullable=False),
        pa.field("question_tokens", pa.int32(), nullable=False),
        pa.field("answer_tokens", pa.int32(), nullable=False),
        pa.field("answerable", pa.int32(), nullable=False),
        pa.field("shared", _NAME, nullable=False),
        pa.field("own_questions", pa.list_(pa.string())),
        pa.field("own_identities", pa.list_(pa.int64())),
    ]
)
PLAIN_DOCUMENTS = pa.schema([pa.field(f.name, f.type.value_type if pa.types.is_dictionary(f.type) else f.type) for f in DOCUMENTS])
_SUMMED = (("document_tokens", np.int64), ("cost", np.float64))
_OF_GROUPS = (("cost", pa.float64(), False), ("group", _NAME, False), ("source", _NAME, True), ("home", pa.bool_(), False))
PLANNED = pa.schema([*DOCUMENTS, *(pa.field(name, kind, nullable=nullable) for name, kind, nullable in _OF_GROUPS)])
"""`prompt`: the identity of the document's prompt (see `preparing`). `longest_tokens`: of its longest chunk; `document_tokens`: of all its
chunks. `questions` and the sums behind it are those of this row: `shared` names the set of shared questions that it asks, `own_questions`
the others. `source`: the object that may hold its records already. `home`: whether the document is counted here; it is once in a plan."""


@dataclass(frozen=True, slots=True)
class PlannedDocument:
    """One row of the plan, as a worker gets it; `asked` are the ids of the questions to answer."""

    doc_id: str
    locator: Locator
    content_hash: str
    asked: tuple[str, ...]
    chunks: int = 1


@dataclass(frozen=True, slots=True)
class Group:
    """Rows [start, stop) of the plan: the documents handed to a worker at once. `documents` are those that are counted here."""

    name: str
    start: int
    stop: int
    records: int
    document_tokens: int
    longest_tokens: int
    cost: float
    documents: int
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """All documents of a run (schema `PLANNED`) and their groups, in the order they are handed out; `sets` of shared questions by name."""

    table: pa.Table
    groups: tuple[Group, ...]
    sets: Sets = field(default_factory=dict)

    @property
    def documents(self) -> int:
        return sum(group.documents for group in self.groups)

    @property
    def records(self) -> int:
        return sum(group.records for group in self.groups)

    def total(self, column: str) -> int:
        """The sum of an integer column over all rows; of a document's tokens, where it is counted."""
        values = self.table.column(column)
        if column == "document_tokens":
            values = values.filter(self.table.column("home"))
        return int(pc.sum(values).as_py() or 0)

    @property
    def records_by_group(self) -> dict[str, int]:
        return {group.name: group.records for group in self.groups}

    @property
    def documents_by_group(self) -> dict[str, int]:
        """How many documents are counted with each group."""
        return {group.name: group.documents for group in self.groups}

    def rows(self, group: Group) -> pa.Table:
        return self.table.slice(group.start, group.stop - group.start)

    def without(self, done: Mapping[str, object] | set[str]) -> list[Group]:
        """The groups that are not done, the costliest first."""
        return sorted((group for group in self.groups if group.name not in done), key=lambda group: -group.cost)


def make_plan(documents: pa.Table, speed: float, costs: CostModel, limits: GroupLimits, sets: Sets | None = None) -> Plan:
    """Order documents (schema `DOCUMENTS`) by falling cost and cut them into groups. `speed` is the workers' total, in workers."""
    return plan_columns(columns_of(documents), speed, costs, limits, sets)


def columns_of(documents: pa.Table) -> dict[str, pa.ChunkedArray]:
    """The columns of documents that a plan takes."""
    return {name: documents.column(name) for name in DOCUMENTS.names}


def plan_columns(
    columns: dict[str, pa.ChunkedArray], speed: float, costs: CostModel, limits: GroupLimits, sets: Sets | None = None
) -> Plan:
    """As `make_plan`, from columns that are let go one by one: a caller who keeps nothing of them needs room for them once."""
    documents = pa.table(columns)
    refuse_duplicate_documents(documents)
    cost = estimate(documents, costs)
    release()
    keys = pa.table({"cost": cost, "doc_id": documents.column("doc_id")})
    order = pc.sort_indices(keys, sort_keys=[("cost", "descending"), ("doc_id", "ascending")]).to_numpy().astype(np.int64)
    del keys
    release()
    records = np.ascontiguousarray(_records(documents)[order])
    runs = _runs(_floats(documents, "longest_tokens")[order], cost[order], records, speed, limits)
    order = order[np.concatenate(runs)] if runs else order
    release()
    del documents, records
    table = reordered(columns, pa.array(order), DOCUMENTS.names)
    sizes = np.array(list(map(len, runs)), dtype=np.int64)
    ends = np.cumsum(sizes)
    known = dict(sets or {})
    names = [group_name(table.slice(end - size, size)) for size, end in zip(sizes, ends, strict=True)]
    plan = from_table(grouped(table, cost[order], names, sizes), known)
    del table, cost, order, runs
    release()
    return plan


def _runs(tokens: Floats, cost: Floats, records: Ints, speed: float, limits: GroupLimits) -> list[Ints]:
    """The documents of each group, as indices into the order of falling cost; groups of documents to stand apart come last."""
    apart = tokens > limits.apart_tokens if limits.apart_tokens is not None else np.zeros(len(tokens), dtype=bool)
    runs = []
    for part in (np.flatnonzero(~apart), np.flatnonzero(apart)):
        for start, stop in guided_groups(cost[part].data, records[part].data, speed, limits):  # no list: this may be a million documents
            runs.append(part[start:stop])
    return runs


def estimate(documents: pa.Table, costs: CostModel) -> Floats:
    """The cost of each document, [N] float64: that of one chunk, times the chunks."""
    chunks = _floats(documents, "chunks")
    prompt = _floats(documents, "document_tokens") + _floats(documents, "question_tokens")
    prompt = np.where(_floats(documents, "answerable") > 0, prompt, 0.0)
    return chunks * costs.estimate(prompt / chunks, _floats(documents, "answer_tokens") / chunks)


def recosted(plan: Plan, costs: CostModel) -> Plan:
    """The same plan with its costs estimated anew."""
    cost = pa.array(estimate(plan.table, costs))
    return from_table(plan.table.set_column(PLANNED.get_field_index("cost"), PLANNED.field("cost"), cost), plan.sets)


def grouped(documents: pa.Table, cost: Floats, names: Sequence[str], sizes: Ints, sources: Sequence[str | None] | None = None) -> pa.Table:
    """Documents in order (schema `DOCUMENTS`) as rows of a plan (`PLANNED`): `sizes` of them to each group, all counted here."""
    codes = np.repeat(np.arange(len(names), dtype=np.int32), sizes)
    given = sources if sources is not None else [None] * len(names)
    columns = [
        pa.array(cost),
        pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(names, pa.string())),
        pa.array(given, pa.string()).take(pa.array(codes)).dictionary_encode(),
        pa.repeat(pa.scalar(True), len(codes)),
    ]
    return pa.table([*documents.select(DOCUMENTS.names).columns, *columns], schema=PLANNED)


def from_table(table: pa.Table, sets: Sets) -> Plan:
    """A plan from its table: groups are the stretches of equal `group`."""
    table = table.combine_chunks()
    if not table.num_rows:
        return Plan(table, (), sets)
    column, source = table.column("group").chunk(0), table.column("source").chunk(0)
    codes = column.indices.to_numpy()
    starts = np.concatenate([[0], np.flatnonzero(codes[1:] != codes[:-1]) + 1])
    stops = np.concatenate([starts[1:], [table.num_rows]])
    sums = {name: np.add.reduceat(table.column(name).to_numpy(), starts, dtype=kind).tolist() for name, kind in _SUMMED}
    records = np.add.reduceat(_records(table), starts).tolist()
    longest = np.maximum.reduceat(table.column("longest_tokens").to_numpy(), starts).tolist()
    homes = np.add.reduceat(table.column("home").to_numpy().astype(np.int64), starts).tolist()
    names = column.dictionary.take(pa.array(codes[starts])).to_pylist()
    sources = source.take(pa.array(starts)).cast(pa.string()).to_pylist()
    rows = zip(names, starts.tolist(), stops.tolist(), records, sums["document_tokens"], longest, sums["cost"], homes, sources, strict=True)
    return Plan(table, tuple(Group(*row) for row in rows), sets)


def group_name(rows: pa.Table) -> str:
    """16 hex digits over the documents' ids and prompts and what is asked of them, in any order."""
    digest = hashlib.sha256()
    for part in sorted(zip(*asked_columns(rows), strict=True), key=lambda part: part[0]):
        doc_id, prompt, shared, own, identities = part
        digest.update(f"{len(doc_id)}:{doc_id}{prompt}:{shared}".encode())
        if own:
            digest.update(json.dumps(sorted(zip(own, identities, strict=True))).encode())
    return digest.hexdigest()[:16]


def asked_columns(rows: pa.Table) -> tuple[list[Any], ...]:
    """Ids, prompts and what is asked of some rows: `doc_id`, `prompt`, `shared`, `own_questions`, `own_identities`; quick, for millions."""
    ids = rows.column("doc_id").to_numpy().tolist()
    shared = rows.column("shared").cast(pa.string()).to_numpy().tolist()
    own = (rows.column(name) for name in ("own_questions", "own_identities"))
    lists = (column.to_pylist() if column.null_count < len(column) else [None] * len(column) for column in own)
    return ids, rows.column("prompt").to_numpy().tolist(), shared, *lists


def refuse_duplicate_documents(documents: pa.Table) -> None:
    """ConfigError naming a doc_id that occurs twice, and both places."""
    ids = documents.column("doc_id").combine_chunks()
    ids = ids.take(pc.sort_indices(ids))  # a hash table of a million ids would take more
    twice = ids[1:].filter(pc.equal(ids[1:], ids[:-1]))
    if not len(twice):
        return
    doc_id = twice[0].as_py()
    places = [_locator(row).place() for row in documents.filter(pc.equal(documents.column("doc_id"), doc_id)).to_pylist()]
    raise ConfigError(f"input: doc_id {doc_id!r} occurs {len(places)} times: {places[0]} and {places[1]}; ids must differ")


def planned_documents(rows: pa.Table, sets: Sets) -> Iterator[PlannedDocument]:
    """The documents of some plan rows; `sets` must hold every set of shared questions that they name."""
    for row in rows.to_pylist():
        asked = (*(question_id for question_id, _ in sets[row["shared"]]), *(row["own_questions"] or ()))
        yield PlannedDocument(row["doc_id"], _locator(row), row["content_hash"].hex(), asked, row["chunks"])


def _locator(row: Mapping[str, object]) -> Locator:
    name = row["doc_id"] if row["format"] in WHOLE_FILE else ""
    return Locator(row["uri"], name, row["format"], row["start"], row["length"], row["line"])  # type: ignore[arg-type]


def _floats(table: pa.Table, column: str) -> Floats:
    return np.asarray(table.column(column).to_numpy(), dtype=np.float64)


def _records(table: pa.Table) -> Ints:
    """Records of each row: one for each question and chunk."""
    found: Ints = table.column("questions").to_numpy() * table.column("chunks").to_numpy().astype(np.int64)
    return found


def plain_table(table: pa.Table) -> pa.Table:
    """The table without dictionaries, which differ from file to file."""
    fields = [pa.field(f.name, f.type.value_type if pa.types.is_dictionary(f.type) else f.type, f.nullable) for f in table.schema]
    return table.cast(pa.schema(fields))


def to_bytes(plan: Plan, listing: str) -> memoryview:
    """The plan's file; `listing` tells what it was made from (see `resume.listing_hash`)."""
    metadata = {b"listing": listing.encode(), b"sets": json.dumps(plan.sets).encode()}
    with tempfile.TemporaryFile() as file:  # a buffer that grows would be there twice
        pq.write_table(plan.table.replace_schema_metadata(metadata), file, compression="zstd", row_group_size=ROW_GROUP)
        release()
        file.seek(0)
        return memoryview(file.read())


def from_bytes(data: bytes | memoryview) -> tuple[Plan, str]:
    """A plan and its listing hash from its file. Raises pa.ArrowException or KeyError when it is none."""
    table = pq.read_table(pa.BufferReader(data), read_dictionary=["uri", "format", "shared", "group", "source"])
    metadata = table.schema.metadata or {}
    sets = {name: tuple((str(key), int(value)) for key, value in cells) for name, cells in json.loads(metadata[b"sets"]).items()}
    plan = from_table(table.select(PLANNED.names).cast(PLANNED), sets)
    del table, data
    release()
    return plan, metadata[b"listing"].decode()
