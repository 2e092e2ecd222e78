import time
from dataclasses import replace
from pathlib import Path

import pytest

from askmany.engine.errors import ConfigError
from askmany.pipeline.heartbeat import STATUS, Heartbeat, RunStatus, read_status, write_status
from askmany.pipeline.storage import ObjectStore

ONE = RunStatus("r", "running", 1, 0.0, 0.0, 10.0, 5, 0, 2, 0)


def test_it_beats_until_its_last_word(tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path), {})
    done = [0]

    def snapshot() -> RunStatus:
        done[0] += 1
        return replace(ONE, done=done[0])

    heartbeat = Heartbeat(store, snapshot, 0.02).start()
    while done[0] < 4:
        time.sleep(0.01)
    heartbeat.stop()
    last = read_status(store)
    assert last.done == done[0]
    assert abs(last.updated_at - time.time()) < 5
    time.sleep(0.1)
    assert read_status(store) == last


def test_a_beat_that_cannot_be_written_is_counted_and_ends_nothing(tmp_path: Path) -> None:
    class Denied(ObjectStore):
        def put(self, name: str, data: bytes | memoryview) -> None:
            raise PermissionError("no")

    heartbeat = Heartbeat(Denied(str(tmp_path), {}), lambda: ONE, 60)
    heartbeat.stop()
    assert heartbeat.missed == 1


def test_silence_is_only_of_runs_that_should_be_alive() -> None:
    assert replace(ONE, updated_at=100.0).is_silent(141)
    assert not replace(ONE, updated_at=100.0).is_silent(139)
    assert not replace(ONE, updated_at=100.0, state="finished").is_silent(1e9)


def test_what_is_no_heartbeat_is_refused_by_name(tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path), {})
    with pytest.raises(ConfigError, match=r"_STATUS\.json: no such file"):
        read_status(store)
    for text in (b"{", b"[]", b'{"a": 1}'):
        store.put(STATUS, text)
        with pytest.raises(ConfigError, match=r"_STATUS\.json: not a heartbeat"):
            read_status(store)
    write_status(store, ONE)
    assert read_status(store).planned == 5
