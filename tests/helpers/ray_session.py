"""One local Ray for all tests that need one: starting it takes seconds."""

from collections.abc import Iterator

import pytest

from askmany.pipeline.config import WorkersConfig
from askmany.pipeline.runtime import cluster


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """Ray as a run starts it; whoever comes second joins it."""
    with cluster(WorkersConfig()):
        yield


@pytest.fixture(scope="session")
def ray_address(ray_session: None) -> str:
    """Where another process joins it."""
    import ray

    address: str = ray.get_runtime_context().gcs_address
    return address
