"""Device work beside the current stream, until somebody needs it: a step's work list is built while its first layer still projects."""

from __future__ import annotations

from collections.abc import Callable

import torch


class SideStream:
    """One piece of work at a time. May be captured: the graph forks and joins where the streams do. On a CPU work is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._open = False

    def run(self, work: Callable[[], None]) -> None:
        """Start `work`, which may read what the current stream was told to write so far and must allocate nothing."""
        if self._stream is None:
            work()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
        self._open = True

    def join(self) -> None:
        """What follows on the current stream waits for the work; nothing where that is done already."""
        if self._stream is not None and self._open:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._open = False
