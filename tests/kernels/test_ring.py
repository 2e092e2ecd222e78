"""Attention over several processes against one process in fp64: every way, ragged batches, bits, messages and bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from askmany.kernels import ring
from askmany.kernels.oracle import lse_error, relative_error
from askmany.kernels.ring_plan import key_blocks
from tests.helpers.gloo import GlooRanks, gloo_ranks
from tests.helpers.ring_worlds import WAYS, RingCase, RingWorld, rank_results, rank_rules

CASES = {
    "one-even": RingCase(((0, 64),)),
    "ragged-mha": RingCase(((0, 37), (0, 5), (0, 130)), heads=(3, 3), seed=1),
    "cached-gqa": RingCase(((50, 23), (7, 90), (300, 1)), heads=(6, 2), seed=2),
    "one-token": RingCase(((0, 1),), seed=3),
    "one-token-cached": RingCase(((129, 1),), heads=(8, 1), seed=4),
    "fewer-tokens-than-ranks": RingCase(((0, 3), (2, 1)), seed=5),
    "an-empty-sequence": RingCase(((40, 0), (0, 17)), seed=6),
    "shared-document": RingCase(((5, 9), (0, 31)), document=143, heads=(4, 1), seed=7),
    "decode-rotated": RingCase(tuple((n, 1) for n in (60, 3, 17, 90, 0)), document=70, rotated=3, seed=8),
}


@pytest.fixture(scope="module", params=[2, 4, 8], ids=lambda size: f"N{size}")
def ranks(request: pytest.FixtureRequest) -> Iterator[GlooRanks]:
    with gloo_ranks(request.param) as started:
        yield started


def whole(world: RingWorld, parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The ranks' rows in the order of the batch."""
    out, lse = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    return out[world.rows.gathered], lse[world.rows.gathered]


@pytest.mark.parametrize("name", CASES)
def test_every_way_equals_one_process(name: str, ranks: GlooRanks) -> None:
    case = CASES[name]
    world = RingWorld(case, ranks.size)
    want, want_lse = world.truth()
    results = ranks.run(rank_results, case)
    for way in WAYS:
        out, lse = whole(world, [result[way][:2] for result in results])
        assert not bool(out.isnan().any()), way
        assert relative_error(out, want) < 1e-5, way
        assert lse_error(lse, want_lse) < 1e-5, way
        assert all(result[way][3] for result in results), f"{way}: a second run gave other bits"
        for result in results:
            assert result[way][2] == expected_traffic(world, way), way


def expected_traffic(world: RingWorld, way: str) -> dict[str, tuple[int, int]]:
    """The formulas: N - 1 messages of one block or of the queries; home, the fp32 output, log-sum-exp and ids of other ranks' rows."""
    (q_heads, kv_heads), dim, others, places = world.case.heads, world.case.head_dim, world.ranks - 1, world.rows.places
    block = ring.pass_kv_bytes(key_blocks(world.batch, world.slots, world.ranks).places, kv_heads, dim, 4)
    match way:
        case "pass_kv":
            return {"send": (others, others * block)}
        case "gather_kv":
            return {"all_gather": (others, others * block)}
        case "pass_q":
            home = others * places * (q_heads * (dim + 1) + 1) * 4
            return {"send": (others, others * places * (q_heads * dim * 4 + 4)), "all_to_all": (others, home)}
    return {"all_gather": (others, others * places * q_heads * dim * 4), "all_to_all": (others, others * places * q_heads * (dim + 1) * 4)}


def test_only_the_longest_block_decides_the_message() -> None:
    """Places of key blocks: the longest rank's, so that a message wastes at most the ranks' imbalance."""
    world = RingWorld(CASES["cached-gqa"], 4)
    blocks = key_blocks(world.batch, world.slots, 4)
    lengths = [len(source) for source in blocks.sources]
    assert sum(lengths) == world.slot_count
    assert blocks.places == max(lengths)
    assert max(lengths) - min(lengths) <= 2 * len(world.case.sequences)


def test_a_start_up_measurement_gives_all_ranks_the_same_rules(ranks: GlooRanks) -> None:
    """The fit is made of the slowest rank's times, so that no two ranks ever choose differently."""
    cells = [(16, 0), (64, 256), (8, 500), (64, 0)]
    rules = ranks.run(rank_rules, cells)
    assert all(other == rules[0] for other in rules)
    assert rules[0].link is not None
    assert rules[0].link.flops > 0
    assert rules[0].link.bytes_per_s > 0
    assert rules[0].choose(32, 100).rule == "fit"
