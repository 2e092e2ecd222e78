"""Exact attention over a group of ranks that each hold some of the rows and some of the keys (arXiv 2411.01783, section 3.5).

- pass-KV: queries stay, key blocks go round the ring; the next block travels while the one at hand is attended to (two buffers).
- pass-Q: keys stay, query blocks go round with the ids of their rows; partial results come home in one all-to-all.
- gathered variants of both for short messages: one all-gather in place of N - 1 hops.

Partial results are merged by log-sum-exp in fp32, in an order that the rank numbers alone fix: equal runs give equal bits. All methods
are collective; blocks have the same shape on every rank. What a block's rows see was prepared once a step (`ring_plan`,
`block_attention`); None in place of a prepared attention means that no row sees a key of that block, and then nothing is computed.

Letters: N ranks, P places (local rows, padded), L places of a key block, HQ and HKV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from askmany.kernels.block_attention import Attend
from askmany.kernels.merge_into import Part, merge_into, nothing, widened
from askmany.kernels.rank_group import RankGroup


def pass_kv(q: Tensor, k: Tensor, v: Tensor, attends: Sequence[Attend | None], scale: float, group: RankGroup) -> Part:
    """`q` [P, HQ, D] stays; `k`, `v` [L, HKV, D], this rank's block, go round in one message. `attends[r]`: over rank r's block."""
    result: Part | None = None
    here = (k, v)
    buffers = [(torch.empty_like(k), torch.empty_like(v)) for _ in range(min(2, group.size - 1))]
    for step in range(group.size):
        last = step == group.size - 1
        if not last:
            incoming = buffers[step % 2]
            arrived = group.pass_on(here, incoming)
        attend = attends[(group.rank - step) % group.size]
        if attend is not None:
            result = attend(q, *here, scale, widened(result))
        if not last:
            arrived()
            here = incoming
    return nothing(q) if result is None else result


def gather_kv(q: Tensor, block: Tensor, attend: Attend | None, scale: float, group: RankGroup) -> Part:
    """As `pass_kv` with all blocks at once. `attend`: over N blocks, rank r's key i in slot 2 * r * L + i (`gathered_slot`)."""
    blocks, arrived = group.all_gather(block)
    arrived()
    flat = blocks.view(-1, *block.shape[2:])  # keys and values of rank 0, then of rank 1, ...
    return nothing(q) if attend is None else attend(q, flat, flat[block.shape[1] :], scale)


def gathered_slot(rank: Tensor, place: Tensor, block_places: int) -> Tensor:
    """Where a key of `gather_kv` lies: both [S]."""
    return 2 * rank * block_places + place


def pass_q(q: Tensor, ids: Tensor, k: Tensor, v: Tensor, attends: Sequence[Attend | None], scale: float, group: RankGroup) -> Part:
    """`k`, `v` [S, HKV, D] stay; `q` [P, HQ, D] goes round with `ids` [P] int32, the rows' places at home (-1: padding).

    `attends[r]`: rank r's rows over the keys here.
    """
    here = _pack_queries(q, ids)
    buffers = (torch.empty_like(here), torch.empty_like(here))
    outgoing = q.new_zeros(group.size, q.shape[0], q.shape[1] * (q.shape[2] + 1) + 1, dtype=torch.float32)
    for step in range(group.size):
        last = step == group.size - 1
        if not last:
            incoming = buffers[step % 2]
            arrived = group.pass_on([here], [incoming])
        source = (group.rank - step) % group.size
        attend = attends[source]
        queries, row_ids = _unpack_queries(here, q)
        part = nothing(queries) if attend is None else attend(queries, k, v, scale)
        _pack_part(outgoing[source], part, row_ids)
        if not last:
            arrived()
            here = incoming
    return _come_home(outgoing, q, group)


def gather_q(
    q: Tensor, k: Tensor, v: Tensor, attend: Attend | None, scale: float, group: RankGroup, own: Callable[[], Part | None] = lambda: None
) -> Part:
    """As `pass_q` with the queries of all ranks at once: one all-gather, one all-to-all of output and log-sum-exp together.

    `attend`: all ranks' rows (rank r's place i is row r * P + i) over the keys here. `own` computes meanwhile what needs no other rank.
    """
    queries, arrived = group.all_gather(q)
    mine = own()
    arrived()
    queries = queries.view(-1, *q.shape[1:])
    part = nothing(queries) if attend is None else attend(queries, k, v, scale)
    outgoing = q.new_empty(group.size, q.shape[0], q.shape[1] * (q.shape[2] + 1), dtype=torch.float32)
    outgoing[..., : q.shape[1] * q.shape[2]] = part[0].reshape(group.size, q.shape[0], -1)
    outgoing[..., q.shape[1] * q.shape[2] :] = part[1].reshape(group.size, q.shape[0], -1)
    received = group.all_to_all(outgoing)
    total = widened(mine)
    for rank in range(group.size):
        total = _add_home(total, received[rank], q)
    assert total is not None
    return total


def _add_home(total: Part | None, received: Tensor, q: Tensor) -> Part:
    """One rank's results for all rows here, added to the others'."""
    first = total is None
    total = total or (torch.empty_like(q, dtype=torch.float32), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device))
    merge_into(total, _unpack_part(received, q), slice(0, q.shape[0]), first)
    return total


def pass_kv_bytes(block_places: int, kv_heads: int, head_dim: int, element_bytes: int) -> int:
    """Bytes of one message of pass-KV; there are N - 1 of them a rank and layer."""
    return 2 * block_places * kv_heads * head_dim * element_bytes


def pass_q_bytes(places: int, q_heads: int, head_dim: int, element_bytes: int) -> int:
    """Bytes of one message of pass-Q, ids included."""
    return places * (q_heads * head_dim * element_bytes + 4)


def home_bytes(places: int, q_heads: int, head_dim: int, with_ids: bool) -> int:
    """Bytes that a rank sends to each other rank in the all-to-all at the end of pass-Q or of the gathered variant."""
    return 4 * places * (q_heads * (head_dim + 1) + with_ids)


def _pack_queries(q: Tensor, ids: Tensor) -> Tensor:
    """[P, bytes] uint8: each row's queries, then its id."""
    return torch.cat([q.reshape(len(q), -1).view(torch.uint8), ids[:, None].view(torch.uint8)], dim=1)


def _unpack_queries(packed: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    width = packed.shape[1] - 4
    return packed[:, :width].contiguous().view(like.dtype).view(like.shape), packed[:, width:].contiguous().view(torch.int32)[:, 0]


def _pack_part(target: Tensor, part: Part, ids: Tensor) -> None:
    """Fill `target` [P, HQ * (D + 1) + 1] with output, log-sum-exp and id of each row."""
    out, lse = part
    width = out.shape[1] * out.shape[2]
    target[:, :width] = out.reshape(len(out), -1)
    target[:, width:-1] = lse
    target[:, -1] = ids.view(torch.float32)  # the bits, not the number


def _come_home(outgoing: Tensor, q: Tensor, group: RankGroup) -> Part:
    """Partial results to the ranks whose rows they are, put in place by their ids, and merged in the order of the ranks."""
    received = group.all_to_all(outgoing)  # [N, P, HQ * (D + 1) + 1]
    ids = received[:, :, -1].contiguous().view(torch.int32).long()  # below 0: padding
    total = nothing(q)
    for rank in range(group.size):
        merge_into(total, _unpack_part(received[rank], q), ids[rank])
    return total


def _unpack_part(packed: Tensor, q: Tensor) -> Part:
    """Views of output [P, HQ, D] and log-sum-exp [P, HQ] in `packed` [P, ...]."""
    _, heads, dim = q.shape
    width = heads * dim
    return packed[:, :width].view(len(packed), heads, dim), packed[:, width : width + heads]
