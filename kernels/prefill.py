"""Attention of document prefill in the same framework: a chunk of a node's own tokens, causal, over its ancestors' nodes.

A chunk is a stream whose private run is the node's own tokens stored so far and whose path is the node's ancestors, so the work list,
the kernels and the merge are those of `stream_attention`; only the tiles differ (every row tile is full) and shared ancestors are rare.
Serves a GPU without a vendor kernel; several chunks, of one document or of many, go in one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from askmany.kernels.plan import Chunking
from askmany.kernels.stream_attention import StreamAttention
from askmany.kernels.tables import NodeEntry, StepLimits, StreamEntry
from askmany.kernels.tiles import AttentionShape


@dataclass(frozen=True, slots=True)
class ChunkEntry:
    """Rows `row .. row + row_count - 1` are the last tokens of the node's `length` stored tokens in `pages`, chunk included.

    `ancestors` lists indices of the nodes above it, which every row sees whole.
    """

    row: int
    row_count: int
    length: int
    pages: Sequence[int]
    ancestors: Sequence[int] = ()


class PrefillAttention:
    """Kernel, work list and workspace for steps of at most `limits.rows` prefill tokens in `limits.streams` chunks."""

    def __init__(self, shape: AttentionShape, limits: StepLimits, device: torch.device, chunking: Chunking | None = None) -> None:
        rows = max(1, limits.rows // limits.streams)
        self._attention = StreamAttention(shape, limits, device, node_rows=rows, rows_per_stream=rows, chunking=chunking)

    def load(self, nodes: Sequence[NodeEntry], chunks: Sequence[ChunkEntry]) -> None:
        """Describe the step and build its work list. Raises ValueError, naming the entry, for what does not fit."""
        streams = []
        for index, chunk in enumerate(chunks):
            if not 0 < chunk.row_count <= chunk.length:
                raise ValueError(f"chunk {index} has {chunk.row_count} rows but {chunk.length} stored tokens")
            streams.append(StreamEntry(chunk.row, chunk.row_count, chunk.length, chunk.pages, chunk.ancestors))
        self._attention.tables.load(nodes, streams)
        self._attention.plan.build()

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Tensor:
        """Attention of one layer: shapes and meaning as `StreamAttention.run`; the chunks' own K and V are already stored."""
        return self._attention.run(q, k_cache, v_cache, scale, out, lse)

    def check(self) -> None:
        """Synchronise and raise RuntimeError if a step did not fit the work list."""
        self._attention.plan.check()
