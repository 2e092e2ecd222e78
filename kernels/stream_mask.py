"""Interleaved layout on the device: Parallel Prompting's extend attention as published (arXiv 2611.15130), kept as mode and baseline.

One request = a document and its streams, whose tokens share one KV row in the order they were made. A key is visible iff causal and
(`sid_k == -1` or `sid_k == sid_q`); the two id tensors are read inside the kernel, no dense mask exists. Two stages: cached slots, read
through `kv_indices`, then the step's new tokens, read from the projections themselves. Unlike the published kernel it splits the keys
over programs (a merge follows), packs the query heads of a KV head into one tile, and overlaps its loads.

Knows nothing of requests, pages or the split layout. Letters as in `reference.py`; B requests, N cached keys of all requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from askmany.kernels.layout import MaskedBatch
from askmany.kernels.mask_kernels import attend_masked, merge_splits


@dataclass(frozen=True, slots=True)
class MaskTile:
    """Shape of one program: packed rows (token, query head of the group) by keys, and how Triton schedules it."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class MaskPlan:
    """A `MaskedBatch` as device tensors of fixed shape, so that a captured graph can be replayed at other lengths (see `update`).

    Request b owns rows `q_indptr[b] : q_indptr[b + 1]`, of which the first `new_keys[b]` are also keys (all of them, or 0 for padding
    rows), and cached slots `kv_indices[kv_indptr[b] : kv_indptr[b + 1]]`. Rows behind the last request are padding: 0 and -inf.
    """

    q_indptr: Tensor  # [B + 1] int32
    new_keys: Tensor  # [B] int32
    kv_indptr: Tensor  # [B + 1] int32
    kv_indices: Tensor  # [capacity >= N] int32
    q_sid: Tensor  # [T] int32
    splits: int  # parts into which each row tile's keys are cut

    def update(self, other: MaskPlan) -> None:
        """Take over the values of `other`, whose batch may be smaller but not larger. Raises ValueError when it does not fit."""
        for name in ("q_indptr", "new_keys", "kv_indptr", "kv_indices", "q_sid"):
            held, wanted = getattr(self, name).shape[0], getattr(other, name).shape[0]
            if wanted > held:
                raise ValueError(f"plan holds {held} entries of {name}, {wanted} are needed")
        _copy_padded(self.q_indptr, other.q_indptr, None)
        _copy_padded(self.new_keys, other.new_keys, 0)
        _copy_padded(self.kv_indptr, other.kv_indptr, None)
        _copy_padded(self.kv_indices, other.kv_indices, 0)
        _copy_padded(self.q_sid, other.q_sid, -1)


def plan_mask(batch: MaskedBatch, splits: int, *, request_capacity: int = 0, key_capacity: int = 0) -> MaskPlan:
    """Lay `batch` out for `stream_mask`, on the device of its tensors. Items must lie in row order without overlap.

    Capacities larger than the batch leave room for `MaskPlan.update`. Raises ValueError on overlapping or unordered items.
    """
    bounds, counts, parts = _rows_in_order(batch)
    missing = request_capacity - len(counts)
    bounds, counts, parts = bounds + [bounds[-1]] * missing, counts + [0] * missing, parts + [parts[0][:0]] * missing
    lengths = torch.tensor([0] + [int(p.shape[0]) for p in parts])
    indices = torch.cat(parts).to(torch.int32)
    if key_capacity > indices.shape[0]:
        indices = torch.cat([indices, indices.new_zeros(key_capacity - indices.shape[0])])
    device = batch.q_sid.device
    return MaskPlan(
        q_indptr=torch.tensor(bounds, dtype=torch.int32, device=device),
        new_keys=torch.tensor(counts, dtype=torch.int32, device=device),
        kv_indptr=lengths.cumsum(0).to(torch.int32).to(device),
        kv_indices=indices.to(device),
        q_sid=batch.q_sid.to(torch.int32),
        splits=splits,
    )


def choose_splits(rows: int, group: int, kv_heads: int, keys: int, tile: MaskTile, processors: int) -> int:
    """How many parts to cut the keys into so that two programs a multiprocessor have work, each at least four key tiles long."""
    programs = -(-rows * group // tile.rows) * kv_heads
    return max(1, min(round(2 * processors / programs), keys // (4 * tile.keys), 128))


def choose_tile(rows: int, group: int, head_dim: int, dtype: torch.dtype) -> MaskTile:
    """Tile for `rows` step tokens with `group` query heads a KV head: a small query tile for decode steps, a wide one for questions."""
    packed = rows * group
    if dtype == torch.float32:
        return MaskTile(16 if packed <= 16 else 32, 32 if head_dim <= 128 else 16, 4, 2)
    if head_dim > 128:
        return MaskTile(16 if packed <= 16 else 64, 32, 4, 2)
    if packed <= 16:
        return MaskTile(16, 64, 4, 4)
    if packed <= 32:
        return MaskTile(32, 64, 4, 4)
    return MaskTile(64, 64, 4, 3) if packed <= 512 else MaskTile(128, 64, 8, 3)


def stream_mask(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_sid: Tensor,
    plan: MaskPlan,
    scale: float,
    tile: MaskTile | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of `q` [T, HQ, D] over cached and new keys under the stream-id mask; `k_new`, `v_new` [T, HKV, D], caches [S, HKV, D].

    Returns output [T, HQ, D] in q's dtype and natural log-sum-exp [T, HQ] fp32; rows that see nothing are 0 and -inf. Products of fp32
    inputs are IEEE. No synchronisation; capturable, since every shape depends on the plan's capacities alone. Raises ValueError on
    shapes that do not fit.
    """
    _check_shapes(q, k_new, v_new, k_cache, v_cache, slot_sid, plan)
    if not scale > 0:
        raise ValueError(f"scale must be positive, not {scale}")
    tokens, heads, dim = q.shape
    group = heads // k_cache.shape[1]
    tile = tile or choose_tile(tokens, group, dim, q.dtype)
    requests, splits = plan.new_keys.shape[0], plan.splits
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    part = out[None] if splits == 1 else torch.empty(splits, *q.shape, dtype=torch.float32, device=q.device)
    part_lse = lse[None] if splits == 1 else torch.empty(splits, tokens, heads, dtype=torch.float32, device=q.device)
    if tokens == 0:
        return out, lse
    block_d = triton.next_power_of_2(dim)
    grid = (triton.cdiv(tokens * group, tile.rows) + requests, k_cache.shape[1], splits)
    attend_masked[grid](
        q, k_new, v_new, k_cache, v_cache, plan.kv_indices, plan.kv_indptr, plan.q_indptr, plan.new_keys, plan.q_sid, slot_sid,
        part, part_lse, q.stride(0), k_new.stride(0), v_new.stride(0), k_cache.stride(0), v_cache.stride(0),
        tokens, requests, splits, group, scale * math.log2(math.e),
        D=dim, BLOCK_D=block_d, BLOCK_M=tile.rows, BLOCK_N=tile.keys,
        PARTS=max(1, block_d // 32) if q.dtype == torch.float32 else 1,
        BLOCK_B=max(16, triton.next_power_of_2(requests + 1)), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        merge_splits[(tokens, heads)](
            part, part_lse, out, lse, tokens, splits, D=dim, BLOCK_D=block_d, BLOCK_S=triton.next_power_of_2(splits), num_warps=4,
        )  # fmt: skip
    return out, lse


def _copy_padded(into: Tensor, values: Tensor, fill: int | None) -> None:
    """Copy `values` to the front of `into` and fill the rest with `fill`, or with the last value when that is None."""
    count = values.shape[0]
    into[:count].copy_(values)
    if fill is None:
        into[count:].copy_(values[-1:].expand(into.shape[0] - count))
    else:
        into[count:].fill_(fill)


def _rows_in_order(batch: MaskedBatch) -> tuple[list[int], list[int], list[Tensor]]:
    """Row bounds, new-key counts and cached slots of the requests; rows between items become requests without keys."""
    bounds = [0]
    counts: list[int] = []
    parts: list[Tensor] = []
    nothing = torch.empty(0, dtype=torch.int64, device=batch.q_sid.device)
    for item in batch.items:
        if item.row_start < bounds[-1]:
            raise ValueError(f"masked item at row {item.row_start} overlaps or precedes the one that ends at row {bounds[-1]}")
        if item.row_start > bounds[-1]:
            bounds, counts, parts = [*bounds, item.row_start], [*counts, 0], [*parts, nothing]
        bounds, counts = [*bounds, item.row_start + item.row_count], [*counts, item.row_count]
        parts = [*parts, item.slots[: item.slots.shape[0] - item.row_count]]
    return (bounds, counts, parts) if parts else ([0, 0], [0], [nothing])


def _check_shapes(q: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, slot_sid: Tensor, plan: MaskPlan) -> None:
    heads, kv_heads = q.shape[1], k_cache.shape[1]
    if heads % kv_heads or q.shape[2] != k_cache.shape[2] or k_cache.shape != v_cache.shape:
        raise ValueError(f"q {tuple(q.shape)} does not fit caches {tuple(k_cache.shape)}, {tuple(v_cache.shape)}")
    if k_new.shape != v_new.shape or k_new.shape != (q.shape[0], *k_cache.shape[1:]):
        raise ValueError(f"new keys {tuple(k_new.shape)}, values {tuple(v_new.shape)} do not fit q and caches")
    if plan.q_sid.shape[0] != q.shape[0] or slot_sid.shape[0] != k_cache.shape[0]:
        raise ValueError(
            f"q_sid {plan.q_sid.shape[0]} / slot_sid {slot_sid.shape[0]} do not fit {q.shape[0]} rows / {k_cache.shape[0]} slots"
        )
    for name, tensor in (("q", q), ("k_new", k_new), ("v_new", v_new), ("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.stride(2) != 1 or (tensor.shape[1] > 1 and tensor.stride(1) != tensor.shape[2]):
            raise ValueError(f"{name}: heads and head dim must be contiguous, strides are {tensor.stride()}")
