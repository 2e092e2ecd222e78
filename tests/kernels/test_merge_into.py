"""The merge in place against the merge of all parts at once: layouts, 16-bit parts, padding, rows that saw nothing, rooms unwritten."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from askmany.kernels.merge_into import Part, launch_merge, merge_into, nothing, widened
from askmany.kernels.oracle import lse_error, relative_error
from askmany.kernels.passes import Run


def oracle(parts: list[Part]) -> tuple[Tensor, Tensor]:
    """In fp64, all parts at once (merge attention, arXiv 2411.01783, equation 4)."""
    outs, lses = (torch.stack([part[i].double() for part in parts]) for i in (0, 1))
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.where(torch.isneginf(lse), 0.0, torch.exp(lses - torch.where(torch.isneginf(lse), 0.0, lse)))
    return (outs * weights[..., None]).sum(0), lse


def a_part(rows: int, heads: int, dim: int, dtype: torch.dtype, empty: float, transposed: bool) -> Part:
    out = torch.randn(rows, heads, dim).to(dtype)
    lse = torch.randn(heads, rows).T if transposed else torch.randn(rows, heads)
    blind = torch.rand(rows, heads) < empty
    out[blind] = 0
    return out, torch.where(blind, float("-inf"), lse * 30) if not transposed else torch.where(blind.T, float("-inf"), lse.T * 30).T


def placed(part: Part, rows: Run, total: int) -> Part:
    """The part among rows that it does not have."""
    out, lse = nothing(part[0], total)
    kept = slice(None) if isinstance(rows, slice) else rows >= 0
    target = rows if isinstance(rows, slice) else rows[kept]
    out[target], lse[target] = part[0][kept].float(), part[1][kept]
    return out, lse


@pytest.mark.parametrize("path", [merge_into, launch_merge], ids=["torch", "triton"])
@pytest.mark.parametrize(("heads", "dim"), [(3, 16), (28, 128), (40, 64), (1, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_merge_one_by_one(path: object, heads: int, dim: int, dtype: torch.dtype, device: str) -> None:
    """A first part is written over NaN; others are added at a slice, at scattered rows, at rows with padding."""
    torch.manual_seed(heads)
    count = 9
    runs: list[Run] = [slice(0, 6), slice(4, 9), torch.tensor([8, -1, 0, 5]), torch.tensor([1])]
    parts = [a_part(n, heads, dim, dtype, 0.3, i % 2 == 0) for i, n in enumerate((6, 5, 4, 1))]
    out, lse = (torch.full((count, heads, *tail), float("nan")) for tail in ((dim,), ()))
    out[6:], lse[6:] = 0, float("-inf")
    total = (out.to(device), lse.to(device))
    for index, (part, rows) in enumerate(zip(parts, runs, strict=True)):
        moved = rows if isinstance(rows, slice) else rows.to(device)
        path(total, tuple(x.to(device) for x in part), moved, index == 0)  # type: ignore[operator]
    want, want_lse = oracle([placed(part, rows, count) for part, rows in zip(parts, runs, strict=True)])
    assert not bool(total[0].isnan().any())
    assert relative_error(total[0].cpu(), want) < 1e-6
    assert lse_error(total[1].cpu(), want_lse) < 1e-6


@given(st.integers(1, 5), st.floats(0, 1), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_the_order_and_number_of_parts_do_not_matter(parts: int, empty: float, seed: int) -> None:
    torch.manual_seed(seed)
    made = [a_part(4, 2, 8, torch.float32, empty, seed % 2 == 0) for _ in range(parts)]
    want, want_lse = oracle(made)
    for order in (made, made[::-1]):
        total = nothing(made[0][0])
        for part in order:
            merge_into(total, part, slice(0, 4))
        assert torch.allclose(total[0].double(), want, atol=1e-5)
        assert torch.equal(torch.isneginf(total[1]), torch.isneginf(want_lse))
        assert lse_error(total[1], want_lse) < 1e-5


def test_accumulators_are_not_copied_when_they_are_accumulators() -> None:
    total = nothing(torch.zeros(2, 3, 8))
    assert widened(total) is not None
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(total, widened(total) or (), strict=True))
    wide = widened((torch.ones(2, 3, 8, dtype=torch.bfloat16), torch.zeros(3, 2).T))
    assert wide is not None
    assert wide[0].dtype == torch.float32
    assert wide[1].is_contiguous()
    assert widened(None) is None


def test_parts_that_do_not_fit_are_refused() -> None:
    total = nothing(torch.zeros(4, 2, 8))
    with pytest.raises(ValueError, match="3 rows of a part"):
        merge_into(total, nothing(torch.zeros(2, 2, 8)), slice(0, 3))
    with pytest.raises(ValueError, match="dense in its last dimension"):
        merge_into(total, (torch.zeros(4, 8, 2).transpose(1, 2), total[1]), slice(0, 4))
