"""What steps through the kernels are made of, from a config; on a CPU nothing is measured and nothing captured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from askmany.engine.kernel_loading import load_steps
from askmany.engine.kv_pool import KVPool, KVShape
from askmany.engine.paged import MaskedStep, PagedNode, PagedRun, PagedStep
from askmany.engine.space_makers import KernelSetting, MaskedMaker, NodeUse, SplitMaker, node_use
from askmany.engine.workspaces import Processors, WorkRules, all_sizes, workspace_bytes
from askmany.kernels.plan import Chunking
from askmany.kernels.tiles import AttentionShape, Tiles, choose
from tests.engine.test_kernel_steps import config_of


def model_and_pool(head_dim: int) -> tuple[Any, KVPool]:
    shape = KVShape(1, 2, head_dim, torch.float32)
    return SimpleNamespace(name="m", vocabulary=97, kv_shape=shape, q_heads=6), KVPool(shape, 256, torch.device("cpu"))


@pytest.mark.parametrize("layout", ["split", "interleaved"])
def test_steps_are_made_for_both_layouts(layout: str) -> None:
    model, pool = model_and_pool(16)
    steps = load_steps(model, pool, config_of(layout, kv_tokens=256), 64)
    assert steps is not None
    assert steps.capture_s == {}
    steps.warm([4])  # nothing to capture with


def test_heads_that_the_kernels_do_not_serve_run_in_the_passes(caplog: pytest.LogCaptureFixture) -> None:
    model, pool = model_and_pool(12)
    assert load_steps(model, pool, config_of("split", kv_tokens=256), 64) is None
    assert "the kernels do not serve it (head_dim must be 16 to 256, not 12)" in caplog.text


def test_deterministic_spaces_share_one_tile_and_others_take_the_measured_ones() -> None:
    model, pool = model_and_pool(16)
    asked: list[int] = []

    def tiles(shape: AttentionShape, rows: int, tokens: int | None) -> Tiles:
        assert tokens == 500
        asked.append(rows)
        return choose(shape, rows, 1, None)

    limits = config_of("split", max_rows=32, step_tokens=64, streams=32).limits
    for deterministic, wanted in ((False, [4, 16, 32]), (True, [])):
        setting = KernelSetting(model, pool, 8, limits, 64, Chunking(deterministic=deterministic), nodes=4, tiles=tiles)
        maker, drawn = SplitMaker(setting), torch.zeros(32, dtype=torch.int64)
        asked.clear()
        buckets = [bucket for bucket in maker.buckets if bucket.decode or deterministic]
        spaces = [maker.space(bucket, maker.sample(bucket.rows, bucket.rows, bucket.rows, 500), drawn) for bucket in buckets]
        assert asked == wanted
        assert not deterministic or len({space.layout._attention.tiles for space in spaces}) == 1  # type: ignore[attr-defined]


def test_tiles_are_chosen_for_the_node_that_costs_most() -> None:
    def step(lengths: list[int], *runs: tuple[int, tuple[int, ...]]) -> PagedStep:
        nodes = [PagedNode(length, []) for length in lengths]
        return PagedStep(nodes=nodes, runs=[PagedRun(0, rows, rows, [], path) for rows, path in runs])

    assert node_use(step([])) == NodeUse()
    assert node_use(step([], (5, ()))) == NodeUse()
    assert node_use(step([], (5, (0,)))) == NodeUse(5, None)  # as graphs are warmed before there is a document
    assert node_use(step([30, 900, 700], *[(1, (0, 1))] * 3, *[(1, (0, 2))] * 4)) == NodeUse(4, 700)
    assert node_use(step([30, 8000], (448, (0,)), *[(1, (0, 1))] * 64)) == NodeUse(64, 8000)  # not a chunk's instruction
    assert node_use(step([8000, 40], *[(5, (0, 1))] * 2)) == NodeUse(10, 8000)  # not the tail that chains of labels share


def test_workspaces_are_counted_before_the_pool_is_made() -> None:
    """The estimate covers what the spaces of a Hopper GPU really ask for, and stays small beside its memory."""
    shape = AttentionShape(32, 32, 128, 64, torch.bfloat16)
    limits = config_of("split", max_rows=256, step_tokens=2048, streams=256).limits
    rules = WorkRules(shape, Chunking(), 16384, 256, Processors(132, (9, 0)))
    counted = workspace_bytes(rules, limits, "split", 32016)
    assert 2e8 < counted < 3e9
    assert workspace_bytes(rules, limits, "interleaved", 32016) < counted
    fewer = config_of("split", max_rows=64, step_tokens=512, streams=64).limits
    assert workspace_bytes(rules, fewer, "split", 32016) < counted
    room = rules.most_partials(all_sizes(limits, 128, 4096))
    for size in all_sizes(limits, 128, 4096):
        assert all(rules.capacity(size, rules.tiles(rows, size.rows_per_run)[0]).partials <= room for rows in (1, 7, 64, 200, size.rows))


def test_one_workspace_serves_all_spaces() -> None:
    (model, pool), config = model_and_pool(16), config_of("split", kv_tokens=256)
    maker = SplitMaker(KernelSetting(model, pool, config.page_size, config.limits, 64))
    drawn = torch.zeros(maker.most_wanted, dtype=torch.int64)
    spaces = [maker.eager_space(drawn), *(maker.space(bucket, maker.empty, drawn) for bucket in maker.buckets)]
    assert len({space.layout._attention._partials.o.data_ptr() for space in spaces}) == 1  # type: ignore[attr-defined]


def test_large_document_chunks_are_left_to_the_prefill_kernel() -> None:
    (model, pool), config = model_and_pool(16), config_of("split", step_tokens=1024, kv_tokens=256)
    maker = SplitMaker(KernelSetting(model, pool, config.page_size, config.limits, 64))
    largest = maker.buckets[-1]
    step = maker.sample(700, 1, 700)
    assert maker.fits(largest, step)
    step.chunk_rows = 600
    assert not maker.fits(largest, step)


def test_a_step_may_read_a_document_for_each_row() -> None:
    """Without a graph beyond what its work list is sized for, but through the kernels."""
    (model, pool), config = model_and_pool(16), config_of("split", max_rows=256, streams=256, step_tokens=512, kv_tokens=256)
    maker = SplitMaker(KernelSetting(model, pool, config.page_size, config.limits, 64))
    step = maker.sample(256, 256, 256)
    step.nodes = [object()] * 257  # type: ignore[list-item]
    assert maker.fits_eager(step)
    assert not any(maker.fits(bucket, step) for bucket in maker.buckets)


def test_slots_that_others_store_bear_their_streams() -> None:
    (model, pool), config = model_and_pool(16), config_of("interleaved", kv_tokens=256)
    maker = MaskedMaker(KernelSetting(model, pool, config.page_size, config.limits, 64))
    step = MaskedStep(token_ids=[1, 1, 1], positions=[0, 1, 2], slots=[5, 70, 9], sids=[2, -1, 0])
    maker.stored_elsewhere(step)
    assert maker._slot_sid[[5, 70, 9, 6]].tolist() == [2, -1, 0, -1]
