"""`askmany show OUT`: answers of a run in the terminal, read from the shards its manifest names, or from those that are there so far.

Also `askmany models`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console

from askmany.engine.errors import ConfigError
from askmany.engine.known_models import KNOWN_MODELS
from askmany.pipeline.commit import current_answers
from askmany.pipeline.schema import STATUSES, count_statuses
from askmany.pipeline.storage import ObjectStore
from askmany.pipeline.summary import answer_table, document_label, printable, statuses


@dataclass(frozen=True, slots=True)
class Filter:
    """Which records are wanted; None takes all."""

    document: str | None = None
    question: str | None = None
    status: str | None = None

    def apply(self, table: pa.Table) -> pa.Table:
        for column, value in (("doc_id", self.document), ("question_id", self.question), ("status", self.status)):
            if value is not None:
                table = table.filter(pc.equal(table.column(column), value))
        return table


def main(output: str, wanted: Filter, limit: int, full: bool, console: Console) -> int:
    """Print at most `limit` records and the counts of all that match. ConfigError when the output holds none."""
    if wanted.status is not None and wanted.status not in STATUSES:
        raise ConfigError(f"--status {wanted.status}: one of {', '.join(STATUSES)} is needed")
    found: list[pa.Table] = []
    counts: list[str] = []
    for table in _matching(ObjectStore(output, {}), wanted):
        counts += table.column("status").to_pylist()
        room = limit - sum(part.num_rows for part in found)
        if room > 0:
            found.append(table.slice(0, room))
    rows = pa.concat_tables(found) if found else None
    if rows is None or not rows.num_rows:
        raise ConfigError(f"{output}: no answers that match")
    _print(rows, full, console)
    console.print(f"{rows.num_rows:,} of {len(counts):,} records: {statuses(count_statuses(counts))}", markup=False, highlight=False)
    return 0


def _matching(store: ObjectStore, wanted: Filter) -> Iterator[pa.Table]:
    for table in current_answers(store):
        table = wanted.apply(table)
        if table.num_rows:
            yield table


def _print(rows: pa.Table, full: bool, console: Console) -> None:
    if not full:
        console.print(answer_table(rows, console.width))
        return
    for row in rows.to_pylist():
        said = row["answer"] if row["answer"] is not None else row["error"] or ""
        for line in (f"{document_label(row)} · {row['question_id']} · {row['status']}", row["question"] or "", said):
            console.print("\n".join(map(printable, line.split("\n"))), markup=False, highlight=False, soft_wrap=True)
        console.print()


def models(console: Console) -> int:
    """Print the models known by name."""
    for model in KNOWN_MODELS.values():
        console.print(f"{model.name}: {model.filename} in {model.requirement}", markup=False, highlight=False, soft_wrap=True)
    return 0
