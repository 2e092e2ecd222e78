"""Random steps for attention tests: pools with NaN in every unused slot, split and interleaved batches drawn over them."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from askmany.kernels.layout import MaskedBatch, MaskedItem, PrivateItem, SharedItem, SplitBatch


class Pool:
    """Hands out slots of a K and a V cache; a slot never handed out holds NaN."""

    def __init__(self, rng: random.Random, slots: int, kv_heads: int, head_dim: int, scattered: bool, dtype: torch.dtype) -> None:
        self.k = torch.full((slots, kv_heads, head_dim), float("nan"), dtype=dtype)
        self.v = torch.full((slots, kv_heads, head_dim), float("nan"), dtype=dtype)
        self._free = list(range(slots))
        if scattered:
            rng.shuffle(self._free)

    def take(self, count: int) -> Tensor:
        taken, self._free = self._free[:count], self._free[count:]
        assert len(taken) == count
        slots = torch.tensor(taken, dtype=torch.int64)
        self.k[slots] = torch.randn(count, *self.k.shape[1:], dtype=self.k.dtype)
        self.v[slots] = torch.randn(count, *self.v.shape[1:], dtype=self.v.dtype)
        return slots


def split_case(rng: random.Random, pool: Pool, documents: int, max_streams: int, max_document: int, max_own: int) -> tuple[SplitBatch, int]:
    """Documents under one instruction: each a chunk being prefilled, or complete with 0 or more streams (0 rows make an empty item)."""
    instruction = pool.take(rng.choice([0, 1, 3, 17]))
    below_instruction: list[int] = []
    private, shared, rows = [], [], 0
    for _ in range(documents):
        document = pool.take(rng.choice([0, 1, 2, rng.randint(0, max_document)]))
        if rng.random() < 0.3 and len(document):
            count = rng.randint(1, len(document))
            private.append(PrivateItem(rows, count, document))
            below_instruction += range(rows, rows + count)
            rows += count
            continue
        first = rows
        for _ in range(rng.randint(0, max_streams)):
            count = rng.choice([1, 1, 1, 2, rng.randint(1, max_own)])
            private.append(PrivateItem(rows, count, pool.take(count + rng.choice([0, 1, rng.randint(0, max_own)]))))
            rows += count
        shared.append(SharedItem(torch.arange(first, rows), document))
        below_instruction += range(first, rows)
    shared.insert(0, SharedItem(torch.tensor(below_instruction, dtype=torch.int64), instruction))
    return SplitBatch(tuple(shared), tuple(private)), rows


def masked_case(
    rng: random.Random, pool: Pool, requests: int, max_streams: int, max_document: int, max_own: int
) -> tuple[MaskedBatch, int]:
    """Interleaved requests with ragged rows, and document chunks being prefilled."""
    slot_sid = torch.full((pool.k.shape[0],), -1, dtype=torch.int32)
    items, q_sid, rows = [], [], 0
    for _ in range(requests):
        document = pool.take(rng.choice([0, 1, rng.randint(1, max_document)]))
        if rng.random() < 0.3 and len(document):
            count, slots = rng.randint(1, len(document)), document
            q_sid += [-1] * count
        else:
            streams = rng.randint(1, max_streams)
            count = rng.randint(1, streams + max_own)
            own = pool.take(count + rng.randint(0, max_own))
            sids = [rng.randrange(streams) for _ in range(len(own))]
            slot_sid[own] = torch.tensor(sids, dtype=torch.int32)
            slots = torch.cat([document, own])
            q_sid += sids[len(own) - count :]
        items.append(MaskedItem(rows, count, slots))
        rows += count
    return MaskedBatch(tuple(items), torch.tensor(q_sid, dtype=torch.int32), slot_sid), rows
