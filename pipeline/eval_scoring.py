"""From evaluated files to scores: the answers that count now, from whichever runs hold them, and what became better or worse.

An evaluation's answers may lie in several runs' outputs; its record says which run answered which file. Only reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from askmany.engine.errors import ConfigError
from askmany.pipeline.commit import current_answers
from askmany.pipeline.eval_history import Metric
from askmany.pipeline.eval_selection import Files
from askmany.pipeline.resume import read_plan
from askmany.pipeline.score_items import Items, read_items
from askmany.pipeline.scoring import ScoreOptions, compare, means_of, score
from askmany.pipeline.storage import ObjectStore

RUNS = "runs"
Gold = Mapping[tuple[str, str], tuple[str, ...]] | None


@dataclass(slots=True)
class Answered:
    """What an evaluation stands on: items to score, the contents of the documents (hash by id), and counts."""

    items: Items
    contents: dict[str, str] = field(default_factory=dict)
    records: int = 0
    errors: int = 0


def run_store(root: ObjectStore, options: Mapping[str, Any], run: str) -> ObjectStore:
    """The output of one run of an evaluation."""
    return ObjectStore(f"{root.uri.rstrip('/')}/{RUNS}/{run}", options)


def gather(root: ObjectStore, options: Mapping[str, Any], files: Files, gold: Gold) -> Answered:
    """Everything that these files stand for. ConfigError when two runs answer for one document."""
    found = Answered(Items())
    owners: dict[str, str] = {}
    for run in sorted({state.run for state in files.values()}):
        wanted = {uri for uri, state in files.items() if state.run == run}
        store = run_store(root, options, run)
        contents = {doc_id: content for doc_id, uri, content in _documents(store) if uri in wanted}
        for doc_id in contents:
            if doc_id in owners:
                raise ConfigError(f"doc_id {doc_id!r} is in two files of the input, answered in {RUNS}/{owners[doc_id]} and {RUNS}/{run}")
            owners[doc_id] = run
        found.contents.update(contents)
        tables = list(_answers(store, contents))
        found.records += sum(table.num_rows for table in tables)
        found.errors += sum(pc.sum(pc.equal(table.column("status"), "error")).as_py() or 0 for table in tables)
        items = read_items(tables, gold)
        found.items.items += items.items
        found.items.left_out.update(items.left_out)
    return found


def _documents(store: ObjectStore) -> Iterator[tuple[str, str, str]]:
    """Id, file and content hash of every document that a run planned."""
    before = read_plan(store)
    if before is None:
        raise ConfigError(f"{store.uri}: its plan cannot be read; was it removed?")
    table = before[0].table
    ids, uris = (table.column(name).cast(pa.string()).to_pylist() for name in ("doc_id", "uri"))
    hashes = (value.hex() for value in table.column("content_hash").to_pylist())
    yield from zip(ids, uris, hashes, strict=True)


def _answers(store: ObjectStore, contents: Mapping[str, str]) -> Iterator[pa.Table]:
    ids = pa.array(sorted(contents), pa.string())
    for table in current_answers(store):
        yield table.filter(pc.is_in(table.column("doc_id").cast(pa.string()), ids))


def measure(now: Answered, green: Answered | None, options: ScoreOptions, smallest_drop: float) -> tuple[Metric, ...]:
    """Every mean with its interval, and against the last green evaluation where there is one.

    Compared are answers to the same question about a document whose text is the same in both. A metric has regressed when the whole
    interval of the difference lies below zero and the difference is at least `smallest_drop` (a share).
    """
    if not now.items.items:
        return ()
    compared: Mapping[str, Any] = compare(*_unchanged(now, green), options)["metrics"] if green else {}
    found = []
    for kind, name, interval in means_of(score(now.items, options)):
        values: dict[str, Any] = {key: interval[key] for key in ("mean", "low", "high", "items", "clusters")}
        found.append(Metric(kind, name, **values, **_difference(compared.get(f"{kind}.{name}"), smallest_drop)))
    return tuple(found)


def _unchanged(now: Answered, green: Answered) -> tuple[Items, Items]:
    """Both evaluations' items about documents that are the same in both."""
    same = {doc_id for doc_id, content in now.contents.items() if green.contents.get(doc_id) == content}
    return (
        Items([item for item in now.items.items if item.document in same]),
        Items([item for item in green.items.items if item.document in same]),
    )


def _difference(found: Mapping[str, Any] | None, smallest_drop: float) -> dict[str, Any]:
    if found is None:
        return {}
    interval = found["difference"]
    mean, low, high = interval["mean"], interval["low"], interval["high"]
    regressed = high < 0 and mean <= -smallest_drop
    return {"difference": mean, "difference_low": low, "difference_high": high, "regressed": regressed}
