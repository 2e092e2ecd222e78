"""One run as a row of jobs: submitted once however often it is asked for, followed, and resumed while tries are left.

A run is known by its id; its attempts are the jobs `<run id>-1`, `<run id>-2`, ... Whoever comes while one is alive joins it. What an
attempt ended with is its driver's exit code, the truth that Ray's own client hides behind 1. The job server is a protocol, so this module
is tested without Ray.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from askmany.engine.errors import AskmanyError, ConfigError
from askmany.pipeline.job_api import JobExistsError, JobState, UnreachableError
from askmany.pipeline.result import EXIT_CONFIG, EXIT_ERRORS, EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_OK, EXIT_REGRESSED

RUN_KEY, CONFIG_KEY = "askmany_run", "askmany_config"  # in a job's metadata
SETTLED = frozenset({EXIT_OK, EXIT_CONFIG, EXIT_ERRORS, EXIT_REGRESSED})  # another try would end the same
Result = TypeVar("Result")
PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0)


class Server(Protocol):
    """What is needed of a job server; see `job_api.JobServer`."""

    address: str

    def submit(self, submission_id: str, entrypoint: str, runtime_env: Mapping[str, Any], metadata: Mapping[str, str]) -> None: ...

    def jobs(self) -> list[JobState]: ...

    def state(self, submission_id: str) -> JobState | None: ...

    def follow(self, submission_id: str) -> Iterator[str]: ...


@dataclass(frozen=True, slots=True)
class Request:
    """What to run. `entrypoint` gives the command of the first (False) or a later (True) attempt; `config_hash` tells configurations
    apart; at most `retries` more attempts; a server that is away for `patience_s` seconds is given up."""

    run_id: str
    config_hash: str
    entrypoint: Callable[[bool], str]
    runtime_env: Mapping[str, Any]
    retries: int = 2
    again: bool = False
    patience_s: float = 900.0


@dataclass(slots=True)
class Submitter:
    """Carries a request through. `out` takes the job's log, `say` one line a thing that happened."""

    server: Server
    request: Request
    out: Callable[[str], None]
    say: Callable[[str], None]
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def run(self) -> int:
        """The exit code of the run, that of its last attempt."""
        attempt, alive = self.begin()
        for left in range(self.request.retries, -1, -1):
            if not alive:
                self._submit(attempt)
            ended = self.await_end(attempt)
            code = exit_code(ended)
            self.say(f"{submission_id(self.request.run_id, attempt)}: {told(ended)}")
            if ended is not None and (ended.status == "STOPPED" or code in SETTLED):
                return code
            if left:
                self.say(f"goes on where that ended, {left} {'try' if left == 1 else 'tries'} left")
                attempt, alive = attempt + 1, False
        return code

    def begin(self) -> tuple[int, bool]:
        """The attempt to follow and whether it is there already. SettledError when there is nothing left to do."""
        attempts = self._patiently(self.server.jobs)
        mine = {number: job for job in attempts if (number := attempt_of(self.request.run_id, job.submission_id))}
        last = max(mine, default=0)
        if not last:
            return 1, False
        job, name = mine[last], submission_id(self.request.run_id, last)
        same = job.metadata.get(CONFIG_KEY) == self.request.config_hash
        if not job.ended:
            if not same:
                raise ConfigError(f"--run-id {self.request.run_id}: {name} runs with another configuration; choose another run id")
            self.say(f"joined {name}, which is {job.status.lower()}")
            return last, True
        if exit_code(job) == EXIT_OK and not self.request.again:
            other = "" if same else ", with another configuration"
            raise SettledError(f"{name} has succeeded{other}; --again looks for what is new since, --run-id begins another run")
        return last + 1, False

    def _submit(self, attempt: int) -> None:
        name = submission_id(self.request.run_id, attempt)
        metadata = {RUN_KEY: self.request.run_id, CONFIG_KEY: self.request.config_hash}
        command = self.request.entrypoint(attempt > 1)
        try:
            self._patiently(lambda: self.server.submit(name, command, self.request.runtime_env, metadata))
            self.say(f"submitted {name} to {self.server.address}")
        except JobExistsError:  # our own request, whose answer was lost, or another client's of this moment
            self.say(f"joined {name}, which is there already")

    def await_end(self, attempt: int) -> JobState | None:
        """Follow the log until the job has ended, joining it again whenever the connection drops. None: the server lost the job."""
        name = submission_id(self.request.run_id, attempt)
        shown = 0
        while True:
            try:
                at = 0
                for piece in self.server.follow(name):
                    self.out(piece[max(shown - at, 0) :])
                    at += len(piece)
                    shown = max(shown, at)
                    if not piece and self._over(name):
                        break
            except UnreachableError as error:
                self.say(f"connection lost ({_brief(error)}); the job goes on")
            state = self._patiently(lambda: self.server.state(name))
            if state is None or state.ended:
                return state
            self.sleep(PAUSES_S[0])

    def _over(self, name: str) -> bool:
        state = self.server.state(name)
        return state is None or state.ended

    def _patiently(self, action: Callable[[], Result]) -> Result:
        """The action's result, tried again while the server is away. UnreachableError when it stays away."""
        began, tries = self.clock(), 0
        while True:
            try:
                return action()
            except UnreachableError as error:
                if self.clock() - began > self.request.patience_s:
                    raise
                if not tries:
                    self.say(f"waiting for the job server ({_brief(error)})")
                self.sleep(PAUSES_S[min(tries, len(PAUSES_S) - 1)])
                tries += 1


class SettledError(AskmanyError):
    """The run has succeeded already; nothing was submitted."""


def submission_id(run_id: str, attempt: int) -> str:
    return f"{run_id}-{attempt}"


def attempt_of(run_id: str, name: str) -> int | None:
    """The number of the attempt that a job is of this run; None for any other job."""
    found = re.fullmatch(rf"{re.escape(run_id)}-([1-9]\d*)", name)
    return int(found[1]) if found else None


def exit_code(job: JobState | None) -> int:
    """What the attempt comes to: the driver's exit code, 128 + n for signal n, 4 when it was stopped, 1 when nobody saw its end."""
    if job is None:
        return EXIT_INTERNAL
    if job.exit_code is not None:
        return job.exit_code if job.exit_code >= 0 else 128 - job.exit_code
    return {"SUCCEEDED": EXIT_OK, "STOPPED": EXIT_INTERRUPTED}.get(job.status, EXIT_INTERNAL)


def told(job: JobState | None) -> str:
    """How an attempt ended, in words."""
    if job is None:
        return "lost with the cluster's head"
    if job.exit_code is None:
        last = job.message.strip().splitlines()[-1:] if job.status == "FAILED" else []
        return ": ".join([job.status.lower(), *last])
    code = exit_code(job)  # of a shell that ran the driver, or of the driver itself
    how = f"driver ended by signal {code - 128}" if code > 128 else f"driver exit code {code}"
    return f"{job.status.lower()}, {how}"


def _brief(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 160 else text[:157] + "..."
