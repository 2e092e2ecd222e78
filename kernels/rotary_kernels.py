"""The Triton kernel behind `rotary`: a program turns or copies some heads of one row."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def turn_heads(
    x, to, table, position, keep, stride_table, first, heads,
    D: tl.constexpr, HALF: tl.constexpr, BD: tl.constexpr, BHALF: tl.constexpr, BH: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Turn heads `first` to `first + BH` of a row `x` [heads, D] in place; where `keep`, write them to `to` [heads, D] as well."""
    o_head = first + tl.arange(0, BH)
    o_half = tl.arange(0, BHALF)
    m_half = o_half < HALF
    m_pair = (o_head < heads)[:, None] & m_half[None, :]
    b_cos = tl.load(table + position * stride_table + o_half, mask=m_half, other=0.0).to(tl.float32)  # [BHALF]
    b_sin = tl.load(table + position * stride_table + HALF + o_half, mask=m_half, other=0.0).to(tl.float32)
    o_one = o_half * 2 if INTERLEAVED else o_half
    o_other = o_one + (1 if INTERLEAVED else HALF)
    at_one = o_head[:, None] * D + o_one[None, :]  # [BH, BHALF]
    at_other = o_head[:, None] * D + o_other[None, :]
    b_one = tl.load(x + at_one, mask=m_pair, other=0.0).to(tl.float32)
    b_other = tl.load(x + at_other, mask=m_pair, other=0.0).to(tl.float32)
    b_first = (b_one * b_cos[None, :] - b_other * b_sin[None, :]).to(x.dtype.element_ty)
    b_second = (b_other * b_cos[None, :] + b_one * b_sin[None, :]).to(x.dtype.element_ty)
    tl.store(x + at_one, b_first, mask=m_pair)
    tl.store(x + at_other, b_second, mask=m_pair)
    if keep:
        tl.store(to + at_one, b_first.to(to.dtype.element_ty), mask=m_pair)
        tl.store(to + at_other, b_second.to(to.dtype.element_ty), mask=m_pair)
        if D > 2 * HALF:
            o_d = tl.arange(0, BD)
            m_rest = (o_head < heads)[:, None] & ((o_d >= 2 * HALF) & (o_d < D))[None, :]
            at = o_head[:, None] * D + o_d[None, :]
            tl.store(to + at, tl.load(x + at, mask=m_rest, other=0.0).to(to.dtype.element_ty), mask=m_rest)


@triton.jit
def rotate_rows(
    q, k, v, positions, table, k_cache, v_cache, slots, stride_q, stride_k, stride_v, stride_kc, stride_vc, stride_table,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BD: tl.constexpr, BHALF: tl.constexpr, BH: tl.constexpr,
    INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (t, i): row t, BH heads of q, then of k, then of v."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    Q_BLOCKS: tl.constexpr = (HQ + BH - 1) // BH
    K_BLOCKS: tl.constexpr = (HKV + BH - 1) // BH
    i_row, i_block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + i_row).to(tl.int64)
    slot = tl.load(slots + i_row).to(tl.int64)
    if i_block < Q_BLOCKS:
        row = q + i_row * stride_q
        turn_heads(row, row, table, position, False, stride_table, i_block * BH, HQ, D, HALF, BD, BHALF, BH, INTERLEAVED)
    elif i_block < Q_BLOCKS + K_BLOCKS:
        first = (i_block - Q_BLOCKS) * BH
        to = k_cache + slot * stride_kc
        turn_heads(k + i_row * stride_k, to, table, position, slot >= 0, stride_table, first, HKV, D, HALF, BD, BHALF, BH, INTERLEAVED)
    elif slot >= 0:
        o_head = (i_block - Q_BLOCKS - K_BLOCKS) * BH + tl.arange(0, BH)
        o_d = tl.arange(0, BD)
        m_v = (o_head < HKV)[:, None] & (o_d < D)[None, :]
        at = o_head[:, None] * D + o_d[None, :]
        b_v = tl.load(v + i_row * stride_v + at, mask=m_v, other=0.0)
        tl.store(v_cache + slot * stride_vc + at, b_v.to(v_cache.dtype.element_ty), mask=m_v)
