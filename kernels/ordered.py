"""A matrix product of fixed order: every element of the output is one sum over K, in one loop, by tiles that no row count changes.

Slower than a library's, and needed only where a library's product depends on where a row lies. Letters: M rows, K wide, N out.
"""

from __future__ import annotations

import triton
from torch import Tensor

from askmany.kernels.ordered_kernels import multiply_tiles

TILE = (64, 64, 64)  # of M, N, K; the same for every shape


def ordered_product(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Fill `out` [M, N] with `rows` [M, K] times `weight` [K, N] (of any strides), plus `bias` [N]; sums are fp32. One launch, capturable.

    Raises ValueError on shapes that do not fit, or rows or outputs that are not dense.
    """
    (m, k), n = rows.shape, weight.shape[1]
    if weight.shape[0] != k or out.shape != (m, n) or (bias is not None and bias.shape != (n,)):
        raise ValueError(f"rows {tuple(rows.shape)}, weight {tuple(weight.shape)} and out {tuple(out.shape)} do not fit")
    if rows.stride(1) != 1 or out.stride(1) != 1 or (bias is not None and bias.stride(0) != 1):
        raise ValueError("rows, bias and out must be dense in their last dimension")
    if m == 0:
        return
    bm, bn, bk = TILE
    multiply_tiles[(triton.cdiv(n, bn), triton.cdiv(m, bm))](
        rows, weight, rows if bias is None else bias, out, m, n, k, rows.stride(0), weight.stride(0), weight.stride(1), out.stride(0),
        BM=bm, BN=bn, BK=bk, BIASED=bias is not None, PRECISION="ieee", num_warps=4, num_stages=3,
    )  # fmt: skip
