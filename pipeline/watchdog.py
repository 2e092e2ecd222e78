"""Ends a worker whose engine hangs: no token for T seconds while there is work, and the process dies with its stacks on file.

A hanging engine raises nothing and returns nothing, so only a clock can tell. The stacks of all threads are written to a file (named in
the event), which is also put into the output prefix; then the process ends at once and its groups are tried in a fresh one. Should the
hang hold the interpreter itself, faulthandler's own thread, which needs no interpreter, does the same a little later.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

EXIT_HUNG = 86


@dataclass(frozen=True, slots=True)
class HangEvent:
    """What a watchdog says before it ends its process. `stacks` is the file that holds them."""

    event: str
    pid: int
    silent_s: float
    limit_s: float
    stacks: str


class Watchdog:
    """Fires when `is_busy()` and no `beat` for `limit_s` seconds. `on_fire` gets the event and the stacks' text, then `end` the exit code.

    `on_fire` has `grace_s` seconds; it may write to a bucket, which may hang too.
    """

    def __init__(
        self,
        limit_s: float,
        is_busy: Callable[[], bool],
        on_fire: Callable[[HangEvent, str], None] = lambda event, stacks: None,
        end: Callable[[int], None] = os._exit,
        folder: str | None = None,
        grace_s: float = 1.0,
    ) -> None:
        self._limit_s = limit_s
        self._is_busy = is_busy
        self._on_fire = on_fire
        self._end = end
        self._grace_s = grace_s
        self._last = time.monotonic()
        self._stop = threading.Event()
        handle, self.stacks_file = tempfile.mkstemp(prefix=f"askmany-stacks-{os.getpid()}-", suffix=".txt", dir=folder)
        self._file: IO[str] = os.fdopen(handle, "w")
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def beat(self) -> None:
        """Something came out of the engine, or it has just been given its first work."""
        self._last = time.monotonic()

    def close(self) -> None:
        """Stop watching and remove the (empty) file."""
        self._stop.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        Path(self.stacks_file).unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._stop.wait(min(self._limit_s / 20, 1.0)):
            faulthandler.dump_traceback_later(2 * self._limit_s + self._grace_s, exit=True, file=self._file)
            if not self._is_busy():
                self._last = time.monotonic()
            elif time.monotonic() - self._last > self._limit_s:
                self._fire(time.monotonic() - self._last)
                return

    def _fire(self, silent_s: float) -> None:
        faulthandler.dump_traceback(file=self._file)
        self._file.flush()
        event = HangEvent("worker_hung", os.getpid(), round(silent_s, 3), self._limit_s, self.stacks_file)
        print(json.dumps(asdict(event)), file=sys.stderr, flush=True)
        telling = threading.Thread(target=self._on_fire, args=(event, Path(self.stacks_file).read_text()), daemon=True)
        telling.start()
        telling.join(self._grace_s)
        self._end(EXIT_HUNG)
