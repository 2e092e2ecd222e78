"""Rotating and storing in one against fp64: both kinds of pairs, partial widths, padding, views of one projection."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from askmany.kernels.oracle import relative_error
from askmany.kernels.rotary import Rotary, launch_rotate_and_store, rotate, rotate_and_store

ROWS, SLOTS, POSITIONS = 7, 23, 64
WRITES = {"rotate_and_store": rotate_and_store, "kernel": launch_rotate_and_store}
BOUNDS = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


def table(width: int, device: str) -> Tensor:
    angles = torch.arange(POSITIONS)[:, None] / 10 ** (4 * torch.arange(0, width, 2) / width)[None]
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(device)


def oracle(x: Tensor, positions: Tensor, rotary: Rotary) -> Tensor:
    """In fp64, as a product of complex numbers."""
    half, wide = rotary.width // 2, x.double()
    angles = torch.complex(*rotary.table[positions].double().split(half, dim=-1))[:, None]  # [T, 1, R / 2]
    turned, out = wide[..., : rotary.width], wide.clone()
    one, other = (turned[..., ::2], turned[..., 1::2]) if rotary.interleaved else turned.split(half, dim=-1)
    found = torch.complex(one, other) * angles
    pairs = torch.stack([found.real, found.imag], dim=-1).flatten(-2) if rotary.interleaved else torch.cat([found.real, found.imag], -1)
    out[..., : rotary.width] = pairs
    return out


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    ("heads", "dim", "width", "interleaved"),
    [((7, 1), 16, 16, False), ((6, 2), 80, 80, False), ((5, 5), 24, 12, False), ((9, 3), 64, 64, True), ((4, 2), 20, 6, True)],
)
def test_rows_are_turned_and_stored(
    heads: tuple[int, int], dim: int, width: int, interleaved: bool, dtype: torch.dtype, write: object, device: str
) -> None:
    torch.manual_seed(dim)
    q_heads, kv_heads = heads
    rotary = Rotary(table(width, device), interleaved)
    fused = torch.randn(ROWS, (q_heads + 2 * kv_heads) * dim, device=device).to(dtype)  # one projection, as models have it
    q, k, v = (x.unflatten(1, (-1, dim)) for x in fused.split([q_heads * dim, kv_heads * dim, kv_heads * dim], dim=1))
    before = [x.clone() for x in (q, k, v)]
    positions = torch.randint(POSITIONS, (ROWS,), device=device)
    slots = torch.randperm(SLOTS)[:ROWS].to(device)
    slots[[2, 5]] = -1
    k_cache, v_cache = (torch.full((SLOTS, kv_heads, dim), float("nan"), dtype=dtype, device=device) for _ in range(2))
    write(q, k, v, positions, rotary, k_cache, v_cache, slots)  # type: ignore[operator]
    for got, held in zip((q, k), before, strict=False):
        assert relative_error(got, oracle(held, positions, rotary)) < BOUNDS[dtype]
    kept = slots >= 0
    for cache, values in ((k_cache, k), (v_cache, before[2])):
        assert torch.equal(cache[slots[kept]], values[kept])
        others = torch.ones(SLOTS, dtype=torch.bool, device=device)
        others[slots[kept]] = False
        assert bool(cache[others].isnan().all())


@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_distances_alone(interleaved: bool, width: int, device: str) -> None:
    """What rotation is for: the product of a query and a key that lie equally far apart is the same everywhere."""
    rotary = Rotary(table(width, device).double(), interleaved)
    q, k = torch.randn(2, 1, 1, 8, dtype=torch.float64, device=device)
    scores = [
        (rotate(q, torch.tensor([at + 9], device=device), rotary) * rotate(k, torch.tensor([at], device=device), rotary)).sum()
        for at in (0, 3, 40)
    ]
    torch.testing.assert_close(scores[1:], [scores[0]] * 2, rtol=1e-6, atol=1e-6)  # the table is made in fp32


def test_no_rows_are_fine_and_misfits_are_refused(device: str) -> None:
    q, k, cache = torch.zeros(3, 4, 8, device=device), torch.zeros(3, 2, 8, device=device), torch.zeros(5, 2, 8, device=device)
    at, slots = torch.zeros(3, dtype=torch.int64, device=device), torch.zeros(3, dtype=torch.int64, device=device)
    rotary = Rotary(table(8, device))
    rotate_and_store(q[:0], k[:0], k[:0], at[:0], rotary, cache, cache.clone(), slots[:0])
    for wrong, message in [
        ((q[:2], k, k, at, rotary), "do not fit"),
        ((q, k, k, at[:2], rotary), "do not fit"),
        ((q, k, k, at, Rotary(table(12, device))), "a rotary table"),
        ((q.transpose(0, 1).contiguous().transpose(0, 1), k, k, at, rotary), "contiguous"),
    ]:
        with pytest.raises(ValueError, match=message):
            rotate_and_store(*wrong, cache, cache.clone(), slots)
