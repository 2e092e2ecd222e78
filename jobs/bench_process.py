"""A contender of the engine benchmark as a process: its lines as they come, its other output kept for an error, an end in time.

Knows nothing of what the lines say.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from askmany.jobs.bench_contender import END, MARK


def lines_of(job_file: Path, name: str, most_s: float, gpu: int | None = None) -> Iterator[dict[str, Any]]:
    """Run the contender of `job_file`, for `most_s` seconds at most; the JSON objects that it prints behind MARK, each as it comes. It
    sees GPU `gpu` alone, or, where none is named, what this process sees.

    A contender that fails or is stopped is told of on the terminal; what it had said stands. After its END it is ended with all that it
    started: compilers that its libraries keep would hold its output open for ever.
    """
    return lines_from([sys.executable, "-m", "askmany.jobs.bench_contender", str(job_file)], name, most_s, gpu)


def lines_from(command: Sequence[str], name: str, most_s: float, gpu: int | None = None) -> Iterator[dict[str, Any]]:
    """As `lines_of`, from any command that says MARK and END."""
    environment = os.environ if gpu is None else os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True, env=environment)
        stopped = threading.Event()

        def stop_now() -> None:
            stopped.set()
            _end(process)

        stop = threading.Timer(most_s, stop_now)
        stop.start()
        count, ended = 0, False
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line == END + "\n":
                    ended = True
                    break
                if line.startswith(MARK):
                    count += 1
                    yield json.loads(line.removeprefix(MARK))
        finally:
            stop.cancel()
            if not (ended or stopped.is_set()):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=10)
            code = process.poll()
            _end(process)
        if stopped.is_set():
            print(f"STOPPED {name} after {most_s:.0f} s and {count} lines", flush=True)
        elif not ended:
            errors.seek(0)
            print(f"FAILED {name} after {count} lines (exit code {code}): {errors.read()[-3000:]}", flush=True)


def _end(process: subprocess.Popen[str]) -> None:
    """Kill it and what it started, unless that is over."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
