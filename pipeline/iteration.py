"""Blocks of a Ray dataset as they come, with every thread that Ray Data starts for it ended when the iteration is, however it ends."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

THREAD_NAMES = ("iter_threaded", "StreamingExecutor")
END_S = 10.0


def batches(dataset: Any) -> Generator[pa.Table, None, None]:
    """The blocks of `dataset`, in whatever order they are done. Close it when not all of them are wanted."""
    with _threads_ended():
        blocks: Any = iter(dataset.iter_batches(batch_size=None, batch_format="pyarrow"))
        try:
            yield from blocks
        finally:
            blocks.close()


@contextmanager
def _threads_ended() -> Iterator[None]:
    """Wait for the threads of the iteration inside the block.

    One left over drops its last object references when it pleases; where that is after `ray.shutdown`, Ray ends the process with status 1
    and without a word. They end when their generator is closed, and a generator that an error passed by lives as long as the error's frames
    do: those are cleared first.
    """
    before = set(threading.enumerate())
    try:
        yield
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        deadline = time.monotonic() + END_S
        for thread in set(threading.enumerate()) - before:
            if thread.name.startswith(THREAD_NAMES):
                thread.join(max(0.0, deadline - time.monotonic()))
