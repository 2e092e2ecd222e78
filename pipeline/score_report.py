"""Scores of stored answers as files: `scores/report.json`, `scores/items.parquet`, `scores/reliability-<kind>.png`.

Answers are opened for reading alone, and every file written lies in `scores/`: whatever goes wrong here, the answers stay as they are.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from askmany.engine.errors import ConfigError
from askmany.pipeline.commit import current_answers
from askmany.pipeline.score_items import LABELLED, Items, read_gold, read_items, refuse_nothing
from askmany.pipeline.score_plot import reliability_png
from askmany.pipeline.scoring import ScoreOptions, compare, item_rows, reliability, score
from askmany.pipeline.storage import ObjectStore

FOLDER = "scores"


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """What to score: an output, its references where the answers have none (`gold`), another output to compare with (`against`)."""

    output: str
    gold: str | None = None
    against: str | None = None
    options: ScoreOptions = field(default_factory=ScoreOptions)


def score_run(request: ScoreRequest) -> dict[str, Any]:
    """Score, write the files, return the report. ConfigError when there is nothing to score."""
    gold = read_gold(request.gold, {}) if request.gold else None
    store = ObjectStore(request.output, {})
    items = _items(store, gold)
    report = score(items, request.options)
    if request.against:
        other = ObjectStore(request.against, {})
        report["against"] = {"output": other.uri, **compare(items, _items(other, gold), request.options)}
    report["notes"] = _write(store, items, report, request.options)
    return report


def _items(store: ObjectStore, gold: Mapping[tuple[str, str], Sequence[str]] | None) -> Items:
    items = read_items(current_answers(store), gold)
    refuse_nothing(items, store.uri)
    return items


def _write(store: ObjectStore, items: Items, report: Mapping[str, Any], options: ScoreOptions) -> list[str]:
    """Put the files; what could not be drawn is said in a note and takes nothing else with it."""
    notes = []
    for kind in sorted({item.kind for item in items.items} & set(LABELLED)):
        found = reliability([item for item in items.items if item.kind == kind])
        if found is not None:
            try:
                store.put(f"{FOLDER}/reliability-{kind}.png", reliability_png(found, kind))
            except ConfigError as error:
                notes.append(str(error))
    store.put(f"{FOLDER}/items.parquet", _items_file(items, options))
    store.put(f"{FOLDER}/report.json", json.dumps({**report, "notes": notes}, indent=1, ensure_ascii=False).encode("utf-8"))
    return notes


def _items_file(items: Items, options: ScoreOptions) -> bytes:
    rows = [
        {"doc_id": key[0], "question_id": key[1], "chunk": key[2], "metric": name, "score": value}
        for key, scores in item_rows(items, options).items()
        for name, value in scores.items()
    ]
    fields = [
        ("doc_id", pa.string()),
        ("question_id", pa.string()),
        ("chunk", pa.int32()),
        ("metric", pa.string()),
        ("score", pa.float64()),
    ]
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema(fields)), sink, compression="zstd")
    return sink.getvalue()
