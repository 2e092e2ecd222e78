"""A word to somewhere else when an evaluation needs a look: one JSON object by HTTP POST.

The object has a `text` (what chat services show) and the figures beside it. Its address is a secret: it is shown by its host alone. A
webhook that cannot be reached never changes what an evaluation came to.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import tenacity

from askmany.engine.errors import ConfigError

LIMIT_S = 10.0
TRIES = 3


def check_url(url: str) -> str:
    """ConfigError for an address that is none; its path is not shown."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError("--webhook: an http:// or https:// address is needed")
    return url


def post(url: str, values: Mapping[str, Any], sleep: Callable[[float], None] = time.sleep) -> str:
    """Send it; "" when it was taken, else why not, in words without the address's secret part."""
    body = json.dumps(values, ensure_ascii=False).encode("utf-8")
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"}, method="POST")
    wait = tenacity.wait_exponential(multiplier=1, max=LIMIT_S)
    tries = tenacity.Retrying(stop=tenacity.stop_after_attempt(TRIES), wait=wait, reraise=True, sleep=sleep)

    def send() -> None:
        urllib.request.urlopen(request, timeout=LIMIT_S).close()

    try:
        tries(send)
    except OSError as error:
        reason = getattr(error, "code", None) or getattr(error, "reason", None) or error
        return f"the webhook at {urlsplit(url).hostname} was tried {TRIES} times: {str(reason).replace(url, '...')}"
    return ""
