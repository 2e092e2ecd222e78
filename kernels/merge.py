"""Merge the partial attention results of a step into one output a row: the fp32 log-sum-exp merge.

The order of the partials of a row is fixed (prefix levels from the first, private keys last; splits in order), whatever its siblings do.
"""

from __future__ import annotations

import triton
from torch import Tensor

from askmany.kernels.merge_kernels import merge_partials
from askmany.kernels.plan import WorkPlan
from askmany.kernels.tables import LEVELS

PINNED_TILE = (4, 8)  # deterministic chunking: how partials are summed must not depend on the rows of the step
TILES = ((1792, (4, 8)), (4096, (8, 4)))
MOST = (8, 2)


def merge(part_o: Tensor, part_lse: Tensor, plan: WorkPlan, out: Tensor, lse: Tensor | None, overlap: bool) -> None:
    """Fill `out` [T, HQ, D] and, if given, `lse` [T, HQ] from the partials that the work list of `plan` describes.

    `overlap`: launch while the kernel before still runs (programmatic dependent launch, sm_90 and later).
    """
    shape = plan.shape
    options = {"launch_pdl": True} if overlap else {}
    heads, splits = PINNED_TILE if plan.chunking.deterministic else merge_tile(out.shape[0] * shape.q_heads)
    merge_partials[(out.shape[0], -(-shape.q_heads // heads))](
        part_o, part_lse, plan.segments, plan.status, out, part_lse if lse is None else lse, out.stride(0), out.stride(1),
        SEGMENTS=LEVELS + 1, G=shape.group, HQ=shape.q_heads, D=shape.head_dim, BD=triton.next_power_of_2(shape.head_dim),
        BH=heads, BS=splits, LSE=lse is not None, PDL=overlap, num_warps=heads, **options,
    )  # fmt: skip


def merge_tile(outputs: int) -> tuple[int, int]:
    """Query heads and splits a program reads at once, for `outputs` rows times heads (measured on an H200); a warp sums one head.

    Few outputs mean many splits each; many outputs mean few splits, and programs count that should all fit beside the attention's.
    """
    return next((tile for most, tile in TILES if outputs <= most), MOST)
