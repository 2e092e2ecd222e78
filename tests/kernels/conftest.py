"""Kernel tests: without a GPU every Triton kernel runs in Triton's interpreter, which must be asked for before triton is imported."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`gpu` tests measure compiled kernels, the others interpreted ones: a process can do one of the two."""
    for item in items:
        if item.get_closest_marker("gpu") and INTERPRETED:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU and compiled kernels"))


@pytest.fixture
def device() -> str:
    """Where kernels run in this process: the CPU under the interpreter, else the GPU."""
    return "cpu" if INTERPRETED else "cuda"
