"""A launch of a run in a process of its own, timed and weighed: what `bench_pipeline` measures."""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from askmany.pipeline.balance import CostModel, Floats

POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Launched:
    """What one launch was: times in seconds since 1970, the driver's peak resident bytes and CPU seconds, objects that it opened before
    work was handed out."""

    state: str
    started_at: float
    dispatching_at: float
    ended_at: float
    driver_peak_bytes: int
    driver_cpu_s: float
    opened: tuple[str, ...]


def launch(
    config: Mapping[str, Any], engine: str = "", environment: Mapping[str, str] | None = None, input_order: bool = False
) -> Launched:
    """Run to the end. Raises RuntimeError with what the process said when it failed.

    `engine`: `module:function` that builds the workers' engines. With `input_order` all documents are planned as if they cost the same.
    """
    process = _start(config, environment or {}, {"engine": engine, "input_order": input_order})
    out, err = process.communicate()
    if process.returncode:
        raise RuntimeError(f"the run ended with {process.returncode}: {err[-2000:]}")
    values = json.loads(out.splitlines()[-1])
    return Launched(**{**values, "opened": tuple(values["opened"])})


def launch_until(config: Mapping[str, Any], enough: Callable[[], bool]) -> None:
    """Start a run and kill its driver, without a word, once `enough()` holds. Raises RuntimeError when it ends before."""
    process = _start(config, {}, {})
    while not enough():
        if process.poll() is not None:
            raise RuntimeError(f"the run ended with {process.returncode} before it could be killed")
        time.sleep(POLL_S)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _start(config: Mapping[str, Any], environment: Mapping[str, str], options: Mapping[str, Any]) -> subprocess.Popen[str]:
    """The driver in a new process group, its local Ray with it."""
    spec = Path(config["output"]["uri"]).parent / "launch.json"
    spec.write_text(json.dumps({"config": config, **options}))
    command = [sys.executable, "-m", "askmany.jobs.bench_launch", str(spec)]
    whole = {**os.environ, **environment}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=whole, start_new_session=True)


def _child(spec: Mapping[str, Any]) -> Launched:
    """The launch itself, in this process."""
    from askmany.pipeline import building, dispatch, run
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

    setattr(run, "dispatch", noted_dispatch)  # noqa: B010
    ObjectStore.open, ObjectStore.get = noted(real_open), noted(real_get)  # type: ignore[method-assign]
    if spec.get("input_order"):
        setattr(CostModel, "estimate", _equal)  # noqa: B010
    module, _, name = spec.get("engine", "").partition(":")
    build = getattr(importlib.import_module(module), name) if module else building.build_engine
    result = run.run(spec["config"], build_engine=build)
    used = resource.getrusage(resource.RUSAGE_SELF)
    return Launched(result.state, started_at, seen[0], time.time(), used.ru_maxrss * 1024, used.ru_utime + used.ru_stime, tuple(opened))


def _equal(model: CostModel, prompt_tokens: Floats, answer_tokens: Floats) -> Floats:
    """Every document costs the same."""
    return np.full_like(prompt_tokens, 1_000.0)


if __name__ == "__main__":
    print(json.dumps(asdict(_child(json.loads(Path(sys.argv[1]).read_text())))))
