"""The PyTorch attention path equals the reference on random steps, reads no unused slot and, in row blocks, is blind to siblings."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from askmany.kernels import dense
from askmany.kernels.layout import MaskedBatch, MaskedItem, PrivateItem, SharedItem, SplitBatch
from askmany.kernels.passes import AttentionPlan, SharedPass, as_run, plan_masked, plan_split
from askmany.kernels.reference import masked_attention, split_attention
from askmany.kernels.torch_attention import planned_attention
from tests.helpers.layouts import Pool, masked_case, split_case

SHAPES = st.tuples(st.sampled_from([1, 2, 3, 6, 7]), st.sampled_from([1, 2, 3]), st.sampled_from([8, 16, 60, 64, 128]))
ROW_BLOCKS = st.sampled_from([None, 4, 32])


def assert_same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], tolerance: float) -> None:
    for name, a, b in zip(("output", "log-sum-exp"), got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


def make_pool(seed: int, shape: tuple[int, int, int], scattered: bool, dtype: torch.dtype = torch.float32) -> tuple[random.Random, Pool]:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    return rng, Pool(rng, 4096, shape[1], shape[2], scattered, dtype)


def queries(rows: int, shape: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    groups, kv_heads, head_dim = shape
    return torch.randn(rows, groups * kv_heads, head_dim, dtype=dtype)


def doubled(pool: Pool) -> tuple[Tensor, Tensor]:
    return pool.k.double(), pool.v.double()


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), shape=SHAPES, scattered=st.booleans(), row_block=ROW_BLOCKS, own=st.sampled_from([3, 40, 150]))
def test_split_equals_reference(seed: int, shape: tuple[int, int, int], scattered: bool, row_block: int | None, own: int) -> None:
    rng, pool = make_pool(seed, shape, scattered)
    batch, rows = split_case(rng, pool, documents=rng.randint(1, 3), max_streams=4, max_document=300, max_own=own)
    q = queries(rows, shape)
    want = split_attention(q.double(), *doubled(pool), batch, 0.3)
    assert_same(planned_attention(q, pool.k, pool.v, plan_split(batch, row_block), 0.3), want, 2e-5)


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), shape=SHAPES, scattered=st.booleans(), row_block=ROW_BLOCKS, own=st.sampled_from([3, 40, 300]))
def test_masked_equals_reference(seed: int, shape: tuple[int, int, int], scattered: bool, row_block: int | None, own: int) -> None:
    rng, pool = make_pool(seed, shape, scattered)
    batch, rows = masked_case(rng, pool, requests=rng.randint(1, 3), max_streams=5, max_document=300, max_own=own)
    q = queries(rows, shape)
    want = masked_attention(q.double(), *doubled(pool), batch, 0.3)
    assert_same(planned_attention(q, pool.k, pool.v, plan_masked(batch, row_block), 0.3), want, 2e-5)


@pytest.mark.parametrize("size", [1.0, 80.0])
def test_extreme_scores_stay_exact(size: float) -> None:
    rng, pool = make_pool(5, (3, 2, 64), scattered=True, dtype=torch.float64)
    batch, rows = split_case(rng, pool, documents=3, max_streams=4, max_document=700, max_own=20)
    q = queries(rows, (3, 2, 64), torch.float64) * size
    got = planned_attention(q, pool.k, pool.v, plan_split(batch), 0.5)
    assert_same(got, split_attention(q, *doubled(pool), batch, 0.5), 1e-10)


def test_one_dominant_key_far_from_the_others() -> None:
    _, pool = make_pool(6, (2, 1, 16), scattered=False)
    document, own = pool.take(2000), pool.take(1)
    pool.k[own] *= 40
    batch = SplitBatch((SharedItem(torch.tensor([0]), document),), (PrivateItem(0, 1, own),))
    q = queries(1, (2, 1, 16))
    assert_same(planned_attention(q, pool.k, pool.v, plan_split(batch), 1.0), split_attention(q.double(), *doubled(pool), batch, 1.0), 2e-5)


def test_rows_of_no_item_are_zero() -> None:
    _, pool = make_pool(7, (2, 1, 8), scattered=False)
    batch = SplitBatch((), (PrivateItem(1, 2, pool.take(5)),))
    out, lse = planned_attention(queries(4, (2, 1, 8)), pool.k, pool.v, plan_split(batch), 1.0)
    assert (out[[0, 3]] == 0).all()
    assert torch.isinf(lse[[0, 3]]).all()
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("budget", [1, 7 * 6 * 41, 1 << 20])
def test_general_path_equals_the_tiled_kernel(monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    """The path of other devices, in blocks of one row, of a few, and in one go."""
    monkeypatch.setattr(dense, "MAX_SCORES", budget)
    q, k, v = torch.randn(3, 2, 41, 16), torch.randn(3, 2, 41, 16), torch.randn(3, 2, 41, 16)
    visible = torch.rand(3, 1, 41, 41) < 0.5
    visible[..., 0] = True
    for mask, causal in ((None, False), (visible, False), (None, True)):
        got, want = dense._blocked(q, k, v, 0.2, mask, causal), dense.dense_attention(q, k, v, 0.2, mask, causal)
        assert_same(got, (want[0].double(), want[1].double()), 2e-5)


def test_contiguous_slots_are_read_through_a_view() -> None:
    assert as_run(torch.arange(5, 9)) == slice(5, 9)
    assert isinstance(as_run(torch.tensor([5, 7, 6, 8])), Tensor)
    assert isinstance(as_run(torch.tensor([5, 6, 8])), Tensor)
    plan = plan_split(SplitBatch((SharedItem(torch.arange(3), torch.arange(100, 700)),), ()))
    assert plan == AttentionPlan((), (SharedPass(slice(0, 3), slice(100, 700)),))


def _siblings(rng: random.Random, pool: Pool, document: Tensor, own: Tensor, before: int, after: int) -> tuple[SplitBatch, int]:
    """One watched stream (one row over `own`) among `before` and `after` siblings of the same document; its row."""
    lengths = [rng.randint(1, 90) for _ in range(before)], [rng.randint(1, 90) for _ in range(after)]
    items = [pool.take(n) for n in lengths[0]] + [own] + [pool.take(n) for n in lengths[1]]
    private = tuple(PrivateItem(row, 1, slots) for row, slots in enumerate(items))
    return SplitBatch((SharedItem(torch.arange(len(items)), document),), private), before


@pytest.mark.parametrize("groups", [1, 3, 7])
@pytest.mark.parametrize("threads", [1, 2])
def test_row_blocks_make_a_stream_blind_to_its_siblings(groups: int, threads: int) -> None:
    kept = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        shape = (groups, 2, 64)
        rng, pool = make_pool(groups, shape, scattered=False)
        document, own, query = pool.take(601), pool.take(23), queries(1, shape)[0]
        results = []
        for before, after in ((0, 0), (1, 0), (0, 5), (13, 2), (3, 30)):
            batch, row = _siblings(rng, pool, document, own, before, after)
            q = queries(before + after + 1, shape)
            q[row] = query
            out, lse = planned_attention(q, pool.k, pool.v, plan_split(batch, row_block=32), 0.125)
            results.append((out[row], lse[row]))
        for out, lse in results[1:]:
            assert torch.equal(out, results[0][0])
            assert torch.equal(lse, results[0][1])
    finally:
        torch.set_num_threads(kept)


def test_row_blocks_pick_a_streams_own_keys_out_of_an_interleaved_row() -> None:
    shape = (3, 1, 64)
    _, pool = make_pool(8, shape, scattered=False)
    document, own, query = pool.take(500), pool.take(3), queries(1, shape)[0]
    results = []
    for siblings in (0, 1, 9):
        others = pool.take(4 * siblings)
        order = torch.cat([own[:2], others, own[2:]])
        slot_sid = torch.full((pool.k.shape[0],), -1, dtype=torch.int32)
        slot_sid[own] = 0
        slot_sid[others] = 1
        batch = MaskedBatch((MaskedItem(0, 1, torch.cat([document, order])),), torch.tensor([0], dtype=torch.int32), slot_sid)
        results.append(planned_attention(query[None], pool.k, pool.v, plan_masked(batch, row_block=32), 0.125))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


def test_a_stream_whose_keys_begin_far_into_its_row() -> None:
    """More hidden keys than the tiled kernel takes at a time stand before, between and after the visible ones."""
    _, pool = make_pool(9, (3, 2, 16), scattered=False)
    document, row = pool.take(40), pool.take(3000)
    slot_sid = torch.full((pool.k.shape[0],), -1, dtype=torch.int32)
    slot_sid[row] = 0
    slot_sid[row[[700, 1900]]] = 1
    slot_sid[row[-2:]] = torch.tensor([1, 0], dtype=torch.int32)
    q_sid = torch.tensor([1, 0], dtype=torch.int32)
    q = queries(2, (3, 2, 16))
    for slots in (torch.cat([document, row]), row):
        batch = MaskedBatch((MaskedItem(0, 2, slots),), q_sid, slot_sid)
        want = masked_attention(q.double(), *doubled(pool), batch, 0.3)
        for row_block in (None, 32):
            assert_same(planned_attention(q, pool.k, pool.v, plan_masked(batch, row_block), 0.3), want, 2e-5)
