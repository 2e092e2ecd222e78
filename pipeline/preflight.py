"""Looking before leaping: can this process list, read, write and delete where the run will need it to? Asked in seconds, before any GPU.

Each answer is a `Check` that names the URI, the operation and who asked. Nothing here knows what is stored; a probe object is made below
the output prefix and removed again.
"""

from __future__ import annotations

import concurrent.futures
import getpass
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from askmany.engine.errors import ConfigError
from askmany.pipeline.storage import ObjectStore, list_files, read_range

PROBE = "_probe"


@dataclass(frozen=True, slots=True)
class Check:
    """One operation tried on one URI. `error` is empty when it worked."""

    place: str
    operation: str
    uri: str
    identity: str
    seconds: float
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error

    def message(self) -> str:
        return f"{self.uri}: {self.operation} failed from {self.place} as {self.identity}: {self.error}"


class PreflightError(ConfigError):
    """A place that the run needs and cannot use."""


def check_input(uris: Sequence[str], options: Mapping[str, Any], place: str, limit_s: float = 15.0) -> list[Check]:
    """List every input URI and read the first byte of its first file. The second is not tried when the first fails."""
    checks: list[Check] = []
    for uri in uris:
        who = identity(uri, options)
        listed: list[str] = []
        checks.append(_try(place, "list", uri, who, partial(_list_first, uri, options, listed), limit_s))
        if checks[-1].ok:
            checks.append(_try(place, "read", listed[0], who, partial(read_range, listed[0], 0, 1, options), limit_s))
    return checks


def check_output(uri: str, options: Mapping[str, Any], place: str, limit_s: float = 15.0) -> list[Check]:
    """List the output prefix, then write, read back and delete a probe below it; stops at the first failure."""
    who = identity(uri, options)
    name = f"{PROBE}-{uuid.uuid4().hex}"
    body = name.encode()
    checks: list[Check] = []
    made: list[ObjectStore] = []

    def store() -> ObjectStore:
        if not made:
            made.append(ObjectStore(uri, options))
        return made[0]

    def read_back() -> None:
        if store().get(name) != body:
            raise OSError("the probe came back with other bytes than were written")

    steps: list[tuple[str, str, Callable[[], object]]] = [
        ("list", uri, lambda: store().list("")),
        ("write", f"{uri.rstrip('/')}/{name}", lambda: store().put(name, body)),
        ("read", f"{uri.rstrip('/')}/{name}", read_back),
        ("delete", f"{uri.rstrip('/')}/{name}", lambda: store().delete(name)),
    ]
    for operation, at, action in steps:
        checks.append(_try(place, operation, at, who, action, limit_s))
        if not checks[-1].ok:
            break
    return checks


def check_on_a_worker(
    inputs: Sequence[str], input_options: Mapping[str, Any], output: str, output_options: Mapping[str, Any], limit_s: float = 45.0
) -> list[Check]:
    """The same checks from a process of the connected cluster."""
    import ray

    def look() -> list[Check]:
        place = f"a worker on {here()}"
        return [*check_input(inputs, input_options, place), *check_output(output, output_options, place)]

    started = time.monotonic()
    try:
        checks: list[Check] = ray.get(ray.remote(num_cpus=0)(look).remote(), timeout=limit_s)
    except ray.exceptions.GetTimeoutError:
        error = f"no answer within {limit_s:.0f} s"
        return [Check("a worker", "look", output, identity(output, output_options), time.monotonic() - started, error)]
    return checks


def require(checks: Sequence[Check]) -> None:
    """Raise PreflightError for the first check that failed."""
    for check in checks:
        if not check.ok:
            raise PreflightError(check.message())


def here() -> str:
    return f"{socket.gethostname()} (process {os.getpid()})"


def identity(uri: str, options: Mapping[str, Any]) -> str:
    """Who asks, as far as the options and the environment say; the head of a key id at most, never a secret."""
    scheme = uri.split("://", 1)[0] if "://" in uri else "file"
    if scheme in ("file", "local"):
        return f"user {getpass.getuser()}"
    if options.get("anon"):
        return "anonymous"
    named = options.get("key") or options.get("account_name") or options.get("project")
    if named:
        return f"key {_head(str(named))}"
    if options.get("profile"):
        return f"profile {options['profile']}"
    for variable in ("AWS_PROFILE", "AWS_ROLE_ARN", "AZURE_STORAGE_ACCOUNT_NAME"):
        if os.environ.get(variable):
            return f"{variable}={os.environ[variable]}"
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return f"key {_head(os.environ['AWS_ACCESS_KEY_ID'])} of the environment"
    return "the machine's default identity"


def _head(value: str) -> str:
    return f"{value[:4]}…"


def _list_first(uri: str, options: Mapping[str, Any], found: list[str]) -> None:
    """Append the first file that the URI names."""
    found.append(list_files([uri], options)[0].uri)


def _try(place: str, operation: str, uri: str, who: str, action: Callable[[], object], limit_s: float) -> Check:
    """Run the action in a thread that may be left behind: a hanging store must not hang the check."""
    started = time.monotonic()
    outcome: concurrent.futures.Future[object] = concurrent.futures.Future()

    def work() -> None:
        try:
            outcome.set_result(action())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, name=f"preflight-{operation}", daemon=True).start()
    try:
        outcome.result(timeout=limit_s)
        error = ""
    except concurrent.futures.TimeoutError:
        error = f"no answer within {limit_s:.0f} s"
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    return Check(place, operation, uri, who, time.monotonic() - started, error)
