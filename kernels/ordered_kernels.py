"""Triton kernel behind `ordered_product`: one program computes a tile of the output, its sum over K in one loop."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiply_tiles(
    x, weight, bias, out, m, n, k, stride_x, stride_wk, stride_wn, stride_out,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    o_m = tl.program_id(1).to(tl.int64) * BM + tl.arange(0, BM)
    o_n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    m_m, m_n = o_m < m, o_n < n
    p_x = x + o_m[:, None] * stride_x + o_k[None, :]
    p_w = weight + o_k[:, None] * stride_wk + o_n[None, :] * stride_wn
    b_sum = tl.zeros([BM, BN], dtype=tl.float32)
    for start in range(0, k, BK):
        m_k = start + o_k < k
        b_x = tl.load(p_x, mask=m_m[:, None] & m_k[None, :], other=0.0)
        b_w = tl.load(p_w, mask=m_k[:, None] & m_n[None, :], other=0.0)
        b_sum += tl.dot(b_x, b_w, input_precision=PRECISION)
        p_x += BK
        p_w += BK * stride_wk
    if BIASED:
        b_sum += tl.load(bias + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    tl.store(out + o_m[:, None] * stride_out + o_n[None, :], b_sum.to(out.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])
