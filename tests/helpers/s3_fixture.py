"""Fixtures: one S3 server for the whole session, and a fresh bucket behind a fault proxy for each test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.helpers.fault_proxy import Faults, ProxyState, fault_proxy
from tests.helpers.s3_server import S3Server, s3_options, s3_server

_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Bucket:
    """A bucket on the server; `options` go through the proxy, whose faults and counts are `state`; `plain` go past it."""

    name: str
    options: dict[str, Any]
    plain: dict[str, Any]
    state: ProxyState

    def uri(self, path: str = "out") -> str:
        return f"s3://{self.name}/{path}"


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """A running S3 server."""
    with s3_server() as server:
        yield server


@pytest.fixture
def bucket(s3: S3Server) -> Iterator[Bucket]:
    """An empty bucket and a proxy without faults."""
    import s3fs

    name = f"bucket-{next(_NUMBERS)}"
    s3fs.S3FileSystem(**s3.options, skip_instance_cache=True).mkdir(name)
    with fault_proxy(s3.port) as (port, state):
        state.reset(Faults())
        yield Bucket(name, s3_options(port), s3.options, state)
