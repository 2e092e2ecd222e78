"""Kernel tests run interpreted on a machine without a GPU and compiled on one with a GPU; a process can do only one of the two."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.interpreter import INTERPRETED, repair

if INTERPRETED:
    repair()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and (INTERPRETED or not torch.cuda.is_available()):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU and compiled kernels"))


@pytest.fixture
def device() -> str:
    """Where kernels run in this process."""
    return "cpu" if INTERPRETED else "cuda"
