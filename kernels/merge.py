"""Merge the partial attention results of a step into one output a row: the fp32 log-sum-exp merge.

The order of the partials of a row is fixed (prefix levels from the first, private keys last; splits in order), whatever its siblings do.
"""

from __future__ import annotations

import triton
from torch import Tensor

from askmany.kernels.merge_kernels import merge_partials
from askmany.kernels.plan import WorkPlan
from askmany.kernels.tables import LEVELS

PINNED = (4, 8, 4)  # deterministic chunking: how partials are summed must not depend on the rows of the step


def merge(part_o: Tensor, part_lse: Tensor, plan: WorkPlan, out: Tensor, lse: Tensor | None, overlap: bool) -> None:
    """Fill `out` [T, HQ, D] and, if given, `lse` [T, HQ] from the partials that the work list of `plan` describes.

    `overlap`: launch while the kernel before still runs (programmatic dependent launch, sm_90 and later).
    """
    shape = plan.shape
    options = {"launch_pdl": True} if overlap else {}
    rows = out.shape[0]
    tile = PINNED if plan.chunking.deterministic else merge_tile(rows * shape.q_heads, _most_splits(plan, rows))
    heads, splits, warps = tile
    width = triton.next_power_of_2(shape.head_dim)
    merge_partials[(rows, -(-shape.q_heads // heads))](
        part_o, part_lse, plan.segments, plan.status, out, part_lse if lse is None else lse, out.stride(0), out.stride(1),
        SEGMENTS=LEVELS + 1, G=shape.group, HQ=shape.q_heads, D=shape.head_dim, BD=width,
        BH=heads, BS=max(1, splits * 128 // max(width, 128)), LSE=lse is not None, PDL=overlap, num_warps=warps, **options,
    )  # fmt: skip


def merge_tile(outputs: int, splits: int) -> tuple[int, int, int]:
    """Query heads and splits a program reads at once, and its warps, for `outputs` rows times heads of about `splits` splits each.

    Measured on an H200 at D = 128. Many splits are read in few goes; few leave a block half empty. There a warp sums one head, so that none
    waits for another, but where there are so many outputs that starting their programs is what takes the time.
    """
    if splits >= 64:
        return (1, 16, 1) if outputs <= 128 else (2, 16, 2)
    if splits >= 16:
        return 4, 8, 4
    if splits >= 8:
        return (4, 4, 4) if outputs <= 1024 else (8, 4, 8)
    return (4, 2, 4) if outputs <= 4096 else (16, 2, 4)


def _most_splits(plan: WorkPlan, rows: int) -> int:
    """Into how many parts a long document is cut that all rows read: as many as there are programs for."""
    row_tiles = -(-rows * plan.shape.group // plan.tiles.rows)
    return plan.slots // (plan.shape.kv_heads * row_tiles)
