"""Outputs of runs that never ran: shards, manifest and run.json made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from askmany.pipeline.commit import describe, seal, write_shard
from askmany.pipeline.run_file import write_run
from askmany.pipeline.schema import Record, to_table
from askmany.pipeline.storage import ObjectStore

FINGERPRINT = "f" * 16


def stored_run(folder: Path, shards: Mapping[str, Sequence[Record]], keep: Sequence[str] = ()) -> str:
    """An output with these records; its location."""
    store = ObjectStore(str(folder), {})
    for group, records in shards.items():
        table = to_table(records, keep)
        write_shard(store, table, describe(table, FINGERPRINT, group, 1, 1, {}))
    write_run(store, {"fingerprint": FINGERPRINT, "config": {"model": "tiny", "model_revision": "0123456789abcdef"}})
    seal(store, FINGERPRINT, {group: len(records) for group, records in shards.items()}, {})
    return str(folder)


def labelled(doc_id: str, question_id: str, probabilities: Mapping[str, float], references: Sequence[str], **values: Any) -> Record:
    """A choice record as label scoring makes it."""
    best = max(probabilities, key=lambda label: probabilities[label])
    given = {
        "answer": best,
        "answer_type": "choice",
        "value": f'"{best}"',
        "label_probabilities": [{"label": label, "probability": p} for label, p in probabilities.items()],
        "legal_mass": 0.5,
        "margin": 1.0,
        "references": references,
        **values,
    }
    return Record(doc_id, question_id, "ok", **given)
