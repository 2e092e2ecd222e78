"""Runs the interleaved kernel over a world: takes the new tokens' keys from the world as a step would have them from its projections."""

from __future__ import annotations

import torch
from torch import Tensor

from askmany.kernels.layout import MaskedBatch
from askmany.kernels.stream_mask import MaskPlan, MaskTile, plan_mask, stream_mask
from tests.helpers.attention_cases import World


def fresh_keys(world: World) -> tuple[Tensor, Tensor]:
    """`k_new`, `v_new` [T, HKV, D]: the keys of the step's own rows, NaN for rows without one."""
    shape = (world.q.shape[0], *world.k_cache.shape[1:])
    k_new = torch.full(shape, float("nan"), dtype=world.k_cache.dtype, device=world.q.device)
    v_new = k_new.clone()
    own = torch.nonzero(world.row_keys >= 0)[:, 0]
    k_new[own], v_new[own] = world.k[world.row_keys[own]], world.v[world.row_keys[own]]
    return k_new, v_new


def run_masked(
    world: World,
    batch: MaskedBatch,
    splits: int,
    tile: MaskTile | None = None,
    plan: MaskPlan | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of `stream_mask`; the new tokens' slots are poisoned first, so reading them there would show."""
    fresh = fresh_keys(world) if k_new is None or v_new is None else (k_new, v_new)
    plan = plan_mask(batch, splits) if plan is None else plan
    k_cache, v_cache = world.k_cache.clone(), world.v_cache.clone()
    for item in batch.items:
        own = item.slots[item.slots.shape[0] - item.row_count :]
        k_cache[own], v_cache[own] = float("nan"), float("nan")
    return stream_mask(world.q, *fresh, k_cache, v_cache, batch.slot_sid, plan, world.case.scale, tile)
