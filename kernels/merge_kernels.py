"""The Triton kernel behind `merge`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def segment_of(segments, i_row, segment: tl.constexpr, SEGMENTS: tl.constexpr):
    """Splits, first partial and distance of two splits of one segment of a row."""
    at = segments + (i_row * SEGMENTS + segment) * 3
    return tl.load(at), tl.load(at + 1).to(tl.int64), tl.load(at + 2).to(tl.int64)


@triton.jit
def read_partials(
    part_o, part_lse, splits, first, stride, start, o_head, m_head,
    G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Splits `start` to `start + BS` of a segment: log-sum-exp [BH, BS] and output [BH, BS, BD]."""
    o_d = tl.arange(0, BD)
    o_split = start + tl.arange(0, BS)
    m_part = m_head[:, None] & (o_split < splits)[None, :]
    b_first = first + (o_head // G) * splits * stride + o_head % G  # [BH]
    o_part = b_first[:, None] + o_split[None, :] * stride  # [BH, BS]
    b_lse = tl.load(part_lse + o_part, mask=m_part, other=float("-inf"))
    m_o = m_part[:, :, None] & (o_d < D)[None, None, :]
    return b_lse, tl.load(part_o + o_part[:, :, None] * D + o_d[None, None, :], mask=m_o, other=0.0)


@triton.jit
def add_partials(b_m, b_l, b_acc, b_lse, b_o):
    """Maximum [BH], sum [BH] and sum of outputs [BH, BD] with the partials `b_lse` [BH, BS], `b_o` [BH, BS, BD] taken in."""
    b_new = tl.maximum(b_m, tl.max(b_lse, 1))
    b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_alpha = tl.exp(b_m - b_safe)
    b_w = tl.exp(b_lse - b_safe[:, None])  # [BH, BS]
    b_l = b_l * b_alpha + tl.sum(b_w, 1)
    return b_new, b_l, b_acc * b_alpha[:, None] + tl.sum(b_o * b_w[:, :, None], 1)


@triton.jit
def merge_partials(
    part_o, part_lse, segments, status, out, lse, so_t, so_h,
    SEGMENTS: tl.constexpr, G: tl.constexpr, HQ: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr, BS: tl.constexpr,
    LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (t, i) merges all partials of row t, BH query heads. A list that did not fit (`status`) yields NaN, not old numbers.

    A row's segments are few and short: what counts is how many loads wait for one another. The list is a step's, made before its layers,
    and is read while the partials are still computed; the first block of every segment is then asked for at once."""
    tl.static_assert(SEGMENTS == 4)
    i_row = tl.program_id(0).to(tl.int64)
    o_head = tl.program_id(1) * BH + tl.arange(0, BH)
    o_d = tl.arange(0, BD)
    m_head = o_head < HQ
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    splits0, first0, stride0 = segment_of(segments, i_row, 0, SEGMENTS)
    splits1, first1, stride1 = segment_of(segments, i_row, 1, SEGMENTS)
    splits2, first2, stride2 = segment_of(segments, i_row, 2, SEGMENTS)
    splits3, first3, stride3 = segment_of(segments, i_row, 3, SEGMENTS)
    bad = tl.load(status) != 0
    if PDL:
        tl.extra.cuda.gdc_wait()
    b_lse3, b_o3 = read_partials(part_o, part_lse, splits3, first3, stride3, 0, o_head, m_head, G, D, BD, BS)
    b_m = tl.full([BH], float("-inf"), dtype=tl.float32)
    b_l = tl.zeros([BH], dtype=tl.float32)
    b_acc = tl.zeros([BH, BD], dtype=tl.float32)
    for start in range(0, splits0, BS):
        b_lse, b_o = read_partials(part_o, part_lse, splits0, first0, stride0, start, o_head, m_head, G, D, BD, BS)
        b_m, b_l, b_acc = add_partials(b_m, b_l, b_acc, b_lse, b_o)
    for start in range(0, splits1, BS):
        b_lse, b_o = read_partials(part_o, part_lse, splits1, first1, stride1, start, o_head, m_head, G, D, BD, BS)
        b_m, b_l, b_acc = add_partials(b_m, b_l, b_acc, b_lse, b_o)
    for start in range(0, splits2, BS):
        b_lse, b_o = read_partials(part_o, part_lse, splits2, first2, stride2, start, o_head, m_head, G, D, BD, BS)
        b_m, b_l, b_acc = add_partials(b_m, b_l, b_acc, b_lse, b_o)
    b_m, b_l, b_acc = add_partials(b_m, b_l, b_acc, b_lse3, b_o3)
    for start in range(BS, splits3, BS):
        b_lse, b_o = read_partials(part_o, part_lse, splits3, first3, stride3, start, o_head, m_head, G, D, BD, BS)
        b_m, b_l, b_acc = add_partials(b_m, b_l, b_acc, b_lse, b_o)
    b_sum = tl.where(b_l > 0, b_l, 1.0)  # 0: the row saw no key
    b_o = b_acc / b_sum[:, None]
    b_total = tl.where(b_l > 0, b_m + tl.log(b_sum), float("-inf"))
    if bad:
        b_o = b_o + float("nan")
        b_total = b_total + float("nan")
    at = out + i_row * so_t + o_head[:, None] * so_h + o_d[None, :]
    tl.store(at, b_o.to(out.dtype.element_ty), mask=m_head[:, None] & (o_d < D)[None, :])
    if LSE:
        tl.store(lse + i_row * HQ + o_head, b_total, mask=m_head)
