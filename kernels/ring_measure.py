"""The start-up measurement behind `ring_choice`: times pass-KV against pass-Q on this group, and its link and attention speeds.

Collective. What is fitted are the slowest rank's times, the same numbers on every rank. Knows no model: random tensors of its head shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from askmany.kernels import ring
from askmany.kernels.block_attention import BlockAttention
from askmany.kernels.layout import PrivateItem, SplitBatch
from askmany.kernels.rank_group import RankGroup
from askmany.kernels.ring_choice import Link, Rules, fit_choice
from askmany.kernels.ring_plan import Slots, key_blocks, local_batch
from askmany.kernels.zigzag import shard

REPEATS = 3
Cell = tuple[int, int]  # (new tokens, cached tokens)


def calibrated(
    rules: Rules, cells: Sequence[Cell], blocks: BlockAttention, group: RankGroup, device: torch.device, dtype: torch.dtype
) -> Rules:
    """`rules` with the link and the fit that measuring `cells` gives. Takes about `REPEATS + 1` layers of attention a cell and way."""
    if group.size == 1:
        return rules
    measured = [(new, cached, *time_cell(new, cached, rules, blocks, group, device, dtype)) for new, cached in cells]
    return replace(rules, fit=fit_choice(measured), link=measure_link(rules, max(cells, key=sum), blocks, group, device, dtype))


def time_cell(
    new: int, cached: int, rules: Rules, blocks: BlockAttention, group: RankGroup, device: torch.device, dtype: torch.dtype
) -> tuple[float, float]:
    """Seconds of (pass-KV, pass-Q) for one sequence of `new` tokens over `cached`, in the way (ring or gathered) its message would go."""
    work = CellWork(new, cached, rules, blocks, group, device, dtype)
    return tuple(group.agree([_median_s(work.pass_kv, group, device), _median_s(work.pass_q, group, device)]))  # type: ignore[return-value]


def measure_link(rules: Rules, cell: Cell, blocks: BlockAttention, group: RankGroup, device: torch.device, dtype: torch.dtype) -> Link:
    """Bytes/s of a key block to the next rank, and FLOP/s of attention to the keys that a rank has itself."""
    work = CellWork(*cell, rules, blocks, group, device, dtype)
    received = torch.empty_like(work.block)
    transfer_s = _median_s(lambda: group.pass_on(work.block, received)(), group, device)
    attend_s = _median_s(work.attend_own, group, device)
    transfer_s, attend_s, pairs = group.agree([transfer_s, attend_s, work.own_pairs])
    heads = rules.heads
    return Link(4 * pairs * heads.q_heads * heads.head_dim / attend_s, work.block.nbytes / transfer_s)


class CellWork:
    """One cell's tensors and prepared attention on this rank: `q` [P, HQ, D], `block` [2, L, HKV, D]. Collective where it exchanges."""

    def __init__(
        self, new: int, cached: int, rules: Rules, blocks: BlockAttention, group: RankGroup, device: torch.device, dtype: torch.dtype
    ) -> None:
        heads, ranks = rules.heads, range(group.size)
        self.new, self.scale, self._group = new, heads.head_dim**-0.5, group
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
        full = sum(len(item.rows) * len(item.slots) for item in mine.shared)
        self.own_pairs = full + sum(item.row_count * (item.row_count + 1) // 2 for item in mine.private)

    def pass_kv(self) -> ring.Part:
        return ring.pass_kv(self.q, self.block, self._over, self.scale, self._group)

    def pass_q(self) -> ring.Part:
        return ring.pass_q(self.q, self._ids, self.block[0], self.block[1], self._of, self.scale, self._group)

    def gather_kv(self) -> ring.Part:
        return ring.gather_kv(self.q, self.block, self._gathered, self.scale, self._group)

    def attend_own(self) -> object:
        """Attention to the keys here alone."""
        attend = self._over[self._group.rank]
        return attend(self.q, self.block[0], self.block[1], self.scale) if attend else None

    def attend_all(self) -> object:
        """The attention of pass-KV without its exchange: every block's share of the work, over the keys here."""
        return ring.pass_kv(self.q, self.block, self._over, self.scale, _Still(self._group))

    def exchange(self) -> object:
        """The exchange of pass-KV without its attention."""
        return ring.pass_kv(self.q, self.block, [None] * self._group.size, self.scale, self._group)

    def everything(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the whole sequence in order, [C + T, HKV, D] each, on every rank."""
        blocks, arrived = self._group.all_gather(self.block)
        arrived()
        rank, place = (index.to(blocks.device) for index in (self._cut.slots.rank, self._cut.slots.place))
        return blocks[rank, 0, place], blocks[rank, 1, place]


class _Still(RankGroup):
    """A group in which nothing travels: what a rank receives is whatever lies there."""

    def __init__(self, group: RankGroup) -> None:
        self.ranks, self.size, self.rank, self.traffic = group.ranks, group.size, group.rank, group.traffic

    def pass_on(self, send: Tensor, receive: Tensor) -> Callable[[], None]:
        return lambda: None


def _median_s(run: Callable[[], object], group: RankGroup, device: torch.device) -> float:
    times = []
    for _ in range(REPEATS + 1):
        group.agree([0.0])  # start together
        _wait(device)
        started = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - started)
    return sorted(times[1:])[REPEATS // 2]  # the first one warms up


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
