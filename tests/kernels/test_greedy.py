"""The likeliest token of every row, and the likeliest that a mask allows, against torch in fp64."""

from __future__ import annotations

import pytest
import torch

from askmany.kernels.greedy import GreedyPick, LegalPick, feed, launch_feed, unpack


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


def test_rows_that_ask_draw_and_all_come_home_in_one_piece(device: str) -> None:
    logits = torch.randn(7, 5000, device=device)
    pick = GreedyPick(9, 5000, torch.device(device))
    drawn = torch.full((12,), -7, device=device)
    pick.run(logits, drawn, asked=4)
    assert torch.equal(drawn[:4], pick.out.tokens[:4])
    assert drawn[4:].tolist() == [-7] * 8
    home = unpack(pick.packed.to("cpu"))
    for name in ("tokens", "logprobs", "margins"):
        assert torch.equal(getattr(home, name)[:7], getattr(pick.out, name)[:7].cpu())


@pytest.mark.parametrize("rows", [1, 255, 256, 700])
def test_rows_feed_on_what_was_drawn_or_on_their_own_token(rows: int, device: str) -> None:
    own, drawn = torch.randint(50_000, (rows,), device=device), torch.randint(50_000, (64,), device=device)
    feeds = torch.randint(-1, 64, (rows,), device=device)
    wanted = [int(drawn[place]) if place >= 0 else int(token) for place, token in zip(feeds.tolist(), own.tolist(), strict=True)]
    assert launch_feed(own, feeds, drawn).tolist() == wanted
    assert feed(own, feeds, drawn).tolist() == wanted


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


def packed(legal: torch.Tensor) -> torch.Tensor:
    """[M, V] bool as [M, ceil(V / 32)] int32."""
    padded = torch.nn.functional.pad(legal.cpu(), (0, -legal.shape[1] % 32)).view(legal.shape[0], -1, 32).long()
    words = (padded << torch.arange(32)).sum(dim=-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).to(legal.device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "width", "share"), [(1, 1, 1.0), (2, 31, 0.5), (3, 4097, 0.01), (5, 30011, 0.0001), (4, 9000, 0.9)])
def test_held_rows_equal_torch_and_the_others_stay(rows: int, width: int, share: float, dtype: torch.dtype, device: str) -> None:
    logits = (torch.randn(rows + 2, width, device=device) * 5).to(dtype)
    legal = torch.rand(rows, width, device=device) < share
    legal[torch.arange(rows), torch.randint(width, (rows,))] = True
    held = torch.randperm(rows + 2)[:rows].to(torch.int32)
    which = torch.randint(rows, (rows,), dtype=torch.int32)
    pick = GreedyPick(rows + 2, width, torch.device(device))
    pick.run(logits)
    tokens, logprobs, margins = pick.out.tokens.clone(), pick.out.logprobs.clone(), pick.out.margins.clone()
    drawn = torch.full((rows + 2,), -7, device=device)
    LegalPick(rows + 1, width, torch.device(device)).run(logits, held.to(device), which.to(device), packed(legal), pick.out, drawn)
    totals = torch.logsumexp(logits.double(), dim=-1)
    for place, row in zip(which.tolist(), held.tolist(), strict=True):
        masked = logits[row].double().masked_fill(~legal[place], float("-inf"))
        tokens[row] = torch.nonzero(masked == masked.max())[0, 0]
        logprobs[row] = masked.max() - totals[row]
        margins[row] = masked.max() - (torch.topk(masked, 2).values[1] if width > 1 else float("-inf"))
        assert drawn[row] == tokens[row]
    assert torch.equal(pick.out.tokens, tokens)
    assert int((drawn == -7).sum()) == 2
    torch.testing.assert_close(pick.out.logprobs, logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pick.out.margins, margins, rtol=0, atol=1e-5)


def test_a_held_row_whose_logits_are_nan_shows(device: str) -> None:
    logits = torch.randn(2, 5000, device=device)
    logits[:, 4321] = float("nan")
    pick = GreedyPick(2, 5000, torch.device(device))
    legal = torch.zeros(1, 5000, dtype=torch.bool, device=device)
    legal[0, 3] = True
    rows, which = (torch.tensor([value], dtype=torch.int32, device=device) for value in (1, 0))
    drawn = torch.zeros(2, dtype=torch.int64, device=device)
    LegalPick(1, 5000, torch.device(device)).run(logits, rows, which, packed(legal), pick.out, drawn)
    assert pick.out.logprobs.isnan().tolist() == [False, True]
    assert drawn.tolist() == [0, 3]
