"""The merge of a step's partial results against fp64, for every tile that it may choose: segments of any length, blind splits, NaN."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from torch import Tensor

from askmany.kernels import merge as merging
from askmany.kernels.oracle import lse_error, relative_error
from askmany.kernels.plan import WorkPlan
from askmany.kernels.stream_attention import StreamAttention
from askmany.kernels.tables import LEVELS, StepLimits
from askmany.kernels.tiles import AttentionShape

CALLS = product((1, 500, 1500, 9000), (0, 9, 40, 70))  # outputs and splits
TILES = sorted({merging.merge_tile(*call) for call in CALLS} | {merging.PINNED})
SHAPES = [(7, 1, 16), (6, 2, 24), (3, 3, 256)]
ROWS, LENGTHS = 5, (0, 0, 1, 2, 5, 8, 17, 33)

Parts = tuple[Tensor, Tensor]


def spread(plan: WorkPlan, seed: int) -> tuple[Parts, list[list[list[int]]]]:
    """Random partials, each run of splits at a place and distance of its own; the partials of [row][head]. Others are NaN."""
    draw, shape = random.Random(seed), plan.shape
    device, group = plan.segments.device, shape.group
    used: list[list[list[int]]] = [[[] for _ in range(shape.q_heads)] for _ in range(ROWS)]
    end = 3
    for row, segment in product(range(ROWS), range(LEVELS + 1)):
        splits = draw.choice(LENGTHS) if row else 0  # the first row saw no key
        stride, first = group + draw.randrange(3), end
        plan.segments[row, segment] = torch.tensor([splits, first, stride], dtype=torch.int32)
        for head, split in product(range(shape.q_heads), range(splits)):
            used[row][head].append(first + (head // group * splits + split) * stride + head % group)
        end = first + shape.kv_heads * splits * stride + draw.randrange(5)
    torch.manual_seed(seed)
    part_o, part_lse = torch.full((end + 1, shape.head_dim), float("nan")), torch.full((end + 1,), float("nan"))
    taken = [place for row in used for places in row for place in places]
    part_o[taken], part_lse[taken] = torch.randn(len(taken), shape.head_dim), torch.randn(len(taken)) * 20
    blind = taken[:: 1 + draw.randrange(3)]
    part_o[blind], part_lse[blind] = 0.0, float("-inf")
    return (part_o.to(device), part_lse.to(device)), used


def oracle(parts: Parts, used: list[list[list[int]]]) -> Parts:
    """[ROWS, HQ, D] and [ROWS, HQ], fp64: 0 and -inf where no key was seen."""
    part_o, part_lse = (part.double().cpu() for part in parts)
    found = [[torch.logsumexp(part_lse[places], 0) if places else torch.tensor(float("-inf")) for places in row] for row in used]
    lse = torch.stack([torch.stack(row) for row in found]).double()
    out = torch.zeros(ROWS, len(used[0]), part_o.shape[1], dtype=torch.float64)
    for row, head in product(range(ROWS), range(len(used[0]))):
        if not bool(torch.isneginf(lse[row, head])):
            places = used[row][head]
            out[row, head] = torch.exp(part_lse[places] - lse[row, head]) @ part_o[places]
    return out, lse


@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_merges_as_fp64(
    tile: tuple[int, int, int], heads: tuple[int, int, int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "merge_tile", lambda outputs, splits: tile)
    q_heads, kv_heads, dim = heads
    shape = AttentionShape(q_heads, kv_heads, dim, 16, torch.float32)
    plan = StreamAttention(shape, StepLimits(ROWS, ROWS, 1, 8), torch.device(device)).plan
    parts, used = spread(plan, seed=sum(tile) + dim)
    out = torch.full((ROWS, q_heads, dim), float("nan"), device=device)
    lse = torch.full((ROWS, q_heads), float("nan"), device=device)
    merging.merge(*parts, plan, out, lse, overlap=False)
    want, want_lse = oracle(parts, used)
    assert relative_error(out.cpu(), want) < 1e-6
    assert lse_error(lse.cpu(), want_lse) < 1e-6
    assert not bool(out[0].any())


def test_a_list_that_did_not_fit_yields_nan(device: str) -> None:
    plan = StreamAttention(AttentionShape(4, 2, 16, 16, torch.float32), StepLimits(ROWS, ROWS, 1, 8), torch.device(device)).plan
    parts, _ = spread(plan, seed=1)
    plan.status.fill_(1)
    out, lse = torch.zeros(ROWS, 4, 16, device=device), torch.zeros(ROWS, 4, device=device)
    merging.merge(*parts, plan, out, lse, overlap=False)
    assert bool(out.isnan().all())
    assert bool(lse.isnan().all())


@pytest.mark.parametrize(
    ("outputs", "splits", "blocks"),
    [(112, 66, (1, 16)), (192, 66, (2, 16)), (448, 33, (4, 8)), (512, 8, (4, 4)), (1792, 9, (8, 4)), (2048, 4, (4, 2)), (8192, 2, (16, 2))],
)
def test_tiles_fit_what_a_step_can_have(outputs: int, splits: int, blocks: tuple[int, int]) -> None:
    assert merging.merge_tile(outputs, splits)[:2] == blocks
