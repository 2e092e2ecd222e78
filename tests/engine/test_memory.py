"""Sizes of the KV pool: what fits, what is refused, and that the refusals name the numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from askmany.engine import memory
from askmany.engine.errors import ConfigError
from askmany.engine.memory import PoolNeed

CPU, GPU = torch.device("cpu"), torch.device("cuda")
NEED = PoolNeed("m", token_bytes=1000, page_size=16, context_tokens=2000, step_bytes=1_000_000)


def test_auto_leaves_the_step_its_room_and_fills_whole_pages() -> None:
    assert memory.auto_tokens(NEED, GPU, 101_000_000) == 90_000 // 16 * 16
    assert memory.auto_tokens(NEED, CPU, 21_000_000) == 10_000


def test_auto_stops_on_a_cpu_where_more_is_of_no_use() -> None:
    assert memory.auto_tokens(NEED, CPU, 10**12) == memory.USEFUL_TOKENS
    assert memory.auto_tokens(replace(NEED, context_tokens=20_000), CPU, 10**12) == memory.USEFUL_CONTEXTS * 20_000
    assert memory.auto_tokens(NEED, GPU, 10**12) > 10**8


@pytest.mark.parametrize(("free", "fits"), [(5_000_000, True), (4_999_999, False), (0, False)])
def test_one_context_must_fit(free: int, fits: bool) -> None:
    if fits:
        assert memory.auto_tokens(NEED, CPU, free) == 2000
    else:
        with pytest.raises(ConfigError, match=r"model m: KV for a context of 2000 tokens takes 0\.00 GB; cpu has .* room for \d+ tokens"):
            memory.auto_tokens(NEED, CPU, free)


def test_a_pool_that_the_user_asked_for_must_fit() -> None:
    memory.check_tokens(NEED, 9_000, CPU, 10_000_000)
    with pytest.raises(ConfigError, match=r"engine\.kv_tokens 9001: .* room for 9000 tokens"):
        memory.check_tokens(NEED, 9_001, CPU, 10_000_000)


def test_weights_must_fit() -> None:
    memory.check_weights("m", 10, CPU, 10)
    with pytest.raises(ConfigError, match=r"model m: its weights take 3\.00 GB, cpu has 2\.00 GB free"):
        memory.check_weights("m", 3 * 10**9, CPU, 2 * 10**9)


def test_a_container_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, use = tmp_path / "max", tmp_path / "current"
    monkeypatch.setattr(memory, "_CGROUPS", ((limit, use),))
    alone = memory.free_bytes(CPU)
    assert alone > 10**8
    limit.write_text("5000\n")
    use.write_text("2000\n")
    assert memory.free_bytes(CPU) == 3000
    use.write_text("9000\n")
    assert memory.free_bytes(CPU) == 0
    limit.write_text("max\n")
    assert memory.free_bytes(CPU) > 10**8
