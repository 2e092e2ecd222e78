"""Rotary position embedding (RoFormer, arXiv 2104.09864, equation 34) and storing in one: what stands between a layer's projections and its
attention, in one launch.

Letters: T rows, S slots, HQ and HKV heads, D head dim, R rotated dims (the first of D), P positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from askmany.kernels.rotary_kernels import rotate_rows
from askmany.kernels.store import check_dense, check_shapes, overlaps, store


@dataclass(frozen=True, slots=True)
class Rotary:
    """How a model rotates. `table` [P, R]: cosines of R / 2 angles, then their sines. Element j turns with j + R / 2, or 2 j with 2 j + 1
    where pairs are `interleaved`."""

    table: Tensor
    interleaved: bool = False

    @property
    def width(self) -> int:
        """R."""
        return self.table.shape[1]


def rotate(x: Tensor, positions: Tensor, rotary: Rotary) -> Tensor:
    """`x` [T, H, D] with every head turned to its row's position [T]; computed in the wider of fp32 and `x`'s dtype, returned in `x`'s."""
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = rotary.table[positions].to(wide)[:, None].chunk(2, dim=-1)  # [T, 1, R / 2]
    turned, kept = x[..., : rotary.width].to(wide), x[..., rotary.width :]
    if rotary.interleaved:
        one, other = turned[..., ::2], turned[..., 1::2]
        pairs = torch.stack([one * cos - other * sin, other * cos + one * sin], dim=-1).flatten(-2)
    else:
        one, other = turned.chunk(2, dim=-1)
        pairs = torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)
    return torch.cat([pairs.to(x.dtype), kept], dim=-1)


def rotate_and_store(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, rotary: Rotary, k_cache: Tensor, v_cache: Tensor, slots: Tensor
) -> None:
    """Rotate `q` [T, HQ, D] and `k` [T, HKV, D] in place, then `store` `k` and `v` at `slots`: a row of slot -1 is rotated, not stored.

    `positions` [T] below P. On CUDA: one launch, no synchronisation, capturable. Raises ValueError on shapes that do not fit.
    """
    check_shapes(k, v, k_cache, v_cache, slots)
    _check(q, k, positions, rotary)
    if q.shape[0] == 0:
        return
    if q.is_cuda:
        launch_rotate_and_store(q, k, v, positions, rotary, k_cache, v_cache, slots, overlaps(q.device))
        return
    q.copy_(rotate(q, positions, rotary))
    k.copy_(rotate(k, positions, rotary))
    store(k, v, k_cache, v_cache, slots)


def launch_rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    rotary: Rotary,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    overlap: bool = False,
) -> None:
    """The Triton path of `rotate_and_store`, on its own so that the interpreter can run it on a CPU. `overlap`: as in `launch_store`."""
    rows, q_heads, dim = q.shape
    kv_heads, half = k.shape[1], rotary.width // 2
    heads = 4  # a program
    blocks = triton.cdiv(q_heads, heads) + 2 * triton.cdiv(kv_heads, heads)
    strides = (q.stride(0), k.stride(0), v.stride(0), k_cache.stride(0), v_cache.stride(0), rotary.table.stride(0))
    options = {"launch_pdl": True} if overlap else {}
    rotate_rows[(rows, blocks)](
        q, k, v, positions, rotary.table, k_cache, v_cache, slots, *strides,
        HQ=q_heads, HKV=kv_heads, D=dim, HALF=half, BD=triton.next_power_of_2(dim), BHALF=triton.next_power_of_2(half), BH=heads,
        INTERLEAVED=rotary.interleaved, PDL=overlap, num_warps=4, **options,
    )  # fmt: skip


def _check(q: Tensor, k: Tensor, positions: Tensor, rotary: Rotary) -> None:
    if q.ndim != 3 or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2] or positions.shape != q.shape[:1]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and positions {tuple(positions.shape)} do not fit")
    if rotary.table.ndim != 2 or rotary.width % 2 or not 0 < rotary.width <= q.shape[2] or rotary.table.stride(1) != 1:
        raise ValueError(f"a rotary table {tuple(rotary.table.shape)} does not fit heads of {q.shape[2]} elements")
    check_dense("q", q)
