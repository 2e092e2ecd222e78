"""Which rank of a context-parallel group holds the KV of each global slot, and at which place of its own pool.

The scheduler works with global slots, one numbering over all ranks' memory. This map is kept alike on every rank: each call depends on
its arguments and the calls before alone. A slot has one owner; other ranks may hold copies, which can be dropped at any time.
Knows neither tokens nor tensors of K and V.
"""

from __future__ import annotations

import torch
from torch import Tensor

from askmany.kernels.ring_plan import Slots


class SlotMap:
    """`slots` global slots over `ranks` ranks with `places` places each; at first nothing lies anywhere."""

    def __init__(self, ranks: int, slots: int, places: int) -> None:
        if slots > ranks * places:
            raise ValueError(f"{slots} slots on {ranks} ranks of {places} places")
        self.ranks = ranks
        self.places = places
        self.owner = torch.full((slots,), -1, dtype=torch.int64)  # [S] rank, -1: nothing is stored
        self._place = torch.full((ranks, slots), -1, dtype=torch.int64)  # where a rank holds the slot's KV, -1: it does not
        self._taken = torch.zeros(ranks, places, dtype=torch.bool)
        self._free = [places] * ranks
        self.version = 0  # grows when something that is stored changes its place or owner

    def free(self, rank: int) -> int:
        """Places of `rank` that nothing lies in."""
        return self._free[rank]

    @property
    def owners(self) -> Slots:
        """Every slot at its owner's."""
        place = self._place.gather(0, self.owner.clamp(min=0)[None])[0]
        return Slots(self.owner, place)

    def owned(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Owner, and place there, of each of `slots`, which are all stored."""
        owner = self.owner[slots]
        return owner, self._place[owner, slots]

    def seen_from(self, rank: int) -> Slots:
        """Every slot that `rank` holds, copies included, as if it were the owner."""
        place = self._place[rank]
        return Slots(torch.where(place >= 0, rank, -1), place)

    def seen_at(self, rank: int, slots: Tensor) -> Tensor:
        """The places of `slots`, which `rank` holds."""
        return self._place[rank, slots]

    def holds(self, rank: int, slots: Tensor) -> bool:
        """Whether `rank` holds all of `slots`."""
        return bool((self._place[rank, slots] >= 0).all())

    def missing(self, rank: int, slots: Tensor) -> Tensor:
        """Those of `slots` that `rank` does not hold."""
        return slots[self._place[rank, slots] < 0]

    def store(self, slots: Tensor, rank: int) -> Tensor:
        """`rank` becomes the owner of `slots`, of which nothing is stored: their places. Drops copies it holds when it is short of room."""
        if len(slots) > self._free[rank]:
            self.drop_copies(rank)
        assert len(slots) <= self._free[rank], f"rank {rank} has {self._free[rank]} places for {len(slots)} slots"
        assert bool((self.owner[slots] < 0).all()), "a slot is stored twice"
        self.owner[slots] = rank
        return self._take(slots, rank)

    def copy(self, slots: Tensor, rank: int) -> Tensor:
        """`rank` gets copies of `slots`, of which it holds none: their places. There must be room."""
        assert len(slots) <= self._free[rank], "no room for copies"
        return self._take(slots, rank)

    def move(self, slots: Tensor, rank: int) -> None:
        """`rank`, which holds them all, becomes the owner of `slots`, and the former owners let go of them."""
        assert self.holds(rank, slots), "a slot can only be given to a rank that holds it"
        self.version += 1
        for other in range(self.ranks):
            if other != rank:
                self._let_go(slots[self.owner[slots] == other], other)
        self.owner[slots] = rank

    def release(self, slots: Tensor) -> None:
        """Nothing is stored in `slots` any more, wherever it was."""
        for rank in range(self.ranks):
            self._let_go(slots, rank)
        self.owner[slots] = -1

    def drop_copies(self, rank: int) -> None:
        """Let go of everything that `rank` holds and does not own."""
        self._let_go(torch.nonzero((self._place[rank] >= 0) & (self.owner != rank))[:, 0], rank)

    def check(self) -> None:
        """Fail unless places and counts agree."""
        for rank in range(self.ranks):
            held = self._place[rank][self._place[rank] >= 0]
            assert len(torch.unique(held)) == len(held), f"two slots share a place of rank {rank}"
            assert len(held) == int(self._taken[rank].sum()) == self.places - self._free[rank], f"rank {rank} is miscounted"
            owned = torch.nonzero(self.owner == rank)[:, 0]
            assert bool((self._place[rank, owned] >= 0).all()), f"rank {rank} owns what it does not hold"

    def _take(self, slots: Tensor, rank: int) -> Tensor:
        """The lowest free places, so that what is stored together lies together."""
        places = torch.nonzero(~self._taken[rank])[: len(slots), 0]
        self._taken[rank, places] = True
        self._place[rank, slots] = places
        self._free[rank] -= len(slots)
        return places

    def _let_go(self, slots: Tensor, rank: int) -> None:
        held = slots[self._place[rank, slots] >= 0]
        self._taken[rank, self._place[rank, held]] = False
        self._place[rank, held] = -1
        self._free[rank] += len(held)
