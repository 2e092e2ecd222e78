"""Triton kernel behind `vendor`: merges our private pass with the document passes of another library."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge_passes(
    private, private_lse, part, part_lse, place, out, lse, sp_e, sp_h, sl_e, sl_h, so_t, so_h,
    HQ: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, LEVELS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Program (t, h): log-sum-exp merge of `private` [T, HQ, D] fp32 and, per level, pair `place[t, level]` of `part` [E, HQ, D]."""
    i_row, i_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    top = tl.load(private_lse + i_row * HQ + i_head)
    for level in tl.static_range(LEVELS):
        pair = tl.load(place + i_row * LEVELS + level).to(tl.int64)
        top = tl.maximum(top, tl.load(part_lse + pair * sl_e + i_head * sl_h, mask=pair >= 0, other=float("-inf")))
    top = tl.where(top == float("-inf"), 0.0, top)
    b_w = tl.exp(tl.load(private_lse + i_row * HQ + i_head) - top)
    b_sum = b_w
    b_o = tl.load(private + (i_row * HQ + i_head) * D + o_d, mask=m_d, other=0.0) * b_w
    for level in tl.static_range(LEVELS):
        pair = tl.load(place + i_row * LEVELS + level).to(tl.int64)
        b_lse = tl.load(part_lse + pair * sl_e + i_head * sl_h, mask=pair >= 0, other=float("-inf"))
        b_w = tl.exp(b_lse - top)
        b_part = tl.load(part + pair * sp_e + i_head * sp_h + o_d, mask=m_d & (pair >= 0), other=0.0).to(tl.float32)
        b_o += b_part * b_w
        b_sum += b_w
    seen = b_sum > 0
    b_o = b_o / tl.where(seen, b_sum, 1.0)
    tl.store(out + i_row * so_t + i_head * so_h + o_d, b_o.to(out.dtype.element_ty), mask=m_d)
    if LSE:
        tl.store(lse + i_row * HQ + i_head, tl.where(seen, top + tl.log(b_sum), float("-inf")))
