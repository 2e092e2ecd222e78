"""The split layout with a document pass of another library, played here by the reference: plans, merge, absence of packages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from askmany.kernels import reference
from askmany.kernels.document_rows import DocumentRows
from askmany.kernels.oracle import lse_error, relative_error
from askmany.kernels.tables import StepLimits
from askmany.kernels.tiles import AttentionShape
from askmany.kernels.vendor import FlashDocumentPass, FlashInferDocumentPass, available, flash_attention, flashinfer
from askmany.kernels.vendor_attention import VendorAttention
from tests.helpers.attention_cases import SMALL_FACTORS, Case, cases, id_of, split_world

GRID = cases(SMALL_FACTORS | {"dtype": ("fp32",), "head_dim": (64, 80)}, seed=8, at_least=0, limit_values=2**22)


class ReferencePass:
    """What a vendor's kernel does, with the plain reference; poisons what no node's query asked for, as kernels leave it unwritten."""

    def plan(self, rows: DocumentRows) -> None:
        pass

    def run(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, rows: DocumentRows, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = torch.full_like(q, float("nan")), torch.full(q.shape[:2], float("nan"), device=q.device)
        bounds = [0, q.shape[0]] if rows.whole else rows.bounds.tolist()
        for node, length in enumerate(rows.tables.node_length.tolist()):
            span = slice(bounds[node], bounds[node + 1])
            k, v = (pages[rows.pages[node].long()].flatten(0, 1)[:length] for pages in (k_pages, v_pages))
            out[span], lse[span] = reference.attend(q[span], k, v, scale)
        return out, lse


@pytest.mark.parametrize("case", GRID, ids=id_of)
def test_equals_the_oracle(case: Case, device: str) -> None:
    world, batch = split_world(case, seed=len(str(case)), device=device)
    shape = AttentionShape(*case.heads, case.head_dim, case.page_size, case.torch_dtype)
    limits = StepLimits(rows=world.q.shape[0] + 3, streams=len(batch.private) + 2, nodes=max(1, len(batch.shared)), pages=2**14)
    attention = VendorAttention(
        shape, limits, world.q.device, ReferencePass(), levels=1 if case.levels == 1 else 3, node_pages=70, rows_per_stream=case.rows
    )
    attention.load(batch)
    attention.plan.check()
    lse = torch.empty(world.q.shape[:2], device=device)
    out = attention.run(world.q, world.k_cache, world.v_cache, case.scale, lse=lse)
    want, want_lse = world.truth()
    bound = max(1e-5, 2 * relative_error(world.sdpa(torch.float32), want)) if case.peak else 1e-5
    assert relative_error(out, want) < bound
    assert lse_error(lse, want_lse) < 1e-5
    assert not bool(out[~world.live].any())


@pytest.mark.skipif(flash_attention() is not None or flashinfer() is not None, reason="the packages are installed here")
def test_absent_packages_are_a_clean_no(device: str) -> None:
    assert available(torch.device(device), torch.bfloat16) == ()
    with pytest.raises(RuntimeError, match="FlashAttention-3 is not installed"):
        FlashDocumentPass()
    with pytest.raises(RuntimeError, match="FlashInfer is not installed"):
        FlashInferDocumentPass(AttentionShape(4, 4, 64, 16, torch.bfloat16), torch.device(device))


def test_fp32_has_no_vendor() -> None:
    assert available(torch.device("cuda"), torch.float32) == ()
