"""Writes a step's keys and values into their slots: the only writer of the KV caches.

Rows whose slot is -1 are padding of a captured batch and are skipped. Slots must be distinct: two rows in one slot would race.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from askmany.kernels.store_kernels import store_row_ids, store_rows


def store(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Copy `k`, `v` [T, HKV, D] to `k_cache`, `v_cache` [S, HKV, D] at `slots` [T] int32 or int64; -1 skips a row.

    Bits are copied as they are (NaN included) when the dtypes agree, converted otherwise. Slots must be below S and distinct
    (`check_slots` verifies that where a synchronisation is affordable). On CUDA: one launch, no synchronisation, capturable.
    Raises ValueError on shapes that do not fit.
    """
    check_shapes(k, v, k_cache, v_cache, slots)
    if k.shape[0] == 0:
        return
    if k.is_cuda:
        launch_store(k, v, k_cache, v_cache, slots, overlaps(k.device))
    else:
        _store_torch(k, v, k_cache, v_cache, slots)


def store_ids(ids: Tensor, slot_ids: Tensor, slots: Tensor) -> None:
    """The same for one integer a row: `slot_ids[slots] = ids` [T], skipping slot -1. Marks the stream of interleaved slots."""
    if ids.shape != slots.shape or slot_ids.ndim != 1:
        raise ValueError(f"ids {tuple(ids.shape)} and slots {tuple(slots.shape)} must agree and slot_ids be one-dimensional")
    if ids.shape[0] == 0:
        return
    if ids.is_cuda:
        launch_store_ids(ids, slot_ids, slots)
    else:
        keep = slots >= 0
        slot_ids[slots[keep].long()] = ids[keep].to(slot_ids.dtype)


def overlaps(device: torch.device) -> bool:
    """Whether a CUDA device has programmatic dependent launch."""
    return torch.cuda.get_device_capability(device)[0] >= 9


def check_slots(slots: Tensor, slot_count: int) -> None:
    """Raise ValueError unless every slot is -1 or a distinct index below `slot_count`. Synchronises with the device."""
    used = slots[slots != -1]
    if used.numel() == 0:
        return
    low, high = int(used.min()), int(used.max())
    if low < -1 or high >= slot_count:
        raise ValueError(f"slot {low if low < -1 else high} is outside the pool of {slot_count} slots")
    distinct, counts = torch.unique(used, return_counts=True)
    if distinct.numel() != used.numel():
        raise ValueError(f"slot {int(distinct[counts > 1][0])} is written by more than one row of the step")


def launch_store(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, overlap: bool = False) -> None:
    """The Triton path of `store`, on its own so that the interpreter can run it on a CPU. `overlap`: launch while the kernel before still
    runs, and let the next one be launched while this one does (programmatic dependent launch, sm_90 and later)."""
    rows, heads, dim = k.shape
    block = 1024
    grid = (rows, triton.cdiv(heads * dim, block), 2)
    strides = (k.stride(0), v.stride(0), k_cache.stride(0), v_cache.stride(0))
    options = {"launch_pdl": True} if overlap else {}
    store_rows[grid](k, v, k_cache, v_cache, slots, *strides, heads * dim, BLOCK=block, PDL=overlap, num_warps=4, **options)


def launch_store_ids(ids: Tensor, slot_ids: Tensor, slots: Tensor) -> None:
    """The Triton path of `store_ids`."""
    block = 256
    store_row_ids[(triton.cdiv(ids.shape[0], block),)](ids, slot_ids, slots, ids.shape[0], BLOCK=block)


def _store_torch(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    keep = slots >= 0
    where = slots[keep].long()
    k_cache[where] = k[keep].to(k_cache.dtype)
    v_cache[where] = v[keep].to(v_cache.dtype)


def check_shapes(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Raise ValueError unless `store` can take them."""
    if k.shape != v.shape or k_cache.shape != v_cache.shape or k.ndim != 3 or k.shape[1:] != k_cache.shape[1:]:
        shapes = [tuple(t.shape) for t in (k, v, k_cache, v_cache)]
        raise ValueError(f"k, v [T, HKV, D] and caches [S, HKV, D] do not fit: {shapes}")
    if slots.shape != k.shape[:1]:
        raise ValueError(f"slots {tuple(slots.shape)} must hold one entry for each of {k.shape[0]} rows")
    for name, tensor in (("k", k), ("v", v), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_dense(name, tensor)


def check_dense(name: str, rows: Tensor) -> None:
    """Raise ValueError unless a row's heads lie one behind another in `rows` [T, H, D]."""
    if rows.stride(2) != 1 or (rows.shape[1] > 1 and rows.stride(1) != rows.shape[2]):
        raise ValueError(f"{name}: heads and head dim must be contiguous, strides are {rows.stride()}")
