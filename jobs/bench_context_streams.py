"""One decode step of many streams over a document that lies on several ranks, against the same step on one GPU. Attention of one layer.

For `bench_context_parallel`. The document is spread as prefill leaves it, streams live on one rank each; a layer is one all-gather of
queries, one document pass, one all-to-all of partial results. On a GPU the layer is also timed inside a CUDA graph, collectives included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from askmany.engine.context_parallel_attention import Section, prepare_section
from askmany.engine.context_parallel_rows import RowPolicy, place_prefixes, place_streams
from askmany.engine.context_parallel_slots import SlotMap
from askmany.jobs.bench_context_attention import BOUNDS, Bench, timed_ms
from askmany.kernels.layout import PrivateItem, SharedItem, SplitBatch
from askmany.kernels.oracle import dense_attention, relative_error
from askmany.kernels.rank_group import RankGroup
from askmany.kernels.ring_choice import Choice, Heads
from askmany.kernels.zigzag import Sharding

GRAPH_LAYERS = 8


class StreamStep:
    """`streams` rows, each with `private` keys of its own, over a document of `document` tokens on `ranks` ranks.

    Keys and queries depend on the slot and the row alone, so that any number of ranks computes the same.
    """

    def __init__(self, heads: Heads, document: int, streams: int, private: int, rank: int, ranks: int, bench: Bench) -> None:
        total = document + streams * private
        places = -(-document // ranks) + (-(-streams // ranks) + 1) * private + ranks
        self.slots = SlotMap(ranks, total, places)
        self.scale, self._heads, self._bench, self._rank = heads.head_dim**-0.5, heads, bench, rank
        (spread,) = place_prefixes([PrivateItem(0, document, torch.arange(document))], self.slots)
        self._store(torch.arange(document), spread)
        own = torch.arange(document, total).view(streams, private)
        items = tuple(PrivateItem(row, 1, own[row]) for row in range(streams))
        self.batch = SplitBatch((SharedItem(torch.arange(streams), torch.arange(document)),), items)
        nothing = torch.zeros(0, dtype=torch.int64)
        homes = torch.cat(place_streams(items, self.batch, self.slots, RowPolicy("home"), 0, nothing))
        self._store(own.flatten(), homes.repeat_interleave(private))
        self.rows = _by_rank(homes, ranks)
        choice = Choice("gather_q" if ranks > 1 else "local", "bench", "")
        span = slice(0, self.rows.places)
        self.section: Section = prepare_section(self.batch, self.rows, choice, span, self.slots, rank, bench.blocks, bench.device)
        self.k, self.v = self._memory()
        self.q = self._made(self.rows.rows(rank).clamp(min=0), 3, heads.q_heads)

    def layer(self, group: RankGroup) -> Callable[[], tuple[Tensor, Tensor]]:
        return lambda: self.section.run(self.q, self.k, self.v, self.scale, group)

    def error(self, out: Tensor) -> float:
        """Relative error of this rank's first row against fp64."""
        row = int(self.rows.rows(self._rank)[0])
        if row < 0:
            return 0.0
        seen = torch.cat([self.batch.shared[0].slots, self.batch.private[row].slots])
        keys, values = (self._made(seen, kind, self._heads.kv_heads) for kind in (1, 2))
        visible = torch.ones(1, len(seen), dtype=torch.bool, device=keys.device)
        return relative_error(out[:1], dense_attention(self.q[:1], keys, values, visible, self.scale)[0])

    def _store(self, slots: Tensor, ranks: Tensor) -> None:
        for rank in range(self.slots.ranks):
            self.slots.store(slots[ranks == rank], rank)

    def _memory(self) -> tuple[Tensor, Tensor]:
        held = self.slots.seen_from(self._rank)
        mine = torch.nonzero(held.rank == self._rank)[:, 0]
        size = self.slots.places, self._heads.kv_heads, self._heads.head_dim
        caches = [torch.zeros(size, device=self._bench.device, dtype=self._bench.dtype) for _ in range(2)]
        for kind, cache in enumerate(caches, start=1):
            for part in torch.tensor_split(mine, -(-len(mine) // (1 << 14)) or 1):
                cache[held.place[part].to(cache.device)] = self._made(part, kind, self._heads.kv_heads)
        return caches[0], caches[1]

    def _made(self, index: Tensor, kind: int, heads: int) -> Tensor:
        """[len(index), heads, D]: numbers that look random and depend on `index` and `kind` alone."""
        width = heads * self._heads.head_dim
        place = index.to(self._bench.device)[:, None].double() * width + torch.arange(width, device=self._bench.device)
        made = torch.sin(place * 12.9898 * kind + kind) * 43758.5453
        return ((made - made.floor()) * 2 - 1).view(-1, heads, self._heads.head_dim).to(self._bench.dtype)


def stream_cell(heads: Heads, document: int, streams: int, private: int, bench: Bench) -> dict[str, Any]:
    """Milliseconds of a layer on all ranks and on one, eager and in a graph, and the speed-up; a wrong result has its error and no time."""
    row: dict[str, Any] = {"document_tokens": document, "streams": streams, "private_tokens": private, "ranks": bench.group.size}
    for name, ranks in (("group", bench.group.size), ("alone", 1)):
        step = StreamStep(heads, document, streams, private, bench.group.rank if ranks > 1 else 0, ranks, bench)
        layer = step.layer(bench.group)
        error = bench.group.agree([step.error(layer()[0])])[0]
        right = error < BOUNDS[bench.dtype]
        row[f"{name}_error"] = error
        row[f"{name}_ms"] = timed_ms(layer, bench) if right else None
        row[f"{name}_graph_ms"] = graphed_ms(layer, bench) if right else None
        del step, layer
    for tail in ("ms", "graph_ms"):
        both = row[f"group_{tail}"], row[f"alone_{tail}"]
        row[f"speed_up_{tail.removesuffix('_ms').removesuffix('ms') or 'eager'}"] = both[1] / both[0] if all(both) else None
    return row


def graphed_ms(layer: Callable[[], object], bench: Bench) -> float | None:
    """Milliseconds of a layer inside a CUDA graph of several; None without a GPU, and where it cannot be captured (printed)."""
    if bench.device.type != "cuda":
        return None
    try:
        layer()
        torch.cuda.synchronize(bench.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(GRAPH_LAYERS):
                layer()
    except RuntimeError as error:
        print(f"rank {bench.group.rank}: NOT CAPTURED: {str(error)[:300]}", flush=True)
        return None
    return timed_ms(graph.replay, bench) / GRAPH_LAYERS


def _by_rank(homes: Tensor, ranks: int) -> Sharding:
    place = torch.empty_like(homes)
    for rank in range(ranks):
        mine = torch.nonzero(homes == rank)[:, 0]
        place[mine] = torch.arange(len(mine))
    return Sharding(ranks, int(place.max()) + 1, homes, place)
