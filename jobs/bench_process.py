"""A contender of the engine benchmark as a process: its lines as they come, its other output kept for an error, an end in time.

Knows nothing of what the lines say.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from askmany.jobs.bench_contender import MARK


def lines_of(job_file: Path, name: str, most_s: float) -> Iterator[dict[str, Any]]:
    """Run the contender of `job_file`, for `most_s` seconds at most; the JSON objects that it prints behind MARK, each as it comes.

    A contender that fails or is stopped is told of on the terminal; what it had said stands.
    """
    command = [sys.executable, "-m", "askmany.jobs.bench_contender", str(job_file)]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        stop = threading.Timer(most_s, process.kill)
        stop.start()
        count = 0
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(MARK):
                    count += 1
                    yield json.loads(line.removeprefix(MARK))
        finally:
            stopped = stop.finished.is_set()
            stop.cancel()
            process.kill()
            code = process.wait()
        if stopped:
            print(f"STOPPED {name} after {most_s:.0f} s and {count} lines", flush=True)
        elif code not in (0, -9):
            errors.seek(0)
            print(f"FAILED {name} after {count} lines: {errors.read()[-3000:]}", flush=True)
