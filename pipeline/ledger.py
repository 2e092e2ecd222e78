"""What happened, as lines of JSON in the bucket: every acknowledged group, every event worth telling, in the order the driver heard of it.

The driver writes segments `ledger/<epoch>-<number>.jsonl`, a new object every few seconds, none ever changed. They let a resumed run
know a finished shard without opening it, and are all that the report needs. No text of any document, no credential.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

FOLDER = "ledger"


class SegmentStore(Protocol):
    """What the ledger needs of an object store."""

    def put(self, name: str, data: bytes) -> None: ...

    def get(self, name: str) -> bytes: ...

    def list(self, folder: str) -> dict[str, int]: ...


class Ledger:
    """Appends lines; writes a segment when the last is `period_s` old or `max_lines` have come. Safe to share between threads."""

    def __init__(
        self, store: SegmentStore, epoch: int, period_s: float = 10.0, max_lines: int = 1000, clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._prefix = f"{FOLDER}/{epoch:08d}"
        self._period_s = period_s
        self._max_lines = max_lines
        self._clock = clock
        self._lines: list[str] = []
        self._number = 0
        self._written_at = clock()
        self._lock = threading.Lock()

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        """Add one line; `kind` and the time (seconds since 1970) are put in front of the values."""
        now = self._clock()
        with self._lock:
            self._lines.append(json.dumps({"kind": kind, "at": round(now, 3), **values}, ensure_ascii=False))
            if now - self._written_at >= self._period_s or len(self._lines) >= self._max_lines:
                self._write_out(now)

    def flush(self) -> None:
        """Write what is held."""
        with self._lock:
            self._write_out(self._clock())

    def _write_out(self, now: float) -> None:
        self._written_at = now
        if not self._lines:
            return
        self._store.put(f"{self._prefix}-{self._number:06d}.jsonl", "".join(f"{line}\n" for line in self._lines).encode("utf-8"))
        self._number += 1
        self._lines = []


def read_ledger(store: SegmentStore) -> Iterator[dict[str, Any]]:
    """Every line of every segment, oldest first. A line that is not JSON is passed over: the ledger tells, it does not decide."""
    for name in sorted(store.list(FOLDER)):
        for line in store.get(name).decode("utf-8", "replace").splitlines():
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value
