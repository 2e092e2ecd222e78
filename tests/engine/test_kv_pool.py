"""The KV pool: sizes, stores by slice and by index, poison."""

from __future__ import annotations

from pathlib import Path

import torch

from askmany.engine.kv_pool import KVPool, KVShape

SHAPE = KVShape(layers=2, kv_heads=3, head_dim=4, dtype=torch.float32)


def make_pool(slots: int = 10) -> KVPool:
    return KVPool(SHAPE, slots, torch.device("cpu"), poisoned=True)


def test_bytes_count_keys_and_values_of_every_layer() -> None:
    assert SHAPE.token_bytes == 2 * 2 * 3 * 4 * 4
    assert make_pool(10).bytes == 10 * SHAPE.token_bytes == sum(t.nbytes for t in (*make_pool().k, *make_pool().v))
    assert KVShape(1, 1, 8, torch.bfloat16).token_bytes == 32


def test_a_store_fills_the_named_slots_of_one_layer_alone() -> None:
    pool = make_pool()
    k, v = torch.randn(3, 3, 4), torch.randn(3, 3, 4)
    pool.store(0, torch.tensor([7, 2, 4]), k, v)
    pool.store(1, slice(5, 8), v, k)
    assert torch.equal(pool.k[0][[7, 2, 4]], k)
    assert torch.equal(pool.v[0][[7, 2, 4]], v)
    assert torch.equal(pool.k[1][5:8], v)
    assert torch.isnan(pool.k[0][[0, 1, 3, 5, 6, 8, 9]]).all()
    assert torch.isnan(pool.v[1][[0, 1, 2, 3, 4, 8, 9]]).all()


def test_poison_reaches_every_layer() -> None:
    pool = make_pool()
    for layer in range(2):
        pool.store(layer, slice(0, 10), torch.ones(10, 3, 4), torch.ones(10, 3, 4))
    pool.poison(torch.tensor([3, 8]))
    for cache in (*pool.k, *pool.v):
        assert torch.isnan(cache[[3, 8]]).all()
        assert torch.isfinite(cache[[0, 1, 2, 4, 5, 6, 7, 9]]).all()


def test_untouched_memory_costs_nothing() -> None:
    """4 GB of pool, of which one slot in one layer is touched."""
    before = resident_bytes()
    pool = KVPool(KVShape(4, 8, 128, torch.float32), 2**17, torch.device("cpu"))
    assert pool.bytes == 1 << 32
    pool.store(3, slice(2**17 - 1, 2**17), torch.ones(1, 8, 128), torch.ones(1, 8, 128))
    assert float(pool.k[3][-1].sum()) == 8 * 128
    assert resident_bytes() - before < 50_000_000


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS:"))
