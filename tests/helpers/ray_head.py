"""A Ray head with a job server on 127.0.0.1 in a process of its own, as `ray start --head` makes one; ended by its process id.

It asks for a token of its own, listens on the loopback alone and keeps its files in a folder of its own, so that it meddles with no other
Ray of this machine. `python` in its jobs is the interpreter of the tests.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest


@dataclass(frozen=True)
class RayHead:
    """A running head: its job server's URL, its token, its process, and the environment that its clients need."""

    url: str
    token: str
    pid: int
    environment: dict[str, str]


def missing() -> str:
    """Why there can be no job server here; "" when there can."""
    try:
        import aiohttp_cors  # noqa: F401
        import opencensus  # noqa: F401
    except ImportError as error:
        return f"no job server: {error}; pip install 'ray[default]'"
    return ""


@contextmanager
def ray_head(cpus: int = 2) -> Iterator[RayHead]:
    """Start a head without a checkout on its path and end it with everything it started."""
    folder = Path(tempfile.mkdtemp(prefix="rh-", dir="/tmp"))
    token = secrets.token_hex(16)
    ports = _free_ports(8)
    environment = _environment(folder, token)
    log = folder / "head.log"
    with open(log, "wb") as stream:
        process = subprocess.Popen(_command(folder, ports, cpus), cwd=folder, env=environment, stdout=stream, stderr=stream)
    head = RayHead(
        f"http://127.0.0.1:{ports[1]}", token, process.pid, {**environment, "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{ports[1]}"}
    )
    try:
        _wait_until_up(head, process, log)
        yield head
    finally:
        _end(process)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def head() -> Iterator[RayHead]:
    """One head for the whole session; skips where Ray's job server is not installed."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    with ray_head() as running:
        yield running


def _environment(folder: Path, token: str) -> dict[str, str]:
    token_path = folder / "token"
    token_path.write_text(token)
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith("RAY_") and key not in ("PYTHONPATH", "CUDA_VISIBLE_DEVICES")
    }
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_path),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "OMP_NUM_THREADS": "1",
    }


def _command(folder: Path, ports: list[int], cpus: int) -> list[str]:
    names = (
        *("port", "dashboard-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port", "metrics-export-port"),
        *("runtime-env-agent-port", "node-manager-port", "object-manager-port"),
    )
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--node-ip-address=127.0.0.1"),
        *("--dashboard-host=127.0.0.1", f"--num-cpus={cpus}", "--num-gpus=0", "--object-store-memory=100000000"),
        *(f"--temp-dir={folder}", "--disable-usage-stats", "--include-log-monitor=false"),
        *(f"--{name}={port}" for name, port in zip(names, ports, strict=True)),
    ]


def _wait_until_up(head: RayHead, process: subprocess.Popen[bytes], log: Path, limit_s: float = 90.0) -> None:
    """Until the job server lists its jobs, which needs the agent too."""
    deadline = time.monotonic() + limit_s
    asked = urllib.request.Request(f"{head.url}/api/jobs/", headers={"Authorization": f"Bearer {head.token}"})
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the head ended with {process.returncode}: {log.read_text(errors='replace')[-2000:]}")
        try:
            urllib.request.urlopen(asked, timeout=2).close()
            return
        except (OSError, urllib.error.HTTPError):
            time.sleep(0.2)
    raise RuntimeError(f"the head did not answer within {limit_s:.0f} s: {log.read_text(errors='replace')[-2000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the head and all that came of it; politely it takes half a minute."""
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.kill()
    process.wait()
    for child in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(family, timeout=10)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
