"""Storing K and V: values land in their slots and nowhere else, padding is skipped, bad slots are named."""

from __future__ import annotations

import pytest
import torch

from askmany.kernels.store import check_slots, launch_store, launch_store_ids, store, store_ids

ROWS, HEADS, DIM, SLOTS = 7, 3, 80, 23


def _step(dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    """k, v (views of one fused projection, as models have them), NaN caches and slots with two padding rows."""
    fused = torch.randn(ROWS, 2, HEADS, DIM, device=device).to(dtype)
    fused[0, 0, 0, 0] = float("nan")
    caches = torch.full((2, SLOTS, HEADS, DIM), float("nan"), dtype=dtype, device=device)
    slots = torch.randperm(SLOTS)[:ROWS].to(device)
    slots[[2, 5]] = -1
    return fused[:, 0], fused[:, 1], caches[0], caches[1], slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("slot_type", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("write", [store, launch_store], ids=["store", "kernel"])
def test_values_land_in_their_slots_alone(write: object, dtype: torch.dtype, slot_type: torch.dtype, device: str) -> None:
    k, v, k_cache, v_cache, slots = _step(dtype, device)
    write(k, v, k_cache, v_cache, slots.to(slot_type))  # type: ignore[operator]
    kept = slots >= 0
    for cache, values in ((k_cache, k), (v_cache, v)):
        assert torch.equal(cache[slots[kept]].view(torch.uint8), values[kept].contiguous().view(torch.uint8))
        others = torch.ones(SLOTS, dtype=torch.bool, device=device)
        others[slots[kept]] = False
        assert bool(cache[others].isnan().all())


@pytest.mark.parametrize("write", [store_ids, launch_store_ids], ids=["store_ids", "kernel"])
def test_ids_land_in_their_slots_alone(write: object, device: str) -> None:
    slots = torch.tensor([4, -1, 0, 9], device=device)
    held = torch.full((12,), 77, dtype=torch.int32, device=device)
    write(torch.tensor([1, 2, -1, 3], device=device), held, slots)  # type: ignore[operator]
    assert held.tolist() == [-1, 77, 77, 77, 1, 77, 77, 77, 77, 3, 77, 77]


def test_no_rows_are_fine(device: str) -> None:
    k, v, k_cache, v_cache, slots = _step(torch.float32, device)
    store(k[:0], v[:0], k_cache, v_cache, slots[:0])
    assert bool(k_cache.isnan().all())


def test_padding_alone_writes_nothing(device: str) -> None:
    k, v, k_cache, v_cache, slots = _step(torch.float32, device)
    store(k, v, k_cache, v_cache, torch.full_like(slots, -1))
    assert bool(k_cache.isnan().all())
    assert bool(v_cache.isnan().all())


@pytest.mark.parametrize(
    ("slots", "message"),
    [([0, 3, 3, -1], "slot 3 is written by more than one row"), ([0, 8], "slot 8 is outside the pool of 8"), ([-2, 1], "slot -2")],
)
def test_bad_slots_are_named(slots: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_slots(torch.tensor(slots), 8)


def test_good_slots_pass() -> None:
    check_slots(torch.tensor([-1, 5, -1, 0]), 6)
    check_slots(torch.tensor([-1]), 6)


def test_shapes_that_do_not_fit_are_refused(device: str) -> None:
    k, v, k_cache, v_cache, slots = _step(torch.float32, device)
    with pytest.raises(ValueError, match="do not fit"):
        store(k[:, :2], v[:, :2], k_cache, v_cache, slots)
    with pytest.raises(ValueError, match="one entry for each of 7 rows"):
        store(k, v, k_cache, v_cache, slots[:3])
    with pytest.raises(ValueError, match="k_cache: heads and head dim must be contiguous"):
        store(k, v, k_cache.transpose(1, 2).contiguous().transpose(1, 2), v_cache, slots)
