"""Watching a run: acknowledgements are booked as they come, and a thread asks the control actor for the counts in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from askmany.pipeline.acks import Ack
from askmany.pipeline.control import start_control
from askmany.pipeline.planning import PlannedRun
from askmany.pipeline.progress import Counts, Display, make_display
from askmany.pipeline.recording import Recorder

POLL_S = 0.5
READ_S = 2.0  # counts that take longer than this are not waited for, least of all at a run's end


class Watcher:
    """Counts of one launch and the display that shows them. `book` and the polling thread share them under a lock."""

    def __init__(self, display: Display, counts: Counts, costs: dict[str, float], control: Any, recorder: Recorder) -> None:
        self.control = control
        self._recorder = recorder
        self._display = display
        self._counts = counts
        self._costs = costs
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="progress", daemon=True)

    def book(self, ack: Ack) -> None:
        """Count an acknowledged group. Raises TooManyErrors."""
        with self._lock:
            self._counts.book(ack, self._costs.pop(ack.group, 0.0))
            self._display.show(self._counts)
        self._recorder.book(ack)

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
            answers, tokens, workers = ray.get(self.control.read.remote(), timeout=READ_S)
        except Exception:  # a display may never end a run
            return
        self._recorder.workers(workers)
        with self._lock:
            self._counts.live_answers, self._counts.live_tokens = answers, tokens
            self._recorder.eta_s = self._counts.remaining_s(time.monotonic() - self._began)
            self._display.show(self._counts)


@contextmanager
def watch(console: Console, planned: PlannedRun, recorder: Recorder) -> Iterator[Watcher]:
    """A watcher of what is left to do, with its control actor."""
    import ray

    costs = {group.name: group.cost for group in planned.todo}
    counts = Counts(
        planned_documents=sum(group.stop - group.start for group in planned.todo),
        planned_records=sum(group.records for group in planned.todo),
        planned_cost=sum(costs.values()),
    )
    control = start_control()
    watcher = Watcher(make_display(console), counts, costs, control, recorder)
    watcher.start()
    try:
        yield watcher
    finally:
        watcher.stop()
        ray.kill(control)
