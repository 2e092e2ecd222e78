"""Where slots and rows go: nothing in two places by mistake, nothing without a place, every rank to the same end."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from askmany.engine.config import EngineConfig
from askmany.engine.context_parallel_build import refuse_unfit
from askmany.engine.context_parallel_pages import NotedPagePool
from askmany.engine.context_parallel_rows import RowPolicy, fill, place_prefixes, place_streams
from askmany.engine.context_parallel_slots import SlotMap
from askmany.engine.errors import ConfigError
from askmany.kernels.layout import PrivateItem, SharedItem, SplitBatch

NONE = torch.zeros(0, dtype=torch.int64)


@given(st.integers(1, 4), st.integers(1, 12), st.integers(0, 10_000))
def test_the_map_agrees_with_a_plain_one(ranks: int, places: int, seed: int) -> None:
    """Stores, copies, moves and releases against sets: owners and holders as they should be, no place used twice."""
    rng = random.Random(seed)
    slots = SlotMap(ranks, ranks * places, places)
    owner: dict[int, int] = {}
    holders: dict[int, set[int]] = {}
    for _ in range(30):
        rank = rng.randrange(ranks)
        match rng.choice(("store", "copy", "move", "release")):
            case "store":
                owned = sum(held == rank for held in owner.values())
                new = rng.sample(sorted(set(range(ranks * places)) - set(owner)), k=min(rng.randint(0, 3), places - owned))
                if len(new) > slots.free(rank):
                    for slot in owner:
                        holders[slot] -= {rank} - {owner[slot]}
                slots.store(torch.tensor(new, dtype=torch.int64), rank)
                owner.update(dict.fromkeys(new, rank))
                holders.update({slot: {rank} for slot in new})
            case "copy":
                wanted = [slot for slot in owner if rank not in holders[slot]][: slots.free(rank)]
                slots.copy(torch.tensor(wanted, dtype=torch.int64), rank)
                for slot in wanted:
                    holders[slot].add(rank)
            case "move":
                given_away = [slot for slot in owner if rank in holders[slot]]
                slots.move(torch.tensor(given_away, dtype=torch.int64), rank)
                for slot in given_away:
                    holders[slot] -= {owner[slot]} - {rank}
                    owner[slot] = rank
            case "release":
                gone = [slot for slot in range(ranks * places) if rng.random() < 0.3]
                slots.release(torch.tensor(gone, dtype=torch.int64))
                for slot in gone:
                    owner.pop(slot, None)
                    holders.pop(slot, None)
        slots.check()
        assert {slot: held for slot, held in enumerate(slots.owner.tolist()) if held >= 0} == owner
        for slot in range(ranks * places):
            assert {r for r in range(ranks) if slots.holds(r, torch.tensor([slot]))} == holders.get(slot, set())


def test_a_map_larger_than_its_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="9 slots on 2 ranks of 4"):
        SlotMap(2, 9, 4)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.data())
def test_filling_respects_room_and_is_even_where_it_can_be(room: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, sum(room)))
    held = torch.bincount(fill(count, room), minlength=len(room)).tolist()
    assert sum(held) == count
    assert all(have <= left for have, left in zip(held, room, strict=True))
    level = max(held)
    assert all(have >= min(left, level - 1) for have, left in zip(held, room, strict=True))


def test_a_rank_that_is_full_is_passed_over() -> None:
    """Rank 1 of 2 has one place left: a chunk of 6 goes 5 and 1, the map takes it."""
    slots = SlotMap(2, 16, 8)
    slots.store(torch.arange(7), 1)
    (placed,) = place_prefixes([PrivateItem(0, 6, torch.arange(7, 13))], slots)
    assert torch.bincount(placed, minlength=2).tolist() == [5, 1]
    slots.store(torch.arange(7, 13)[placed == 0], 0)
    slots.store(torch.arange(7, 13)[placed == 1], 1)
    slots.check()


def test_a_stream_whose_home_is_full_goes_on_elsewhere() -> None:
    slots = SlotMap(2, 8, 4)
    slots.store(torch.arange(4), 0)
    item = PrivateItem(0, 1, torch.tensor([3, 5]))
    (placed,) = place_streams([item], SplitBatch((), (item,)), slots, RowPolicy("home"), 0, NONE)
    assert placed.tolist() == [1]


def test_a_stream_starts_where_its_whole_document_lies() -> None:
    """Rank 1 holds the document; a stream of another document, which is spread, goes to the emptier rank."""
    slots = SlotMap(2, 32, 16)
    slots.store(torch.arange(6), 1)
    slots.store(torch.arange(6, 8), 0)
    slots.store(torch.arange(8, 10), 1)
    items = [PrivateItem(row, 1, torch.tensor([20 + row])) for row in range(3)]
    shared = (SharedItem(torch.tensor([0, 1]), torch.arange(6)), SharedItem(torch.tensor([2]), torch.arange(6, 10)))
    placed = place_streams(items, SplitBatch(shared, tuple(items)), slots, RowPolicy("home"), 0, NONE)
    assert [int(rank) for rank in torch.cat(placed)] == [1, 1, 0]


def test_freed_pages_are_told_once() -> None:
    pages = NotedPagePool(8, 4)
    taken = pages.allocate(3)
    pages.free(taken[:2])
    assert pages.take_freed() == taken[:2]
    assert pages.take_freed() == []
    assert pages.available == 7


@pytest.mark.parametrize(
    ("values", "key"),
    [({"layout": "interleaved"}, "layout"), ({"deterministic": True}, "deterministic"), ({"backend": "sglang"}, "backend")],
)
def test_what_a_group_cannot_do_is_refused(values: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.{key}"):
        refuse_unfit(EngineConfig.model_validate(values))
