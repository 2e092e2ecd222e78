"""Ray's job server as `askmany submit` sees it: three questions to ask it, and its failures sorted into two kinds.

`UnreachableError` is worth another try (no connection, a server that is busy or just starting); everything else is a ConfigError. Ray's own
client neither limits how long it waits nor tells the driver's exit code; both are had here. Knows nothing of askmany's runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from askmany.engine.errors import AskmanyError, ConfigError

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
ADDRESS_VARIABLE = "RAY_API_SERVER_ADDRESS"
TOKEN_PATH = "~/.ray/auth_token"
ENDED = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})
ANSWER_S = 60.0  # how long a request may go without a byte
_CHATTY = ("ray.dashboard.modules.job.sdk", "ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env.packaging")
QUIET_S = 5.0  # how long a followed log may be silent before the job is asked after


class UnreachableError(AskmanyError):
    """The job server does not answer, or says that it cannot at the moment."""


class JobExistsError(AskmanyError):
    """A job of this submission id is there already."""


@dataclass(frozen=True, slots=True)
class JobState:
    """What the server tells of one job. `status` as Ray names it; `exit_code` is the driver's, None where Ray never saw it end."""

    submission_id: str
    status: str
    exit_code: int | None = None
    message: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        return self.status in ENDED


def job_address(given: str | None) -> str:
    """The job server's address: the given one, else RAY_API_SERVER_ADDRESS, else RAY_ADDRESS if it is one, else this machine's."""
    environment = os.environ.get(ADDRESS_VARIABLE) or os.environ.get("RAY_ADDRESS", "")
    address = given or (environment if environment.startswith(("http://", "https://")) else DEFAULT_ADDRESS)
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"--address {address}: the job server's URL is needed, such as {DEFAULT_ADDRESS}")
    return address.rstrip("/")


def auth_token() -> str | None:
    """The cluster's token where Ray's tools look for it: RAY_AUTH_TOKEN, the file RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token."""
    token = os.environ.get("RAY_AUTH_TOKEN", "").strip()
    if token:
        return token
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named or TOKEN_PATH).expanduser()
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except OSError as error:
        if named:
            raise ConfigError(f"RAY_AUTH_TOKEN_PATH: {path} cannot be read: {error}") from error
        return None


class JobServer:
    """The job server at `address`, spoken to with the token where there is one."""

    def __init__(self, address: str, token: str | None) -> None:
        self.address = address
        self._token = token
        self._client: Any = None

    def submit(self, submission_id: str, entrypoint: str, runtime_env: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
        """Submit a job. JobExistsError when there is one of this id."""
        given = {"entrypoint": entrypoint, "runtime_env": dict(runtime_env), "metadata": dict(metadata)}
        with self._told():
            self._connected().submit_job(submission_id=submission_id, **given)

    def jobs(self) -> list[JobState]:
        """Every submitted job that the server knows."""
        with self._told():
            return [_state(job) for job in self._connected().list_jobs() if job.submission_id]

    def state(self, submission_id: str) -> JobState | None:
        """The job of this id; None when the server has never heard of it, as after a head that was lost."""
        try:
            with self._told():
                return _state(self._connected().get_job_info(submission_id))
        except _UnknownJobError:
            return None

    def follow(self, submission_id: str) -> Iterator[str]:
        """The job's log from its beginning, in pieces as they come, "" when it was silent for a while; ends when the job does."""
        loop = asyncio.new_event_loop()
        with self._told():
            pieces = self._connected().tail_job_logs(submission_id)
        waiting: asyncio.Task[str] | None = None
        try:
            while True:
                waiting = waiting or loop.create_task(_next(pieces))
                done, _ = loop.run_until_complete(asyncio.wait({waiting}, timeout=QUIET_S))
                if not done:
                    yield ""
                    continue
                try:
                    with self._told():
                        piece = waiting.result()
                except StopAsyncIteration:
                    return
                finally:
                    waiting = None
                yield piece
        finally:
            if waiting is not None:
                waiting.cancel()
                loop.run_until_complete(asyncio.wait({waiting}))
            loop.run_until_complete(pieces.aclose())
            loop.close()

    def _connected(self) -> Any:
        if self._client is None:
            from ray.dashboard.modules.job.sdk import JobSubmissionClient

            class Client(JobSubmissionClient):
                """Ray's client, which else would wait for ever on a connection that has silently gone."""

                def _do_request(self, method: str, endpoint: str, **more: Any) -> Any:
                    return super()._do_request(method, endpoint, **{"timeout": ANSWER_S, **more})

            for name in _CHATTY:
                logging.getLogger(name).setLevel(logging.WARNING)
            headers = {"Authorization": f"Bearer {self._token}"} if self._token else None
            with _environment_set(ADDRESS_VARIABLE, self.address):
                self._client = Client(self.address, headers=headers)
        return self._client

    def _told(self) -> _Told:
        return _Told(self.address, self._token is not None)


class _UnknownJobError(AskmanyError):
    """The server has no such job."""


class _Told:
    """Turns what Ray's client raises into this module's errors."""

    def __init__(self, address: str, has_token: bool) -> None:
        self._address = address
        self._has_token = has_token

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, Exception) or isinstance(error, (AskmanyError, StopAsyncIteration)):
            return
        from ray.exceptions import AuthenticationError

        name, text = type(error).__name__, str(error)
        if isinstance(error, AuthenticationError) or getattr(error, "status", None) in (401, 403):
            raise ConfigError(f"--address {self._address}: {_refused(self._has_token)}") from error
        if "already exists. Please use a different submission_id" in text:
            raise JobExistsError(text[-200:]) from error
        if "status code 404" in text and "api/version" not in text:
            raise _UnknownJobError(text) from error
        if isinstance(error, ModuleNotFoundError | ImportError) or "requires the ray[default]" in text:
            raise ConfigError("submit: Ray's job client needs more packages: pip install 'askmany[submit]'") from error
        if "status code 400" in text or isinstance(error, (ValueError, TypeError)):
            raise ConfigError(f"--address {self._address}: the job server refuses the job: {text[-500:]}") from error
        raise UnreachableError(f"{self._address}: {name}: {text[-500:]}") from error


def _refused(has_token: bool) -> str:
    """Why a cluster with token authentication said no, and what to do."""
    where = f"RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or {TOKEN_PATH}"
    if has_token:
        return f"the cluster refuses the token that was found ({where}); `ray get-auth-token` on the head prints the right one"
    return f"the cluster asks for a token and there is none ({where}); `ray get-auth-token` on the head prints it"


@contextmanager
def _environment_set(name: str, value: str) -> Iterator[None]:
    """An environment variable for the time of the block: Ray's client goes by it, whatever address it is given."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _state(job: Any) -> JobState:
    status = str(getattr(job.status, "value", job.status))
    return JobState(str(job.submission_id), status, job.driver_exit_code, str(job.message or ""), dict(job.metadata or {}))


async def _next(pieces: Any) -> str:
    piece: str = await anext(pieces)
    return piece
