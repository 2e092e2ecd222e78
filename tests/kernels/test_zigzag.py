"""Zigzag sharding: every token once, the same work everywhere, and the way back."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from askmany.kernels.zigzag import causal_pairs, chunk_bounds, rank_chunks, rotate, shard

RANKS = st.integers(1, 8)
LENGTHS = st.lists(st.integers(0, 70), min_size=1, max_size=5)


@given(st.integers(0, 300), RANKS)
def test_chunks_cover_the_tokens_in_order(tokens: int, ranks: int) -> None:
    bounds = chunk_bounds(tokens, ranks)
    assert len(bounds) == 2 * ranks
    assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]
    assert bounds[-1][1] == tokens
    sizes = [stop - start for start, stop in bounds]
    assert max(sizes) - min(sizes) <= 1
    held = [sizes[i] + sizes[2 * ranks - 1 - i] for i in range(ranks)]
    assert max(held) - min(held) <= 1


@given(LENGTHS, RANKS, st.data())
def test_every_row_has_one_place_and_finds_back(lengths: list[int], ranks: int, data: st.DataObject) -> None:
    shifts = data.draw(st.lists(st.integers(0, 9), min_size=len(lengths), max_size=len(lengths)))
    sharding = shard(lengths, ranks, shifts)
    assert sharding.places == sum(-(-length // ranks) for length in lengths)
    rows = torch.cat([sharding.rows(rank) for rank in range(ranks)])
    assert rows[sharding.gathered].tolist() == list(range(sum(lengths)))
    assert int((rows >= 0).sum()) == sum(lengths)
    assert sum(sharding.counts()) == sum(lengths)
    start = 0
    for length, shift in zip(lengths, shifts, strict=True):
        for rank in range(ranks):
            for first, last in rank_chunks(length, ranks, rank, shift):
                assert sharding.rank[start + first : start + last].tolist() == [rank] * (last - first)
                places = sharding.place[start + first : start + last].tolist()
                assert places == list(range(places[0], places[0] + len(places))) if places else True
        start += length


@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize("cached", [0, 100_001])
def test_work_and_keys_are_balanced_at_128k(ranks: int, cached: int) -> None:
    """Causal pairs (attention FLOPs are 4 * HQ * D of each) and KV slots per rank within 2 %."""
    tokens = 131_072 + 5
    pairs = [causal_pairs([tokens], [cached], ranks, rank) for rank in range(ranks)]
    assert sum(pairs) == tokens * cached + tokens * (tokens + 1) // 2
    assert max(pairs) / (sum(pairs) / ranks) < 1.02
    assert max(pairs) / min(pairs) < 1.02
    held = shard([tokens, cached], ranks).counts()
    assert max(held) - min(held) <= 2


def test_a_plain_split_would_not_be_balanced() -> None:
    """What the 2 % above would catch: one chunk a rank."""
    tokens, ranks = 131_072, 4
    cut = [tokens * i // ranks for i in range(ranks + 1)]
    pairs = [(b * (b + 1) - a * (a + 1)) // 2 for a, b in itertools.pairwise(cut)]
    assert max(pairs) / min(pairs) > 6


@given(st.integers(0, 40), RANKS, st.integers(0, 100))
def test_decoded_tokens_grow_evenly(count: int, ranks: int, step: int) -> None:
    """After any number of steps, the tokens that ranks hold of a sequence differ by one at most; so do those of one step."""
    sharding = rotate(count, ranks, step)
    assert sharding.places == -(-count // ranks)
    held = sharding.counts()
    assert max(held) - min(held) <= 1
    grown = torch.zeros(count, ranks, dtype=torch.int64)
    for at in range(step + 1):
        grown[torch.arange(count), rotate(count, ranks, at).rank] += 1
    if count:
        assert int((grown.max(dim=1).values - grown.min(dim=1).values).max()) <= 1


def test_shifts_spread_odd_tokens() -> None:
    """Turns of 2N + 1 tokens, each with the next shift: no rank gets all of the odd ones."""
    held = torch.zeros(4, dtype=torch.int64)
    for turn in range(8):
        held += torch.tensor(shard([9], 4, [turn]).counts())
    assert held.tolist() == [18, 18, 18, 18]


def test_senseless_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one rank"):
        shard([3], 0)
    with pytest.raises(ValueError, match="-1 tokens"):
        shard([-1], 2)
