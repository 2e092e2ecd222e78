"""Opening a run: what its output already says of it."""

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from askmany.pipeline.building import build_preparer
from askmany.pipeline.lock import LockKeeper, LockLostError
from askmany.pipeline.opening import open_run
from askmany.pipeline.run import as_it_stands, locked
from askmany.pipeline.run_file import write_run
from tests.helpers.runs import opened_run, run_config


def test_a_lock_lost_while_the_run_is_planned_is_no_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Losing(LockKeeper):
        def __enter__(self) -> LockKeeper:
            self._on_lost(LockLostError("epoch 1 lost the run lock to another"))
            return super().__enter__()

    monkeypatch.setattr("askmany.pipeline.run.LockKeeper", Losing)
    opened = opened_run(tmp_path, [{"doc_id": "a", "text": "w1 w2"}])
    with pytest.raises(LockLostError, match="lost the run lock to another"), locked(opened, "fail"):
        time.sleep(10)


def test_a_run_that_waited_for_the_lock_takes_over_the_date_of_the_one_before(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    waiting = opened_run(tmp_path, [{"doc_id": "a", "text": "w1 w2"}])
    assert as_it_stands(waiting, config, build_preparer) is waiting
    earlier = open_run(config.model_copy(update={"date": datetime.now(UTC).replace(tzinfo=None, microsecond=0) - timedelta(days=3)}))
    assert earlier.fingerprint != waiting.fingerprint
    write_run(waiting.store, {"identity": earlier.identity})
    stands = as_it_stands(waiting, config, build_preparer)
    assert stands.fingerprint == earlier.fingerprint
    assert stands.config.date == earlier.config.date
