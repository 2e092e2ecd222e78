"""The rings over our own kernels: interpreted here, with ranks that are threads; compiled on a GPU by the benchmark."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from askmany.kernels.block_attention import Attend
from askmany.kernels.block_triton import TritonBlocks
from askmany.kernels.layout import SplitBatch
from askmany.kernels.merge_into import Part
from askmany.kernels.oracle import lse_error, relative_error
from askmany.kernels.tiles import AttentionShape
from tests.helpers.ring_worlds import CPU, RingCase, RingWorld, attend
from tests.helpers.thread_group import on_threads

CASE = RingCase(((4, 5), (9, 1)), heads=(2, 1), document=7, seed=21)
SLOW = pytest.mark.slow


class OneAtATime:
    """Triton's interpreter keeps its state in the process: one thread attends at a time."""

    def __init__(self) -> None:
        self._blocks = TritonBlocks(AttentionShape(*CASE.heads, CASE.head_dim, 1, torch.float32), CPU)
        self._lock = threading.Lock()

    def prepare(self, batch: SplitBatch, rows: int) -> Attend | None:
        with self._lock:
            prepared = self._blocks.prepare(batch, rows)
        if prepared is None:
            return None

        def attend_alone(q: Tensor, k: Tensor, v: Tensor, scale: float, into: Part | None = None) -> Part:
            with self._lock:
                return prepared(q, k, v, scale, into)

        return attend_alone


@pytest.mark.parametrize("way", ["pass_kv", "gather_q", pytest.param("pass_q", marks=SLOW), pytest.param("gather_kv", marks=SLOW)])
def test_every_way_runs_on_our_kernels(way: str, device: str) -> None:
    if device != "cpu":
        pytest.skip("the worlds of these tests lie on the CPU")
    world, blocks = RingWorld(CASE, 2), OneAtATime()
    parts: list[Any] = on_threads(2, lambda group: attend(world, way, group, blocks))
    out, lse = (torch.cat([part[i] for part in parts])[world.rows.gathered] for i in (0, 1))
    want, want_lse = world.truth()
    assert relative_error(out, want) < 1e-5
    assert lse_error(lse, want_lse) < 1e-5
