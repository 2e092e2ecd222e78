"""The Triton kernel behind `merge`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge_partials(
    part_o, part_lse, segments, status, out, lse, so_t, so_h,
    SEGMENTS: tl.constexpr, G: tl.constexpr, HQ: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr, BS: tl.constexpr,
    LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (t, i) merges all partials of row t, BH query heads. A list that did not fit (`status`) yields NaN, not old numbers."""
    i_row = tl.program_id(0).to(tl.int64)
    o_head = tl.program_id(1) * BH + tl.arange(0, BH)
    o_d = tl.arange(0, BD)
    m_head = o_head < HQ
    m_d = o_d < D
    b_m = tl.full([BH], float("-inf"), dtype=tl.float32)
    b_l = tl.zeros([BH], dtype=tl.float32)
    b_acc = tl.zeros([BH, BD], dtype=tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for segment in tl.static_range(SEGMENTS):
        at = segments + (i_row * SEGMENTS + segment) * 3
        splits = tl.load(at)
        stride = tl.load(at + 2).to(tl.int64)
        b_first = tl.load(at + 1).to(tl.int64) + (o_head // G) * splits * stride + o_head % G  # [BH]
        for start in range(0, splits, BS):
            o_split = start + tl.arange(0, BS)
            m_part = m_head[:, None] & (o_split < splits)[None, :]
            o_part = b_first[:, None] + o_split[None, :] * stride  # [BH, BS]
            b_lse = tl.load(part_lse + o_part, mask=m_part, other=float("-inf"))  # [BH, BS]
            m_o = m_part[:, :, None] & m_d[None, None, :]
            b_o = tl.load(part_o + o_part[:, :, None] * D + o_d[None, None, :], mask=m_o, other=0.0)  # [BH, BS, BD]
            b_new = tl.maximum(b_m, tl.max(b_lse, 1))
            b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_alpha = tl.exp(b_m - b_safe)
            b_w = tl.exp(b_lse - b_safe[:, None])  # [BH, BS]
            b_l = b_l * b_alpha + tl.sum(b_w, 1)
            b_acc = b_acc * b_alpha[:, None] + tl.sum(b_o * b_w[:, :, None], 1)  # [BH, BD]
            b_m = b_new
    b_sum = tl.where(b_l > 0, b_l, 1.0)  # 0: the row saw no key
    b_o = b_acc / b_sum[:, None]
    b_total = tl.where(b_l > 0, b_m + tl.log(b_sum), float("-inf"))
    if tl.load(status) != 0:
        b_o = b_o + float("nan")
        b_total = b_total + float("nan")
    at = out + i_row * so_t + o_head[:, None] * so_h + o_d[None, :]
    tl.store(at, b_o.to(out.dtype.element_ty), mask=m_head[:, None] & m_d[None, :])
    if LSE:
        tl.store(lse + i_row * HQ + o_head, b_total, mask=m_head)
