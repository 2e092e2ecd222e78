"""A lock held for the time of a block: renewed meanwhile, and told of when it is lost, whatever the main thread is doing then."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from askmany.pipeline.interrupt import interrupts_as_exceptions
from askmany.pipeline.lock import IfRunning, LeaseStore, LockKeeper, LockLostError, RunLock


class Hold:
    """A lock that is held. Its keeper or whoever writes finds that it is lost: the first of `errors` is what the block ends in."""

    def __init__(self, lock: RunLock) -> None:
        self.lock = lock
        self.errors: list[LockLostError] = []

    def check(self) -> None:
        """Prolong the lease, before a write. Raises LockLostError when another holds the lock and writes there now."""
        try:
            self.lock.renew()
        except LockLostError as error:
            self.errors.append(error)
            raise

    def lost(self, error: LockLostError) -> None:
        """What the keeper's thread calls: interrupts the main thread."""
        self.errors.append(error)
        os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def held(store: LeaseStore, lease_s: float, if_running: IfRunning) -> Iterator[Hold]:
    """The lock of `store`. When it is lost, the main thread is interrupted, and the block ends in the LockLostError that says to whom."""
    lock = RunLock(store, lease_s)
    lock.acquire(if_running)
    hold = Hold(lock)
    try:
        with interrupts_as_exceptions(), LockKeeper(lock, lease_s / 4, hold.lost):
            yield hold
    except (KeyboardInterrupt, LockLostError):
        if hold.errors:
            raise hold.errors[0] from None
        raise
    finally:
        lock.release()
