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
from askmany.kernels.layout import SplitBatch
from askmany.kernels.merge_into import Part, nothing
from askmany.kernels.passes import Run, as_run, sent
from askmany.kernels.rank_group import RankGroup
from askmany.kernels.ring_choice import Choice
from askmany.kernels.ring_plan import KeyBlocks, Slots, foreign_items, key_blocks, local_batch
from askmany.kernels.zigzag import Sharding

Attention = Callable[[Tensor, Tensor, Tensor, float, RankGroup], Part]  # (q [P, HQ, D], k, v [S, HKV, D], scale, group)


@dataclass(frozen=True, slots=True)
class Section:
    """Local rows `span` with one way of attending."""

    span: slice
    run: Attention


@dataclass(slots=True)
class RankAttention:
    """The step on this rank: local rows `rows` are no padding and go to `places` of the pool, which `on` names with the group."""

    rows: Run
    places: Run
    sections: Sequence[Section]
    pool: KVPool | None = field(default=None)
    group: RankGroup | None = field(default=None)

    def on(self, pool: KVPool, group: RankGroup) -> RankAttention:
        self.pool, self.group = pool, group
        return self

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """See `LayerAttention`; padding rows come out as 0."""
        assert self.pool is not None
        self.pool.store(layer, self.places, k[self.rows], v[self.rows])
        if len(self.sections) == 1 and self.sections[0].span == slice(0, len(q)):
            return self._run(self.sections[0], layer, q, scale).to(q.dtype)
        out = torch.zeros_like(q)
        for section in self.sections:
            out[section.span] = self._run(section, layer, q, scale)
        return out

    def _run(self, section: Section, layer: int, q: Tensor, scale: float) -> Tensor:
        assert self.pool is not None
        assert self.group is not None
        return section.run(q[section.span], self.pool.k[layer], self.pool.v[layer], scale, self.group)[0]


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
            sources = _sent(cut.sources[rank], device)
            if choice.way == "gather_kv":
                return Section(span, _gather_kv(batch, rows, cut, sources, rank, blocks))
            over = [blocks.prepare(local_batch(batch, rows, cut.slots, [rank], other), rows.places) for other in ranks]
            return Section(span, lambda q, k, v, scale, group: ring.pass_kv(q, *_block(k, v, sources, cut.places), over, scale, group))
        case "pass_q":
            ids = torch.where(rows.rows(rank) < 0, -1, torch.arange(rows.places)).to(torch.int32)
            ids = sent(ids, device)
            of = [blocks.prepare(local_batch(batch, rows, slots.owners, [other], rank), rows.places) for other in ranks]
            return Section(span, lambda q, k, v, scale, group: ring.pass_q(q, ids, k, v, of, scale, group))
        case "gather_q":
            return Section(span, _gather_q(batch, rows, slots.owners, rank, blocks))


def _local(batch: SplitBatch, rows: Sharding, slots: Slots, rank: int, blocks: BlockAttention) -> Attention:
    attend = blocks.prepare(local_batch(batch, rows, slots, [rank], rank), rows.places)

    def run(q: Tensor, k: Tensor, v: Tensor, scale: float, group: RankGroup) -> Part:
        return nothing(q) if attend is None else attend(q, k, v, scale)

    return run


def _gather_kv(batch: SplitBatch, rows: Sharding, cut: KeyBlocks, sources: Run, rank: int, blocks: BlockAttention) -> Attention:
    """All blocks at once: the items against every rank's keys are one batch."""
    flat = Slots(cut.slots.rank, ring.gathered_slot(cut.slots.rank, cut.slots.place, cut.places))
    parts = [local_batch(batch, rows, flat, [rank], other) for other in range(rows.ranks)]
    whole = SplitBatch(tuple(i for p in parts for i in p.shared), tuple(i for p in parts for i in p.private))
    attend = blocks.prepare(whole, rows.places)
    return lambda q, k, v, scale, group: ring.gather_kv(q, torch.stack(_block(k, v, sources, cut.places)), attend, scale, group)


def _gather_q(batch: SplitBatch, rows: Sharding, slots: Slots, rank: int, blocks: BlockAttention) -> Attention:
    """What own rows see of their own streams' keys here is attended to while the queries of all ranks are gathered."""
    own_items, shared_items = SplitBatch((), batch.private), SplitBatch(batch.shared, ())
    own = blocks.prepare(local_batch(own_items, rows, slots, [rank], rank), rows.places)
    everyone = local_batch(shared_items, rows, slots, list(range(rows.ranks)), rank)
    foreign = foreign_items(batch, rows, slots, rank)
    attend = blocks.prepare(SplitBatch((*everyone.shared, *foreign), ()), rows.places * rows.ranks)

    def run(q: Tensor, k: Tensor, v: Tensor, scale: float, group: RankGroup) -> Part:
        return ring.gather_q(q, k, v, attend, scale, group, own=lambda: None if own is None else own(q, k, v, scale))

    return run


def _block(k: Tensor, v: Tensor, sources: Run, places: int) -> tuple[Tensor, Tensor]:
    """Keys and values [L, HKV, D] at `sources`, whatever lies there in places too many. Views where they lie together."""
    if isinstance(sources, slice) and sources.start + places <= len(k):
        own = slice(sources.start, sources.start + places)
        return k[own], v[own]
    blocks = [cache.new_zeros(places, *cache.shape[1:]) for cache in (k, v)]
    for block, cache in zip(blocks, (k, v), strict=True):
        part = cache[sources]
        block[: len(part)] = part
    return blocks[0], blocks[1]


def _sent(sources: Tensor, device: torch.device) -> Run:
    run = as_run(sources) if len(sources) else sources
    return run if isinstance(run, slice) else sent(run, device)
