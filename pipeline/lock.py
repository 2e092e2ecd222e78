"""One driver per output prefix: a lease in the bucket that its holder renews and that another may take over when it goes stale.

A lease is an object `lock/<epoch>.json`, made with "only if it is not there"; the highest epoch holds the lock. A holder that finds a
higher epoch, or another's token in its own lease, has lost it and must stop. The epoch goes into every shard's footer, so that a driver
that was cut off and comes back can be told from its successor. Knows nothing of what the lock guards.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from askmany.engine.errors import AskmanyError, ConfigError

FOLDER = "lock"
IfRunning = Literal["fail", "wait", "takeover"]


class LeaseStore(Protocol):
    """What the lock needs of an object store."""

    uri: str

    def create(self, name: str, data: bytes) -> bool: ...

    def put(self, name: str, data: bytes) -> None: ...

    def get(self, name: str) -> bytes: ...

    def list(self, folder: str) -> dict[str, int]: ...

    def delete(self, name: str) -> None: ...


class RunLockedError(ConfigError):
    """Another run holds the output prefix."""


class LockLostError(AskmanyError):
    """Another driver has taken the output prefix over; this one must stop without writing any more."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Who holds the prefix and until when (seconds since 1970). `process` tells a reused process id from the same process."""

    epoch: int
    token: str
    host: str
    pid: int
    process: str
    started_at: float
    expires_at: float
    released: bool = False

    @property
    def name(self) -> str:
        return lease_name(self.epoch)

    def holder(self) -> str:
        return f"process {self.pid} on {self.host} (epoch {self.epoch})"


def lease_name(epoch: int) -> str:
    return f"{FOLDER}/{epoch:08d}.json"


class RunLock:
    """The lock of one output prefix. `clock` gives seconds since 1970; `skew_s` is how far two machines' clocks may differ."""

    def __init__(
        self,
        store: LeaseStore,
        lease_s: float = 60.0,
        skew_s: float = 5.0,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._lease_s = lease_s
        self._skew_s = skew_s
        self._clock = clock
        self._sleep = sleep
        self._mine: Lease | None = None

    @property
    def epoch(self) -> int:
        """The epoch held. LockLostError when none is."""
        if self._mine is None:
            raise LockLostError(f"{self._store.uri}: the run lock is not held")
        return self._mine.epoch

    def acquire(self, if_running: IfRunning = "fail", wait_limit_s: float = float("inf")) -> int:
        """Take the lock and return its epoch. Raises RunLockedError when another holds it and we shall not wait or take over."""
        deadline = self._clock() + wait_limit_s
        while True:
            current = newest_lease(self._store)
            if current is not None and self.is_held(current) and if_running != "takeover":
                self._refuse_or_wait(current, if_running, deadline)
                continue
            if self._take(1 if current is None else current.epoch + 1):
                return self.epoch
            if_running = "fail" if if_running == "takeover" else if_running  # somebody else took it over at this moment

    def is_held(self, lease: Lease) -> bool:
        """Whether the lease still counts: not given back, not run out, and not of a process of this machine that is gone."""
        return not lease.released and self._clock() < lease.expires_at + self._skew_s and not _is_gone(lease)

    def renew(self) -> None:
        """Prolong the lease. Raises LockLostError when another driver has the prefix now."""
        mine = self._mine
        if mine is None:
            raise LockLostError(f"{self._store.uri}: the run lock is not held")
        self._check(mine)
        self._mine = replace(mine, expires_at=self._clock() + self._lease_s)
        self._store.put(mine.name, _dump(self._mine))

    def release(self) -> None:
        """Give the lock back; harmless when it is not held or was lost. The lease stays as a record, so that epochs go on rising."""
        mine, self._mine = self._mine, None
        if mine is None:
            return
        try:
            self._check(mine)
        except LockLostError:
            return
        self._store.put(mine.name, _dump(replace(mine, released=True)))

    def _refuse_or_wait(self, current: Lease, if_running: IfRunning, deadline: float) -> None:
        left = current.expires_at - self._clock()
        if if_running == "fail" or self._clock() >= deadline:
            raise RunLockedError(
                f"{self._store.uri}: {current.holder()} is running there, its lease runs out in {left:.0f} s unless it renews it; "
                "wait for it with --if-running wait, or end it with --if-running takeover"
            )
        self._sleep(min(1.0, self._lease_s / 4))

    def _take(self, epoch: int) -> bool:
        now = self._clock()
        mine = Lease(epoch, uuid.uuid4().hex, socket.gethostname(), os.getpid(), _process_mark(os.getpid()), now, now + self._lease_s)
        if not self._store.create(mine.name, _dump(mine)):
            self._sleep(min(0.2, self._lease_s / 8))
            return False
        try:
            self._check(mine)  # some stores overwrite where they should refuse; the one that is read back has won
        except LockLostError:
            return False
        self._mine = mine
        for name in self._store.list(FOLDER):
            if name < mine.name:
                self._store.delete(name)
        return True

    def _check(self, mine: Lease) -> None:
        names = self._store.list(FOLDER)
        newer = max(names, default=mine.name)
        if newer > mine.name:
            self._mine = None
            raise LockLostError(f"{self._store.uri}: epoch {mine.epoch} lost the run lock to {newer}")
        there = read_lease(self._store, mine.name)
        if there is None or there.token != mine.token:
            self._mine = None
            raise LockLostError(f"{self._store.uri}: epoch {mine.epoch} lost the run lock to {there.holder() if there else 'nobody'}")


class LockKeeper:
    """A thread that renews a lock four times a lease and says once, by `on_lost`, that it is lost."""

    def __init__(self, lock: RunLock, period_s: float, on_lost: Callable[[LockLostError], None]) -> None:
        self._lock = lock
        self._period_s = period_s
        self._on_lost = on_lost
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="run-lock", daemon=True)

    def __enter__(self) -> LockKeeper:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            try:
                self._lock.renew()
            except LockLostError as error:
                self._on_lost(error)
                return
            except OSError:
                continue  # the bucket is away for a moment; the lease outlasts three such


def newest_lease(store: LeaseStore) -> Lease | None:
    """The lease of the highest epoch; an unreadable one counts as given back, its epoch as used."""
    names = [name for name in store.list(FOLDER) if name.endswith(".json")]
    if not names:
        return None
    name = max(names)
    lease = read_lease(store, name)
    if lease is not None:
        return lease
    epoch = int(name.removeprefix(f"{FOLDER}/").removesuffix(".json"))
    return Lease(epoch, "", "?", 0, "", 0.0, 0.0, released=True)


def read_lease(store: LeaseStore, name: str) -> Lease | None:
    try:
        return Lease(**json.loads(store.get(name)))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _dump(lease: Lease) -> bytes:
    return json.dumps(asdict(lease)).encode()


def _is_gone(lease: Lease) -> bool:
    """Whether the holder was a process of this machine that has ended: then nobody needs to wait for its lease."""
    return lease.host == socket.gethostname() and lease.process != "" and _process_mark(lease.pid) != lease.process


def _process_mark(pid: int) -> str:
    """The machine's boot and the process's start in its ticks; "" where that cannot be known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return f"{boot}:gone"
    state, started = fields[0], fields[19]
    return f"{boot}:gone" if state == "Z" else f"{boot}:{started}"
