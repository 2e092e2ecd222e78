"""The split-layout kernels against the fp64 oracle, and what an engine relies on beyond numbers: bits, capacity, reuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from askmany.kernels.layout import PrivateItem, SharedItem, SplitBatch
from askmany.kernels.merge import merge
from askmany.kernels.oracle import lse_error, relative_error
from askmany.kernels.plan import Chunking, WorkCapacity
from askmany.kernels.stream_attention import StreamAttention
from askmany.kernels.tables import StepLimits, entries_of
from askmany.kernels.tiles import AttentionShape
from tests.helpers.attention_cases import SMALL_FACTORS, Case, World, cases, id_of, split_world

FEWER: dict[str, tuple[object, ...]] = {"streams": (1, 2, 5), "loners": (0, 1), "rows": (1, 3)}
GRID = cases(SMALL_FACTORS | FEWER, seed=23, at_least=0, limit_values=2**20)
CASE = Case("fp32", 64, (6, 2), 3, 100, 65, 16, 2, 1, 2, 2, 3, 0)
BOUNDS = {"fp32": 1e-5, "bf16": 4e-3, "fp16": 4e-3}
PINNED = Chunking(deterministic=True, shared_tokens=64, single_tokens=64)
SHARING = Chunking(threshold_bytes=0)


def attention_for(world: World, chunking: Chunking, **options: object) -> StreamAttention:
    case, rows = world.case, world.q.shape[0]
    shape = AttentionShape(*case.heads, case.head_dim, case.page_size, case.torch_dtype)
    limits = StepLimits(rows, rows // case.rows + 1, 9, world.k_cache.shape[0] // case.page_size + 8)
    return StreamAttention(shape, limits, world.q.device, rows_per_stream=case.rows, chunking=chunking, **options)  # type: ignore[arg-type]


def run(attention: StreamAttention, world: World, batch: SplitBatch) -> tuple[Tensor, Tensor]:
    attention.load(batch)
    lse = torch.full(world.q.shape[:2], float("nan"), device=world.q.device)
    out = torch.full_like(world.q, float("nan"))
    attention.run(world.q, world.k_cache, world.v_cache, world.case.scale, out, lse)
    attention.plan.check()
    return out, lse


@pytest.mark.parametrize("case", GRID, ids=id_of)
def test_equals_the_oracle(case: Case, device: str) -> None:
    world, batch = split_world(case, seed=len(str(case)), device=device)
    chunking = (PINNED, SHARING, Chunking())[GRID.index(case) % 3]
    out, lse = run(attention_for(world, chunking), world, batch)
    want, want_lse = world.truth()
    assert not bool(out.isnan().any())
    bound = BOUNDS[case.dtype]
    if case.peak and case.dtype == "fp32":
        bound = max(bound, 2 * relative_error(world.sdpa(torch.float32), want))
    assert relative_error(out, want) < bound
    assert lse_error(lse, want_lse) < 1e-5
    assert not bool(out[~world.live].any())


def rows_of(out: tuple[Tensor, Tensor], item: PrivateItem) -> tuple[Tensor, Tensor]:
    span = slice(item.row_start, item.row_start + item.row_count)
    return out[0][span], out[1][span]


def without(batch: SplitBatch, gone: set[int]) -> SplitBatch:
    """The batch with some private items dead: their rows leave every shared item too."""
    dead = {r for i in gone for r in range(batch.private[i].row_start, batch.private[i].row_start + batch.private[i].row_count)}
    shared = [
        SharedItem(torch.tensor([r for r in item.rows.tolist() if r not in dead], dtype=torch.int64), item.slots) for item in batch.shared
    ]
    return SplitBatch(tuple(shared), tuple(p for i, p in enumerate(batch.private) if i not in gone))


@pytest.mark.parametrize("gone", [{1}, {0, 1, 3}], ids=str)
def test_a_stream_keeps_its_bits_when_siblings_leave(gone: set[int], device: str) -> None:
    world, batch = split_world(CASE, seed=31, device=device)
    attention = attention_for(world, PINNED)
    whole, part = run(attention, world, batch), run(attention, world, without(batch, gone))
    for index, item in enumerate(batch.private):
        got, want = rows_of(part, item), rows_of(whole, item)
        if index in gone:
            assert not bool(got[0].any())
            assert bool(torch.isneginf(got[1]).all())
        else:
            assert torch.equal(got[0], want[0])
            assert torch.equal(got[1], want[1])


def test_a_stream_keeps_its_bits_when_a_sibling_changes(device: str) -> None:
    world, batch = split_world(CASE, seed=32, device=device)
    attention = attention_for(world, PINNED)
    before = run(attention, world, batch)
    changed = batch.private[2]
    span = slice(changed.row_start, changed.row_start + changed.row_count)
    world.q[span] *= 3
    world.k_cache[changed.slots] *= -2
    world.v_cache[changed.slots] += 1
    after = run(attention, world, batch)
    assert not torch.equal(rows_of(before, changed)[0], rows_of(after, changed)[0])
    for item in batch.private[:2] + batch.private[3:]:
        assert torch.equal(rows_of(before, item)[0], rows_of(after, item)[0])


@pytest.mark.parametrize("chunking", [SHARING, PINNED], ids=["even", "pinned"])
def test_two_runs_are_identical(chunking: Chunking, device: str) -> None:
    world, batch = split_world(CASE, seed=33, device=device)
    first, second = (run(attention_for(world, chunking), world, batch) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_static_buffers_serve_other_steps(device: str) -> None:
    """What a captured graph relies on: buffers that held another step give the same bits as fresh ones."""
    world, batch = split_world(CASE, seed=34, device=device)
    other = without(batch, {0, 2})
    held = attention_for(world, SHARING)
    run(held, world, batch)
    fresh, reused = run(attention_for(world, SHARING), world, other), run(held, world, other)
    assert torch.equal(fresh[0], reused[0])
    assert torch.equal(fresh[1], reused[1])


def test_lengths_change_on_the_device(device: str) -> None:
    """A stream that grows by what a kernel writes into `stream_length`, without the host, equals one loaded at that length."""
    world, batch = split_world(CASE, seed=35, device=device)
    shorter = SplitBatch(batch.shared, tuple(replace(p, slots=p.slots[:-3]) for p in batch.private))
    grown = attention_for(world, SHARING)
    nodes, streams = entries_of(batch, CASE.page_size)
    grown.tables.load(nodes, [replace(s, length=s.length - 3) for s in streams])
    grown.plan.build()
    out = grown.run(world.q, world.k_cache, world.v_cache, CASE.scale)
    assert torch.equal(out, run(attention_for(world, SHARING), world, shorter)[0])
    grown.tables.stream_length[: len(streams)] += 3
    grown.plan.build()
    out = grown.run(world.q, world.k_cache, world.v_cache, CASE.scale)
    assert torch.equal(out, run(attention_for(world, SHARING), world, batch)[0])


def test_a_node_below_the_threshold_is_read_by_each_stream(device: str) -> None:
    world, batch = split_world(CASE, seed=36, device=device)
    shared, alone = attention_for(world, SHARING), attention_for(world, Chunking(threshold_bytes=10**12))
    together, apart = run(shared, world, batch), run(alone, world, batch)
    assert int((shared.plan.node_plan[:, 0] > 0).sum()) > 0
    assert int((alone.plan.node_plan[:, 0] > 0).sum()) == 0
    assert relative_error(apart[0], together[0]) < 1e-6


@pytest.mark.parametrize(("document", "shared"), [(1023, False), (1024, True)])
def test_a_long_node_of_one_stream_is_read_as_a_shared_one(document: int, shared: bool, device: str) -> None:
    """It saves no bytes whatever the threshold, so its length alone decides; a sibling brings the threshold back."""
    world, batch = split_world(replace(CASE, streams=2, document=document, documents=1, loners=0, levels=1, rows=1), seed=41, device=device)
    attention = attention_for(world, Chunking(threshold_bytes=10**12))
    run(attention, world, batch)
    assert not bool(attention.plan.node_plan[:, 0].any())
    out = run(attention, world, without(batch, {1}))
    assert bool(attention.plan.node_plan[:, 0].any()) == shared
    pairs = zip(rows_of(out, batch.private[0]), rows_of(world.truth(), batch.private[0]), strict=True)
    assert all(relative_error(got, want) < 1e-5 for got, want in pairs)


@pytest.mark.parametrize("capacity", [WorkCapacity(5, 10**6), WorkCapacity(10**4, 100)], ids=["items", "partials"])
def test_a_step_beyond_capacity_is_reported_and_never_silent(capacity: WorkCapacity, device: str) -> None:
    world, batch = split_world(CASE, seed=37, device=device)
    small = attention_for(world, PINNED, capacity=capacity)
    small.load(batch)
    out = small.run(world.q, world.k_cache, world.v_cache, CASE.scale)
    assert bool(out.isnan().all())
    with pytest.raises(RuntimeError, match=str(min(capacity.items, capacity.partials))):
        small.plan.check()
    one = without(batch, set(range(1, len(batch.private))))
    tiny = SplitBatch((), (replace(one.private[0], slots=one.private[0].slots[:2], row_count=1),))
    out = run(small, world, tiny)[0]
    assert not bool(out.isnan().any())


def test_a_small_list_gets_longer_chunks_before_it_fails(device: str) -> None:
    world, batch = split_world(CASE, seed=39, device=device)
    free = attention_for(world, SHARING)
    want = run(free, world, batch)
    tight = attention_for(world, SHARING, capacity=WorkCapacity(int(free.plan.item_count) - 1, 10**6))
    got = run(tight, world, batch)
    assert int(tight.plan.item_count) < int(free.plan.item_count)
    assert relative_error(got[0], want[0]) < 1e-6


def test_what_does_not_fit_the_tables_is_refused(device: str) -> None:
    world, batch = split_world(CASE, seed=38, device=device)
    attention = attention_for(world, SHARING)
    nodes, streams = entries_of(batch, CASE.page_size)
    for bad, word in [
        ([replace(streams[0], row=10**4)], "capacity"),
        ([replace(streams[0], path=[0, 0])], "different"),
        ([replace(streams[0], path=[99])], "99"),
        ([replace(streams[0], pages=[])], "pages"),
        (streams * 50, "streams"),
    ]:
        with pytest.raises(ValueError, match=word):
            attention.tables.load(nodes, bad)
    with pytest.raises(ValueError, match="in order"):
        entries_of(SplitBatch((), (PrivateItem(0, 1, torch.tensor([0, 2, 1])),)), 16)
    with pytest.raises(ValueError, match="scale"):
        attention.run(world.q, world.k_cache, world.v_cache, 0.0)
    with pytest.raises(ValueError, match="must be"):
        attention.run(world.q[:, :3], world.k_cache, world.v_cache, 1.0)


@pytest.mark.parametrize("chunking", [PINNED, SHARING], ids=["pinned", "sharing"])
def test_a_step_without_rows_is_an_empty_result(chunking: Chunking, device: str) -> None:
    world, _ = split_world(CASE, seed=2, device=device)
    found = attention_for(world, chunking).run(world.q[:0], world.k_cache, world.v_cache, 1.0)
    assert found.shape == (0, *world.q.shape[1:])


def test_pinned_merges_sum_alike_in_steps_of_any_size(device: str) -> None:
    """A row with many partials, merged among few rows and among many."""
    shape, splits, rows = AttentionShape(8, 8, 16, 16, torch.float32), 13, 120
    attention = StreamAttention(shape, StepLimits(rows, rows, 1, 8), torch.device(device), chunking=PINNED)
    plan, count = attention.plan, rows * 8 * splits
    part_o, part_lse = torch.randn(count, 16, device=device), torch.randn(count, device=device) * 3
    plan.segments[:, -1, 0] = splits
    plan.segments[:, -1, 1] = torch.arange(rows, device=device, dtype=torch.int32) * 8 * splits
    plan.segments[:, -1, 2] = 1
    few, many = (torch.empty(size, 8, 16, device=device) for size in (3, rows))
    for out in (few, many):
        merge(part_o, part_lse, plan, out, None, overlap=False)
    assert torch.equal(few, many[:3])
    own = part_lse.view(rows, 8, splits).double().softmax(-1)
    torch.testing.assert_close(many.double(), (own[..., None] * part_o.view(rows, 8, splits, 16).double()).sum(2), rtol=1e-5, atol=1e-5)
