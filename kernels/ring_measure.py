"""The start-up measurement behind `ring_choice`: times pass-KV against pass-Q on this group, and its link and attention speeds.

Collective. What is fitted are the slowest rank's times, the same numbers on every rank. Knows no model: random tensors of its head shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from askmany.kernels import ring
from askmany.kernels.block_attention import BlockAttention
from askmany.kernels.group_timing import group_s
from askmany.kernels.layout import PrivateItem, SplitBatch
from askmany.kernels.merge_into import Part
from askmany.kernels.rank_group import RankGroup
from askmany.kernels.ring_choice import Link, Rules
from askmany.kernels.ring_fit import Fit, fit_ways
from askmany.kernels.ring_plan import Slots, foreign_items, key_blocks, local_batch
from askmany.kernels.zigzag import shard

Cell = tuple[int, int]  # (new tokens, cached tokens)


def calibrated(
    rules: Rules, cells: Sequence[Cell], blocks: BlockAttention, group: RankGroup, device: torch.device, dtype: torch.dtype
) -> Rules:
    """`rules` with the link and the fit that measuring `cells` gives. Takes some ten layers of attention a cell and way."""
    if group.size == 1:
        return rules
    measured = [(new, cached, time_cell(CellWork(new, cached, rules, blocks, group, device, dtype))) for new, cached in cells]
    link = measure_link(CellWork(*max(cells, key=sum), rules, blocks, group, device, dtype))
    fit: Fit = group.broadcast_object(fit_ways(measured) if group.rank == 0 else None)  # solvers differ in last bits
    return replace(rules, fit=fit, link=link)


def time_cell(work: CellWork) -> dict[str, float]:
    """Seconds of each way."""
    return {name: group_s(way, work.group, work.q.device) for name, way in work.ways.items()}


def measure_link(work: CellWork) -> Link:
    """Bytes/s of a key block to the next rank, and FLOP/s of attention to the keys that a rank has itself."""
    group, device = work.group, work.q.device
    received = torch.empty_like(work.block)
    transfer_s = group_s(lambda: group.pass_on([work.block], [received])(), group, device)
    attend_s = group_s(work.attend_own, group, device)
    pairs = group.agree([work.own_pairs])[0]
    return Link(4 * pairs * work.q.shape[1] * work.q.shape[2] / attend_s, work.block.nbytes / transfer_s)


class CellWork:
    """One cell's tensors and prepared attention on this rank: `q` [P, HQ, D], `block` [2, L, HKV, D]. Collective where it exchanges."""

    def __init__(
        self, new: int, cached: int, rules: Rules, blocks: BlockAttention, group: RankGroup, device: torch.device, dtype: torch.dtype
    ) -> None:
        heads, ranks = rules.heads, range(group.size)
        self.new, self.scale, self.group = new, heads.head_dim**-0.5, group
        self.rows, before = shard([new], group.size), shard([cached], group.size)
        keys = Slots(torch.cat([before.rank, self.rows.rank]), torch.cat([before.place, self.rows.place + before.places]))
        batch = SplitBatch((), (PrivateItem(0, new, torch.arange(cached + new)),))
        self._cut = key_blocks(batch, keys, group.size)
        self.block = torch.randn(2, self._cut.places, heads.kv_heads, heads.head_dim, device=device, dtype=dtype)
        self.q = torch.randn(self.rows.places, heads.q_heads, heads.head_dim, device=device, dtype=dtype)
        self._ids = torch.where(self.rows.rows(group.rank) < 0, -1, torch.arange(self.rows.places)).to(device, torch.int32)

        def prepared(row_rank: int, key_rank: int, slots: Slots = self._cut.slots) -> SplitBatch:
            return local_batch(batch, self.rows, slots, [row_rank], key_rank)

        places = self.rows.places
        self._over = [blocks.prepare(prepared(group.rank, other), places) for other in ranks]
        self._of = [blocks.prepare(prepared(other, group.rank), places) for other in ranks]
        flat = Slots(self._cut.slots.rank, ring.gathered_slot(self._cut.slots.rank, self._cut.slots.place, self._cut.places))
        parts = [prepared(group.rank, other, flat) for other in ranks]
        whole = SplitBatch(tuple(i for part in parts for i in part.shared), tuple(i for part in parts for i in part.private))
        self._gathered = blocks.prepare(whole, places)
        mine = prepared(group.rank, group.rank)
        self._own = blocks.prepare(mine, places)
        foreign = foreign_items(batch, self.rows, self._cut.slots, group.rank)
        self._foreign = blocks.prepare(SplitBatch(tuple(foreign), ()), places * group.size)
        full = sum(len(item.rows) * len(item.slots) for item in mine.shared)
        self.own_pairs = full + sum(i.row_count * (2 * len(i.slots) - i.row_count + 1) // 2 for i in mine.private)

    @property
    def ways(self) -> dict[str, Callable[[], Part]]:
        """By name, all ways round."""
        return {"pass_kv": self.pass_kv, "gather_kv": self.gather_kv, "pass_q": self.pass_q, "gather_q": self.gather_q}

    def pass_kv(self) -> Part:
        return ring.pass_kv(self.q, self.block[0], self.block[1], self._over, self.scale, self.group)

    def pass_q(self) -> Part:
        return ring.pass_q(self.q, self._ids, self.block[0], self.block[1], self._of, self.scale, self.group)

    def gather_kv(self) -> Part:
        return ring.gather_kv(self.q, self.block, self._gathered, self.scale, self.group)

    def gather_q(self) -> Part:
        k, v = self.block
        own = self._own
        return ring.gather_q(
            self.q, k, v, self._foreign, self.scale, self.group, lambda: None if own is None else own(self.q, k, v, self.scale)
        )

    def attend_own(self) -> object:
        """Attention to the keys here alone."""
        attend = self._over[self.group.rank]
        return attend(self.q, self.block[0], self.block[1], self.scale) if attend else None

    def attend_all(self) -> object:
        """The attention of pass-KV without its exchange: every block's share of the work, over the keys here."""
        return ring.pass_kv(self.q, self.block[0], self.block[1], self._over, self.scale, _Still(self.group))

    def exchange(self) -> object:
        """The exchange of pass-KV without its attention."""
        return ring.pass_kv(self.q, self.block[0], self.block[1], [None] * self.group.size, self.scale, self.group)

    def everything(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the whole sequence in order, [C + T, HKV, D] each, on every rank."""
        blocks, arrived = self.group.all_gather(self.block)
        arrived()
        rank, place = (index.to(blocks.device) for index in (self._cut.slots.rank, self._cut.slots.place))
        return blocks[rank, 0, place], blocks[rank, 1, place]


class _Still(RankGroup):
    """A group in which nothing travels: what a rank receives is whatever lies there."""

    def __init__(self, group: RankGroup) -> None:
        self.ranks, self.size, self.rank, self.traffic = group.ranks, group.size, group.rank, group.traffic

    def pass_on(self, send: Sequence[Tensor], receive: Sequence[Tensor]) -> Callable[[], None]:
        return lambda: None
