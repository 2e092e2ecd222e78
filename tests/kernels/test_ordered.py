"""The product of fixed order against fp64: shapes that no tile divides, both layouts of a weight, rows in any place of any number."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from askmany.kernels.oracle import relative_error
from askmany.kernels.ordered import ordered_product
from tests.helpers.interpreter import INTERPRETED

BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-3} | ({} if INTERPRETED else {torch.bfloat16: 8e-3})  # which the interpreter cannot do


def drawn(m: int, n: int, k: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(m + n + k)
    return tuple(torch.randn(*shape, device=device).to(dtype) for shape in ((m, k), (n, k), (n,)))  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 5, 3), (70, 65, 130), (128, 64, 64), (0, 8, 8)])
def test_it_is_the_product(m: int, n: int, k: int, dtype: torch.dtype, device: str) -> None:
    rows, weight, bias = drawn(m, n, k, dtype, device)
    for laid in (weight.t(), weight.t().contiguous()):
        for own in (None, bias):
            out = torch.full((m, n), float("nan"), dtype=dtype, device=device)
            ordered_product(rows, laid, own, out)
            want = rows.double() @ weight.double().t() + (0 if own is None else own.double())
            assert m == 0 or relative_error(out, want) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_a_row_has_the_same_bits_in_every_place_of_every_number(dtype: torch.dtype, device: str) -> None:
    rows, weight, bias = drawn(130, 70, 100, dtype, device)
    seen = []
    for count, place in ((1, 0), (64, 63), (65, 64), (130, 77)):
        block = rows[:count].clone()
        block[place] = rows[5]
        out = torch.empty(count, 70, dtype=dtype, device=device)
        ordered_product(block, weight.t(), bias, out)
        seen.append(out[place])
    assert all(torch.equal(one, seen[0]) for one in seen)


def test_what_does_not_fit_is_refused(device: str) -> None:
    rows, weight, bias = drawn(4, 6, 8, torch.float32, device)
    with pytest.raises(ValueError, match="do not fit"):
        ordered_product(rows, weight, bias, torch.empty(4, 6, device=device))
    with pytest.raises(ValueError, match="dense"):
        ordered_product(rows, weight.t(), None, torch.empty(6, 4, device=device).t())
