"""Tile choices fit their GPU, and timing happens once per GPU and shape."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from askmany.kernels.tiles import SHARED_MEMORY, AttentionShape, Tiles, candidates, choose
from askmany.kernels.tune import tuned_tiles

HEADS = [(32, 32), (28, 4), (12, 2), (9, 3), (16, 1)]


@pytest.mark.parametrize("capability", [None, (8, 0), (8, 6), (9, 0)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_candidate_can_be_compiled_for_its_gpu(capability: tuple[int, int] | None, head_dim: int, dtype: torch.dtype) -> None:
    for q_heads, kv_heads in HEADS:
        shape = AttentionShape(q_heads, kv_heads, head_dim, 64, dtype)
        for node_rows, rows_per_stream in ((1, 1), (16, 1), (64, 4), (256, 1), (512, 512)):
            for tiles in candidates(shape, node_rows, rows_per_stream, capability):
                assert {tiles.rows, tiles.single_rows} <= {16, 32, 64, 128}
                assert tiles.single_keys % tiles.single_heads == 0
                assert tiles.single_heads * shape.group <= tiles.single_rows or tiles.single_heads == 1
                width = 1 << (head_dim - 1).bit_length()
                tensors = (tiles.rows + 2 * tiles.stages * tiles.keys) * width * dtype.itemsize
                assert tensors * (tiles.per_sm if tiles.groups else 1) <= SHARED_MEMORY.get(capability or (9, 0), 99) * 1024


def test_the_hopper_kernel_serves_what_it_can() -> None:
    assert choose(AttentionShape(28, 4, 128, 64, torch.bfloat16), 16, 1, (9, 0)).groups > 0
    assert choose(AttentionShape(28, 4, 128, 1, torch.bfloat16), 16, 1, (9, 0)).groups == 0
    assert choose(AttentionShape(28, 4, 96, 64, torch.bfloat16), 16, 1, (9, 0)).groups == 0
    assert choose(AttentionShape(28, 4, 128, 64, torch.float32), 16, 1, (9, 0)).groups == 0
    assert choose(AttentionShape(28, 4, 128, 64, torch.bfloat16), 16, 1, (8, 0)).groups == 0


@pytest.mark.parametrize("rows", [1, 4, 16, 64, 256])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_the_length_of_documents_changes_the_order_of_candidates_alone(heads: tuple[int, int], rows: int) -> None:
    shape = AttentionShape(*heads, 128, 64, torch.bfloat16)
    found = [candidates(shape, rows, 1, (9, 0), tokens) for tokens in (None, 100, 512, 2048, 8192, 32768)]
    assert len({frozenset(choices) for choices in found}) == 1
    assert all(len(set(choices)) == len(choices) for choices in found)
    assert found[0] == found[4]


def test_lengths_count_where_they_were_measured() -> None:
    """Single rows a stream; few rows of long documents leave room for the next layer's program, many of short ones are no pair's work."""
    shape = AttentionShape(32, 32, 128, 64, torch.bfloat16)
    short, many = choose(shape, 16, 1, (9, 0), 16384), choose(shape, 256, 1, (9, 0), 512)
    assert (short.per_sm, short.stages, short.groups) == (1, 2, 1)
    assert (many.per_sm, many.groups) == (2, 1)
    assert choose(shape, 256, 1, (9, 0), 8192).groups == 2
    assert choose(shape, 256, 4, (9, 0), 512) == choose(shape, 256, 4, (9, 0))


@pytest.mark.parametrize(("heads", "bad"), [((6, 4), "multiple"), ((4, 4), "page_size")])
def test_shapes_that_no_kernel_serves_are_refused(heads: tuple[int, int], bad: str) -> None:
    with pytest.raises(ValueError, match=bad):
        AttentionShape(*heads, 64, 48, torch.float32)


def test_timing_happens_once_and_the_fastest_wins(tmp_path: Path) -> None:
    shape, cache_file = AttentionShape(28, 4, 128, 64, torch.bfloat16), tmp_path / "deep" / "tiles.json"
    asked: list[Tiles] = []

    def measure(shape: AttentionShape, rows: int, each: int, tiles: Tiles, device: torch.device, tokens: int) -> float:
        assert tokens in (1024, 8192)
        asked.append(tiles)
        return 100.0 - len(asked)

    first = tuned_tiles(shape, 64, 1, torch.device("cpu"), cache_file, measure)
    assert len(asked) > 1
    assert first == asked[-1]
    asked.clear()
    assert tuned_tiles(shape, 64, 1, torch.device("cpu"), cache_file, measure) == first
    assert asked == []
    tuned_tiles(shape, 128, 1, torch.device("cpu"), cache_file, measure)
    assert asked != []
    asked.clear()
    tuned_tiles(shape, 128, 1, torch.device("cpu"), cache_file, measure, node_tokens=1000)
    assert asked != []
    asked.clear()
    tuned_tiles(shape, 128, 1, torch.device("cpu"), cache_file, measure, node_tokens=600)  # about as long
    assert asked == []
    cache_file.write_text('{"a": {"tiles": {"rows": 1}}}')
    asked.clear()
    tuned_tiles(shape, 64, 1, torch.device("cpu"), cache_file, measure)
    assert asked != []
