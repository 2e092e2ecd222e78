"""Prefill over all ranks, then hand over to one: a document whose KV one rank has room for is moved there when its first stream starts.

Its streams then live on that rank and exchange nothing in attention, so that documents are answered side by side, one a rank. Decided from
the step's items and the map of slots alone, the same on every rank. What other documents read too (an instruction) is copied, not moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from askmany.engine.context_parallel_slots import SlotMap
from askmany.engine.context_parallel_step import StepMessage
from askmany.engine.kv_pool import KVPool
from askmany.kernels.layout import SharedItem
from askmany.kernels.rank_group import RankGroup

SPARE = 4  # a quarter of a rank's places stays free for the streams' own keys


@dataclass(frozen=True, slots=True)
class HandOver:
    """Moves documents within a group whose ranks hold `pool` each."""

    slots: SlotMap
    pool: KVPool
    group: RankGroup

    def before(self, message: StepMessage) -> int:
        """Hand over what is to be handed over before this step; how many documents. Collective."""
        moved = 0
        for shared, rows in _starting(message):
            keys = torch.cat([item.slots for item in shared])
            if any(self.slots.holds(rank, keys) for rank in range(self.slots.ranks)):
                continue
            rank = self._roomiest(keys)
            if rank is not None:
                self._bring(keys, rank)
                for item in shared:
                    if set(item.rows.tolist()) <= rows:
                        self.slots.move(item.slots, rank)
                moved += 1
        return moved

    def _roomiest(self, keys: Tensor) -> int | None:
        """The rank with the most room left once it holds `keys`, if that is enough."""
        left = [self.slots.free(rank) - len(self.slots.missing(rank, keys)) for rank in range(self.slots.ranks)]
        rank = max(range(self.slots.ranks), key=lambda rank: (left[rank], -rank))
        return rank if left[rank] >= self.slots.places // SPARE else None

    def _bring(self, keys: Tensor, to: int) -> None:
        """Copies of `keys` to a rank, one message a layer, cache and owner."""
        missing = self.slots.missing(to, keys)
        owners = self.slots.owners
        owner, source = owners.rank[missing], owners.place[missing]
        target = self.slots.copy(missing, to)
        for rank in range(self.slots.ranks):
            mine = torch.nonzero(owner == rank)[:, 0]
            if not len(mine) or self.group.rank not in (rank, to):
                continue
            for cache in (*self.pool.k, *self.pool.v):
                if self.group.rank == rank:
                    self.group.send(cache[source[mine].to(cache.device)], to)
                else:
                    cache[target[mine].to(cache.device)] = self.group.receive(cache.new_empty(len(mine), *cache.shape[1:]), rank)


def _starting(message: StepMessage) -> Iterator[tuple[list[SharedItem], set[int]]]:
    """For each document of which a stream feeds its first token: what its streams share, and all of the step's rows that read just that."""
    shared = message.attention.shared
    readers: dict[int, tuple[int, ...]] = {}
    for index, item in enumerate(shared):
        for row in item.rows.tolist():
            readers[row] = (*readers.get(row, ()), index)
    first = [item.row_start for item in message.attention.private if item.row_count and len(item.slots) == item.row_count]
    for seen in dict.fromkeys(readers[row] for row in first if row >= message.prefix_rows and row in readers):
        yield [shared[index] for index in seen], {row for row, found in readers.items() if found == seen and row >= message.prefix_rows}
