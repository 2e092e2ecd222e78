"""The Triton kernel behind `merge_into`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge_rows(
    out, lse, part, part_lse, rows, row_start, sp_t, sp_h, sl_t, sl_h,
    HQ: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr, FIRST: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    """Program (r, i) merges row r of the part, BH heads, into its row of `out` and `lse`."""
    i_part = tl.program_id(0).to(tl.int64)
    o_head = tl.program_id(1) * BH + tl.arange(0, BH)
    o_d = tl.arange(0, BD)
    m_head = o_head < HQ
    i_row = tl.load(rows + i_part).to(tl.int64) if INDEXED else row_start + i_part
    if i_row >= 0:
        m_o = m_head[:, None] & (o_d < D)[None, :]
        at = out + (i_row * HQ + o_head)[:, None] * D + o_d[None, :]
        at_lse = lse + i_row * HQ + o_head
        b_part = tl.load(part + i_part * sp_t + o_head[:, None] * sp_h + o_d[None, :], mask=m_o, other=0.0).to(tl.float32)
        b_fresh = tl.load(part_lse + i_part * sl_t + o_head * sl_h, mask=m_head, other=float("-inf"))
        if FIRST:
            tl.store(at, b_part, mask=m_o)
            tl.store(at_lse, b_fresh, mask=m_head)
        else:
            b_before = tl.load(at_lse, mask=m_head, other=float("-inf"))
            b_out = tl.load(at, mask=m_o, other=0.0)
            b_top = tl.maximum(b_before, b_fresh)
            b_safe = tl.where(b_top == float("-inf"), 0.0, b_top)
            b_kept = tl.exp(b_before - b_safe)
            b_added = tl.exp(b_fresh - b_safe)
            b_weight = b_kept + b_added
            b_share = tl.where(b_weight == 0, 1.0, b_weight)
            b_sum = b_out * (b_kept / b_share)[:, None] + b_part * (b_added / b_share)[:, None]
            tl.store(at, b_sum, mask=m_o)
            tl.store(at_lse, tl.where(b_weight == 0, float("-inf"), b_safe + tl.log(b_share)), mask=m_head)
