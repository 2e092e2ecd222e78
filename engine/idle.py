"""How long the device worked and how long it waited between steps, by its own clock.

A step is the device's work between two marks in its queue; what lies between one step's end and the next one's begin is idle time, unless
the host was not asked for a step at all (`pause`). Measured with CUDA events, read when they have passed, so that nothing waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

Event = torch.cuda.Event


class DeviceClock:
    """Adds up `busy_s` and `idle_s`; both stay 0 without a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.busy_s = 0.0
        self.idle_s = 0.0
        self._on = device.type == "cuda"
        self._steps: deque[tuple[Event, Event]] = deque()
        self._last_end: Event | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the launch of a step."""
        if not self._on:
            yield
            return
        begin, end = (Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        yield
        end.record()
        self._steps.append((begin, end))
        self.collect()

    def pause(self) -> None:
        """There was nothing to do: the time until the next step does not count."""
        self.collect()
        self._last_end = None

    def collect(self) -> None:
        """Add up the steps that are over."""
        while self._steps and self._steps[0][1].query():  # type: ignore[no-untyped-call]
            begin, end = self._steps.popleft()
            self.busy_s += begin.elapsed_time(end) / 1e3
            if self._last_end is not None:
                self.idle_s += max(0.0, self._last_end.elapsed_time(begin)) / 1e3
            self._last_end = end
