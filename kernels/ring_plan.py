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
from askmany.kernels.zigzag import Chunk, Sharding


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
    """Every key that an item of `batch` reads, once, in the order in which items name them: keys of one sequence lie together."""
    found = torch.zeros(len(slots.rank), dtype=torch.bool)
    read = [torch.zeros(0, dtype=torch.int64)]
    for wanted in [item.slots for item in batch.shared if len(item.rows)] + [item.slots for item in batch.private if item.row_count]:
        fresh = wanted[~found[wanted]]
        found[fresh] = True
        read.append(fresh)
    needed = torch.cat(read)
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


def foreign_items(batch: SplitBatch, rows: Sharding, slots: Slots, rank: int) -> list[SharedItem]:
    """What rows of other ranks see of the private keys that lie on `rank`; rows are numbered through the places of all ranks."""
    cut = local_batch(SplitBatch((), batch.private), rows, slots, list(range(rows.ranks)), rank)
    mine = slice(rank * rows.places, (rank + 1) * rows.places)
    assert all(mine.start <= item.row_start < mine.stop for item in cut.private), "a causal chunk does not lie where its rows do"
    return [item for item in cut.shared if not mine.start <= int(item.rows[0]) < mine.stop]


def _cut_private(
    item: PrivateItem, rank: Tensor, place: Tensor, slots: Slots, key_rank: int, shared: list[SharedItem], private: list[PrivateItem]
) -> None:
    """A causal run, cut by where its rows and keys lie.

    On one rank chunks lie in the order of the run, so that rows which stand together are one causal run over the rank's own keys, however
    many chunks they come from. Against another rank's keys each chunk sees a beginning of what lies there.
    """
    cached, own = len(item.slots) - item.row_count, slice(item.row_start, item.row_start + item.row_count)
    before = _keys(item.slots[:cached], slots, key_rank)
    own_place, own_keys = place[own], item.slots[cached:]
    chunks = list(_chunks(rank[own]))
    theirs = _of(chunks, key_rank)
    stored = torch.cat([before, *(_place(own_keys[start:stop], slots) for start, stop in theirs)])
    for rank_of, group in _by_rank(chunks).items():
        if int(own_place[group[0][0]]) < 0:
            continue
        if rank_of == key_rank:
            private += _causal_runs(group, own_place, stored, len(before))
        else:
            _add_prefixes(group, theirs, own_place, stored, len(before), shared)


def _causal_runs(group: Sequence[Chunk], own_place: Tensor, stored: Tensor, before: int) -> Iterator[PrivateItem]:
    """Rows at consecutive places, over everything that `stored` holds up to their own last key."""
    first = done = 0
    for number, (start, stop) in enumerate(group):
        done += stop - start
        last = number == len(group) - 1
        if last or int(own_place[group[number + 1][0]]) != int(own_place[stop - 1]) + 1:
            yield PrivateItem(int(own_place[group[first][0]]), sum(b - a for a, b in group[first : number + 1]), stored[: before + done])
            first = number + 1


def _add_prefixes(
    group: Sequence[Chunk], theirs: Sequence[Chunk], own_place: Tensor, stored: Tensor, before: int, shared: list[SharedItem]
) -> None:
    """Chunks of one rank over another's keys. Two different beginnings are two passes; of more, each adds what the one before lacked."""
    sees = [before + sum(stop - start for start, stop in theirs if stop <= first) for first, _ in group]
    lengths = sorted(set(sees))
    if len(lengths) <= 2:
        for length in lengths:
            rows = torch.cat([own_place[start:stop] for (start, stop), seen in zip(group, sees, strict=True) if seen == length])
            _add_shared(shared, rows, stored[:length])
        return
    for length, more in zip([0, *lengths], lengths, strict=False):
        rows = torch.cat([own_place[start:stop] for (start, stop), seen in zip(group, sees, strict=True) if seen >= more])
        _add_shared(shared, rows, stored[length:more])


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


def _by_rank(chunks: Sequence[tuple[int, int, int]]) -> dict[int, list[Chunk]]:
    found: dict[int, list[Chunk]] = {}
    for rank, start, stop in chunks:
        found.setdefault(rank, []).append((start, stop))
    return found


def _of(chunks: Sequence[tuple[int, int, int]], rank: int) -> list[Chunk]:
    return [(start, stop) for owner, start, stop in chunks if owner == rank]
