"""The start-up measurement behind `ring_choice`: times pass-KV against pass-Q on this group, and its link and attention speeds.

Collective. What is fitted are the slowest rank's times, the same numbers on every rank. Knows no model: random tensors of its head shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

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
    work = _Work(new, cached, rules, blocks, group, device, dtype)
    return tuple(group.agree([_median_s(work.pass_kv, group, device), _median_s(work.pass_q, group, device)]))  # type: ignore[return-value]


def measure_link(rules: Rules, cell: Cell, blocks: BlockAttention, group: RankGroup, device: torch.device, dtype: torch.dtype) -> Link:
    """Bytes/s of a key block to the next rank, and FLOP/s of attention to the keys that a rank has itself."""
    work = _Work(*cell, rules, blocks, group, device, dtype)
    received = torch.empty_like(work.block)
    transfer_s = _median_s(lambda: group.pass_on(work.block, received)(), group, device)
    attend_s = _median_s(work.attend_own, group, device)
    transfer_s, attend_s, pairs = group.agree([transfer_s, attend_s, work.own_pairs])
    heads = rules.heads
    return Link(4 * pairs * heads.q_heads * heads.head_dim / attend_s, work.block.nbytes / transfer_s)


class _Work:
    """One cell's tensors and prepared attention on this rank."""

    def __init__(
        self, new: int, cached: int, rules: Rules, blocks: BlockAttention, group: RankGroup, device: torch.device, dtype: torch.dtype
    ) -> None:
        heads, ranks = rules.heads, group.size
        rows, before = shard([new], ranks), shard([cached], ranks)
        keys = Slots(torch.cat([before.rank, rows.rank]), torch.cat([before.place, rows.place + before.places]))
        batch = SplitBatch((), (PrivateItem(0, new, torch.arange(cached + new)),))
        cut = key_blocks(batch, keys, ranks)
        self._scale, self._group = heads.head_dim**-0.5, group
        self.block = torch.randn(2, cut.places, heads.kv_heads, heads.head_dim).to(device, dtype)
        self._q = torch.randn(rows.places, heads.q_heads, heads.head_dim).to(device, dtype)
        self._ids = torch.where(rows.rows(group.rank) < 0, -1, torch.arange(rows.places)).to(device, torch.int32)
        self._over = [blocks.prepare(local_batch(batch, rows, cut.slots, [group.rank], r), rows.places) for r in range(ranks)]
        self._of = [blocks.prepare(local_batch(batch, rows, cut.slots, [r], group.rank), rows.places) for r in range(ranks)]
        mine = local_batch(batch, rows, cut.slots, [group.rank], group.rank)
        self.own_pairs = sum(len(i.rows) * len(i.slots) for i in mine.shared) + sum(
            i.row_count * (i.row_count + 1) // 2 for i in mine.private
        )

    def pass_kv(self) -> object:
        return ring.pass_kv(self._q, self.block, self._over, self._scale, self._group)

    def pass_q(self) -> object:
        return ring.pass_q(self._q, self._ids, self.block[0], self.block[1], self._of, self._scale, self._group)

    def attend_own(self) -> object:
        attend = self._over[self._group.rank]
        return attend(self._q, self.block[0], self.block[1], self._scale) if attend else None


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
