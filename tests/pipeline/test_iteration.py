"""Blocks of a Ray dataset: all of them, and no thread left over when the reader stops early or is interrupted."""

import threading
import time
from contextlib import closing

import pyarrow as pa
import pytest

from askmany.pipeline.iteration import END_S, THREAD_NAMES, batches


def slow(block: pa.Table) -> pa.Table:
    time.sleep(0.05)
    return block


def dataset(blocks: int) -> object:
    import ray.data

    tables = [pa.table({"n": [number]}) for number in range(blocks)]
    return ray.data.from_arrow(tables).map_batches(slow, batch_size=None, batch_format="pyarrow", num_cpus=0.5)


def left_over(before: set[threading.Thread]) -> list[str]:
    return [t.name for t in set(threading.enumerate()) - before if t.name.startswith(THREAD_NAMES)]


@pytest.mark.usefixtures("ray_session")
def test_every_block_comes_once() -> None:
    before = set(threading.enumerate())
    assert sorted(block.column("n")[0].as_py() for block in batches(dataset(12))) == list(range(12))
    assert left_over(before) == []


@pytest.mark.usefixtures("ray_session")
def test_threads_run_while_blocks_come_and_end_when_the_reader_stops() -> None:
    before = set(threading.enumerate())
    with closing(batches(dataset(60))) as blocks:
        next(blocks)
        assert left_over(before) != []
    assert left_over(before) == []


@pytest.mark.usefixtures("ray_session")
def test_threads_end_when_the_reader_is_interrupted() -> None:
    def interrupted() -> None:
        with closing(batches(dataset(60))) as blocks:
            for _ in blocks:
                raise KeyboardInterrupt

    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert left_over(before) == []


@pytest.mark.usefixtures("ray_session")
def test_threads_end_at_once_when_the_interrupt_comes_between_two_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It strikes Ray Data's own frames then, which keep the generator alive that the threads belong to."""
    from ray.data._internal.block_batching.iter_batches import BatchIterator

    def struck(*_: object) -> None:
        raise KeyboardInterrupt

    before = set(threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr(BatchIterator, "_attribute_blocked_time", struck)
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            next(batches(dataset(60)))
    assert left_over(before) == []
    assert time.monotonic() - began < END_S
