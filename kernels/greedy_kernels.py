"""Triton kernels behind `greedy`: one pass over the logits, then one program a row."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scan_rows(
    logits, tops, top_ids, seconds, sums, stride, width, part_width, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, part): the largest logit of the part and its lowest id, the second largest, and the sum of exp(logit - largest)."""
    i_row, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = i_part * part_width
    end = tl.minimum(begin + part_width, width)
    top = float("-inf")
    second = float("-inf")
    total = 0.0
    top_id = begin
    for start in range(begin, end, BLOCK):
        o_v = start + tl.arange(0, BLOCK)
        b_x = tl.load(logits + i_row * stride + o_v, mask=o_v < end, other=float("-inf")).to(tl.float32)
        b_top = tl.max(b_x, 0)
        b_id = tl.min(tl.where(b_x == b_top, o_v, 2147483647), 0)
        b_second = tl.max(tl.where(o_v == b_id, float("-inf"), b_x), 0)
        new = tl.maximum(top, b_top)
        safe = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(top - safe) + tl.sum(tl.exp(b_x - safe), 0)
        second = tl.maximum(tl.maximum(second, b_second), tl.minimum(top, b_top))
        top_id = tl.where(b_top > top, b_id, top_id)
        top = new
    at = i_row * PARTS + i_part
    tl.store(tops + at, top)
    tl.store(top_ids + at, top_id)
    tl.store(seconds + at, second)
    tl.store(sums + at, total)


@triton.jit(do_not_specialize=["asked"])
def pick_rows(
    tops, top_ids, seconds, sums, tokens, logprobs, margins, drawn, asked, width, PARTS: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Program (row): merge the parts. The first `asked` rows draw, too."""
    i_row = tl.program_id(0).to(tl.int64)
    o_p = tl.arange(0, BP)
    m_p = o_p < PARTS
    b_top = tl.load(tops + i_row * PARTS + o_p, mask=m_p, other=float("-inf"))
    b_id = tl.load(top_ids + i_row * PARTS + o_p, mask=m_p, other=2147483647)
    b_second = tl.load(seconds + i_row * PARTS + o_p, mask=m_p, other=float("-inf"))
    b_sum = tl.load(sums + i_row * PARTS + o_p, mask=m_p, other=0.0)
    top = tl.max(b_top, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    token = tl.min(tl.where(b_top == top, b_id, 2147483647), 0)
    others = tl.max(tl.where(b_id == token, float("-inf"), b_top), 0)
    second = tl.maximum(others, tl.max(b_second, 0))
    total = tl.sum(tl.where(m_p, b_sum * tl.exp(b_top - safe), 0.0), 0)
    token = tl.maximum(tl.minimum(token, width - 1), 0).to(tl.int64)
    tl.store(tokens + i_row, token)
    tl.store(drawn + i_row, token, mask=i_row < asked)
    tl.store(logprobs + i_row, -tl.log(total))
    tl.store(margins + i_row, top - second)


@triton.jit
def scan_legal_rows(
    logits, rows, which, bits, words, tops, top_ids, seconds, peaks, sums, stride, width, part_width,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (place, part), of logits row `rows[place]`: the largest logit of the part that mask `which[place]` allows, its lowest id, the
    second largest; the largest of all, and the sum of exp(logit - it)."""
    i_place, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_row = tl.load(rows + i_place).to(tl.int64)
    i_mask = tl.load(which + i_place).to(tl.int64)
    begin = i_part * part_width
    end = tl.minimum(begin + part_width, width)
    top = float("-inf")
    second = float("-inf")
    peak = float("-inf")
    total = 0.0
    top_id = 2147483647
    for start in range(begin, end, BLOCK):
        o_v = start + tl.arange(0, BLOCK)
        m_v = o_v < end
        b_x = tl.load(logits + i_row * stride + o_v, mask=m_v, other=float("-inf")).to(tl.float32)
        b_word = tl.load(bits + i_mask * words + o_v // 32, mask=m_v, other=0)
        b_legal = tl.where(((b_word >> (o_v % 32)) & 1) != 0, b_x, float("-inf"))
        b_top = tl.max(b_legal, 0)
        b_id = tl.min(tl.where((b_legal == b_top) & (b_legal > float("-inf")), o_v, 2147483647), 0)
        b_second = tl.max(tl.where(o_v == b_id, float("-inf"), b_legal), 0)
        second = tl.maximum(tl.maximum(second, b_second), tl.minimum(top, b_top))
        top_id = tl.where(b_top > top, b_id, top_id)
        top = tl.maximum(top, b_top)
        new = tl.maximum(peak, tl.max(b_x, 0))
        safe = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(peak - safe) + tl.sum(tl.exp(b_x - safe), 0)
        peak = new
    at = i_place * PARTS + i_part
    tl.store(tops + at, top)
    tl.store(top_ids + at, top_id)
    tl.store(seconds + at, second)
    tl.store(peaks + at, peak)
    tl.store(sums + at, total)


@triton.jit
def pick_legal_rows(
    rows, tops, top_ids, seconds, peaks, sums, tokens, logprobs, margins, drawn, width, PARTS: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Program (place): merge the parts, and write them where the row's likeliest token stands."""
    i_place = tl.program_id(0).to(tl.int64)
    i_row = tl.load(rows + i_place).to(tl.int64)
    o_p = tl.arange(0, BP)
    m_p = o_p < PARTS
    at = i_place * PARTS + o_p
    b_top = tl.load(tops + at, mask=m_p, other=float("-inf"))
    b_id = tl.load(top_ids + at, mask=m_p, other=2147483647)
    b_second = tl.load(seconds + at, mask=m_p, other=float("-inf"))
    b_peak = tl.load(peaks + at, mask=m_p, other=float("-inf"))
    b_sum = tl.load(sums + at, mask=m_p, other=0.0)
    top = tl.max(b_top, 0)
    token = tl.min(tl.where(b_top == top, b_id, 2147483647), 0)
    others = tl.max(tl.where(b_id == token, float("-inf"), b_top), 0)
    second = tl.maximum(others, tl.max(b_second, 0))
    peak = tl.max(b_peak, 0)
    safe = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.where(m_p, b_sum * tl.exp(b_peak - safe), 0.0), 0)
    token = tl.maximum(tl.minimum(token, width - 1), 0).to(tl.int64)
    tl.store(tokens + i_row, token)
    tl.store(drawn + i_row, token)
    tl.store(logprobs + i_row, top - safe - tl.log(total))
    tl.store(margins + i_row, top - second)


@triton.jit(do_not_specialize=["rows"])
def feed_rows(token_ids, feeds, drawn, ids, rows, BLOCK: tl.constexpr):
    """Program (block of rows): a row's own token, or the drawn one at the place that it feeds on."""
    o_t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_t = o_t < rows
    b_feed = tl.load(feeds + o_t, mask=m_t, other=-1)
    b_own = tl.load(token_ids + o_t, mask=m_t, other=0)
    b_fed = tl.load(drawn + b_feed, mask=m_t & (b_feed >= 0), other=0)
    tl.store(ids + o_t, tl.where(b_feed >= 0, b_fed, b_own), mask=m_t)
