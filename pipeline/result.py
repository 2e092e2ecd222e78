"""What a run comes to: the object that `run` returns, its exit code, and the values of run.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import pyarrow as pa

from askmany.pipeline.commit import Manifest, read_answers, read_manifest
from askmany.pipeline.opening import OpenedRun
from askmany.pipeline.planning import PlannedRun
from askmany.pipeline.run_file import redacted, versions
from askmany.pipeline.storage import ObjectStore

State = Literal["planned", "running", "complete", "incomplete", "interrupted", "stopped", "failed"]
EXIT_OK, EXIT_INTERNAL, EXIT_CONFIG, EXIT_ERRORS, EXIT_INTERRUPTED, EXIT_REGRESSED = 0, 1, 2, 3, 4, 5


@dataclass(frozen=True, slots=True)
class RunResult:
    """A run as it stands in its output. Counts cover the whole output, `seconds` this launch.

    `usage` sums the engines' counters over all shards. `storage_options` open the output again.
    """

    output: str
    state: State
    documents: int
    records: int
    planned_documents: int
    planned_records: int
    statuses: Mapping[str, int]
    dead_letters: int
    unasked_documents: int
    document_tokens: int
    seconds: float
    launch_records: int
    usage: Mapping[str, float]
    max_error_fraction: float
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def exit_code(self) -> int:
        """0 all ok · 1 not complete · 3 more errors than allowed, or stopped for them · 4 interrupted."""
        if self.state == "interrupted":
            return EXIT_INTERRUPTED
        if self.state in ("incomplete", "failed"):
            return EXIT_INTERNAL
        if self.state == "stopped":
            return EXIT_ERRORS
        errors = self.statuses.get("error", 0)
        return EXIT_ERRORS if self.records and errors / self.records > self.max_error_fraction else EXIT_OK

    def tables(self) -> Iterator[pa.Table]:
        """The answers, a table a shard."""
        store = ObjectStore(self.output, self.storage_options)
        return read_answers(store, read_manifest(store))

    def to_table(self) -> pa.Table:
        """All answers in memory, sorted by document, question and chunk."""
        table = pa.concat_tables(list(self.tables()))
        return table.sort_by([("doc_id", "ascending"), ("question_id", "ascending"), ("chunk", "ascending")])


def make_result(
    opened: OpenedRun, planned: PlannedRun, manifest: Manifest | None, state: State, seconds: float = 0.0, launch_records: int = 0
) -> RunResult:
    """The result of a launch; without a manifest (a dry run) nothing is answered."""
    return RunResult(
        output=opened.store.uri,
        state=state,
        documents=manifest.documents if manifest else 0,
        records=manifest.records if manifest else 0,
        planned_documents=planned.plan.documents,
        planned_records=planned.plan.records,
        statuses=manifest.statuses if manifest else {},
        dead_letters=planned.dead_letters,
        unasked_documents=planned.unasked,
        document_tokens=planned.plan.total("document_tokens"),
        seconds=round(seconds, 3),
        launch_records=launch_records,
        usage=manifest.usage if manifest else {},
        max_error_fraction=opened.config.errors.max_fraction,
        storage_options=opened.config.output.storage_options,
    )


def run_values(opened: OpenedRun, result: RunResult, launches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """run.json: what was asked for (resolved, secrets taken out), with what, and what came of it."""
    counts = asdict(result)
    for key in ("output", "storage_options", "max_error_fraction", "seconds", "launch_records"):
        del counts[key]
    read, alone = result.usage.get("kv_bytes_read", 0), result.usage.get("kv_bytes_alone", 0)
    return {
        **counts,
        "kv_bytes_read": read,
        "kv_bytes_saved": alone - read,
        "launches": list(launches),
        "fingerprint": opened.fingerprint,
        "identity": opened.identity,
        "model": {"name": opened.model.name, "revision": opened.model.revision, "context_tokens": opened.model.context_tokens},
        "config": redacted(opened.config.model_dump(mode="json")),
        "versions": versions(),
    }
