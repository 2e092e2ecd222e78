"""The Triton kernel behind `merge`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge_partials(
    part_o, part_lse, segments, status, out, lse, so_t, so_h,
    SEGMENTS: tl.constexpr, G: tl.constexpr, HQ: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr,
    LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (t, h) merges all partials of query head h of row t. A work list that did not fit (`status`) yields NaN, not old numbers."""
    i_row = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    b_m = float("-inf")
    b_l = 0.0
    b_acc = tl.zeros([BD], dtype=tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for segment in tl.static_range(SEGMENTS):
        at = segments + (i_row * SEGMENTS + segment) * 3
        splits = tl.load(at)
        stride = tl.load(at + 2).to(tl.int64)
        first = tl.load(at + 1).to(tl.int64) + (i_head // G) * splits * stride + i_head % G
        for start in range(0, splits, BS):
            o_split = start + tl.arange(0, BS)
            m_split = o_split < splits
            o_part = first + o_split * stride  # [BS]
            b_lse = tl.load(part_lse + o_part, mask=m_split, other=float("-inf"))  # [BS]
            b_o = tl.load(part_o + o_part[:, None] * D + o_d[None, :], mask=m_split[:, None] & m_d[None, :], other=0.0)  # [BS, BD]
            b_new = tl.maximum(b_m, tl.max(b_lse, 0))
            b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_alpha = tl.exp(b_m - b_safe)
            b_w = tl.exp(b_lse - b_safe)  # [BS]
            b_l = b_l * b_alpha + tl.sum(b_w, 0)
            b_acc = b_acc * b_alpha + tl.sum(b_o * b_w[:, None], 0)
            b_m = b_new
    b_sum = tl.where(b_l > 0, b_l, 1.0)  # 0: the row saw no key
    b_o = b_acc / b_sum
    b_total = tl.where(b_l > 0, b_m + tl.log(b_sum), float("-inf"))
    if tl.load(status) != 0:
        b_o = b_o + float("nan")
        b_total = b_total + float("nan")
    tl.store(out + i_row * so_t + i_head * so_h + o_d, b_o.to(out.dtype.element_ty), mask=m_d)
    if LSE:
        tl.store(lse + i_row * HQ + i_head, b_total)
