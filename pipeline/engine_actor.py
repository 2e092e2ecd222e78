"""The process around a worker: built once by Ray, called with the plan rows of one group at a time or two, ended without ceremony.

A broken engine ends the process so that Ray starts another; a polite exit would lose the groups in flight. SIGTERM (a preempted node)
and the driver's word to drain both keep what is answered; only the latter is answered, by acknowledgements without a shard. What a
preempted process held is another's work, which its end tells the dispatcher.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

import pyarrow as pa

from askmany.engine.request import StreamResult
from askmany.pipeline.blocks import unpack
from askmany.pipeline.control import Reporter
from askmany.pipeline.failure import Failure
from askmany.pipeline.worker import GroupWorker, Job

EXIT_BROKEN, EXIT_PREEMPTED = 1, 3
BUILD_PAUSES_S = (0.0, 1.0, 3.0)


class EngineActor:
    """A `GroupWorker` in its process. `control` may be None: then nobody hears of single answers and nobody says drain.

    It never raises: a worker that cannot be built, or a group that cannot be committed, is told to the driver as a `Failure`.
    """

    def __init__(self, job: Job, control: Any) -> None:
        self._window_s = job.config.workers.stop_window_s
        self._reporter: Reporter | None = None
        self._leaving = threading.Event()
        self._worker = _build(job, self._report)
        if control is not None and isinstance(self._worker, GroupWorker):
            self._reporter = Reporter(control, f"{socket.gethostname()}/{os.getpid()}", self._drain)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._preempted)

    def __call__(self, batch: pa.Table) -> pa.Table:
        """A packed group from Ray Data in, one acknowledgement row out."""
        return pa.table({"ack": [self.process(unpack(batch))]})

    def process(self, block: pa.Table) -> str:
        """The acknowledgement of one group, or the failure."""
        if isinstance(self._worker, Failure):
            return self._worker.dump()
        try:
            ack = self._worker.process(block.column("group")[0].as_py(), block)
            if ack.shard is None and self._leaving.is_set():
                threading.Event().wait()  # until this process is gone
            return ack.dump()
        except Exception as error:
            return Failure.of(error).dump()

    def room_and_kind(self) -> tuple[int, str]:
        """Tokens that the KV pool of this engine holds, and the kind of accelerator that it runs on."""
        return (0, "") if isinstance(self._worker, Failure) else (self._worker.room_tokens, self._worker.accelerator)

    def _report(self, result: StreamResult) -> None:
        if self._reporter is not None:
            self._reporter.count(len(result.answer_token_ids))

    def _drain(self) -> None:
        if isinstance(self._worker, Failure):
            return
        self._worker.drain()
        deadline = time.monotonic() + self._window_s
        while not self._worker.idle and time.monotonic() < deadline:
            time.sleep(0.01)

    def _preempted(self, number: int, frame: FrameType | None) -> None:
        def leave() -> None:
            self._leaving.set()
            self._drain()
            os._exit(EXIT_PREEMPTED)

        threading.Thread(target=leave, name="preempted", daemon=True).start()


def _build(job: Job, report: Callable[[StreamResult], None]) -> GroupWorker | Failure:
    """The worker, tried a few times: a bucket or a device may be busy for a moment. A bad configuration is not tried again."""
    failure = Failure("no worker was built", False, "")
    for pause_s in BUILD_PAUSES_S:
        time.sleep(pause_s)
        try:
            return GroupWorker(job, die, report, accelerator())
        except Exception as error:
            failure = Failure.of(error)
            if failure.config:
                break
    return failure


def accelerator() -> str:
    """The kind of GPU that Ray gave this process, `cpu` for none."""
    import ray

    context = ray.get_runtime_context()
    if not context.get_accelerator_ids().get("GPU"):
        return "cpu"
    labels = context.get_node_labels() if hasattr(context, "get_node_labels") else {}
    return str(labels.get("ray.io/accelerator-type") or "gpu")


def die(error: BaseException) -> None:
    """End this process at once."""
    traceback.print_exception(error, file=sys.stderr)
    sys.stderr.flush()
    os._exit(EXIT_BROKEN)
