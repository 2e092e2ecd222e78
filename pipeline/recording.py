"""Everything a launch leaves behind of its course: ledger, heartbeat, Prometheus endpoint, JSON log. One owner of the totals.

`book` and `event` are called by the driver's loop; the heartbeat's and the endpoint's threads read the totals under the same lock.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, replace
from typing import Any

from askmany.engine.errors import AskmanyError
from askmany.pipeline.acks import Ack
from askmany.pipeline.commit import Manifest
from askmany.pipeline.config import RunConfig
from askmany.pipeline.heartbeat import Heartbeat, RunStatus, State
from askmany.pipeline.ledger import Ledger
from askmany.pipeline.metrics_endpoint import serve
from askmany.pipeline.planning import PlannedRun
from askmany.pipeline.storage import ObjectStore
from askmany.pipeline.totals import Totals


class TooManyErrors(AskmanyError):
    """More errors than a run should go on with; it ends early and can be resumed."""


class Recorder:
    """The course of one launch."""

    def __init__(self, store: ObjectStore, config: RunConfig, fingerprint: str, epoch: int, planned: PlannedRun) -> None:
        self._store = store
        self._config = config
        self._run_id = f"{fingerprint}-{epoch}"
        self._epoch = epoch
        self._lock = threading.Lock()
        plan = planned.plan
        self._totals = Totals(planned_documents=plan.documents, planned_records=plan.records, homes=plan.documents_by_group)
        self._totals.begin(planned.done.values())
        self._started_at = time.time()
        self._state: State = "starting"
        self._message = ""
        self.eta_s: float | None = None
        self._ledger = Ledger(store, epoch, period_s=config.metrics.heartbeat_s)
        for shard in planned.carried.values():
            self._ledger.write("carried", {**asdict(shard.footer), "bytes": shard.bytes})
        self._heartbeat = Heartbeat(store, self.snapshot, config.metrics.heartbeat_s)
        self._stop_endpoint: Callable[[], None] | None = None

    def start(self) -> None:
        """Begin to beat and to be scraped. ConfigError when the port is taken."""
        port = self._config.metrics.port
        if port is not None:
            self._stop_endpoint = serve(self.totals, self._config.metrics.host, port)
        self._state = "running"
        self._heartbeat.start()

    def totals(self) -> Totals:
        """A copy of the sums at this moment, the driver's own retries included."""
        with self._lock:
            now = deepcopy(replace(self._totals, homes={}))
        now.retries.update(self._store.retrier.counts)
        return now

    def book(self, ack: Ack) -> None:
        """Count an acknowledged group and write it down. Raises TooManyErrors."""
        with self._lock:
            self._totals.book(ack)
            errors = self._config.errors
            broken = self._totals.breaks(errors.stop_fraction, errors.stop_sample)
        if ack.shard is not None:
            self._write("group", ack.line())
        if broken:
            raise TooManyErrors(
                f"{self._totals.launch_errors:,} of {self._totals.launch_records:,} records are errors, more than errors.stop_fraction = "
                f"{errors.stop_fraction}: {', '.join(f'{reason} ({n:,})' for reason, n in self._totals.errors.most_common(2))}"
            )

    def event(self, name: str, values: Mapping[str, Any]) -> None:
        """Write down something worth telling."""
        self._write("event", {"event": name, "epoch": self._epoch, **values})

    def workers(self, count: int) -> None:
        """How many workers have reported."""
        with self._lock:
            self._totals.workers = count

    def draining(self) -> None:
        self._state = "draining"

    def settle(self, manifest: Manifest, state: State, message: str = "") -> None:
        """The last word: totals by the manifest, a last heartbeat, and no more scrapes."""
        with self._lock:
            self._totals.settle(manifest)
        self._state, self._message, self.eta_s = state, message, None
        self._heartbeat.stop()

    def flush(self) -> None:
        self._ledger.flush()

    def close(self) -> None:
        """End the endpoint."""
        if self._stop_endpoint is not None:
            self._stop_endpoint()

    def snapshot(self) -> RunStatus:
        """The heartbeat."""
        now = self.totals()
        return RunStatus(
            run_id=self._run_id,
            state=self._state,
            epoch=self._epoch,
            started_at=self._started_at,
            updated_at=time.time(),
            period_s=self._config.metrics.heartbeat_s,
            planned=now.planned_records,
            done=now.records,
            documents=now.planned_documents,
            documents_done=now.documents,
            statuses=dict(now.statuses),
            tokens=dict(now.usage),
            workers=now.workers,
            restarts=now.repeated,
            io_retries=sum(now.retries.values()),
            eta_s=self.eta_s,
            host=socket.gethostname(),
            pid=os.getpid(),
            message=self._message,
        )

    def _write(self, kind: str, values: Mapping[str, Any]) -> None:
        self._ledger.write(kind, values)
        if self._config.metrics.json_log:
            line = {"at": round(time.time(), 3), "run": self._run_id, "kind": kind, **values}
            print(json.dumps(line, ensure_ascii=False), file=sys.stderr, flush=True)


@contextmanager
def recording(store: ObjectStore, config: RunConfig, fingerprint: str, epoch: int, planned: PlannedRun) -> Iterator[Recorder]:
    """A recorder that is started, and closed in the end whatever happens."""
    recorder = Recorder(store, config, fingerprint, epoch, planned)
    recorder.start()
    try:
        yield recorder
    finally:
        recorder.close()
