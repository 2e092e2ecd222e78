"""Ctrl-C and SIGTERM alike: both end a run in order, by a KeyboardInterrupt in the main thread."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interrupts_as_exceptions() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt for the time of the block, as SIGINT does. Outside the main thread nothing changes."""
    with _handling(_raise):
        yield


@contextmanager
def draining_first(drain: Callable[[], None]) -> Iterator[None]:
    """The first signal calls `drain` in a thread, beside the work of the block; KeyboardInterrupt comes at its end, or at the second.

    A block that ends by itself meanwhile waits for `drain` and ends as it would have without a signal.
    """
    over = threading.Event()
    lock = threading.Lock()

    def work() -> None:
        try:
            drain()
        finally:
            with lock:
                if not over.is_set():
                    os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=work, name="drain", daemon=True)
    begun = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if begun.is_set():
            raise KeyboardInterrupt
        begun.set()
        thread.start()

    with _handling(handle):
        try:
            yield
        finally:
            with lock:
                over.set()
        if begun.is_set():
            thread.join()


@contextmanager
def _handling(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [signal.signal(number, handle) for number in SIGNALS]
    try:
        yield
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)


def _raise(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
