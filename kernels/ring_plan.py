"""From the attention of a whole step to what one rank does of it: a `SplitBatch` over global rows and slots, cut by where they lie.

For rows of some ranks and the keys of one rank, `local_batch` gives the items over local rows and local slots. Chunk pairs that the
causal mask hides are left out, pairs that it does not touch become part of one full pass, only a chunk against itself stays causal
(arXiv 2411.01783, sections 3.5.1 and 3.5.2). Host work on index tensors; knows neither processes nor models.

Letters: N ranks, T rows of the step, S global slots, P places (padded local rows of every rank), L places of a key block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from askmany.kernels.layout import PrivateItem, SharedItem, SplitBatch
from askmany.kernels.zigzag import Sharding


@dataclass(frozen=True, slots=True)
class Slots:
    """Where keys lie: global slot s is at `place[s]` of rank `rank[s]` (-1: nowhere)."""

    rank: Tensor  # [S] int64
    place: Tensor  # [S] int64


@dataclass(frozen=True, slots=True)
class KeyBlocks:
    """The keys that a batch reads, as one block a rank: `sources[r]` are the places in rank r's memory, in block order.

    `places` is the length of the longest block, to which all are padded when they travel; `slots` maps global slots to blocks.
    """

    sources: tuple[Tensor, ...]
    places: int
    slots: Slots


def key_blocks(batch: SplitBatch, slots: Slots, ranks: int) -> KeyBlocks:
    """Every key that an item of `batch` reads, once."""
    read = [item.slots for item in batch.shared if len(item.rows)] + [item.slots for item in batch.private if item.row_count]
    needed = torch.unique(torch.cat(read)) if read else torch.zeros(0, dtype=torch.int64)
    rank = slots.rank[needed]
    place = torch.full_like(slots.place, -1)
    sources = []
    for index in range(ranks):
        mine = needed[rank == index]
        place[mine] = torch.arange(len(mine))
        sources.append(slots.place[mine])
    return KeyBlocks(tuple(sources), max(map(len, sources)), Slots(slots.rank, place))


def local_batch(batch: SplitBatch, rows: Sharding, slots: Slots, row_ranks: Sequence[int], key_rank: int) -> SplitBatch:
    """The items of rows on `row_ranks` against keys on `key_rank`.

    Row places of the n-th of `row_ranks` start at n * P; slots are the places of `slots`.
    """
    offset = torch.full((rows.ranks,), -1, dtype=torch.int64)
    offset[torch.tensor(row_ranks)] = torch.arange(len(row_ranks)) * rows.places
    place = torch.where(offset[rows.rank] >= 0, offset[rows.rank] + rows.place, -1)  # [T]
    shared: list[SharedItem] = []
    private: list[PrivateItem] = []
    for item in batch.private:
        if item.row_count:
            _cut_private(item, rows.rank, place, slots, key_rank, shared, private)
    for whole in batch.shared:
        _add_shared(shared, place[whole.rows], _keys(whole.slots, slots, key_rank))
    return SplitBatch(tuple(shared), tuple(private))


def _cut_private(
    item: PrivateItem, rank: Tensor, place: Tensor, slots: Slots, key_rank: int, shared: list[SharedItem], private: list[PrivateItem]
) -> None:
    """A causal run: what was stored before it is a full pass for all its rows; its own part goes chunk by chunk."""
    cached, own = len(item.slots) - item.row_count, slice(item.row_start, item.row_start + item.row_count)
    before = _keys(item.slots[:cached], slots, key_rank)
    own_place, own_keys = place[own], item.slots[cached:]
    chunks = list(_chunks(rank[own]))
    for rank_of, group in _by_rank(chunks).items():
        if int(own_place[group[0][0]]) < 0:
            continue
        seen = 0  # own keys of `key_rank` that all later chunks of the group have as full passes already
        for number, (start, stop) in enumerate(group):
            later = torch.cat([own_place[first:last] for first, last in group[number:]])
            visible = [_place(own_keys[first:last], slots) for first, last in _of(chunks, key_rank) if last <= start]
            fresh = torch.cat([before if number == 0 else before[:0], *visible])[seen if number else 0 :]
            _add_shared(shared, later, fresh)
            seen = sum(map(len, visible))
            if rank_of == key_rank:
                private.append(PrivateItem(int(own_place[start]), stop - start, _place(own_keys[start:stop], slots)))


def _add_shared(shared: list[SharedItem], rows: Tensor, keys: Tensor) -> None:
    rows = rows[rows >= 0]
    if len(rows) and len(keys):
        shared.append(SharedItem(rows, keys))


def _keys(wanted: Tensor, slots: Slots, key_rank: int) -> Tensor:
    """Places of those of the `wanted` slots that lie on `key_rank`."""
    return slots.place[wanted[slots.rank[wanted] == key_rank]]


def _place(wanted: Tensor, slots: Slots) -> Tensor:
    return slots.place[wanted]


def _chunks(rank: Tensor) -> Iterator[tuple[int, int, int]]:
    """(rank, start, stop) of the maximal runs of equal rank."""
    cuts = (torch.nonzero(rank[1:] != rank[:-1])[:, 0] + 1).tolist()
    for start, stop in zip([0, *cuts], [*cuts, len(rank)], strict=True):
        yield int(rank[start]), start, stop


def _by_rank(chunks: Sequence[tuple[int, int, int]]) -> dict[int, list[tuple[int, int]]]:
    found: dict[int, list[tuple[int, int]]] = {}
    for rank, start, stop in chunks:
        found.setdefault(rank, []).append((start, stop))
    return found


def _of(chunks: Sequence[tuple[int, int, int]], rank: int) -> list[tuple[int, int]]:
    return [(start, stop) for owner, start, stop in chunks if owner == rank]
