"""Which of several attentions is fastest on this GPU for a step like the coming ones: measured at start-up, never guessed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from askmany.kernels.stream_attention import StreamAttention
from askmany.kernels.tables import NodeEntry, StreamEntry
from askmany.kernels.vendor_attention import VendorAttention


def elapsed_ms(work: Callable[[], None], repeats: int) -> float:
    """Milliseconds on the GPU's clock for `repeats` calls of `work`; waits for them."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(repeats):
        work()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop))


def fastest(
    candidates: Mapping[str, StreamAttention | VendorAttention], document_tokens: int, streams: int, private_tokens: int
) -> tuple[str, dict[str, float]]:
    """Time every candidate on a made-up step of one document and `streams` streams; the best name and all times in microseconds a call.

    Each runs in a captured graph. Candidates must share one shape; limits must admit the step. Overwrites the candidates' tables.
    """
    times = {name: _time_us(candidate, document_tokens, streams, private_tokens) for name, candidate in candidates.items()}
    return min(times, key=lambda name: times[name]), times


def _time_us(attention: StreamAttention | VendorAttention, document: int, streams: int, private: int) -> float:
    shape, device = attention.shape, attention.tables.device
    page = shape.page_size
    pages, each = -(-document // page), -(-private // page)
    own = [range(pages + i * each, pages + (i + 1) * each) for i in range(streams)]
    attention.tables.load([NodeEntry(document, range(pages))], [StreamEntry(i, 1, private, own[i], (0,)) for i in range(streams)])
    attention.plan.build()
    cache = torch.randn(2, (pages + streams * each) * page, shape.kv_heads, shape.head_dim, device=device).to(shape.dtype)
    q = torch.randn(streams, shape.q_heads, shape.head_dim, device=device).to(shape.dtype)
    scale = shape.head_dim**-0.5
    for _ in range(3):
        attention.run(q, cache[0], cache[1], scale)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            attention.run(q, cache[0], cache[1], scale)
    graph.replay()
    return elapsed_ms(graph.replay, 10) * 10.0  # ten calls a replay, ten replays
