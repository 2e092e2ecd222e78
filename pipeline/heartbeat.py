"""The state of a run as anyone can read it from the bucket, with no cluster up: `_STATUS.json`, rewritten every few seconds.

The driver writes it, `askmany status` reads it. It holds counts and times, no text of any document and no credential.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, Protocol

from askmany.engine.errors import ConfigError

STATUS = "_STATUS.json"
State = Literal["starting", "running", "draining", "finished", "interrupted", "failed"]
LIVE: frozenset[State] = frozenset({"starting", "running", "draining"})


class StatusStore(Protocol):
    """What the heartbeat needs of an object store."""

    uri: str

    def put(self, name: str, data: bytes) -> None: ...

    def get(self, name: str) -> bytes: ...

    def uri_of(self, name: str) -> str: ...


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Where a run stands. Times in seconds since 1970; `planned` and `done` count records; `period_s` is how often this is rewritten."""

    run_id: str
    state: State
    epoch: int
    started_at: float
    updated_at: float
    period_s: float
    planned: int
    done: int
    documents: int
    documents_done: int
    statuses: Mapping[str, int] = field(default_factory=dict)
    tokens: Mapping[str, float] = field(default_factory=dict)
    workers: int = 0
    restarts: int = 0
    io_retries: int = 0
    eta_s: float | None = None
    host: str = ""
    pid: int = 0
    message: str = ""

    def is_silent(self, now: float) -> bool:
        """Whether a run that should be alive has not been heard of for three periods and ten seconds."""
        return self.state in LIVE and now - self.updated_at > 3 * self.period_s + 10


class Heartbeat:
    """Writes what `snapshot` says every `period_s` seconds from a thread of its own; `stop` writes a last one."""

    def __init__(self, store: StatusStore, snapshot: Callable[[], RunStatus], period_s: float = 10.0) -> None:
        self._store = store
        self._snapshot = snapshot
        self._period_s = period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self.missed = 0

    def start(self) -> Heartbeat:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._beat()

    def _run(self) -> None:
        self._beat()
        while not self._stop.wait(self._period_s):
            self._beat()

    def _beat(self) -> None:
        """A heartbeat that cannot be written is counted; the run does not end for it."""
        try:
            write_status(self._store, self._snapshot())
        except OSError:
            self.missed += 1


def write_status(store: StatusStore, status: RunStatus) -> None:
    store.put(STATUS, json.dumps(asdict(replace(status, updated_at=time.time())), indent=1).encode())


def read_status(store: StatusStore) -> RunStatus:
    """The last heartbeat. ConfigError when there is none or it is no heartbeat."""
    place = store.uri_of(STATUS)
    try:
        return RunStatus(**json.loads(store.get(STATUS)))
    except FileNotFoundError:
        raise ConfigError(f"{place}: no such file; is {store.uri} the output of a run?") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{place}: not a heartbeat: {error}") from error
