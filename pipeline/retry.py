"""Trying input and output again: with growing, jittered pauses, a bounded number of times, and counted.

Only what another try can mend is tried again: busy services, broken connections, time-outs. A refusal, a missing file or a full disk is
raised at once. Answers of a model never pass through here.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import tenacity

Result = TypeVar("Result")

_FINAL = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)
_FINAL_NUMBERS = frozenset({errno.EINVAL, errno.ENOSPC, errno.EROFS, errno.ENAMETOOLONG, errno.EDQUOT, errno.ENOTEMPTY, errno.ELOOP})
_CLIENTS = ("aiohttp", "botocore", "aiobotocore", "urllib3", "requests", "azure", "gcsfs", "httpx", "google")
_PASSING = (
    "Connection",
    "Timeout",
    "Disconnected",
    "Payload",
    "Incomplete",
    "Transport",
    "Protocol",
    "ServiceUnavailable",
    "HTTPClientError",
)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """At most `attempts` tries; the pause before try n + 1 is drawn between 0 and min(first_s * 2**n, longest_s)."""

    attempts: int = 7
    first_s: float = 0.2
    longest_s: float = 10.0


class Retrier:
    """Calls something until it works; counts its retries by operation. Safe to share between threads."""

    def __init__(self, policy: RetryPolicy | None = None, sleep: Callable[[float], None] = time.sleep) -> None:
        self.policy = policy or RetryPolicy()
        self._sleep = sleep
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def counts(self) -> dict[str, int]:
        """Retries so far by operation."""
        with self._lock:
            return dict(self._counts)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def take(self) -> dict[str, int]:
        """Retries since the last call, by operation; each is handed out once."""
        with self._lock:
            counts, self._counts = dict(self._counts), Counter()
        return counts

    def call(self, operation: str, action: Callable[[], Result]) -> Result:
        """The action's result. Raises what its last try raised."""
        tries = tenacity.Retrying(
            retry=tenacity.retry_if_exception(is_transient),
            stop=tenacity.stop_after_attempt(self.policy.attempts),
            wait=tenacity.wait_random_exponential(multiplier=self.policy.first_s, max=self.policy.longest_s),
            before_sleep=lambda state: self._count(operation),
            sleep=self._sleep,
            reraise=True,
        )
        return tries(action)

    def _count(self, operation: str) -> None:
        with self._lock:
            self._counts[operation] += 1

    def __getstate__(self) -> Mapping[str, Any]:
        """A copy in another process counts from zero."""
        return {"policy": self.policy}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        Retrier.__init__(self, state["policy"])


def is_transient(error: BaseException) -> bool:
    """Whether the same call may work a moment later."""
    status = _http_status(error)
    if status is not None:
        return status in (408, 425, 429) or status >= 500
    if isinstance(error, OSError):
        return not isinstance(error, _FINAL) and error.errno not in _FINAL_NUMBERS
    module = type(error).__module__.partition(".")[0]
    return module in _CLIENTS and any(word in type(error).__name__ for word in _PASSING)


def _http_status(error: BaseException) -> int | None:
    """The HTTP status that a client library's error carries, whatever it calls it."""
    for name in ("status", "status_code", "code"):
        value = getattr(error, name, None)
        if isinstance(value, int) and 400 <= value < 600:
            return value
    return None
