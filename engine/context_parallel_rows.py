"""Which rank computes which row of a step, and so holds its KV: prefixes in zigzag chunks, streams at home, or by turns.

Decides from the step's items and the map of slots alone, so that every rank decides the same. A rank without room is passed over: what
it cannot take goes where there is room, at the price of balance, never of correctness.

Letters: N ranks, T rows of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from askmany.engine.context_parallel_slots import SlotMap
from askmany.kernels.layout import PrivateItem, SplitBatch
from askmany.kernels.zigzag import shard

StreamPolicy = Literal["home", "rotate", "auto"]


@dataclass(frozen=True, slots=True)
class RowPolicy:
    """How rows of streams are placed.

    `home`: a stream lives on one rank, so its own keys never travel. `rotate`: the rows of a decode step are dealt out by turns, so that
    the keys of a single sequence grow evenly (arXiv 2411.01783, section 3.6). `auto`: by turns while there are fewer streams than ranks.
    With `hand_over`, a document that one rank has room for is moved there once it is prefilled, and its streams live there.
    """

    streams: StreamPolicy = "auto"
    hand_over: bool = False

    def rotates(self, streams: int, ranks: int) -> bool:
        return self.streams == "rotate" or (self.streams == "auto" and streams < ranks)


def place_prefixes(items: Sequence[PrivateItem], slots: SlotMap) -> list[Tensor]:
    """The rank of each row of prefix chunks, an item at a time: zigzag, odd tokens to the emptiest ranks."""
    room = [slots.free(rank) for rank in range(slots.ranks)]
    placed = []
    for item in items:
        shift = max(range(slots.ranks), key=lambda rank: (room[rank], -rank))
        ranks = shard([item.row_count], slots.ranks, [shift]).rank
        if any(count > left for count, left in zip(_counts(ranks, slots.ranks), room, strict=True)):
            ranks = fill(item.row_count, room)
        room = [left - count for left, count in zip(room, _counts(ranks, slots.ranks), strict=True)]
        placed.append(ranks)
    return placed


def fill(count: int, room: Sequence[int]) -> Tensor:
    """[count] ranks, a run each, as even as the ranks' room allows."""
    left, open_ranks = count, sorted(range(len(room)), key=lambda rank: (room[rank], rank))
    takes = [0] * len(room)
    for position, rank in enumerate(open_ranks):
        takes[rank] = min(room[rank], -(-left // (len(room) - position)))
        left -= takes[rank]
    assert left == 0, f"{count} rows for ranks with {sum(room)} places"
    return torch.repeat_interleave(torch.arange(len(room)), torch.tensor(takes))


def place_streams(
    items: Sequence[PrivateItem], batch: SplitBatch, slots: SlotMap, policy: RowPolicy, step: int, taken: Tensor
) -> list[Tensor]:
    """The rank of each row of streams, an item at a time. Items of one stream begin with the same slot.

    `taken`: the ranks of rows placed before in this step.
    """
    room = [slots.free(rank) - count for rank, count in enumerate(_counts(taken, slots.ranks))]
    load = [0] * slots.ranks
    homes: dict[int, int] = {}
    whole = _Whole(batch, slots)
    rotates = policy.rotates(len({int(item.slots[0]) for item in items}), slots.ranks)
    placed = []
    for index, item in enumerate(items):
        stream = int(item.slots[0])
        if rotates and item.row_count == 1 and whole.rank(item.row_start) < 0:
            home = (index + step) % slots.ranks
        else:
            home = homes.get(stream, int(slots.owner[stream]))
            if home < 0:
                home = whole.rank(item.row_start)
            if home < 0:
                home = min(range(slots.ranks), key=lambda rank: (load[rank], -room[rank], rank))
            homes[stream] = home
        ranks = _whole(item.row_count, home, room)
        for rank, count in enumerate(_counts(ranks, slots.ranks)):
            room[rank] -= count
            load[rank] += count
        placed.append(ranks)
    return placed


class _Whole:
    """Which rank, if any, holds everything that is shared with a row."""

    def __init__(self, batch: SplitBatch, slots: SlotMap) -> None:
        self._slots, self._keys = slots, [item.slots for item in batch.shared]
        self._seen: dict[int, list[int]] = {}
        for index, item in enumerate(batch.shared):
            for row in item.rows.tolist():
                self._seen.setdefault(row, []).append(index)
        self._found: dict[tuple[int, ...], int] = {}

    def rank(self, row: int) -> int:
        """The first such rank, -1 for none."""
        seen = tuple(self._seen.get(row, ()))
        if seen not in self._found:
            holders = (r for r in range(self._slots.ranks) if seen and all(self._slots.holds(r, self._keys[i]) for i in seen))
            self._found[seen] = next(holders, -1)
        return self._found[seen]


def _whole(count: int, home: int, room: Sequence[int]) -> Tensor:
    """All rows at home, or, where home is full, wherever there is room."""
    if count <= room[home]:
        return torch.full((count,), home, dtype=torch.int64)
    at_home = room[home]
    elsewhere = fill(count - at_home, [0 if rank == home else left for rank, left in enumerate(room)])
    return torch.cat([torch.full((at_home,), home, dtype=torch.int64), elsewhere])


def _counts(ranks: Tensor, size: int) -> list[int]:
    counts: list[int] = torch.bincount(ranks, minlength=size).tolist()
    return counts
