"""Inside `InvariantRows` a row has the same bits wherever it stands and whatever rides along; outside, nothing has changed."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from askmany.engine.config import SchedulerLimits
from askmany.engine.invariant_check import is_invariant, settle_products
from askmany.engine.invariant_rows import BLOCK, InvariantRows, Product, multiply, multiply_in_order
from askmany.engine.workspaces import split_buckets
from askmany.kernels.oracle import relative_error

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 8e-3}
K, N = 96, 200
COUNTS = (1, 7, 127, 128, 129, 300)
Computed = Callable[[Tensor, Tensor, Tensor], Tensor]


def into(rows: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(rows, weight.t(), out=torch.full((len(rows), N), float("nan"), dtype=rows.dtype))


def onto(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    added = (rows[:, :1] * bias).contiguous()
    return torch.addmm(added, rows, weight.t(), out=added)


PRODUCTS: dict[str, Computed] = {
    "linear": lambda x, weight, bias: F.linear(x, weight),
    "linear with bias": F.linear,
    "three dimensions": lambda x, weight, bias: F.linear(x[None], weight, bias)[0],
    "output layer": lambda x, weight, bias: torch.matmul(x, weight.T),
    "mm": lambda x, weight, bias: torch.mm(x, weight.t()),
    "mm into": lambda x, weight, bias: into(x, weight),
    "addmm": lambda x, weight, bias: torch.addmm(bias, x, weight.t()),
    "scaled addmm": lambda x, weight, bias: torch.addmm(bias, x, weight.t(), beta=2, alpha=0.5),
    "addmm onto": onto,
    "a view of wider rows": lambda x, weight, bias: F.linear(torch.cat([x, x], dim=1)[:, K:], weight, bias),
}
REDUCTIONS: dict[str, Computed] = {
    "mean": lambda x, weight, bias: x.float().pow(2).mean(-1, keepdim=True),
    "mean of heads": lambda x, weight, bias: x.view(len(x), 4, -1).mean(-1),
    "sum": lambda x, weight, bias: x.sum(dim=-1),
    "logsumexp": lambda x, weight, bias: torch.logsumexp(x.double(), dim=-1),
    "cumsum": lambda x, weight, bias: torch.cumsum(x.double(), dim=-1),
    "log softmax": lambda x, weight, bias: F.log_softmax(x, dim=-1, dtype=torch.float32),
}


def drawn(count: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [count, K], of which the first is the same for every count and seed, a weight and a bias."""
    fixed, moving = torch.Generator().manual_seed(1), torch.Generator().manual_seed(100 + seed)
    weight, bias, row = (torch.randn(*shape, generator=fixed) for shape in ((N, K), (N,), (1, K)))
    rows = torch.cat([row, torch.randn(count - 1, K, generator=moving)])
    return rows.to(dtype), weight.to(dtype), bias.to(dtype)


@pytest.mark.parametrize("grad", [torch.inference_mode, torch.no_grad], ids=["inference", "no grad"])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", [*PRODUCTS, *REDUCTIONS])
def test_the_same_is_computed_to_rounding(name: str, dtype: torch.dtype, grad: Callable[[], torch.inference_mode]) -> None:
    compute = (PRODUCTS | REDUCTIONS)[name]
    with grad():
        for count in COUNTS:
            rows, weight, bias = drawn(count, dtype)
            want = compute(rows, weight, bias)
            with InvariantRows():
                got = compute(rows, weight, bias)
            assert (got.shape, got.dtype) == (want.shape, want.dtype)
            assert relative_error(got, want.double()) < ROUNDING[dtype]


@torch.inference_mode()
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", [*PRODUCTS, *REDUCTIONS])
def test_a_row_has_the_same_bits_in_every_place_and_company(name: str, dtype: torch.dtype) -> None:
    compute, seen = (PRODUCTS | REDUCTIONS)[name], []
    for seed, count in enumerate(COUNTS):
        rows, weight, bias = drawn(count, dtype, seed)
        for place in {0, count // 2, count - 1}:
            with InvariantRows():
                seen.append(compute(rows.roll(place, 0), weight, bias)[place])
    assert all(torch.equal(result, seen[0]) for result in seen)


@torch.inference_mode()
def test_the_library_sees_one_shape_and_zeros_behind_the_last_row() -> None:
    given: list[Tensor] = []

    def noting(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        given.append(rows.clone())
        multiply(rows, weight, bias, out)

    rows, weight, bias = drawn(300, torch.float32)
    with InvariantRows(noting):
        F.linear(rows, weight, bias)
    assert [tuple(block.shape) for block in given] == [(BLOCK, K)] * 3
    assert torch.equal(torch.cat(given)[:300], rows)
    assert not given[2][300 - 2 * BLOCK :].any()


@torch.inference_mode()
def test_it_is_on_within_its_scope_alone() -> None:
    calls: list[int] = []

    def counting(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        calls.append(len(rows))
        multiply(rows, weight, bias, out)

    rows, weight, bias = drawn(5, torch.float32)
    mode, plain = InvariantRows(counting), F.linear(rows, weight, bias)
    with mode:
        F.linear(rows, weight, bias)
    with mode:
        F.linear(rows, weight, bias)
    with pytest.raises(ZeroDivisionError), mode:
        raise ZeroDivisionError
    assert len(calls) == 2
    assert torch.equal(F.linear(rows, weight, bias), plain)
    assert len(calls) == 2


@torch.inference_mode()
def test_products_of_batches_and_of_no_rows_are_left_alone() -> None:
    one, other = torch.randn(3, 5, 7), torch.randn(3, 7, 2)
    mode = InvariantRows()
    with mode, mode.meeting() as met:
        assert torch.equal(one @ other, torch.bmm(one, other))
        assert F.linear(torch.empty(0, K), torch.empty(N, K)).shape == (0, N)
    assert len(met) == 1


@torch.inference_mode()
def test_a_product_that_cannot_be_seen_is_refused() -> None:
    with InvariantRows(), pytest.raises(RuntimeError, match=r"deterministic mode has no rule for aten::linear\.out"):
        torch.ops.aten.linear.out(torch.randn(2, 3), torch.randn(4, 3), out=torch.empty(2, 4))


def crooked(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Sums in another order in the lower half of a block, for weights of N columns."""
    multiply(rows, weight, bias, out)
    if out.shape[1] == N:
        half = weight.shape[0] // 2
        late = out[BLOCK // 2 :]
        late.copy_(rows[BLOCK // 2 :, :half] @ weight[:half] + rows[BLOCK // 2 :, half:] @ weight[half:])


@torch.inference_mode()
def test_a_product_that_depends_on_the_place_falls_back_to_a_fixed_order(caplog: pytest.LogCaptureFixture) -> None:
    rows, weight, _ = drawn(300, torch.float32)
    other = torch.randn(64, K)
    mode = InvariantRows(crooked)

    def forward() -> None:
        with mode:
            F.linear(rows, weight)
            F.linear(rows, other)

    with mode:
        before = F.linear(rows, weight)
    with caplog.at_level(logging.WARNING):
        settle_products(mode, forward, "m")
        forward()
    assert [(shape.k, shape.n) for shape in mode.slow] == [(K, N)]
    assert [record.getMessage() for record in caplog.records] == [
        f"model m: products by {K} x {N} are computed in a slower, fixed order: this machine's library moves their bits"
    ]
    with mode:
        seen = [F.linear(rows.roll(place, 0), weight)[place] for place in (0, 70, 127, 299)]
        after = F.linear(rows, weight)
    assert all(torch.equal(result, seen[0]) for result in seen)
    torch.testing.assert_close(after, before)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_this_machines_library_and_the_fixed_order_pass_the_check(dtype: torch.dtype) -> None:
    rows, weight, bias = drawn(1, dtype)
    for multiplied in (multiply, multiply_in_order):
        for own in (None, bias):
            assert is_invariant(multiplied, Product(rows, weight.t(), own))
    assert is_invariant(crooked, Product(rows, weight[:64].t()))
    assert not is_invariant(crooked, Product(rows, weight.t()))


def test_graphs_of_deterministic_steps_hold_whole_blocks() -> None:
    def rows(most: int, decode: bool, deterministic: bool = True) -> list[int]:
        limits = SchedulerLimits(8, most, 1024, 64, 64, deterministic)
        return [bucket.rows for bucket in split_buckets(limits) if bucket.decode is decode]

    assert rows(256, True) == [128, 256]
    assert rows(200, True) == [128, 200]
    assert rows(24, True) == [24]
    assert rows(256, False) == [128, 256, 384, 512, 768, 1024]
    assert rows(256, True, deterministic=False)[:3] == [4, 16, 32]
