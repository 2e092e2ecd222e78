"""The interleaved kernel against the fp64 oracle and the reference, in Triton's interpreter on a reduced grid."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from askmany.kernels import reference
from askmany.kernels.layout import MaskedBatch, MaskedItem
from askmany.kernels.oracle import lse_error, relative_error
from askmany.kernels.stream_mask import MaskTile, choose_splits, choose_tile, plan_mask
from tests.helpers.attention_cases import SMALL_FACTORS, Case, cases, id_of, masked_world
from tests.helpers.run_attention import run_masked

GRID = cases(SMALL_FACTORS | {"levels": (1,)}, seed=11, at_least=0, limit_values=2**22)
CASE = Case("fp32", 64, (6, 2), 5, 65, "ragged", 16, 2, 1, 1, 2, 3, 0)
BOUNDS = {"fp32": 1e-5, "bf16": 4e-3, "fp16": 4e-3}


@pytest.mark.parametrize("case", GRID, ids=id_of)
def test_equals_the_oracle(case: Case, device: str) -> None:
    world, batch = masked_world(case, seed=len(str(case)), device=device)
    splits = 1 + 2 * (GRID.index(case) % 2)
    out, lse = run_masked(world, batch, splits, MaskTile(16, 16, 4, 1))
    want, want_lse = world.truth()
    assert not bool(out.isnan().any())
    bound = BOUNDS[case.dtype]
    if case.peak and case.dtype == "fp32":
        bound = max(bound, 2 * relative_error(world.sdpa(torch.float32), want))
    assert relative_error(out, want) < bound
    assert lse_error(lse, want_lse) < 1e-5
    assert not bool(out[~world.live].any())


def test_oracle_and_reference_agree(device: str) -> None:
    world, batch = masked_world(CASE, seed=3, device=device)
    out, lse = reference.masked_attention(world.q, world.k_cache, world.v_cache, batch, CASE.scale)
    want, want_lse = world.truth()
    assert relative_error(out, want) < 1e-5
    assert lse_error(lse, want_lse) < 1e-5


def test_two_runs_are_identical(device: str) -> None:
    world, batch = masked_world(CASE, seed=4, device=device)
    first, second = run_masked(world, batch, 4), run_masked(world, batch, 4)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_an_updated_plan_equals_a_fresh_one(device: str) -> None:
    """What a captured graph relies on: buffers of a larger batch, refilled with a smaller one, give the smaller one's bits."""
    world, batch = masked_world(CASE, seed=5, device=device)
    small = MaskedBatch(batch.items[:1], batch.q_sid, batch.slot_sid)
    held = plan_mask(batch, 3, request_capacity=6, key_capacity=4096)
    held.update(plan_mask(small, 3))
    fresh = run_masked(world, small, 3)
    reused = run_masked(world, small, 3, plan=held)
    assert torch.equal(fresh[0], reused[0])
    assert torch.equal(fresh[1], reused[1])
    assert not bool(reused[0][batch.items[0].row_count :].any())


def test_a_larger_batch_does_not_fit_a_plan(device: str) -> None:
    _, batch = masked_world(CASE, seed=5, device=device)
    held = plan_mask(MaskedBatch(batch.items[:1], batch.q_sid, batch.slot_sid), 1)
    with pytest.raises(ValueError, match="q_indptr"):
        held.update(plan_mask(batch, 1))


def test_rows_between_items_are_padding(device: str) -> None:
    world, batch = masked_world(CASE, seed=6, device=device)
    apart = MaskedBatch((batch.items[0], batch.items[2]), batch.q_sid, batch.slot_sid)
    out, lse = run_masked(world, apart, 2)
    want, want_lse = reference.masked_attention(world.q.double(), world.k_cache.double(), world.v_cache.double(), apart, CASE.scale)
    assert relative_error(out, want) < 1e-5
    assert lse_error(lse, want_lse) < 1e-5
    skipped = slice(batch.items[1].row_start, batch.items[2].row_start)
    assert not bool(out[skipped].any())


def test_a_document_chunk_is_causal(device: str) -> None:
    """Rows with stream id -1 prefill the document itself: earlier chunks are cached, the own chunk is causal."""
    world, batch = masked_world(replace(CASE, streams=1, documents=1, loners=0, dead=0, rows=4), seed=7, device=device)
    slots = torch.randperm(world.k_cache.shape[0], device=device)[:40]
    world.k_cache[slots], world.v_cache[slots] = torch.randn(2, 40, *world.k_cache.shape[1:], device=device)
    world.q = torch.randn(30, *world.q.shape[1:], device=device)
    world.row_keys = torch.full((30,), -1, device=device)
    ids = torch.full_like(batch.slot_sid, -1)
    chunk = MaskedBatch((MaskedItem(0, 30, slots),), torch.full((30,), -1, dtype=torch.int32, device=device), ids)
    out, lse = run_masked(world, chunk, 2, k_new=world.k_cache[slots[10:]], v_new=world.v_cache[slots[10:]])
    want, want_lse = reference.masked_attention(world.q.double(), world.k_cache.double(), world.v_cache.double(), chunk, CASE.scale)
    assert relative_error(out, want) < 1e-5
    assert lse_error(lse, want_lse) < 1e-5


def test_overlapping_items_are_refused(device: str) -> None:
    _, batch = masked_world(CASE, seed=8, device=device)
    with pytest.raises(ValueError, match="row 0 overlaps"):
        plan_mask(MaskedBatch((batch.items[0], batch.items[0]), batch.q_sid, batch.slot_sid), 1)


def test_shapes_that_do_not_fit_are_refused(device: str) -> None:
    world, batch = masked_world(CASE, seed=9, device=device)
    world.q = world.q[:, :5]
    with pytest.raises(ValueError, match="does not fit caches"):
        run_masked(world, batch, 1)


@pytest.mark.parametrize("rows", [1, 16, 64, 256, 4096])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_every_tile_covers_and_splits_stay_useful(rows: int, head_dim: int) -> None:
    tile = choose_tile(rows, 7, head_dim, torch.bfloat16)
    splits = choose_splits(rows, 7, 4, 8192, tile, 132)
    assert 1 <= splits <= 8192 // (4 * tile.keys)
    assert choose_splits(rows, 7, 4, 0, tile, 132) == 1
