"""The check of the published kernel (arXiv 2611.15130) on a GPU, for both layouts, with keys written by `store`.

Documents of 37, 300 and 1,000 tokens, 1 to 64 streams, prefill of the questions and four decode steps, bf16: the largest absolute error
against the oracle stays below 0.009.
"""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from askmany.kernels.layout import MaskedBatch, MaskedItem, PrivateItem, SharedItem, SplitBatch
from askmany.kernels.oracle import EVERYONE, Tokens, dense_attention, visible_by_rule
from askmany.kernels.plan import Chunking
from askmany.kernels.store import store, store_ids
from askmany.kernels.stream_attention import StreamAttention
from askmany.kernels.stream_mask import plan_mask, stream_mask
from askmany.kernels.tables import StepLimits
from askmany.kernels.tiles import AttentionShape

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
BOUND = 0.009
PAGE, D = 16, 128
QUESTIONS = (12, 5, 31, 1, 8)  # tokens of the streams' questions, in turn


class Conversation:
    """Streams over one document, fed step by step: every token has a row of `k`, `v` in the order of feeding, and a place
    for the oracle."""

    def __init__(self, document: int, streams: int, heads: tuple[int, int]) -> None:
        self.heads, self.document = heads, document
        self.generator = torch.Generator(device="cuda").manual_seed(document * 100 + streams)
        self.lengths = [0] * streams
        self.k, self.v = self.normal(document, heads[1]), self.normal(document, heads[1])
        self.places = [(EVERYONE, i) for i in range(document)]

    def normal(self, count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, D, generator=self.generator, device="cuda").to(torch.bfloat16)

    def feed(self, counts: list[int]) -> tuple[Tensor, Tensor, Tensor, list[tuple[int, int]]]:
        """`counts[s]` new tokens of each stream, stream by stream: q, k, v of the rows and their (stream, position)."""
        rows = [(s, self.document + self.lengths[s] + i) for s, count in enumerate(counts) for i in range(count)]
        k, v = self.normal(len(rows), self.heads[1]), self.normal(len(rows), self.heads[1])
        self.k, self.v = torch.cat([self.k, k]), torch.cat([self.v, v])
        self.places += rows
        self.lengths = [a + b for a, b in zip(self.lengths, counts, strict=True)]
        return self.normal(len(rows), self.heads[0]), k, v, rows

    def truth(self, q: Tensor, rows: list[tuple[int, int]]) -> Tensor:
        visible = visible_by_rule(_tokens(rows), _tokens(self.places))
        return dense_attention(q, self.k, self.v, visible, D**-0.5)[0]


def _tokens(places: list[tuple[int, int]]) -> Tokens:
    stream, position = torch.tensor(places, device="cuda").reshape(-1, 2).T
    same = torch.zeros_like(stream)
    return Tokens(same, same, stream, position)


def _steps(streams: int) -> list[list[int]]:
    return [[QUESTIONS[s % len(QUESTIONS)] for s in range(streams)], *[[1] * streams for _ in range(4)]]


def _empty_caches(slots: int, heads: int) -> tuple[Tensor, Tensor]:
    cache = torch.full((2, slots, heads, D), float("nan"), dtype=torch.bfloat16, device="cuda")
    return cache[0], cache[1]


@pytest.mark.parametrize("heads", [(32, 32), (28, 4)], ids=str)
@pytest.mark.parametrize("streams", [1, 4, 16, 64])
@pytest.mark.parametrize("document", [37, 300, 1000])
def test_interleaved_layout(document: int, streams: int, heads: tuple[int, int]) -> None:
    talk = Conversation(document, streams, heads)
    total = document + streams * 40
    order = torch.randperm(total, device="cuda")
    k_cache, v_cache = _empty_caches(total, heads[1])
    slot_sid = torch.full((total,), 7, dtype=torch.int32, device="cuda")
    store(talk.k, talk.v, k_cache, v_cache, order[:document])
    store_ids(torch.full((document,), EVERYONE, device="cuda"), slot_sid, order[:document])
    used = document
    for counts in _steps(streams):
        q, k, v, rows = talk.feed(counts)
        slots = order[: used + len(rows)]
        q_sid = torch.tensor([s for s, _ in rows], dtype=torch.int32, device="cuda")
        batch = MaskedBatch((MaskedItem(0, len(rows), slots),), q_sid, slot_sid)
        out, _ = stream_mask(q, k, v, k_cache, v_cache, slot_sid, plan_mask(batch, 4), D**-0.5)
        store(k, v, k_cache, v_cache, slots[used:])
        store_ids(q_sid, slot_sid, slots[used:])
        used += len(rows)
        assert float((out.double() - talk.truth(q, rows)).abs().max()) < BOUND


@pytest.mark.parametrize("heads", [(32, 32), (28, 4)], ids=str)
@pytest.mark.parametrize("streams", [1, 4, 16, 64])
@pytest.mark.parametrize("document", [37, 300, 1000])
def test_split_layout(document: int, streams: int, heads: tuple[int, int]) -> None:
    talk = Conversation(document, streams, heads)
    document_pages, each = -(-document // PAGE), 3
    pages = torch.randperm(document_pages + streams * each, device="cuda")
    slots = (pages[:, None] * PAGE + torch.arange(PAGE, device="cuda")).reshape(-1)
    own = [slots[(document_pages + s * each) * PAGE :][: each * PAGE] for s in range(streams)]
    k_cache, v_cache = _empty_caches(len(slots), heads[1])
    store(talk.k, talk.v, k_cache, v_cache, slots[:document])
    shape = AttentionShape(*heads, D, PAGE, torch.bfloat16)
    limits = StepLimits(rows=streams * 31, streams=streams, nodes=1, pages=len(pages))
    kernel = StreamAttention(shape, limits, torch.device("cuda"), chunking=Chunking(threshold_bytes=0))
    for counts in _steps(streams):
        before = list(talk.lengths)
        q, k, v, rows = talk.feed(counts)
        new = torch.cat([own[s][start : start + count] for s, (start, count) in enumerate(zip(before, counts, strict=True))])
        store(k, v, k_cache, v_cache, new)
        starts = list(accumulate(counts, initial=0))
        private = tuple(PrivateItem(starts[s], count, own[s][: talk.lengths[s]]) for s, count in enumerate(counts))
        kernel.load(SplitBatch((SharedItem(torch.arange(len(rows), device="cuda"), slots[:document]),), private))
        kernel.plan.check()
        out = kernel.run(q, k_cache, v_cache, D**-0.5)
        assert float((out.double() - talk.truth(q, rows)).abs().max()) < BOUND
