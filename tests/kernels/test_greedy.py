"""The likeliest token of every row, against torch in fp64."""

from __future__ import annotations

import pytest
import torch

from askmany.kernels.greedy import GreedyPick


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 5), (3, 4096), (5, 4097), (9, 50001)])
def test_equals_torch(rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    logits = (torch.randn(rows, width, device=device) * 5).to(dtype)
    pick = GreedyPick(rows + 2, width, torch.device(device))
    pick.run(logits)
    wide = logits.double()
    best = torch.topk(wide, min(2, width))
    lowest = torch.stack([torch.nonzero(row == row.max())[0, 0] for row in wide])
    assert torch.equal(pick.out.tokens[:rows], lowest)
    wanted = best.values[:, 0] - torch.logsumexp(wide, dim=-1)
    torch.testing.assert_close(pick.out.logprobs[:rows].double(), wanted, rtol=1e-5, atol=1e-5)
    if width > 1:
        torch.testing.assert_close(pick.out.margins[:rows].double(), best.values[:, 0] - best.values[:, 1], rtol=0, atol=1e-5)


def test_ties_take_the_lowest_id_across_parts(device: str) -> None:
    logits = torch.zeros(3, 30000, device=device)
    logits[0, [29999, 77]] = 4.0
    logits[1, [4095, 4096, 20000]] = 4.0
    pick = GreedyPick(3, 30000, torch.device(device))
    pick.run(logits)
    assert pick.out.tokens.tolist() == [77, 4095, 0]
    assert pick.out.margins.tolist() == [0.0, 0.0, 0.0]


def test_nan_shows_and_the_token_stays_legal(device: str) -> None:
    logits = torch.randn(2, 5000, device=device)
    logits[1, 4321] = float("nan")
    pick = GreedyPick(2, 5000, torch.device(device))
    pick.run(logits)
    assert pick.out.logprobs.isnan().tolist() == [False, True]
    assert 0 <= int(pick.out.tokens[1]) < 5000


def test_hidden_tokens_are_never_taken(device: str) -> None:
    logits = torch.full((1, 9000), float("-inf"), device=device)
    logits[0, 8999] = -3.0
    pick = GreedyPick(1, 9000, torch.device(device))
    pick.run(logits)
    assert pick.out.tokens.tolist() == [8999]
    assert pick.out.logprobs.tolist() == [0.0]
