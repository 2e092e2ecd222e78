"""Causal chunk attention against the reference: chunks of one document and of several, with and without ancestors."""

from __future__ import annotations

import pytest
import torch

from askmany.kernels import reference
from askmany.kernels.layout import PrivateItem, SharedItem, SplitBatch
from askmany.kernels.oracle import lse_error, relative_error
from askmany.kernels.plan import Chunking
from askmany.kernels.prefill import ChunkEntry, PrefillAttention
from askmany.kernels.tables import NodeEntry, StepLimits
from askmany.kernels.tiles import AttentionShape

PAGE = 16


def slots_of(pages: list[int], count: int) -> torch.Tensor:
    return (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)[None, :]).reshape(-1)[:count]


@pytest.mark.parametrize("heads", [(4, 4), (7, 1), (6, 2)], ids=str)
@pytest.mark.parametrize("chunks", [[(33, 33, False)], [(20, 90, True), (1, 17, True), (40, 40, False)]], ids=["first", "several"])
def test_equals_the_reference(heads: tuple[int, int], chunks: list[tuple[int, int, bool]], device: str) -> None:
    generator = torch.Generator().manual_seed(41)
    instruction = 37
    needed = [-(-length // PAGE) for length in (instruction, *(length for _, length, _ in chunks))]
    pool = torch.randperm(sum(needed) + 2, generator=generator).tolist()
    pages = [[pool.pop() for _ in range(count)] for count in needed]
    rows = sum(count for count, _, _ in chunks) + 2
    caches = [torch.full(((sum(needed) + 2) * PAGE, heads[1], 64), float("nan")) for _ in range(2)]
    q = torch.randn(rows, heads[0], 64, generator=generator)
    entries, private, below, row = [], [], [], 0
    for (count, length, has_ancestor), mine in zip(chunks, pages[1:], strict=True):
        entries.append(ChunkEntry(row, count, length, mine, [0] if has_ancestor else []))
        private.append(PrivateItem(row, count, slots_of(mine, length)))
        below += list(range(row, row + count)) if has_ancestor else []
        row += count
    first = slots_of(pages[0], instruction)
    for cache in caches:
        for slots in (first, *(item.slots for item in private)):
            cache[slots] = torch.randn(slots.shape[0], heads[1], 64, generator=generator)
    batch = SplitBatch((SharedItem(torch.tensor(below, dtype=torch.int64), first),), tuple(private))
    want, want_lse = reference.split_attention(q.double(), caches[0].double(), caches[1].double(), batch, 0.125)

    limits = StepLimits(rows, len(chunks), 1, sum(needed))
    attention = PrefillAttention(AttentionShape(*heads, 64, PAGE, torch.float32), limits, torch.device(device), Chunking(threshold_bytes=0))
    attention.load([NodeEntry(instruction, pages[0])], entries)
    lse = torch.empty(rows, heads[0], device=device)
    out = attention.run(q.to(device), caches[0].to(device), caches[1].to(device), 0.125, lse=lse)
    attention.check()
    assert relative_error(out.cpu(), want) < 1e-5
    assert lse_error(lse.cpu(), want_lse) < 1e-5
    assert not bool(out[-2:].any())


def test_a_chunk_longer_than_what_is_stored_is_refused(device: str) -> None:
    attention = PrefillAttention(AttentionShape(4, 4, 64, PAGE, torch.float32), StepLimits(8, 1, 1, 4), torch.device(device))
    with pytest.raises(ValueError, match="8 rows but 5"):
        attention.load([], [ChunkEntry(0, 8, 5, [0])])
