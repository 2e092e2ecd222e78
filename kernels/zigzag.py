"""Zigzag sharding: which rank of a context-parallel group holds which new token of a fused batch of sequences.

Each sequence's new tokens are cut in 2N chunks and the rank in role i gets chunks i and 2N - 1 - i, so that under a causal mask every rank
has the same work and the same number of keys (arXiv 2411.01783, section 3.5.1). New tokens are balanced by themselves, wherever a
sequence's cached tokens lie. Chunk sizes differ by at most one token; `shift` turns the roles, so that the odd tokens of many turns do
not pile up on one rank. Knows lengths alone, neither tensors of a model nor processes.

Letters: N ranks, T new tokens of the batch, P places: local rows of every rank, the same number on each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Chunk = tuple[int, int]  # [start, stop) of a sequence's new tokens


def chunk_bounds(tokens: int, ranks: int) -> list[Chunk]:
    """The 2N chunks of `tokens` new tokens, in order; some are empty when there are fewer tokens than chunks.

    Roles 0, 1, ... get the first odd tokens in their early chunk, then in their late one: ranks differ by at most one token.
    """
    base, odd = divmod(tokens, 2 * ranks)
    early = min(odd, ranks)
    late = odd - early
    sizes = [base + (i < early or i >= 2 * ranks - late) for i in range(2 * ranks)]
    bounds, start = [], 0
    for size in sizes:
        bounds.append((start, start + size))
        start += size
    return bounds


def rank_chunks(tokens: int, ranks: int, rank: int, shift: int = 0) -> tuple[Chunk, Chunk]:
    """The early and the late chunk of `rank`, whose role is `rank - shift` modulo N."""
    role = (rank - shift) % ranks
    bounds = chunk_bounds(tokens, ranks)
    return bounds[role], bounds[2 * ranks - 1 - role]


@dataclass(frozen=True, slots=True)
class Sharding:
    """Where the rows of a fused batch lie: row t is at place `place[t]` of rank `rank[t]`. Places that hold no row are padding."""

    ranks: int
    places: int
    rank: Tensor  # [T] int64
    place: Tensor  # [T] int64

    def rows(self, rank: int) -> Tensor:
        """[P] int64: the row at each place of `rank`, -1 for padding."""
        found = torch.full((self.places,), -1, dtype=torch.int64)
        mine = torch.nonzero(self.rank == rank)[:, 0]
        found[self.place[mine]] = mine
        return found

    @property
    def gathered(self) -> Tensor:
        """[T] int64: where each row lies in the places of all ranks, one rank after another (the inverse of `rows`)."""
        return self.rank * self.places + self.place

    def counts(self) -> list[int]:
        """Rows of each rank, padding left out."""
        return torch.bincount(self.rank, minlength=self.ranks).tolist()


def shard(lengths: Sequence[int], ranks: int, shifts: Sequence[int] | None = None, least_places: int = 0) -> Sharding:
    """The zigzag sharding of sequences with `lengths` new tokens, fused one after another.

    Every rank gives a sequence ceil(length / N) places, so that messages of all ranks are equally long. `shifts`: one a sequence.
    """
    if ranks < 1:
        raise ValueError(f"a group has at least one rank, not {ranks}")
    if any(length < 0 for length in lengths):
        raise ValueError(f"a sequence of {min(lengths)} tokens")
    rank, place = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]
    places = 0
    for index, length in enumerate(lengths):
        one_rank, one_place = _one(length, ranks, shifts[index] if shifts else 0)
        rank.append(one_rank)
        place.append(one_place + places)
        places += -(-length // ranks)
    return Sharding(ranks, max(places, least_places), torch.cat(rank), torch.cat(place))


def rotate(count: int, ranks: int, step: int) -> Sharding:
    """One new token of each of `count` sequences: sequence b's goes to rank (b + step) modulo N, padded to a multiple of N.

    With `step` counting up, a sequence's owner rotates and its keys grow evenly (arXiv 2411.01783, section 3.6).
    """
    index = torch.arange(count)
    return Sharding(ranks, -(-count // ranks), (index + step) % ranks, index // ranks)


def _one(length: int, ranks: int, shift: int) -> tuple[Tensor, Tensor]:
    """Rank and local place of each of one sequence's tokens."""
    rank, place = torch.empty(length, dtype=torch.int64), torch.empty(length, dtype=torch.int64)
    for index in range(ranks):
        (start, stop), (late_start, late_stop) = rank_chunks(length, ranks, index, shift)
        rank[start:stop] = index
        rank[late_start:late_stop] = index
        place[start:stop] = torch.arange(stop - start)
        place[late_start:late_stop] = torch.arange(late_stop - late_start) + (stop - start)
    return rank, place


def causal_pairs(lengths: Sequence[int], cached: Sequence[int], ranks: int, rank: int) -> int:
    """(query, key) pairs that `rank` computes for a batch: a query sees all `cached` tokens of its sequence and its causal part."""
    total = 0
    for length, before in zip(lengths, cached, strict=True):
        for start, stop in rank_chunks(length, ranks, rank):
            total += (stop - start) * before + (stop * (stop + 1) - start * (start + 1)) // 2
    return total
