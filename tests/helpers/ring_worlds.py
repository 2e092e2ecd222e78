"""Fused batches of sequences spread over ranks: what one rank does with them in each way, and what the whole must come to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from askmany.kernels import ring
from askmany.kernels.block_attention import BlockAttention, TorchBlocks
from askmany.kernels.layout import PrivateItem, SharedItem, SplitBatch
from askmany.kernels.oracle import dense_attention
from askmany.kernels.rank_group import RankGroup
from askmany.kernels.reference import causal
from askmany.kernels.ring_choice import Heads, Rules
from askmany.kernels.ring_measure import calibrated
from askmany.kernels.ring_plan import Slots, key_blocks, local_batch
from askmany.kernels.zigzag import Sharding, rotate, shard

WAYS = ("pass_kv", "gather_kv", "pass_q", "gather_q")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class RingCase:
    """Sequences of (cached, new) tokens. `document`: tokens of a shared prefix that every row sees. `rotated`: one new token a sequence,
    dealt out by turns instead of in chunks."""

    sequences: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 16
    document: int = 0
    rotated: int | None = None
    seed: int = 0


@dataclass
class RingWorld:
    """The tensors of a case, and where everything lies on `ranks` ranks."""

    case: RingCase
    ranks: int

    def __post_init__(self) -> None:
        case = self.case
        torch.manual_seed(case.seed)
        cached, new = [c for c, _ in case.sequences], [t for _, t in case.sequences]
        self.rows: Sharding = shard(new, self.ranks) if case.rotated is None else rotate(len(new), self.ranks, case.rotated)
        before = shard([case.document, *cached], self.ranks, shifts=[index % self.ranks for index in range(len(cached) + 1)])
        self.slot_count = case.document + sum(cached) + sum(new)
        self.q = torch.randn(sum(new), case.heads[0], case.head_dim)
        self.k, self.v = torch.randn(2, self.slot_count, case.heads[1], case.head_dim)
        self.batch, rank, place = self._lay_out(cached, new, before)
        scattered = torch.randperm(before.places + self.rows.places + 3)  # a rank's memory is in no order
        self.memory = len(scattered)
        self.slots = Slots(rank, scattered[place])
        self.scale = case.head_dim**-0.5

    def _lay_out(self, cached: list[int], new: list[int], before: Sharding) -> tuple[SplitBatch, Tensor, Tensor]:
        rank, place = torch.empty(self.slot_count, dtype=torch.int64), torch.empty(self.slot_count, dtype=torch.int64)
        document = self.case.document
        rank[:document], place[:document] = before.rank[:document], before.place[:document]
        slot, row, old = document, 0, document
        private = []
        for have, fresh in zip(cached, new, strict=True):
            slots = torch.arange(slot, slot + have + fresh)
            rank[slots[:have]], place[slots[:have]] = before.rank[old : old + have], before.place[old : old + have]
            rank[slots[have:]] = self.rows.rank[row : row + fresh]
            place[slots[have:]] = self.rows.place[row : row + fresh] + before.places
            private.append(PrivateItem(row, fresh, slots))
            slot, row, old = slot + have + fresh, row + fresh, old + have
        shared = (SharedItem(torch.arange(row), torch.arange(document)),) if document and row else ()
        return SplitBatch(shared, tuple(private)), rank, place

    def truth(self) -> tuple[Tensor, Tensor]:
        """Output [T, HQ, D] and log-sum-exp [T, HQ] in fp64, sequence by sequence."""
        parts = []
        document = torch.arange(self.case.document)
        for item in self.batch.private:
            visible = torch.cat(
                [torch.ones(item.row_count, len(document), dtype=torch.bool), causal(item.row_count, len(item.slots))], dim=1
            )
            keys = torch.cat([document, item.slots])
            rows = slice(item.row_start, item.row_start + item.row_count)
            parts.append(dense_attention(self.q[rows], self.k[keys], self.v[keys], visible, self.scale))
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])

    def memory_of(self, rank: int) -> tuple[Tensor, Tensor]:
        """Keys and values of `rank`, NaN wherever nothing lies."""
        k, v = torch.full((2, self.memory, *self.k.shape[1:]), float("nan"))
        mine = torch.nonzero(self.slots.rank == rank)[:, 0]
        k[self.slots.place[mine]], v[self.slots.place[mine]] = self.k[mine], self.v[mine]
        return k, v

    def queries_of(self, rank: int) -> Tensor:
        """[P, HQ, D], NaN in padding."""
        rows = self.rows.rows(rank)
        return torch.where((rows < 0)[:, None, None], torch.nan, self.q[rows]) if len(rows) else self.q[:0]


def attend(world: RingWorld, way: str, group: RankGroup, blocks: BlockAttention) -> tuple[Tensor, Tensor]:
    """This rank's rows [P, HQ, D], in one of `WAYS`."""
    rank, ranks, rows, batch = group.rank, range(group.size), world.rows, world.batch
    (k, v), q = world.memory_of(rank), world.queries_of(rank)
    if way in ("pass_kv", "gather_kv"):
        cut = key_blocks(batch, world.slots, group.size)
        block = torch.full((2, cut.places, *k.shape[1:]), float("nan"))
        block[0, : len(cut.sources[rank])], block[1, : len(cut.sources[rank])] = k[cut.sources[rank]], v[cut.sources[rank]]
        if way == "pass_kv":
            over = [blocks.prepare(local_batch(batch, rows, cut.slots, [rank], r), rows.places) for r in ranks]
            return ring.pass_kv(q, *block, over, world.scale, group)
        flat = Slots(cut.slots.rank, ring.gathered_slot(cut.slots.rank, cut.slots.place, cut.places))
        parts = [local_batch(batch, rows, flat, [rank], r) for r in ranks]
        whole = SplitBatch(tuple(i for p in parts for i in p.shared), tuple(i for p in parts for i in p.private))
        return ring.gather_kv(q, block, blocks.prepare(whole, rows.places), world.scale, group)
    if way == "pass_q":
        ids = torch.where(rows.rows(rank) < 0, -1, torch.arange(rows.places)).to(torch.int32)
        of = [blocks.prepare(local_batch(batch, rows, world.slots, [r], rank), rows.places) for r in ranks]
        return ring.pass_q(q, ids, k, v, of, world.scale, group)
    everyone = blocks.prepare(local_batch(batch, rows, world.slots, list(ranks), rank), rows.places * group.size)
    return ring.gather_q(q, k, v, everyone, world.scale, group)


def rank_results(rank: int, size: int, case: RingCase) -> dict[str, tuple[Tensor, Tensor, dict[str, tuple[int, int]], bool]]:
    """In every way: this rank's output and log-sum-exp, its traffic, and whether a second run gave the same bits."""
    world, group = RingWorld(case, size), RankGroup.world()
    results = {}
    for way in WAYS:
        out, lse = attend(world, way, group, TorchBlocks(CPU))
        traffic = group.traffic.take()
        again, lse_again = attend(world, way, group, TorchBlocks(CPU))
        group.traffic.take()
        same = all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in ((out, again), (lse, lse_again)))
        results[way] = (out, lse, traffic, same)
    return results


def rank_rules(rank: int, size: int, cells: list[tuple[int, int]]) -> Rules:
    """What a start-up measurement on this rank comes to."""
    return calibrated(Rules(Heads(4, 2, 16, 4), size), cells, TorchBlocks(CPU), RankGroup.world(), CPU, torch.float32)
