"""What only a GPU can show of the split-layout kernels: captured graphs, the Hopper kernel's bits, the tuned tiles."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from askmany.kernels import reference
from askmany.kernels.layout import PrivateItem, SharedItem, SplitBatch
from askmany.kernels.oracle import relative_error
from askmany.kernels.plan import Chunking
from askmany.kernels.stream_attention import StreamAttention
from askmany.kernels.tables import NodeEntry, StepLimits, StreamEntry
from askmany.kernels.tiles import AttentionShape, candidates
from askmany.kernels.tune import tuned_tiles

pytestmark = pytest.mark.gpu

SHAPES = [
    AttentionShape(28, 4, 128, 64, torch.bfloat16),
    AttentionShape(32, 32, 128, 16, torch.float16),
    AttentionShape(12, 2, 64, 16, torch.bfloat16),
    AttentionShape(16, 1, 256, 64, torch.bfloat16),
    AttentionShape(9, 3, 96, 1, torch.bfloat16),
    AttentionShape(12, 2, 128, 16, torch.float32),
]


class Step:
    """Five streams of two rows below two documents (one with a group node), and a lone one; pages scattered, NaN where nothing lies."""

    nodes, streams, rows = 3, 6, 12

    def __init__(self, shape: AttentionShape, seed: int) -> None:
        self.shape, self.draw = shape, random.Random(seed)
        self.per = -(-700 // shape.page_size)  # pages a node or stream owns
        pages = list(range((self.nodes + self.streams) * self.per))
        self.draw.shuffle(pages)
        self.owned = [pages[i * self.per : (i + 1) * self.per] for i in range(self.nodes + self.streams)]
        size = (len(pages) * shape.page_size, shape.kv_heads, shape.head_dim)
        self.q = torch.randn(self.rows, shape.q_heads, shape.head_dim, device="cuda").to(shape.dtype)
        self.full = [torch.randn(size, device="cuda").to(shape.dtype) for _ in range(2)]
        self.limits = StepLimits(self.rows, self.streams, self.nodes, len(pages))

    def entries(self) -> tuple[list[NodeEntry], list[StreamEntry]]:
        """Fresh lengths; a stream in eight is dead."""
        nodes = [NodeEntry(self.draw.choice((0, 1, 63, 64, 65, 300, 700)), self.owned[i]) for i in range(self.nodes)]
        paths = [[0], [0], [0, 2], [0, 2], [1], []]
        streams = []
        for i, path in enumerate(paths):
            length, rows = self.draw.choice((0, 2, 3, 64, 130, 700)), self.draw.choice((0, 2, 2, 2, 2, 2, 2, 2))
            streams.append(StreamEntry(2 * i, rows, length, self.owned[self.nodes + i], path))
        return nodes, streams

    def caches(self, nodes: list[NodeEntry], streams: list[StreamEntry]) -> tuple[torch.Tensor, torch.Tensor]:
        """The caches with NaN in every slot that this step has no token in."""
        kept = torch.cat([self.slots(node) for node in nodes] + [self.slots(stream) for stream in streams])
        k_cache, v_cache = (torch.full_like(full, float("nan")) for full in self.full)
        k_cache[kept], v_cache[kept] = self.full[0][kept], self.full[1][kept]
        return k_cache, v_cache

    def slots(self, entry: NodeEntry | StreamEntry) -> torch.Tensor:
        size = self.shape.page_size
        return torch.tensor([page * size + i for page in entry.pages for i in range(size)], device="cuda")[: entry.length]

    def batch(self, nodes: list[NodeEntry], streams: list[StreamEntry]) -> SplitBatch:
        shared = []
        for index, node in enumerate(nodes):
            rows = [s.row + r for s in streams if index in s.path for r in range(s.row_count)]
            shared.append(SharedItem(torch.tensor(rows, dtype=torch.int64, device="cuda"), self.slots(node)))
        return SplitBatch(tuple(shared), tuple(PrivateItem(s.row, s.row_count, self.slots(s)) for s in streams))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_captured_step_replays_at_other_lengths(shape: AttentionShape) -> None:
    step = Step(shape, seed=51)
    held, eager = (StreamAttention(shape, step.limits, torch.device("cuda"), rows_per_stream=2) for _ in range(2))
    k_cache, v_cache = (torch.empty_like(full) for full in step.full)
    out = torch.empty_like(step.q)

    def run() -> None:
        held.plan.build()
        held.run(step.q, k_cache, v_cache, 0.1, out)

    held.tables.load(*step.entries())
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for number in range(1000):
        nodes, streams = step.entries()
        for cache, fresh in zip((k_cache, v_cache), step.full if number % 20 else step.caches(nodes, streams), strict=True):
            cache.copy_(fresh)
        for attention in (held, eager):
            attention.tables.load(nodes, streams)
        out.fill_(float("nan"))
        graph.replay()
        eager.plan.build()
        assert torch.equal(out, eager.run(step.q, k_cache, v_cache, 0.1)), (number, nodes, streams)
        if number % 20 == 0:
            q, k, v = (t.double() for t in (step.q, k_cache, v_cache))
            want, _ = reference.split_attention(q, k, v, step.batch(nodes, streams), 0.1)
            assert relative_error(out, want) < (1e-5 if shape.dtype == torch.float32 else 4e-3)
    held.plan.check()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("choice", range(3))
def test_a_stream_keeps_its_bits_whatever_its_siblings_do(shape: AttentionShape, choice: int) -> None:
    step = Step(shape, seed=52)
    chunking = Chunking(deterministic=True, shared_tokens=256, single_tokens=128)
    tiles = candidates(shape, step.rows, 2, torch.cuda.get_device_capability())
    attention = StreamAttention(
        shape, step.limits, torch.device("cuda"), rows_per_stream=2, chunking=chunking, tiles=tiles[choice % len(tiles)]
    )
    for _ in range(20):
        nodes, streams = step.entries()
        k_cache, v_cache = step.caches(nodes, streams)
        attention.tables.load(nodes, streams)
        attention.plan.build()
        before = attention.run(step.q, k_cache, v_cache, 0.1)
        mine = step.draw.randrange(step.streams)
        others = [s if i == mine else replace(s, row_count=step.draw.choice((0, 2))) for i, s in enumerate(streams)]
        attention.tables.load(nodes, others)
        attention.plan.build()
        after = attention.run(step.q, k_cache, v_cache, 0.1)
        rows = slice(streams[mine].row, streams[mine].row + streams[mine].row_count)
        assert torch.equal(before[rows], after[rows])
        attention.plan.check()


def test_tuning_finds_tiles_that_are_kept(tmp_path: Path) -> None:
    shape, cache_file = SHAPES[0], tmp_path / "tiles.json"
    tiles = tuned_tiles(shape, 16, 1, torch.device("cuda"), cache_file)
    assert tiles in candidates(shape, 16, 1, torch.cuda.get_device_capability())
    assert torch.cuda.get_device_name() in cache_file.read_text()
    assert tuned_tiles(shape, 16, 1, torch.device("cuda"), cache_file) == tiles
