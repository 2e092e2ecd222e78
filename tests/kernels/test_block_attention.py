"""Attention inside a rank behind its interface: every implementation against fp64, over all pairs of ranks, in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from askmany.kernels import block_attention, reference
from askmany.kernels.block_attention import BlockAttention, FlashBlocks, TorchBlocks, best_blocks
from askmany.kernels.block_triton import TritonBlocks, entries
from askmany.kernels.layout import PrivateItem, SharedItem, SplitBatch
from askmany.kernels.merge_into import merge_into, nothing
from askmany.kernels.oracle import lse_error, relative_error
from askmany.kernels.ring_plan import local_batch
from askmany.kernels.tables import LEVELS
from askmany.kernels.tiles import AttentionShape
from tests.helpers.ring_worlds import CPU, RingCase, RingWorld

TINY = RingCase(((9, 13), (0, 6), (30, 1)), heads=(4, 2), document=11, seed=11)
LONG = RingCase(((17, 270), (3, 290)), heads=(2, 1), document=40, seed=12)


def by_pairs(world: RingWorld, blocks: BlockAttention) -> tuple[Tensor, Tensor]:
    """Every rank's rows over every rank's keys, merged: what a ring computes, without one."""
    outs, lses = [], []
    for rank in range(world.ranks):
        parts = []
        for other in range(world.ranks):
            attend = blocks.prepare(local_batch(world.batch, world.rows, world.slots, [rank], other), world.rows.places)
            if attend is not None:
                parts.append(attend(world.queries_of(rank), *world.memory_of(other), world.scale))
        out, lse = nothing(world.q, world.rows.places)
        for part in parts:
            merge_into((out, lse), part, slice(0, world.rows.places))
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs)[world.rows.gathered], torch.cat(lses)[world.rows.gathered]


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cache_seqlens: Tensor,
    causal: bool,
    softmax_scale: float,
    return_softmax_lse: bool,
    page_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """FlashAttention-3's documented contract for one sequence: q [1, R, HQ, D], lse [1, HQ, R]."""
    assert return_softmax_lse
    assert cache_seqlens.dtype == torch.int32
    length = int(cache_seqlens[0])
    if page_table is None:  # caches [1, L, HKV, D]
        keys, values = k[0, :length], v[0, :length]
    else:
        assert page_table.dtype == torch.int32
        keys, values = (cache[page_table[0].long()].flatten(0, 1)[:length] for cache in (k, v))
    visible = reference.causal(q.shape[1], length) if causal else None
    out, lse = reference.attend(q[0], keys, values, softmax_scale, visible)
    return out[None], lse.T[None]


def flash_blocks(monkeypatch: pytest.MonkeyPatch) -> BlockAttention:
    monkeypatch.setattr(block_attention, "flash_attention", lambda: paged_attention)
    return FlashBlocks(CPU, TorchBlocks(CPU))


def triton_blocks(case: RingCase, device: str) -> BlockAttention:
    return TritonBlocks(AttentionShape(*case.heads, case.head_dim, 1, torch.float32), torch.device(device))


Makers = dict[str, Callable[[pytest.MonkeyPatch, RingCase], Any]]
MAKERS: Makers = {
    "torch": lambda patch, case: TorchBlocks(CPU),
    "flash": lambda patch, case: flash_blocks(patch),
    "triton": lambda patch, case: triton_blocks(case, "cpu"),
}


@pytest.mark.parametrize(
    ("name", "case"),
    [("torch", TINY), ("torch", LONG), ("flash", TINY), ("flash", LONG), ("triton", TINY)],
    ids=["torch", "torch-long", "flash", "flash-long", "triton"],
)
def test_pairs_of_ranks_merge_to_the_whole(name: str, case: RingCase, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device != "cpu" and name == "triton":
        pytest.skip("the worlds of these tests lie on the CPU")
    world = RingWorld(case, 2)
    out, lse = by_pairs(world, MAKERS[name](monkeypatch, case))
    want, want_lse = world.truth()
    assert relative_error(out, want) < 1e-5
    assert lse_error(lse, want_lse) < 1e-5


def test_items_beyond_the_kernels_levels_are_joined() -> None:
    """A row that sees five shared items gets three nodes that hold all of their keys once."""
    shared = tuple(SharedItem(torch.arange(4), torch.arange(10 * i, 10 * i + 3)) for i in range(5))
    nodes, streams = entries(SplitBatch(shared, (PrivateItem(0, 4, torch.arange(60, 66)),)))
    assert len(streams) == 1
    assert len(streams[0].path) == LEVELS
    seen = sorted(slot for node in streams[0].path for slot in nodes[node].pages)
    assert seen == [10 * i + j for i in range(5) for j in range(3)]


def test_rows_with_other_items_are_other_streams() -> None:
    """Rows 2 and 3 see the shared item, 0 and 1 do not, and row 4 has nothing of its own."""
    batch = SplitBatch((SharedItem(torch.tensor([2, 3, 4]), torch.arange(5)),), (PrivateItem(0, 4, torch.arange(6, 12)),))
    _, streams = entries(batch)
    assert [(s.row, s.row_count, s.length, len(s.path)) for s in streams] == [(0, 2, 4, 0), (2, 2, 6, 1), (4, 1, 0, 1)]


def test_empty_batches_need_no_attention() -> None:
    batch = SplitBatch((SharedItem(torch.arange(3), torch.arange(0)),), (PrivateItem(0, 0, torch.arange(0)),))
    assert TorchBlocks(CPU).prepare(batch, 3) is None
    assert triton_blocks(TINY, "cpu").prepare(batch, 3) is None


def test_the_cpu_uses_pytorch_and_pages_are_single_slots() -> None:
    assert isinstance(best_blocks(CPU, torch.float32), TorchBlocks)
    with pytest.raises(ValueError, match="page_size must be 1"):
        TritonBlocks(AttentionShape(4, 2, 16, 16, torch.float32), CPU)
