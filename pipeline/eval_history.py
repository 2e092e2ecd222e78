"""The history of a scheduled evaluation: one Parquet file an evaluation in `history/`, one row a metric, together one table.

An evaluation is told by its key (date and model revision, and a number where a day has several). Its file is put whole, so that the table
never holds half of one and needs no lock to be read. `pyarrow.dataset` reads the folder as it is.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from askmany.engine.errors import ConfigError
from askmany.pipeline.storage import ObjectStore

FOLDER = "history"
Verdict = Literal["green", "red", "failed"]
COMPLETE: frozenset[Verdict] = frozenset({"green", "red"})
_TEXT, _WHOLE, _REAL = pa.string(), pa.int64(), pa.float64()
SCHEMA = pa.schema(
    [
        *((name, _TEXT) for name in ("key", "date", "model", "revision", "askmany", "verdict", "note")),
        *((name, _REAL) for name in ("began", "seconds")),
        *((name, _WHOLE) for name in ("exit_code", "documents", "asked_documents", "records", "errors")),
        *((name, _TEXT) for name in ("kind", "metric")),
        *((name, _REAL) for name in ("mean", "low", "high")),
        *((name, _WHOLE) for name in ("items", "clusters")),
        ("against", _TEXT),
        *((name, _REAL) for name in ("difference", "difference_low", "difference_high")),
        ("regressed", pa.bool_()),
    ]
)


@dataclass(frozen=True, slots=True)
class Metric:
    """A mean with its interval over `items` answers about `clusters` documents, and its difference to the last green evaluation over what
    both answered about unchanged documents; `regressed` when that whole interval lies below zero."""

    kind: str
    metric: str
    mean: float
    low: float
    high: float
    items: int
    clusters: int
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    regressed: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind}.{self.metric}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One evaluation. `documents` and `records` count what was scored or could have been, `asked_documents` what this one asked anew;
    `against` is the key of the green evaluation it was compared with."""

    key: str
    date: str
    model: str
    revision: str
    askmany: str
    verdict: Verdict
    exit_code: int
    began: float
    seconds: float
    documents: int = 0
    asked_documents: int = 0
    records: int = 0
    errors: int = 0
    against: str | None = None
    note: str = ""
    metrics: tuple[Metric, ...] = ()

    @property
    def regressed(self) -> list[Metric]:
        return [metric for metric in self.metrics if metric.regressed]


def write_entry(store: ObjectStore, entry: Entry) -> None:
    """Put an evaluation's rows; one of the same key is replaced."""
    whole = {key: value for key, value in asdict(entry).items() if key != "metrics"}
    rows = [{**whole, **asdict(metric)} for metric in entry.metrics] or [whole]
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), sink, compression="zstd")
    store.put(f"{FOLDER}/{entry.key}.parquet", sink.getvalue())


def read_history(store: ObjectStore) -> list[Entry]:
    """Every evaluation, the oldest first. ConfigError for a file that is none."""
    entries = []
    for name in store.list(FOLDER):
        if name.endswith(".parquet"):
            try:
                table = pq.read_table(io.BytesIO(store.get(name)))
                entries.append(_entry(table.to_pylist()))
            except (pa.ArrowException, KeyError, TypeError) as error:
                raise ConfigError(f"{store.uri_of(name)}: no history of evaluations: {type(error).__name__}: {error}") from error
    return sorted(entries, key=lambda entry: (entry.began, entry.key))


def newest(entries: Iterable[Entry], verdicts: Iterable[Verdict]) -> Entry | None:
    """The last evaluation that ended in one of these ways."""
    wanted = frozenset(verdicts)
    return next((entry for entry in reversed(list(entries)) if entry.verdict in wanted), None)


def _entry(rows: Sequence[Mapping[str, Any]]) -> Entry:
    names = [name for name in Entry.__dataclass_fields__ if name != "metrics"]
    metrics = tuple(Metric(**{name: row[name] for name in Metric.__dataclass_fields__}) for row in rows if row["metric"] is not None)
    return Entry(**{name: rows[0][name] for name in names}, metrics=metrics)
