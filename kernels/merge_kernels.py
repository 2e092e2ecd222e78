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
def read_block(
    part_o, part_lse, segment, start, o_head, m_head,
    G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Splits `start` to `start + BS` of a segment: log-sum-exp [BH, BS] and output [BH, BS, BD]."""
    splits, first, stride = segment
    o_d = tl.arange(0, BD)
    o_split = start + tl.arange(0, BS)
    m_part = m_head[:, None] & (o_split < splits)[None, :]
    b_first = first + (o_head // G) * splits * stride + o_head % G  # [BH]
    o_part = b_first[:, None] + o_split[None, :] * stride  # [BH, BS]
    b_lse = tl.load(part_lse + o_part, mask=m_part, other=float("-inf"))
    m_o = m_part[:, :, None] & (o_d < D)[None, None, :]
    return b_lse, tl.load(part_o + o_part[:, :, None] * D + o_d[None, None, :], mask=m_o, other=0.0)


@triton.jit
def later(condition, one, other):
    """Of two segments, `other` where the condition holds."""
    return tl.where(condition, other[0], one[0]), tl.where(condition, other[1], one[1]), tl.where(condition, other[2], one[2])


@triton.jit
def merge_partials(
    part_o, part_lse, segments, status, out, lse, so_t, so_h,
    SEGMENTS: tl.constexpr, G: tl.constexpr, HQ: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr, BS: tl.constexpr,
    LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (t, i) merges all partials of row t, BH query heads. A list that did not fit (`status`) yields NaN, not old numbers.

    What counts is how many loads wait for one another. The list is a step's, made before its layers, and is read while the partials are
    still computed; they are then walked in blocks of BS splits of one segment, each asked for before the one ahead of it is added."""
    tl.static_assert(SEGMENTS == 4)
    i_row = tl.program_id(0).to(tl.int64)
    o_head = tl.program_id(1) * BH + tl.arange(0, BH)
    o_d = tl.arange(0, BD)
    m_head = o_head < HQ
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    segment0 = segment_of(segments, i_row, 0, SEGMENTS)
    segment1 = segment_of(segments, i_row, 1, SEGMENTS)
    segment2 = segment_of(segments, i_row, 2, SEGMENTS)
    segment3 = segment_of(segments, i_row, 3, SEGMENTS)
    begin1 = tl.cdiv(segment0[0], BS)  # the segment's first block
    begin2 = begin1 + tl.cdiv(segment1[0], BS)
    begin3 = begin2 + tl.cdiv(segment2[0], BS)
    blocks = begin3 + tl.cdiv(segment3[0], BS)
    bad = tl.load(status) != 0
    b_m = tl.full([BH], float("-inf"), dtype=tl.float32)
    b_l = tl.zeros([BH], dtype=tl.float32)
    b_acc = tl.zeros([BH, BD], dtype=tl.float32)
    b_lse = tl.full([BH, BS], float("-inf"), dtype=tl.float32)
    b_o = tl.zeros([BH, BS, BD], dtype=tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for i_block in range(blocks + 1):  # adds the block before, nothing the first time
        segment = later(i_block >= begin3, later(i_block >= begin2, later(i_block >= begin1, segment0, segment1), segment2), segment3)
        begin = tl.where(i_block >= begin3, begin3, tl.where(i_block >= begin2, begin2, tl.where(i_block >= begin1, begin1, 0)))
        b_next_lse, b_next_o = read_block(part_o, part_lse, segment, (i_block - begin) * BS, o_head, m_head, G, D, BD, BS)
        b_new = tl.maximum(b_m, tl.max(b_lse, 1))
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_alpha = tl.exp(b_m - b_safe)
        b_w = tl.exp(b_lse - b_safe[:, None])  # [BH, BS]
        b_l = b_l * b_alpha + tl.sum(b_w, 1)
        b_acc = b_acc * b_alpha[:, None] + tl.sum(b_o * b_w[:, :, None], 1)  # [BH, BD]
        b_m = b_new
        b_lse = b_next_lse
        b_o = b_next_o
    b_sum = tl.where(b_l > 0, b_l, 1.0)  # 0: the row saw no key
    b_out = b_acc / b_sum[:, None]
    b_total = tl.where(b_l > 0, b_m + tl.log(b_sum), float("-inf"))
    if bad:
        b_out = b_out + float("nan")
        b_total = b_total + float("nan")
    at = out + i_row * so_t + o_head[:, None] * so_h + o_d[None, :]
    tl.store(at, b_out.to(out.dtype.element_ty), mask=m_head[:, None] & (o_d < D)[None, :])
    if LSE:
        tl.store(lse + i_row * HQ + o_head, b_total, mask=m_head)
