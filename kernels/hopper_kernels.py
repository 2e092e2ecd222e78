"""The work-list kernel for Hopper (sm_90), in Gluon: one warp copies, one or two warp groups multiply.

Same work list, same partials and same meaning as `attend_kernels.attend_work`, for 16-bit caches in pages of 16 slots or more and head dims
of 64, 128 and 256. A producer warp walks the items and keeps `STAGES` tiles of K and V in flight with the tensor memory accelerator,
running ahead across items; each consumer group owns 64 rows, starts the next tile's scores before the softmax of the one before and
lets softmax and value products overlap (the schedule of FlashAttention-3, arXiv 2407.08608). All items take the same path: 64 rows a
group even for a stream's own few rows, because those are bound by memory, not by padded products; HB of their KV heads lie head by head
in one tile, so that a short private run makes one item and not HB.

Letters as in `attend_kernels`; WG consumer groups, ROWS = 64 * WG rows a tile.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from askmany.kernels import plan_kernels

FIELDS = gl.constexpr(plan_kernels.FIELDS.value)
SINGLE = gl.constexpr(plan_kernels.SINGLE.value)
LN2 = gl.constexpr(0.6931471805599453)


def page_descriptor(cache: Tensor, block: list[int]) -> TensorDescriptor:
    """The cache [S, HKV, D] as a matrix [S, HKV * D] read in boxes of `block` = [slots, D]."""
    width = cache.shape[1] * cache.shape[2]
    return TensorDescriptor(cache, [cache.shape[0], width], [cache.stride(0), 1], block, gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def log2_heads(item, HB: gl.constexpr, SINGLE: gl.constexpr):
    """The base-2 logarithm of the KV heads side by side in the item's tiles. Rows and keys are split by shifts with it: a division by a
    number that the compiler does not know takes some twenty instructions, in each thread for each row or key."""
    return gl.where(gl.load(item) == SINGLE, exponent(HB), 0)


@gluon.constexpr_function
def exponent(power: int) -> int:
    """Of a power of two."""
    return power.bit_length() - 1


@gluon.jit
def split_row(o_row, log_heads, G: gl.constexpr):
    """The item's token, KV head and query head of the group that row `o_row` of its tile stands for."""
    o_pair = o_row // G
    return o_pair >> log_heads, o_pair & ((1 << log_heads) - 1), o_row - o_pair * G


@gluon.jit
def item_end(item, log_heads, G: gl.constexpr, ROWS: gl.constexpr):
    """The keys [begin, end) that some row of the item's tile sees, where stored keys stop, and the item's number of rows."""
    begin = gl.load(item + 2)
    stop = gl.load(item + 3)
    row_count = gl.load(item + 5)
    last = gl.minimum((gl.load(item + 6) + ROWS - 1) // G >> log_heads, row_count - 1)
    return begin, gl.maximum(gl.minimum(stop, gl.load(item + 10) + last + 1), begin), stop, row_count


@gluon.jit
def first_row(item, i_item, log_heads, row_count, GROUP: gl.constexpr, G: gl.constexpr, WG: gl.constexpr):
    """Where the group's 64 rows of the item's tile begin; past the last row if it has none. Rows that fit one group are taken in turns, so
    that one group brings its queries while the other still sums."""
    first = gl.load(item + 6)
    if WG > 1:
        rows = row_count * G << log_heads
        turned = gl.where(i_item // gl.num_programs(0) % WG == GROUP, first, rows)
        first = gl.where(first + 64 >= rows, turned, first + GROUP * 64)
    return first


@gluon.jit
def copy_tile(
    desc, tiles, full, free, turn, page_ids, table, start, end, column,
    PAGE: gl.constexpr, BN: gl.constexpr, HEADS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Ask for one tile of K or V once its buffer is free: BN // HEADS tokens of each of HEADS heads, one box a page and head."""
    TN: gl.constexpr = BN // HEADS
    BOX: gl.constexpr = PAGE if PAGE < TN else TN
    D: gl.constexpr = tiles.shape[2]
    stage = turn % STAGES
    mbarrier.wait(free.index(stage), ((turn // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), BN * D * 2)
    for i in gl.static_range(TN // BOX):
        token = gl.minimum(start + i * BOX, end - 1)  # past the end any page will do: its keys are hidden
        slot = gl.load(page_ids + table + token // PAGE) * PAGE + (start + i * BOX) % PAGE
        for h in gl.static_range(HEADS):
            box = tiles.index(stage).slice(h * TN + i * BOX, BOX)
            tma.async_copy_global_to_shared(desc, [slot, column + h * D], full.index(stage), box)


@gluon.jit
def produce(
    k_desc, v_desc, k1_desc, v1_desc, k_tiles, v_tiles, k_full, k_free, v_full, v_free, page_ids, items, item_count,
    G: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, HB: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    turn = 0
    for i_item in range(gl.program_id(0), gl.load(item_count), gl.num_programs(0)):
        item = items + i_item * FIELDS
        log_heads = log2_heads(item, HB, SINGLE)
        begin, end, _, _ = item_end(item, log_heads, G, ROWS)
        settled = gl.load(item + 10)  # from here on a stream's own keys are of this very step; never where nodes are read
        table = gl.load(item + 1)
        column = gl.load(item + 7) * D
        if log_heads == 0:
            for start in range(begin, end, BN):
                if EARLY and start + BN > settled:
                    gdc_wait()
                copy_tile(k_desc, k_tiles, k_full, k_free, turn, page_ids, table, start, end, column, PAGE, BN, 1, STAGES)
                copy_tile(v_desc, v_tiles, v_full, v_free, turn, page_ids, table, start, end, column, PAGE, BN, 1, STAGES)
                turn += 1
        else:
            for start in range(begin, end, BN // HB):
                if EARLY and start + BN // HB > settled:
                    gdc_wait()
                copy_tile(k1_desc, k_tiles, k_full, k_free, turn, page_ids, table, start, end, column, PAGE, BN, HB, STAGES)
                copy_tile(v1_desc, v_tiles, v_full, v_free, turn, page_ids, table, start, end, column, PAGE, BN, HB, STAGES)
                turn += 1
    if EARLY:
        gdc_wait()  # no launch may end before the one that it was launched beside


@gluon.jit
def hide(b_s, start, least, b_limit, b_own, tokens, BN: gl.constexpr, S_LAYOUT: gl.constexpr):
    """Scores [64, BN] with -inf where a row may not see the key; most tiles of a document are seen whole. A row's own head has `tokens`
    keys from `b_own` on, of which it sees those before `b_limit`."""
    if start + tokens > least:
        o_key = gl.arange(0, BN, layout=gl.SliceLayout(0, S_LAYOUT))
        b_seen = gl.maximum(gl.minimum(b_limit - start, tokens), 0).to(gl.uint32)  # [64]
        m_seen = (o_key[None, :] - b_own[:, None]).to(gl.uint32) < b_seen[:, None]  # keys before `b_own` wrap around
        b_s = gl.where(m_seen, b_s, float("-inf"))
    return b_s


@gluon.jit
def clear_tail(v_tile, valid, tokens, BN: gl.constexpr, D: gl.constexpr):
    """Zero the rows of a V tile that lie past the `valid` stored tokens of each head: 0 * NaN would not vanish."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D if D < 256 else 1, D // 8 if D < 256 else 32], [4, 1], [1, 0])
    for i in gl.static_range(BN // 16):
        first = i * 16 & (tokens - 1)
        if first + 16 > valid:
            part = v_tile.slice(i * 16, 16)
            o_token = first + gl.arange(0, 16, layout=gl.SliceLayout(1, layout))
            b_v = part.load(layout)
            part.store(gl.where((o_token < valid)[:, None], b_v, gl.zeros_like(b_v)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def softmax(b_s, b_m, b_l, scale):
    """New maximum, rescaling of what was summed before, weights and sum; scores in units of `scale`, base 2."""
    b_new = gl.maximum(b_m, gl.max(b_s, 1) * scale)
    b_safe = gl.where(b_new == float("-inf"), 0.0, b_new)
    b_p = gl.exp2(b_s * scale - b_safe[:, None])
    b_alpha = gl.exp2(b_m - b_safe)
    return b_new, b_alpha, b_p, b_l * b_alpha + gl.sum(b_p, 1)


@gluon.jit
def put_partials(
    item, i_item, b_acc, b_m, b_l, part_o, part_lse,
    GROUP: gl.constexpr, G: gl.constexpr, D: gl.constexpr, HKV: gl.constexpr, HB: gl.constexpr, WG: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Normalise and store the rows of one group. Reads the item again: its fields would cost registers all through the loop."""
    log_heads = log2_heads(item, HB, SINGLE)
    row_count = gl.load(item + 5)
    o_row = first_row(item, i_item, log_heads, row_count, GROUP, G, WG) + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
    o_i, b_mine, o_g = split_row(o_row, log_heads, G)
    m_part = (o_i < row_count) & (gl.load(item + 7) + b_mine < HKV)
    o_part = gl.load(item + 8).to(gl.int64) + b_mine.to(gl.int64) * gl.load(item + 9) + o_i * G + o_g  # [64]
    b_sum = gl.where(b_l > 0, b_l, 1.0)  # 0: the row saw no key
    gl.store(part_lse + o_part, gl.where(b_l > 0, (b_m + gl.log2(b_sum)) * LN2, float("-inf")), mask=m_part)
    b_o = b_acc * gl.convert_layout(1.0 / b_sum, gl.SliceLayout(1, O_LAYOUT))[:, None]
    o_part = gl.convert_layout(o_part, gl.SliceLayout(1, O_LAYOUT))
    m_part = gl.convert_layout(m_part, gl.SliceLayout(1, O_LAYOUT))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, O_LAYOUT))
    gl.store(part_o + o_part[:, None] * D + o_d[None, :], b_o, mask=m_part[:, None])


@gluon.jit
def load_queries(
    item, q, q_tile, row_list, first, log_heads, row_count, sq_t, sq_h,
    G: gl.constexpr, D: gl.constexpr, HKV: gl.constexpr,
):  # fmt: skip
    """Bring the group's 64 queries to shared memory: row (i * heads + hb) * G + g is query head g of the item's KV head hb, row i. Rows
    past the last repeat it, since loads under a mask wait for one another; what comes of them is not stored."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D if D < 256 else 1, D // 8 if D < 256 else 32], [4, 1], [1, 0])
    o_r = first + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    o_i, b_mine, o_g = split_row(o_r, log_heads, G)
    b_head = gl.minimum(gl.load(item + 7) + b_mine, HKV - 1)
    b_row = gl.load(row_list + gl.load(item + 4) + gl.minimum(o_i, row_count - 1)).to(gl.int64)  # [64]
    gdc_wait()  # the queries, and the partials that the merge before reads; at once where it was waited for
    b_at = b_row * sq_t + (b_head * G + o_g) * sq_h
    q_tile.store(gl.load(q + b_at[:, None] + o_d[None, :]))  # [64, D]
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def attend_tiles(
    item, q_tile, k_tiles, v_tiles, k_full, k_free, v_full, v_free, turn, begin, end, stop, first, log_heads, scale,
    G: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """The group's output [64, D], not yet normalised, maximum and sum [64] over the item's keys. `turn` counts tiles since the start."""
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    causal = gl.load(item + 10)
    tokens = BN >> log_heads  # a tile
    o_i, b_mine, _ = split_row(first + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT)), log_heads, G)
    b_own = b_mine * tokens  # [64]
    b_limit = gl.minimum(stop, causal + o_i + 1)  # [64]
    least = gl.where(log_heads == 0, gl.minimum(stop, causal + first // G + 1), begin)
    b_m = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
    b_l = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
    b_acc = gl.zeros([64, D], gl.float32, layout=O_LAYOUT)
    zeros = gl.zeros([64, BN], gl.float32, layout=S_LAYOUT)
    if end > begin:
        stage = turn % STAGES
        phase = (turn // STAGES) & 1
        mbarrier.wait(k_full.index(stage), phase)
        b_s = warpgroup_mma(q_tile, k_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        b_s = warpgroup_mma_wait(0, deps=[b_s])
        mbarrier.arrive(k_free.index(stage), count=1)
        b_s = hide(b_s, begin, least, b_limit, b_own, tokens, BN, S_LAYOUT)
        b_m, b_alpha, b_p, b_l = softmax(b_s, b_m, b_l, scale)
        b_w = gl.convert_layout(b_p.to(q_tile.dtype), P_LAYOUT)
        for start in range(begin + tokens, end, tokens):
            old_stage = stage
            old_phase = phase
            turn += 1
            stage = turn % STAGES
            phase = (turn // STAGES) & 1
            mbarrier.wait(k_full.index(stage), phase)
            s_going = warpgroup_mma(q_tile, k_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(old_stage), old_phase)
            o_going = warpgroup_mma(b_w, v_tiles.index(old_stage), b_acc, is_async=True)
            b_s = warpgroup_mma_wait(1, deps=[s_going])
            mbarrier.arrive(k_free.index(stage), count=1)
            b_s = hide(b_s, start, least, b_limit, b_own, tokens, BN, S_LAYOUT)
            b_m, b_alpha, b_p, b_l = softmax(b_s, b_m, b_l, scale)
            b_acc = warpgroup_mma_wait(0, deps=[o_going])
            mbarrier.arrive(v_free.index(old_stage), count=1)
            b_acc = b_acc * gl.convert_layout(b_alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
            b_w = gl.convert_layout(b_p.to(q_tile.dtype), P_LAYOUT)
        mbarrier.wait(v_full.index(stage), phase)
        valid = stop - (end - 1 - ((end - 1 - begin) & (tokens - 1)))  # stored tokens of the last tile
        if valid < tokens:
            clear_tail(v_tiles.index(stage), valid, tokens, BN, D)
        o_going = warpgroup_mma(b_w, v_tiles.index(stage), b_acc, is_async=True)
        b_acc = warpgroup_mma_wait(0, deps=[o_going])
        mbarrier.arrive(v_free.index(stage), count=1)
        turn += 1
    return b_acc, b_m, b_l, turn


@gluon.jit
def skip_tiles(k_full, k_free, v_full, v_free, turn, begin, end, tokens, STAGES: gl.constexpr):
    """A group without rows in the item only hands its tiles back."""
    for _ in range(begin, end, tokens):
        stage = turn % STAGES
        phase = (turn // STAGES) & 1
        mbarrier.wait(k_full.index(stage), phase)
        mbarrier.arrive(k_free.index(stage), count=1)
        mbarrier.wait(v_full.index(stage), phase)
        mbarrier.arrive(v_free.index(stage), count=1)
        turn += 1
    return turn


@gluon.jit
def consume(
    GROUP: gl.constexpr, q, q_tiles, k_tiles, v_tiles, k_full, k_free, v_full, v_free, part_o, part_lse, row_list, items, item_count,
    sq_t, sq_h, scale,
    G: gl.constexpr, D: gl.constexpr, HKV: gl.constexpr, BN: gl.constexpr, HB: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    turn = 0
    for i_item in range(gl.program_id(0), gl.load(item_count), gl.num_programs(0)):
        item = items + i_item * FIELDS
        log_heads = log2_heads(item, HB, SINGLE)
        begin, end, stop, row_count = item_end(item, log_heads, G, ROWS)
        first = first_row(item, i_item, log_heads, row_count, GROUP, G, ROWS // 64)
        if first < row_count * G << log_heads:
            load_queries(item, q, q_tiles.index(GROUP), row_list, first, log_heads, row_count, sq_t, sq_h, G, D, HKV)
            b_acc, b_m, b_l, turn = attend_tiles(
                item, q_tiles.index(GROUP), k_tiles, v_tiles, k_full, k_free, v_full, v_free, turn, begin, end, stop, first, log_heads,
                scale, G, D, BN, STAGES, S_LAYOUT, O_LAYOUT,
            )  # fmt: skip
            put_partials(item, i_item, b_acc, b_m, b_l, part_o, part_lse, GROUP, G, D, HKV, HB, ROWS // 64, S_LAYOUT, O_LAYOUT)
        else:
            turn = skip_tiles(k_full, k_free, v_full, v_free, turn, begin, end, BN >> log_heads, STAGES)


@gluon.jit
def attend_work_hopper(
    q, k_desc, v_desc, k1_desc, v1_desc, part_o, part_lse, page_ids, row_list, items, item_count, sq_t, sq_h, scale,
    G: gl.constexpr, D: gl.constexpr, HKV: gl.constexpr, BN: gl.constexpr, HB: gl.constexpr, PAGE: gl.constexpr,
    STAGES: gl.constexpr, WG: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Persistent: program p takes items p, p + programs, ... ; `scale` includes log2(e). Launch with 4 warps (the first consumer).
    EARLY: keys of prefix nodes, and a stream's own before its newest, were stored before the step, and are copied while the launch before
    this one still runs."""
    ROWS: gl.constexpr = 64 * WG
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_tiles = gl.allocate_shared_memory(q.dtype.element_ty, [WG, 64, D], layout)
    k_tiles = gl.allocate_shared_memory(q.dtype.element_ty, [STAGES, BN, D], layout)
    v_tiles = gl.allocate_shared_memory(q.dtype.element_ty, [STAGES, BN, D], layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=WG)
        mbarrier.init(v_free.index(i), count=WG)
    fence_async_shared()
    gl.thread_barrier()
    gdc_launch_dependents()
    if not EARLY:
        gdc_wait()
    if WG == 1:
        gl.warp_specialize(
            [
                (consume, (0, q, q_tiles, k_tiles, v_tiles, k_full, k_free, v_full, v_free, part_o, part_lse, row_list, items, item_count,
                           sq_t, sq_h, scale, G, D, HKV, BN, HB, STAGES, ROWS)),
                (produce, (k_desc, v_desc, k1_desc, v1_desc, k_tiles, v_tiles, k_full, k_free, v_full, v_free, page_ids, items, item_count,
                           G, D, BN, HB, PAGE, STAGES, ROWS, EARLY)),
            ],
            [1], [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (0, q, q_tiles, k_tiles, v_tiles, k_full, k_free, v_full, v_free, part_o, part_lse, row_list, items, item_count,
                           sq_t, sq_h, scale, G, D, HKV, BN, HB, STAGES, ROWS)),
                (consume, (1, q, q_tiles, k_tiles, v_tiles, k_full, k_free, v_full, v_free, part_o, part_lse, row_list, items, item_count,
                           sq_t, sq_h, scale, G, D, HKV, BN, HB, STAGES, ROWS)),
                (produce, (k_desc, v_desc, k1_desc, v1_desc, k_tiles, v_tiles, k_full, k_free, v_full, v_free, page_ids, items, item_count,
                           G, D, BN, HB, PAGE, STAGES, ROWS, EARLY)),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
