"""Ctrl-C and SIGTERM alike: both end a run in order, by a KeyboardInterrupt in the main thread."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_as_exceptions() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt for the time of the block, as SIGINT does. Outside the main thread nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
