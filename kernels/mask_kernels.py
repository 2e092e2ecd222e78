"""Triton kernels of the interleaved layout: attention under the stream-id mask, and the merge of its key splits.

Letters as in `stream_mask`. `i_` program index, `o_` offsets, `m_` mask, `p_` pointers, `b_` loaded block; M packed rows, N keys.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def raw_scores(b_q, b_k, PARTS: tl.constexpr):
    """[M, N] products of `b_q` [M, D] and `b_k` [N, D]. With PARTS > 1 the head dim is summed in parts first: a chain of D fp32 additions
    rounds as often as it is long, and scores of 80 turn that into an error of their exponential."""
    if PARTS == 1:
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    else:
        D: tl.constexpr = b_q.shape[1] // PARTS
        b_q = tl.permute(tl.reshape(b_q, [b_q.shape[0], PARTS, D]), (1, 0, 2))  # [PARTS, M, D / PARTS]
        b_k = tl.permute(tl.reshape(b_k, [b_k.shape[0], PARTS, D]), (1, 2, 0))  # [PARTS, D / PARTS, N]
        b_s = tl.sum(tl.dot(b_q, b_k, input_precision="ieee"), 0)
    return b_s


@triton.jit
def accumulate(b_q, b_k, b_v, visible, scale_log2, m, l, acc, PARTS: tl.constexpr):
    """One key tile of the running softmax: rows [M], keys [N]; `visible` [M, N]; `m` is the largest raw score, so that the scale meets
    differences alone: rounded products near 80 would spoil the largest weights."""
    b_s = tl.where(visible, raw_scores(b_q, b_k, PARTS), float("-inf"))
    m_next = tl.maximum(m, tl.max(b_s, 1))
    m_safe = tl.where(m_next == float("-inf"), 0.0, m_next)
    b_p = tl.exp2((b_s - m_safe[:, None]) * scale_log2)
    rescale = tl.exp2((m - m_safe) * scale_log2)
    acc = tl.dot(b_p.to(b_v.dtype), b_v, acc * rescale[:, None], input_precision="ieee")  # [M, D]
    return m_next, l * rescale + tl.sum(b_p, 1), acc


@triton.jit(do_not_specialize=["tokens", "requests", "splits", "group"])
def attend_masked(
    q, k_new, v_new, k_cache, v_cache, kv_indices, kv_indptr, q_indptr, new_keys, q_sid, slot_sid,
    part, part_lse, stride_q, stride_kn, stride_vn, stride_kc, stride_vc, tokens, requests, splits, group, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    i_tile, i_h, i_s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1) * group
    # which request this row tile belongs to; one pseudo request behind the last holds the padding rows
    o_b = tl.arange(0, BLOCK_B)
    start_b = tl.load(q_indptr + o_b, mask=o_b <= requests, other=0)
    stop_b = tl.load(q_indptr + o_b + 1, mask=o_b < requests, other=0)
    stop_b = tl.where(o_b < requests, stop_b, tl.where(o_b == requests, tokens, start_b))
    tiles_b = ((stop_b - start_b) * group + BLOCK_M - 1) // BLOCK_M
    ends_b = tl.cumsum(tiles_b, 0)
    i_b = tl.sum((ends_b <= i_tile).to(tl.int32), 0)
    if i_b <= requests:
        mine = (o_b == i_b).to(tl.int32)
        row_start, row_stop = tl.sum(mine * start_b, 0), tl.sum(mine * stop_b, 0)
        first = (i_tile - tl.sum(mine * (ends_b - tiles_b), 0)) * BLOCK_M

        o_m = first + tl.arange(0, BLOCK_M)
        o_i = o_m // group  # token within the request
        o_t = row_start + o_i
        o_h = i_h * group + o_m % group
        m_m = o_t < row_stop
        o_d = tl.arange(0, BLOCK_D)
        m_d = o_d < D
        p_q = q + o_t.to(tl.int64)[:, None] * stride_q + o_h[:, None] * D + o_d[None, :]
        b_q = tl.load(p_q, mask=m_m[:, None] & m_d[None, :], other=0.0)  # [M, D]
        b_qsid = tl.load(q_sid + o_t, mask=m_m, other=-1)

        # this program's part of the keys: cached slots, then new tokens up to the tile's last row
        real = i_b < requests
        kv_start = tl.load(kv_indptr + i_b, mask=real, other=0)
        cached = tl.load(kv_indptr + i_b + 1, mask=real, other=0) - kv_start
        fresh = tl.load(new_keys + i_b, mask=real, other=0)
        chunk = tl.cdiv(tl.cdiv(cached + fresh, splits), BLOCK_N) * BLOCK_N
        low = i_s * chunk
        high = tl.minimum(low + chunk, cached + fresh)

        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        h_kv = i_h * D + o_d
        for n in range(low, tl.minimum(high, cached), BLOCK_N):
            o_n = n + tl.arange(0, BLOCK_N)
            m_n = o_n < tl.minimum(high, cached)
            slot = tl.load(kv_indices + kv_start + o_n, mask=m_n, other=0).to(tl.int64)
            b_sid = tl.load(slot_sid + slot, mask=m_n, other=-1)
            b_k = tl.load(k_cache + slot[:, None] * stride_kc + h_kv[None, :], mask=m_n[:, None] & m_d[None, :], other=0.0)
            b_v = tl.load(v_cache + slot[:, None] * stride_vc + h_kv[None, :], mask=m_n[:, None] & m_d[None, :], other=0.0)
            visible = ((b_sid[None, :] == -1) | (b_sid[None, :] == b_qsid[:, None])) & m_n[None, :]
            m, l, acc = accumulate(b_q, b_k, b_v, visible, scale_log2, m, l, acc, PARTS)

        last = tl.minimum((first + BLOCK_M - 1) // group + 1, fresh)
        new_high = tl.minimum(high - cached, last)
        for n in range(tl.maximum(low - cached, 0), new_high, BLOCK_N):
            o_n = n + tl.arange(0, BLOCK_N)
            m_n = o_n < new_high
            o_new = (row_start + o_n).to(tl.int64)
            b_sid = tl.load(q_sid + o_new, mask=m_n, other=-1)
            b_k = tl.load(k_new + o_new[:, None] * stride_kn + h_kv[None, :], mask=m_n[:, None] & m_d[None, :], other=0.0)
            b_v = tl.load(v_new + o_new[:, None] * stride_vn + h_kv[None, :], mask=m_n[:, None] & m_d[None, :], other=0.0)
            visible = ((b_sid[None, :] == -1) | (b_sid[None, :] == b_qsid[:, None])) & m_n[None, :] & (o_n[None, :] <= o_i[:, None])
            m, l, acc = accumulate(b_q, b_k, b_v, visible, scale_log2, m, l, acc, PARTS)

        seen = l > 0
        o = acc / tl.where(seen, l, 1.0)[:, None]
        b_lse = tl.where(seen, (m * scale_log2 + tl.log2(l)) * 0.6931471805599453, float("-inf"))
        row = (i_s * tokens + o_t).to(tl.int64) * heads + o_h
        tl.store(part_lse + row, b_lse, mask=m_m)
        tl.store(part + row[:, None] * D + o_d[None, :], o.to(part.dtype.element_ty), mask=m_m[:, None] & m_d[None, :])


@triton.jit(do_not_specialize=["tokens", "splits"])
def merge_splits(part, part_lse, out, lse, tokens, splits, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr):
    heads = tl.num_programs(1)
    row = tl.program_id(0).to(tl.int64) * heads + tl.program_id(1)
    o_s, o_d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    o_part = o_s.to(tl.int64) * tokens * heads + row
    b_lse = tl.load(part_lse + o_part, mask=o_s < splits, other=float("-inf"))  # [S]
    top = tl.max(b_lse, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(b_lse - top)
    total = tl.sum(weight, 0)
    used = (weight > 0)[:, None] & (o_d < D)[None, :]
    b_o = tl.load(part + o_part[:, None] * D + o_d[None, :], mask=used, other=0.0)  # [S, D]
    o = tl.sum(b_o * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * D + o_d, o.to(out.dtype.element_ty), mask=o_d < D)
    tl.store(lse + row, tl.where(total > 0, top + tl.log(total), float("-inf")))
