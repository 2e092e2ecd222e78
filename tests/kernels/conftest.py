"""Kernel tests run interpreted on a machine without a GPU and compiled on one with a GPU; a process can do only one of the two."""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _make_scalars_loop_bounds() -> None:
    """NumPy 2.4 no longer turns arrays of one element into integers, which the interpreter of Triton 3.6 does for every loop bound."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_index(tensor: type, scope: object) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]

    interpreter._patch_lang_tensor = patch_and_index


if INTERPRETED:
    _make_scalars_loop_bounds()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and (INTERPRETED or not torch.cuda.is_available()):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU and compiled kernels"))


@pytest.fixture
def device() -> str:
    """Where kernels run in this process."""
    return "cpu" if INTERPRETED else "cuda"
