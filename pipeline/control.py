"""The one small actor that driver and workers of a launch share: live counts go up, the word to drain comes down.

Workers wait for that word in one pending call each, so nobody polls; counts come as sums every half second. Losing this actor loses a
display and a polite end, no answer.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

REPORT_S = 0.5


class Control:
    """Runs as an asynchronous Ray actor."""

    def __init__(self) -> None:
        self._answers = 0
        self._tokens = 0
        self._workers: set[str] = set()
        self._drained: set[str] = set()
        self._drain = asyncio.Event()

    async def add(self, answers: int, tokens: int) -> None:
        self._answers += answers
        self._tokens += tokens

    async def read(self) -> tuple[int, int, int]:
        """Answers and answer tokens so far, and the workers that have ever reported."""
        return self._answers, self._tokens, len(self._workers)

    async def wait_for_drain(self, worker: str) -> None:
        """Returns when the launch drains."""
        self._workers.add(worker)
        await self._drain.wait()

    async def leave(self, worker: str) -> None:
        """This worker is gone and need not be waited for."""
        self._workers.discard(worker)

    async def confirm(self, worker: str) -> None:
        """This worker has kept what it had."""
        self._drained.add(worker)

    async def drain(self, limit_s: float) -> bool:
        """Tell every worker; whether all have confirmed within the limit."""
        self._drain.set()
        deadline = time.monotonic() + limit_s
        while not self._workers <= self._drained and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return self._workers <= self._drained


def start_control() -> Any:
    """A handle of a new control actor."""
    import ray

    return ray.remote(Control).options(num_cpus=0, max_concurrency=20_000).remote()


class Reporter:
    """The worker's side: adds up answers, sends the sums, and calls `on_drain` once when told to."""

    def __init__(self, control: Any, worker: str, on_drain: Callable[[], None]) -> None:
        self._control = control
        self._worker = worker
        self._on_drain = on_drain
        self._lock = threading.Lock()
        self._answers = self._tokens = 0
        for target in (self._listen, self._send):
            threading.Thread(target=target, name=f"control-{target.__name__}", daemon=True).start()

    def count(self, tokens: int) -> None:
        """One more answer, of so many tokens."""
        with self._lock:
            self._answers += 1
            self._tokens += tokens

    def _listen(self) -> None:
        import ray

        try:
            ray.get(self._control.wait_for_drain.remote(self._worker))
        except ray.exceptions.RayError:
            return  # the driver is gone, and so will this worker be
        self._on_drain()
        self._control.confirm.remote(self._worker)

    def _send(self) -> None:
        while True:
            time.sleep(REPORT_S)
            with self._lock:
                answers, tokens, self._answers, self._tokens = self._answers, self._tokens, 0, 0
            if answers:
                self._control.add.remote(answers, tokens)
