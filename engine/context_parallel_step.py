"""One step of a context-parallel group, as one rank does it: its rows, its keys and its prepared attention.

Every rank runs this on the same message with the same map of slots and comes to its own share; nothing is exchanged here. Rows fall in up
to three sections, each with one way for its attention: prefixes, streams whose keys are spread, streams whose keys are all at home (no
exchange at all). Local rows stand section by section, padded so that messages are equally long on all ranks.

Letters: N ranks, T rows of the whole step, P places of a section, M sampled rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from askmany.engine.batch import StepBatch
from askmany.engine.context_parallel_attention import RankAttention, Section, prepare_section
from askmany.engine.context_parallel_rows import RowPolicy, place_prefixes, place_streams
from askmany.engine.context_parallel_slots import SlotMap
from askmany.kernels.block_attention import BlockAttention
from askmany.kernels.layout import PrivateItem, SharedItem, SplitBatch
from askmany.kernels.passes import Run, as_run, sent
from askmany.kernels.ring_choice import Choice, Rules
from askmany.kernels.zigzag import Sharding

LOCAL = Choice("local", "at home", "every key lies with its rows")


@dataclass(frozen=True, slots=True)
class StepMessage:
    """What the leader tells all ranks: the step's tensors without its streams, and the slots that hold nothing any more."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    store_slots: Tensor  # [T] int64, global
    attention: SplitBatch
    sampled_rows: Tensor  # [M] int64
    prefix_rows: int
    freed: Tensor  # global slots

    @classmethod
    def of(cls, batch: StepBatch, freed: Tensor) -> StepMessage:
        assert isinstance(batch.attention, SplitBatch), "context parallelism runs the split layout"
        return cls(batch.token_ids, batch.positions, batch.store_slots, batch.attention, batch.sampled_rows, batch.prefix_rows, freed)


@dataclass(frozen=True, slots=True)
class Planned:
    """What every rank knows alike: a section's rows (ascending), where they go, its items over its own row numbers, and its way."""

    rows: Tensor  # [R] int64 rows of the step
    sharding: Sharding
    batch: SplitBatch
    choice: Choice


@dataclass(frozen=True, slots=True)
class RankStep:
    """This rank's share. `sampled_from`: for each of the M sampled rows its rank and its number among that rank's."""

    batch: StepBatch
    attention: RankAttention
    sampled_from: tuple[tuple[int, int], ...]
    most_sampled: int
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class StepMaker:
    """Makes this rank's share of each step. `slots` is changed by it: what a step stores is entered."""

    rank: int
    slots: SlotMap
    policy: RowPolicy
    rules: Rules
    blocks: BlockAttention
    device: torch.device

    def make(self, message: StepMessage, number: int) -> RankStep:
        """`number` counts the group's steps."""
        ranks = self._place(message, number)
        places = torch.empty_like(message.store_slots)
        for rank in range(self.slots.ranks):
            mine = torch.nonzero(ranks == rank)[:, 0]
            places[mine] = self.slots.store(message.store_slots[mine], rank)
        return self._share(message, places, self._sections(message, ranks))

    def _place(self, message: StepMessage, number: int) -> Tensor:
        """[T] the rank of each row."""
        prefixes, streams = _split(message)
        placed = place_prefixes(prefixes, self.slots)
        taken = torch.cat(placed) if placed else torch.zeros(0, dtype=torch.int64)
        placed += place_streams(streams, message.attention, self.slots, self.policy, number, taken)
        ranks = torch.full_like(message.store_slots, -1)
        for item, rank in zip([*prefixes, *streams], placed, strict=True):
            ranks[item.row_start : item.row_start + item.row_count] = rank
        assert bool((ranks >= 0).all()), "a row of the step is in no private item"
        return ranks

    def _sections(self, message: StepMessage, ranks: Tensor) -> list[Planned]:
        prefixes, streams = _split(message)
        homes = _Homes(message.attention, ranks, self.slots)
        at_home = [item for item in streams if homes.whole(item)]
        spread = [item for item in streams if not homes.whole(item)]
        planned = []
        for items, local in ((prefixes, False), (spread, False), (at_home, True)):
            if items:
                rows = torch.cat([torch.arange(item.row_start, item.row_start + item.row_count) for item in items])
                batch = section_batch(message.attention, items, rows)
                choice = LOCAL if local or self.slots.ranks == 1 else self._choose(batch, len(rows))
                planned.append(Planned(rows, _sharded(ranks[rows], self.slots.ranks), batch, choice))
        return planned

    def _choose(self, batch: SplitBatch, new: int) -> Choice:
        read = sum(len(item.slots) for item in batch.shared) + sum(len(item.slots) - item.row_count for item in batch.private)
        return self.rules.choose(new, read)

    def _share(self, message: StepMessage, places: Tensor, planned: Sequence[Planned]) -> RankStep:
        local = [section.sharding.rows(self.rank) for section in planned]
        rows = torch.cat([torch.where(found < 0, -1, one.rows[found.clamp(min=0)]) for found, one in zip(local, planned, strict=True)])
        real = torch.nonzero(rows >= 0)[:, 0]
        sections: list[Section] = []
        start = 0
        for one in planned:
            stop = start + one.sharding.places
            sections.append(
                prepare_section(one.batch, one.sharding, one.choice, slice(start, stop), self.slots, self.rank, self.blocks, self.device)
            )
            start = stop
        attention = RankAttention(_sent(real, self.device), _sent(places[rows[real]], self.device), tuple(sections))
        sampled, sampled_from = self._sampled(message.sampled_rows, planned)
        batch = StepBatch(
            token_ids=sent(torch.where(rows < 0, 0, message.token_ids[rows.clamp(min=0)]), self.device),
            positions=sent(torch.where(rows < 0, 0, message.positions[rows.clamp(min=0)]), self.device),
            store_slots=places[rows[real]],
            attention=message.attention,
            sampled_rows=sent(sampled[self.rank], self.device),
            sampled_streams=(),
        )
        return RankStep(batch, attention, sampled_from, max(map(len, sampled)), tuple(one.choice for one in planned))

    def _sampled(self, wanted: Tensor, planned: Sequence[Planned]) -> tuple[list[Tensor], tuple[tuple[int, int], ...]]:
        """Local rows that each rank samples, and where each wanted row's logits will be."""
        rank_of, place_of = torch.full((2, max((int(one.rows[-1]) + 1 for one in planned), default=0)), -1, dtype=torch.int64)
        start = 0
        for one in planned:
            rank_of[one.rows], place_of[one.rows] = one.sharding.rank, one.sharding.place + start
            start += one.sharding.places
        local: list[list[int]] = [[] for _ in range(self.slots.ranks)]
        sampled_from = []
        for rank, place in zip(rank_of[wanted].tolist(), place_of[wanted].tolist(), strict=True):
            sampled_from.append((rank, len(local[rank])))
            local[rank].append(place)
        return [torch.tensor(found, dtype=torch.int64) for found in local], tuple(sampled_from)


class _Homes:
    """Which private items have all of their rows, and every key that these see, on one rank."""

    def __init__(self, batch: SplitBatch, ranks: Tensor, slots: SlotMap) -> None:
        self._batch, self._ranks, self._slots = batch, ranks, slots
        self._readers = [set(item.rows.tolist()) for item in batch.shared]
        self._held: dict[tuple[int, int], bool] = {}

    def whole(self, item: PrivateItem) -> bool:
        rows = self._ranks[item.row_start : item.row_start + item.row_count]
        home = int(rows[0])
        seen = [index for index, readers in enumerate(self._readers) if item.row_start in readers]
        return bool((rows == home).all()) and self._slots.holds(home, item.slots) and all(self._holds(home, index) for index in seen)

    def _holds(self, home: int, index: int) -> bool:
        if (home, index) not in self._held:
            self._held[home, index] = self._slots.holds(home, self._batch.shared[index].slots)
        return self._held[home, index]


def section_batch(batch: SplitBatch, items: Sequence[PrivateItem], rows: Tensor) -> SplitBatch:
    """The items of some rows alone, numbered from 0 in the order of `rows` (ascending; private items are whole)."""
    count = int(rows[-1]) + 1
    number = torch.full((count,), -1, dtype=torch.int64)
    number[rows] = torch.arange(len(rows))
    private = tuple(PrivateItem(int(number[item.row_start]), item.row_count, item.slots) for item in items)
    shared = []
    for item in batch.shared:
        mine = number[item.rows[item.rows < count]]
        if bool((mine >= 0).any()):
            shared.append(SharedItem(mine[mine >= 0], item.slots))
    return SplitBatch(tuple(shared), private)


def _split(message: StepMessage) -> tuple[list[PrivateItem], list[PrivateItem]]:
    """Private items of prefixes, and of streams."""
    items = [item for item in message.attention.private if item.row_count]
    return [i for i in items if i.row_start < message.prefix_rows], [i for i in items if i.row_start >= message.prefix_rows]


def _sharded(ranks: Tensor, size: int) -> Sharding:
    """Rows in their order, one after another on each rank."""
    place = torch.empty_like(ranks)
    for rank in range(size):
        mine = torch.nonzero(ranks == rank)[:, 0]
        place[mine] = torch.arange(len(mine))
    return Sharding(size, int(place.max()) + 1, ranks, place)


def _sent(indices: Tensor, device: torch.device) -> Run:
    run = as_run(indices) if len(indices) else indices
    return run if isinstance(run, slice) else sent(run, device)
