"""Gathering what a report is made of from the output alone: run.json, manifest, heartbeat, ledger, plan and a few answers."""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Mapping
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from askmany.engine.errors import ConfigError
from askmany.pipeline.commit import PLAN, current_answers, read_manifest
from askmany.pipeline.heartbeat import read_status
from askmany.pipeline.ledger import read_ledger
from askmany.pipeline.report import MAX_ROWS, ReportInput
from askmany.pipeline.run_file import read_run
from askmany.pipeline.storage import ObjectStore
from askmany.pipeline.summary import document_label


def gather(store: ObjectStore) -> ReportInput:
    """Everything for the page. ConfigError when the output holds no run."""
    run = read_run(store)
    if run is None:
        raise ConfigError(f"{store.uri}: no run.json there; is it the output of a run?")
    lines = list(read_ledger(store))
    state, retries = str(run.get("state", "")), 0
    with contextlib.suppress(ConfigError):
        status = read_status(store)
        retries = status.io_retries
        state = status.state if status.state in ("running", "draining") else state
    return ReportInput(
        run={**run, "model": _model(run)},
        totals=_totals(store, run, lines),
        lines=lines,
        sample=_sample(store),
        sizes=_sizes(store),
        output=store.uri,
        state=state,
        retries=retries,
    )


def _totals(store: ObjectStore, run: Mapping[str, Any], lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The manifest's figures; before there is one, the sums of the ledger."""
    planned = int(run.get("planned_records", 0))
    try:
        manifest = read_manifest(store)
    except ConfigError:
        last = {line["group"]: line for line in lines if line.get("kind") == "group"}
        statuses: Counter[str] = Counter()
        usage: Counter[str] = Counter()
        for line in last.values():
            statuses.update(line["statuses"])
            usage.update(line["usage"])
        sums = {name: sum(int(line[name]) for line in last.values()) for name in ("documents", "records")}
        return {**sums, "planned_records": planned, "statuses": dict(statuses), "usage": dict(usage)}
    return {
        "documents": manifest.documents,
        "records": manifest.records,
        "planned_records": manifest.planned_records,
        "statuses": manifest.statuses,
        "usage": manifest.usage,
    }


def _model(run: Mapping[str, Any]) -> str:
    model = run.get("model")
    return f"{model.get('name')} @ {str(model.get('revision'))[:12]}" if isinstance(model, Mapping) else str(model or "")


def _sample(store: ObjectStore) -> list[dict[str, Any]]:
    """The first answers of the first shard that can be read."""
    with contextlib.suppress(ConfigError, OSError, pa.ArrowException):
        for table in islice(current_answers(store), 1):
            names = ["doc_id", "question", "question_id", "answer", "status", "error", "flags"]
            rows: list[dict[str, Any]] = table.slice(0, MAX_ROWS).select(names).to_pylist()
            return [{**row, "doc_id": document_label(row), "answer": _short(row["answer"]), "error": _short(row["error"])} for row in rows]
    return []


def _short(text: str | None) -> str | None:
    return text if text is None or len(text) <= 300 else text[:299] + "…"


def _sizes(store: ObjectStore) -> list[tuple[int, int]]:
    """How many documents of the plan have up to so many tokens, by powers of two."""
    try:
        tokens = pq.read_table(io.BytesIO(store.get(PLAN)), columns=["document_tokens"]).column(0).to_numpy()
    except (OSError, pa.ArrowException, KeyError):
        return []
    powers = np.ceil(np.log2(np.maximum(tokens, 2))).astype(np.int64)
    counts = np.bincount(powers)
    return [(1 << power, int(counts[power])) for power in range(int(powers.min()), len(counts))] if len(powers) else []
