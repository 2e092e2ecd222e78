"""Ray, started or joined with the settings that a run depends on.

A local Ray listens on the loopback interface alone, sends no usage figures and prints nothing of its own. Settings of Ray Data that could
drop work silently are switched off.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from askmany.engine.errors import AskmanyError, ConfigError
from askmany.pipeline.config import WorkersConfig

_ENVIRONMENT = {
    "RAY_worker_niceness": "0",  # Ray would run workers at 15, which starves them beside anything else
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # its one message at every start, on constructor arguments of restarted actors, is no news
    "TOKENIZERS_PARALLELISM": "false",
}
_OBJECT_STORE_BYTES = 200 << 20  # blocks hold places and counts, never text


@contextmanager
def cluster(workers: WorkersConfig) -> Iterator[None]:
    """A connected Ray for the time of the block; one that was there before is used and left as it is."""
    address = workers.address or os.environ.get("RAY_ADDRESS")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if address is None:
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # read when ray is imported: sockets on 127.0.0.1 alone
    import ray

    if ray.is_initialized():
        _configure_ray_data()
        yield
        return
    _start(address)
    _configure_ray_data()
    try:
        yield
    finally:
        ray.shutdown()


def _start(address: str | None) -> None:
    import ray

    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is not None:
        options |= {"address": address}
    else:
        options |= {
            "address": "local",
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
            "object_store_memory": _OBJECT_STORE_BYTES,
        }
    try:
        with _stderr_unless_raised(), _own_sigterm():
            ray.init(**options)
    except ConnectionError as error:
        raise ConfigError(f"workers.address: no Ray cluster answers at {address}: {error}") from error
    except Exception as error:  # Ray has no class of its own for a start that fails
        raise AskmanyError(f"Ray could not be started on this machine: {error}") from error


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Put back the handler of SIGTERM that Ray replaces while it starts by ones that leave the process (Python's) or abort it (native)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _stderr_unless_raised() -> Iterator[None]:
    """Hold back what native code writes to stderr during the block; it comes out only when the block fails."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(kept, held.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def _configure_ray_data() -> None:
    import ray.data

    context = ray.data.DataContext.get_current()
    context.max_errored_blocks = 0
    context.actor_init_retry_on_errors = True
    context.max_consecutive_actor_init_deaths = 3
    context.execution_no_progress_timeout_s = 24 * 3600
    context.enable_progress_bars = False
    context.enable_operator_progress_bars = False
    context.print_on_execution_start = False
    for name in ("ray.data", "ray.data._internal"):
        logging.getLogger(name).setLevel(logging.ERROR)


def resource(name: str) -> int:
    """How much of a resource (`CPU`, `GPU`) the whole cluster has."""
    import ray

    return int(ray.cluster_resources().get(name, 0))  # type: ignore[no-untyped-call]
