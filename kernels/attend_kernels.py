"""The Triton kernel that works through a work list: attention of a tile of rows over a run of paged keys, one partial result an item.

One launch does every kind of item: a node's keys for a tile of all its rows (one KV head), or keys of one stream for its own rows
(`HB` KV heads at once, whose keys are neighbours in memory: with few query rows a head the matrix units would idle anyway, and longer
reads and fewer items are worth more). Softmax runs in base 2 and fp32; partials are the normalised output in fp32 and the natural
log-sum-exp (-inf and 0 for a row that saw no key), as in split-KV decoding (Flash-Decoding) and cascade attention (Hydragen,
arXiv 2402.05099).

Letters: T rows, S slots, HQ and HKV heads, G = HQ // HKV, D head dim, BD its power-of-two pad, BM rows a tile, BN key rows a tile,
TN = BN // HB tokens a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from askmany.kernels.plan_kernels import FIELDS, SHARED

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tile_slots(page_ids, table, o_token, m_token, PAGE: tl.constexpr, MASKED: tl.constexpr):
    """[BN] int64 slots of tokens `o_token` of the page list that starts at `table`."""
    at = page_ids + table + o_token // PAGE
    b_page = tl.load(at, mask=m_token, other=0) if MASKED else tl.load(at)
    return b_page.to(tl.int64) * PAGE + o_token % PAGE


@triton.jit
def load_rows(base, b_at, m_row, D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr):
    """[BN, BD] the vectors at offsets `b_at` [BN]; zeros beyond D and, if MASKED, where `m_row` is false."""
    o_d = tl.arange(0, BD)
    at = base + b_at[:, None] + o_d[None, :]
    if MASKED:
        return tl.load(at, mask=m_row[:, None] & (o_d[None, :] < D), other=0.0)
    if BD != D:
        return tl.load(at, mask=o_d[None, :] < D, other=0.0)
    return tl.load(at)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a @ b in fp32. "widened": operands go to fp32 first, because the interpreter multiplies the bit patterns of bf16."""
    if PRECISION == "widened":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def raw_scores(b_q, b_k, PRECISION: tl.constexpr):
    """b_q [BM, BD] times b_k [BN, BD], unscaled. fp32 sums the head dim in parts of 32 first: a chain of BD additions rounds as often as it
    is long, and at scores of 80 that is an error of their exponential."""
    if PRECISION == "ieee" and b_q.shape[1] > 32:
        PARTS: tl.constexpr = b_q.shape[1] // 32
        b_q = tl.permute(tl.reshape(b_q, [b_q.shape[0], PARTS, 32]), (1, 0, 2))
        b_k = tl.permute(tl.reshape(b_k, [b_k.shape[0], PARTS, 32]), (1, 2, 0))
        b_s = tl.sum(tl.dot(b_q, b_k, input_precision="ieee"), 0)
    else:
        b_s = product(b_q, tl.trans(b_k), PRECISION)
    return b_s


@triton.jit
def softmax_step(b_s, b_v, b_m, b_l, b_acc, scale, GUARD: tl.constexpr, PRECISION: tl.constexpr):
    """Fold raw scores [BM, BN] (hidden ones -inf) and values [BN, BD] into the running raw maximum, sum and output. The scale meets
    differences alone: rounded products near 80 would spoil the largest weights."""
    b_new = tl.maximum(b_m, tl.max(b_s, 1))  # [BM]
    b_safe = tl.where(b_new == float("-inf"), 0.0, b_new) if GUARD else b_new
    b_p = tl.math.exp2((b_s - b_safe[:, None]) * scale)  # [BM, BN]
    b_alpha = tl.math.exp2((b_m - b_safe) * scale)
    b_l = b_l * b_alpha + tl.sum(b_p, 1)
    b_acc = b_acc * b_alpha[:, None] + product(b_p.to(b_v.dtype), b_v, PRECISION)  # [BM, BD]
    return b_new, b_l, b_acc


@triton.jit
def softmax_pair(b_q, b_m, b_l, b_acc, b_k, b_k2, b_v, b_v2, scale, PRECISION: tl.constexpr):
    """`softmax_step` for two tiles at once, all visible: one maximum and one rescaling for both."""
    b_s = product(b_q, tl.trans(b_k), PRECISION)  # [BM, BN / 2]
    b_s2 = product(b_q, tl.trans(b_k2), PRECISION)
    b_new = tl.maximum(b_m, tl.maximum(tl.max(b_s, 1), tl.max(b_s2, 1)))  # [BM]
    b_alpha = tl.math.exp2((b_m - b_new) * scale)
    b_p = tl.math.exp2((b_s - b_new[:, None]) * scale)
    b_acc = b_acc * b_alpha[:, None] + product(b_p.to(b_v.dtype), b_v, PRECISION)  # [BM, BD]
    b_p2 = tl.math.exp2((b_s2 - b_new[:, None]) * scale)
    b_acc = b_acc + product(b_p2.to(b_v.dtype), b_v2, PRECISION)
    b_l = b_l * b_alpha + tl.sum(b_p, 1) + tl.sum(b_p2, 1)
    return b_new, b_l, b_acc


@triton.jit
def whole_tiles(
    b_q, b_m, b_l, b_acc, begin, end, head, b_mine, page_ids, table, k_cache, v_cache, k_desc, v_desc, sk_s, sk_h, sv_s, sv_h, scale,
    HKV: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, HB: tl.constexpr, PAGE: tl.constexpr,
    TMA: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Tiles of keys that every row of the tile may see."""
    TN: tl.constexpr = BN // HB
    o_key = tl.arange(0, BN)
    for start in tl.range(begin, end, TN, num_stages=STAGES):
        if TMA and BN > PAGE:  # two pages
            slot = tl.load(page_ids + table + start // PAGE) * PAGE
            next_slot = tl.load(page_ids + table + start // PAGE + 1) * PAGE
            b_m, b_l, b_acc = softmax_pair(
                b_q, b_m, b_l, b_acc, k_desc.load([slot, head * D]), k_desc.load([next_slot, head * D]),
                v_desc.load([slot, head * D]), v_desc.load([next_slot, head * D]), scale, PRECISION,
            )  # fmt: skip
        else:
            if TMA:
                page = tl.load(page_ids + table + start // PAGE)
                slot = page * PAGE + start % PAGE
                b_k = k_desc.load([slot, head * D])  # [BN, BD]
                b_v = v_desc.load([slot, head * D])  # [BN, BD]
            else:
                b_slot = tile_slots(page_ids, table, start + o_key // HB, None, PAGE, False)  # [BN]
                b_head = head + o_key % HB
                b_k = load_rows(k_cache, b_slot * sk_s + b_head * sk_h, b_head < HKV, D, BD, HKV % HB != 0)  # [BN, BD]
                b_v = load_rows(v_cache, b_slot * sv_s + b_head * sv_h, b_head < HKV, D, BD, HKV % HB != 0)  # [BN, BD]
            b_s = raw_scores(b_q, b_k, PRECISION)  # [BM, BN]
            if HB > 1:
                b_s = tl.where(b_mine[:, None] == (o_key % HB)[None, :], b_s, float("-inf"))
            b_m, b_l, b_acc = softmax_step(b_s, b_v, b_m, b_l, b_acc, scale, False, PRECISION)
    return b_m, b_l, b_acc


@triton.jit
def edge_tiles(
    b_q, b_m, b_l, b_acc, begin, end, b_limit, head, b_mine, page_ids, table, k_cache, v_cache, sk_s, sk_h, sv_s, sv_h, scale,
    HKV: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, HB: tl.constexpr, PAGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Tiles of which a row sees only the keys below its limit [BM]; nothing at or past `end` is read."""
    TN: tl.constexpr = BN // HB
    o_key = tl.arange(0, BN)
    for start in tl.range(begin, end, TN, num_stages=1):
        o_token = start + o_key // HB
        b_head = head + o_key % HB
        m_key = (o_token < end) & (b_head < HKV)
        b_slot = tile_slots(page_ids, table, o_token, o_token < end, PAGE, True)  # [BN]
        b_k = load_rows(k_cache, b_slot * sk_s + b_head * sk_h, m_key, D, BD, True)  # [BN, BD]
        b_v = load_rows(v_cache, b_slot * sv_s + b_head * sv_h, m_key, D, BD, True)  # [BN, BD]
        b_s = raw_scores(b_q, b_k, PRECISION)  # [BM, BN]
        m_seen = (o_token[None, :] < b_limit[:, None]) & (b_mine[:, None] == (o_key % HB)[None, :])
        b_s = tl.where(m_seen, b_s, float("-inf"))
        b_m, b_l, b_acc = softmax_step(b_s, b_v, b_m, b_l, b_acc, scale, True, PRECISION)
    return b_m, b_l, b_acc


@triton.jit
def attend_item(
    item, q, k_cache, v_cache, k_desc, v_desc, part_o, part_lse, page_ids, row_list, sq_t, sq_h, sk_s, sk_h, sv_s, sv_h, scale,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HB: tl.constexpr,
    PAGE: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One item: row r of the tile is query head g of KV head `head + hb` of row list entry i, with r = (i * HB + hb) * G + g."""
    TN: tl.constexpr = BN // HB
    table = tl.load(item + 1)
    begin = tl.load(item + 2)
    stop = tl.load(item + 3)
    rows = tl.load(item + 4)
    row_count = tl.load(item + 5)
    first = tl.load(item + 6)
    head = tl.load(item + 7)
    causal = tl.load(item + 10)
    o_r = first + tl.arange(0, BM)
    o_i = o_r // (G * HB)
    b_mine = (o_r // G) % HB
    b_g = o_r % G
    o_d = tl.arange(0, BD)
    m_row = (o_i < row_count) & (head + b_mine < HKV)
    b_row = tl.load(row_list + rows + o_i, mask=m_row, other=0).to(tl.int64)  # [BM]
    b_at = b_row * sq_t + ((head + b_mine) * G + b_g) * sq_h
    b_q = tl.load(q + b_at[:, None] + o_d[None, :], mask=m_row[:, None] & (o_d[None, :] < D), other=0.0)  # [BM, BD]

    last = tl.minimum((first + BM - 1) // (G * HB), row_count - 1)
    end = tl.maximum(tl.minimum(stop, causal + last + 1), begin)
    least = tl.minimum(stop, causal + first // (G * HB) + 1)
    whole = begin + tl.maximum(least - begin, 0) // TN * TN
    b_limit = tl.minimum(stop, causal + o_i + 1)  # [BM]
    b_m = tl.full([BM], float("-inf"), dtype=tl.float32)
    b_l = tl.zeros([BM], dtype=tl.float32)
    b_acc = tl.zeros([BM, BD], dtype=tl.float32)
    b_m, b_l, b_acc = whole_tiles(
        b_q, b_m, b_l, b_acc, begin, whole, head, b_mine, page_ids, table, k_cache, v_cache, k_desc, v_desc, sk_s, sk_h, sv_s, sv_h, scale,
        HKV, D, BD, BN, HB, PAGE, TMA, STAGES, PRECISION,
    )  # fmt: skip
    b_m, b_l, b_acc = edge_tiles(
        b_q, b_m, b_l, b_acc, whole, end, b_limit, head, b_mine, page_ids, table, k_cache, v_cache, sk_s, sk_h, sv_s, sv_h, scale,
        HKV, D, BD, BN, HB, PAGE, PRECISION,
    )  # fmt: skip
    b_sum = tl.where(b_l > 0, b_l, 1.0)  # 0: the row saw no key
    b_lse = tl.where(b_l > 0, (b_m * scale + tl.math.log2(b_sum)) * LN2, float("-inf"))
    b_o = b_acc / b_sum[:, None]
    o_part = tl.load(item + 8).to(tl.int64) + b_mine.to(tl.int64) * tl.load(item + 9) + o_i * G + b_g  # [BM]
    tl.store(part_lse + o_part, b_lse, mask=m_row)
    tl.store(part_o + o_part[:, None] * D + o_d[None, :], b_o, mask=m_row[:, None] & (o_d[None, :] < D))


@triton.jit
def attend_work(
    q, k_cache, v_cache, k_desc, v_desc, part_o, part_lse, page_ids, row_list, items, item_count, sq_t, sq_h, sk_s, sk_h, sv_s, sv_h, scale,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    HB1: tl.constexpr, BM1: tl.constexpr, BN1: tl.constexpr, STAGES1: tl.constexpr,
    PAGE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Persistent: program p takes items p, p + programs, ... ; `scale` includes log2(e)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for i_item in range(tl.program_id(0), tl.load(item_count), tl.num_programs(0)):
        item = items + i_item * FIELDS
        if tl.load(item) == SHARED:
            attend_item(
                item, q, k_cache, v_cache, k_desc, v_desc, part_o, part_lse, page_ids, row_list, sq_t, sq_h, sk_s, sk_h, sv_s, sv_h, scale,
                HKV, G, D, BD, BM, BN, 1, PAGE, TMA, STAGES, PRECISION,
            )  # fmt: skip
        else:
            attend_item(
                item, q, k_cache, v_cache, k_desc, v_desc, part_o, part_lse, page_ids, row_list, sq_t, sq_h, sk_s, sk_h, sv_s, sv_h, scale,
                HKV, G, D, BD, BM1, BN1, HB1, PAGE, False, STAGES1, PRECISION,
            )  # fmt: skip
