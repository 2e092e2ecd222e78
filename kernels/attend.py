"""Launches the kernel that works through a work list: the plain Triton one, or the warp-specialised one on Hopper."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from askmany.kernels.plan import WorkPlan


def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, plan: WorkPlan, part_o: Tensor, part_lse: Tensor, overlap: bool
) -> None:
    """Fill the partials `part_o` [capacity, D] and `part_lse` [capacity] from `q` [T, HQ, D] and the caches [S, HKV, D]."""
    if plan.tiles.groups:
        _attend_hopper(q, k_cache, v_cache, scale, plan, part_o, part_lse)
    else:
        _attend_plain(q, k_cache, v_cache, scale, plan, part_o, part_lse, overlap)


def _attend_plain(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, plan: WorkPlan, part_o: Tensor, part_lse: Tensor, overlap: bool
) -> None:
    from askmany.kernels.attend_kernels import attend_work

    shape, tiles = plan.shape, plan.tiles
    block = [min(tiles.keys, shape.page_size), triton.next_power_of_2(shape.head_dim)]
    k_read, v_read = (_descriptor(c, block) if tiles.descriptors else c for c in (k_cache, v_cache))
    attend_work[(min(plan.slots, plan.capacity.items),)](
        q, k_cache, v_cache, k_read, v_read, part_o, part_lse, plan.tables.page_ids, plan.row_list, plan.items, plan.item_count,
        q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1), scale / math.log(2),
        HKV=shape.kv_heads, G=shape.group, D=shape.head_dim, BD=block[1],
        BM=tiles.rows, BN=tiles.keys, STAGES=tiles.stages, TMA=tiles.descriptors,
        HB1=tiles.single_heads, BM1=tiles.single_rows, BN1=tiles.single_keys, STAGES1=tiles.single_stages,
        PAGE=shape.page_size, PRECISION=_precision(q), PDL=overlap, num_warps=tiles.warps, **_options(plan, overlap),
    )  # fmt: skip


def _attend_hopper(q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, plan: WorkPlan, part_o: Tensor, part_lse: Tensor) -> None:
    from askmany.kernels.hopper_kernels import attend_work_hopper, page_descriptor

    shape, tiles = plan.shape, plan.tiles
    reads = [
        page_descriptor(cache, [min(keys, shape.page_size), shape.head_dim])
        for keys in (tiles.keys, tiles.keys // tiles.single_heads)
        for cache in (k_cache, v_cache)
    ]
    attend_work_hopper[(min(plan.slots, plan.capacity.items),)](
        q, *reads, part_o, part_lse, plan.tables.page_ids, plan.row_list, plan.items, plan.item_count,
        q.stride(0), q.stride(1), scale / math.log(2),
        G=shape.group, D=shape.head_dim, HKV=shape.kv_heads, BN=tiles.keys, HB=tiles.single_heads, PAGE=shape.page_size,
        STAGES=tiles.stages, WG=tiles.groups, EARLY=plan.settled_nodes, num_warps=4, **_options(plan, True),
    )  # fmt: skip


def _descriptor(cache: Tensor, block: list[int]) -> object:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(cache, [cache.shape[0], cache.shape[1] * cache.shape[2]], [cache.stride(0), 1], block)


def _options(plan: WorkPlan, overlap: bool) -> dict[str, int]:
    options = {"launch_pdl": True} if overlap else {}
    return options | ({"maxnreg": plan.tiles.registers} if plan.tiles.registers else {})


def _precision(q: Tensor) -> str:
    """How `product` multiplies: exact fp32 products for fp32, the only choice for 16-bit operands, widened in the interpreter."""
    if q.dtype == torch.float32:
        return "ieee"
    return "tf32" if q.is_cuda else "widened"
