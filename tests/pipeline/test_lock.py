import json
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from askmany.pipeline.lock import Lease, LockKeeper, LockLostError, RunLock, RunLockedError, lease_name, newest_lease
from askmany.pipeline.storage import ObjectStore


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore(str(tmp_path / "out"), {})


def _lock(store: ObjectStore, clock: Clock) -> RunLock:
    return RunLock(store, lease_s=60, skew_s=5, clock=clock, sleep=clock.sleep)


def _move_away(store: ObjectStore, epoch: int) -> None:
    """Make the lease look like one of another machine, whose processes cannot be looked up."""
    lease = newest_lease(store)
    assert lease is not None
    assert lease.epoch == epoch
    store.put(lease.name, json.dumps(asdict(replace(lease, host="elsewhere"))).encode())


def test_the_first_takes_it_and_the_second_is_refused_with_a_name(store: ObjectStore) -> None:
    clock = Clock()
    first = _lock(store, clock)
    assert first.acquire() == 1
    with pytest.raises(RunLockedError, match=r"process \d+ on .*epoch 1.*--if-running"):
        _lock(store, clock).acquire("fail")
    first.renew()
    first.release()
    assert _lock(store, clock).acquire("fail") == 2


def test_waiting_ends_when_the_lease_runs_out(store: ObjectStore) -> None:
    clock = Clock()
    _lock(store, clock).acquire()
    _move_away(store, 1)
    started = clock.now
    assert _lock(store, clock).acquire("wait") == 2
    assert 60 <= clock.now - started <= 70


def test_waiting_has_a_limit(store: ObjectStore) -> None:
    clock = Clock()
    _lock(store, clock).acquire()
    _move_away(store, 1)
    with pytest.raises(RunLockedError):
        _lock(store, clock).acquire("wait", wait_limit_s=10)


def test_a_stale_lease_is_taken_over_and_its_holder_notices(store: ObjectStore) -> None:
    clock = Clock()
    first, second = _lock(store, clock), _lock(store, clock)
    first.acquire()
    _move_away(store, 1)
    clock.now += 66
    assert second.acquire("fail") == 2
    with pytest.raises(LockLostError, match="lost the run lock"):
        first.renew()
    with pytest.raises(LockLostError, match="not held"):
        _ = first.epoch
    first.release()
    second.renew()
    assert second.epoch == 2
    assert list(store.list("lock")) == [lease_name(2)]


def test_takeover_does_not_ask(store: ObjectStore) -> None:
    clock = Clock()
    first, second = _lock(store, clock), _lock(store, clock)
    first.acquire()
    assert second.acquire("takeover") == 2
    with pytest.raises(LockLostError):
        first.renew()


def test_a_holder_of_this_machine_that_was_killed_needs_no_waiting(store: ObjectStore) -> None:
    code = "import sys; from askmany.pipeline.lock import RunLock; from askmany.pipeline.storage import ObjectStore\n"
    code += "RunLock(ObjectStore(sys.argv[1], {})).acquire(); import os; os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code, store.uri], cwd=Path(__file__).parents[2], timeout=60, check=False)
    left = newest_lease(store)
    assert left is not None
    assert not left.released
    assert RunLock(store).acquire("fail") == 2


def test_a_reused_process_id_is_not_the_holder(store: ObjectStore) -> None:
    lock = RunLock(store)
    lock.acquire()
    lease = newest_lease(store)
    assert lease is not None
    assert lock.is_held(lease)
    assert not lock.is_held(replace(lease, process=lease.process + "1"))


def test_an_unreadable_lease_is_passed_over_and_its_epoch_used(store: ObjectStore) -> None:
    store.put(lease_name(7), b"{half")
    assert RunLock(store).acquire("fail") == 8


class OverwritingStore(ObjectStore):
    """A store that takes every create, as some S3 look-alikes do."""

    def create(self, name: str, data: bytes) -> bool:
        self.put(name, data)
        return True


def test_a_store_that_overwrites_leaves_one_winner(tmp_path: Path) -> None:
    store = OverwritingStore(str(tmp_path), {})
    clock = Clock()
    first, second = _lock(store, clock), _lock(store, clock)
    first.acquire()
    lease = newest_lease(store)
    assert lease is not None
    store.put(lease.name, json.dumps(asdict(replace(lease, token="another"))).encode())  # what a rival's create would have done
    with pytest.raises(LockLostError):
        first.renew()
    assert second.acquire("takeover") == 2


def test_of_many_at_once_one_wins(store: ObjectStore) -> None:
    won: list[int] = []
    refused: list[RunLockedError] = []
    gate = threading.Barrier(8)

    def run() -> None:
        lock = RunLock(ObjectStore(store.uri, {}))
        gate.wait()
        try:
            won.append(lock.acquire("fail"))
        except RunLockedError as error:
            refused.append(error)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [1]
    assert len(refused) == 7


def test_the_keeper_renews_and_tells_of_a_loss_once(store: ObjectStore) -> None:
    lock, lost = RunLock(store, lease_s=60), []
    lock.acquire()
    before = newest_lease(store)
    told = threading.Event()

    def on_lost(error: LockLostError) -> None:
        lost.append(error)
        told.set()

    with LockKeeper(lock, 0.02, on_lost):
        while (now := newest_lease(store)) is None or before is None or now.expires_at <= before.expires_at:
            pass
        RunLock(store).acquire("takeover")
        assert told.wait(10)
    assert len(lost) == 1


def test_a_lease_names_its_object() -> None:
    assert Lease(3, "t", "h", 1, "p", 0.0, 1.0).name == "lock/00000003.json"
