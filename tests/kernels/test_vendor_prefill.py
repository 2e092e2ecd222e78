"""Prefill by other libraries, played here by the reference: what is handed to them describes the chunks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from askmany.kernels import vendor
from askmany.kernels.tiles import AttentionShape
from askmany.kernels.vendor_prefill import FlashInferPrefill, FlashPrefill, best_prefill
from tests.helpers.kernel_engines import ReferencePrefill

SHAPE = AttentionShape(6, 2, 128, 8, torch.bfloat16)
CPU = torch.device("cpu")


def flash_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, page_table: Tensor, cache_seqlens: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int,
    softmax_scale: float, causal: bool,
) -> Tensor:  # fmt: skip
    """FlashAttention-3's call over pages of one slot."""
    assert causal
    assert k_cache.shape[1] == 1
    rows = torch.diff(cu_seqlens_q).tolist()
    assert max_seqlen_q == max(rows)
    slots = [line[:count].numpy() for line, count in zip(page_table, cache_seqlens.tolist(), strict=True)]
    return _reference(rows, slots, q, k_cache[:, 0], v_cache[:, 0], softmax_scale)


class Wrapper:
    """FlashInfer's paged prefill."""

    def __init__(self, workspace: Tensor, layout: str) -> None:
        assert layout == "NHD"

    def plan(
        self, rows: Tensor, bounds: Tensor, indices: Tensor, last: Tensor, *sizes: int, causal: bool, sm_scale: float, **types: Any
    ) -> None:
        assert sizes == (6, 2, 128, 1)
        assert causal
        assert last.tolist() == [1] * (len(bounds) - 1)
        self.rows, self.scale = torch.diff(rows).tolist(), sm_scale
        self.slots = [indices[a:b].numpy() for a, b in zip(bounds.tolist(), bounds.tolist()[1:], strict=False)]

    def run(self, q: Tensor, caches: tuple[Tensor, Tensor]) -> Tensor:
        assert q.is_contiguous()
        return _reference(self.rows, self.slots, q, caches[0][:, 0], caches[1][:, 0], self.scale)


def _reference(rows: list[int], slots: list[Any], q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    played = ReferencePrefill()
    played.plan(rows, slots)
    return played.run(q, k, v, scale)


@pytest.mark.parametrize("kind", ["fa3", "flashinfer"])
@pytest.mark.parametrize("scale", [128**-0.5, 0.2])
def test_chunks_are_described_to_the_library(kind: str, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendor, "flash_attention", lambda: flash_attention)
    monkeypatch.setattr(vendor, "flashinfer", lambda: SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper))
    rows, lengths = [3, 1, 7], [9, 1, 7]
    order = torch.randperm(40)
    slots = [order[sum(lengths[:i]) : sum(lengths[: i + 1])].numpy().astype(np.int32) for i in range(3)]
    q, k, v = torch.randn(11, 6, 2, 128)[:, :, 0], torch.randn(40, 2, 128), torch.randn(40, 2, 128)
    kernel = FlashPrefill(CPU) if kind == "fa3" else FlashInferPrefill(SHAPE, CPU)
    kernel.plan(rows, slots)
    torch.testing.assert_close(kernel.run(q, k, v, scale), _reference(rows, slots, q, k, v, scale), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("installed", "head_dim", "wanted"),
    [
        (("fa3", "flashinfer"), 128, "fa3"), (("fa3", "flashinfer"), 64, "flashinfer"), (("flashinfer",), 256, "flashinfer"),
        (("fa3", "flashinfer"), 80, None), ((), 128, None), (("fa3",), 64, None),
    ],
)  # fmt: skip
def test_the_best_that_serves_the_heads_is_taken(
    installed: tuple[str, ...], head_dim: int, wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vendor, "available", lambda device, dtype: installed)
    monkeypatch.setattr(vendor, "flash_attention", lambda: flash_attention)
    monkeypatch.setattr(vendor, "flashinfer", lambda: SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper))
    found = best_prefill(AttentionShape(6, 2, head_dim, 8, torch.bfloat16), CPU)
    assert (found[0] if found else None) == wanted
