"""Watching a run: acknowledgements are booked as they come, and a thread asks the workers' tally in between."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from askmany.pipeline.dispatch import Tally
from askmany.pipeline.planning import PlannedRun
from askmany.pipeline.progress import Counts, Display, make_display
from askmany.pipeline.worker import Ack

POLL_S = 0.5


class Watcher:
    """Counts of one launch and the display that shows them. `book` and the polling thread share them under a lock."""

    def __init__(self, display: Display, counts: Counts, costs: dict[str, float], tally: Any) -> None:
        self.tally = tally
        self._display = display
        self._counts = counts
        self._costs = costs
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="progress", daemon=True)

    def book(self, ack: Ack) -> None:
        """Count an acknowledged group."""
        with self._lock:
            self._counts.book(ack, self._costs.pop(ack.group, 0.0))
            self._display.show(self._counts)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._refresh()
        self._display.show(self._counts, final=True)
        self._display.close()

    def _poll(self) -> None:
        while not self._stopped.wait(POLL_S):
            self._refresh()

    def _refresh(self) -> None:
        import ray

        try:
            answers, tokens = ray.get(self.tally.read.remote(), timeout=10)
        except Exception:  # a display may never end a run
            return
        with self._lock:
            self._counts.live_answers, self._counts.live_tokens = answers, tokens
            self._display.show(self._counts)


@contextmanager
def watch(console: Console, planned: PlannedRun) -> Iterator[Watcher]:
    """A watcher of what is left to do, with its tally actor."""
    import ray

    costs = {group.name: group.cost for group in planned.todo}
    counts = Counts(
        planned_documents=sum(group.stop - group.start for group in planned.todo),
        planned_records=sum(group.records for group in planned.todo),
        planned_cost=sum(costs.values()),
    )
    tally: Any = ray.remote(num_cpus=0)(Tally).remote()
    watcher = Watcher(make_display(console), counts, costs, tally)
    watcher.start()
    try:
        yield watcher
    finally:
        watcher.stop()
        ray.kill(tally)
