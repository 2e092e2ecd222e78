"""What a model's layers call on one rank of a context-parallel group: store, exchange, attend, merge, section by section.

Made once a step by `context_parallel_step`, run in every layer. Letters: P places of a section, L places of a key block, S places of the
rank's pool, HQ and HKV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from askmany.engine.context_parallel_slots import SlotMap
from askmany.engine.kv_pool import KVPool
from askmany.kernels import ring
from askmany.kernels.block_attention import BlockAttention
from askmany.kernels.layout import SharedItem, SplitBatch
from askmany.kernels.rank_group import RankGroup
from askmany.kernels.ring_choice import Choice
from askmany.kernels.ring_plan import KeyBlocks, Slots, key_blocks, local_batch
from askmany.kernels.zigzag import Sharding

Run = Callable[[Tensor, Tensor, Tensor, float, RankGroup], ring.Part]  # (q [P, HQ, D], k, v [S, HKV, D], scale, group)


@dataclass(frozen=True, slots=True)
class Section:
    """Local rows `span` with one way of attending."""

    span: slice
    run: Run


@dataclass(slots=True)
class RankAttention:
    """The step on this rank: local rows `rows` are no padding and go to `places` of the pool, which `on` names with the group."""

    rows: Tensor
    places: Tensor
    sections: Sequence[Section]
    pool: KVPool | None = field(default=None)
    group: RankGroup | None = field(default=None)

    def on(self, pool: KVPool, group: RankGroup) -> RankAttention:
        self.pool, self.group = pool, group
        return self

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """See `LayerAttention`; padding rows come out as 0."""
        assert self.pool is not None
        assert self.group is not None
        self.pool.store(layer, self.places, k[self.rows], v[self.rows])
        out = torch.zeros_like(q)
        for section in self.sections:
            part, _ = section.run(q[section.span], self.pool.k[layer], self.pool.v[layer], scale, self.group)
            out[section.span] = part.to(q.dtype)
        return out


def prepare_section(
    batch: SplitBatch,
    rows: Sharding,
    choice: Choice,
    span: slice,
    slots: SlotMap,
    rank: int,
    blocks: BlockAttention,
    device: torch.device,
) -> Section:
    """This rank's part in the attention of `batch` (global slots) over `rows`, in the way that was chosen."""
    ranks = range(slots.ranks)
    match choice.way:
        case "local":
            return Section(span, _local(batch, rows, slots.seen_from(rank), rank, blocks))
        case "pass_kv" | "gather_kv":
            cut = key_blocks(batch, slots.owners, slots.ranks)
            sources = cut.sources[rank].to(device)
            if choice.way == "gather_kv":
                return Section(span, _gather_kv(batch, rows, cut, sources, rank, blocks))
            over = [blocks.prepare(local_batch(batch, rows, cut.slots, [rank], other), rows.places) for other in ranks]
            return Section(span, lambda q, k, v, scale, group: ring.pass_kv(q, _block(k, v, sources, cut.places), over, scale, group))
        case "pass_q":
            ids = torch.where(rows.rows(rank) < 0, -1, torch.arange(rows.places)).to(device, torch.int32)
            of = [blocks.prepare(local_batch(batch, rows, slots.owners, [other], rank), rows.places) for other in ranks]
            return Section(span, lambda q, k, v, scale, group: ring.pass_q(q, ids, k, v, of, scale, group))
        case "gather_q":
            return Section(span, _gather_q(batch, rows, slots.owners, rank, blocks))


def _local(batch: SplitBatch, rows: Sharding, slots: Slots, rank: int, blocks: BlockAttention) -> Run:
    attend = blocks.prepare(local_batch(batch, rows, slots, [rank], rank), rows.places)

    def run(q: Tensor, k: Tensor, v: Tensor, scale: float, group: RankGroup) -> ring.Part:
        return ring.nothing(q) if attend is None else attend(q, k, v, scale)

    return run


def _gather_kv(batch: SplitBatch, rows: Sharding, cut: KeyBlocks, sources: Tensor, rank: int, blocks: BlockAttention) -> Run:
    """All blocks at once: the items against every rank's keys are one batch."""
    flat = Slots(cut.slots.rank, ring.gathered_slot(cut.slots.rank, cut.slots.place, cut.places))
    parts = [local_batch(batch, rows, flat, [rank], other) for other in range(rows.ranks)]
    whole = SplitBatch(tuple(i for p in parts for i in p.shared), tuple(i for p in parts for i in p.private))
    attend = blocks.prepare(whole, rows.places)
    return lambda q, k, v, scale, group: ring.gather_kv(q, _block(k, v, sources, cut.places), attend, scale, group)


def _gather_q(batch: SplitBatch, rows: Sharding, slots: Slots, rank: int, blocks: BlockAttention) -> Run:
    """What own rows see of their own streams' keys here is attended to while the queries of all ranks are gathered."""
    own_items, shared_items = SplitBatch((), batch.private), SplitBatch(batch.shared, ())
    own = blocks.prepare(local_batch(own_items, rows, slots, [rank], rank), rows.places)
    everyone = local_batch(shared_items, rows, slots, list(range(rows.ranks)), rank)
    foreign = _of_others(own_items, rows, slots, rank)
    attend = blocks.prepare(SplitBatch((*everyone.shared, *foreign), ()), rows.places * rows.ranks)

    def run(q: Tensor, k: Tensor, v: Tensor, scale: float, group: RankGroup) -> ring.Part:
        return ring.gather_q(q, k, v, attend, scale, group, own=lambda: None if own is None else own(q, k, v, scale))

    return run


def _of_others(batch: SplitBatch, rows: Sharding, slots: Slots, rank: int) -> list[SharedItem]:
    """What rows of other ranks see of keys here, rows numbered through all ranks."""
    cut = local_batch(batch, rows, slots, list(range(rows.ranks)), rank)
    mine = slice(rank * rows.places, (rank + 1) * rows.places)
    assert all(mine.start <= item.row_start < mine.stop for item in cut.private), "a causal chunk does not lie where its rows do"
    return [item for item in cut.shared if not mine.start <= int(item.rows[0]) < mine.stop]


def _block(k: Tensor, v: Tensor, sources: Tensor, places: int) -> Tensor:
    """[2, L, HKV, D]: the keys and values at `sources`, padded with zeros."""
    block = k.new_zeros(2, places, *k.shape[1:])
    block[0, : len(sources)], block[1, : len(sources)] = k[sources], v[sources]
    return block
