"""The plan: every document of a run by place, size and cost, cut into named groups. Never a word of text.

One Arrow table, a row a document, rows of a group together and groups in the order they are handed out; kept as one file in the output
prefix. A group's name comes from what is in it, so the same documents make the same names on any machine.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from askmany.engine.errors import ConfigError
from askmany.pipeline.balance import CostModel, Floats, GroupLimits, guided_groups
from askmany.pipeline.documents import WHOLE_FILE, Locator

Integers = np.ndarray[tuple[int], np.dtype[np.int64]]
_NAME = pa.dictionary(pa.int32(), pa.string())
DOCUMENTS = pa.schema(
    [
        pa.field("doc_id", pa.string(), nullable=False),
        pa.field("uri", _NAME, nullable=False),
        pa.field("format", _NAME, nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("length", pa.int64(), nullable=False),
        pa.field("line", pa.int64(), nullable=False),
        pa.field("content_hash", pa.string(), nullable=False),
        pa.field("document_tokens", pa.int64(), nullable=False),
        pa.field("questions", pa.int64(), nullable=False),
        pa.field("question_tokens", pa.int64(), nullable=False),
        pa.field("answer_tokens", pa.int64(), nullable=False),
        pa.field("answerable", pa.int64(), nullable=False),
        pa.field("own_questions", pa.list_(pa.string())),
    ]
)
PLANNED = DOCUMENTS.append(pa.field("cost", pa.float64(), nullable=False)).append(pa.field("group", _NAME, nullable=False))


@dataclass(frozen=True, slots=True)
class PlannedDocument:
    """One row of the plan, as a worker gets it; `own_questions` are the ids of questions that no other document is asked.

    `asked` are the ids of the questions to answer now, None for all.
    """

    doc_id: str
    locator: Locator
    content_hash: str
    own_questions: tuple[str, ...]
    asked: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Rows [start, stop) of the plan: the documents handed to a worker at once."""

    name: str
    start: int
    stop: int
    records: int
    document_tokens: int
    longest_tokens: int
    cost: float


@dataclass(frozen=True, slots=True)
class Plan:
    """All documents of a run (schema `PLANNED`) and their groups, in the order they are handed out."""

    table: pa.Table
    groups: tuple[Group, ...]

    @property
    def documents(self) -> int:
        return int(self.table.num_rows)

    @property
    def records(self) -> int:
        return sum(group.records for group in self.groups)

    def total(self, column: str) -> int:
        """The sum of an integer column over all documents."""
        return int(pc.sum(self.table.column(column)).as_py() or 0)

    def rows(self, group: Group) -> pa.Table:
        return self.table.slice(group.start, group.stop - group.start)

    def without(self, done: Mapping[str, object] | set[str]) -> list[Group]:
        """The groups that are not done."""
        return [group for group in self.groups if group.name not in done]


def make_plan(documents: pa.Table, speed: float, costs: CostModel, limits: GroupLimits) -> Plan:
    """Order documents (schema `DOCUMENTS`) by falling cost and cut them into groups. `speed` is the workers' total, in workers."""
    refuse_duplicate_documents(documents)
    prompt = _floats(documents, "document_tokens") + _floats(documents, "question_tokens")
    prompt = np.where(_floats(documents, "answerable") > 0, prompt, 0.0)
    cost = costs.estimate(prompt, _floats(documents, "answer_tokens"))
    keys = pa.table({"cost": cost, "doc_id": documents.column("doc_id")})
    order = pc.sort_indices(keys, sort_keys=[("cost", "descending"), ("doc_id", "ascending")]).to_numpy().astype(np.int64)
    del prompt, keys
    records = np.ascontiguousarray(documents.column("questions").to_numpy()[order])
    runs = _runs(_floats(documents, "document_tokens")[order], cost[order], records, speed, limits)
    order = order[np.concatenate(runs)] if runs else order
    table = pa.table({name: documents.column(name).take(pa.array(order)).combine_chunks() for name in DOCUMENTS.names})
    sizes = np.array(list(map(len, runs)), dtype=np.int64)
    ends = np.cumsum(sizes)
    names = [group_name(table.slice(end - size, size)) for size, end in zip(sizes, ends, strict=True)]
    labels = pa.DictionaryArray.from_arrays(pa.array(np.repeat(np.arange(len(runs), dtype=np.int32), sizes)), pa.array(names, pa.string()))
    return from_table(pa.table([*table.columns, pa.array(cost[order]), labels], schema=PLANNED))


def _runs(tokens: Floats, cost: Floats, records: Integers, speed: float, limits: GroupLimits) -> list[Integers]:
    """The documents of each group, as indices into the order of falling cost; groups of documents to stand apart come last."""
    apart = tokens > limits.apart_tokens if limits.apart_tokens is not None else np.zeros(len(tokens), dtype=bool)
    runs = []
    for part in (np.flatnonzero(~apart), np.flatnonzero(apart)):
        for start, stop in guided_groups(cost[part].data, records[part].data, speed, limits):  # no list: this may be a million documents
            runs.append(part[start:stop])
    return runs


def from_table(table: pa.Table) -> Plan:
    """A plan from its table: groups are the stretches of equal `group`."""
    table = table.combine_chunks()
    if not table.num_rows:
        return Plan(table, ())
    column = table.column("group").chunk(0)
    codes = column.indices.to_numpy()
    starts = np.concatenate([[0], np.flatnonzero(codes[1:] != codes[:-1]) + 1])
    stops = np.concatenate([starts[1:], [table.num_rows]])
    sums = {name: np.add.reduceat(table.column(name).to_numpy(), starts).tolist() for name in ("questions", "document_tokens", "cost")}
    longest = np.maximum.reduceat(table.column("document_tokens").to_numpy(), starts).tolist()
    names = column.dictionary.take(pa.array(codes[starts])).to_pylist()
    rows = zip(names, starts.tolist(), stops.tolist(), sums["questions"], sums["document_tokens"], longest, sums["cost"], strict=True)
    return Plan(table, tuple(Group(*row) for row in rows))


def group_name(rows: pa.Table) -> str:
    """16 hex digits over the ids and contents of the documents, in any order."""
    pairs = sorted(zip(rows.column("doc_id").to_pylist(), rows.column("content_hash").to_pylist(), strict=True))
    digest = hashlib.sha256()
    for doc_id, content in pairs:
        digest.update(f"{len(doc_id)}:{doc_id}{content}".encode())
    return digest.hexdigest()[:16]


def refuse_duplicate_documents(documents: pa.Table) -> None:
    """ConfigError naming a doc_id that occurs twice, and both places."""
    if pc.count_distinct(documents.column("doc_id")).as_py() == documents.num_rows:
        return
    counts = pc.value_counts(documents.column("doc_id"))
    twice = counts.filter(pc.greater(counts.field("counts"), 1))
    if not len(twice):
        return
    doc_id = min(twice.field("values").to_pylist())
    places = [_locator(row).place() for row in documents.filter(pc.equal(documents.column("doc_id"), doc_id)).to_pylist()]
    raise ConfigError(f"input: doc_id {doc_id!r} occurs {len(places)} times: {places[0]} and {places[1]}; ids must differ")


def planned_documents(rows: pa.Table) -> Iterator[PlannedDocument]:
    """The documents of some plan rows."""
    for row in rows.to_pylist():
        yield PlannedDocument(row["doc_id"], _locator(row), row["content_hash"], tuple(row["own_questions"] or ()))


def _locator(row: Mapping[str, object]) -> Locator:
    name = row["doc_id"] if row["format"] in WHOLE_FILE else ""
    return Locator(row["uri"], name, row["format"], row["start"], row["length"], row["line"])  # type: ignore[arg-type]


def _floats(table: pa.Table, column: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.asarray(table.column(column).to_numpy(), dtype=np.float64)


def to_bytes(plan: Plan, listing: str) -> bytes:
    """The plan's file; `listing` is the hash of the input listing it was made from."""
    sink = io.BytesIO()
    pq.write_table(plan.table.replace_schema_metadata({b"listing": listing.encode()}), sink, compression="zstd")
    return sink.getvalue()


def from_bytes(data: bytes) -> tuple[Plan, str]:
    """A plan and its listing hash from its file. Raises pa.ArrowException or KeyError when it is none."""
    table = pq.read_table(io.BytesIO(data), read_dictionary=["uri", "format", "group"])
    listing = (table.schema.metadata or {})[b"listing"].decode()
    return from_table(table.select(PLANNED.names).cast(PLANNED)), listing
