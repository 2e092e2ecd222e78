"""Both layouts' kernels on a GPU over a sample that covers every pair of the grid's values, judged by the fp64 oracle and by SDPA."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from askmany.kernels.oracle import lse_error, relative_error
from askmany.kernels.stream_mask import choose_splits, choose_tile
from tests.helpers.attention_cases import FACTORS, Case, World, cases, id_of, masked_world, split_world
from tests.helpers.run_attention import run_masked
from tests.helpers.run_split import run_split

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
GRID = cases(FACTORS, seed=2025, at_least=400, limit_values=2**28)


def judge(world: World, out: Tensor, lse: Tensor) -> None:
    """fp32: below 1e-5, with scores of +-80 no more than twice SDPA's error; 16 bit: below 4e-3 and 1.5 times SDPA's; LSE to 1e-5."""
    want, want_lse = world.truth()
    assert not bool(out.isnan().any())
    assert not bool(out[~world.live].any())
    error = relative_error(out, want)
    if world.case.dtype == "fp32" and not world.case.peak:
        assert error < 1e-5
    elif world.case.dtype == "fp32":
        assert error <= 2 * relative_error(world.sdpa(torch.float32), want)
    else:
        assert error < 4e-3
        assert error <= 1.5 * relative_error(world.sdpa(world.case.torch_dtype), want)
    assert lse_error(lse, want_lse) < 1e-5


@pytest.mark.parametrize("case", GRID, ids=id_of)
def test_split_layout(case: Case) -> None:
    world, batch = split_world(case, seed=GRID.index(case), device="cuda")
    judge(world, *run_split(world, batch))


@pytest.mark.parametrize("case", GRID, ids=id_of)
def test_interleaved_layout(case: Case) -> None:
    case = replace(case, levels=1)
    world, batch = masked_world(case, seed=GRID.index(case) if case in GRID else len(str(case)), device="cuda")
    group = case.heads[0] // case.heads[1]
    tile = choose_tile(world.q.shape[0], group, case.head_dim, case.torch_dtype)
    keys = max(item.slots.shape[0] for item in batch.items)
    judge(world, *run_masked(world, batch, choose_splits(world.q.shape[0], group, case.heads[1], keys, tile, 132), tile))
