"""A launch of a run in a process of its own, timed and weighed: what `bench_pipeline` measures."""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from askmany.pipeline.balance import CostModel, Floats

POLL_S = 0.1
WEIGH_S = 0.02


@dataclass(frozen=True, slots=True)
class Launched:
    """What one launch was: times in seconds since 1970, the driver's peak memory (see `Weigher`) and CPU seconds, objects opened before
    work was handed out."""

    state: str
    started_at: float
    dispatching_at: float
    ended_at: float
    driver_peak_bytes: int
    driver_cpu_s: float
    opened: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Changes:
    """What differs from a run as a user starts it. `engine` and `preparer` are `module:function` and build those of the workers; with
    `input_order` all documents are planned as if they cost the same; `environment` is added to the process's own."""

    engine: str = "askmany.pipeline.building:build_engine"
    preparer: str = "askmany.pipeline.building:build_preparer"
    input_order: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


def launch(config: Mapping[str, Any], changes: Changes = Changes()) -> Launched:
    """Run to the end. Raises RuntimeError with what the process said when it failed."""
    process = _start(config, changes)
    out, err = process.communicate()
    if process.returncode:
        raise RuntimeError(f"the run ended with {process.returncode}: {err[-2000:]}")
    values = json.loads(out.splitlines()[-1])
    return Launched(**{**values, "opened": tuple(values["opened"])})


def launch_until(config: Mapping[str, Any], changes: Changes, enough: Callable[[], bool]) -> int:
    """Start a run and kill its driver, without a word, once `enough()` holds; the driver's peak memory in bytes until then. Raises
    RuntimeError when it ends before."""
    process = _start(config, changes)
    weigher = Weigher(process.pid)
    while not enough():
        if process.poll() is not None:
            raise RuntimeError(f"the run ended with {process.returncode} before it could be killed")
        time.sleep(POLL_S)
    weigher.stop()
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return weigher.peak_bytes


def _start(config: Mapping[str, Any], changes: Changes) -> subprocess.Popen[str]:
    """The driver in a new process group, its local Ray with it."""
    spec = Path(config["output"]["uri"]).parent / "launch.json"
    spec.write_text(json.dumps({"config": config, "changes": asdict(changes)}))
    command = [sys.executable, "-m", "askmany.jobs.bench_launch", str(spec)]
    whole = {**os.environ, **changes.environment}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=whole, start_new_session=True)


class Weigher:
    """The peak of a process's own memory (anonymous resident bytes: neither the object store's nor files'), looked at often."""

    def __init__(self, pid: int | str = "self") -> None:
        self.peak_bytes = 0
        self._status = Path(f"/proc/{pid}/status")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="weigher", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(WEIGH_S):
            line = next((line for line in self._status.read_text().splitlines() if line.startswith("RssAnon")), "RssAnon: 0")
            self.peak_bytes = max(self.peak_bytes, int(line.split()[1]) * 1024)


def _child(config: Mapping[str, Any], changes: Changes) -> Launched:
    """The launch itself, in this process."""
    from askmany.pipeline import dispatch, run
    from askmany.pipeline.storage import ObjectStore

    started_at, seen, opened = time.time(), [], []
    real_dispatch, real_open, real_get = dispatch.dispatch, ObjectStore.open, ObjectStore.get

    def noted_dispatch(*arguments: Any) -> Any:
        seen.append(time.time())
        return real_dispatch(*arguments)

    def noted(real: Callable[..., Any]) -> Callable[..., Any]:
        def read(store: ObjectStore, name: str) -> Any:
            if not seen:
                opened.append(name)
            return real(store, name)

        return read

    pa.set_memory_pool(pa.system_memory_pool())  # as the command line does
    weigher = Weigher()
    setattr(run, "dispatch", noted_dispatch)  # noqa: B010
    ObjectStore.open, ObjectStore.get = noted(real_open), noted(real_get)  # type: ignore[method-assign]
    if changes.input_order:
        setattr(CostModel, "estimate", _equal)  # noqa: B010
    result = run.run(config, build_engine=_named(changes.engine), build_preparer=_named(changes.preparer))
    weigher.stop()
    used = resource.getrusage(resource.RUSAGE_SELF)
    return Launched(result.state, started_at, seen[0], time.time(), weigher.peak_bytes, used.ru_utime + used.ru_stime, tuple(opened))


def _equal(model: CostModel, prompt_tokens: Floats, answer_tokens: Floats) -> Floats:
    """Every document costs the same."""
    return np.full_like(prompt_tokens, 1_000.0)


def _named(place: str) -> Callable[..., Any]:
    module, _, name = place.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps(asdict(_child(given["config"], Changes(**given["changes"])))))
