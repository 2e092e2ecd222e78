"""What a run adds up to: one set of figures behind the progress line, the heartbeat, the Prometheus endpoint and the exit code.

It starts from the shards of earlier launches and grows by acknowledgements, so all of them agree with the manifest to the unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from askmany.pipeline.acks import Ack
from askmany.pipeline.commit import Manifest, Shard


@dataclass(slots=True)
class Totals:
    """Sums over the whole output, except `errors`, `retries`, `repeated` and `workers`, which are of this launch. `homes` says how many
    documents count with each group; those of a group that it does not name all do."""

    planned_documents: int = 0
    planned_records: int = 0
    documents: int = 0
    records: int = 0
    shards: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    usage: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)
    repeated: int = 0
    workers: int = 0
    launch_records: int = 0
    launch_errors: int = 0
    homes: Mapping[str, int] = field(default_factory=dict)

    def begin(self, shards: Iterable[Shard]) -> None:
        """Add what earlier launches committed."""
        for shard in shards:
            self._add(shard)

    def book(self, ack: Ack) -> None:
        """Add an acknowledged group."""
        self.retries.update(ack.retries)
        if ack.shard is None:
            return
        self._add(ack.shard)
        self.errors.update(ack.notes.errors)
        self.repeated += ack.shard.footer.attempt > 1
        self.launch_records += ack.shard.footer.rows
        self.launch_errors += ack.shard.footer.statuses.get("error", 0)

    def settle(self, manifest: Manifest) -> None:
        """Take the manifest's word for what is committed: it has seen shards whose acknowledgement never came."""
        self.documents, self.records, self.shards = manifest.documents, manifest.records, len(manifest.shards)
        self.statuses, self.usage = Counter(manifest.statuses), Counter(_numbers(manifest.usage))

    def breaks(self, fraction: float, sample: int) -> bool:
        """Whether this launch yields more errors than a run should go on with."""
        return self.launch_records >= sample and self.launch_errors > fraction * self.launch_records

    def _add(self, shard: Shard) -> None:
        self.documents += self.homes.get(shard.footer.group, shard.footer.documents)
        self.records += shard.footer.rows
        self.shards += 1
        self.statuses.update(shard.footer.statuses)
        self.usage.update(_numbers(shard.footer.usage))


def _numbers(usage: Mapping[str, Any]) -> dict[str, Any]:
    return dict(usage)
