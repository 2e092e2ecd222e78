"""Other libraries' document passes on a GPU, where they are installed: several documents, levels and lone streams, graphs, measuring."""

from __future__ import annotations

import pytest
import torch

from askmany.kernels.measure import fastest
from askmany.kernels.oracle import lse_error, relative_error
from askmany.kernels.stream_attention import StreamAttention
from askmany.kernels.tables import StepLimits
from askmany.kernels.tiles import AttentionShape
from askmany.kernels.vendor import DocumentPass, FlashDocumentPass, FlashInferDocumentPass, available
from askmany.kernels.vendor_attention import VendorAttention
from tests.helpers.attention_cases import Case, split_world

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
CASES = [
    Case("bf16", 128, (28, 4), 16, 4097, "ragged", 64, 2, 3, 1, 1, 5, 0),
    Case("bf16", 128, (32, 32), 7, 511, 65, 64, 1, 0, 1, 1, 0, 80),
    Case("bf16", 128, (12, 2), 16, 65, 64, 16, 5, 3, 3, 4, 5, 0),
]


def document_pass(name: str, shape: AttentionShape) -> DocumentPass:
    if name not in available(torch.device("cuda"), shape.dtype):
        pytest.skip(f"{name} is not installed or not for this GPU")
    return FlashDocumentPass() if name == "fa3" else FlashInferDocumentPass(shape, torch.device("cuda"))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", ["fa3", "flashinfer"])
def test_equals_the_oracle_and_its_own_replay(name: str, case: Case) -> None:
    world, batch = split_world(case, seed=1, device="cuda")
    shape = AttentionShape(*case.heads, case.head_dim, case.page_size, case.torch_dtype)
    limits = StepLimits(world.q.shape[0] + 3, len(batch.private) + 2, len(batch.shared), 2**14)
    levels = 1 if case.levels == 1 else 3
    attention = VendorAttention(shape, limits, world.q.device, document_pass(name, shape), levels=levels, rows_per_stream=case.rows)
    attention.load(batch)
    attention.plan.check()
    lse = torch.empty(world.q.shape[:2], device="cuda")
    out = attention.run(world.q, world.k_cache, world.v_cache, case.scale, lse=lse)
    want, want_lse = world.truth()
    assert relative_error(out, want) < 4e-3
    assert lse_error(lse, want_lse) < 1e-5
    assert not bool(out[~world.live].any())
    graph, again = torch.cuda.CUDAGraph(), torch.full_like(out, float("nan"))
    with torch.cuda.graph(graph):
        attention.run(world.q, world.k_cache, world.v_cache, case.scale, again)
    graph.replay()
    assert torch.equal(again, out)


def test_the_fastest_is_found_by_measuring() -> None:
    shape = AttentionShape(28, 4, 128, 64, torch.bfloat16)
    limits, device = StepLimits(16, 16, 1, 1024), torch.device("cuda")
    candidates: dict[str, StreamAttention | VendorAttention] = {"stream": StreamAttention(shape, limits, device)}
    for name in available(device, shape.dtype):
        candidates[name] = VendorAttention(shape, limits, device, document_pass(name, shape), levels=1, node_pages=128)
    best, times = fastest(candidates, document_tokens=8192, streams=16, private_tokens=96)
    assert set(times) == set(candidates)
    assert times[best] == min(times.values())
    assert all(1.0 < time < 10_000.0 for time in times.values())
