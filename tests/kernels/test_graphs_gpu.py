"""Bits and graphs on a GPU: siblings leave no trace, runs repeat, a graph captured at one set of lengths serves a thousand others."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from askmany.kernels.layout import MaskedBatch, MaskedItem
from askmany.kernels.plan import Chunking
from askmany.kernels.rotary import Rotary, rotate_and_store
from askmany.kernels.store import store
from askmany.kernels.stream_attention import StreamAttention
from askmany.kernels.stream_mask import MaskTile, plan_mask, stream_mask
from askmany.kernels.tables import NodeEntry, StepLimits, StreamEntry
from askmany.kernels.tiles import AttentionShape, candidates

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
HQ, HKV, D, PAGE = 28, 4, 128, 16
PAGES, STREAMS, NODES = 2048, 24, 4
SCALE = D**-0.5
REPLAYS = 1000


class Pool:
    """One layer's caches and a step's queries, all random, so that any pages make a valid step."""

    def __init__(self, seed: int, heads: tuple[int, int] = (HQ, HKV)) -> None:
        q_heads, kv_heads = heads
        generator = torch.Generator(device="cuda").manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)

        self.k, self.v = normal(PAGES * PAGE, kv_heads, D), normal(PAGES * PAGE, kv_heads, D)
        self.q = normal(STREAMS, q_heads, D)
        self.k_new, self.v_new = normal(STREAMS, kv_heads, D), normal(STREAMS, kv_heads, D)


def attention(*, deterministic: bool, settled: bool = True) -> StreamAttention:
    shape, limits = AttentionShape(HQ, HKV, D, PAGE, torch.bfloat16), StepLimits(STREAMS, STREAMS, NODES, 2 * PAGES)
    return StreamAttention(shape, limits, torch.device("cuda"), chunking=Chunking(deterministic=deterministic), settled_nodes=settled)


def split_step(draw: random.Random) -> tuple[list[NodeEntry], list[StreamEntry]]:
    """Up to four documents of 0 to 8,000 tokens, lone streams, dead rows; every page list random and scattered."""
    lengths = [draw.choice((0, 1, 15, 16, 17, 700, 2000, 8000)) for _ in range(draw.randint(1, NODES))]
    streams = []
    for row in range(draw.randint(1, STREAMS)):
        length = draw.choice((1, 2, 15, 16, 17, 63, 64, 65, 1000))
        path = (draw.randrange(len(lengths)),) if draw.random() < 0.8 else ()
        streams.append(StreamEntry(row, int(draw.random() < 0.9), length, _pages(draw, length), path))
    return [NodeEntry(length, _pages(draw, length)) for length in lengths], streams


def masked_step(draw: random.Random) -> MaskedBatch:
    """Up to three requests of ragged documents, streams and cached tokens; ids of cached slots change with the batch."""
    slot_sid = torch.full((PAGES * PAGE,), -1, dtype=torch.int32)
    q_sid = torch.full((STREAMS,), -1, dtype=torch.int32)
    order = torch.tensor(draw.sample(range(PAGES * PAGE), 9000))
    items, row, used = [], 0, 0
    for _ in range(draw.randint(1, 3)):
        rows, prefix, cached = draw.randint(1, STREAMS // 3), draw.choice((0, 1, 63, 64, 65, 1000, 2000)), draw.randint(0, 300)
        slots = order[used : used + prefix + cached + rows]
        slot_sid[slots[prefix:]] = torch.tensor([draw.randrange(rows) for _ in range(cached + rows)], dtype=torch.int32)
        q_sid[row : row + rows] = torch.arange(rows, dtype=torch.int32)
        items.append(MaskedItem(row, rows, slots.cuda()))
        row, used = row + rows, used + len(slots)
    return MaskedBatch(tuple(items), q_sid.cuda(), slot_sid.cuda())


def _pages(draw: random.Random, length: int) -> list[int]:
    return draw.sample(range(PAGES // 4), -(-length // PAGE))


def run(kernel: StreamAttention, pool: Pool) -> tuple[Tensor, Tensor]:
    out, lse = torch.full_like(pool.q, float("nan")), torch.full(pool.q.shape[:2], float("nan"), device="cuda")
    kernel.run(pool.q, pool.k, pool.v, SCALE, out, lse)
    return out, lse


@pytest.mark.parametrize("change", ["add", "remove", "swap", "longer"])
def test_a_sibling_leaves_no_trace(change: str) -> None:
    """Deterministic chunking: whatever happens to the other streams of a document, stream 0's bits stay."""
    pool, kernel = Pool(1), attention(deterministic=True)
    draw = random.Random(2)
    node = NodeEntry(6000, _pages(draw, 6000))
    streams = [StreamEntry(i, 1, length, _pages(draw, length), (0,)) for i, length in enumerate((700, 65, 1000, 64, 1, 17))]
    kernel.tables.load([node], streams)
    kernel.plan.build()
    before = run(kernel, pool)
    match change:
        case "add":
            streams += [StreamEntry(i, 1, 40, _pages(draw, 40), (0,)) for i in range(6, STREAMS)]
        case "remove":
            streams = streams[:1]
        case "swap":
            streams[1:] = [StreamEntry(i, 1, 333, _pages(draw, 333), (0,)) for i in range(1, 6)]
            pool.q[1:] = pool.q[1:].flip(0)
        case "longer":
            streams[1] = StreamEntry(1, 1, 4000, _pages(draw, 4000), (0,))
    kernel.tables.load([node], streams)
    kernel.plan.build()
    kernel.plan.check()
    after = run(kernel, pool)
    assert torch.equal(before[0][0], after[0][0])
    assert torch.equal(before[1][0], after[1][0])
    assert not torch.equal(before[0][1:], after[0][1:])


@pytest.mark.parametrize("deterministic", [True, False])
def test_two_runs_of_the_split_layout_are_identical(deterministic: bool) -> None:
    pool, kernel, draw = Pool(3), attention(deterministic=deterministic), random.Random(4)
    for _ in range(10):
        kernel.tables.load(*split_step(draw))
        kernel.plan.build()
        first, second = run(kernel, pool), run(kernel, pool)
        assert torch.equal(first[0], second[0])
        assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_captured_split_step_serves_other_lengths(deterministic: bool) -> None:
    """The work list is built inside the graph: after loading other tables, a replay equals an eager run, bit for bit."""
    pool, captured, eager, draw = Pool(5), attention(deterministic=deterministic), attention(deterministic=deterministic), random.Random(6)
    captured.tables.load(*split_step(draw))
    captured.plan.build()
    out, lse = run(captured, pool)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.plan.build()
        captured.run(pool.q, pool.k, pool.v, SCALE, out, lse)
    for _ in range(REPLAYS):
        step = split_step(draw)
        for kernel in (captured, eager):
            kernel.tables.load(*step)
        graph.replay()
        eager.plan.build()
        want = run(eager, pool)
        assert torch.equal(out, want[0])
        assert torch.equal(lse, want[1])
    captured.plan.check()


def test_a_captured_masked_step_serves_other_lengths() -> None:
    """A graph over one plan's buffers, refilled with other batches, equals an eager run over plans of just their size."""
    pool, draw, tile = Pool(7), random.Random(8), MaskTile(64, 64, 4, 3)
    first = masked_step(draw)
    held, slot_sid = plan_mask(first, 9, request_capacity=3, key_capacity=9000), first.slot_sid.clone()

    def call(plan: object, sid: Tensor) -> tuple[Tensor, Tensor]:
        return stream_mask(pool.q, pool.k_new, pool.v_new, pool.k, pool.v, sid, plan, SCALE, tile)  # type: ignore[arg-type]

    call(held, slot_sid)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call(held, slot_sid)
    for _ in range(REPLAYS):
        batch = masked_step(draw)
        plan = plan_mask(batch, 9)
        held.update(plan)
        slot_sid.copy_(batch.slot_sid)
        graph.replay()
        want = call(plan, batch.slot_sid)
        assert torch.equal(out, want[0])
        assert torch.equal(lse, want[1])


@pytest.mark.parametrize("deterministic", [True, False])
def test_copying_documents_early_changes_no_bit(deterministic: bool) -> None:
    pool, draw = Pool(11), random.Random(12)
    early, late = (attention(deterministic=deterministic, settled=settled) for settled in (True, False))
    for _ in range(50):
        step, found = split_step(draw), []
        for kernel in (early, late):
            kernel.tables.load(*step)
            kernel.plan.build()
            found.append(run(kernel, pool))
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("document", [0, 100 * PAGE], ids=["alone", "document"])
@pytest.mark.parametrize("each", [1, 3], ids=["one-row", "three-rows"])
@pytest.mark.parametrize("choice", [0, 1, 2])
@pytest.mark.parametrize("heads", [(28, 4), (16, 1)], ids=str)
def test_what_the_step_itself_writes_is_waited_for(heads: tuple[int, int], choice: int, each: int, document: int, turned: bool) -> None:
    """A long launch, the store (with queries and keys turned), attention, in a graph: the newest keys and the queries hold NaN until they
    are written, and attention starts beside what writes them. Without a document, all programs begin with a stream's own keys."""
    pool, shape, count = Pool(13, heads), AttentionShape(*heads, D, PAGE, torch.bfloat16), STREAMS // each
    tiles = candidates(shape, STREAMS, each, (9, 0))
    assert len(tiles) == 3
    limits = StepLimits(STREAMS, STREAMS, NODES, 2 * PAGES)
    kernel = StreamAttention(shape, limits, torch.device("cuda"), rows_per_stream=each, tiles=tiles[choice], settled_nodes=True)
    places = random.Random(14).sample(range(PAGES), 100 + 8 * count)
    own = [places[100 + 8 * i :][:8] for i in range(count)]
    lengths = [each + i * 11 % (8 * PAGE - each) for i in range(count)]  # the newest keys lie anywhere in a tile, behind none and many
    streams = [StreamEntry(i * each, each, length, own[i], (0,) if document else ()) for i, length in enumerate(lengths)]
    kernel.tables.load([NodeEntry(document, places[:100])] if document else [], streams)
    newest = [(own[i], length - each + row) for i, length in enumerate(lengths) for row in range(each)]
    slots = torch.tensor([pages[at // PAGE] * PAGE + at % PAGE for pages, at in newest], device="cuda")
    positions = torch.arange(STREAMS, device="cuda")
    rotary = Rotary(torch.rand(STREAMS, D, device="cuda"))
    kernel.plan.build()
    big, product = (torch.randn(4096, 4096, device="cuda") for _ in range(2))
    before = [x.clone() for x in (pool.k, pool.v, pool.q, pool.k_new)]
    q, k = torch.empty_like(pool.q), torch.empty_like(pool.k_new)

    def step(out: Tensor, lse: Tensor) -> None:
        torch.mm(big, big, out=product)
        q.copy_(pool.q)
        k.copy_(pool.k_new)
        if turned:
            rotate_and_store(q, k, pool.v_new, positions, rotary, pool.k, pool.v, slots)
        else:
            store(k, pool.v_new, pool.k, pool.v, slots)
        kernel.run(q, pool.k, pool.v, SCALE, out, lse)

    out, lse = torch.empty_like(pool.q), torch.empty(pool.q.shape[:2], device="cuda")
    step(out, lse)
    want = out.clone()
    assert not bool(want.isnan().any())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(out, lse)
    for _ in range(30):
        for held, first in zip((pool.k, pool.v, pool.q, pool.k_new), before, strict=True):
            held.copy_(first)
        pool.k[slots] = pool.v[slots] = q[:] = float("nan")
        graph.replay()
        assert torch.equal(out, want)
