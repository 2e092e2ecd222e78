"""Triton kernels that turn the lengths of a step into a work list, on the device, with fixed shapes and no word to the host.

Four launches: `group_rows` (which rows read node n), `size_work` (which nodes are worth sharing, how long a chunk is, where every item
and partial result goes), `emit_work` (write it down), `settle` (what comes after it may read the list early). Sizes of spaces, tiles and
heads are arguments, so that few programs have to be compiled. Letters as in `tables`; a *segment* is one run of keys of one stream: one
per prefix level (used when its node is not shared) and, last, its private keys. `i_` program index, `o_` offsets, `m_` mask, `b_` values.
"""

from __future__ import annotations

import triton
import triton.language as tl

FIELDS = tl.constexpr(12)  # int32 fields of a work item, in the order `emit_work` writes them
SHARED = tl.constexpr(0)  # kinds of item: a node's keys for a tile of its rows ...
SINGLE = tl.constexpr(1)  # ... or some keys of one stream for its own rows
UNBOUNDED = tl.constexpr(1 << 30)  # the causal base of an item whose rows all see all of its keys
LONE_TOKENS = tl.constexpr(1024)  # a node of one stream is read as a shared one from here on (measured: `tiles-h200.json`, run 13)

TOO_MANY_ITEMS = tl.constexpr(1)
TOO_MANY_PARTIALS = tl.constexpr(2)


@triton.jit
def worth_sharing(streams, length, token_bytes, threshold):
    """Whether reading a node once instead of once a stream saves more than `threshold` bytes a layer. For one stream it saves none, but
    tiles of shared items read long runs faster."""
    saved = (streams - 1).to(tl.int64) * length.to(tl.int64) * token_bytes
    lone = (streams == 1) & (length >= LONE_TOKENS)
    return (streams > 0) & (length > 0) & ((saved > threshold) | lone)


@triton.jit(do_not_specialize=["R", "T"])
def group_rows(
    stream_row_count, stream_path, node_rows, node_streams, node_row_start, stream_rank, segments, R, T,
    BR: tl.constexpr, LEVELS: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Program n: count the live rows and streams below node n, rank them, find its range of the row list; clear the rows' segments."""
    i_node = tl.program_id(0)
    o_stream = tl.arange(0, BR)
    m_stream = o_stream < R
    b_rows = tl.load(stream_row_count + o_stream, mask=m_stream, other=0)  # [BR]
    b_on = tl.zeros([BR], dtype=tl.int1)
    b_before = tl.zeros([BR], dtype=tl.int32)
    for level in tl.static_range(LEVELS):
        b_node = tl.load(stream_path + o_stream * LEVELS + level, mask=m_stream, other=-1)  # [BR]
        b_on = b_on | (b_node == i_node)
        b_before += tl.where((b_node >= 0) & (b_node < i_node), b_rows, 0)
    b_mine = tl.where(b_on, b_rows, 0)
    b_rank = tl.cumsum(b_mine, 0) - b_mine
    for level in tl.static_range(LEVELS):
        b_node = tl.load(stream_path + o_stream * LEVELS + level, mask=m_stream, other=-1)
        tl.store(stream_rank + o_stream * LEVELS + level, b_rank, mask=m_stream & (b_node == i_node))
    tl.store(node_rows + i_node, tl.sum(b_mine, 0))
    tl.store(node_streams + i_node, tl.sum((b_mine > 0).to(tl.int32), 0))
    tl.store(node_row_start + i_node, tl.sum(b_before, 0))
    for start in range(i_node * BT, T * (LEVELS + 1) * 3, tl.num_programs(0) * BT):
        o_clear = start + tl.arange(0, BT)
        tl.store(segments + o_clear, tl.zeros([BT], dtype=tl.int32), mask=o_clear < T * (LEVELS + 1) * 3)


@triton.jit
def chunk_choices(o_split, tiles, pinned):
    """[C] chunk lengths in key tiles that cut a run of `tiles` into about `o_split` [C] parts; a pinned length is the only choice."""
    b_chunk = tl.maximum((tiles + o_split - 1) // o_split, 1)
    return tl.where(pinned > 0, pinned, b_chunk)


@triton.jit
def step_cost(b_chunk, b_items, b_chunk1, b_items1, slots, b_merge, b_merge1, overhead):
    """[C, C1] time of a step in key tiles: waves of shared items, then what single items the last wave cannot take, then the merge. Single
    items that are longer than the shared ones of the last wave hold up half of what follows (measured: `tiles-h200.json`)."""
    b_waves = (b_items + slots - 1) // slots  # [C]
    b_long = (b_chunk + overhead)[:, None]  # [C, 1]
    b_short = tl.where(b_items1 > 0, b_chunk1 + overhead, 0)[None, :]  # [1, C1]
    b_before = tl.maximum(b_waves - 1, 0)[:, None] * b_long  # when the last wave of shared items starts
    b_last = tl.where(b_waves > 0, b_chunk + overhead, 0)[:, None]
    b_free = b_waves * slots - b_items  # [C] programs of the last wave that have no shared item
    b_rest = tl.maximum(b_items1[None, :] - b_free[:, None], 0)  # [C, C1]
    b_held = tl.where((b_free > 0)[:, None], tl.maximum(b_short - b_last, 0), 0).to(tl.float32) * 0.5
    b_after = b_held + (b_last + (b_rest + slots - 1) // slots * b_short).to(tl.float32)
    b_time = b_before.to(tl.float32) + tl.where(b_rest > 0, b_after, tl.maximum(b_last, b_short).to(tl.float32))
    return b_time + b_merge[:, None] + b_merge1[None, :]


@triton.jit
def pick(b_values, index):
    """Element `index` of a vector."""
    return tl.sum(tl.where(tl.arange(0, b_values.shape[0]) == index, b_values, 0), 0)


@triton.jit(
    do_not_specialize=[
        "token_bytes",
        "threshold",
        "slots",
        "shared_chunk",
        "single_chunk",
        "item_capacity",
        "partial_capacity",
        "overhead",
        "N",
        "R",
        "HKV",
        "G",
        "BM",
        "BN",
        "HB",
        "BM1",
        "TN1",
    ]
)
def size_work(
    node_rows, node_streams, node_length, node_plan,
    stream_row_count, stream_path, stream_length, segment_plan,
    item_count, status, error,
    token_bytes, threshold, slots, shared_chunk, single_chunk, item_capacity, partial_capacity, overhead,
    N, R, HKV, G, BM, BN, HB, BM1, TN1,
    BNODE: tl.constexpr, BR: tl.constexpr, LEVELS: tl.constexpr, C: tl.constexpr, C1: tl.constexpr,
):  # fmt: skip
    """One program: chunk lengths, then item and partial offsets by prefix sums. `node_plan` [N, 4] and `segment_plan` [R, LEVELS + 1, 4]
    hold (splits, chunk in tokens, first item, first partial); 0 splits: no items. A chunk argument above 0 pins it (tokens)."""
    o_node = tl.arange(0, BNODE)
    m_node = o_node < N
    b_rows = tl.load(node_rows + o_node, mask=m_node, other=0)  # [BNODE]
    b_streams = tl.load(node_streams + o_node, mask=m_node, other=0)
    b_length = tl.load(node_length + o_node, mask=m_node, other=0)
    b_shared = worth_sharing(b_streams, b_length, token_bytes, threshold)
    b_tiles = tl.where(b_shared, (b_length + BN - 1) // BN, 0)
    b_pairs = HKV * ((b_rows * G + BM - 1) // BM)
    most = tl.max(b_tiles, 0)
    b_try = chunk_choices(tl.arange(0, C) + 1, most, shared_chunk // BN)  # [C]
    b_cuts = (b_tiles[None, :] + b_try[:, None] - 1) // b_try[:, None]  # [C, BNODE]
    b_items = tl.sum(b_pairs[None, :] * b_cuts, 1)
    b_parts = HKV * G * tl.sum(b_cuts.to(tl.int64) * b_rows[None, :], 1)  # [C] partials

    o_stream = tl.arange(0, BR)
    m_stream = o_stream < R
    b_count = tl.load(stream_row_count + o_stream, mask=m_stream, other=0)  # [BR]
    b_groups = ((HKV + HB - 1) // HB) * ((b_count * HB * G + BM1 - 1) // BM1)
    most1 = 0
    for level in tl.static_range(LEVELS + 1):
        b_run = segment_length(
            level, o_stream, m_stream, b_count, node_streams, node_length, stream_path, stream_length, token_bytes, threshold, LEVELS
        )
        most1 = tl.maximum(most1, tl.max((b_run + TN1 - 1) // TN1, 0))
    o_index = tl.arange(0, C1)
    o_split1 = tl.maximum(((2 + (o_index & 1)) << (o_index >> 1)) >> 1, 1)  # 1 1 2 3 4 6 8 12 ...
    b_try1 = chunk_choices(o_split1, most1, single_chunk // TN1)  # [C1]
    b_items1 = tl.zeros([C1], dtype=tl.int32)
    b_parts1 = tl.zeros([C1], dtype=tl.int64)
    for level in tl.static_range(LEVELS + 1):
        b_run = segment_length(
            level, o_stream, m_stream, b_count, node_streams, node_length, stream_path, stream_length, token_bytes, threshold, LEVELS
        )
        b_tiles1 = (b_run + TN1 - 1) // TN1
        if tl.max(b_tiles1, 0) > 0:
            b_cuts1 = (b_tiles1[None, :] + b_try1[:, None] - 1) // b_try1[:, None]  # [C1, BR]
            b_items1 += tl.sum(b_groups[None, :] * b_cuts1, 1)
            b_parts1 += HKV * G * tl.sum(b_cuts1.to(tl.int64) * b_count[None, :], 1)

    outputs = (tl.sum(b_count, 0) * HKV * G).to(tl.float32)
    split_cost = 0.15 + outputs / (BN * slots).to(tl.float32)  # key tiles a split adds to the merge: latency, then bandwidth
    b_merge = ((most + b_try - 1) // b_try).to(tl.float32) * split_cost
    b_merge1 = ((most1 + b_try1 - 1) // b_try1).to(tl.float32) * (split_cost + 0.25)  # and its queries are loaded again
    b_cost = step_cost(b_try, b_items, b_try1, b_items1, slots, b_merge, b_merge1, overhead)  # [C, C1]
    m_fits = (b_items[:, None] + b_items1[None, :] <= item_capacity) & (b_parts[:, None] + b_parts1[None, :] <= partial_capacity)
    b_cost = tl.where(m_fits, b_cost, b_cost + 1e30)
    choice = tl.argmin(tl.min(b_cost, 1), 0)
    chunk = pick(b_try, choice)
    b_row = tl.sum(tl.where((tl.arange(0, C) == choice)[:, None], b_cost, 0.0), 0)  # [C1]
    chunk1 = pick(b_try1, tl.argmin(b_row, 0))

    b_splits = (b_tiles + chunk - 1) // chunk
    b_chunk = tl.zeros([BNODE], dtype=tl.int32) + chunk
    if shared_chunk <= 0:  # even the chunks of a node out
        b_chunk = tl.maximum((b_tiles + tl.maximum(b_splits, 1) - 1) // tl.maximum(b_splits, 1), 1)
        b_splits = (b_tiles + b_chunk - 1) // b_chunk
    b_node_items = b_pairs * b_splits
    b_partials = HKV * b_splits.to(tl.int64) * b_rows * G
    items = tl.sum(b_node_items, 0)
    partials = tl.sum(b_partials, 0)
    tl.store(node_plan + o_node * 4, b_splits, mask=m_node)
    tl.store(node_plan + o_node * 4 + 1, b_chunk * BN, mask=m_node)
    tl.store(node_plan + o_node * 4 + 2, tl.cumsum(b_node_items, 0) - b_node_items, mask=m_node)
    tl.store(node_plan + o_node * 4 + 3, (tl.cumsum(b_partials, 0) - b_partials).to(tl.int32), mask=m_node)
    for level in tl.static_range(LEVELS + 1):
        b_run = segment_length(
            level, o_stream, m_stream, b_count, node_streams, node_length, stream_path, stream_length, token_bytes, threshold, LEVELS
        )
        b_splits1 = ((b_run + TN1 - 1) // TN1 + chunk1 - 1) // chunk1
        b_level_items = b_groups * b_splits1
        b_partials1 = HKV * b_splits1.to(tl.int64) * b_count * G
        o_plan = (o_stream * (LEVELS + 1) + level) * 4
        tl.store(segment_plan + o_plan, b_splits1, mask=m_stream)
        tl.store(segment_plan + o_plan + 1, chunk1 * TN1, mask=m_stream)
        tl.store(segment_plan + o_plan + 2, items + tl.cumsum(b_level_items, 0) - b_level_items, mask=m_stream)
        tl.store(segment_plan + o_plan + 3, (partials + tl.cumsum(b_partials1, 0) - b_partials1).to(tl.int32), mask=m_stream)
        items += tl.sum(b_level_items, 0)
        partials += tl.sum(b_partials1, 0)

    code = tl.where(items > item_capacity, TOO_MANY_ITEMS, 0) | tl.where(partials > partial_capacity, TOO_MANY_PARTIALS, 0)
    tl.store(item_count, tl.where(code == 0, items, 0))
    tl.store(status, code)
    tl.store(error, tl.load(error) | code)


@triton.jit
def segment_length(
    level, o_stream, m_stream, b_count, node_streams, node_length, stream_path, stream_length, token_bytes, threshold, LEVELS: tl.constexpr
):
    """[BR] keys that each live stream reads alone at `level`; level LEVELS is its private run."""
    if level == LEVELS:
        return tl.where(b_count > 0, tl.load(stream_length + o_stream, mask=m_stream, other=0), 0)
    b_node = tl.load(stream_path + o_stream * LEVELS + level, mask=m_stream, other=-1)
    m_on = m_stream & (b_node >= 0) & (b_count > 0)
    b_streams = tl.load(node_streams + b_node, mask=m_on, other=0)
    b_length = tl.load(node_length + b_node, mask=m_on, other=0)
    b_alone = m_on & (worth_sharing(b_streams, b_length, token_bytes, threshold) == 0)
    return tl.where(b_alone, b_length, 0)


@triton.jit
def put_items(
    items, o_item, m_item, kind, table, b_begin, b_end, length, rows, row_count, b_first, b_head, b_partial, head_stride, causal,
    FIELDS: tl.constexpr,
):  # fmt: skip
    """Write work items; arguments named `b_` are vectors, the rest scalars of the run they belong to."""
    at = items + o_item.to(tl.int64) * FIELDS
    tl.store(at, tl.zeros_like(o_item) + kind, mask=m_item)
    tl.store(at + 1, tl.zeros_like(o_item) + table, mask=m_item)
    tl.store(at + 2, b_begin, mask=m_item)
    tl.store(at + 3, tl.minimum(b_end, length), mask=m_item)
    tl.store(at + 4, tl.zeros_like(o_item) + rows, mask=m_item)
    tl.store(at + 5, tl.zeros_like(o_item) + row_count, mask=m_item)
    tl.store(at + 6, b_first, mask=m_item)
    tl.store(at + 7, b_head, mask=m_item)
    tl.store(at + 8, b_partial, mask=m_item)
    tl.store(at + 9, tl.zeros_like(o_item) + head_stride, mask=m_item)
    tl.store(at + 10, tl.zeros_like(o_item) + causal, mask=m_item)


@triton.jit
def emit_node(
    i_node, items, node_rows, node_row_start, node_page_start, node_length, node_plan,
    HKV, G, BM, FIELDS: tl.constexpr, BI: tl.constexpr, SHARED: tl.constexpr, UNBOUNDED: tl.constexpr,
):  # fmt: skip
    """The items of a shared node, chunk-major: row tiles of one chunk and head are neighbours and share it in L2."""
    splits = tl.load(node_plan + i_node * 4)
    chunk = tl.load(node_plan + i_node * 4 + 1)
    first_item = tl.load(node_plan + i_node * 4 + 2)
    first_partial = tl.load(node_plan + i_node * 4 + 3)
    rows = tl.load(node_rows + i_node)
    tiles = (rows * G + BM - 1) // BM
    for start in range(0, HKV * splits * tiles, BI):
        o_local = start + tl.arange(0, BI)
        b_tile = o_local % tiles
        b_head = (o_local // tiles) % HKV
        b_split = o_local // (tiles * HKV)
        put_items(
            items, first_item + o_local, b_split < splits, SHARED,
            tl.load(node_page_start + i_node), b_split * chunk, (b_split + 1) * chunk,
            tl.load(node_length + i_node), tl.load(node_row_start + i_node), rows, b_tile * BM, b_head,
            first_partial + (b_head * splits + b_split) * rows * G, splits * rows * G, UNBOUNDED, FIELDS,
        )  # fmt: skip


@triton.jit
def emit_segment(
    i_stream, i_level: tl.constexpr, items, table, length, row, row_count, causal, segment_plan, segments, identity,
    LEVELS: tl.constexpr, HKV, G, HB, BM1, FIELDS: tl.constexpr, BI: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """The items of one segment of one stream, and where its rows find the results."""
    at = segment_plan + (i_stream * (LEVELS + 1) + i_level) * 4
    splits = tl.load(at)
    chunk = tl.load(at + 1)
    first_item = tl.load(at + 2)
    first_partial = tl.load(at + 3)
    tiles = (row_count * HB * G + BM1 - 1) // BM1
    groups = (HKV + HB - 1) // HB
    for start in range(0, groups * splits * tiles, BI):
        o_local = start + tl.arange(0, BI)
        b_head = (o_local % groups) * HB
        b_tile = (o_local // groups) % tl.maximum(tiles, 1)
        b_split = o_local // (groups * tl.maximum(tiles, 1))
        put_items(
            items, first_item + o_local, b_split < splits, SINGLE, table, b_split * chunk, (b_split + 1) * chunk, length,
            identity + row, row_count, b_tile * BM1, b_head, first_partial + (b_head * splits + b_split) * row_count * G,
            splits * row_count * G, causal, FIELDS,
        )  # fmt: skip
    if splits > 0:
        put_segments(segments, i_level, row, row_count, splits, first_partial, G, row_count * G, LEVELS, BI)


@triton.jit
def put_segments(
    segments, i_level: tl.constexpr, row, row_count, splits, first_partial, step, stride, LEVELS: tl.constexpr, BI: tl.constexpr
):
    """segments[row + i, level] = (splits, first partial of head 0 and split 0, partials from one split to the next)."""
    for start in range(0, row_count, BI):
        o_row = start + tl.arange(0, BI)
        at = segments + ((row + o_row) * (LEVELS + 1) + i_level) * 3
        tl.store(at, tl.zeros_like(o_row) + splits, mask=o_row < row_count)
        tl.store(at + 1, first_partial + o_row * step, mask=o_row < row_count)
        tl.store(at + 2, tl.zeros_like(o_row) + stride, mask=o_row < row_count)


@triton.jit(do_not_specialize=["N", "T", "HKV", "G", "BM", "HB", "BM1"])
def emit_work(
    items, row_list, segments, status, node_rows, node_row_start, node_page_start, node_length, node_plan,
    stream_row, stream_row_count, stream_path, stream_rank, stream_page_start, stream_length, segment_plan,
    N, T, HKV, G, BM, HB, BM1, LEVELS: tl.constexpr, FIELDS: tl.constexpr, BI: tl.constexpr,
    SHARED: tl.constexpr, SINGLE: tl.constexpr, UNBOUNDED: tl.constexpr,
):  # fmt: skip
    """Program i writes the items of node i, or those of stream i - N with its entries in the row lists and segments."""
    i_program = tl.program_id(0)
    if tl.load(status) == 0:
        if i_program < N:
            emit_node(
                i_program,
                items,
                node_rows,
                node_row_start,
                node_page_start,
                node_length,
                node_plan,
                HKV,
                G,
                BM,
                FIELDS,
                BI,
                SHARED,
                UNBOUNDED,
            )
        else:
            i_stream = i_program - N
            row = tl.load(stream_row + i_stream)
            row_count = tl.load(stream_row_count + i_stream)
            identity = T * LEVELS  # the row list ends with 0 .. T - 1
            if row_count > 0:
                for level in tl.static_range(LEVELS):
                    node = tl.load(stream_path + i_stream * LEVELS + level)
                    if node >= 0:
                        node_splits = tl.load(node_plan + node * 4)
                        length = tl.load(node_length + node)
                        if node_splits > 0:
                            rank = tl.load(stream_rank + i_stream * LEVELS + level)
                            first = tl.load(node_row_start + node) + rank
                            for start in range(0, row_count, BI):
                                o_row = start + tl.arange(0, BI)
                                tl.store(row_list + first + o_row, row + o_row, mask=o_row < row_count)
                            first_partial = tl.load(node_plan + node * 4 + 3) + rank * G
                            stride = tl.load(node_rows + node) * G
                            put_segments(segments, level, row, row_count, node_splits, first_partial, G, stride, LEVELS, BI)
                        else:
                            emit_segment(
                                i_stream, level, items, tl.load(node_page_start + node), length, row, row_count, UNBOUNDED, segment_plan,
                                segments, identity, LEVELS, HKV, G, HB, BM1, FIELDS, BI, SINGLE,
                            )  # fmt: skip
                length = tl.load(stream_length + i_stream)
                emit_segment(
                    i_stream, LEVELS, items, tl.load(stream_page_start + i_stream),
                    length, row, row_count, length - row_count, segment_plan,
                    segments, identity, LEVELS, HKV, G, HB, BM1, FIELDS, BI, SINGLE,
                )  # fmt: skip


@triton.jit
def settle(status):
    """Does nothing. An ordinary launch behind the list: what is launched after it may read the list before its own predecessor is done
    (programmatic dependent launch makes a kernel wait for that one alone)."""
    tl.load(status)
