"""The one schema of answers: a row for each (document, question, chunk), whatever became of it.

Every shard has exactly this Arrow schema (plus the passed-through columns of the run, all text), so that files of any run can be
read together without a cast. `Record` is the row before it is a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import pyarrow as pa

from askmany.engine.errors import ConfigError

SCHEMA_VERSION = 2
Status = Literal["ok", "invalid_output", "length", "too_long", "empty_document", "error", "skipped"]
STATUSES: tuple[Status, ...] = get_args(Status)
KEY = ("doc_id", "question_id", "chunk")

LABEL_PROBABILITY = pa.struct([pa.field("label", pa.string()), pa.field("probability", pa.float64())])

FIELDS: tuple[pa.Field, ...] = (
    pa.field("doc_id", pa.string(), nullable=False),
    pa.field("question_id", pa.string(), nullable=False),
    pa.field("status", pa.string(), nullable=False),
    pa.field("answer", pa.string()),
    pa.field("answer_type", pa.string()),
    pa.field("value", pa.string()),
    pa.field("value_number", pa.float64()),
    pa.field("label_probabilities", pa.list_(LABEL_PROBABILITY)),
    pa.field("legal_mass", pa.float64()),
    pa.field("answer_token_ids", pa.list_(pa.int32())),
    pa.field("finish_reason", pa.string()),
    pa.field("document_tokens", pa.int32()),
    pa.field("question_tokens", pa.int32()),
    pa.field("logprob", pa.float64()),
    pa.field("margin", pa.float64()),
    pa.field("truncated", pa.bool_(), nullable=False),
    pa.field("chunk", pa.int32(), nullable=False),
    pa.field("attempt", pa.int32(), nullable=False),
    pa.field("error", pa.string()),
    pa.field("question", pa.string()),
    pa.field("references", pa.list_(pa.string())),
    pa.field("flags", pa.list_(pa.string()), nullable=False),
)
NAMES = tuple(f.name for f in FIELDS)


@dataclass(frozen=True, slots=True)
class Record:
    """One answer, or why there is none. `logprob` in nats, summed over answer tokens; `margin` the smallest top-2 logit gap, for scored
    labels the nats between the best two.

    `value` is the typed answer as JSON text, `value_number` the same as a number where it is one (truth values 1 and 0). `legal_mass` is
    the total probability that the model gave to the labels before they were renormalised.
    """

    doc_id: str
    question_id: str
    status: Status
    answer: str | None = None
    answer_token_ids: Sequence[int] | None = None
    finish_reason: str | None = None
    document_tokens: int | None = None
    question_tokens: int | None = None
    logprob: float | None = None
    margin: float | None = None
    truncated: bool = False
    chunk: int = 0
    attempt: int = 1
    error: str | None = None
    question: str | None = None
    references: Sequence[str] | None = None
    flags: Sequence[str] = ()
    keep: Mapping[str, str | None] = field(default_factory=dict)
    answer_type: str | None = None
    value: str | None = None
    value_number: float | None = None
    label_probabilities: Sequence[Mapping[str, object]] | None = None
    legal_mass: float | None = None

    @property
    def key(self) -> tuple[str, str, int]:
        return self.doc_id, self.question_id, self.chunk


def answer_schema(keep: Sequence[str] = ()) -> pa.Schema:
    """The schema of a run that passes these columns through. ConfigError when one would hide a field of ours."""
    for name in keep:
        if name in NAMES:
            raise ConfigError(f"input.keep: {name!r} is a field of every record; rename the input's column")
    return pa.schema([*FIELDS, *(pa.field(name, pa.string()) for name in keep)])


def to_table(records: Iterable[Record], keep: Sequence[str] = ()) -> pa.Table:
    """Records as a table of the declared schema, sorted by key. ValueError for a key given twice or a status that is none."""
    rows = sorted(records, key=lambda record: record.key)
    for before, after in itertools.pairwise(rows):
        if before.key == after.key:
            raise ValueError(f"two records for {after.key}")
    unknown = sorted({row.status for row in rows} - set(STATUSES))
    if unknown:
        raise ValueError(f"status {unknown[0]!r} is none of {', '.join(STATUSES)}")
    columns = {name: [getattr(row, name) for row in rows] for name in NAMES}
    columns |= {name: [row.keep.get(name) for row in rows] for name in keep}
    return pa.table(columns, schema=answer_schema(keep))


def sort_by_key(table: pa.Table) -> pa.Table:
    """The rows by document, question and chunk. ValueError for a key given twice."""
    table = table.sort_by([(name, "ascending") for name in KEY]).combine_chunks()
    keys = table.select(KEY)
    if table.num_rows > 1 and keys.group_by(list(KEY)).aggregate([]).num_rows != table.num_rows:
        raise ValueError("two records for one key")
    return table


def count_statuses(statuses: Iterable[str]) -> dict[str, int]:
    """How many of each status, those that occur, in the declared order."""
    counts = dict.fromkeys(STATUSES, 0)
    for status in statuses:
        counts[status] += 1  # type: ignore[index]
    return {status: count for status, count in counts.items() if count}
