"""Attention inside one rank by our own kernels: the `block_attention` interface over `StreamAttention`, with pages of one slot.

Rows that see the same shared items become one stream of the work list; rows without keys of their own are streams of length 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from askmany.kernels.block_attention import Attend, added
from askmany.kernels.layout import PrivateItem, SharedItem, SplitBatch
from askmany.kernels.merge_into import Part
from askmany.kernels.stream_attention import StreamAttention
from askmany.kernels.tables import LEVELS, NodeEntry, StepLimits, StreamEntry
from askmany.kernels.tiles import AttentionShape


class TritonBlocks:
    """`StreamAttention` objects, one a prepared batch. `shape.page_size` must be 1."""

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        if shape.page_size != 1:
            raise ValueError(f"blocks are addressed by slot: page_size must be 1, not {shape.page_size}")
        self._shape, self._device = shape, device

    def prepare(self, batch: SplitBatch, rows: int) -> Attend | None:
        """See `BlockAttention`."""
        nodes, streams = entries(batch)
        if not any(stream.length for stream in streams) and not any(node.length for node in nodes):
            return None
        pages = sum(node.length for node in nodes) + sum(stream.length for stream in streams)
        limits = StepLimits(rows=rows, streams=len(streams), nodes=max(1, len(nodes)), pages=max(1, pages))
        widest = max(stream.row_count for stream in streams)
        attention = StreamAttention(self._shape, limits, self._device, node_rows=rows, rows_per_stream=widest)
        attention.tables.load(nodes, streams)
        attention.plan.build()

        def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, into: Part | None = None) -> Part:
            out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
            attention.run(q, k, v, scale, out, lse)
            return added((out, lse), into)

        return attend


def entries(batch: SplitBatch) -> tuple[list[NodeEntry], list[StreamEntry]]:
    """Nodes and streams for `StepTables.load`: each run of consecutive rows with one private item and one set of shared items."""
    shared = [item for item in batch.shared if len(item.rows) and len(item.slots)]
    owner: dict[int, PrivateItem] = {}
    for item in batch.private:
        owner.update(dict.fromkeys(range(item.row_start, item.row_start + item.row_count), item))
    seen: dict[int, tuple[int, ...]] = dict.fromkeys(owner, ())
    for index, one in enumerate(shared):
        for row in one.rows.tolist():
            seen[row] = (*seen.get(row, ()), index)
    nodes: list[NodeEntry] = []
    made: dict[tuple[int, ...], list[int]] = {}
    streams = []
    for start, stop in _runs(seen, owner):
        path = made.get(seen[start])
        if path is None:
            path = made[seen[start]] = _nodes_for([shared[i] for i in seen[start]], seen[start], nodes, made)
        streams.append(_stream(start, stop, owner.get(start), path))
    return nodes, streams


def _runs(seen: dict[int, tuple[int, ...]], owner: dict[int, PrivateItem]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for row in sorted(seen):
        last = runs[-1] if runs else None
        if last and last[1] == row and seen[row] == seen[row - 1] and owner.get(row) is owner.get(row - 1):
            runs[-1] = (last[0], row + 1)
        else:
            runs.append((row, row + 1))
    return runs


def _nodes_for(
    items: Sequence[SharedItem], key: tuple[int, ...], nodes: list[NodeEntry], made: dict[tuple[int, ...], list[int]]
) -> list[int]:
    """Node indices for these shared items; those beyond the kernel's levels are joined to one node."""
    path = []
    for index, item in zip(key[: LEVELS - 1], items, strict=False):
        single = (index,)
        if single not in made:
            made[single] = [len(nodes)]
            nodes.append(_node([item]))
        path += made[single]
    rest = items[LEVELS - 1 :]
    if rest:
        path.append(len(nodes))
        nodes.append(_node(rest))
    return path


def _node(items: Sequence[SharedItem]) -> NodeEntry:
    slots = torch.cat([item.slots for item in items]).tolist()
    return NodeEntry(len(slots), slots)


def _stream(start: int, stop: int, item: PrivateItem | None, path: Sequence[int]) -> StreamEntry:
    if item is None:
        return StreamEntry(start, stop - start, 0, [], path)
    length = len(item.slots) - item.row_count + (stop - item.row_start)
    return StreamEntry(start, stop - start, length, item.slots[:length].tolist(), path)
