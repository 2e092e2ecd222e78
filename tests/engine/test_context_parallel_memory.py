"""What a rank sets aside covers the messages as the ring counts them."""

from __future__ import annotations

import pytest
import torch

from askmany.engine.context_parallel_memory import block_bytes, message_bytes
from askmany.engine.kv_pool import KVShape
from askmany.kernels import ring
from askmany.kernels.ring_choice import MOST_GATHERED_BYTES

KV = KVShape(layers=5, kv_heads=3, head_dim=64, dtype=torch.bfloat16)


@pytest.mark.parametrize(("ranks", "blocks"), [(1, 0), (2, 1), (3, 2), (8, 2)])
def test_blocks_in_flight_are_those_of_the_ring(ranks: int, blocks: int) -> None:
    """The ring makes as many buffers as there are hops, two at most."""
    assert block_bytes(KV, ranks) * 1000 == blocks * ring.pass_kv_bytes(1000, KV.kv_heads, KV.head_dim, KV.dtype.itemsize)


@pytest.mark.parametrize("ranks", [2, 4, 7])
def test_partial_results_fit_both_ways(ranks: int) -> None:
    """Zigzag places may be one more a rank than an even share."""
    places = -(-16_384 // ranks)
    both_ways = 2 * ranks * ring.home_bytes(places, q_heads=9, head_dim=64, with_ids=True)
    assert message_bytes(9, 64, places * ranks) == MOST_GATHERED_BYTES + both_ways
