"""SGLang set up in this process before anything imports it or Transformers, and models of it that live as long as a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from askmany.engine.sglang_compat import installed_release
from tests.helpers.sglang_cpu import prepare

if TYPE_CHECKING:
    from tests.helpers.sglang_models import Loader

if installed_release() is not None and not torch.cuda.is_available():
    prepare()


@pytest.fixture(scope="session", autouse=True)
def release() -> str:
    """The installed release."""
    found = installed_release()
    if found is None:
        pytest.skip("sglang is not installed here; `make test-sglang` runs these tests with both supported releases")
    return found


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Loader]:
    """Loads tiny models into SGLang, one after another; the last is closed when the test ends."""
    from tests.helpers.sglang_models import Loader

    loader = Loader(tmp_path)
    yield loader
    loader.close()
